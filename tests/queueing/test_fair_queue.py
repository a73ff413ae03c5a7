"""Weighted fair queueing by tokens."""

import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.queueing.fair_queue import FairQueue


class Item:
    """Something that waits; two are never equal."""

    def __init__(self, flow: str = "", cost: float = 1.0, weight: float = 1.0, **more: Any) -> None:
        self.flow, self.cost, self.weight, self.more = flow, cost, weight, more

    def push(self, queue: "FairQueue[Item]") -> "Item":
        queue.push(self, flow=self.flow, weight=self.weight, cost=self.cost, **self.more)
        return self


def served(queue: FairQueue[Item], count: int = 10**6, blocked: Any = ()) -> list[Item]:
    """Take items out as a server with room for all would."""
    found: list[Item] = []
    while len(found) < count and (queued := queue.pop(blocked)) is not None:
        queue.serve(queued.flow, queued.weight, queued.cost)
        found.append(queued.item)
    return found


def test_one_flow_is_first_come_first_served() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item(cost=c).push(queue) for c in (5, 1, 9, 2)]
    assert served(queue) == items
    assert len(queue) == 0


def test_the_more_urgent_first() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item("a", priority=p).push(queue) for p in (0, -1, 5, 0, -1)]
    assert served(queue) == [items[k] for k in (1, 4, 0, 3, 2)]


@pytest.mark.parametrize("seed", range(5))
def test_flows_that_wait_share_tokens_by_weight(seed: int) -> None:
    """However many requests each has, and however long they are."""
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
    longest = {flow: rng.choice([10, 100, 1000]) for flow in weights}
    queue: FairQueue[Item] = FairQueue()
    for flow, weight in weights.items():
        for _ in range(40_000 // longest[flow] * 10):
            Item(flow, rng.randint(1, longest[flow]), weight).push(queue)
    got: Counter[str] = Counter()
    while min(Counter(q.flow for q in queue).get(f, 0) for f in weights) > 0 and len(got) >= 0:
        for item in served(queue, 50):
            got[item.flow] += int(item.cost)
        shares = [got[flow] / weight for flow, weight in weights.items()]
        if got.total() > 20_000:
            break
    # The bound of start-time fair queueing: one longest request of each of the two flows.
    for one in weights:
        for other in weights:
            gap = abs(got[one] / weights[one] - got[other] / weights[other])
            assert gap <= longest[one] / weights[one] + longest[other] / weights[other], shares


def test_a_flow_that_comes_late_waits_for_one_request_only() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(60):
        Item("flood", 100).push(queue)
    served(queue, 10)
    late = Item("late", 100).push(queue)
    assert late in served(queue, 2)


def test_an_idle_flow_saves_nothing_up() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(1000):
        queue.serve("busy", 1.0, 100)  # there was room
    mine = [Item("idle", 100).push(queue) for _ in range(10)]
    theirs = [Item("busy", 100).push(queue) for _ in range(10)]
    first = served(queue, 10)
    assert 4 <= sum(item in mine for item in first) <= 6
    assert 4 <= sum(item in theirs for item in first) <= 6


def test_costs_are_corrected() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(20):
        Item("a", 10).push(queue)
        Item("b", 10).push(queue)
    served(queue, 2)
    queue.correct("a", 1.0, 50)  # its answer was five times as long
    assert [item.flow for item in served(queue, 5)] == ["b"] * 5


def test_a_blocked_lane_holds_up_nobody_else() -> None:
    queue: FairQueue[Item] = FairQueue()
    held = Item("a", lane="full", priority=-9).push(queue)
    free = Item("b", lane="free").push(queue)
    assert served(queue, blocked={"full"}) == [free]
    assert held in queue
    queued = queue.pop()
    assert queued is not None
    assert queued.item is held


def test_what_is_put_back_keeps_its_place() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item(since=k).push(queue) for k in range(3)]
    queued = queue.pop()
    assert queued is not None
    queue.put_back(queued)
    assert [q.since for q in queue] == [0, 1, 2]
    assert served(queue) == items


