"""The measurement plan: which probes are run on an endpoint, how often, and within what time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.calibrate import probes as p
from tailrace.calibrate.design import most_telling
from tailrace.calibrate.interval_fit import KNOT_PRICE
from tailrace.calibrate.probes import Endpoint, Measurement, Probe, Reply, Sample
from tailrace.errors import TailraceError

Progress = Callable[[float], None]

#: Share of the time for the first run of all probes, and for a single one of them.
FIRST_ROUND, ONE_PROBE = 0.4, 0.15
#: Share of the time, and seconds, planned ahead; then it is looked again what is least certain.
PLANNED, PLANNED_S = 0.1, 10.0
#: How often it is looked again when a batch seems to be too large to run at once.
CAP_REPEATS = 2
#: With fewer samples a median does not help against hiccups.
FEW_SAMPLES = 3


@dataclass(frozen=True)
class Limits:
    """How far a survey may go."""

    seconds: float
    prompt: int
    """Tokens of a prompt and its answer."""
    batch: int
    """Requests at once."""
    context: int
    """Tokens that all requests may hold together."""
    token_budget: int | None = None
    """Tokens per iteration, if known."""
    precision: float = 0.0
    """Standard error of the coefficients, as a share of them, that is good enough to stop."""


@dataclass(frozen=True)
class Survey:
    """What was measured on one endpoint."""

    measurements: tuple[Measurement, ...]
    token_budget: int
    """Tokens per iteration."""
    budget_source: str
    """given, measured or assumed."""
    batch_cap: int | None
    """Most requests that ran at once; None: there was no limit up to the largest batch."""
    largest_batch: int
    seconds: float
    left_out: tuple[str, ...]

    @property
    def spread(self) -> float:
        """Median over the probes of their spread, a share."""
        return float(np.median([m.spread for m in self.measurements]))

    @property
    def fewest(self) -> int:
        """Samples of the probe with the fewest."""
        return min(len(m.samples) for m in self.measurements)


async def survey(endpoint: Endpoint, limits: Limits, progress: Progress | None = None) -> Survey:
    """Measure an endpoint without other traffic; ``progress`` gets the share that is done."""
    return await _Surveyor(endpoint, limits, progress or (lambda _: None)).run()


class _Surveyor:
    """The state of a survey."""

    def __init__(self, endpoint: Endpoint, limits: Limits, progress: Progress) -> None:
        self._endpoint, self._limits, self._progress = endpoint, limits, progress
        self._samples: dict[Probe, list[Sample]] = {}
        self._took_s: dict[Probe, float] = {}
        self._left_out: list[str] = []
        self._batch_cap: int | None = None
        self._largest = 0
        self._start_s = 0.0

    async def run(self) -> Survey:
        for warm in (Probe(1, p.SHORT_PROMPT), Probe(4, 200, 8)):
            failed = [r.failure for r in await self._endpoint.ask(warm) if r.failure]
            if failed:
                raise TailraceError(f"the server answered {warm} with: {failed[0]}")
        self._start_s = self._endpoint.now()
        limits = self._limits
        # A few of each kind first: in a short time every coefficient has to show, or a batch or a
        # context larger than any that was measured is off by a multiple.
        few, other = p.outline(p.prefill_probes(limits.prompt - 1))
        await self._first(few)
        budget, source = self._token_budget()
        decodes = p.decode_probes(limits.batch, limits.prompt, limits.context, budget)
        few, others = p.outline(sorted(decodes, key=lambda probe: probe.tokens + 64 * probe.batch))
        for probes in (few, other, others):
            await self._first(probes)
        await self._again()
        budget, source = self._token_budget()
        self._progress(1.0)
        return Survey(
            self._measurements(),
            budget,
            source,
            self._batch_cap,
            self._largest,
            self._endpoint.now() - self._start_s,
            tuple(self._left_out),
        )

    # ---- rounds ---------------------------------------------------------------------------------

    async def _first(self, probes: Sequence[Probe]) -> None:
        """Run probes once, leaving out those that would take too long."""
        limit_s = FIRST_ROUND * self._limits.seconds
        for probe in probes:
            if self._batch_cap is not None and probe.batch > self._batch_cap:
                continue
            expected_s = self._expected_s(probe)
            late = self._used_s() + expected_s > limit_s
            if self._samples and (late or expected_s > ONE_PROBE * self._limits.seconds):
                self._left_out.append(f"{probe}: it would take about {expected_s:.1f} s")
                continue
            await self._run(probe)
            self._progress(min(1.0, self._used_s() / self._limits.seconds))

    async def _again(self) -> None:
        """Run all probes a few times, then the most telling, until it is precise or time is up."""
        for probe in self._short_of_samples():
            await self._repeat(probe)
        while (left_s := self._limits.seconds - self._used_s()) > 0:
            budget, _ = self._token_budget()
            measured = self._measurements()
            fitted = p.fitted(measured, budget)
            if fitted.worst_error <= self._limits.precision:
                return
            slice_s = min(left_s, PLANNED_S, self._limits.seconds * PLANNED)
            chosen = most_telling(measured, fitted, self._took_s, budget, slice_s)
            for probe in chosen:
                await self._repeat(probe)
            if not chosen:
                return

    def _short_of_samples(self) -> list[Probe]:
        """Return every probe as often as it takes for a median that a hiccup does not move."""
        counts = {probe: len(found) for probe, found in self._samples.items()}
        return [
            probe
            for have in range(1, FEW_SAMPLES)
            for probe, count in counts.items()
            if count <= have
        ]

    async def _repeat(self, probe: Probe) -> None:
        if self._used_s() + self._took_s[probe] <= self._limits.seconds:
            await self._run(probe)
            self._progress(min(1.0, self._used_s() / self._limits.seconds))

    async def _run(self, probe: Probe) -> None:
        begun_s = self._endpoint.now()
        replies = await self._endpoint.ask(probe)
        self._took_s[probe] = max(self._endpoint.now() - begun_s, 1e-6)
        failed = [reply.failure for reply in replies if reply.failure is not None]
        found = None
        if failed:
            self._note(probe, f"the server answered with {failed[0]}")
        elif await self._is_capped(probe, replies):
            return
        else:
            found = p.sample(probe, replies)
            if found is None:
                self._note(probe, "they did not answer all at the same time")
        if found is not None:
            self._samples.setdefault(probe, []).append(found)
            self._largest = max(self._largest, probe.batch)

    async def _is_capped(self, probe: Probe, replies: Sequence[Reply]) -> bool:
        """Whether some of many short prompts had to wait for others to end."""
        if probe.prompt != p.SHORT_PROMPT or p.queued(replies) is None:
            return False
        tries = [p.queued(replies)]
        for _ in range(CAP_REPEATS):
            again = await self._endpoint.ask(probe)
            tries.append(None if any(r.failure for r in again) else p.queued(again))
        seen = [k for k in tries if k is not None]
        if len(seen) > len(tries) / 2:
            self._batch_cap = max(int(np.median(seen)), self._largest)
        return True

    def _note(self, probe: Probe, why: str) -> None:
        if probe not in self._samples:
            self._left_out.append(f"{probe}: {why}")

    def _used_s(self) -> float:
        return self._endpoint.now() - self._start_s

    def _expected_s(self, probe: Probe) -> float:
        """Seconds a probe will take, from those before it."""
        alone = [q for q in self._took_s if q.is_prefill]
        if not alone:
            return 0.0
        longest = max(alone, key=lambda q: q.prompt)
        reading_s = 1.2 * self._took_s[longest] * max(1.0, probe.tokens / longest.prompt)
        if probe.is_prefill:
            return reading_s
        steps = [s.ms for q, found in self._samples.items() if not q.is_prefill for s in found]
        step_s = 1e-3 * max(steps) if steps else self._took_s[alone[0]]
        return reading_s + 1.2 * probe.outputs * step_s

    # ---- results --------------------------------------------------------------------------------

    def _measurements(self) -> tuple[Measurement, ...]:
        return tuple(Measurement(probe, tuple(found)) for probe, found in self._samples.items())

    def _token_budget(self) -> tuple[int, str]:
        if self._limits.token_budget is not None:
            return self._limits.token_budget, "given"
        return token_budget(self._measurements())


def token_budget(measurements: Sequence[Measurement]) -> tuple[int, str]:
    """Return the tokens per iteration that explain prefills best, and whether that is measured.

    Every further piece in which a prompt is read costs an iteration more, so the wrong budget fits
    badly. A budget larger than all prompts cannot be seen.
    """
    largest = max((m.probe.prompt for m in measurements if m.probe.is_prefill), default=1)
    unseen = next((b for b in p.BUDGETS if b >= largest), largest)
    if largest <= min(p.BUDGETS):
        return unseen, "assumed"
    score: dict[int, float] = {}
    for budget in (*(b for b in p.BUDGETS if b < largest), unseen):
        found = p.fitted(measurements, budget)
        # A budget is a parameter like a knot: it has to explain more than chance would.
        parameters = len(found.model.knots) + (budget != unseen)
        score[budget] = found.surprise + KNOT_PRICE * parameters * np.log(len(measurements))
    best = min(score, key=lambda budget: score[budget])
    return best, "assumed" if best == unseen else "measured"
