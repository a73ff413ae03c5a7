"""The fewest replicas, or the cheapest mix of kinds of them, that keeps an SLO at a given rate."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tailrace.config import MAX_REPLICAS, Cluster, Replica, Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import policy_for, run
from tailrace.evaluate.search.capacity import ServiceObjective
from tailrace.parallel import WorkerPool
from tailrace.saturation import resolve_rate

Counts = tuple[int, ...]

#: A mix can do more than its parts, for instance by keeping long prompts off slow replicas; one
#: that is this far from what its parts would do alone is not tried.
LEAST_MIX = 0.75
#: Shares of a limit for the P99 of first tokens that routers get as requests' target. Some
#: keep 99 in a hundred within the limit only if they aim well below it.
AIMS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Kind:
    """A kind of replica that is available."""

    name: str
    replica: Replica
    price: float = 1.0  #: of one, in any unit


@dataclass(frozen=True)
class Wanted:
    """Requirements on a cluster."""

    scenario: Scenario  #: its cluster does not count, its rate does
    objectives: tuple[ServiceObjective, ...]
    seeds: tuple[int, ...]  #: the objectives must hold on each
    most: int  #: replicas
    targets_s: tuple[float, ...] = ()
    """Targets for first tokens that policies may get, in this order; none: the scenario's."""

    def __post_init__(self) -> None:
        if not self.objectives or not self.seeds:
            raise TailraceError("a plan needs at least one objective and one seed")
        if self.scenario.events:
            raise TailraceError(
                "events name replicas, whose number is what a plan looks for; leave them out"
            )
        if not 1 <= self.most <= MAX_REPLICAS:
            raise TailraceError(f"a plan may use 1 to {MAX_REPLICAS} replicas, not {self.most}")


@dataclass(frozen=True)
class Trial:
    """One simulated cluster."""

    counts: Counts  #: of each kind
    price: float
    met: bool
    summary: Summary  #: of the first seed on which an objective fails, else of the last
    target_s: float | None = None  #: for first tokens, as given to the policy; None: the scenario's


@dataclass(frozen=True)
class Need:
    """What a policy needs."""

    policy: str
    found: Trial | None  #: None: not even the most replicas allowed will do
    trials: tuple[Trial, ...]  #: in the order of the search


@dataclass(frozen=True)
class SizingTask:
    """The search for one policy."""

    wanted: Wanted
    kinds: tuple[Kind, ...]
    policy: str


#: Tries one cluster of a task: how many of each kind, and the target for first tokens.
Attempt = Callable[[SizingTask, Counts, float | None], Trial]


def targets_s(scenario: Scenario, objectives: Sequence[ServiceObjective]) -> tuple[float, ...]:
    """Return the targets for first tokens that routers may get, s; none: the scenario's.

    Those of AIMS if there is a limit for first tokens, unless a target is given or the share of
    requests within their targets is an objective.
    """
    limits = {objective.kind: objective.limit for objective in objectives}
    given = "ttft_slo_s" in scenario.workload.model_fields_set
    if given or "attainment" in limits or "ttft_p99_s" not in limits:
        return ()
    return tuple(aim * limits["ttft_p99_s"] for aim in AIMS)


def plan(
    wanted: Wanted,
    kinds: Sequence[Kind],
    policies: Sequence[str],
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Need]:
    """Return what each policy needs, in the order given; every cluster meets the same requests.

    With one kind of replica it is the fewest of them; with several the cheapest mix. The search
    takes it that more replicas never do worse. ``progress`` gets how many policies are done.
    """
    if not kinds:
        raise TailraceError("a plan needs at least one kind of replica")
    for policy in policies:
        policy_for(_with(wanted.scenario, kinds, (1,) * len(kinds)), policy)
    tasks = [SizingTask(wanted, tuple(kinds), policy) for policy in policies]
    found: dict[str, Need] = {}
    with WorkerPool(jobs) as pool:
        for task, need in pool.run(search, tasks):
            found[task.policy] = need
            progress(len(found))
    return [found[policy] for policy in policies]


