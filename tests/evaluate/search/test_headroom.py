"""What a reward leaves to be won: known answers, and rewards that are no good are recognised."""

from dataclasses import replace

import numpy as np
import pytest

from policy.networks import random_policy
from tailrace.config import Cluster, Event, Replica, Scenario, Workload
from tailrace.env.reward import RewardSettings
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.evaluate.measure.runner import run
from tailrace.evaluate.search.headroom import (
    RewardDistribution,
    RewardResult,
    headroom,
    judged,
    players,
)
from tailrace.policy.registry import get
from tailrace.seeds import Purpose, seeds

pytestmark = pytest.mark.compiled
NOTHING = {"e2e": 0.0, "ttft": 0.0, "late": 0.0, "lost": 0.0}
SEEDS = seeds(Purpose.TRAINING, 2, 500)
WORLD = Scenario(
    name="two speeds",
    cluster=Cluster(replicas=(Replica(num_blocks=3000, speed=2.0), Replica(num_blocks=3000))),
    workload=Workload(name="chat", rate=14.0),
)
ALIKE = Scenario(
    cluster=Cluster(replicas=(Replica(count=3, num_blocks=3000),)),
    workload=Workload(name="chat", rate=12.0),
)
SESSIONS = Scenario(
    cluster=WORLD.cluster,
    workload=Workload(name="sessions-hot", rate=10.0),
    events=(Event(at_s=2, replica=1, kind="die"), Event(at_s=4, replica=1, kind="return")),
)
FEW = ("random", "round_robin", "least_outstanding", "lmetric", "lookahead", "lookahead_oracle")


def few(*names):
    return {name: get(name) for name in names or FEW}


def played_by(found):
    return {p.policy: p for p in found.played}


# ---- known answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [WORLD, SESSIONS], ids=["chat", "sessions and a failure"])
def test_the_cost_is_that_of_a_plain_simulation(world) -> None:
    found = headroom(world, RewardSettings(), few(), SEEDS, decisions=80)
    workload = world.workload.model_copy(update={"requests": 80})
    plain = world.model_copy(update={"workload": workload})
    for played in found.played:
        for seed, cost in zip(SEEDS, played.costs_s, strict=True):
            result = run(plain, played.policy, world.workload.rate, seed)
            total = composite_cost_s(result).sum()
            assert cost == pytest.approx(total / result.decisions, rel=1e-9)
        assert played.rewards == pytest.approx([-cost for cost in played.costs_s])
    assert [p.reward for p in found.played] == sorted(
        (p.reward for p in found.played), reverse=True
    )
    assert found.spearman == pytest.approx(1.0)


def test_there_is_room_where_speeds_differ() -> None:
    found = headroom(WORLD, RewardSettings(), few(), SEEDS, decisions=300)
    best = played_by(found)[found.best_rule]
    teacher = played_by(found)[found.teacher.policy]
    assert teacher.kind == "look-ahead"
    assert best.kind == "rule"
    assert found.teacher.share == pytest.approx((teacher.reward - best.reward) / abs(best.reward))
    assert found.teacher.low <= found.teacher.difference <= found.teacher.high
    assert not found.dead
    assert not found.at_ceiling
    assert "There is room above the best rule" in found.verdicts[0]
    assert "ranks policies as the latency cost does" in found.verdicts[1]


def test_a_rule_that_the_reward_is_made_for_is_its_ceiling() -> None:
    reward = RewardSettings(**NOTHING | {"balance": 1.0})
    found = headroom(ALIKE, reward, few(), SEEDS, decisions=200)
    assert found.best_rule == "least_outstanding"
    assert found.at_ceiling
    assert not found.dead
    assert found.teacher.difference < 0
    assert "least_outstanding, is the ceiling" in found.verdicts[0]
    assert played_by(found)["random"].terms["imbalance_s"] > 0


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (NOTHING | {"early": 1.0, "early_share": 1e-9}, "give other terms a weight"),
        ({"bound": 1e-7}, "loosen its bound"),
    ],
    ids=["nothing is ever early enough", "always at its bound"],
)
def test_a_dead_reward_is_recognised(settings, advice) -> None:
    found = headroom(WORLD, RewardSettings(**settings), few(), SEEDS, decisions=100)
    assert found.dead
    assert found.at_ceiling
    assert "The reward is dead" in found.verdicts[0]
    assert advice in found.verdicts[0]
    if "bound" in settings:
        assert found.at_bound > 0.99
        assert "at the bound" in found.verdicts[1]


def test_relative_to_a_rule_is_what_the_rule_pays_more() -> None:
    """Also with sessions, whose later requests come when the policy lets them."""
    world = SESSIONS.model_copy(update={"events": ()})
    plain = headroom(world, RewardSettings(), few(), SEEDS, decisions=80)
    reward = RewardSettings(relative=1.0, reference="round_robin")
    found = headroom(world, reward, few(), SEEDS, decisions=80)
    costs = {name: np.array(p.costs_s) for name, p in played_by(plain).items()}
    for name, played in played_by(found).items():
        assert played.rewards == pytest.approx(costs["round_robin"] - costs[name], abs=1e-9)
    only = headroom(world, reward, few("round_robin", "lookahead"), SEEDS, decisions=80)
    assert only.best_rule == "round_robin"
    assert only.teacher.share is None  # there is no share of nothing
    assert not only.at_ceiling


