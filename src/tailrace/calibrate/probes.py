"""Probes of an endpoint, and what their responses say about iterations.

Two kinds of probes: a lone prompt whose first token is waited for (``outputs`` = 1), and a batch of
prompts that answer side by side, of which only the time counts during which all of them do.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.calibrate.interval_fit import Fitted, Floats, Stretches, likeliest, summed

#: Prompts of prefill probes, tokens. None is near a power of two, where a token more or less, as
#: tokenizers have it, may mean another iteration.
PREFILLS = (
    *(24, 40, 56, 72, 88, 104, 120, 136, 152, 168, 184, 200, 216, 232, 248, 272, 296, 320, 344),
    *(368, 392, 416, 440, 464, 488, 576, 640, 704, 768, 832, 896, 960, 1200, 1600, 1920, 2400),
    *(3200, 3900, 4800, 6400, 7800, 9600, 12_800, 15_600, 20_000, 26_000, 31_000),
)
#: Batch sizes of decode probes with short prompts.
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
SHORT_PROMPT = 24
#: Batch size and prompt of decode probes with much context.
CONTEXTS = (
    *((1, 3900), (1, 7800), (4, 1900), (4, 3900), (8, 1900), (8, 3900), (8, 7800), (16, 3900)),
    *((32, 1900), (64, 960)),
)
#: The same for servers with little memory: without any context its share would be a guess.
SMALL_CONTEXTS = ((4, 400), (8, 400), (4, 960), (8, 960))
#: So many of CONTEXTS have to fit, or the small ones are run as well.
ENOUGH_CONTEXTS = 4
#: Batch size and prompt of the probes to begin with, prefills and decodes.
OUTLINE = frozenset(
    {(1, size) for size in (24, 72, 120, 168, 248, 344, 488, 704, 960, 1920, 7800)}
    | {(batch, SHORT_PROMPT) for batch in (1, 4, 16, 32, 64, 128)}
    | {(4, 1900), (8, 1900), (8, 3900)}
    | {(4, 400), (8, 960)}
)
#: Iterations a decode probe is to measure; with much context they are cheap beside the prompts.
WINDOW, LONG_WINDOW = 24, 48
LEAST_WINDOW = 4
#: A time to first token is uncertain by this however often it is measured: timers of a server and
#: what its client does come at the same moments every time.
TIMER_MS = 0.05
#: The median of n normal values is so much less certain than their mean, and the median of the
#: difference between two of them is so many standard deviations.
MEDIAN, NORMAL_STEP = 1.2533, 0.9539
#: Possible numbers of tokens per iteration.
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)

SMALL_PREFILL, SMALL_BATCH, SMALL_CONTEXT = 512, 32, 8192
PREFILL_SMALL, PREFILL_LARGE = "prefill <= 512 tokens", "prefill > 512 tokens"
DECODE_SMALL, DECODE_LARGE = "decode, batch <= 32", "decode, batch > 32"
DECODE_CONTEXT = "decode, context > 8192 tokens"
REGIMES = (PREFILL_SMALL, PREFILL_LARGE, DECODE_SMALL, DECODE_LARGE, DECODE_CONTEXT)


@dataclass(frozen=True)
class Probe:
    """``batch`` prompts of ``prompt`` tokens at once; one output: a prefill, more: decodes."""

    batch: int
    prompt: int
    outputs: int = 1

    @property
    def is_prefill(self) -> bool:
        """Whether only the first token counts."""
        return self.outputs == 1

    @property
    def tokens(self) -> int:
        """Prompt tokens in all."""
        return self.batch * self.prompt

    @property
    def regime(self) -> str:
        """One of REGIMES."""
        if self.is_prefill:
            return PREFILL_SMALL if self.prompt <= SMALL_PREFILL else PREFILL_LARGE
        if self.tokens > SMALL_CONTEXT:
            return DECODE_CONTEXT
        return DECODE_SMALL if self.batch <= SMALL_BATCH else DECODE_LARGE

    def __str__(self) -> str:
        if self.is_prefill:
            return f"a prompt of {self.prompt} tokens"
        return f"{self.batch} answers at once to prompts of {self.prompt} tokens"


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt. Times are seconds of the endpoint's clock."""

    sent_s: float
    times_s: Floats
    """Arrival time of each token [n]."""
    prompt_tokens: int
    """As the server counts."""
    cached_tokens: int = 0
    failure: str | None = None


