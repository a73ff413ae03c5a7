"""What the router for Ray Serve remembers of replicas and requests; Ray itself is not needed."""

import pytest

pytest.importorskip("xxhash")

from pydantic import BaseModel

from tailrace.errors import TailraceError
from tailrace.integrations.ray.serve_state import HandleState, RayServeSettings, request_body_of
from tailrace.router.intake.request_body import RequestBody
from tailrace.view.records import NEVER

pytestmark = pytest.mark.compiled


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def state(clock):
    def state(policy, *keys):
        made = HandleState(RayServeSettings.of(policy, choose={"limit_ms": 1e6}), clock)
        made.set_replicas(keys)
        return made

    return state


def prompt(text="hello", session=None):
    return lambda: RequestBody("completion", text=text, session=session)


def send(state, request, asked=None, full=()):
    """Choose, and have it accepted."""
    key = state.choose(request, asked or prompt(), full)[0]
    state.routed(request, key)
    return key


def test_requests_count_until_they_end(state):
    b = state("least_outstanding", "a", "b", "c")
    first = {send(b, name) for name in ("1", "2", "3")}
    assert first == {"a", "b", "c"}
    assert b.in_flight == {"a": 1, "b": 1, "c": 1}
    at = send(b, "4")
    assert b.in_flight[at] == 2
    b.ended("4", at)
    b.ended("4", at)
    assert b.in_flight == {"a": 1, "b": 1, "c": 1}


def test_ranks_are_the_policys_and_full_replicas_come_last(state):
    b = state("least_outstanding", "a", "b", "c")
    send(b, "1", full=("b", "c"))
    send(b, "2", full=("b", "c"))
    send(b, "3", full=("a", "c"))
    assert b.choose("4", prompt()) == ["c", "b", "a"]
    assert b.choose("5", prompt(), ("c", "a"))[0] == "b"
    assert set(b.choose("6", prompt(), ("a", "b", "c"))) == {"a", "b", "c"}


def test_a_request_that_is_turned_away_counts_where_it_ends_up(state):
    b = state("least_outstanding", "a", "b")
    send(b, "0", full=("b",))
    assert b.choose("1", prompt())[0] == "b"
    b.ended("1", "b")  # turned away: Serve says so like this
    assert b.choose("1", prompt(), ("b",))[0] == "a"
    assert b.in_flight == {"a": 2, "b": 0}
    b.routed("1", "b")  # and yet it went there
    assert b.in_flight == {"a": 1, "b": 1}
    b.ended("1", "a")  # late news of another attempt
    assert b.in_flight == {"a": 1, "b": 1}
    b.ended("1", "b")
    assert b.in_flight == {"a": 1, "b": 0}


def test_a_request_may_end_before_it_is_known_to_be_accepted(state):
    b = state("least_outstanding", "a", "b")
    b.ended("0", send(b, "0"))
    key = b.choose("1", prompt())[0]
    b.ended("1", key)
    b.routed("1", key)
    assert set(b.in_flight.values()) == {0}
    assert not b._arrivals
    assert not b._ended_early


def test_a_request_given_up_before_it_was_accepted_counts_no_more(state):
    b = state("least_outstanding", "a", "b")
    b.choose("1", prompt())
    assert sum(b.in_flight.values()) == 1
    b.dropped("1")
    assert sum(b.in_flight.values()) == 0
    key = send(b, "2")
    b.dropped("2")  # its caller has gone, but the replica works on it
    assert b.in_flight[key] == 1


def test_a_dead_replica_takes_all_with_it_and_its_row_is_used_again(state):
    b = state("least_outstanding", "a", "b")
    for name in "123456":
        send(b, name)
    b.lost("a")
    assert b.in_flight == {"b": 3}
    assert b.choose("7", prompt()) == ["b"]
    rows = len(b.cluster)
    b.set_replicas(["b", "c"])
    assert len(b.cluster) == rows
    assert b.in_flight["c"] == 0
    b.ended("1", "a")
    b.ended("2", "a")
    assert b.in_flight["c"] == 0  # what ended at the dead one does not count here
    assert send(b, "8") == "c"
    b.set_replicas(["d"])
    assert b.in_flight == {"d": 0}


