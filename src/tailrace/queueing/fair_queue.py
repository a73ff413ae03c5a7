"""Weighted fair queueing by tokens (start-time fair queueing, Goyal et al. 1996).

Requests of one *flow* (a client) wait in the order of their keys, equal ones in that of their
arrival. Among flows the one goes next that was served least, in tokens per weight, since it began
to wait. A flow that was idle starts
level with those that wait: it neither saves up a claim nor owes anything for what it used while
there was room. A more urgent priority goes before all others.

Requests that not every server can take wait in different *lanes* (for instance one per model), so
that a full server holds up only those that need it. A flow's account is the same in all lanes.

The algorithm knows neither clocks nor sockets. Costs are tokens; they may be corrected later, when
the length of an answer is known.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Lane = Hashable
#: Idle flows that are remembered.
_MANY_FLOWS = 256
#: Items that left without being served and are remembered before a clean-up.
_MANY_GONE = 1024
#: Turns of flows that have changed and are remembered before a clean-up.
_MANY_TURNS = 64
#: Why an item goes before an earlier one: there is room for it only (another lane), it is more
#: urgent, its flow has been served less, or its key is lower.
OTHER_LANE, URGENCY, FAIR_SHARE, ORDER = OVERTAKES = ("room", "priority", "fair_share", "order")


@dataclass(slots=True, eq=False)
class QueuedItem(Generic[T]):
    """An item in the queue."""

    item: T
    flow: str
    weight: float
    cost: float
    """Expected tokens."""
    priority: int
    """Lower goes first."""
    key: int
    """Lower goes first among the items of one flow."""
    lane: Lane
    since: float
    """When it was queued, on the caller's clock."""
    number: int
    """Position in the order of arrival."""
    overtook: int = 0
    """Earlier ones that still waited when it was taken out."""
    why: str = ""
    """Why it went before the earliest of these, one of OVERTAKES; empty: it overtook none."""
    overtaken: int = 0
    """Later ones that were served before it."""


class _Rank:
    """Items of one lane and priority, and which of their flows goes next.

    A heap holds each flow's turn: what it was served, and its first item. A turn that changes is
    entered again, and the old entry is dropped when it comes to the top: a decision looks at a few
    entries, however many flows wait.
    """

    __slots__ = ("_served", "_turns", "flows")

    def __init__(self, served: dict[str, float]) -> None:
        """``served``: tokens per weight, by flow; the queue's."""
        self.flows: dict[str, list[tuple[int, int]]] = {}
        """(key, number) of a flow's items, ascending; no flow is empty."""
        self._served = served
        self._turns: list[tuple[float, int, int, str]] = []

    def enter(self, flow: str) -> None:
        """A flow's first item, or what it was served, has changed."""
        turns, flows = self._turns, self.flows
        heapq.heappush(turns, (self._served[flow], *flows[flow][0], flow))
        if len(turns) > _MANY_TURNS + 2 * len(flows):
            turns[:] = [(self._served[name], *items[0], name) for name, items in flows.items()]
            heapq.heapify(turns)

    def first(self) -> tuple[float, int, int]:
        """Return what the flow that goes next was served, and its item's key and number."""
        turns, flows, served = self._turns, self.flows, self._served
        while True:
            tokens, key, number, flow = turns[0]
            items = flows.get(flow)
            if items is not None and items[0] == (key, number) and served[flow] == tokens:
                return tokens, key, number
            heapq.heappop(turns)


