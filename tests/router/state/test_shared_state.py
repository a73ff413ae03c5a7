"""Workers that read each other's state decide as one router would."""

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from router.clusters import LEDGER, Clock, backends, chat, new_chooser, new_cluster, send
from tailrace.config import Replica
from tailrace.errors import TailraceError
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.settings import BackendSettings
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.shared_state import new_shared_state
from tailrace.view.records import RECENT_WORK_S

SERVERS = backends(Replica(speed=1.5), Replica(), Replica(speed=0.5))
#: What does not depend on when each worker looked last.
EXACT = (
    *(*LEDGER, "finished", "finished_tokens", "oldest_sent"),
    *("sent_tokens", "sent_requests"),
)


def workers(count: int, clock: Clock | None = None) -> list[ClusterState]:
    shared = new_shared_state(SERVERS, count)
    return [
        ClusterState(SERVERS, clock or Clock(), worker_view=shared.of(number))
        for number in range(count)
    ]


def look(
    cluster: ClusterState, asked: RequestBody | None = None, policy: str = "least_outstanding"
) -> int:
    """Let a worker decide; return what it thinks is cached where it would send the request."""
    decision = new_chooser(cluster, policy).choose(cluster.arrive(asked or chat("x")))
    assert decision is not None
    return decision.cached


def work_now(cluster: ClusterState) -> NDArray[np.float64]:
    """Recent work, faded to this moment."""
    views = cluster.seen
    faded: NDArray[np.float64] = np.exp((views["recent_at"] - cluster.clock()) / RECENT_WORK_S)
    return views["recent_work"] * faded


def test_a_worker_that_shares_with_none_sees_what_a_router_alone_sees() -> None:
    """The other worker does not run: the sum over both is the first one's own row."""
    clock = Clock()
    shared = ClusterState(SERVERS, clock, worker_view=new_shared_state(SERVERS, 2).of(0))
    alone = ClusterState(SERVERS, clock)
    assert np.shares_memory(alone.seen, alone.replicas)
    assert not np.shares_memory(shared.seen, shared.replicas)
    rng = np.random.default_rng(0)
    open_attempts = []
    for i in range(60):
        clock.now += float(rng.exponential(0.3))
        text = f"{i % 7} " * int(rng.integers(1, 900))
        for cluster in (shared, alone):
            look(cluster, chat(text), "tailrace")
        np.testing.assert_array_equal(shared.seen, alone.seen)
        np.testing.assert_array_equal(shared.seen_routers, alone.seen_routers)
        replica = int(rng.integers(3))
        open_attempts.append([send(cluster, chat(text), replica) for cluster in (shared, alone)])
        if len(open_attempts) > 4:
            for attempt in open_attempts.pop(int(rng.integers(4))):
                attempt.tokens(3)
                attempt.close("done")


def test_several_workers_see_the_sum() -> None:
    clock = Clock()
    clusters = workers(3, clock)
    alone = ClusterState(SERVERS, clock)
    rng = np.random.default_rng(1)
    attempts = []
    for i in range(40):
        clock.now += 0.25
        where = int(rng.integers(3))
        asked = chat(f"{i} " * int(rng.integers(1, 400)))  # nothing is shared between prompts
        pair = [send(cluster, asked, i % 3) for cluster in (clusters[where], alone)]
        if i % 2:
            for attempt in pair:
                attempt.tokens(1 + i % 3)
        attempts.append(pair)
        if i % 5 == 4:
            for attempt in attempts.pop(0):
                attempt.close("done")
    for cluster in (*clusters, alone):
        look(cluster)
    for cluster in clusters:
        for name in EXACT:
            np.testing.assert_allclose(cluster.seen[name], alone.seen[name], err_msg=name)
        np.testing.assert_allclose(work_now(cluster), work_now(alone))
        assert cluster.seen_routers[0]["finished"] == alone.seen_routers[0]["finished"]


def test_a_prompt_that_another_worker_has_sent_is_found() -> None:
    first, second = workers(2)
    send(first, chat("long " * 400), 1).close("done")
    assert look(second, chat("long " * 400), "cache_aware") > 400
    assert second.replicas["in_flight"].sum() == 0
    attempt = send(second, chat("long " * 400), 1)
    assert attempt.cached > 400
    attempt.usage(2000, 1, 0)  # the server says otherwise: nothing breaks
    attempt.close("done")


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
    first.worker_view.shared.clear(0)
    assert look(second, chat("long " * 400), "cache_aware") == 0
    for name in LEDGER:
        assert not second.seen[name].any(), name
    # And a new one in its place begins empty, however the old one left its rows.
    first.replicas["in_flight"] = 7
    again = ClusterState(SERVERS, Clock(), worker_view=first.worker_view)
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


def test_a_router_alone_grows() -> None:
    """Room and index grow with the backends, and what is known of the first ones stays."""
    alone = ClusterState(SERVERS[1:2], Clock())
    attempt = send(alone, chat("long " * 400))
    routers = alone.routers.copy()
    for count in range(2, 40):
        alone.add(SERVERS[1])
        assert len(alone) == len(alone.seen) == len(alone.index.totals) == count
    assert look(alone, chat("long " * 400), "cache_aware") > 400
    assert alone.replicas["in_flight"].tolist() == [1] + [0] * 38
    np.testing.assert_array_equal(alone.routers["rng"][1:], routers["rng"][1:])
    attempt.close("done")
    for name in LEDGER:
        assert not alone.replicas[name].any(), name
    entries = alone.index.entries.shape[1]
    alone.add(backends(Replica(num_blocks=1 << 19))[0])
    assert alone.index.entries.shape[1] > entries
    assert look(alone, chat("long " * 400), "cache_aware") == 0  # to be learned again


def test_backends_are_added_as_long_as_there_is_room() -> None:
    first, second = workers(2)
    for _ in range(first.worker_view.shared.room - len(first)):
        first.add(SERVERS[0])
    look(first)
    look(second)  # it has not heard of them yet
    with pytest.raises(TailraceError, match="room for"):
        first.add(SERVERS[0])
    assert len(first) == len(first.backends)


def test_state_is_shared_with_processes() -> None:
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


def test_a_worker_alone_grows_by_doubling() -> None:
    """Each growth copies all indexes: many servers that are found must not take seconds."""
    cluster = new_cluster(1)
    grown = set()
    for number in range(40):
        cluster.add(BackendSettings(url=f"http://10.0.0.{number}:1"))
        grown.add(cluster.worker_view.shared.room)
        assert cluster.worker_view.shared.room <= 2 * len(cluster)
    assert len(grown) <= 6
    assert len(cluster) == 41
    assert new_chooser(cluster).choose(cluster.arrive(chat("x")), set()) is not None