def test_no_replica_no_choice(state):
    b = state("round_robin")
    assert b.choose("1", prompt()) == []
    b.set_replicas(["a"])
    assert b.choose("1", prompt()) == ["a"]


def test_a_session_stays_and_another_goes_elsewhere(state):
    b = state("sticky_session", "a", "b")
    home = send(b, "1", prompt(session="s"))
    other = send(b, "2", prompt(session="t"))
    assert other != home
    for k in range(3, 8):
        assert send(b, str(k), prompt(session="s")) == home


def test_equal_prompts_meet_where_they_are_cached(state):
    b = state("cache_aware", "a", "b", "c")
    text = "the same long beginning " * 200
    home = send(b, "1", prompt(text))
    b.ended("1", home)
    for k in range(2, 8):
        assert send(b, str(k), prompt(text + str(k))) == home
        b.ended(str(k), home)


def test_replicas_tell_their_load(state, clock):
    b = state("vllm_dp", "a", "b")
    assert set(b.cluster.replicas["metrics_at"]) == {NEVER}
    b.ongoing("a", 5)
    clock.now += 1
    b.ongoing("b", 0)
    assert send(b, "1") == "b"
    b.stats("b", {"waiting": 9, "running": 4, "kv_used": 0.75, "more": "words"})
    row = b.cluster.replicas[b._rows["b"]]
    assert (row["waiting"], row["running"], row["kv_used"]) == (9, 4, 0.75)
    assert send(b, "2") == "a"
    b.stats("a", {"waiting": None, "running": float("nan")})
    assert b.cluster.replicas[b._rows["a"]]["metrics_at"] == clock.now - 1  # said nothing
    b.ongoing("nobody", 3)


def test_the_trained_policy_decides(state):
    b = state("tailrace", "a", "b", "c")
    for k in range(30):
        send(b, str(k), prompt("words " * (k + 1)))
    assert b.chooser.counts["decisions"] == 30
    assert min(b.in_flight.values()) > 4


def test_unknown_lengths_do_not_change_what_is_expected(state):
    b = state("round_robin", "a")
    for k in range(20):
        b.ended(str(k), send(b, str(k)))
    b.choose("x", prompt())
    assert b.cluster.request["predicted_output"][0] == pytest.approx(256.0)


def test_mistakes_in_the_settings_are_named():
    with pytest.raises(TailraceError, match="polcy"):
        RayServeSettings.of(polcy="tailrace")
    with pytest.raises(TailraceError, match="no_such"):
        HandleState(RayServeSettings.of("no_such"))


class Body(BaseModel):
    messages: list[dict[str, str]]
    max_tokens: int | None = None
    stream: bool = True


def test_what_a_call_asks_for():
    chat = {"messages": [{"role": "user", "content": "hi"}], "user": "u", "model": "m"}
    asked = request_body_of([chat], {}, "", "other")
    assert (asked.kind, asked.session, asked.model) == ("chat", "u", "m")
    assert request_body_of([chat], {}, "s", "").session == "s"
    asked = request_body_of(
        [], {"request": Body(messages=chat["messages"], max_tokens=7)}, "", "lora"
    )
    assert (asked.kind, asked.max_tokens, asked.model, asked.streams) == ("chat", 7, "lora", False)
    assert request_body_of([object(), "a prompt"], {}, "", "").text == "a prompt"
    assert request_body_of([[1, 2, 3]], {}, "", "").token_ids == [1, 2, 3]
    nothing = request_body_of([object(), 5], {"x": {"y": 1}}, "s", "")
    assert (nothing.kind, nothing.text, nothing.session) == ("other", None, "s")