def test_who_gives_up_its_place() -> None:
    queue: FairQueue[Item] = FairQueue()
    assert queue.victim("a", 1, 1, 0) is None
    flood = [Item("flood", 10).push(queue) for _ in range(5)]
    assert queue.victim("flood", 1, 10, 0) is None  # it floods the queue itself
    assert queue.victim("other", 1, 10, 0) is flood[-1]
    assert queue.victim("other", 1, 10, 1) is None  # less urgent than all that wait
    assert queue.victim("flood", 1, 10, -1) is flood[-1]
    assert queue.victim("other", 0.1, 10, 0) is None  # worth less than what waits
    lazy = Item("lazy", 1, priority=7).push(queue)
    assert queue.victim("flood", 1, 10, 0) is lazy


def test_flows_are_forgotten() -> None:
    queue: FairQueue[Item] = FairQueue()
    for k in range(10_000):
        queue.serve(f"flow-{k}", 1.0, 1.0)
    assert len(queue._served) < 1000


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "pop", "remove", "back", "correct", "victim"]),
            st.integers(0, 3), st.integers(1, 50), st.integers(-1, 1), st.integers(0, 2),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_nothing_is_lost_and_nothing_comes_twice(
    steps: list[tuple[str, int, int, int, int]],
) -> None:
    """Against a list: whatever is pushed comes out once, the most urgent of an open lane first."""
    queue: FairQueue[Item] = FairQueue()
    waiting: list[Item] = []
    weights = (1.0, 2.0, 0.5, float(Fraction(1, 3)))
    for what, flow, cost, priority, lane in steps:
        name, weight = f"f{flow}", weights[flow]
        if what == "push":
            waiting.append(Item(name, cost, weight, priority=priority, lane=lane).push(queue))
        elif what in ("pop", "back"):
            blocked = {lane}
            queued = queue.pop(blocked)
            open_ = [i for i in waiting if i.more["lane"] not in blocked]
            assert (queued is None) == (not open_)
            if queued is None:
                continue
            assert queued.priority == min(i.more["priority"] for i in open_)
            if what == "back":
                queue.put_back(queued)
                again = queue.pop(blocked)
                assert again is not None
                assert again.item is queued.item
            queue.serve(queued.flow, queued.weight, queued.cost)
            waiting.remove(queued.item)
        elif what == "remove" and waiting:
            item = waiting.pop(flow % len(waiting))
            assert queue.remove(item)
            assert not queue.remove(item)
        elif what == "correct":
            queue.correct(name, weight, float(cost - 25))
        elif what == "victim" and waiting:
            victim = queue.victim(name, weight, cost, priority)
            assert victim is None or victim in waiting
        assert len(queue) == len(waiting)
        assert [q.item for q in queue] == waiting
    assert sorted(map(id, served(queue))) == sorted(map(id, waiting))


def test_an_overdue_item_of_a_blocked_lane_does_not_hold_up_others() -> None:
    queue: FairQueue[Item] = FairQueue()
    first, second, third = (
        Item("a", lane=lane, since=since).push(queue)
        for lane, since in (("x", 0), ("y", 1), ("y", 5))
    )
    assert queue.pop_overdue(10, 20) is None
    overdue = queue.pop_overdue(10, 8, {"x"})
    assert overdue is not None
    assert overdue.item is second
    assert (overdue.overtook, overdue.why) == (1, "room")
    assert queue.pop_overdue(10, 8, {"x"}) is None
    assert served(queue) == [first, third]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "remove", "put back"]), st.integers(0, 9)))
)
def test_who_was_overtaken_by_how_many(steps: list[tuple[str, int]]) -> None:
    queue: FairQueue[Item] = FairQueue()
    waiting: list[Item] = []  # in the order of arrival
    overtaken: Counter[Item] = Counter()
    for step, n in steps:
        if step == "push":
            waiting.append(Item("ab"[n % 2], 1 + n, key=n, priority=n % 3).push(queue))
        elif step == "remove" and waiting:
            assert queue.remove(waiting.pop(n % len(waiting)))
        elif step in ("pop", "put back"):
            queued = queue.pop()
            if queued is None:
                continue
            place = waiting.index(queued.item)
            assert queued.overtook == place
            assert bool(queued.why) == (place > 0)
            assert queued.overtaken == overtaken[queued.item]
            if step == "put back":
                queue.put_back(queued)
                continue
            overtaken.update(waiting[:place])
            waiting.pop(place)
            queue.serve(queued.flow, queued.weight, queued.cost)
        for queued in queue:
            assert queue.overtaken(queued) == overtaken[queued.item]