class FairQueue(Generic[T]):
    """Items that wait, by lane, priority and flow."""

    def __init__(self) -> None:
        self.items: dict[int, QueuedItem[T]] = {}
        """All that wait, by number; to be read only."""
        self._arrivals: list[int] = []  # their numbers, ascending
        self._numbers: dict[int, int] = {}  # id of an item -> its number
        self._lanes: dict[Lane, dict[int, _Rank]] = {}  # by priority; without empty parts
        self._backlog: dict[str, set[_Rank]] = {}  # where items of a flow wait, by flow
        self._served: dict[str, float] = {}  # tokens per weight, by flow
        self._now = 0.0  # virtual time: what the flow served last had been served before
        self._next = 0
        self._gone: list[int] = []  # numbers that left without being served, ascending

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, item: T) -> bool:
        return id(item) in self._numbers

    def has_lane(self, lane: Lane) -> bool:
        """Whether something waits in a lane."""
        return lane in self._lanes

    def __iter__(self) -> Iterator[QueuedItem[T]]:
        """All that wait, in the order of their arrival."""
        return (self.items[number] for number in self._arrivals)

    def push(
        self, item: T, *, flow: str = "", weight: float = 1.0, cost: float = 1.0,
        priority: int = 0, key: int = 0, lane: Lane = None, since: float = 0.0,
    ) -> None:  # fmt: skip
        """Queue an item, behind the others of its flow, lane, priority and key."""
        queued = QueuedItem(item, flow, weight, cost, priority, key, lane, since, self._next)
        self._next += 1
        if flow not in self._backlog:
            self._served[flow] = max(self._served.get(flow, 0.0), self._now)
        self._insert(queued)

    def put_back(self, queued: QueuedItem[T]) -> None:
        """Queue what :meth:`pop` gave again, at its old place."""
        self._insert(queued)

    def _insert(self, queued: QueuedItem[T]) -> None:
        self.items[queued.number] = queued
        insort(self._arrivals, queued.number)
        self._numbers[id(queued.item)] = queued.number
        priorities = self._lanes.setdefault(queued.lane, {})
        rank = priorities.get(queued.priority)
        if rank is None:
            rank = priorities[queued.priority] = _Rank(self._served)
        flow, place = queued.flow, (queued.key, queued.number)
        items = rank.flows.setdefault(flow, [])
        insort(items, place)
        if items[0] == place:
            rank.enter(flow)
            if len(items) == 1:
                self._backlog.setdefault(flow, set()).add(rank)

    def pop(self, blocked: Collection[Lane] = ()) -> QueuedItem[T] | None:
        """Take out the item that goes next, of no ``blocked`` lane; None: there is none."""
        best: tuple[int, float, int, int] | None = None
        for lane, priorities in self._lanes.items():
            if lane in blocked:
                continue
            priority = min(priorities)
            turn = (priority, *priorities[priority].first())
            if best is None or turn < best:
                best = turn
        if best is None:
            return None
        return self._turn(self.items[best[-1]], blocked)

    def pop_overdue(
        self, now: float, max_wait_s: float, blocked: Collection[Lane] = ()
    ) -> QueuedItem[T] | None:
        """Take out the item that has waited longest, if that is ``max_wait_s`` or more.

        Those of ``blocked`` lanes do not count.
        """
        for queued in self:
            if queued.since + max_wait_s > now:
                return None
            if queued.lane not in blocked:
                return self._turn(queued, blocked)
        return None

    def _turn(self, queued: QueuedItem[T], blocked: Collection[Lane]) -> QueuedItem[T]:
        """Take out an item to be served, and note whom it overtakes and why."""
        queued.overtaken = self.overtaken(queued)
        self._take_out(queued)
        queued.why = self._why(queued, blocked) if queued.overtook else ""
        return queued

    def _why(self, queued: QueuedItem[T], blocked: Collection[Lane]) -> str:
        """Return why an item goes before the earliest of those that wait."""
        earliest = self.items[self._arrivals[0]]
        if earliest.lane in blocked:
            return OTHER_LANE
        if queued.priority < earliest.priority:
            return URGENCY
        return ORDER if queued.flow == earliest.flow else FAIR_SHARE

    def overtaken(self, queued: QueuedItem[T]) -> int:
        """Return how many that came later were served before an item that waits."""
        later = self._next - 1 - queued.number
        waiting = len(self._arrivals) - bisect_right(self._arrivals, queued.number)
        gone = len(self._gone) - bisect_right(self._gone, queued.number)
        return later - waiting - gone

    def remove(self, item: T) -> bool:
        """Take an item out of turn; False: it does not wait."""
        number = self._numbers.get(id(item))
        if number is None:
            return False
        self._take_out(self.items[number])
        self._forget(number)
        return True

    def _forget(self, number: int) -> None:
        """An item has left without being served: it has overtaken nobody."""
        if not self._arrivals:
            self._gone.clear()
            return
        insort(self._gone, number)
        if len(self._gone) > _MANY_GONE:
            del self._gone[: bisect_left(self._gone, self._arrivals[0])]

    def _take_out(self, queued: QueuedItem[T]) -> None:
        number, flow = queued.number, queued.flow
        del self.items[number], self._numbers[id(queued.item)]
        queued.overtook = bisect_left(self._arrivals, number)
        del self._arrivals[queued.overtook]
        priorities = self._lanes[queued.lane]
        rank = priorities[queued.priority]
        items = rank.flows[flow]
        at = bisect_left(items, (queued.key, number))
        del items[at]
        if items:
            if not at:
                rank.enter(flow)
            return
        del rank.flows[flow]
        if not rank.flows:
            del priorities[queued.priority]
            if not priorities:
                del self._lanes[queued.lane]
        self._backlog[flow].discard(rank)
        if not self._backlog[flow]:
            del self._backlog[flow]

    # What was served.

    def serve(self, flow: str, weight: float, cost: float) -> None:
        """Charge a flow for something that goes now, whether or not it had to wait."""
        served = max(self._served.get(flow, 0.0), self._now)
        self._now = served
        self._charge(flow, served + cost / weight)
        if len(self._served) > _MANY_FLOWS + 2 * len(self._backlog):
            self._forget_idle()

    def correct(self, flow: str, weight: float, more: float) -> None:
        """Something that a flow was charged for cost ``more`` tokens, fewer if negative."""
        if flow in self._served:
            self._charge(flow, self._served[flow] + more / weight)

    def _charge(self, flow: str, served: float) -> None:
        self._served[flow] = served
        for rank in self._backlog.get(flow, ()):
            rank.enter(flow)

    def _forget_idle(self) -> None:
        """Forget flows that do not wait; when they do again, they start level with the others."""
        for flow in [flow for flow in self._served if flow not in self._backlog]:
            del self._served[flow]

    # When there are too many.

    def victim(self, flow: str, weight: float, cost: float, priority: int) -> T | None:
        """Return which item should give up its place for a new one; None: the new one itself.

        The least urgent first; among these, the latest of the flow that has the most tokens per
        weight waiting, so that a flow that floods the queue pushes out only itself.
        """
        worst = max((p for ps in self._lanes.values() for p in ps), default=priority)
        if worst < priority:
            return None
        waiting: dict[str, float] = {}
        latest: dict[str, QueuedItem[T]] = {}
        for priorities in self._lanes.values():
            for name, items in priorities[worst].flows.items() if worst in priorities else ():
                last = self.items[max(number for _, number in items)]
                if name not in latest or last.number > latest[name].number:
                    latest[name] = last
                waiting[name] = waiting.get(name, 0.0) + sum(
                    self.items[n].cost / self.items[n].weight for _, n in items
                )
        if worst == priority:
            waiting[flow] = waiting.get(flow, 0.0) + cost / weight
        longest = max(waiting, key=lambda name: waiting[name])
        if worst == priority and waiting[longest] <= waiting[flow]:
            return None
        return latest[longest].item
