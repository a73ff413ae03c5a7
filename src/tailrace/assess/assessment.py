"""Recorded traffic replayed under every policy: latencies, missed SLOs, replicas to spare.

Intervals come from a bootstrap over consecutive blocks of requests and over several replays, in
which requests come a moment sooner or later: which of them meet at a server is a matter of chance,
and with some policies a large one. Every policy gets the same requests and the same draws, so that
changes are paired. The replay's own error is what it says about the rule that was in charge,
against what was recorded under that rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.calibrate.logs import LEAST_REQUESTS, calibrate_log
from tailrace.calibrate.result import Calibration
from tailrace.config import Cluster, Engine, Replica, RouterSettings, Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.judge.bootstrap import CONFIDENCE, bounds
from tailrace.evaluate.measure.metrics import composite_cost_s, request_times, slo_met
from tailrace.evaluate.measure.runner import default_policies, policy_for
from tailrace.parallel import WorkerPool
from tailrace.policy import registry
from tailrace.replay.fidelity import Fidelity, fidelity
from tailrace.replay.recorded import RecordedTraffic
from tailrace.replay.what_if import replayed
from tailrace.seeds import generator
from tailrace.sim.result import SimResult
from tailrace.view.cost_model import cost_rows, prefill_tokens_per_s
from tailrace.view.devices import cost_of
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

#: Blocks of consecutive requests that the bootstrap draws from, and the fewest requests of one.
MOST_BLOCKS, LEAST_BLOCK = 20, 10
#: Draws for means, and for percentiles, which have to be found anew in each.
DRAWS, PERCENTILE_DRAWS = 2000, 200
#: Replays of a policy, and how many requests they have together at most.
REPLAYS, MOST_REPLAYED = 5, 100_000
#: Requests come up to this much later than recorded in all replays but the first, s.
SHIFT_S = 0.004
#: One request in this many is left out of the calibration, to test it.
HELD_OUT = 4
#: A policy that lowers the cost by less, as a share, is not worth a switch.
LEAST_GAIN = 0.01
#: What is measured of every request, in this order.
MEASURES = ("ttft_s", "e2e_s", "missed", "cost_s")
TTFT, E2E, MISSED, COST = range(len(MEASURES))
#: A policy is no worse than another one if none of these is.
NO_WORSE = (TTFT, E2E, MISSED)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Prospect:
    """What one policy gives on the recorded requests. Times in s; changes and ``missed`` as shares.

    Changes are against the present rule in the same replay; None: there is nothing to set it
    against.
    """

    policy: str
    ttft_s: Estimate
    ttft_p99_s: Estimate
    e2e_s: Estimate
    missed: Estimate
    """Requests outside their SLO: first token too late, or tokens too slow."""
    cost_s: Estimate
    ttft_change: Estimate | None = None
    e2e_change: Estimate | None = None
    cost_change: Estimate | None = None
    spare: Estimate | None = None
    """Replicas that could be switched off, the slowest first, with TTFT, end-to-end time and missed
    SLOs still no worse than those of the present rule on all replicas."""


@dataclass(frozen=True)
class ReplayErrors:
    """Mean latencies of a replay against what was recorded, as shares: 0.1 is 10 % too long."""

    ttft: float | None
    """First token, each request on its recorded replica at its recorded moment; None: no answer
    streamed."""
    e2e: float
    """The same of whole answers."""
    requests: int
    """Requests that were compared."""
    held_out: bool
    """Whether they were left out of the calibration."""
    rule_ttft: float | None = None
    """First token with the present rule deciding anew; None: it cannot be replayed."""
    rule_e2e: float | None = None
    rule_missed: float | None = None
    """Difference of the shares of missed SLOs: 0.01 is one request in a hundred too many."""

    @property
    def worst_e2e(self) -> float:
        """The larger error of whole answers, without its sign."""
        return max(abs(self.e2e), abs(self.rule_e2e or 0.0))


@dataclass(frozen=True)
class Assessment:
    """What there is, and what each policy would give."""

    requests: int
    duration_s: float
    replicas: int
    present: str
    """The rule in charge."""
    recorded: Prospect | None
    """What was recorded; None: a trace without latencies."""
    prospects: tuple[Prospect, ...]
    """The lowest cost first; the present rule is among them unless it cannot be replayed."""
    errors: ReplayErrors | None
    """None: a trace without latencies."""
    fidelity: Fidelity | None
    """Simulated against recorded, each request on its recorded replica; None: as above."""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Prospect:
        """The policy of the lowest cost."""
        return self.prospects[0]

    @property
    def now(self) -> Prospect | None:
        """What the others are set against: the present rule replayed, else what was recorded."""
        found = (p for p in self.prospects if p.policy == self.present)
        return next(found, self.recorded)

    @property
    def gains(self) -> bool:
        """Whether the best policy is better for certain, by more than the replay's error, and by
        more than is worth a switch."""
        change = self.best.cost_change
        if self.best.policy == self.present or change is None or change.high >= 0:
            return False
        least = LEAST_GAIN if self.errors is None else max(LEAST_GAIN, self.errors.worst_e2e)
        return -change.value > least


@dataclass(frozen=True)
class ServerModel:
    """The servers as the replay takes them to be."""

    cluster: Cluster
    overhead_ms: tuple[float, ...] = (0.0,)
    """What a request takes beside its iterations, of each replica or of all."""
    held_out: bool = False
    """Whether the requests of :func:`held_out` were left out of the calibration."""


def held_out(requests: int) -> NDArray[np.bool_]:
    """Return which requests [R] are left out of the calibration to test it: one in four, at random.

    Their load is simulated with that of the others; only their latencies are not looked at.
    """
    return np.asarray(generator(0, "held out").random(requests) < 1 / HELD_OUT)


def calibrate(
    recorded: RecordedTraffic,
    known: Replica,
    *,
    same: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[Calibration, ServerModel]:
    """Fit the servers to a log, without the latencies of one request in four.

    All of them are used if some replica has too few requests.
    """
    outcomes = recorded.outcomes.copy()
    rows = held_out(len(outcomes))
    fitted = np.bincount(outcomes["replica"][~rows], minlength=recorded.replicas)
    enough = bool((fitted.sum() if same else fitted.min()) >= LEAST_REQUESTS)
    if enough:
        outcomes["is_estimated"] |= rows  # a fit takes no notice of estimated times
    found = calibrate_log(replace(recorded, outcomes=outcomes), known, same=same, progress=progress)
    overhead = [c.overhead_ms for c in found.replicas for _ in range(c.replica.count)]
    return found, ServerModel(found.cluster(), tuple(overhead), enough)


def with_targets(
    table: RequestTable, ttft_slo_s: float | None, tpot_slo_s: float | None
) -> RequestTable:
    """Return requests with other latency targets in s; None: as they are."""
    rows = table.rows.copy()
    for name, target_s in (("ttft_slo_s", ttft_slo_s), ("tpot_slo_s", tpot_slo_s)):
        if target_s is not None:
            rows[name] = target_s
    return RequestTable(rows, table.runs)


def candidates(cluster: Cluster) -> list[str]:
    """Return the shipped policy and every rule that a live router can follow."""
    able, _ = default_policies(Scenario(cluster=cluster))
    simulated_only = {rule.name for rule in registry.rules() if rule.in_engine}
    return [name for name in able if name not in simulated_only]


def assess(
    traffic: RecordedTraffic | RequestTable,
    model: ServerModel,
    policies: Sequence[str],
    *,
    present: str | None = None,
    router: RouterSettings | None = None,
    seed: int = 0,
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Assessment:
    """Replay traffic under some policies. ``progress`` gets how many of them are done.

    ``present``: the rule in charge; default: the one with the most decisions in the log. A table of
    requests without latencies needs it.
    """
    recorded = traffic if isinstance(traffic, RecordedTraffic) else None
    table = traffic.table if isinstance(traffic, RecordedTraffic) else traffic
    present = present or (recorded.policies[0] if recorded else None)
    if present is None:
        raise TailraceError("a trace does not say which rule is in charge; give --present")
    if len(table) < 2 * LEAST_BLOCK:
        raise TailraceError(
            f"{len(table)} requests are too few to assess; at least {2 * LEAST_BLOCK} are needed"
        )
    if recorded is not None and model.cluster.size < recorded.replicas:
        raise TailraceError(
            f"the log names {recorded.replicas} replicas and the cluster has {model.cluster.size}"
        )
    notes: list[str] = []
    base = Scenario(router=router or RouterSettings(), engine=Engine(), cluster=model.cluster)
    blocks = Blocks.of(len(table))
    was = None if recorded is None else measured(recorded.result())[None]
    now = was
    tables = [shifted(table, k) for k in range(_replays(len(table)))]
    try:
        policy_for(base, present)
    except TailraceError as error:
        if was is None:
            raise
        notes.append(
            f"The rule in charge, {present}, cannot be replayed here ({error}): policies are set "
            "against what was recorded, so the replay's error is part of their gain."
        )
    else:
        now = np.stack(
            [measured(replayed(base, t, present, seed, model.overhead_ms)) for t in tables]
        )
    assert now is not None
    chosen = list(dict.fromkeys([*policies, *([present] if now is not was else [])]))
    for name in chosen:
        policy_for(base, name)
    tasks = [_Task(base, tables, name, seed, model.overhead_ms, blocks, now) for name in chosen]
    found = []
    with WorkerPool(jobs) as pool:
        for _, prospect in pool.run(_prospect, tasks):
            found.append(prospect)
            progress(len(found))
    found.sort(key=lambda p: (p.cost_s.value, chosen.index(p.policy)))
    errors = trust = before = None
    if recorded is not None and was is not None:
        before = blocks.prospect("recorded", was, None)
        rows = held_out(len(table)) if model.held_out else np.full(len(table), True)
        trust = fidelity(recorded, model.cluster, overhead_ms=model.overhead_ms, only=rows)
        errors = _errors(trust, was, None if now is was else now, held_out=model.held_out)
    span = table.rows["arrival_s"]
    duration_s = float(span[-1] - span[0])
    if recorded is not None:
        duration_s = float(recorded.outcomes["last_s"].max())
    return Assessment(
        len(table), duration_s, model.cluster.size, present, before, tuple(found), errors, trust,
        tuple(notes),
    )  # fmt: skip


def _replays(requests: int) -> int:
    return max(1, min(REPLAYS, MOST_REPLAYED // requests))


def shifted(table: RequestTable, replay: int) -> RequestTable:
    """Return requests that come up to SHIFT_S later than recorded, at random.

    Replay 0 is the recording itself. Follow-ups are delayed beyond their think time. The order of
    arrivals stays.
    """
    if replay == 0:
        return table
    rows = table.rows.copy()
    late_s = generator(replay, "shifted").uniform(0.0, SHIFT_S, len(rows))
    rows["arrival_s"] = np.maximum.accumulate(rows["arrival_s"] + late_s)
    rows["think_s"] += np.where(rows["parent"] >= 0, late_s, 0.0)
    return RequestTable(rows, table.runs)


def measured(result: SimResult) -> Floats:
    """Return the MEASURES [R, 4] of a run; a latency that a request does not have is NaN."""
    times = request_times(result)
    missed = (~slo_met(result)).astype(np.float64)
    return np.column_stack([times.ttft_s, times.e2e_s, missed, composite_cost_s(result)])


def _errors(trust: Fidelity, was: Floats, now: Floats | None, *, held_out: bool) -> ReplayErrors:
    found = {a.name: a.mean_error for a in trust.latencies}
    errors = ReplayErrors(found.get("TTFT"), found["E2E"], trust.latencies[-1].requests, held_out)
    if now is None:
        return errors
    real, simulated = (np.nanmean(values, axis=(0, 1)) for values in (was, now))
    return replace(
        errors,
        rule_ttft=float(simulated[TTFT] / real[TTFT] - 1),
        rule_e2e=float(simulated[E2E] / real[E2E] - 1),
        rule_missed=float(simulated[MISSED] - real[MISSED]),
    )


# ---- intervals ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of requests, and how often each draw of the bootstrap takes each."""

    block: NDArray[np.int64]
    """Block of each request [R]."""
    draws: Floats
    """[DRAWS, blocks]"""

    @classmethod
    def of(cls, requests: int) -> "Blocks":
        """Divide a number of requests into blocks."""
        count = min(MOST_BLOCKS, requests // LEAST_BLOCK)
        block = np.arange(requests) * count // requests
        even = np.full(count, 1 / count)
        return cls(block, generator(0, "assess").multinomial(count, even, DRAWS).astype(np.float64))

    def means(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the means [4] of measures [K, R, 4] of K replays, and of every draw [DRAWS, 4].

        A draw takes the blocks of one replay; equal draws of two policies take the same one.
        """
        there = np.isfinite(values)
        count = self.draws.shape[1]
        sums, counts = (
            np.stack([[np.bincount(self.block, column, count) for column in one.T] for one in of])
            for of in (np.where(there, values, 0.0), there.astype(np.float64))
        )  # [K, 4, blocks]
        drawn = np.empty((len(self.draws), values.shape[2]))
        for k, (one, n) in enumerate(zip(sums, counts, strict=True)):
            rows = self.draws[k :: len(sums)]
            drawn[k :: len(sums)] = (rows @ one.T) / np.maximum(rows @ n.T, 1e-12)
        return sums.sum(axis=(0, 2)) / counts.sum(axis=(0, 2)), drawn

    def p99(self, values: Floats) -> Estimate:
        """Return the 99th percentile of values [K, R]: the mean of that of each replay."""
        blocks = range(self.draws.shape[1])
        parts = [[one[self.block == k] for k in blocks] for one in values]
        parts = [[part[np.isfinite(part)] for part in one] for one in parts]
        drawn = []
        for d, row in enumerate(self.draws[:PERCENTILE_DRAWS]):
            chosen = zip(parts[d % len(parts)], row, strict=True)
            drawn.append(np.percentile(np.concatenate([np.tile(p, int(n)) for p, n in chosen]), 99))
        each = [np.percentile(np.concatenate(one), 99) for one in parts]
        return Estimate(float(np.mean(each)), *bounds(np.asarray(drawn)))

    def prospect(self, policy: str, values: Floats, now: Floats | None) -> Prospect:
        """Summarise measures [K, R, 4] of a policy, and set them against the present rule's."""
        mean, drawn = self.means(values)
        figures = [_estimate(mean[k], drawn[:, k]) for k in range(len(MEASURES))]
        found = Prospect(
            policy,
            ttft_s=figures[TTFT],
            ttft_p99_s=self.p99(values[:, :, TTFT]),
            e2e_s=figures[E2E],
            missed=figures[MISSED],
            cost_s=figures[COST],
        )
        if now is None:
            return found
        before, drawn_before = self.means(now)
        ttft, e2e, cost = (
            _estimate(mean[k] / before[k] - 1, drawn[:, k] / drawn_before[:, k] - 1)
            for k in (TTFT, E2E, COST)
        )
        return replace(found, ttft_change=ttft, e2e_change=e2e, cost_change=cost)


def _estimate(value: float, drawn: Floats) -> Estimate:
    return Estimate(float(value), *bounds(drawn))


# ---- one policy ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    scenario: Scenario
    tables: Sequence[RequestTable]
    policy: str
    seed: int
    overhead_ms: tuple[float, ...]
    blocks: Blocks
    now: Floats


def _prospect(task: _Task) -> Prospect:
    """Replay one policy on all replicas, then on fewer until it is worse than the present rule."""
    whole = _measured_on(task, range(task.scenario.cluster.size))
    found = task.blocks.prospect(task.policy, whole, task.now)
    order = slowest_first(task.scenario.cluster)
    now, drawn_now = task.blocks.means(task.now)
    limit, drawn_limit = now[list(NO_WORSE)], drawn_now[:, list(NO_WORSE)]
    spare, drawn_spare = 0, np.zeros(len(drawn_now))
    holds, drawn_holds = _no_worse(task, whole, limit, drawn_limit)
    for off in range(1, len(order)):
        if not holds and drawn_holds.mean() < (1 - CONFIDENCE) / 2:
            break
        kept = sorted(set(order[off:]))
        fewer = _no_worse(task, _measured_on(task, kept), limit, drawn_limit)
        holds, drawn_holds = holds and fewer[0], drawn_holds & fewer[1]
        spare += holds
        drawn_spare += drawn_holds
    return replace(found, spare=_estimate(spare, drawn_spare))


def _no_worse(
    task: _Task, values: Floats, limit: Floats, drawn_limit: Floats
) -> tuple[bool, NDArray[np.bool_]]:
    """Whether measures are no worse than a limit: on the whole, and in every draw."""
    mean, drawn = task.blocks.means(values)
    chosen = list(NO_WORSE)
    slack = 1e-9
    return (
        bool((mean[chosen] <= limit + slack).all()),
        np.asarray((drawn[:, chosen] <= drawn_limit + slack).all(axis=1)),
    )


def _measured_on(task: _Task, kept: Sequence[int]) -> Floats:
    """Replay a policy on some of the replicas; returns measures [K, R, 4]."""
    each = task.scenario.cluster.expanded()
    cluster = Cluster(replicas=tuple(each[k] for k in kept))
    overhead = [task.overhead_ms[k % len(task.overhead_ms)] for k in kept]
    scenario = task.scenario.model_copy(update={"cluster": cluster})
    return np.stack(
        [measured(replayed(scenario, t, task.policy, task.seed, overhead)) for t in task.tables]
    )


def slowest_first(cluster: Cluster) -> list[int]:
    """Return the numbers of the replicas, the one that reads prompts slowest first."""
    each = cluster.expanded()
    costs = cost_rows([cost_of(replica) for replica in each])
    speed = [
        prefill_tokens_per_s(cost, replica.chunk_size, replica.speed)
        for cost, replica in zip(costs, each, strict=True)
    ]
    return [int(k) for k in np.argsort(speed, kind="stable")]


def switch_command(
    assessment: Assessment, urls: Sequence[str], cluster_file: Path | None
) -> list[str]:
    """Return the words of the command that puts the best policy in charge."""
    words = ["tailrace", "serve"]
    for url in urls or ["URL"] * assessment.replicas:
        words += ["-b", url]
    if cluster_file is not None:
        words += ["--cluster", str(cluster_file)]
    if assessment.best.policy != registry.SHIPPED_NAME:
        words += ["-p", assessment.best.policy]
    return words
