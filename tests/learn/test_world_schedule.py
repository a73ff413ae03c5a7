import pickle

import numpy as np
import pytest

from learn.tiny import scenario_file, settings
from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.learn.settings import FIRST_VALIDATION_SEED, SEEDS_PER_RUN, Stage
from tailrace.learn.world_schedule import SKETCH_REPLICAS, WorldSchedule, at_load, enlarged
from tailrace.learn.worlds import CompiledPolicy
from tailrace.seeds import Purpose, purpose_of, seeds

CAPACITIES = (("chat", 8.0), ("sessions-hot", 6.0))
RANDOM = {"workloads": dict(CAPACITIES), "replicas": [2, 5]}
NETWORK = np.zeros(1)


@pytest.fixture
def two(tmp_path):
    """The files of two scenarios."""
    return [scenario_file(tmp_path, "chat", 10.0), scenario_file(tmp_path, "sessions-hot", 12.0)]


def schedule(folder, over=None, capacities=()) -> WorldSchedule:
    return WorldSchedule(settings(folder, over), capacities)


def rates(worlds):
    return [world.scenario.workload.rate for world in worlds]


def codes(drivers):
    return {driver.code for driver in drivers}


# ---- worlds -------------------------------------------------------------------------------------


def test_scenarios_take_turns_also_from_one_step_to_the_next(tmp_path, two):
    made = schedule(tmp_path, {"scenarios": two})
    first, second = made.worlds(0, 3, 50, None), made.worlds(3, 3, 50, None)
    assert rates(first) == [10.0, 12.0, 10.0]
    assert rates(second) == [12.0, 10.0, 12.0]
    assert [world.number for world in first] == [0, 1, 0]
    found = [world.seed for world in (*first, *second)]
    assert found == seeds(Purpose.TRAINING, 6)
    assert {world.requests for world in first} == {50}


def test_runs_have_traffic_of_their_own(tmp_path):
    start = seeds(Purpose.TRAINING, 1)[0]
    for run in (0, 7):
        made = schedule(tmp_path, {"seed": run})
        assert made.seed(4) == start + run * SEEDS_PER_RUN + 4
        assert purpose_of(made.seed(4)) is Purpose.TRAINING


def test_the_same_worlds_judge_every_run(tmp_path, two):
    over = {"scenarios": two, "evaluation": {"worlds": 2, "requests": 33}}
    first = schedule(tmp_path, over).validation()
    assert first == schedule(tmp_path, {**over, "seed": 5}).validation()
    assert [world.number for world in first] == [0, 0, 1, 1]
    assert {world.requests for world in first} == {33}
    start = seeds(Purpose.TRAINING, 1, FIRST_VALIDATION_SEED)[0]
    assert [world.seed for world in first] == [start, start + 1] * 2


def test_randomised_worlds_beside_scenarios_by_their_share(tmp_path, two):
    over = {
        "scenarios": two,
        "randomise": {**RANDOM, "share": 0.5},
        "evaluation": {"worlds": 1, "randomised": 3},
    }
    made = schedule(tmp_path, over, CAPACITIES)
    worlds = made.worlds(0, 4, 50, None)
    random = [world.scenario.name.startswith("random-") for world in worlds]
    assert random == [True, True, False, False]
    assert len({world.number for world in worlds}) == 4
    assert made.max_replicas == 5
    judged = made.validation()
    assert [world.number for world in judged] == [0, 1, 2, 3, 4]
    assert made.capacities == CAPACITIES
    sampler = made.sampler(None)
    drawn = [sampler(seed).name.startswith("random-") for seed in seeds(Purpose.TRAINING, 300)]
    assert 0.4 < np.mean(drawn) < 0.6


def test_all_worlds_randomised(tmp_path):
    made = schedule(tmp_path, {"scenarios": [], "randomise": RANDOM}, CAPACITIES)
    worlds = made.worlds(8, 5, 50, None)
    assert [world.scenario for world in worlds] == [made.distribution(w.seed) for w in worlds]
    assert len(made.validation()) == made.settings.evaluation.randomised