class Endpoint(Protocol):
    """A server that can be probed."""

    async def ask(self, probe: Probe) -> list[Reply]:
        """Send the prompts of a probe at once, each unlike any before, and wait for all answers."""

    def now(self) -> float:
        """Seconds of the clock of its replies."""


@dataclass(frozen=True)
class Sample:
    """What one run of a probe measured."""

    ms: float
    """Time to the first token, or of one iteration."""
    prompt: float
    """Tokens of a prompt, by the server's count, without those from its cache."""
    cached: float
    context: float
    """K of a mean iteration."""


def outline(probes: Sequence[Probe]) -> tuple[list[Probe], list[Probe]]:
    """Split probes into a few that show every coefficient roughly, and the others."""
    few = [probe for probe in probes if (probe.batch, probe.prompt) in OUTLINE]
    return few, [probe for probe in probes if probe not in few]


def prefill_probes(most_tokens: int) -> list[Probe]:
    """Return lone prompts of all sizes up to ``most_tokens``."""
    return [Probe(1, size) for size in PREFILLS if size <= most_tokens]


def decode_probes(most_batch: int, most_tokens: int, most_context: int, budget: int) -> list[Probe]:
    """Return batches with little and with much context, within the limits given in tokens.

    ``budget``: tokens per iteration, as far as known. Prompts that are read in after others have
    begun to answer keep those waiting with more answers.
    """

    def fitting(shapes: Iterable[tuple[int, int]]) -> list[Probe]:
        probes = [_decode_probe(*shape, budget) for shape in shapes if shape[0] <= most_batch]
        return [
            probe
            for probe in probes
            if probe.prompt + probe.outputs <= most_tokens
            and probe.batch * (probe.prompt + probe.outputs) <= most_context
        ]

    short, long = fitting((batch, SHORT_PROMPT) for batch in BATCHES), fitting(CONTEXTS)
    if len(long) < ENOUGH_CONTEXTS:
        long = fitting(SMALL_CONTEXTS) + long
    return short + long


def _decode_probe(batch: int, prompt: int, budget: int) -> Probe:
    """Return a probe with enough answers to measure, for ``budget`` tokens per iteration."""
    reading = math.ceil(batch * prompt / max(1, budget - batch)) + 3
    window = WINDOW if prompt == SHORT_PROMPT else LONG_WINDOW
    return Probe(batch, prompt, window + 1 + (reading if batch > 1 else 0))


def sample(probe: Probe, replies: Sequence[Reply]) -> Sample | None:
    """Return what the answers to a probe measured; None: they never ran all together."""
    prompt = float(np.median([reply.prompt_tokens for reply in replies]))
    cached = float(np.median([reply.cached_tokens for reply in replies]))
    if probe.is_prefill:
        reply = replies[0]
        ms = 1e3 * (float(reply.times_s[0]) - reply.sent_s)
        return Sample(ms, prompt - cached, cached, 0.0)
    begin = max(float(reply.times_s[0]) for reply in replies)
    end = min(float(reply.times_s[-1]) for reply in replies)
    gap = float(np.median([np.median(np.diff(reply.times_s)) for reply in replies]))
    found: list[tuple[float, float]] = []  # ms per iteration, K of one request
    for reply in replies:
        times = reply.times_s
        # Tokens of one iteration come within a moment of each other, not at the same one.
        inside = np.flatnonzero((times > begin - gap / 2) & (times < end + gap / 2))
        if len(inside) <= LEAST_WINDOW:
            return None
        first, last = int(inside[0]), int(inside[-1])
        each = 1e3 * float(times[last] - times[first]) / (last - first)
        found.append((each, reply.prompt_tokens + (first + 1 + last) / 2))
    each_ms, contexts = np.array(found).T
    return Sample(float(np.median(each_ms)), prompt - cached, cached, float(contexts.sum()))


