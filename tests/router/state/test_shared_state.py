"""Workers that read each other's books decide as one router would."""

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from router.fleets import LEDGER, Clock, backends, chat, new_chooser, send
from tailrace.config import Replica
from tailrace.errors import TailraceError
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.state.cluster import Fleet
from tailrace.router.state.shared_state import new_books
from tailrace.view.records import RECENT_WORK_S

SERVERS = backends(Replica(speed=1.5), Replica(), Replica(speed=0.5))
#: What does not depend on when each worker looked last.
EXACT = (*LEDGER, "finished", "finished_tokens", "oldest_sent", "sent_tokens", "sent_requests")


def workers(count: int, clock: Clock | None = None) -> list[Fleet]:
    books = new_books(SERVERS, count)
    return [Fleet(SERVERS, clock or Clock(), seat=books.of(number)) for number in range(count)]


def look(fleet: Fleet, asked: RequestBody | None = None, policy: str = "least_outstanding") -> int:
    """Let a worker decide; return what it thinks is cached where it would send the request."""
    decision = new_chooser(fleet, policy).choose(fleet.arrive(asked or chat("x")))
    assert decision is not None
    return decision.cached


def work_now(fleet: Fleet) -> NDArray[np.float64]:
    """Recent work, faded to this moment."""
    views = fleet.seen
    faded: NDArray[np.float64] = np.exp((views["recent_at"] - fleet.clock()) / RECENT_WORK_S)
    return views["recent_work"] * faded


def test_one_worker_alone_sees_what_one_router_sees() -> None:
    clock = Clock()
    (shared,) = workers(1, clock)
    alone = Fleet(SERVERS, clock)
    rng = np.random.default_rng(0)
    open_flights = []
    for i in range(60):
        clock.now += float(rng.exponential(0.3))
        text = f"{i % 7} " * int(rng.integers(1, 900))
        for fleet in (shared, alone):
            look(fleet, chat(text), "tailrace")
        np.testing.assert_array_equal(shared.seen, alone.seen)
        np.testing.assert_array_equal(shared.seen_routers, alone.seen_routers)
        replica = int(rng.integers(3))
        open_flights.append([send(fleet, chat(text), replica) for fleet in (shared, alone)])
        if len(open_flights) > 4:
            for flight in open_flights.pop(int(rng.integers(4))):
                flight.tokens(3)
                flight.close("done")


def test_several_workers_see_the_sum() -> None:
    clock = Clock()
    fleets = workers(3, clock)
    alone = Fleet(SERVERS, clock)
    rng = np.random.default_rng(1)
    flights = []
    for i in range(40):
        clock.now += 0.25
        where = int(rng.integers(3))
        asked = chat(f"{i} " * int(rng.integers(1, 400)))  # nothing is shared between prompts
        pair = [send(fleet, asked, i % 3) for fleet in (fleets[where], alone)]
        if i % 2:
            for flight in pair:
                flight.tokens(1 + i % 3)
        flights.append(pair)
        if i % 5 == 4:
            for flight in flights.pop(0):
                flight.close("done")
    for fleet in (*fleets, alone):
        look(fleet)
    for fleet in fleets:
        for name in EXACT:
            np.testing.assert_allclose(fleet.seen[name], alone.seen[name], err_msg=name)
        np.testing.assert_allclose(work_now(fleet), work_now(alone))
        assert fleet.seen_routers[0]["finished"] == alone.seen_routers[0]["finished"]


def test_a_prompt_that_another_worker_has_sent_is_found() -> None:
    first, second = workers(2)
    send(first, chat("long " * 400), 1).close("done")
    assert look(second, chat("long " * 400), "cache_aware") > 400
    assert second.replicas["in_flight"].sum() == 0
    flight = send(second, chat("long " * 400), 1)
    assert flight.cached > 400
    flight.usage(2000, 1, 0)  # the server says otherwise: nothing breaks
    flight.close("done")


@pytest.mark.parametrize("named", [True, False])
def test_conversations_are_known_to_all(named: bool) -> None:
    first, second = workers(2)
    fields = {"user": "u"} if named else {}
    send(first, chat("a" * 900, **fields), 2).close("done")
    arrival = second.arrive(chat("a" * 900, "b" * 50, "c", **fields))
    assert arrival.session is not None
    assert (arrival.session.last_replica, arrival.turn) == (2, 1)
    assert second.arrive(chat("z" * 900, "b" * 50, "c")).session is None
    numbers = {first.sessions.new().number, second.sessions.new().number}
    assert len(numbers) == 2


def test_nothing_is_left_of_a_worker_that_died() -> None:
    first, second = workers(2)
    for replica in range(3):
        send(first, chat("long " * 400), replica)
    look(second)
    assert second.seen["in_flight"].sum() == 3
    assert first.seat is not None
    first.seat.books.clear(0)
    assert look(second, chat("long " * 400), "cache_aware") == 0
    for name in LEDGER:
        assert not second.seen[name].any(), name
    # And a new one in its place begins empty, however the old one left its rows.
    first.replicas["in_flight"] = 7
    again = Fleet(SERVERS, Clock(), seat=first.seat)
    look(again)
    assert again.seen["in_flight"].sum() == 0
    send(again, chat("long " * 400), 1)
    assert look(second, chat("long " * 400), "cache_aware") > 0


def test_metrics_of_the_worker_that_asked_last() -> None:
    clock = Clock(5.0)
    first, second = workers(2, clock)
    second.scraped(0, 1, 1, 0.1)
    clock.now = 6.0
    first.scraped(0, 9, 8, 0.7)
    look(second)
    view = second.seen[0]
    assert (view["waiting"], view["running"], view["kv_used"]) == (9, 8, 0.7)
    assert np.isneginf(second.seen[1]["metrics_at"])


def test_backends_are_added_as_long_as_there_is_room() -> None:
    first, second = workers(2)
    assert first.seat is not None
    for _ in range(first.seat.books.room - len(first)):
        first.add(SERVERS[0])
    look(first)
    look(second)  # it has not heard of them yet
    with pytest.raises(TailraceError, match="room for"):
        first.add(SERVERS[0])
    assert len(first) == len(first.backends)


def test_books_are_shared_with_processes() -> None:
    first, second = workers(2)
    pid = os.fork()
    if pid == 0:
        try:
            send(second, chat("long " * 400), 1)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert look(first, chat("long " * 400), "cache_aware") > 0
    assert first.seen["in_flight"].tolist() == [0, 1, 0]
