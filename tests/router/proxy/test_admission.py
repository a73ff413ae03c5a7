"""The queue, who is sent away, and the budget of retries."""

from typing import Any

from tailrace.router.proxy.admission import Queue, RetryBudget
from tailrace.router.settings import AdmissionSettings, RetrySettings


class Room:
    """So many may be sent."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.order: list[str] = []


class Item:
    def __init__(
        self, name: str, room: Room, priority: int = 0, flow: str = "", lane: str = "", key: int = 0
    ) -> None:
        self.name = name
        self.room = room
        self.priority, self.key = priority, key
        self.flow, self.weight, self.cost, self.lane = flow, 1.0, 1.0, lane
        self.why: str | None = None

    def admitted(self, queued: Any = None, *, overdue: bool = False) -> bool:
        if self.room.free == 0:
            return False
        self.room.free -= 1
        self.room.order.append(self.name)
        return True

    def shed(self, why: str) -> None:
        self.why = why


def test_most_urgent_first_then_first_come() -> None:
    room, queue = Room(), Queue(AdmissionSettings())
    for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", -1)):
        assert queue.push(Item(name, room, priority), 0)
    queue.pump(0)
    assert len(queue) == 5
    room.free = 3
    queue.pump(1)
    assert room.order == ["b", "e", "a"]
    room.free = 9
    queue.pump(2)
    assert room.order == ["b", "e", "a", "d", "c"]
    assert len(queue) == 0


def test_the_policys_order_holds_within_a_client_only() -> None:
    room, queue = Room(9), Queue(AdmissionSettings())
    for name, flow, key in (("a", "x", 5), ("b", "x", 1), ("c", "y", 9), ("d", "x", 1)):
        assert queue.push(Item(name, room, flow=flow, key=key), 0)
    queue.pump(0)
    assert room.order.index("b") < room.order.index("d") < room.order.index("a")


def test_who_has_waited_longest_goes_first_once_overdue() -> None:
    room, queue = Room(), Queue(AdmissionSettings())
    for at, (name, priority, key) in enumerate((("old", 9, 9), ("b", 0, 1), ("c", 0, 2))):
        assert queue.push(Item(name, room, priority, key=key), float(at))
    room.free = 2
    queue.pump(5.0, max_wait_s=5.0)
    assert room.order == ["old", "b"]
    assert [queued.item.name for queued in queue._waiting] == ["c"]


def test_a_full_queue_sheds_the_least_urgent() -> None:
    room, queue = Room(), Queue(AdmissionSettings(queue=2))
    items = [Item("a", room, 0), Item("b", room, 3), Item("c", room, 3), Item("d", room, 1)]
    assert queue.push(items[0], 0)
    assert queue.push(items[1], 0)
    assert not queue.push(items[2], 0)
    assert queue.push(items[3], 0)
    assert items[1].why is not None
    room.free = 9
    queue.pump(1)
    assert room.order == ["a", "d"]


def test_no_queue() -> None:
    queue = Queue(AdmissionSettings(queue=0))
    assert not queue.push(Item("a", Room(), -5), 0)


def test_who_waits_too_long_is_shed() -> None:
    room, queue = Room(), Queue(AdmissionSettings(max_wait_s=10))
    early, late = Item("a", room), Item("b", room)
    queue.push(early, 0)
    queue.push(late, 5)
    queue.pump(6)  # no room: it must not make them younger
    queue.sweep(10)
    assert early.why is None
    queue.sweep(10.5)
    assert early.why is not None
    assert late.why is None
    assert len(queue) == 1


def test_who_has_gone_is_passed_over() -> None:
    room, queue = Room(), Queue(AdmissionSettings())
    items = [Item(name, room) for name in "abc"]
    for item in items:
        queue.push(item, 0)
    queue.remove(items[0])
    queue.remove(items[0])
    queue.remove(items[2])
    assert len(queue) == 1
    room.free = 3
    queue.pump(0)
    assert room.order == ["b"]
    assert len(queue) == 0
    queue.push(items[0], 1)
    queue.pump(1)
    assert room.order == ["b", "a"]


def test_room_that_appears_while_one_is_sent() -> None:
    """A request that ends at once makes room again, within the call that sends it."""
    room, queue = Room(1), Queue(AdmissionSettings())

    class Instant(Item):
        def admitted(self, queued: Any = None, *, overdue: bool = False) -> bool:
            if not super().admitted():
                return False
            room.free += 1
            queue.pump(0)
            return True

    for name in "abcd":
        queue.push(Instant(name, room), 0)
    queue.pump(0)
    assert room.order == list("abcd")


def test_everybody_is_sent_away() -> None:
    room, queue = Room(), Queue(AdmissionSettings())
    items = [Item(name, room) for name in "ab"]
    for item in items:
        queue.push(item, 0)
    queue.clear("the end")
    assert [item.why for item in items] == ["the end", "the end"]
    assert len(queue) == 0


def test_retry_after_follows_queue_and_pace() -> None:
    room, queue = Room(), Queue(AdmissionSettings())
    assert queue.retry_after_s(0) == 1
    for _ in range(100):
        queue.push(Item("a", room), 0)
    room.free = 20
    queue.pump(0)
    assert 30 <= queue.retry_after_s(0) <= 60
    assert queue.retry_after_s(1e6) <= 60


def test_the_budget_is_a_share_of_requests() -> None:
    budget = RetryBudget(RetrySettings(budget=0.25, burst=2))
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    spent = 0
    for _ in range(100):
        budget.request()
        spent += budget.spend()
    assert spent == 25
    for _ in range(1000):
        budget.request()
    assert budget.left == 2


def test_no_budget() -> None:
    assert not RetryBudget(RetrySettings(burst=0)).spend()