class Slow:
    """The definition of whose turn it is, without any structure to find it fast."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Item]] = []
        self.served: dict[str, float] = {}
        self.now = 0.0

    def push(self, item: Item, number: int) -> None:
        if all(other.flow != item.flow for _, other in self.waiting):
            self.served[item.flow] = max(self.served.get(item.flow, 0.0), self.now)
        self.waiting.append((number, item))

    def next(self, blocked: set[str]) -> Item | None:
        def turn(entry: tuple[int, Item]) -> tuple[int, float, int, int]:
            number, item = entry
            return item.more["priority"], self.served[item.flow], item.more["key"], number

        free = [entry for entry in self.waiting if entry[1].more["lane"] not in blocked]
        return min(free, key=turn)[1] if free else None

    def remove(self, item: Item) -> None:
        self.waiting = [entry for entry in self.waiting if entry[1] is not item]

    def serve(self, flow: str, weight: float, cost: float) -> None:
        self.now = max(self.served.get(flow, 0.0), self.now)
        self.served[flow] = self.now + cost / weight

    def correct(self, flow: str, weight: float, more: float) -> None:
        if flow in self.served:
            self.served[flow] += more / weight


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "push", "pop", "try", "remove", "serve", "correct"]),
            st.integers(0, 10**6),
        ),
        max_size=120,
    )
)
def test_the_next_one_is_the_one_of_the_definition(steps: list[tuple[str, int]]) -> None:
    queue: FairQueue[Item] = FairQueue()
    slow = Slow()
    for number, (what, seed) in enumerate(steps):
        rng = random.Random(seed)
        flow, weight = rng.choice("abcde"), rng.choice([0.5, 1.0, 3.0])
        blocked = {lane for lane in "xyz" if rng.random() < 0.2}
        if what == "push":
            given = {"priority": rng.choice([0, 0, 1]), "key": rng.randrange(4)}
            item = Item(flow, rng.randrange(1, 50), weight, lane=rng.choice("xyz"), **given)
            slow.push(item.push(queue), number)
        elif what in ("pop", "try"):
            queued = queue.pop(blocked)
            assert (queued and queued.item) is slow.next(blocked)
            if queued is None:
                continue
            if what == "try":
                queue.put_back(queued)
                continue
            slow.remove(queued.item)
            for each in (queue, slow):
                each.serve(queued.flow, queued.weight, queued.cost)
        elif what == "remove" and slow.waiting:
            gone = rng.choice(slow.waiting)[1]
            assert queue.remove(gone)
            slow.remove(gone)
        elif what == "serve":
            cost = rng.randrange(1, 50)
            for each in (queue, slow):
                each.serve(flow, weight, cost)
        elif what == "correct":
            more = rng.randrange(-40, 40)
            for each in (queue, slow):
                each.correct(flow, weight, more)
    while (queued := queue.pop()) is not None:
        assert queued.item is slow.next(set())
        slow.remove(queued.item)
        for each in (queue, slow):
            each.serve(queued.flow, queued.weight, queued.cost)
    assert not slow.waiting


def test_a_turn_costs_the_same_however_many_flows_wait() -> None:
    """Entries of turns that have changed do not pile up."""
    queue: FairQueue[Item] = FairQueue()
    for i in range(300):
        Item(f"flow {i}").push(queue)
    for i in range(20_000):
        queue.correct(f"flow {i % 300}", 1.0, 1.0)
    (rank,) = (r for ranks in queue._lanes.values() for r in ranks.values())
    assert len(rank._turns) < 1000
