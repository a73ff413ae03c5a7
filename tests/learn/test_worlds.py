import numpy as np
import pytest

from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.learn.worlds import (
    BranchTask,
    Driver,
    LabelTask,
    ScoreTask,
    World,
    branch,
    label,
    score,
)
from tailrace.seeds import Purpose, seeds

SEED = seeds(Purpose.TRAINING, 1)[0]
SCENARIO = Scenario(
    cluster=Cluster(replicas=(Replica(count=2), Replica(speed=0.5))),
    workload=Workload(name="sessions-hot", rate=14.0),
)


@pytest.mark.compiled
def test_labels_are_the_teachers_costs_and_repeat_exactly():
    task = LabelTask(
        World(SCENARIO, SEED, 400, 3),
        Driver.of_rule("round_robin"),
        Driver.of_rule("lookahead"),
        warmup=40,
        rows=100,
        epsilon=0.2,
    )
    samples, again = label(task), label(task)
    assert len(samples) == 100
    assert (samples.world == 3).all()
    assert samples.mask.all()
    assert np.isfinite(samples.costs).all()
    assert (samples.costs > 0).all()
    assert samples.costs.tobytes() == again.costs.tobytes()
    assert samples.replica_obs.tobytes() == again.replica_obs.tobytes()
    # The slow replica is seldom the cheapest.
    assert (samples.costs.argmin(axis=1) == 2).mean() < 0.3


def test_labels_end_with_the_traffic():
    world = World(SCENARIO, SEED, 50)
    rule = Driver.of_rule("lookahead")
    assert len(label(LabelTask(world, rule, rule, 20, 100, 0.0))) == 30


def test_branches_tell_choices_apart_and_leave_the_world_as_it_was():
    rule = Driver.of_rule("lmetric")
    task = BranchTask(World(SCENARIO, SEED, 400), rule, warmup=60, rows=6, gap=20, horizon_s=8.0)
    samples, again = branch(task), branch(task)
    assert len(samples) == 6
    assert samples.costs.tobytes() == again.costs.tobytes()
    assert (samples.costs > 0).all()
    assert (np.ptp(samples.costs, axis=1) > 0).all()


@pytest.mark.compiled
def test_looking_ahead_scores_better_than_taking_turns():
    world = World(SCENARIO, SEED, 600)
    costs = {
        name: score(ScoreTask(world, Driver.of_rule(name))) for name in ("lookahead", "round_robin")
    }
    assert costs["lookahead"] < 0.8 * costs["round_robin"]


def test_worlds_refuse_traffic_set_aside_for_evaluation():
    with pytest.raises(TailraceError, match="set aside for evaluation"):
        World(SCENARIO, seeds(Purpose.EVALUATION, 1)[0], 50).simulation()