def test_every_cluster_has_a_memory_of_its_own() -> None:
    policies = few("random", "lookahead") | {"mine": random_policy("memory")}
    together = headroom(WORLD, RewardSettings(), policies, SEEDS, decisions=60)
    assert played_by(together)["mine"].kind == "policy"
    assert [room.policy for room in together.others] == ["mine"]
    for k, seed in enumerate(SEEDS):
        alone = headroom(WORLD, RewardSettings(), policies, [seed], decisions=60)
        mine = played_by(alone)["mine"]
        assert mine.rewards[0] == pytest.approx(played_by(together)["mine"].rewards[k], rel=1e-12)
        assert alone.teacher.low is None


def test_progress_is_told_after_every_policy() -> None:
    done = []
    few_players = few("random", "lookahead")
    headroom(
        WORLD, RewardSettings(), few_players, SEEDS, decisions=5, progress=lambda: done.append(1)
    )
    assert len(done) == 2


# ---- judging ------------------------------------------------------------------------------------


def one(name, rewards, cost_s, kind="rule", **changes):
    mean = float(np.mean(rewards))
    distribution = RewardDistribution(1.0, -1.0, 0.0, 1.0)
    played = RewardResult(
        name, kind, mean, cost_s, tuple(rewards), (cost_s,), abs(mean), distribution, 0.0, {}
    )
    return replace(played, **changes)


def judge(*played, reward=None):
    return judged(WORLD, reward or RewardSettings(), SEEDS, 10, played)


GOOD, BAD = one("good", [-2.0, -2.2], 2.0), one("bad", [-5.0, -6.0], 5.0)


def test_a_gain_on_some_seeds_only_is_no_room() -> None:
    found = judge(GOOD, BAD, one("teacher", [-1.0, -2.3], 1.5, "look-ahead"))
    assert found.teacher.difference == pytest.approx(0.45)
    assert found.teacher.low < 0 < found.teacher.high
    assert found.at_ceiling


def test_less_than_a_hundredth_is_no_room() -> None:
    assert judge(GOOD, BAD, one("teacher", [-1.99, -2.19], 2.0, "look-ahead")).at_ceiling
    assert not judge(GOOD, BAD, one("teacher", [-1.9, -2.1], 2.0, "look-ahead")).at_ceiling


def test_a_policy_may_see_what_the_look_ahead_does_not() -> None:
    teacher = one("teacher", [-2.5, -2.5], 2.5, "look-ahead")
    found = judge(GOOD, BAD, teacher, one("mine", [-1.0, -1.0], 1.0, "policy"))
    assert not found.at_ceiling
    assert "a given policy gets more" in found.verdicts[0]


def test_the_better_look_ahead_is_the_teacher() -> None:
    teachers = [one(str(k), [-k, -k], k, "look-ahead") for k in (1.5, 1.0)]
    found = judge(GOOD, BAD, *teachers)
    assert found.teacher.policy == "1.0"
    assert [room.policy for room in found.others] == ["1.5"]


def test_another_ranking_than_the_cost_is_told() -> None:
    rules = [one(str(k), [-k, -k], 10 - k) for k in (2.0, 3.0, 4.0)]
    found = judge(*rules, one("teacher", [-1.0, -1.0], 9.0, "look-ahead"))
    assert found.spearman == pytest.approx(-1.0)
    assert "otherwise than the latency cost" in found.verdicts[1]
    same = [replace(p, cost_s=1.0) for p in found.played]
    assert judge(*same).spearman is None


def test_rewards_at_the_bound_are_told() -> None:
    held = replace(BAD, at_bound=0.4)
    found = judge(GOOD, held, one("teacher", [-1.0, -1.0], 1.0, "look-ahead"))
    assert "Up to 40% of a policy's rewards" in found.verdicts[-1]


# ---- mistakes -----------------------------------------------------------------------------------


def test_players_are_all_rules_and_what_is_given(tmp_path) -> None:
    names = list(players())
    assert {"random", "round_robin", "lookahead", "lookahead_oracle"} <= set(names)
    assert list(players(["cache_aware:match_rate=0.5"])) == [*names, "cache_aware:match_rate=0.5"]
    (tmp_path / "mine.py").write_text("def scores(view): return view.replicas['in_flight']")
    with pytest.raises(TailraceError, match=r"mine.py cannot be played.*`tailrace compare`"):
        players([str(tmp_path / "mine.py")])


@pytest.mark.parametrize(
    ("policies", "numbers", "settings", "message"),
    [
        (FEW, seeds(Purpose.EVALUATION, 1), {}, "set aside for evaluation"),
        (FEW, seeds(Purpose.TUNING, 1), {}, "set aside for tuning"),
        (FEW, [], {}, "at least one seed"),
        (FEW, [5, 5], {}, "each seed once"),
        (("random",), [5], {}, "at least one rule and one look-ahead"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_cannot_be_judged(policies, numbers, settings, message) -> None:
    with pytest.raises(TailraceError, match=message):
        headroom(WORLD, RewardSettings(**settings), few(*policies), numbers, decisions=5)
