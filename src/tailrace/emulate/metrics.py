"""Counters and histograms of an emulated server."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from tailrace.emulate.job import Job
from tailrace.net.prometheus_text import histogram_lines

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TPOT_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_ITERATION_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_LAG_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
#: An emulator lags if more than one iteration in a hundred ends later than this, s...
LAG_S = 0.01
#: ... once it has had this many iterations.
_LAG_SAMPLE = 1000
_FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts of values by upper bound.

    With the one of ``prometheus_client`` an emulated server takes 1.19 times the CPU time for a
    token (``benchmarks/bench_libraries.py``, docs/results/bench_libraries.json).
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float:
        """Return the smallest bound with at least ``share`` of all values up to it, or inf."""
        wanted = share * sum(self.counts)
        seen = 0
        for bound, number in zip(self.bounds, self.counts, strict=False):
            seen += number
            if seen >= wanted:
                return bound
        return float("inf")

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield its samples in Prometheus' text format."""
        return histogram_lines(name, labels, self.bounds, self.counts, self.sum)


class Meter:
    """Counters of one emulated server. Times come in emulated and are kept in real seconds."""

    def __init__(self, time_scale: float = 1.0) -> None:
        self._time_scale = time_scale
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.queried_tokens = 0
        self.success = dict.fromkeys(_FINISHED_REASONS, 0)
        self.iteration_tokens = Histogram(_ITERATION_TOKENS)
        self.ttft_s = Histogram(_TTFT_S)
        self.inter_token_s = Histogram(_TPOT_S)
        self.tpot_s = Histogram(_TPOT_S)
        self.e2e_s = Histogram(_REQUEST_S)
        self.queue_s = Histogram(_REQUEST_S)
        self.prefill_s = Histogram(_REQUEST_S)
        self.decode_s = Histogram(_REQUEST_S)
        self.inference_s = Histogram(_REQUEST_S)
        self.prompt_lengths = Histogram(_TOKENS)
        self.output_lengths = Histogram(_TOKENS)
        self.lag_s = Histogram(_LAG_S)
        self.worst_lag_s = 0.0

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was looked up in the prefix cache and begins."""
        self.queried_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def iteration(self, tokens: int, prefill_tokens: int, generated: int, lag_s: float) -> None:
        """An iteration ended; ``lag_s`` (emulated) later than that its tokens leave."""
        self.iteration_tokens.observe(tokens)
        self.prompt_tokens += prefill_tokens
        self.generated_tokens += generated
        lag_s *= self._time_scale
        self.lag_s.observe(lag_s)
        self.worst_lag_s = max(self.worst_lag_s, lag_s)

    def token(self, arrived_s: float, last_s: float | None, now: float) -> None:
        """A request that came at ``arrived_s`` gave a token, the one before at ``last_s``."""
        if last_s is None:
            self.ttft_s.observe((now - arrived_s) * self._time_scale)
        else:
            self.inter_token_s.observe((now - last_s) * self._time_scale)

    def finished(self, job: Job) -> None:
        """A request gave its last token."""
        assert job.scheduled_s is not None
        assert job.first_s is not None
        assert job.last_s is not None
        scale = self._time_scale
        arrived_s = job.request.arrived_s
        self.success[job.finish_reason] += 1
        self.e2e_s.observe((job.last_s - arrived_s) * scale)
        self.queue_s.observe((job.scheduled_s - arrived_s) * scale)
        self.prefill_s.observe((job.first_s - job.scheduled_s) * scale)
        self.decode_s.observe((job.last_s - job.first_s) * scale)
        self.inference_s.observe((job.last_s - job.scheduled_s) * scale)
        if job.output_tokens > 1:
            self.tpot_s.observe((job.last_s - job.first_s) * scale / (job.output_tokens - 1))
        self.prompt_lengths.observe(job.prompt_tokens)
        self.output_lengths.observe(job.output_tokens)

    @property
    def is_lagging(self) -> bool:
        """Whether this machine is too busy to keep the times of the cost model."""
        return sum(self.lag_s.counts) >= _LAG_SAMPLE and self.lag_s.quantile(0.99) > LAG_S

    def aborted(self) -> None:
        """A request left because its client had gone."""
        self.success["abort"] += 1
