"""What recorded traffic would have been like under other policies and with more or fewer replicas.

Sessions live: a follow-up comes its recorded think time after the simulated end of the turn before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.config import MAX_REPLICAS, Cluster, Engine, Replica, RouterSettings, Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import play, policy_for
from tailrace.parallel import WorkerPool
from tailrace.replay.fidelity import with_overhead
from tailrace.sim.result import SimResult
from tailrace.workload.table import RequestTable


@dataclass(frozen=True)
class ReplayOutcome:
    """One policy on one size of the cluster."""

    policy: str
    replicas: int
    summary: Summary


@dataclass(frozen=True)
class _Task:
    scenario: Scenario
    table: RequestTable
    policy: str
    seed: int
    warmup: float
    overhead_ms: tuple[float, ...]


def resized(cluster: Cluster, size: int) -> Cluster:
    """Return a cluster of so many replicas: the first ones, then the same again from the start."""
    if not 1 <= size <= MAX_REPLICAS:
        raise TailraceError(f"a cluster has 1 to {MAX_REPLICAS} replicas, got {size}")
    each = cluster.expanded()
    wanted = [each[k % len(each)] for k in range(size)]
    kinds: list[Replica] = []
    for replica in wanted:
        if kinds and kinds[-1].model_copy(update={"count": 1}) == replica:
            kinds[-1] = kinds[-1].model_copy(update={"count": kinds[-1].count + 1})
        else:
            kinds.append(replica)
    return Cluster(replicas=tuple(kinds))


def what_if(
    table: RequestTable,
    cluster: Cluster,
    policies: Sequence[str],
    sizes: Sequence[int],
    *,
    router: RouterSettings | None = None,
    engine: Engine | None = None,
    seed: int = 0,
    warmup_fraction: float = 0.0,
    overhead_ms: Sequence[float] = (0.0,),
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[ReplayOutcome]:
    """Simulate a table under each policy with each number of replicas, the cheapest policy first.

    ``overhead_ms`` is what a request takes beside its iterations, for each replica or for all.
    ``progress`` gets how many runs are done.
    """
    base = Scenario(router=router or RouterSettings(), engine=engine or Engine())
    tasks = [
        _Task(
            base.model_copy(update={"cluster": resized(cluster, size)}),
            *(table, policy, seed, warmup_fraction, tuple(overhead_ms)),
        )
        for size in dict.fromkeys(sizes)
        for policy in dict.fromkeys(policies)
    ]
    for task in tasks:
        policy_for(task.scenario, task.policy)
    found: dict[tuple[str, int], Summary] = {}
    with WorkerPool(jobs) as pool:
        for task, summary in pool.run(_run, tasks):
            found[task.policy, task.scenario.cluster.size] = summary
            progress(len(found))
    keys = [(task.policy, task.scenario.cluster.size) for task in tasks]
    outcomes = [ReplayOutcome(*key, found[key]) for key in keys]
    return sorted(outcomes, key=lambda o: (sizes.index(o.replicas), o.summary.cost_s))


def _run(task: _Task) -> Summary:
    result = replayed(task.scenario, task.table, task.policy, task.seed, task.overhead_ms)
    return summarise(result, task.warmup)


def replayed(
    scenario: Scenario,
    table: RequestTable,
    policy: str,
    seed: int,
    overhead_ms: Sequence[float] = (0.0,),
) -> SimResult:
    """Simulate a table on a scenario's cluster; ``overhead_ms`` as for :func:`what_if`."""
    result = play(scenario, table, policy_for(scenario, policy), seed)
    return with_overhead(result, overhead_ms)
