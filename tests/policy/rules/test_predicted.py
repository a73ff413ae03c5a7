"""The predicted time to first token, by hand and against a server played iteration by iteration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.views import COST, make_view, pick
from tailrace.config import CostModel
from tailrace.policy.rules.predicted import predicted_ttft
from tailrace.view.cost_model import iteration_s
from tailrace.view.records import View


def test_an_idle_replica_needs_its_own_chunks_only() -> None:
    # 1000 tokens in two iterations of 500: 2 * (10 + 50) ms
    assert predicted_ttft(make_view(1), 0) == pytest.approx(0.120)
    assert predicted_ttft(make_view(1, speed=2.0), 0) == pytest.approx(0.060)
    assert predicted_ttft(make_view(1, cached_tokens=960), 0) == pytest.approx(0.014)


def test_a_rest_makes_a_last_smaller_iteration() -> None:
    view = make_view(1, request={"prompt_tokens": 1200})
    assert predicted_ttft(view, 0) == pytest.approx(2 * 0.060 + 0.030)


def test_queued_prompts_come_first_and_answering_requests_take_a_token_each() -> None:
    view = make_view(1, in_flight=110, queued=10, queued_uncached=600, batch_cap=128)
    # 1600 tokens in four chunks of 500 - 100; every iteration has 500 tokens
    assert predicted_ttft(view, 0) == pytest.approx(4 * 0.060)


def test_context_makes_every_iteration_slower() -> None:
    costs = [CostModel(base_ms=10.0, per_token_ms=0.1, per_context_ms=0.001)]
    view = make_view(1, costs=costs, context_tokens=5000)
    assert predicted_ttft(view, 0) == pytest.approx(0.120 + 2 * 0.005)


def test_a_full_batch_must_first_lose_a_share_of_its_requests() -> None:
    view = make_view(1, in_flight=64, batch_cap=64)
    # One of 64 must end: 1/64 of 100 tokens, each 10 + 6.4 ms. Chunks are 500 - 64.
    prefill = 2 * 0.060 + (0.010 + 0.1e-3 * (64 + 1000 - 2 * 436))
    assert predicted_ttft(view, 0) == pytest.approx(prefill + 100 / 64 * 0.0164)


def test_full_memory_must_first_lose_a_share_of_its_tokens() -> None:
    view = make_view(1, in_flight=10, context_tokens=15_500)
    # 15 500 + 1000 is 500 over the capacity of 16 000.
    prefill = 2 * 0.060 + (0.010 + 0.1e-3 * (10 + 1000 - 2 * 490))
    expected = prefill + 500 / 15_500 * 100 * 0.011
    assert predicted_ttft(view, 0) == pytest.approx(expected)
    view.costs["per_context_ms"] = 1e-3  # 15.5 ms more in each of 3 prefills and in each decode
    expected += (3 + 500 / 15_500 * 100) * 0.0155
    assert predicted_ttft(view, 0) == pytest.approx(expected)


def played_ttft(view: View, queued: int, prompt: int, cached: int) -> float:
    """First-token time of the request behind ``queued`` equal prompts, one iteration at a time."""
    replica, cost = view.replicas[0], view.costs[0]
    own = (int(view.request["prompt_tokens"]), int(replica["cached_tokens"]))
    waiting = [[prompt, cached]] * queued + [list(own)]
    waiting = [list(pair) for pair in waiting]
    decodes = int(replica["in_flight"] - queued)
    seconds = 0.0
    while waiting:
        room = int(replica["token_budget"]) - decodes
        tokens, work = decodes, 0.0
        while room > 0 and waiting:
            total, done = waiting[0]
            chunk = min(room, total - done)
            work += chunk * (done + chunk / 2)
            tokens, room = tokens + chunk, room - chunk
            waiting[0][1] += chunk
            if waiting[0][1] == total:
                waiting.pop(0)
        seconds += iteration_s(cost, float(tokens), replica["context_tokens"], work, 1.0)
    return seconds


@settings(deadline=None, max_examples=100)
@given(
    queued=st.integers(0, 5),
    prompt=st.integers(2, 3000),
    own=st.integers(2, 3000),
    answering=st.integers(0, 60),
    hit=st.floats(0, 0.9),
)
def test_equals_a_server_played_iteration_by_iteration(queued, prompt, own, answering, hit) -> None:
    costs = [
        CostModel(
            base_ms=8.0,
            per_token_ms=0.03,
            knots=((300.0, 0.05),),
            per_context_ms=1e-4,
            per_prefill_ms=1e-5,
        )
    ]
    cached = int(hit * (prompt - 1))
    view = make_view(
        1,
        {"prompt_tokens": own},
        costs=costs,
        capacity_tokens=10**9,
        batch_cap=1000,
        in_flight=queued + answering,
        queued=queued,
        queued_tokens=queued * prompt,
        queued_uncached=queued * (prompt - cached),
        context_tokens=answering * 700,
        cached_tokens=int(hit * (own - 1)),
    )
    expected = played_ttft(view, queued, prompt, cached)
    assert predicted_ttft(view, 0) == pytest.approx(expected, rel=1e-9)


def test_least_predicted_ttft_knows_mixed_hardware() -> None:
    fast = CostModel(base_ms=5.0, per_token_ms=0.05)
    view = make_view(
        3, costs=[COST, fast, COST], queued_uncached=[0, 500, 0], speed=[1.0, 1.0, 0.5]
    )
    # 120 ms, 3 * 30 ms, 240 ms
    assert pick("least_predicted_ttft", view) == 1
    view.replicas["queued_uncached"] = [0, 1500, 0]
    assert pick("least_predicted_ttft", view) == 0
