"""Sessions, failures, slow-downs and drains; every iteration takes one second."""

import numpy as np
import pytest

from reference_runs import replica_of, table_of
from tailrace.config import Cluster, Event
from tailrace.errors import TailraceError
from tailrace.policy.base import Policy
from tailrace.sim.reference import ReferenceEngine
from tailrace.sim.result import FAILED, FINISHED, PENDING


class Prefer(Policy):
    """Lowest number first, or an order of one's own; keeps a diary of what it is told."""

    lowest_id_wins = True

    def __init__(self, order=None):
        self.order = order
        self.diary = []

    def scores(self, view):
        n = len(view.replicas)
        return np.arange(n, dtype=float) if self.order is None else np.array(self.order, float)

    def sent(self, replica, request_id, now):
        self.diary.append(("sent", replica, request_id, now))

    def first_token(self, replica, request_id, now):
        self.diary.append(("first", replica, request_id, now))

    def finished(self, replica, request_id, now):
        self.diary.append(("finished", replica, request_id, now))

    def failed(self, replica, request_id, now):
        self.diary.append(("failed", replica, request_id, now))


def run(rows, events=(), n=2, policy=None, scheduler="sarathi", columns=None, **settings):
    cluster = Cluster(replicas=(replica_of(scheduler, count=n, **settings),))
    engine = ReferenceEngine(cluster, table_of(rows, **(columns or {})), events=events)
    return engine.run(policy or Prefer(), record_batches=True)


def event(at_s, replica, kind, **more):
    return Event(at_s=at_s, replica=replica, kind=kind, **more)


def test_next_turn_comes_a_think_time_after_the_answer():
    rows = [(0.0, 8, 3), (0.0, 8, 1), (0.0, 8, 1)]
    columns = {"parent": np.array([-1, 0, 1]), "think_s": np.array([0.0, 2.5, 0.0])}
    result = run(rows, columns=columns)
    assert result.requests["arrived_s"].tolist() == [0.0, 5.5, 6.5]
    assert result.requests["scheduled_s"].tolist() == [0.0, 5.5, 6.5]
    assert result.requests["finished_s"].tolist() == [3.0, 6.5, 7.5]


def test_slow_down_counts_from_the_next_iteration_until_the_return():
    rows = [(0.0, 8, 6)]
    events = [
        event(1.3, 0, "slow", factor=0.1),
        event(1.5, 0, "slow", factor=0.5),  # of the configured speed
        event(5.0, 0, "return"),
    ]
    result = run(rows, events, n=1)
    # Iterations begin at 0, 1, 2 (2 s), 4 (2 s), 6 and 7.
    assert result.batches["start_s"].tolist() == [0.0, 1.0, 2.0, 4.0, 6.0, 7.0]
    assert result.requests["finished_s"][0] == 8.0


def test_dead_replica_fails_answers_and_sends_the_others_elsewhere():
    rows = [(0.0, 8, 9), (1.5, 8, 2), (2.2, 8, 2)]
    policy = Prefer()
    result = run(rows, [event(2.5, 0, "die")], policy=policy)
    first, second, third = result.requests
    assert (first["status"], first["finished_s"], first["replica"]) == (FAILED, 2.5, 0)
    assert first["first_token_s"] == 1.0
    # The second had begun at 2 s, the third waited; both begin anew at 2.5 s on the other replica.
    for request in (second, third):
        assert (request["status"], request["replica"], request["reroutes"]) == (FINISHED, 1, 1)
        assert (request["scheduled_s"], request["finished_s"]) == (2.5, 4.5)
    assert result.replicas["requests"].tolist() == [3, 2]
    assert result.replicas["busy_s"].tolist() == [2.5, 2.0]
    assert result.replicas["iterations"].tolist() == [2, 2]
    assert result.decisions == 5
    assert len(result.batches) == 4  # the iteration that was cut off is not among them
    assert [entry for entry in policy.diary if entry[0] == "failed"] == [
        ("failed", 0, 0, 2.5),
        ("failed", 0, 1, 2.5),
        ("failed", 0, 2, 2.5),
    ]


