"""What recorded traffic would have been like under other policies and with more or fewer replicas.

Sessions live: a follow-up comes its recorded think time after the simulated end of the turn before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.config import MAX_REPLICAS, Cluster, Engine, Replica, RouterSettings, Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import policy_for
from tailrace.parallel import WorkerPool
from tailrace.replay.fidelity import with_overhead
from tailrace.sim.simulator import simulate
from tailrace.workload.table import RequestTable


@dataclass(frozen=True)
class ReplayOutcome:
    """One policy on one size of the cluster."""

    policy: str
    replicas: int
    summary: Summary


@dataclass(frozen=True)
class _Task:
    cluster: Cluster
    table: RequestTable
    policy: str
    router: RouterSettings
    engine: Engine
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
    progress: Callable[[int], None] | None = None,
) -> list[ReplayOutcome]:
    """Simulate a table under each policy with each number of replicas, the cheapest policy first.

    ``overhead_ms`` is what a request takes beside its iterations, for each replica or for all.
    ``progress`` gets how many runs are done.
    """
    router, engine = router or RouterSettings(), engine or Engine()
    clusters = {size: resized(cluster, size) for size in dict.fromkeys(sizes)}
    wanted = list(dict.fromkeys(policies))
    tasks = []
    for some in clusters.values():
        for policy in wanted:
            policy_for(Scenario(cluster=some, router=router, engine=engine), policy)
            tasks.append(
                _Task(
                    some, table, policy, router, engine, seed, warmup_fraction, tuple(overhead_ms)
                )
            )
    found: dict[tuple[int, str], Summary] = {}
    with WorkerPool(jobs) as pool:
        for done, (task, summary) in enumerate(pool.run(_run, tasks), start=1):
            found[task.cluster.size, task.policy] = summary
            if progress is not None:
                progress(done)
    outcomes = [
        ReplayOutcome(policy, size, found[size, policy]) for size in clusters for policy in wanted
    ]
    order = {size: k for k, size in enumerate(clusters)}
    return sorted(outcomes, key=lambda o: (order[o.replicas], o.summary.cost_s))


def _run(task: _Task) -> Summary:
    scenario = Scenario(cluster=task.cluster, router=task.router, engine=task.engine)
    result = simulate(
        task.cluster,
        task.table,
        policy_for(scenario, task.policy),
        router=task.router,
        engine=task.engine,
        seed=task.seed,
    )
    return summarise(with_overhead(result, task.overhead_ms), task.warmup)