def test_scenarios_that_cannot_be_trained_on(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text("[workload]\nrate = 1.0\n[[cluster.replicas]]\ncount = 1\n")
    with pytest.raises(TailraceError, match="with one replica there is no choice"):
        schedule(tmp_path, {"scenarios": [str(path)]})
    path.write_text('[workload]\nrate = 1.0\n[[cluster.replicas]]\ncount = 2\nscheduler = "orca"\n')
    with pytest.raises(TailraceError, match=r"cannot train on one: .*orca"):
        schedule(tmp_path, {"scenarios": [str(path)]})
    with pytest.raises(TailraceError, match="unknown scenario 'dem'; did you mean demo"):
        schedule(tmp_path, {"scenarios": ["dem"]})


# ---- stages -------------------------------------------------------------------------------------


def test_a_stage_changes_load_and_scenarios_of_all_that_is_played(tmp_path, two):
    made = schedule(tmp_path, {"scenarios": two, "demonstrations": {"off_nominal": 0.0}})
    stage = Stage(name="easy", load=0.5, scenarios=(two[1],))
    assert rates(made.worlds(0, 3, 50, stage)) == [6.0] * 3
    assert {world.number for world in made.worlds(0, 3, 50, stage)} == {1}
    sampler = made.sampler(stage)
    assert {sampler(seed).workload.rate for seed in seeds(Purpose.TRAINING, 20)} == {6.0}
    assert {made.sampler(None)(seed).workload.rate for seed in seeds(Purpose.TRAINING, 20)} == {
        10.0,
        12.0,
    }
    assert pickle.loads(pickle.dumps(sampler)) == sampler
    assert hash(pickle.loads(pickle.dumps(sampler))) == hash(sampler)
    tasks = made.label_tasks(0, NETWORK, False, stage)
    assert rates(task.world for task in tasks) == [6.0, 6.0]
    # What a policy is judged by stays the same.
    assert set(rates(made.validation())) == {10.0, 12.0}


def test_a_stage_changes_the_load_of_randomised_worlds(tmp_path):
    made = schedule(tmp_path, {"scenarios": [], "randomise": RANDOM}, CAPACITIES)
    usual, easy = (
        rates(made.worlds(0, 4, 50, stage)) for stage in (None, Stage(name="a", load=0.25))
    )
    assert easy == pytest.approx([0.25 * rate for rate in usual])


def test_load_as_rate_or_as_share_of_capacity():
    by_rate = Scenario(workload=Workload(rate=4.0))
    assert at_load(by_rate, 2.0).workload.rate == 8.0
    by_load = Scenario(workload=Workload(load=0.4))
    assert at_load(by_load, 2.0).workload.load == 0.8
    own_pace = Scenario(workload=Workload(name="mine.csv", load=None))
    assert at_load(own_pace, 2.0) == own_pace


# ---- demonstrations -----------------------------------------------------------------------------


def test_teachers_by_their_shares(tmp_path):
    teachers = {"round_robin": 2.0, "least_outstanding": 1.0, "random": 1.0, "lmetric": 0.0}
    over = {"demonstrations": {"teachers": teachers, "worlds": 400}}
    tasks = schedule(tmp_path, over).label_tasks(0, NETWORK, False, None)
    chosen = [task.teachers[0].code for task in tasks]
    assert {len(task.teachers) for task in tasks} == {1}
    for name, share in (("round_robin", 0.5), ("least_outstanding", 0.25), ("random", 0.25)):
        assert chosen.count(CompiledPolicy.of(name).code) / 400 == pytest.approx(share, abs=0.07)
    assert CompiledPolicy.of("lmetric").code not in chosen


@pytest.mark.parametrize("round_", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_few_worlds_are_shared_out_exactly_and_in_random_order(tmp_path, seed, round_):
    names = ("round_robin", "least_outstanding", "random", "lmetric")
    over = {
        "seed": seed,
        "demonstrations": {"teachers": dict(zip(names, (1, 1, 1, 3), strict=True)), "worlds": 12},
    }
    made = schedule(tmp_path, over)
    chosen = [task.teachers[0].code for task in made.label_tasks(round_, NETWORK, False, None)]
    assert [chosen.count(CompiledPolicy.of(name).code) for name in names] == [2, 2, 2, 6]
    other = [task.teachers[0].code for task in made.label_tasks(round_ + 1, NETWORK, False, None)]
    assert chosen != other


def test_with_best_teacher_all_of_them_apply(tmp_path):
    teachers = {"round_robin": 1.0, "random": 1.0, "lmetric": 0.0}
    over = {"demonstrations": {"teachers": teachers, "best_teacher": True}}
    tasks = schedule(tmp_path, over).label_tasks(0, NETWORK, False, None)
    assert tasks
    for task in tasks:
        assert codes(task.teachers) == codes(map(CompiledPolicy.of, ("round_robin", "random")))


def test_what_varies_from_world_to_world(tmp_path):
    d = {"worlds": 400, "warmup": 100, "unbalanced": 0.3, "off_nominal": 0.4,
         "load_factors": [0.5, 0.6], "epsilon": 0.2, "student_epsilon": 0.01}  # fmt: skip
    made = schedule(tmp_path, {"demonstrations": d})
    tasks = made.label_tasks(0, NETWORK, False, None)
    off = [task for task in tasks if task.world.scenario.workload.rate != 14.0]
    assert len(off) / 400 == pytest.approx(0.4, abs=0.07)
    assert all(7.0 <= task.world.scenario.workload.rate <= 8.4 for task in off)
    assert np.mean([task.unbalanced for task in tasks]) == pytest.approx(0.3, abs=0.07)
    warmups = [task.warmup for task in tasks]
    assert (min(warmups), max(warmups)) == (10, 100)
    assert {task.epsilon for task in tasks} == {0.2}
    assert {task.rows for task in tasks} == {60}
    assert {task.world.requests for task in tasks} == {161}
    later = made.label_tasks(1, NETWORK, True, None)
    assert {task.epsilon for task in later} == {0.01}
    assert all(task.student_acts for task in later)
    assert not {task.world.seed for task in tasks} & {task.world.seed for task in later}
    assert [t.warmup for t in made.label_tasks(0, NETWORK, False, None)] == warmups


def test_enlarged_is_the_same_several_times_over():
    cluster = Cluster(replicas=(Replica(count=2), Replica(speed=0.5)))
    by_load = Scenario(cluster=cluster, workload=Workload(load=0.7), capacity_rps=9.0)
    large = enlarged(by_load, 10)  # four times
    assert [r.count for r in large.cluster.replicas] == [8, 4]
    assert large.cluster.replicas[1].speed == 0.5
    assert large.capacity_rps == 36
    assert large.workload == by_load.workload
    by_rate = Scenario(cluster=cluster, workload=Workload(rate=5.0))
    assert enlarged(by_rate, 6).workload.rate == 10
    assert enlarged(by_rate, 3) == by_rate


def test_the_sketch_is_fitted_where_it_is_used(tmp_path):
    schedule = WorldSchedule(settings(tmp_path))
    tasks = schedule.sketch_tasks(np.zeros(3))
    assert all(task.world.scenario.cluster.size >= SKETCH_REPLICAS for task in tasks)
    assert {purpose_of(task.world.seed) for task in tasks} == {Purpose.TRAINING}
