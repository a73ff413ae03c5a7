"""What the cluster knows of its replicas, and that no request leaves a trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.clusters import LEDGER, Clock, backends, chat, decided, new_chooser, new_cluster, send
from tailrace.config import Replica
from tailrace.policy.base import Policy
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.view.records import NEVER, View

# ---- one attempt ---------------------------------------------------------------------------------


def test_a_flight_is_in_the_ledger_while_it_lasts() -> None:
    clock = Clock(100.0)
    cluster = new_cluster(2, clock)
    attempt = send(cluster, chat("x" * 4000), 1)
    view = cluster.replicas[1]
    assert view["in_flight"] == view["queued"] == 1
    assert view["queued_tokens"] == view["queued_uncached"] == attempt.prompt_tokens
    assert 990 < attempt.prompt_tokens < 1010
    assert view["oldest_sent"] == 100.0
    assert view["predicted_tokens"] == 256
    clock.now = 101.0
    attempt.tokens(1)
    attempt.tokens(4)
    assert (view["queued"], view["in_flight"]) == (0, 1)
    assert view["context_tokens"] == attempt.prompt_tokens + 5
    clock.now = 102.0
    attempt.close("done")
    assert (attempt.first_at, attempt.last_at, attempt.estimated) == (101.0, 102.0, False)
    assert all(view[name] == 0 for name in LEDGER)
    assert (view["finished"], view["finished_tokens"]) == (1, 5)
    assert cluster.router["finished_tokens"] == 5
    assert not cluster.replicas[0]["finished"]


def test_methods_may_be_called_again_and_after_the_end() -> None:
    cluster = new_cluster(1)
    attempt = send(cluster, chat("hello"))
    attempt.tokens(3)
    attempt.close("done")
    before = cluster.replicas.copy()
    attempt.close("backend_failed")
    attempt.tokens(7)
    attempt.usage(5, 5, 5)
    assert attempt.outcome == "done"
    np.testing.assert_array_equal(cluster.replicas, before)


@pytest.mark.parametrize("outcome", ["client_gone", "backend_failed", "timeout", "shed"])
@pytest.mark.parametrize("streamed", [0, 6])
def test_a_failed_flight_leaves_no_trace_and_teaches_nothing(outcome: str, streamed: int) -> None:
    cluster = new_cluster(1)
    attempt = send(cluster, chat("hello"))
    if streamed:
        attempt.tokens(streamed)
    attempt.close(outcome)
    assert all(cluster.replicas[0][name] == 0 for name in LEDGER)
    assert cluster.router["finished"] == 0
    new_chooser(cluster).choose(cluster.arrive(chat("next")))
    assert cluster.replicas[0]["recent_tokens"] == streamed  # what came back was throughput


def test_the_longest_waiting_one_is_known_as_others_leave() -> None:
    clock = Clock()
    cluster = new_cluster(1, clock)
    attempts = []
    for now in (1.0, 2.0, 3.0):
        clock.now = now
        attempts.append(send(cluster, chat(f"{now}")))
    attempts[0].tokens(1)
    assert cluster.replicas[0]["oldest_sent"] == 2.0
    attempts[1].close("client_gone")
    assert cluster.replicas[0]["oldest_sent"] == 3.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=60))
def test_counters_return_to_zero_whatever_happens(steps: list[tuple[int, int]]) -> None:
    clock = Clock()
    cluster = new_cluster(2, clock)
    attempts: list[Attempt] = []
    for action, which in steps:
        clock.now += 0.1
        attempt = attempts[which % len(attempts)] if attempts else None
        if action <= 1:
            attempts.append(send(cluster, chat("word " * which, stream=bool(action)), which % 2))
        elif action == 2:
            cluster.forget(which % 2)
        elif action == 3:
            cluster.catch_up(clock.now + 10 * which)
        elif attempt is None:
            continue
        elif action == 4:
            attempt.tokens(which)
        elif action == 5:
            attempt.usage(which, which, which)
        else:
            attempt.close("done" if action == 6 else "timeout")
    for attempt in attempts:
        attempt.close("client_gone")
    for name in LEDGER:
        assert not cluster.replicas[name].any(), name


def test_a_dead_replica_is_forgotten_and_late_closes_do_not_count() -> None:
    cluster = new_cluster(2)
    attempt = send(cluster, chat("x" * 4096))
    attempt.tokens(1)
    cluster.forget(0)
    assert all(cluster.replicas[0][name] == 0 for name in LEDGER)
    assert cluster.cached_on(cluster.arrive(chat("x" * 4096)), 0) == 0
    attempt.tokens(5)
    attempt.close("backend_failed")
    assert all(cluster.replicas[0][name] == 0 for name in LEDGER)


def test_an_answer_that_does_not_stream_is_presumed_to_begin_when_predicted() -> None:
    clock = Clock()
    cluster = new_cluster(1, clock)
    attempt = send(cluster, chat("x" * 8000, stream=False))
    ttft_s = attempt.decision.ttft_s
    cluster.catch_up(0.9 * ttft_s)
    assert cluster.replicas[0]["queued"] == 1
    clock.now = 1.1 * ttft_s
    cluster.catch_up(clock.now)
    assert cluster.replicas[0]["queued"] == 0
    assert attempt.first_at is None
    clock.now = 2.0
    attempt.usage(2000, 100, 0)
    attempt.close("done")
    assert attempt.estimated
    assert attempt.first_at is not None
    assert 0 < attempt.first_at < 2.0
    assert cluster.router["finished_tokens"] == 100
    assert all(cluster.replicas[0][name] == 0 for name in LEDGER)


def test_embeddings_do_not_count_as_short_answers() -> None:
    cluster = new_cluster(1)
    attempt = send(cluster, RequestBody("embedding", text="hello"))
    attempt.usage(2, 0, None)
    attempt.close("done")
    assert cluster.router["finished"] == 0
    assert cluster.replicas[0]["in_flight"] == 0


def test_predicted_output_is_the_mean_so_far_within_what_the_client_allows() -> None:
    cluster = new_cluster(1)
    for _ in range(2):
        attempt = send(cluster, chat("hello"))
        attempt.tokens(10)
        attempt.close("done")
    assert send(cluster, chat("again")).predicted == pytest.approx((256 + 20) / 3)
    assert send(cluster, chat("again", max_tokens=7)).predicted == 7


# ---- sessions -----------------------------------------------------------------------------------


def test_a_session_id_gives_turn_and_last_replica() -> None:
    cluster = new_cluster(3)
    for turn, replica in enumerate((2, 0)):
        arrival = cluster.arrive(chat("hello", user="ada"))
        assert arrival.turn == turn
        Attempt(cluster, arrival, replica, decided(cluster, arrival, replica))
    cluster.show_request(cluster.arrive(chat("x", user="ada")), 1.0)
    request = cluster.request[0]
    assert (request["last_replica"], request["turn"]) == (0, 2)
    other = cluster.arrive(chat("hello", user="bob"))
    assert other.session is not None
    assert other.session.last_replica == -1
    assert other.session.number != request["session"]


def test_a_conversation_without_id_is_recognised_by_its_content() -> None:
    cluster = new_cluster(3)
    first = cluster.arrive(chat("Who are you?"))
    assert first.session is None
    Attempt(cluster, first, 2, decided(cluster, first, 2))
    second = cluster.arrive(chat("Who are you?", "A router.", "Whose?"))
    assert second.session is first.session
    assert second.session is not None
    assert (second.session.last_replica, second.turn) == (2, 1)
    assert cluster.arrive(chat("Who is he?", "A router.", "Whose?")).session is None


def test_a_second_attempt_is_no_second_turn() -> None:
    cluster = new_cluster(2)
    arrival = cluster.arrive(chat("hello", user="ada"))
    for replica in (0, 1):
        Attempt(cluster, arrival, replica, decided(cluster, arrival, replica)).close(
            "backend_failed"
        )
    assert cluster.arrive(chat("hello", user="ada")).turn == 1


def test_sessions_are_bounded() -> None:
    cluster = ClusterState(backends(Replica()), Clock(), max_sessions=10)
    for i in range(50):
        send(cluster, chat("hello", user=f"u{i}")).close("done")
    assert len(cluster.sessions) == 10


# ---- prefix index -------------------------------------------------------------------------------


def test_a_longer_prompt_finds_its_beginning_cached_only_where_it_was() -> None:
    cluster = new_cluster(2)
    text = "".join(chr(97 + i % 23) for i in range(6000))
    attempt = send(cluster, RequestBody("completion", text=text))
    assert attempt.cached == 0
    again = cluster.arrive(RequestBody("completion", text=text + "z" * 2000))
    cached = cluster.cached_on(again, 0)
    assert 1400 <= cached <= 1500
    assert cached % 16 == 0
    assert cluster.cached_on(again, 1) == 0
    assert cluster.cached_on(cluster.arrive(RequestBody("completion", text="b" + text)), 0) == 0


def test_the_next_turn_finds_the_answer_cached_too() -> None:
    cluster = new_cluster(2)
    question, answer = "q" * 1000, "a" * 1200
    attempt = send(cluster, chat(question))
    attempt.tokens(300)
    attempt.close("done")
    nxt = cluster.arrive(chat(question, answer, "and?"))
    assert 540 <= cluster.cached_on(nxt, 0) <= 565
    # The blocks of text alone end with the question.
    nxt_without = cluster.arrive(RequestBody("completion", text=None))
    assert cluster.cached_on(nxt_without, 0) == 0


def test_a_conversation_is_held_once_however_many_turns_it_has() -> None:
    cluster = new_cluster(1)
    said = ["q" * 1000]
    for turn in range(6):
        attempt = send(cluster, chat(*said))
        attempt.tokens(250)
        attempt.close("done")
        said += [f"{turn}" * 1000, "so?"]
    new_chooser(cluster).choose(cluster.arrive(chat("x")))
    length = cluster.arrive(chat(*said)).prompt_tokens
    assert cluster.replicas[0]["index_tokens"] == pytest.approx(length, abs=64)


def test_other_models_and_salts_share_nothing() -> None:
    cluster = new_cluster(1)
    send(cluster, chat("x" * 4000))
    assert cluster.cached_on(cluster.arrive(chat("x" * 4000)), 0) > 900
    assert cluster.cached_on(cluster.arrive(chat("x" * 4000, model="other")), 0) == 0
    assert cluster.cached_on(cluster.arrive(chat("x" * 4000, cache_salt="s")), 0) == 0


def test_a_miss_makes_the_index_forget_what_was_used_no_later() -> None:
    clock = Clock()
    cluster = new_cluster(1, clock)
    for now, letter in ((1.0, "a"), (2.0, "b"), (3.0, "c")):
        clock.now = now
        send(cluster, chat(letter * 4000)).close("client_gone")
    clock.now = 4.0
    attempt = send(cluster, chat("b" * 4000))
    assert attempt.cached > 900
    attempt.usage(1000, 1, 0)  # the server had evicted it

    def cached(letter: str) -> int:
        return cluster.cached_on(cluster.arrive(chat(letter * 4000)), 0)

    assert cached("a") == 0
    assert cached("b") > 900  # it is there now
    assert cached("c") > 900


def test_a_cache_that_never_hits_is_no_longer_believed_in_until_it_does() -> None:
    cluster = new_cluster(1)
    for _ in range(20):
        attempt = send(cluster, chat("x" * 4000))
        attempt.usage(1000, 1, 0)
        attempt.close("client_gone")
    assert not cluster.caching[0]
    attempt = send(cluster, chat("x" * 4000))
    assert attempt.cached == 0
    attempt.usage(1000, 1, 992)
    assert cluster.caching[0]


def test_answers_that_are_never_found_cached_are_no_longer_expected() -> None:
    cluster = new_cluster(1)
    for i in range(10):
        question, answer = f"{i}" * 1000, "a" * 2000
        attempt = send(cluster, chat(question))
        attempt.tokens(500)
        attempt.close("done")
        attempt = send(cluster, chat(question, answer, "and?"))
        attempt.usage(760, 1, 240)  # the question was found, the answer not
        attempt.close("client_gone")
    assert not cluster.answers[0]
    assert cluster.caching[0]
    turn = chat("9" * 1000, "b" * 1000, "and?")
    assert cluster.cached_on(cluster.arrive(turn), 0) <= 256
    for _ in range(10):  # until they are
        attempt = send(cluster, turn)
        attempt.usage(510, 1, 500)
        attempt.close("client_gone")
        cluster.forget(0)
    assert cluster.answers[0]


def test_usage_calibrates_the_length_of_later_prompts() -> None:
    cluster = new_cluster(1)
    for _ in range(200):
        attempt = send(cluster, chat("x" * 3000))
        attempt.usage(1000, 1, None)
        attempt.close("done")
    assert cluster.arrive(chat("x" * 3000)).prompt_tokens == pytest.approx(1000, rel=0.02)


# ---- replicas -----------------------------------------------------------------------------------


def test_missing_metrics_are_never_zero() -> None:
    clock = Clock(5.0)
    cluster = new_cluster(1, clock)
    send(cluster, chat("x" * 4000))
    cluster.scraped(0, None, None, None)
    assert cluster.replicas[0]["metrics_at"] == NEVER
    cluster.scraped(0, 3.0, None, None)
    view = cluster.replicas[0]
    assert (view["metrics_at"], view["waiting"], view["running"]) == (5.0, 3, 0)
    assert view["kv_used"] > 0  # of the ledger
    clock.now = 9.0
    cluster.scraped(0, None, None, None)
    assert cluster.replicas[0]["metrics_at"] == 5.0


def test_a_replica_added_later_leaves_the_others_as_they_are() -> None:
    cluster = new_cluster(1)
    attempt = send(cluster, chat("x" * 4000))
    number = cluster.add(backends(Replica(speed=2.0))[0])
    assert number == 1
    assert cluster.replicas[1]["speed"] == 2.0
    assert cluster.replicas[0]["in_flight"] == 1
    attempt.tokens(1)
    attempt.close("done")
    assert cluster.replicas[0]["in_flight"] == 0
    assert cluster.cached_on(cluster.arrive(chat("x" * 4000)), 0) > 900
    assert new_chooser(cluster).choose(cluster.arrive(chat("y")), [0]).replica == 1  # type: ignore[union-attr]


def test_the_server_says_how_much_memory_it_has_unless_the_settings_do() -> None:
    servers = (Replica(), Replica(num_blocks=100, block_size=8))
    cluster = ClusterState(backends(*servers), Clock())
    for replica in (0, 1):
        cluster.set_capacity(replica, 4096, 32)
    assert list(cluster.replicas["capacity_tokens"]) == [4096, 800]
    assert list(cluster.replicas["block_size"]) == [32, 8]


# ---- hooks --------------------------------------------------------------------------------------


class Listener(Policy):
    name = "listener"

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def scores(self, view: View) -> np.ndarray:
        return np.zeros(len(view.replicas))

    def first_token(self, replica: int, request_id: int, now: float) -> None:
        self.heard.append(("first_token", replica))

    def finished(self, replica: int, request_id: int, now: float) -> None:
        raise RuntimeError("a user's mistake")


def test_only_overridden_hooks_are_called_and_their_mistakes_are_counted() -> None:
    cluster = new_cluster(2)
    policy = Listener()
    cluster.listen(policy)
    attempt = send(cluster, chat("hello"), 1)
    attempt.tokens(1)
    attempt.tokens(1)
    attempt.close("done")
    assert policy.heard == [("first_token", 1)]
    assert cluster.hook_errors == 1
    assert cluster.replicas[1]["in_flight"] == 0