def queued(replies: Sequence[Reply]) -> int | None:
    """Return how many of the prompts ran side by side while others had to wait; None: all ran."""
    first = np.array([reply.times_s[0] for reply in replies])
    last = np.array([reply.times_s[-1] for reply in replies])
    waited = first > last.min()
    return int((~waited).sum()) if waited.any() else None


@dataclass(frozen=True)
class Measurement:
    """All samples of one probe."""

    probe: Probe
    samples: tuple[Sample, ...]

    @property
    def ms(self) -> float:
        """Median."""
        return float(np.median([s.ms for s in self.samples]))

    @property
    def spread(self) -> float:
        """Typical deviation from the median, as a share of it."""
        values = np.array([s.ms for s in self.samples])
        return float(np.median(np.abs(values - self.ms)) / self.ms)


def noise_ms(measurements: Sequence[Measurement]) -> Floats:
    """Return what the median of each measurement [R] is uncertain by."""
    once_ms, always_ms = noise_parts_ms(measurements)
    runs = np.array([len(m.samples) for m in measurements])
    found: Floats = np.hypot(once_ms / np.sqrt(runs), always_ms)
    return found


def noise_parts_ms(measurements: Sequence[Measurement]) -> tuple[Floats, Floats]:
    """Return what one run of each [R] is uncertain by, and what any number of runs is.

    The former is the scatter of all of a kind, prefills or decodes.
    """
    is_prefill = np.array([m.probe.is_prefill for m in measurements])
    scatter = {
        kind: _scatter_ms([m for m in measurements if m.probe.is_prefill == kind])
        for kind in (True, False)
    }
    return MEDIAN * np.where(is_prefill, scatter[True], scatter[False]), TIMER_MS * is_prefill


def _scatter_ms(measurements: Sequence[Measurement]) -> float:
    """Return the usual deviation of single runs, ms.

    By the differences of successive runs: those of a few are as large as those of many, which
    deviations from their median are not. The median of them, as hiccups are something else.
    """
    found = [np.abs(np.diff([s.ms for s in m.samples])) for m in measurements]
    steps = np.concatenate(found) if found else np.zeros(0)
    return float(np.median(steps)) / NORMAL_STEP if len(steps) else 0.0


def stretches(measurements: Sequence[Measurement], budget: int) -> Stretches:
    """Return the measurements [R] as stretches, for ``budget`` tokens per iteration."""
    rows: list[tuple[int, float, float, float]] = []
    for row, measured in enumerate(measurements):
        prompt, cached, context = (
            float(np.median([getattr(s, name) for s in measured.samples]))
            for name in ("prompt", "cached", "context")
        )
        if measured.probe.is_prefill:
            rows += [(row, size, 0.0, size * (before + size / 2))
                     for before, size in _chunks(prompt, cached, budget)]  # fmt: skip
        else:
            rows.append((row, float(measured.probe.batch), context, 0.0))
    number, tokens, contexts, work = np.array(rows, np.float64).reshape(-1, 4).T
    return Stretches(
        row=number.astype(np.int64),
        tokens=tokens,
        context=contexts,
        work=work,
        ms=np.array([measured.ms for measured in measurements]),
        requests=np.array([float(measured.probe.is_prefill) for measured in measurements]),
    )


def fitted(measurements: Sequence[Measurement], budget: int) -> Fitted:
    """Return the model that explains the measurements best, for ``budget`` tokens per iteration."""
    return likeliest(summed(stretches(measurements, budget)), noise_ms=noise_ms(measurements))


def _chunks(prompt: float, cached: float, budget: int) -> list[tuple[float, float]]:
    """Return context and size of the pieces in which a lone prompt is read."""
    sizes: NDArray[np.float64] = np.full(max(1, math.ceil(prompt / budget)), float(budget))
    sizes[-1] = prompt - budget * (len(sizes) - 1)
    before = cached + np.cumsum(sizes) - sizes
    return list(zip(before.tolist(), sizes.tolist(), strict=True))
