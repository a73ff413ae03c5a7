"""The look-ahead's scores against brute force, and against the rules it is to beat."""

import numpy as np
import pytest

from tailrace.config import Cluster, Engine, Replica, RouterSettings
from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.sim import engine as kernel
from tailrace.sim.simulator import Simulation, simulate
from tailrace.sim.types import SCHEDULER_CODES
from tailrace.view.objective import composite_cost
from tailrace.workload import library
from tailrace.workload.table import RequestTable


def total_cost(result, rows: int) -> float:  # type: ignore[no-untyped-def]
    """Composite cost in s of the first ``rows`` requests."""
    requests = result.requests[:rows]
    ttft = requests["first_token_s"] - requests["arrived_s"]
    e2e = requests["finished_s"] - requests["arrived_s"]
    late = np.maximum(ttft - result.table.rows["ttft_slo_s"][:rows], 0)
    return float(composite_cost(e2e, ttft, late, 0).sum())


@pytest.mark.compiled
@pytest.mark.parametrize("scheduler", SCHEDULER_CODES)
@pytest.mark.parametrize("blocks", [30_208, 420])
def test_oracle_scores_are_the_true_increase_of_cost(scheduler, blocks):
    """With no arrivals to come, trying each replica for real must give the same difference."""
    whole = library.make("chat", 40, 30.0, seed=11)
    keep = whole.rows["prompt_tokens"] + whole.rows["output_tokens"] < 4000
    rows = whole.rows[keep][:25]
    table, before = RequestTable(rows, whole.runs), RequestTable(rows[:-1], whole.runs)
    replica = Replica(
        scheduler=scheduler, num_blocks=blocks, prefix_caching=False, max_batch_tokens=8192
    )
    cluster = Cluster(replicas=(replica.model_copy(update={"count": 2}), replica))
    assigned = np.arange(len(rows)) % 3
    simulation = Simulation(cluster, table, lookahead=True)
    for r in assigned[:-1]:
        simulation.next_decision()
        simulation.assign(int(r))
    simulation.next_decision()
    rule = registry.get("lookahead_oracle")
    fleet, tables = simulation.arrays
    kernel.choice(fleet, tables, 0, rule.rule.code, rule.params, False)
    scores = fleet.scores[0].copy()
    without = Simulation(cluster, before)
    without.replay(assigned[:-1])
    base = total_cost(without.result(), len(rows) - 1)
    for r in range(3):
        trial = simulation.copy()
        trial.assign(r)
        trial.run(rule)
        assert scores[r] == pytest.approx(total_cost(trial.result(), len(rows)) - base, abs=1e-6)


@pytest.mark.compiled
def test_looking_ahead_leaves_the_cluster_as_it_was():
    table = library.make("sessions-hot", 120, 30.0, seed=3)
    cluster = Cluster(replicas=(Replica(count=3, num_blocks=900),))
    simulation = Simulation(cluster, table, lookahead=True)
    for k in range(60):
        simulation.next_decision()
        simulation.assign(k % 3)
    simulation.next_decision()
    twin = simulation.copy()
    rule = registry.get("lookahead")
    fleet, tables = simulation.arrays
    kernel.choice(fleet, tables, 0, rule.rule.code, rule.params, False)
    for each in (simulation, twin):
        each.assign(1)
        each.run(registry.get("round_robin"))
    assert simulation.result().requests.tobytes() == twin.result().requests.tobytes()


#: Working memory of the look-ahead; everything else in a fleet belongs to the real servers.
SCRATCH = {"ghost", "ghost_slots", "ghost_phase", "ghost_requests", "ghost_numbers", "notices"}


