"""Every term of the reward, with known answers."""

from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from tailrace.config import Cluster, CostModel, Replica, Scenario, Workload, parse
from tailrace.env.reward import Reward, RewardSettings, Weight
from tailrace.env.single_env import RouterEnv
from tailrace.env.vector_env import RouterVectorEnv
from tailrace.errors import LatencyLimitWarning, TailraceError
from tailrace.sim import cost_accounts
from tailrace.sim.fleet import Step, new_step
from tailrace.view.objective import composite_cost

WORLD = Scenario(
    cluster=Cluster(replicas=(Replica(num_blocks=3000, speed=2.0), Replica(num_blocks=3000))),
    workload=Workload(name="chat", rate=14.0),
)


def step(elapsed_s: float = 0.5, spread: float = 0.0, **terms: float) -> Step:
    out = new_step(1, 2)
    out.elapsed_s[:], out.spread[:] = elapsed_s, spread
    for name, value in terms.items():
        out.terms[0, cost_accounts.TERMS.index(name)] = value
    return out


def reward(settings: dict[str, object], *steps: Step) -> tuple[float, Reward]:
    function = Reward(RewardSettings(**settings), 1)
    for one in steps:
        value = function(one)
    return float(value[0]), function


def test_the_default_is_minus_the_composite_cost() -> None:
    value, function = reward({}, step(e2e_s=10, ttft_s=3, late_s=2, lost=1))
    assert value == pytest.approx(-composite_cost(10, 3, 2, 1))
    assert function.terms["e2e_s"] == 10
    assert function.terms["late_s"] == 2
    assert function.raw[0] == value
    assert function.shares_at_bounds() == (0, 0)


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ({"e2e": 1.0}, {"e2e_s": 4.0}, -4.0),
        ({"lost": 3.0}, {"lost": 2.0}, -6.0),
        ({"soft_late": 2.0}, {"soft_late": 0.25}, -0.5),
        ({"early": 0.5}, {"early": 3.0}, 1.5),
        ({"balance": 2.0}, {"spread": 0.4, "elapsed_s": 0.5}, -0.4),
        ({"throughput": 1.0}, {"finished": 1.0}, 0.0),
        ({"throughput": 1.0, "throughput_cap": 0.2}, {"elapsed_s": 2.0}, -0.4),
    ],
)
def test_single_terms(settings, given, expected) -> None:
    assert reward(settings, step(**given))[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, hint in get_type_hints(RewardSettings, include_extras=True).items()
        if hint == Weight
    ],
)
def test_every_weight_does_what_its_description_says(name) -> None:
    """A cost lowers the reward, a bonus raises it; no weight is without effect."""
    worse, better = (
        step(20.0, 0.4, **dict.fromkeys(cost_accounts.TERMS, value)) for value in (0.8, 0.1)
    )
    without, with_it = (reward({name: weight}, worse, better)[0] for weight in (0.5, 1.0))
    description = str(RewardSettings.model_fields[name].description)
    if description.startswith("Cost of"):
        assert with_it < without
    else:
        assert description.startswith(("Bonus for", "Reward for"))
        assert with_it > without


def test_improvement_rewards_a_falling_cost_rate() -> None:
    settings = {"e2e": 0.0, "ttft": 1.0, "improvement": 1.0, "history_s": 10.0}
    dear, cheap = step(5.0, ttft_s=50.0), step(5.0, ttft_s=5.0)
    falling, function = reward(settings, dear, dear, cheap)
    assert function.terms["improvement"][0] > 0
    assert falling > -5.0
    rising, function = reward(settings, cheap, cheap, dear)
    assert function.terms["improvement"][0] < 0
    assert rising < -50.0


def test_relative_to_its_own_past() -> None:
    settings = {"relative": 1.0, "history_s": 10.0}
    steady = [step(1.0, ttft_s=3.0)] * 50
    assert reward(settings, *steady)[0] == pytest.approx(0.0, abs=0.2)
    better, _ = reward(settings, *steady, step(1.0, ttft_s=1.0))
    assert better == pytest.approx(2.0, abs=0.2)