def simulated(task: SizingTask, counts: Counts, target_s: float | None) -> Trial:
    """Try a cluster in the simulator, seed by seed until an objective fails."""
    scenario = _with(task.wanted.scenario, task.kinds, counts)
    if target_s is not None:
        scenario = scenario.with_workload(ttft_slo_s=target_s)
    for seed in task.wanted.seeds:
        summary = summarise(run(scenario, task.policy, resolve_rate(scenario), seed))
        met = all(objective.met(summary) for objective in task.wanted.objectives)
        if not met:
            break
    return Trial(counts, price_of(counts, task.kinds), met, summary, target_s)


def search(task: SizingTask, attempt: Attempt = simulated) -> Need:
    """Return the cheapest cluster that meets the objectives, and all that were tried."""
    wanted, kinds = task.wanted, task.kinds
    trials: dict[Counts, Trial] = {}
    targets_s: Sequence[float | None] = wanted.targets_s or (None,)

    def met(counts: Counts) -> bool:
        nonlocal targets_s
        if counts not in trials:
            tried = []
            for target_s in targets_s:
                tried.append(attempt(task, counts, target_s))
                if tried[-1].met:
                    break
            trials[counts] = tried[-1] if tried[-1].met else tried[0]
            if len(tried) > 1 and sum(counts) > 1 and _all_alike(tried):
                targets_s = targets_s[:1]  # it does not look at them
        return trials[counts].met

    def fewest_of(kind: int) -> int | None:
        return _fewest(lambda n: met(_only(kind, n, len(kinds))), wanted.most)

    alone = [fewest_of(kind) for kind in range(len(kinds))]
    for counts in _cheaper_mixes(kinds, alone, wanted.most):
        failed = (t.counts for t in trials.values() if not t.met)
        if any(all(a <= b for a, b in zip(counts, f, strict=True)) for f in failed):
            continue
        if met(counts):
            break
    good = [trial for trial in trials.values() if trial.met]
    best = min(good, key=lambda t: (t.price, sum(t.counts)), default=None)
    return Need(task.policy, best, tuple(trials.values()))


def _fewest(met: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest sufficient number from 1 to ``most``; None if none is sufficient."""
    low, high = 0, 1
    while not met(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def _only(kind: int, count: int, kinds: int) -> Counts:
    return tuple(count if k == kind else 0 for k in range(kinds))


def _cheaper_mixes(
    kinds: Sequence[Kind], alone: Sequence[int | None], most: int
) -> Iterator[Counts]:
    """Mixes cheaper than the cheapest single kind that may suffice, cheapest first."""
    prices = [kind.price for kind in kinds]
    limit = min((n * p for n, p in zip(alone, prices, strict=True) if n is not None), default=None)
    if limit is None or len(kinds) == 1:
        return
    ranges = [range(min(most, int(limit / price)) + 1) for price in prices]
    mixes = [
        counts
        for counts in itertools.product(*ranges)
        if sum(count > 0 for count in counts) > 1
        and sum(counts) <= most
        and price_of(counts, kinds) < limit
        and sum(c / (n or 2 * most) for c, n in zip(counts, alone, strict=True)) >= LEAST_MIX
    ]
    yield from sorted(mixes, key=lambda counts: (price_of(counts, kinds), sum(counts)))


def _all_alike(trials: Sequence[Trial]) -> bool:
    return all(trial.summary.ttft_s == trials[0].summary.ttft_s for trial in trials)


def price_of(counts: Counts, kinds: Sequence[Kind]) -> float:
    """Return the price of a cluster."""
    return sum(count * kind.price for count, kind in zip(counts, kinds, strict=True))


def _with(scenario: Scenario, kinds: Sequence[Kind], counts: Counts) -> Scenario:
    replicas = tuple(
        kind.replica.model_copy(update={"count": count})
        for kind, count in zip(kinds, counts, strict=True)
        if count
    )
    return scenario.model_copy(update={"cluster": Cluster(replicas=replicas), "capacity_rps": None})