@pytest.mark.compiled
@pytest.mark.parametrize("blocks", [None, 700])
def test_looking_ahead_writes_to_its_own_memory_only(blocks):
    """Ghosts once registered blocks in the real prefix cache, which then looped for ever."""
    table = library.make("sessions-hot", 80, 30.0, seed=3)
    simulation = Simulation(
        Cluster(replicas=(Replica(count=2, num_blocks=blocks),)), table, lookahead=True
    )
    rule = registry.get("lookahead")
    fleet, tables = simulation.arrays
    code = rule.rule.code
    while simulation.next_decision() is not None:
        before = {name: array.tobytes() for name, array in fleet._asdict().items()}
        kernel.choice(fleet, tables, 0, code, rule.params, True)
        after = {name: array.tobytes() for name, array in fleet._asdict().items()}
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= {*SCRATCH, "scores"}
        simulation.assign(int(np.argmin(fleet.scores[0])))


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["lookahead", "lookahead_oracle"])
@pytest.mark.parametrize(
    ("workload", "server"),
    [
        ("chat", {}),
        ("chat", {"num_blocks": 420}),
        ("chat", {"num_blocks": 600, "preallocate_tokens": 40}),
        ("chat", {"scheduler": "sarathi", "num_blocks": 600}),
        ("chat", {"scheduler": "vllm", "num_blocks": 600}),
        ("sessions-hot", {}),
        ("sessions-hot", {"num_blocks": 900}),
    ],
)
def test_whole_stretches_and_single_iterations_give_the_same_scores(name, workload, server):
    """A stretch of decodes has streamed tokens already: the look-ahead knows them."""
    whole = library.make(workload, 300, 12.0, seed=7)
    keep = whole.rows["prompt_tokens"] + whole.rows["output_tokens"] < 4000
    table = whole if workload != "chat" else RequestTable(whole.rows[keep], whole.runs)
    cluster = Cluster(replicas=(Replica(**{"count": 2, "scheduler": "vllm_v1", **server}),))
    router = RouterSettings(predictor="mean")
    rule = registry.get(name)
    exact, fast = (
        Simulation(
            cluster,
            table,
            router=router,
            engine=Engine(engine="compiled", exact=each),
            lookahead=True,
        )
        for each in (True, False)
    )
    decisions = 0
    while exact.next_decision() is not None:
        fast.next_decision()
        for each in (exact, fast):
            fleet, tables = each.arrays
            kernel.choice(fleet, tables, 0, rule.rule.code, rule.params, False)
        scores = exact.arrays[0].scores[0]
        assert fast.arrays[0].scores[0] == pytest.approx(scores, abs=1e-6)
        for each in (exact, fast):
            each.assign(int(np.argmin(scores)))
        decisions += 1
    assert decisions == len(table)


@pytest.mark.compiled
@pytest.mark.parametrize("workload", ["chat", "sessions-hot"])
def test_looking_ahead_beats_the_rules_on_its_own_cost(workload):
    table = library.make(workload, 3000, 18.0, seed=21)
    cluster = Cluster(replicas=(Replica(count=2), Replica(count=2, speed=0.5)))
    router = RouterSettings(staleness_s=0.5)
    cost = {
        policy: total_cost(simulate(cluster, table, policy, router=router), len(table))
        for policy in ("lookahead", "lookahead_oracle", "least_outstanding", "round_robin")
    }
    assert cost["lookahead"] < 0.9 * cost["least_outstanding"]
    assert cost["lookahead"] < 0.9 * cost["round_robin"]
    assert cost["lookahead_oracle"] < 0.9 * cost["least_outstanding"]


@pytest.mark.compiled
@pytest.mark.parametrize("ahead", [0, 40])
def test_predictions_beyond_the_memory_of_a_replica_do_not_hang_the_look_ahead(ahead):
    """Such an answer could never end; it is taken to be as long as there is room for.

    Blocks that running requests have taken ahead (tokens) come back to the ghost as well.
    """
    table = library.make("chat", 60, 20.0, seed=5)
    rows = table.rows.copy()
    rows["prompt_tokens"] = np.minimum(rows["prompt_tokens"], 600)
    rows["output_tokens"] = np.minimum(rows["output_tokens"], 60)
    short = RequestTable(rows, table.runs)
    replica = Replica(
        count=2, num_blocks=64, prefix_caching=False, scheduler="vllm_v1", preallocate_tokens=ahead
    )
    cluster = Cluster(replicas=(replica,))
    router = RouterSettings(predictor="mean", prior_output_tokens=1e9)
    result = simulate(cluster, short, "lookahead", router=router, seed=1)
    assert np.isfinite(result.requests["finished_s"]).all()


def test_without_room_it_is_refused() -> None:
    """It used to write past the end of the arrays."""
    simulation = Simulation(Cluster(), library.make("chat", 5, 1.0, seed=2))
    with pytest.raises(TailraceError, match="lookahead=True"):
        simulation.run(registry.get("lookahead"))
    with pytest.raises(TailraceError, match="lookahead=True"):
        simulation.copy().run(registry.get("lookahead"))
