"""When the live router's prefix index learns of a prompt, and the prompt blocks it counts."""

import numpy as np
import pytest

from router.clusters import Clock, chat, new_chooser, new_cluster
from tailrace.errors import TailraceError
from tailrace.router.decide.chooser import Chooser, ChooserSettings
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState

LONG = "x" * 4096


def cached(cluster: ClusterState, text: str = LONG) -> int:
    """Tokens of a prompt that replica 0 is thought to have."""
    return cluster.cached_on(cluster.arrive(chat(text)), 0)


def send(chooser: Chooser, *texts: str, replica: int = 0) -> Attempt:
    """Send a prompt to a replica."""
    cluster = chooser.cluster
    arrival = cluster.arrive(chat(*texts))
    decision = chooser.choose(arrival, [r for r in range(len(cluster)) if r != replica])
    assert decision is not None
    return Attempt(cluster, arrival, replica, decision)


def test_by_default_it_learns_when_a_prompt_is_sent() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, "lmetric")
    send(chooser, LONG)
    assert cached(cluster) > 900


def test_it_may_learn_at_the_first_token() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, "lmetric", prefix_learns="first_token")
    attempt = send(chooser, LONG)
    assert cached(cluster) == 0
    attempt.tokens(1)
    at_first_token = cached(cluster)
    assert at_first_token > 900
    attempt.close("done")
    assert cached(cluster) == at_first_token


def test_a_response_that_does_not_stream_is_learnt_at_its_end() -> None:
    clock = Clock(10.0)
    cluster = new_cluster(2, clock)
    chooser = new_chooser(cluster, "lmetric", prefix_learns="first_token")
    attempt = send(chooser, LONG)
    attempt.usage(1000, 5, 0)
    assert cached(cluster) == 0
    attempt.close("done")
    assert cached(cluster) > 900


def test_a_request_that_fails_before_its_first_token_teaches_nothing() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, "lmetric", prefix_learns="first_token")
    send(chooser, LONG).close("backend_failed")
    assert cached(cluster) == 0


def test_both_ways_end_in_the_same_index() -> None:
    clusters = []
    for learns in ("sent", "first_token"):
        cluster = new_cluster(1, Clock(5.0))
        chooser = new_chooser(cluster, "lmetric", prefix_learns=learns)
        for turn in range(1, 4):
            attempt = send(chooser, *[LONG + str(k) for k in range(2 * turn - 1)])
            attempt.tokens(4)
            attempt.close("done")
        clusters.append(cluster)
    first, second = clusters
    np.testing.assert_array_equal(first.index.totals, second.index.totals)
    np.testing.assert_array_equal(first.index.entries["key"], second.index.entries["key"])


def test_learning_by_events_waits_for_the_first_token_too() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, "lmetric", prefix_learns="events")
    attempt = send(chooser, LONG)
    assert cached(cluster) == 0
    attempt.tokens(1)
    assert cached(cluster) > 900


def test_unknown_ways_of_learning_are_refused() -> None:
    with pytest.raises((ValueError, TailraceError)):
        ChooserSettings(prefix_learns="sometimes")  # type: ignore[arg-type]


def test_shared_blocks_in_flight_count_once() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, "dynamo", guard=False)
    one = send(chooser, LONG)
    other = send(chooser, LONG)
    decision = chooser.choose(cluster.arrive(chat(LONG)))
    assert decision is not None
    first, second = cluster.replicas["active_blocks"].tolist()
    assert 60 <= first <= 66  # 4096 bytes are 64 blocks of 16 tokens; the two prompts are one
    assert second == 0
    assert cluster.replicas["new_blocks"][0] <= 4
    assert cluster.replicas["new_blocks"][1] == first
    one.close("done")
    chooser.choose(cluster.arrive(chat(LONG)))
    assert cluster.replicas["active_blocks"][0] == first
    other.close("done")
    chooser.choose(cluster.arrive(chat(LONG)))
    assert cluster.replicas["active_blocks"][0] == 0


def test_equal_prompts_in_flight_go_to_one_worker() -> None:
    """As the service does: twenty identical prompts that overlap stay together."""
    cluster = new_cluster(4)
    chooser = new_chooser(cluster, "dynamo", guard=False)
    chosen = set()
    for _ in range(20):
        arrival = cluster.arrive(chat(LONG))
        decision = chooser.choose(arrival)
        assert decision is not None
        send(chooser, LONG, replica=decision.replica).tokens(1)
        chosen.add(decision.replica)
    assert len(chosen) == 1


def test_without_such_a_policy_blocks_are_not_counted() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, "lmetric")
    send(chooser, LONG)
    assert cluster.active is None
    new_chooser(cluster, "lmetric", shadow="dynamo")
    assert cluster.active is not None


def test_a_replica_that_died_has_nothing_in_flight() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, "dynamo")
    attempt = send(chooser, LONG)
    cluster.forget(0)
    attempt.close("backend_failed")
    chooser.choose(cluster.arrive(chat("y" * 500)))
    assert cluster.replicas["active_blocks"].tolist() == [0, 0]


def test_a_different_prompt_has_a_different_content_hash() -> None:
    cluster = new_cluster(2)
    hashes = []
    for text in (LONG, LONG + "y", LONG):
        cluster.show_request(cluster.arrive(chat(text)), 1.0)
        hashes.append(int(cluster.request["content_hash"][0]))
    assert hashes[0] == hashes[2] != hashes[1]