def test_follow_up_of_a_failed_request_still_comes():
    rows = [(0.0, 8, 9), (0.0, 8, 1)]
    columns = {"parent": np.array([-1, 0]), "think_s": np.array([0.0, 1.0])}
    result = run(rows, [event(2.5, 0, "die")], columns=columns)
    assert result.requests["arrived_s"][1] == 3.5
    assert result.requests["replica"][1] == 1


def test_lost_requests_are_routed_by_id_and_before_arrivals_of_that_instant():
    rows = [(0.0, 8, 1), (0.0, 8, 1), (0.5, 8, 1)]
    policy = Prefer()
    run(rows, [event(0.5, 0, "die")], policy=policy)
    sent = [entry[1:] for entry in policy.diary if entry[0] == "sent"]
    assert sent == [(0, 0, 0.0), (0, 1, 0.0), (1, 0, 0.5), (1, 1, 0.5), (1, 2, 0.5)]


def test_requests_wait_at_the_router_until_a_replica_returns():
    rows = [(0.0, 8, 1), (2.0, 8, 1)]
    events = [event(0.0, 0, "drain"), event(0.0, 1, "drain"), event(5.0, 1, "return")]
    result = run(rows, events)
    assert result.requests["arrived_s"].tolist() == [0.0, 2.0]
    assert result.requests["scheduled_s"].tolist() == [5.0, 5.0]
    assert result.requests["replica"].tolist() == [1, 1]


def test_requests_that_nobody_ever_takes_stay_pending():
    rows = [(0.0, 8, 9), (0.5, 8, 1), (2.0, 8, 1), (2.0, 8, 1)]
    columns = {"parent": np.array([-1, -1, -1, 2]), "think_s": np.zeros(4)}
    result = run(rows, [event(0.7, 0, "die")], n=1, columns=columns)
    requests = result.requests
    assert requests["status"].tolist() == [PENDING] * 4
    assert requests["replica"].tolist() == [-1] * 4
    assert np.isnan(requests["scheduled_s"]).all()
    assert np.isnan(requests["finished_s"]).all()
    assert requests["reroutes"].tolist() == [1, 1, 0, 0]
    assert requests["arrived_s"].tolist()[:3] == [0.0, 0.5, 2.0]
    assert np.isnan(requests["arrived_s"][3])  # its parent never ended


def test_drained_replica_goes_on_with_what_it_has():
    rows = [(0.0, 8, 5), (2.0, 8, 1)]
    result = run(rows, [event(1.5, 0, "drain")])
    assert result.requests["replica"].tolist() == [0, 1]
    assert result.requests["finished_s"].tolist() == [5.0, 3.0]


def test_dying_twice_is_harmless_and_return_brings_it_back_empty():
    shared = [(7, 32)]
    rows = [(0.0, 32, 1, shared), (5.0, 32, 1, shared), (9.0, 32, 1, shared)]
    events = [event(6.5, 0, "die"), event(7.0, 0, "die"), event(8.0, 0, "return")]
    result = run(rows, events, n=1, scheduler="vllm_v1")
    assert result.requests["cached_tokens"].tolist() == [0, 16, 0]
    assert result.requests["expected_cached"].tolist() == [0, 16, 0]
    assert (result.requests["status"] == FINISHED).all()


def test_preempted_request_that_has_answered_fails_with_its_replica():
    # Blocks for one only: the second has its first token when it is preempted at 1 s.
    rows = [(0.0, 32, 9), (0.0, 32, 9)]
    result = run(rows, [event(2.5, 0, "die")], num_blocks=4)
    assert result.requests["status"].tolist() == [FAILED, FAILED]
    assert result.requests["restarts"].tolist() == [0, 1]


def test_events_must_name_a_replica_and_deaths_cannot_be_replayed():
    with pytest.raises(TailraceError, match="names replica 2"):
        run([(0.0, 8, 1)], [event(1.0, 2, "die")])
    cluster = Cluster(replicas=(replica_of("sarathi"),))
    engine = ReferenceEngine(cluster, table_of([(0.0, 8, 1)]), events=[event(1.0, 0, "die")])
    with pytest.raises(TailraceError, match="cannot be replayed"):
        engine.run(replicas=[0])