def test_relative_to_a_rule_on_the_same_requests() -> None:
    settings = {"relative": 1.0, "reference": "round_robin"}
    env = RouterVectorEnv(2, WORLD, decisions=100, group=2, reward=settings)
    env.reset(seed=1)
    rewards = []
    for k in range(99):
        _, reward_, _, _, info = env.step(np.array([k % 2, 1]))
        rewards.append(reward_)
        np.testing.assert_allclose(
            reward_, info["terms"]["reference_cost"] - info["cost_s"], atol=1e-9
        )
    totals = np.sum(rewards, axis=0)
    assert totals[0] == pytest.approx(0.0, abs=1e-6)  # it is round robin
    assert totals[1] < -1.0  # all to the slower of two


def test_the_bound_is_soft_and_reported() -> None:
    value, function = reward({"bound": 10.0}, step(ttft_s=0.1))
    assert value == pytest.approx(-0.1, rel=1e-3)
    value, function = reward({"bound": 10.0}, step(ttft_s=1000.0))
    assert -10.0 <= value < -9.9
    assert function.raw[0] == -1000.0
    assert function.shares_at_bounds() == (1.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "raw", "expected", "shares"),
    [
        ({"bound": 8.0, "bound_low": 4.0}, 2.0, 8 * np.tanh(2 / 8), (0, 0)),
        ({"bound": 8.0, "bound_low": 4.0}, 100.0, 8.0, (0, 1)),
        ({"bound": 8.0, "bound_low": 4.0}, -2.0, -4 * np.tanh(2 / 4), (0, 0)),
        ({"bound": 8.0, "bound_low": 4.0}, -100.0, -4.0, (1, 0)),
        ({"bound": 8.0, "bound_low": 4.0, "hard_bound": True}, 7.5, 7.5, (0, 0)),
        ({"bound": 8.0, "bound_low": 4.0, "hard_bound": True}, 9.0, 8.0, (0, 1)),
        ({"bound": 8.0, "bound_low": 4.0, "hard_bound": True}, -4.5, -4.0, (1, 0)),
        ({"bound_low": 4.0, "hard_bound": True}, 100.0, 100.0, (0, 0)),
        ({"bound_low": 4.0}, 100.0, 100.0, (0, 0)),
    ],
)
def test_bounds_that_differ_up_and_down(settings, raw, expected, shares) -> None:
    """A bonus of 1 per second of ``early`` gives the raw reward; negative ones are a cost."""
    value, function = reward({"early": 1.0, **settings}, step(early=raw))
    assert function.raw[0] == raw
    assert value == pytest.approx(expected, rel=1e-9)
    assert function.shares_at_bounds() == shares


def test_a_restart_forgets_the_past() -> None:
    function = Reward(RewardSettings(relative=1.0), 2)
    two = new_step(2, 2)
    two.elapsed_s[:] = 1.0
    two.terms[:, cost_accounts.TTFT] = 5.0
    function(two)
    function.restart(np.array([1]))
    function(two)
    assert function.terms["past_cost"][0] > 0
    assert function.terms["past_cost"][1] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"e2e": 0, "ttft": 0, "late": 0}, "nothing to learn from"),
        ({"bound": 0}, "bound"),
        ({"hard_bound": True}, "hard_bound needs bound"),
        ({"throughput_cap": 2}, "throughput_cap"),
        ({"laet": 1}, "laet"),
    ],
)
def test_settings_that_make_no_sense(settings, message) -> None:
    with pytest.raises(TailraceError, match=message):
        parse(RewardSettings, settings)


# ---- curves of the first token, by hand ---------------------------------------------------------

#: Every request below waits this long: one iteration of 10 ms + 300 tokens of 0.1 ms each.
TTFT_S = 0.040


def lone_requests(folder: Path, ttft_slo_s: float) -> Scenario:
    """One replica and three requests so far apart that none waits for another."""
    path = folder / "requests.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,300,2\n10,300,2\n20,300,2\n")
    cost = CostModel(base_ms=10.0, per_token_ms=0.1)
    return Scenario(
        cluster=Cluster(replicas=(Replica(cost=cost, num_blocks=3000),)),
        workload=Workload(name=str(path), requests=3, arrivals="trace", ttft_slo_s=ttft_slo_s),
    )


