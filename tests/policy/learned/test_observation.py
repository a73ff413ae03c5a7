"""What a learned policy sees: known answers, and what must hold for every view."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from policy.views import copy_view, make_view, random_view
from tailrace.config import Cluster, CostModel, Engine, Event, Replica, RouterSettings
from tailrace.policy.base import Policy
from tailrace.policy.learned.observation import (
    LIMIT,
    N_REPLICA_FEATURES,
    N_REQUEST_FEATURES,
    REPLICA_FEATURES,
    REQUEST_FEATURES,
    observe,
)
from tailrace.sim.simulator import simulate
from tailrace.view import ledger
from tailrace.view.records import HISTORY_S, NEVER, REPLICA_VIEW, REQUEST_VIEW, ROUTER, View
from tailrace.workload import library

Array = NDArray[np.float32]

many = settings(deadline=None, max_examples=100)
seeds = st.integers(0, 2**32)


def observed(view: View) -> tuple[Array, Array]:
    """Arrays filled by ``observe``; what it leaves out would stay NaN."""
    replica_obs = np.full((len(view.replicas), N_REPLICA_FEATURES), np.nan, np.float32)
    request_obs = np.full(N_REQUEST_FEATURES, np.nan, np.float32)
    observe(view, replica_obs, request_obs)
    return replica_obs, request_obs


def replica(name: str, view: View) -> Array:
    column = [feature.name for feature in REPLICA_FEATURES].index(name)
    return observed(view)[0][:, column]


def request(name: str, view: View) -> float:
    column = [feature.name for feature in REQUEST_FEATURES].index(name)
    return float(observed(view)[1][column])


def equal(a: Array, b: Array) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# ---- the schema ---------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [REPLICA_FEATURES, REQUEST_FEATURES])
def test_every_feature_is_described_once(features) -> None:
    assert len({feature.name for feature in features}) == len(features)
    for feature in features:
        assert all((feature.name, feature.unit, feature.scaling, feature.source, feature.help))
        assert feature.source in {
            "ledger",
            "metrics",
            "prefix index",
            "request",
            "configuration",
            "cost model",
        }


#: What each feature is made of: changing one of these fields on one replica must show.
MADE_OF = {
    "queued": "queued",
    "in_flight": "in_flight",
    "oldest_wait": "oldest_sent",
    "mean_wait": "queued_since_sum",
    "queued_tokens": "queued_tokens",
    "queued_uncached": "queued_uncached",
    "context": "context_tokens",
    "tokens_to_come": "predicted_tokens",
    "throughput": "recent_tokens",
    "recent_work": "recent_work",
    "trend": "recent_in_flight",
    "kv_used": "kv_used",
    "waiting": "waiting",
    "metrics_age": "metrics_at",
    "has_metrics": "metrics_at",
    "kv_free": "queued_tokens",
    "slots_left": "in_flight",
    "cached": "cached_tokens",
    "cached_share": "cached_tokens",
    "uncached": "cached_tokens",
    "index_fill": "index_tokens",
    "prefill_s": "prefill_tokens_per_s",
    "ttft": "queued_uncached",
    "ttft_to_slo": "queued_uncached",
    "decode": "context_tokens",
    "speed": "prefill_tokens_per_s",
    "queued_s": "queued_uncached",
    "own_s": "cached_tokens",
    "saved_s": "cached_tokens",
    "prefill_load": "recent_work",
    "room": "capacity_tokens",
}


@pytest.mark.parametrize(("name", "field"), MADE_OF.items())
def test_features_follow_their_fields(name: str, field: str) -> None:
    costs = [CostModel(base_ms=10.0, per_token_ms=0.1, per_context_ms=1e-3)] * 3
    view = make_view(
        3,
        {"now": 10.0},
        {"watched_s": 5.0},
        costs,
        queued=2,
        in_flight=4,
        queued_since_sum=18.0,
        oldest_sent=8.0,
        metrics_at=9.0,
        kv_used=0.2,
    )
    before = replica(name, view)
    change = NEVER if name == "has_metrics" else {"kv_used": 0.5, "queued_since_sum": 1.0}
    if isinstance(change, dict):
        change = change.get(field, 7.0)
    view.replicas[field][1] = change
    after = replica(name, view)
    assert after[1] != before[1]
    assert (after[[0, 2]] == before[[0, 2]]).all()


def test_every_feature_is_filled_in() -> None:
    """With all fields of the view drawn at random, no feature is constant."""
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(50):
        view = make_view(3)
        for record in (view.replicas, view.request, view.router):
            for name in record.dtype.names or ():
                record[name] = rng.integers(1, 40, record[name].shape)
        view.replicas["available"] = [1, 1, rng.integers(2)]
        view.replicas["metrics_at"] = rng.choice([NEVER, 30.0], 3)
        view.replicas["batch_cap"] = 64
        view.replicas["capacity_tokens"] = 5000
        view.request["now"] = 50.0
        view.request["session"] = rng.integers(-1, 2)
        view.request["last_replica"] = rng.integers(-1, 3)
        view.request["prompt_tokens"] = rng.integers(50, 100)
        view.replicas["cached_tokens"] = rng.choice([0, 16, 32], 3)
        rows, whole = observed(view)
        seen.append(np.concatenate([rows[0], whole]))
    names = [feature.name for feature in (*REPLICA_FEATURES, *REQUEST_FEATURES)]
    constant = np.ptp(np.array(seen), axis=0) == 0
    assert [name for name, same in zip(names, constant, strict=True) if same] == []


# ---- known answers ------------------------------------------------------------------------------


def test_an_idle_cluster() -> None:
    view = make_view(3)
    for name in ("queued", "in_flight", "oldest_wait", "mean_wait", "trend", "throughput"):
        assert (replica(name, view) == 0).all(), name
    for feature in REPLICA_FEATURES:
        if feature.name.endswith(("_vs_mean", "_vs_best")):
            assert (replica(feature.name, view) == 0).all(), feature.name
    assert request("in_flight_cv", view) == request("in_flight_spread", view) == 0
    assert replica("ttft", view) == pytest.approx(np.log1p(1.2))  # 120 ms, see test_predicted.py
    assert replica("ttft_to_slo", view) == pytest.approx(np.log(0.12))
    assert request("best_ttft", view) == pytest.approx(np.log1p(1.2))


def test_waiting_times() -> None:
    view = make_view(
        2,
        {"now": 10.0, "arrived_at": 9.0},
        queued=[0, 4],
        in_flight=[0, 4],
        oldest_sent=[0.0, 7.0],
        queued_since_sum=[0.0, 32.0],
    )
    assert replica("oldest_wait", view) == pytest.approx([0, np.log1p(30)])
    assert replica("mean_wait", view) == pytest.approx([0, np.log1p(20)])
    assert request("waited", view) == pytest.approx(np.log1p(10))


def test_comparisons_leave_out_unavailable_replicas() -> None:
    view = make_view(3, in_flight=[1, 3, 1000], available=[1, 1, 0])
    mean = (np.log(2) + np.log(4)) / 2
    expected = [np.log(2) - mean, np.log(4) - mean, np.log(1001) - mean]
    assert replica("in_flight_vs_mean", view) == pytest.approx(expected, rel=1e-5)
    assert request("replicas", view) == pytest.approx(np.log(3))
    assert request("mean_in_flight", view) == pytest.approx(np.log(3))
    assert request("in_flight_spread", view) == pytest.approx(np.log(3))
    assert request("in_flight_cv", view) == pytest.approx(0.5)


def test_the_cached_prefix() -> None:
    view = make_view(3, {"session": 5, "turn": 3, "last_replica": 1}, cached_tokens=[0, 640, 320])
    assert replica("cached_share", view) == pytest.approx([0, 0.64, 0.32])
    assert replica("cached_share_vs_best", view) == pytest.approx([-0.64, 0, -0.32])
    assert replica("uncached", view) == pytest.approx(np.log1p(np.array([1000, 360, 680]) / 64))
    assert replica("prefill_s", view) == pytest.approx(np.log1p([1.0, 0.36, 0.68]))
    assert replica("is_last", view).tolist() == [0, 1, 0]
    assert request("best_cached_share", view) == pytest.approx(0.64)
    assert request("cached_replicas", view) == pytest.approx(2 / 3)
    assert request("in_session", view) == 1
    assert request("turn", view) == pytest.approx(np.log(4))
    view.replicas["available"][1] = 0
    assert replica("is_last", view).tolist() == [0, 0, 0]


def test_metrics_have_an_age_and_the_ledger_stands_in_for_them() -> None:
    view = make_view(
        2,
        {"now": 10.0},
        metrics_at=[9.5, NEVER],
        waiting=[3, 99],
        sent_requests=[2, 50],
        queued=[7, 6],
        kv_used=[0.25, 0.99],
        queued_tokens=[0, 4000],
        context_tokens=[0, 4000],
    )
    assert replica("has_metrics", view).tolist() == [1, 0]
    assert replica("metrics_age", view) == pytest.approx([np.log1p(5), 0])
    assert replica("waiting", view) == pytest.approx(np.log1p([5, 6]))
    assert replica("kv_used", view) == pytest.approx([0.25, 0.5])
    assert request("mean_kv_used", view) == pytest.approx(0.375)


def test_memory_and_slots_left() -> None:
    view = make_view(3, in_flight=[0, 16, 999], context_tokens=[0, 7000, 99_999])
    assert replica("kv_free", view) == pytest.approx([15 / 16, 0.5, -1.0])
    assert replica("slots_left", view) == pytest.approx([1.0, 0.75, -1.0])


def test_tokens_to_come() -> None:
    view = make_view(
        2, predicted_tokens=[500, 100], context_tokens=[1200, 900], answering_prompts=[1000, 100]
    )
    assert replica("tokens_to_come", view) == pytest.approx([np.log1p(300 / 64), 0])


def test_time_of_a_decode_iteration() -> None:
    view = make_view(2, in_flight=[4, 500], speed=[1.0, 2.0])
    # 10 + 0.5 ms; a full batch of 64 at twice the speed: (10 + 6.4) / 2 ms
    assert replica("decode", view) == pytest.approx(np.log1p([1.05, 0.82]))


def test_seconds_of_prefill_count_attention() -> None:
    """10 000 tokens/s, and 1e-5 ms for every pair of tokens: a prompt of 1000 takes 0.1 + 0.005."""
    view = make_view(
        3,
        costs=[CostModel(base_ms=10.0, per_token_ms=0.1, per_prefill_ms=1e-5)] * 3,
        cached_tokens=[0, 600, 0],
        speed=[1.0, 1.0, 2.0],
        queued=[0, 2, 0],
        queued_tokens=[0, 4000, 0],
        queued_uncached=[0, 2000, 0],
    )
    assert replica("own_s", view) == pytest.approx(np.log1p([1.05, 0.432, 1.025]))
    assert replica("saved_s", view) == pytest.approx([0, np.log1p(0.618), 0], rel=1e-5)
    assert replica("saved_s_vs_best", view) == pytest.approx(
        [-np.log1p(0.618), 0, -np.log1p(0.618)], rel=1e-5
    )
    # Two of 2000 tokens, half of each cached: 2 x (0.1 + 1e-8 x (4e6 - 1e6) / 2)
    assert replica("queued_s", view) == pytest.approx([0, np.log1p(2.3), 0], rel=1e-5)
    assert request("best_saved_s", view) == pytest.approx(np.log1p(0.618), rel=1e-5)
    assert request("least_own_s", view) == pytest.approx(np.log1p(0.432), rel=1e-5)


def test_load_by_prefills_and_room_in_memory() -> None:
    view = make_view(2, recent_work=[0.0, 900_000.0], capacity_tokens=[8000, 500])
    assert replica("prefill_load", view) == pytest.approx([0, np.log1p(0.5)])
    assert request("mean_prefill_load", view) == pytest.approx(np.log1p(0.5) / 2)
    assert replica("room", view) == pytest.approx(np.log([8.0, 0.5]))


def test_what_is_scaled_by_speed_and_memory_tells_huge_queues_apart() -> None:
    """Tokens by themselves are cut off at 1.4 million."""
    view = make_view(
        2,
        {"prompt_tokens": 400_000},
        queued=[4, 16],
        queued_tokens=[1_600_000, 6_400_000],
        queued_uncached=[1_600_000, 6_400_000],
        prefill_tokens_per_s=100_000.0,
        capacity_tokens=16_000_000,
    )
    same, apart = replica("queued_uncached", view), replica("queued_s", view)
    assert same.tolist() == [LIMIT, LIMIT]
    assert LIMIT > apart[1] > apart[0] + 1


# ---- moving averages ----------------------------------------------------------------------------


def test_a_steady_rate_is_seen_from_the_start() -> None:
    """Four arrivals per second and 50 tokens per second, watched for 2 and for 200 s."""
    replicas = np.zeros(1, REPLICA_VIEW)
    router = np.zeros(1, ROUTER)
    replicas["in_flight"] = 6
    replicas["answering_prompts"] = 300
    for k in range(1, 801):
        now = k / 4
        replicas["context_tokens"] = 300 + int(50 * now)
        ledger.look(replicas, router[0], now)
        if k in (8, 800):
            watched = router["watched_s"]
            assert watched == pytest.approx(HISTORY_S * (1 - np.exp(-now / HISTORY_S)))
            assert router["recent_arrivals"] / watched == pytest.approx(4, rel=0.02)
            assert replicas["recent_tokens"] / watched == pytest.approx(50, rel=0.03)
            assert replicas["recent_in_flight"] / watched == pytest.approx(6)


def test_trend_is_the_difference_to_the_moving_average() -> None:
    view = make_view(2, router={"watched_s": 10.0}, in_flight=[9, 2], recent_in_flight=[40.0, 50.0])
    assert replica("trend", view) == pytest.approx([np.log1p(5), -np.log1p(3)])
    view = make_view(2, router={"watched_s": 0.0}, in_flight=[9, 2])
    assert replica("trend", view).tolist() == [0, 0]


def test_arrivals_at_one_instant_count_each() -> None:
    router = np.zeros(1, ROUTER)
    replicas = np.zeros(2, REPLICA_VIEW)
    for _ in range(5):
        ledger.look(replicas, router[0], 3.0)
    assert router["recent_arrivals"] == 5
    view = make_view(2, router={"recent_arrivals": 40.0, "watched_s": 10.0})
    assert request("arrival_rate", view) == pytest.approx(np.log1p(2))


def test_a_death_takes_no_tokens_back() -> None:
    replicas = np.zeros(1, REPLICA_VIEW)
    router = np.zeros(1, ROUTER)
    replicas["finished_tokens"] = 70
    replicas["context_tokens"], replicas["answering_prompts"] = 500, 400
    ledger.look(replicas, router[0], 1.0)
    before = replicas["recent_tokens"][0]
    assert before == 170
    ledger.lost(replicas[0])
    ledger.look(replicas, router[0], 1.0)
    assert replicas["recent_tokens"][0] == before


# ---- what must hold for every view --------------------------------------------------------------


@many
@given(seed=seeds, data=st.data())
def test_permuting_replicas_permutes_the_rows(seed: int, data: st.DataObject) -> None:
    view = random_view(seed)
    order = np.array(data.draw(st.permutations(range(len(view.replicas)))))
    asked = view.request.copy()
    if asked["last_replica"] >= 0:
        asked["last_replica"] = np.flatnonzero(order == asked["last_replica"])[0]
    renamed = View(asked, view.replicas[order], view.costs[order], view.router)
    (rows, whole), (renamed_rows, renamed_whole) = observed(view), observed(renamed)
    equal(renamed_rows, rows[order])
    equal(renamed_whole, whole)


@many
@given(seed=seeds)
def test_an_unavailable_replica_has_no_influence(seed: int) -> None:
    view = random_view(seed)
    gone = view.replicas["available"] == 0
    other = copy_view(view)
    for name in ("in_flight", "queued", "queued_uncached", "recent_tokens", "kv_used"):
        other.replicas[name][gone] += 1000
    other.replicas["cached_tokens"][gone] = view.request["prompt_tokens"] - 1
    (rows, whole), (other_rows, other_whole) = observed(view), observed(other)
    equal(other_rows[~gone], rows[~gone])
    equal(other_whole, whole)


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1e-300, 1e18, -1.0])
)
whole_numbers = st.one_of(st.integers(-(2**40), 2**40), st.sampled_from([0, 1]))


@st.composite
def wild_records(draw, dtype: np.dtype, count: int) -> NDArray[np.void]:  # type: ignore[no-untyped-def, type-arg]
    rows = np.zeros(count, dtype)
    for name in dtype.names or ():
        kind = dtype[name].kind
        for k in range(count):
            if kind == "f":
                rows[name][k] = draw(numbers)
            else:
                value = draw(whole_numbers)
                rows[name][k] = abs(value) if kind == "u" else value
    return rows


@many
@given(st.data(), st.integers(1, 3))
def test_finite_and_bounded_whatever_the_view_holds(data: st.DataObject, n: int) -> None:
    model = make_view(n)
    view = View(
        data.draw(wild_records(REQUEST_VIEW, 1))[0],
        data.draw(wild_records(REPLICA_VIEW, n)),
        model.costs,
        data.draw(wild_records(ROUTER, 1))[0],
    )
    with np.errstate(all="ignore"):
        rows, whole = observed(view)
    for values in (rows, whole):
        assert np.isfinite(values).all()
        assert (np.abs(values) <= LIMIT).all()


def test_equals_a_run_without_the_compiler() -> None:
    program = (
        "import numpy as np; np.seterr(over='ignore')\n"
        "from policy.views import random_view\n"
        "from policy.learned.test_observation import observed\n"
        "for seed in range(40):\n"
        "    for values in observed(random_view(seed)): print(*values.ravel())\n"
    )
    folder = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    lines = iter(run.stdout.splitlines())
    for seed in range(40):
        for values in observed(random_view(seed)):
            equal(values.ravel(), np.array(next(lines).split(), np.float32))


# ---- the engines --------------------------------------------------------------------------------


class Watching(Policy):
    """Sends to the least loaded and keeps what it could see."""

    name = "watching"

    def __init__(self) -> None:
        self.seen: list[NDArray[np.float32]] = []

    def scores(self, view: View) -> NDArray[np.float64]:
        rows, whole = observed(view)
        self.seen.append(np.concatenate([rows.ravel(), whole]))
        return view.replicas["in_flight"] / view.replicas["speed"]


TROUBLE = (
    Event(at_s=1, replica=0, kind="slow", factor=0.3),
    Event(at_s=2, replica=1, kind="die"),
    Event(at_s=4, replica=1, kind="return"),
    Event(at_s=5, replica=2, kind="drain"),
    Event(at_s=7, replica=2, kind="return"),
)


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm", "vllm_v1"])
@pytest.mark.parametrize("memory", ["ample", "tight"])
@pytest.mark.parametrize("workload", ["chat", "sessions-hot"])
def test_both_engines_show_the_same_at_every_decision(workload, memory, scheduler) -> None:
    table = library.make(workload, 120, 15.0, seed=3)
    longest = int((table.rows["prompt_tokens"] + table.rows["output_tokens"]).max())
    common = {
        "scheduler": scheduler,
        "num_blocks": None if memory == "ample" else longest // 16 + 40,
        "max_batch_tokens": 200_000,
    }
    cluster = Cluster(replicas=(Replica(count=2, **common), Replica(speed=0.6, **common)))
    predictor = "noisy" if memory == "tight" else "mean"
    seen = []
    for engine in (Engine(engine="reference"), Engine(engine="compiled", exact=True)):
        policy = Watching()
        router = RouterSettings(predictor=predictor, staleness_s=0.3)
        simulate(cluster, table, policy, router=router, engine=engine, events=TROUBLE, seed=1)
        seen.append(np.array(policy.seen))
    assert seen[0].shape[0] >= len(table)
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-4, atol=1e-5)
    assert (np.ptp(seen[0], axis=0) > 0).mean() > 0.6  # no cache, no sessions: some are constant
