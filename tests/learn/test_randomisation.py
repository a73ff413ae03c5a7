import pickle

import numpy as np
import pytest

from tailrace.config import Scenario
from tailrace.learn.randomisation import Distribution, RandomisationSettings, variants
from tailrace.seeds import Purpose, seeds
from tailrace.sim.build import why_not_compiled
from tailrace.workload import library

CAPACITIES = {"chat": 8.0, "sessions-hot": 6.0, "code-completion": 20.0}
SEEDS = seeds(Purpose.TRAINING, 2000)


def distribution(**changes) -> Distribution:
    settings = RandomisationSettings(**({"workloads": dict.fromkeys(CAPACITIES, 1.0)} | changes))
    return Distribution(settings, tuple(CAPACITIES.items()))


def drawn(count=400, **changes) -> list[Scenario]:
    made = distribution(**changes)
    return [made(seed) for seed in SEEDS[:count]]


def sizes(scenarios):
    return np.array([scenario.cluster.size for scenario in scenarios])


def speeds(scenario):
    return {replica.speed for replica in scenario.cluster.replicas}


def load(scenario):
    """Of capacity, as it is offered."""
    capacity = CAPACITIES[scenario.workload.name] * sum(
        replica.speed for replica in scenario.cluster.replicas
    )
    return scenario.workload.rate / capacity


def test_thousands_of_seeds_give_scenarios_within_bounds():
    settings = RandomisationSettings()
    for scenario in drawn(len(SEEDS)):
        # Building it again checks every bound of every setting, events included.
        assert Scenario.model_validate(scenario.model_dump()) == scenario
        assert why_not_compiled(scenario.cluster) is None
        assert 2 <= scenario.cluster.size <= settings.replicas[1]
        slowest, fastest = settings.speeds
        assert all(
            speed == 1 or slowest - 1e-3 <= speed <= fastest + 1e-3 for speed in speeds(scenario)
        )
        scale = settings.load_scale.get(scenario.workload.name, 1.0)
        lowest, highest = settings.load
        assert lowest * scale - 1e-9 <= load(scenario) <= highest * scale + 1e-9
        assert scenario.router.staleness_s in settings.staleness_s
        assert scenario.router.predictor in settings.predictors
        assert len(scenario.events) in (0, 2)


def test_the_seed_decides_and_every_seed_differs():
    first, again = drawn(300), drawn(300)
    assert first == again
    assert len({scenario.workload.rate for scenario in first}) == 300


def test_sizes_are_spread_evenly_on_a_log_scale_ends_included():
    found = sizes(drawn(2000, replicas=[2, 16]))
    assert (found.min(), found.max()) == (2, 16)
    small, large = (found <= 5).mean(), (found > 5).mean()
    assert 0.35 < small < 0.65
    assert 0.35 < large < 0.65
    assert set(sizes(drawn(50, replicas=[3, 3]))) == {3}


def test_weights_of_workloads():
    names = [s.workload.name for s in drawn(600, workloads={"chat": 3, "sessions-hot": 1,
                                                           "code-completion": 0})]  # fmt: skip
    assert "code-completion" not in names
    assert 0.68 < names.count("chat") / 600 < 0.82


def test_loads_are_drawn_from_their_range_and_scaled_by_workload():
    found = drawn(600, load=[0.5, 0.6], load_scale={"chat": 0.1})
    loads = {
        name: [load(s) for s in found if s.workload.name == name]
        for name in ("chat", "sessions-hot")
    }
    assert 0.05 <= min(loads["chat"]) < max(loads["chat"]) <= 0.06
    assert 0.5 <= min(loads["sessions-hot"]) < max(loads["sessions-hot"]) <= 0.6
    # The larger of two draws: two thirds of the way on average.
    assert np.mean(loads["sessions-hot"]) == pytest.approx(0.5 + 0.1 * 2 / 3, abs=0.005)
    made = distribution()
    one, three = made(SEEDS[0]), made(SEEDS[0], 3.0)
    assert three.workload.rate == pytest.approx(3 * one.workload.rate)
    assert three.cluster == one.cluster


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_shares_of_worlds_with_something_special(share):
    def about(found):
        assert np.mean(found) == pytest.approx(share, abs=0.08 if 0 < share < 1 else 0)

    mixed = drawn(mixed_speed=share)
    about([speeds(s) != {1.0} for s in mixed])
    about([s.workload.arrivals == "gamma" for s in drawn(bursts=share)])
    failing = drawn(failures=share)
    about([bool(s.events) for s in failing])
    if share == 1:
        assert {s.events[0].kind for s in failing} == {"die", "slow"}
        for scenario in failing:
            before, after = scenario.events
            assert before.at_s < after.at_s
            assert before.replica == after.replica
            assert after.kind == "return"
        narrow = drawn(mixed_speed=1.0, speeds=[0.5, 0.6])
        assert all(0.5 <= speed <= 0.6 for s in narrow for speed in speeds(s))
        assert any(len(speeds(s)) > 1 for s in narrow)


def test_targets_are_drawn_from_their_range_and_change_nothing_else():
    usual, varied = drawn(300), drawn(300, ttft_slo_s=[0.25, 4.0])
    assert {s.workload.ttft_slo_s for s in usual} == {1.0}
    found = np.log2([s.workload.ttft_slo_s for s in varied])
    assert -2 <= found.min() < -1.9 < 1.9 < found.max() <= 2
    assert abs(found.mean()) < 0.25
    for a, b in zip(usual, varied, strict=True):
        same = b.workload.model_copy(update={"ttft_slo_s": 1.0})
        assert a == b.model_copy(update={"workload": same})


