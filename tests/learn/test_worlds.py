from dataclasses import replace

import numpy as np
import pytest

from learn.tiny import SCENARIO
from policy.networks import random_tensors, small
from tailrace.config import Event, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.learn import kernels, worlds
from tailrace.learn.samples import Samples
from tailrace.learn.worlds import (
    BranchTask,
    CompiledPolicy,
    LabelTask,
    ScoreTask,
    World,
    branch,
    label,
    score,
)
from tailrace.policy import registry
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.observation import REPLICA_FEATURES
from tailrace.seeds import Purpose, seeds
from tailrace.sim import engine

pytestmark = pytest.mark.compiled

SEED = seeds(Purpose.TRAINING, 1)[0]
IN_FLIGHT = [feature.name for feature in REPLICA_FEATURES].index("in_flight")
#: Requests that come whatever happens to earlier ones.
OPEN = SCENARIO.model_copy(update={"workload": Workload(name="chat", rate=12.0)})


def network(variant="plain", seed=0):
    config = small(variant)
    return pack(config, random_tensors(config, seed))


def label_task(teachers=("lookahead",), variant="plain", **changes) -> LabelTask:
    task = LabelTask(
        World(SCENARIO, SEED, 400, 3),
        network(variant),
        tuple(CompiledPolicy.of(name) for name in teachers),
        student_acts=False,
        warmup=40,
        unbalanced=False,
        rows=60,
        epsilon=0.0,
    )
    return replace(task, **changes)


def branch_task(variant="plain", **changes) -> BranchTask:
    task = BranchTask(
        World(SCENARIO, SEED, 300),
        network(variant),
        warmup=40,
        rows=5,
        gap=12,
        candidates=3,
        horizon=1.0,
        min_horizon_s=1.0,
        max_horizon_s=4.0,
        return_share=0.0,
        logit_margin=2.0,
    )
    return replace(task, **changes)