@pytest.mark.parametrize(
    ("ttft_slo_s", "settings", "penalty"),
    [
        (0.040, {}, 0.5),  # at the target, where the curve is centred
        (0.040, {"soft_centre": 0.5, "soft_scale": 0.5}, 0.7310585786300049),  # 1 / (1 + e^-1)
        (0.040, {"soft_centre": 2.0, "soft_scale": 0.5}, 0.1192029220221176),  # 1 / (1 + e^2)
        (0.020, {"soft_scale": 0.5}, 0.8807970779778823),  # 1 / (1 + e^-2)
        (0.001, {}, 1.0),
        (10.0, {"soft_scale": 0.01}, 0.0),
    ],
)
def test_the_logistic_penalty_of_a_known_wait(tmp_path, ttft_slo_s, settings, penalty) -> None:
    rewards, terms = lone(tmp_path, ttft_slo_s, "soft_late", 3.0, settings)
    assert terms == pytest.approx([penalty] * 2, abs=1e-12)
    assert rewards == pytest.approx([-3.0 * penalty] * 2, abs=1e-12)


@pytest.mark.parametrize(
    ("ttft_slo_s", "settings", "bonus"),
    [
        (0.160, {}, 0.5),  # half of the 0.08 s below which there is a bonus
        (0.400, {}, 0.8),
        (0.050, {"early_share": 1.0}, 0.2),
        (0.160, {"early_share": 0.25}, 0.0),  # just at the share
        (0.010, {}, 0.0),  # late: no bonus, and no penalty either
    ],
)
def test_the_bonus_for_a_known_wait(tmp_path, ttft_slo_s, settings, bonus) -> None:
    rewards, terms = lone(tmp_path, ttft_slo_s, "early", 2.0, settings)
    assert terms == pytest.approx([bonus] * 2, abs=1e-12)
    assert rewards == pytest.approx([2.0 * bonus] * 2, abs=1e-12)


def lone(
    folder: Path, ttft_slo_s: float, term: str, weight: float, settings: dict[str, float]
) -> tuple[list[float], list[float]]:
    """Play lone requests with one term only; returns rewards and that term, step by step."""
    only = {"e2e": 0.0, "ttft": 0.0, "late": 0.0, term: weight, **settings}
    env = RouterEnv(lone_requests(folder, ttft_slo_s), decisions=3, reward=only)
    env.reset(seed=1)
    steps = [env.step(0) for _ in range(2)]
    infos = [step[4]["terms"] for step in steps]
    assert [info["ttft_s"] for info in infos] == pytest.approx([TTFT_S] * 2)
    return [step[1] for step in steps], [info[term] for info in infos]


# ---- end-to-end latency and time per output token, by hand --------------------------------------

#: A lone request decodes its second and last token in one iteration of 10 ms + 1 token of 0.1 ms.
ANSWER_S = 0.0101
E2E_S = TTFT_S + ANSWER_S


@pytest.mark.parametrize(
    ("settings", "term", "expected"),
    [
        ({"e2e_target_s": 0.03}, "e2e_late", E2E_S - 0.03),
        ({"e2e_target_s": 0.06}, "e2e_late", 0.0),
        ({"e2e_target_s": E2E_S}, "e2e_soft_late", 0.5),
        ({"e2e_target_s": E2E_S / 1.5, "soft_scale": 0.25}, "e2e_soft_late", 0.8807970779778823),
        ({"e2e_target_s": E2E_S * 4}, "e2e_early", 0.5),
        ({"e2e_target_s": E2E_S * 1.9}, "e2e_early", 0.0),
        ({}, "tail", TTFT_S**2),
    ],
)
def test_end_to_end_latency_of_a_known_request(tmp_path, settings, term, expected) -> None:
    check_ended(tmp_path, settings, term, expected, tpot_slo_s=0.05)