def test_weak_and_strong_fleets_take_rates_to_match_and_change_nothing_else():
    usual, varied = drawn(300), drawn(300, fleet_speed=[0.25, 4.0])
    factors = []
    for a, b in zip(usual, varied, strict=True):
        pairs = zip(a.cluster.replicas, b.cluster.replicas, strict=True)
        ratios = [after.speed / before.speed for before, after in pairs]
        assert np.ptp(ratios) < 0.02 * np.mean(ratios)  # speeds have three decimals
        factors.append(np.mean(ratios))
        assert load(b) == pytest.approx(load(a), rel=1e-6)
        assert (a.router, a.workload.ttft_slo_s) == (b.router, b.workload.ttft_slo_s)
    found = np.log2(factors)
    assert -2.01 <= found.min() < -1.9 < 1.9 < found.max() <= 2.01


def test_how_the_index_learns_is_drawn_and_changes_nothing_else():
    usual = drawn(100)
    varied = drawn(100, prefix_learns=["sent", "events"], events_lag_s=[1.0, 2.0])
    assert {s.router.prefix_learns for s in usual} == {"sent"}
    assert {s.router.prefix_learns for s in varied} == {"sent", "events"}
    assert all(1 <= s.router.events_lag_s <= 2 for s in varied)
    as_usual = {"prefix_learns": "sent", "events_lag_s": 0.0}
    for a, b in zip(usual, varied, strict=True):
        assert a == b.model_copy(update={"router": b.router.model_copy(update=as_usual)})


def test_what_the_router_knows():
    found = drawn(staleness_s=[0.0, 2.0], predictors=["noisy", "exact"])
    assert {s.router.staleness_s for s in found} == {0.0, 2.0}
    assert {s.router.predictor for s in found} == {"noisy", "exact"}
    assert {s.router.predictor for s in drawn(predictors=["bucket"])} == {"bucket"}


def test_a_distribution_can_be_sent_to_a_process_and_be_a_key_there():
    made = distribution()
    sent = pickle.loads(pickle.dumps(made))
    assert sent == made
    assert hash(sent) == hash(made)
    assert hash(made) != hash(distribution(failures=0.5))
    assert sent(SEEDS[5]) == made(SEEDS[5])


@pytest.mark.compiled
def test_capacities_are_measured_for_the_workloads_that_are_drawn():
    measured = Distribution.measured(RandomisationSettings(workloads={"chat": 1, "reasoning": 0}))
    ((name, capacity),) = measured.capacities
    assert name == "chat"
    assert 1 < capacity < 100


WIDE = {
    "workloads": {"chat": 1.0, "doc-qa": 1.0, "coding-agents": 2.0},
    "variants": 40,
    "prompt_scale": (0.1, 2.0),
    "think_scale": (0.3, 6.0),
    "kv_tokens": (2e5, 4e6),
    "chunk_size": (512, 8192),
    "anonymous": 0.3,
}


def test_variants_hold_every_workload_by_its_weight_and_stay_within_bounds():
    found = [variant for variant, _ in variants(RandomisationSettings(**WIDE))]
    names = [variant.workload.name for variant in found]
    assert [names.count(name) for name in WIDE["workloads"]] == [10, 10, 20]
    assert len({variant.name for variant in found}) == 40
    assert 4 <= sum(not variant.workload.session_ids for variant in found) <= 20
    for variant in found:
        assert 0.1 <= variant.workload.prompt_scale <= 2.0
        assert 0.3 <= variant.workload.think_scale <= 6.0
        assert variant.replica.chunk_size in (512, 1024, 2048, 4096, 8192)
        kv_tokens = variant.replica.num_blocks * variant.replica.block_size
        longest = library.max_tokens(variant.workload.name, variant.workload.prompt_scale)
        assert max(2e5, 2 * longest) <= kv_tokens
    assert len({variant.replica.chunk_size for variant in found}) == 5


def test_worlds_of_variants_play_their_traffic_on_their_servers():
    settings = RandomisationSettings(**WIDE, speed_error=0.3)
    capacities = tuple((variant.name, 1.0) for variant, _ in variants(settings))
    made = Distribution(settings, capacities)
    by_scale = {v.workload.prompt_scale: v for v, _ in made.variants}
    for seed in SEEDS[:100]:
        scenario = made(seed)
        assert Scenario.model_validate(scenario.model_dump()) == scenario
        variant = by_scale[scenario.workload.prompt_scale]
        for replica in scenario.cluster.replicas:
            assert replica.num_blocks == variant.replica.num_blocks
            assert 1 / 1.301 <= replica.assumed_speed / replica.speed <= 1.301
    assert pickle.loads(pickle.dumps(made))(SEEDS[0]) == made(SEEDS[0])


def test_a_rough_capacity_is_measured_of_every_variant():
    settings = RandomisationSettings(workloads={"chat": 1.0}, variants=2, prompt_scale=(0.1, 1.0))
    (_, first), (_, second) = Distribution.measured(settings).capacities
    scales = [variant.workload.prompt_scale for variant, _ in variants(settings)]
    assert (first > second) == (scales[0] < scales[1])


def test_ranges_that_need_variants_say_so():
    with pytest.raises(ValueError, match="need variants"):
        RandomisationSettings(prompt_scale=(0.5, 2.0))
