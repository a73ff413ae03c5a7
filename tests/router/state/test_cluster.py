"""What the fleet knows of its replicas, and that no request leaves a trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleets import LEDGER, Clock, backends, chat, decided, new_chooser, new_fleet, send
from tailrace.config import Replica
from tailrace.policy.base import Policy
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.state.cluster import Fleet, Flight
from tailrace.view.records import NEVER, View

# ---- one flight ---------------------------------------------------------------------------------


def test_a_flight_is_in_the_ledger_while_it_lasts() -> None:
    clock = Clock(100.0)
    fleet = new_fleet(2, clock)
    flight = send(fleet, chat("x" * 4000), 1)
    view = fleet.replicas[1]
    assert view["in_flight"] == view["queued"] == 1
    assert view["queued_tokens"] == view["queued_uncached"] == flight.prompt_tokens
    assert 990 < flight.prompt_tokens < 1010
    assert view["oldest_sent"] == 100.0
    assert view["predicted_tokens"] == 256
    clock.now = 101.0
    flight.tokens(1)
    flight.tokens(4)
    assert (view["queued"], view["in_flight"]) == (0, 1)
    assert view["context_tokens"] == flight.prompt_tokens + 5
    clock.now = 102.0
    flight.close("done")
    assert (flight.first_at, flight.last_at, flight.estimated) == (101.0, 102.0, False)
    assert all(view[name] == 0 for name in LEDGER)
    assert (view["finished"], view["finished_tokens"]) == (1, 5)
    assert fleet.router["finished_tokens"] == 5
    assert not fleet.replicas[0]["finished"]


def test_methods_may_be_called_again_and_after_the_end() -> None:
    fleet = new_fleet(1)
    flight = send(fleet, chat("hello"))
    flight.tokens(3)
    flight.close("done")
    before = fleet.replicas.copy()
    flight.close("backend_failed")
    flight.tokens(7)
    flight.usage(5, 5, 5)
    assert flight.outcome == "done"
    np.testing.assert_array_equal(fleet.replicas, before)


@pytest.mark.parametrize("outcome", ["client_gone", "backend_failed", "timeout", "shed"])
@pytest.mark.parametrize("streamed", [0, 6])
def test_a_failed_flight_leaves_no_trace_and_teaches_nothing(outcome: str, streamed: int) -> None:
    fleet = new_fleet(1)
    flight = send(fleet, chat("hello"))
    if streamed:
        flight.tokens(streamed)
    flight.close(outcome)
    assert all(fleet.replicas[0][name] == 0 for name in LEDGER)
    assert fleet.router["finished"] == 0
    new_chooser(fleet).choose(fleet.arrive(chat("next")))
    assert fleet.replicas[0]["recent_tokens"] == streamed  # what came back was throughput


def test_the_longest_waiting_one_is_known_as_others_leave() -> None:
    clock = Clock()
    fleet = new_fleet(1, clock)
    flights = []
    for now in (1.0, 2.0, 3.0):
        clock.now = now
        flights.append(send(fleet, chat(f"{now}")))
    flights[0].tokens(1)
    assert fleet.replicas[0]["oldest_sent"] == 2.0
    flights[1].close("client_gone")
    assert fleet.replicas[0]["oldest_sent"] == 3.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=60))
def test_counters_return_to_zero_whatever_happens(steps: list[tuple[int, int]]) -> None:
    clock = Clock()
    fleet = new_fleet(2, clock)
    flights: list[Flight] = []
    for action, which in steps:
        clock.now += 0.1
        flight = flights[which % len(flights)] if flights else None
        if action <= 1:
            flights.append(send(fleet, chat("word " * which, stream=bool(action)), which % 2))
        elif action == 2:
            fleet.forget(which % 2)
        elif action == 3:
            fleet.catch_up(clock.now + 10 * which)
        elif flight is None:
            continue
        elif action == 4:
            flight.tokens(which)
        elif action == 5:
            flight.usage(which, which, which)
        else:
            flight.close("done" if action == 6 else "timeout")
    for flight in flights:
        flight.close("client_gone")
    for name in LEDGER:
        assert not fleet.replicas[name].any(), name


def test_a_dead_replica_is_forgotten_and_late_closes_do_not_count() -> None:
    fleet = new_fleet(2)
    flight = send(fleet, chat("x" * 4096))
    flight.tokens(1)
    fleet.forget(0)
    assert all(fleet.replicas[0][name] == 0 for name in LEDGER)
    assert fleet.cached_on(fleet.arrive(chat("x" * 4096)), 0) == 0
    flight.tokens(5)
    flight.close("backend_failed")
    assert all(fleet.replicas[0][name] == 0 for name in LEDGER)


def test_an_answer_that_does_not_stream_is_presumed_to_begin_when_predicted() -> None:
    clock = Clock()
    fleet = new_fleet(1, clock)
    flight = send(fleet, chat("x" * 8000, stream=False))
    ttft_s = flight.decision.ttft_s
    fleet.catch_up(0.9 * ttft_s)
    assert fleet.replicas[0]["queued"] == 1
    clock.now = 1.1 * ttft_s
    fleet.catch_up(clock.now)
    assert fleet.replicas[0]["queued"] == 0
    assert flight.first_at is None
    clock.now = 2.0
    flight.usage(2000, 100, 0)
    flight.close("done")
    assert flight.estimated
    assert flight.first_at is not None
    assert 0 < flight.first_at < 2.0
    assert fleet.router["finished_tokens"] == 100
    assert all(fleet.replicas[0][name] == 0 for name in LEDGER)


def test_embeddings_do_not_count_as_short_answers() -> None:
    fleet = new_fleet(1)
    flight = send(fleet, RequestBody("embedding", text="hello"))
    flight.usage(2, 0, None)
    flight.close("done")
    assert fleet.router["finished"] == 0
    assert fleet.replicas[0]["in_flight"] == 0


def test_predicted_output_is_the_mean_so_far_within_what_the_client_allows() -> None:
    fleet = new_fleet(1)
    for _ in range(2):
        flight = send(fleet, chat("hello"))
        flight.tokens(10)
        flight.close("done")
    assert send(fleet, chat("again")).predicted == pytest.approx((256 + 20) / 3)
    assert send(fleet, chat("again", max_tokens=7)).predicted == 7


# ---- sessions -----------------------------------------------------------------------------------


def test_a_session_id_gives_turn_and_last_replica() -> None:
    fleet = new_fleet(3)
    for turn, replica in enumerate((2, 0)):
        arrival = fleet.arrive(chat("hello", user="ada"))
        assert arrival.turn == turn
        fleet.open(arrival, replica, decided(fleet, arrival, replica))
    fleet.show_request(fleet.arrive(chat("x", user="ada")), 1.0)
    request = fleet.request[0]
    assert (request["last_replica"], request["turn"]) == (0, 2)
    other = fleet.arrive(chat("hello", user="bob"))
    assert other.session is not None
    assert other.session.last_replica == -1
    assert other.session.number != request["session"]


def test_a_conversation_without_id_is_recognised_by_its_content() -> None:
    fleet = new_fleet(3)
    first = fleet.arrive(chat("Who are you?"))
    assert first.session is None
    fleet.open(first, 2, decided(fleet, first, 2))
    second = fleet.arrive(chat("Who are you?", "A router.", "Whose?"))
    assert second.session is first.session
    assert second.session is not None
    assert (second.session.last_replica, second.turn) == (2, 1)
    assert fleet.arrive(chat("Who is he?", "A router.", "Whose?")).session is None


def test_a_second_attempt_is_no_second_turn() -> None:
    fleet = new_fleet(2)
    arrival = fleet.arrive(chat("hello", user="ada"))
    for replica in (0, 1):
        fleet.open(arrival, replica, decided(fleet, arrival, replica)).close("backend_failed")
    assert fleet.arrive(chat("hello", user="ada")).turn == 1


def test_sessions_are_bounded() -> None:
    fleet = Fleet(backends(Replica()), Clock(), max_sessions=10)
    for i in range(50):
        send(fleet, chat("hello", user=f"u{i}")).close("done")
    assert len(fleet.sessions) == 10


# ---- prefix index -------------------------------------------------------------------------------


def test_a_longer_prompt_finds_its_beginning_cached_only_where_it_was() -> None:
    fleet = new_fleet(2)
    text = "".join(chr(97 + i % 23) for i in range(6000))
    flight = send(fleet, RequestBody("completion", text=text))
    assert flight.cached == 0
    again = fleet.arrive(RequestBody("completion", text=text + "z" * 2000))
    cached = fleet.cached_on(again, 0)
    assert 1400 <= cached <= 1500
    assert cached % 16 == 0
    assert fleet.cached_on(again, 1) == 0
    assert fleet.cached_on(fleet.arrive(RequestBody("completion", text="b" + text)), 0) == 0


def test_the_next_turn_finds_the_answer_cached_too() -> None:
    fleet = new_fleet(2)
    question, answer = "q" * 1000, "a" * 1200
    flight = send(fleet, chat(question))
    flight.tokens(300)
    flight.close("done")
    nxt = fleet.arrive(chat(question, answer, "and?"))
    assert 540 <= fleet.cached_on(nxt, 0) <= 565
    # The blocks of text alone end with the question.
    nxt_without = fleet.arrive(RequestBody("completion", text=None))
    assert fleet.cached_on(nxt_without, 0) == 0


def test_a_conversation_is_held_once_however_many_turns_it_has() -> None:
    fleet = new_fleet(1)
    said = ["q" * 1000]
    for turn in range(6):
        flight = send(fleet, chat(*said))
        flight.tokens(250)
        flight.close("done")
        said += [f"{turn}" * 1000, "so?"]
    new_chooser(fleet).choose(fleet.arrive(chat("x")))
    length = fleet.arrive(chat(*said)).prompt_tokens
    assert fleet.replicas[0]["index_tokens"] == pytest.approx(length, abs=64)


def test_other_models_and_salts_share_nothing() -> None:
    fleet = new_fleet(1)
    send(fleet, chat("x" * 4000))
    assert fleet.cached_on(fleet.arrive(chat("x" * 4000)), 0) > 900
    assert fleet.cached_on(fleet.arrive(chat("x" * 4000, model="other")), 0) == 0
    assert fleet.cached_on(fleet.arrive(chat("x" * 4000, cache_salt="s")), 0) == 0


def test_a_miss_makes_the_index_forget_what_was_used_no_later() -> None:
    clock = Clock()
    fleet = new_fleet(1, clock)
    for now, letter in ((1.0, "a"), (2.0, "b"), (3.0, "c")):
        clock.now = now
        send(fleet, chat(letter * 4000)).close("client_gone")
    clock.now = 4.0
    flight = send(fleet, chat("b" * 4000))
    assert flight.cached > 900
    flight.usage(1000, 1, 0)  # the server had evicted it

    def cached(letter: str) -> int:
        return fleet.cached_on(fleet.arrive(chat(letter * 4000)), 0)

    assert cached("a") == 0
    assert cached("b") > 900  # it is there now
    assert cached("c") > 900


def test_a_cache_that_never_hits_is_no_longer_believed_in_until_it_does() -> None:
    fleet = new_fleet(1)
    for _ in range(20):
        flight = send(fleet, chat("x" * 4000))
        flight.usage(1000, 1, 0)
        flight.close("client_gone")
    assert not fleet.caching[0]
    flight = send(fleet, chat("x" * 4000))
    assert flight.cached == 0
    flight.usage(1000, 1, 992)
    assert fleet.caching[0]


def test_answers_that_are_never_found_cached_are_no_longer_expected() -> None:
    fleet = new_fleet(1)
    for i in range(10):
        question, answer = f"{i}" * 1000, "a" * 2000
        flight = send(fleet, chat(question))
        flight.tokens(500)
        flight.close("done")
        flight = send(fleet, chat(question, answer, "and?"))
        flight.usage(760, 1, 240)  # the question was found, the answer not
        flight.close("client_gone")
    assert not fleet.answers[0]
    assert fleet.caching[0]
    turn = chat("9" * 1000, "b" * 1000, "and?")
    assert fleet.cached_on(fleet.arrive(turn), 0) <= 256
    for _ in range(10):  # until they are
        flight = send(fleet, turn)
        flight.usage(510, 1, 500)
        flight.close("client_gone")
        fleet.forget(0)
    assert fleet.answers[0]


def test_usage_calibrates_the_length_of_later_prompts() -> None:
    fleet = new_fleet(1)
    for _ in range(200):
        flight = send(fleet, chat("x" * 3000))
        flight.usage(1000, 1, None)
        flight.close("done")
    assert fleet.arrive(chat("x" * 3000)).prompt_tokens == pytest.approx(1000, rel=0.02)


# ---- replicas -----------------------------------------------------------------------------------


def test_missing_metrics_are_never_zero() -> None:
    clock = Clock(5.0)
    fleet = new_fleet(1, clock)
    send(fleet, chat("x" * 4000))
    fleet.scraped(0, None, None, None)
    assert fleet.replicas[0]["metrics_at"] == NEVER
    fleet.scraped(0, 3.0, None, None)
    view = fleet.replicas[0]
    assert (view["metrics_at"], view["waiting"], view["running"]) == (5.0, 3, 0)
    assert view["kv_used"] > 0  # of the ledger
    clock.now = 9.0
    fleet.scraped(0, None, None, None)
    assert fleet.replicas[0]["metrics_at"] == 5.0


def test_a_replica_added_later_leaves_the_others_as_they_are() -> None:
    fleet = new_fleet(1)
    flight = send(fleet, chat("x" * 4000))
    number = fleet.add(backends(Replica(speed=2.0))[0])
    assert number == 1
    assert fleet.replicas[1]["speed"] == 2.0
    assert fleet.replicas[0]["in_flight"] == 1
    flight.tokens(1)
    flight.close("done")
    assert fleet.replicas[0]["in_flight"] == 0
    assert fleet.cached_on(fleet.arrive(chat("x" * 4000)), 0) > 900
    assert new_chooser(fleet).choose(fleet.arrive(chat("y")), [0]).replica == 1  # type: ignore[union-attr]


def test_the_server_says_how_much_memory_it_has_unless_the_settings_do() -> None:
    servers = (Replica(), Replica(num_blocks=100, block_size=8))
    fleet = Fleet(backends(*servers), Clock())
    for replica in (0, 1):
        fleet.set_capacity(replica, 4096, 32)
    assert list(fleet.replicas["capacity_tokens"]) == [4096, 800]
    assert list(fleet.replicas["block_size"]) == [32, 8]


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
    fleet = new_fleet(2)
    policy = Listener()
    fleet.listen(policy)
    flight = send(fleet, chat("hello"), 1)
    flight.tokens(1)
    flight.tokens(1)
    flight.close("done")
    assert policy.heard == [("first_token", 1)]
    assert fleet.hook_errors == 1
    assert fleet.replicas[1]["in_flight"] == 0