@pytest.mark.parametrize(
    ("tpot_slo_s", "settings", "term", "expected"),
    [
        (0.004, {}, "tpot_late", ANSWER_S - 0.004),
        (0.020, {}, "tpot_late", 0.0),
        (ANSWER_S, {}, "tpot_soft_late", 0.5),
        (
            ANSWER_S / 2,
            {"soft_centre": 1.5, "soft_scale": 0.5},
            "tpot_soft_late",
            0.731058578630005,
        ),
        (ANSWER_S * 4, {}, "tpot_early", 0.5),
        (ANSWER_S * 4, {"early_share": 1.0}, "tpot_early", 0.75),
    ],
)
def test_time_per_output_token_of_a_known_request(
    tmp_path, tpot_slo_s, settings, term, expected
) -> None:
    check_ended(tmp_path, settings, term, expected, tpot_slo_s=tpot_slo_s)


def check_ended(folder, settings, term, expected, tpot_slo_s) -> None:
    world = lone_requests(folder, 1.0)
    world = world.with_workload(tpot_slo_s=tpot_slo_s)
    only = {"e2e": 0.0, "ttft": 0.0, "late": 0.0, term: 2.0, **settings}
    env = RouterEnv(world, decisions=3, reward=only)
    env.reset(seed=1)
    for _ in range(2):
        _, value, _, _, info = env.step(0)
        name = f"{term}_s" if f"{term}_s" in info["terms"] else term
        assert info["terms"][name] == pytest.approx(expected, abs=1e-9)
        sign = 1 if term.endswith("early") else -1
        assert value == pytest.approx(sign * 2.0 * expected, abs=1e-9)


# ---- alarms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit_s", "alarm"), [(E2E_S * 0.99, 1), (E2E_S * 1.01, 0)])
def test_a_request_beyond_the_limit_is_counted(tmp_path, limit_s, alarm) -> None:
    env = RouterEnv(lone_requests(tmp_path, 1.0), decisions=3, latency_limit_s=limit_s)
    env.reset(seed=1)
    _, _, terminated, truncated, info = env.step(0)
    assert info["alarms"] == alarm
    assert info["terms"]["over_limit"] == alarm
    assert not terminated
    assert not truncated


def test_an_alarm_may_warn(tmp_path) -> None:
    settings = {"latency_limit_s": 0.01, "latency_action": "warn"}
    env = RouterEnv(lone_requests(tmp_path, 1.0), decisions=3, **settings)
    env.reset(seed=1)
    with pytest.warns(LatencyLimitWarning, match=r"took longer than .* 0\.01: 1"):
        env.step(0)


def test_an_alarm_may_end_the_episode_at_a_cost(tmp_path) -> None:
    world = lone_requests(tmp_path, 1.0)
    settings = {"latency_limit_s": 0.01, "latency_action": "end", "latency_penalty": 7.0}
    plain, limited = RouterEnv(world, decisions=3), RouterEnv(world, decisions=3, **settings)
    for env in (plain, limited):
        env.reset(seed=1)
    (_, usual, *_), (_, value, terminated, truncated, _) = plain.step(0), limited.step(0)
    assert (terminated, truncated) == (True, False)
    assert value == pytest.approx(usual - 7.0)
    with pytest.raises(TailraceError, match=r"call reset\(\)"):
        limited.step(0)


def test_many_clusters_terminate_one_by_one() -> None:
    """The one that sends everything to the slower replica does so first."""
    settings = {"latency_limit_s": 12.0, "latency_action": "end"}
    env = RouterVectorEnv(2, WORLD, decisions=400, **settings)
    env.reset(seed=1)
    ends: list[tuple[int, int]] = []
    for k in range(300):
        _, _, terminated, truncated, info = env.step(np.array([1, k % 2]))
        assert not truncated.any()
        if terminated.any():
            assert info["_final_obs"].tolist() == terminated.tolist()
            assert (info["alarms"] > 0).tolist() == terminated.tolist()
            ends += [(k, int(c)) for c in np.flatnonzero(terminated)]
    assert ends[0][1] == 0
    assert {c for _, c in ends} == {0, 1}
    assert len({k for k, _ in ends}) == len(ends)