def same(a: Samples, b: Samples) -> bool:
    pairs = zip(a.arrays().values(), b.arrays().values(), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


# ---- labels -------------------------------------------------------------------------------------


def test_labels_are_the_teachers_costs_and_repeat_exactly():
    task = label_task(epsilon=0.2)
    samples = label(task)
    assert same(samples, label(task))
    assert len(samples) == 60
    assert (samples.world == 3).all()
    assert samples.mask.all()
    assert samples.tried.all()
    assert (samples.costs > 0).all()
    assert np.isfinite(samples.costs).all()
    # The slow replica is seldom the cheapest.
    assert (samples.costs.argmin(axis=1) == 2).mean() < 0.3


@pytest.mark.parametrize("rule", ["round_robin", "least_outstanding", "random"])
def test_a_rule_as_teacher_names_its_choice(rule):
    samples = label(label_task((rule,)))
    assert (np.sort(samples.costs, axis=1) == [0.0, kernels.NOT_CHOSEN, kernels.NOT_CHOSEN]).all()
    chosen = samples.costs.argmin(axis=1)
    if rule == "round_robin":
        assert ((np.diff(chosen) % 3) == 1).all()
    if rule == "least_outstanding":
        in_flight = samples.replica_obs[:, :, IN_FLIGHT]
        assert (in_flight[np.arange(60), chosen] == in_flight.min(axis=1)).all()
    if rule == "random":
        assert np.bincount(chosen, minlength=3).min() > 8


def test_random_choices_lead_elsewhere_but_labels_stay_the_teachers():
    astray = label(label_task(("least_outstanding",), epsilon=1.0))
    in_flight = astray.replica_obs[:, :, IN_FLIGHT]
    chosen = astray.costs.argmin(axis=1)
    assert (in_flight[np.arange(60), chosen] == in_flight.min(axis=1)).all()
    straight = label(label_task(("least_outstanding",)))
    spread = [np.ptp(s.replica_obs[:, :, IN_FLIGHT], axis=1).mean() for s in (astray, straight)]
    assert spread[0] > 1.5 * spread[1]


def test_the_best_teacher_is_the_one_that_does_best_in_this_world():
    alone = label(label_task(("lookahead",)))
    for teachers in (("round_robin", "lookahead"), ("lookahead", "random", "round_robin")):
        assert same(label(label_task(teachers)), alone)
    assert not same(label(label_task(("round_robin",))), alone)


def test_an_unbalanced_start_has_most_requests_on_one_replica():
    for unbalanced, least, most in ((True, 0.6, 1.0), (False, 0.3, 0.5)):
        simulation = World(SCENARIO, SEED, 300).simulation()
        fleet, tables = simulation.arrays
        if unbalanced:
            assert kernels.unbalance(fleet, tables, 0, 200)
        else:
            rule = CompiledPolicy.of("round_robin")
            assert kernels.route(fleet, tables, 0, rule.code, rule.params, 200)
        sent = simulation.result().requests["replica"]
        largest = np.bincount(sent[sent >= 0]).max() / 200
        assert least < largest < most
    for unbalanced, least, most in ((True, 0.8, 1.0), (False, 0.3, 0.6)):
        first = label(label_task(unbalanced=unbalanced)).replica_obs[0, :, IN_FLIGHT]
        in_flight = np.expm1(first)
        assert least < in_flight.max() / in_flight.sum() < most


def test_labels_end_with_the_traffic():
    world = World(SCENARIO, SEED, 50)
    assert len(label(label_task(world=world, warmup=20, rows=100))) == 30
    assert len(label(label_task(world=world, warmup=50))) == 0


def test_the_prior_is_recorded_standardised():
    assert not label(label_task()).prior.any()
    prior = label(label_task(variant="prior")).prior
    varied = prior[np.ptp(prior, axis=1) > 0]
    assert len(varied) > 40
    assert varied.mean(axis=1) == pytest.approx(0, abs=1e-6)
    assert varied.std(axis=1) == pytest.approx(1, abs=1e-6)


def test_memory_is_recorded_as_the_student_has_it_before_each_decision():
    packed = network("memory")
    task = replace(label_task(student_acts=True), network=packed.copy())
    samples = label(task)
    assert samples.memory.shape == (60, 7)
    assert samples.memory[0].any()
    assert (np.diff(samples.memory, axis=0) != 0).any(axis=1).all()
    assert (task.network == packed).all()  # a task can be done again
    fresh = label(replace(task, warmup=0))
    assert not fresh.memory[0].any()
    # A network that does not drive remembers nothing.
    assert not label(replace(task, student_acts=False)).memory.any()


def test_a_trained_policy_teaches_while_the_student_drives():
    """Both are networks to the engine; the labels are the teacher's, the states the student's."""
    taught = label(label_task(("linear_es",), student_acts=True))
    alone = label(label_task(("lookahead",), student_acts=True))
    assert (taught.replica_obs == alone.replica_obs).all()
    assert (np.sort(taught.costs, axis=1)[:, :2] == (0.0, kernels.NOT_CHOSEN)).all()
    shown = label(label_task(("linear_es",)))
    assert (shown.replica_obs != taught.replica_obs).any()


def test_the_network_moves_the_world_only_if_it_drives():
    states = {
        drives: [
            label(label_task(student_acts=drives, network=network(seed=seed))).replica_obs
            for seed in (0, 1)
        ]
        for drives in (True, False)
    }
    assert (states[True][0] != states[True][1]).any()
    assert (states[False][0] == states[False][1]).all()


# ---- branches -----------------------------------------------------------------------------------


def total_cost(world, packed, decision, choice, plan=None):
    """Cost of all requests if one decision is forced; later ones by the network or by a plan.

    Returns the replica of every request too. Goes through the engine step by step.
    """
    packed = packed.copy()
    simulation = world.simulation()
    fleet, tables = simulation.arrays
    kernels.route(fleet, tables, 0, engine.LEARNED_CODE, packed, decision)
    wanted = engine.choice(fleet, tables, 0, engine.LEARNED_CODE, packed, False)
    engine.assign(fleet, tables, 0, wanted if choice is None else choice)
    while engine.next_decision(fleet, tables, 0) == engine.NEEDS_DECISION:
        request = fleet.clusters[0]["request"]
        chosen = engine.choice(fleet, tables, 0, engine.LEARNED_CODE, packed, False)
        engine.assign(fleet, tables, 0, chosen if plan is None else plan[request])
    result = simulation.result()
    ttft = result.requests["first_token_s"] - result.requests["arrived_s"]
    tail = world.tail_weight * (ttft**2 / result.table.rows["ttft_slo_s"]).sum()
    return float(composite_cost_s(result).sum() + tail), result.requests["replica"]


@pytest.mark.parametrize("tail_weight", [0.0, 3.0])
@pytest.mark.parametrize("variant", ["plain", "memory"])
@pytest.mark.parametrize("logit_margin", [0.0, np.inf])
def test_a_branch_that_goes_on_to_the_end_costs_what_the_rest_of_the_run_costs(
    logit_margin, variant, tail_weight
):
    """Without logit_margin all branches follow the network; with no end of it, the first's choices.

    The world has requests for 6 s more, and the branch goes on for longer.
    """
    world = World(OPEN, SEED, 120, tail_weight=tail_weight)
    task = branch_task(
        variant,
        world=world,
        rows=1,
        logit_margin=logit_margin,
        min_horizon_s=60.0,
        max_horizon_s=60.0,
    )
    samples = branch(task)
    assert samples.tried.all()
    plan = None
    if logit_margin == np.inf:
        plan = total_cost(world, task.network, task.warmup, None)[1]
    expected = [
        total_cost(world, task.network, task.warmup, replica, plan)[0] for replica in range(3)
    ]
    assert np.ptp(expected) > 0.01
    assert samples.costs[0] - samples.costs[0, 0] == pytest.approx(
        np.array(expected) - expected[0], abs=1e-6
    )


@pytest.mark.parametrize("tail_weight", [0.0, 3.0])
def test_what_is_in_the_system_at_the_horizon_runs_out(tail_weight):
    """No arrival after the decision: whatever the horizon, the cost is that of all there is."""
    world = World(OPEN, SEED, 41, tail_weight=tail_weight)
    costs = [
        branch(branch_task(world=world, rows=1, min_horizon_s=s, max_horizon_s=s)).costs
        for s in (0.01, 0.5, 100.0)
    ]
    assert np.ptp(costs[0]) > 0.01
    for found in costs[1:]:
        assert found == pytest.approx(costs[0], abs=1e-6)


def test_only_the_candidates_are_tried_the_best_first():
    samples = {k: branch(branch_task(candidates=k)) for k in (2, 3, 64)}
    assert (samples[2].tried.sum(axis=1) == 2).all()
    assert samples[3].tried.all()
    assert samples[64].tried.all()
    untried = ~samples[2].tried
    assert not samples[2].costs[untried].any()
    # At the first decision nothing has been learnt or tried before: the same two cost the same.
    tried = samples[2].tried[0]
    assert samples[2].costs[0, tried].tolist() == samples[3].costs[0, tried].tolist()


def test_a_dead_replica_is_no_candidate():
    failing = SCENARIO.model_copy(update={"events": (Event(at_s=0.5, replica=0, kind="die"),)})
    samples = branch(branch_task(world=World(failing, SEED, 300)))
    assert not samples.mask[:, 0].any()
    assert (samples.tried == samples.mask).all()
    assert np.isfinite(samples.costs).all()


@pytest.mark.parametrize("variant", ["plain", "memory", "prior", "all"])
def test_branching_leaves_the_world_and_the_memory_as_they_were(variant):
    task = branch_task(variant)
    ends = []
    for branching in (True, False):
        packed = task.network.copy()
        simulation = task.world.simulation()
        fleet, tables = simulation.arrays
        twin, _ = simulation.copy().arrays
        out = Samples.empty(1, 3, 0, small(variant).memory)
        after, plan = np.zeros(out.memory.shape[1], np.float32), np.zeros(300, np.int64)
        going = True
        while going:
            going = kernels.route(fleet, tables, 0, engine.LEARNED_CODE, packed, 25)
            if branching and going:
                arrays = out.arrays()
                rows = kernels.Rows._make(arrays[name] for name in kernels.Rows._fields)
                kernels.branch(
                    fleet, tables, 0, twin, packed, 3, 1.0, 1.0, 1.0, rows, 0, after, plan
                )
        ends.append((simulation.result(), packed))
    (with_, its_network), (without, other_network) = ends
    assert with_.requests.tobytes() == without.requests.tobytes()
    assert with_.replicas.tobytes() == without.replicas.tobytes()
    memory = slice(int(its_network[kernels.a.M]), None)
    size = small(variant).memory
    floats = [n.view(np.float32)[memory][:size] for n in (its_network, other_network)]
    assert floats[0].tobytes() == floats[1].tobytes()


def test_branches_repeat_exactly_and_end_with_the_traffic():
    samples = branch(branch_task())
    assert same(samples, branch(branch_task()))
    assert len(samples) == 5
    assert len(branch(branch_task(world=World(SCENARIO, SEED, 70)))) == 3
    assert len(branch(branch_task(world=World(SCENARIO, SEED, 30)))) == 0


# ---- playing to the end -------------------------------------------------------------------------


def test_looking_ahead_scores_better_than_taking_turns():
    world = World(SCENARIO, SEED, 600)
    played = {
        name: score(ScoreTask(world, CompiledPolicy.of(name)))
        for name in ("lookahead", "round_robin")
    }
    assert played["lookahead"].cost_s < 0.8 * played["round_robin"].cost_s
    assert played["round_robin"].shares == pytest.approx([1 / 3] * 3, abs=0.01)
    for one in played.values():
        assert sum(one.shares) == pytest.approx(1)
        assert 0 < one.figures["e2e_mean_s"] < one.cost_s * 5 + 1e-9


def test_the_tail_makes_waiting_cost_more_the_longer_it_is():
    plain, tailed = (
        score(ScoreTask(World(OPEN, SEED, 300, tail_weight=w), CompiledPolicy.of("round_robin")))
        for w in (0.0, 2.0)
    )
    assert plain.figures["ttft_p99_s"] == tailed.figures["ttft_p99_s"]
    simulation = World(OPEN, SEED, 300).simulation()
    simulation.run(registry.get("round_robin"))
    found = simulation.result().requests
    squares = (found["first_token_s"] - found["arrived_s"]) ** 2 / OPEN.workload.ttft_slo_s
    assert tailed.cost_s - plain.cost_s == pytest.approx(2.0 * squares.mean())


def test_worlds_refuse_traffic_set_aside_for_evaluation():
    with pytest.raises(TailraceError, match="set aside for evaluation"):
        World(SCENARIO, seeds(Purpose.EVALUATION, 1)[0], 50).simulation()


def test_a_smaller_late_share_charges_lateness_sooner():
    costs = {}
    for share in (1.0, 0.05):
        world = World(OPEN, SEED + 1, 300, late_share=share)
        costs[share] = branch(branch_task(world=world, rows=1)).costs[0]
    tried = costs[1.0] != 0
    assert tried.any()
    assert (costs[0.05][tried] > costs[1.0][tried]).all()


def test_the_horizon_covers_when_sessions_return():
    """A horizon of a second sees nothing of a session that pauses for ten."""
    pauses = np.array([2.0, 4.0, 8.0, 100.0])
    task = branch_task(horizon=1e-3, min_horizon_s=1.0, max_horizon_s=50.0)
    stay_s = task.world.residence_time_s()
    assert worlds._horizon_s(task, pauses) == 1.0
    assert worlds._horizon_s(replace(task, return_share=0.5), pauses) == stay_s + 6.0
    assert worlds._horizon_s(replace(task, return_share=1.0), pauses) == 50.0
    assert worlds._horizon_s(replace(task, return_share=1.0), pauses[:0]) == 1.0
