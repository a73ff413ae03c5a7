"""Metrics of a load as a table."""

from rich.console import Console
from rich.text import Text

from tailrace.bench.result import LATE_S, LoadResult
from tailrace.evaluate.measure.metrics import Latency
from tailrace.terminal.tables import STATISTICS, number, percent, print_metrics

_LATENCIES = {
    "time to first token": "ttft_s",
    "time per output token": "tpot_s",
    "end to end": "e2e_s",
}


def print_load(
    console: Console, name: str, rate: float | None, result: LoadResult, warmup: float = 0.0
) -> None:
    """Print the summary of a load; ``rate`` in requests/s, None: the traffic's own."""
    metrics = result.summary(warmup)
    pace = "its own pace" if rate is None else f"{rate:.3g} requests/s"
    console.print(Text(f"{name} at {pace}", style="bold"))
    console.print()
    latencies = {
        label: Latency(*(metrics[f"{key}_{field}"] for field, _ in STATISTICS))
        for label, key in _LATENCIES.items()
    }
    print_metrics(console, latencies, _facts(metrics, result))
    if result.is_late:
        console.print(
            Text(
                f"The generator itself was late by more than {LATE_S * 1e3:g} ms for one request "
                "in a hundred: this machine is too slow for this load, the figures are too good.",
                style="bold",
            )
        )


def _facts(metrics: dict[str, object], result: LoadResult) -> list[tuple[str, str]]:
    def at(key: str, scale: float = 1.0) -> str:
        value = metrics[key]
        return number(value * scale if isinstance(value, int | float) else None)

    facts = [
        ("requests", (f"{metrics['finished']} of {metrics['requests']} finished "
                     f"in {at('duration_s')} s")),
        ("throughput", (f"{at('requests_per_s')} requests/s, {at('output_tokens_per_s')} output "
                       "tokens/s")),
        ("within SLO", f"{at('slo_attainment', 100)} %, {at('goodput_rps')} requests/s"),
        ("latency cost", f"{at('cost_s')} s"),
        ("prefix hits", f"{at('prefix_hit_rate', 100)} % of prompt tokens"),
        ("prompt lengths", (f"{at('prompt_tokens_ratio', 100)} % of the table's "
                           f"({result.calibration})")),
        ("generator late by", (f"{at('lateness_s_p50', 1e3)} ms (P50), "
                              f"{at('lateness_s_p99', 1e3)} ms (P99), "
                              f"{at('lateness_s_max', 1e3)} ms at most")),
        ("connections", str(metrics["connections"])),
    ]  # fmt: skip
    if result.labels:
        shares = metrics["replica_share"]
        assert isinstance(shares, dict)
        facts.append(("shares", ", ".join(f"{name} {percent(k)}" for name, k in shares.items())))
    if result.failures:
        failed = ", ".join(f"{count} x {kind}" for kind, count in result.failures.items())
        facts.append(("failures", failed))
    return facts
