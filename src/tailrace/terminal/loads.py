"""Metrics of a load as a table."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailrace.bench.result import LATE_S, LoadResult
from tailrace.terminal.tables import STATISTICS, number, percent

_LATENCIES = (
    ("time to first token", "s", "ttft_s", 1.0),
    ("time per output token", "ms", "tpot_s", 1e3),
    ("end to end", "s", "e2e_s", 1.0),
)


def print_load(
    console: Console, name: str, rate: float | None, result: LoadResult, warmup: float = 0.0
) -> None:
    """Print the summary of a load; ``rate`` in requests/s, None: the traffic's own."""
    metrics = result.summary(warmup)
    pace = "its own pace" if rate is None else f"{rate:.3g} requests/s"
    console.print(Text(f"{name} at {pace}", style="bold"))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("latency")
    for title in ("", *(title for _, title in STATISTICS)):
        table.add_column(title, justify="right")
    for label, unit, key, scale in _LATENCIES:
        values = [metrics[f"{key}_{field}"] for field, _ in STATISTICS]
        table.add_row(label, unit, *(number(None if v is None else v * scale) for v in values))
    console.print(table)
    console.print()
    facts = Table(box=None, pad_edge=False, show_header=False)
    for label, value in _facts(metrics, result):
        facts.add_row(label, Text(value))
    console.print(facts)
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
        ("composite cost", f"{at('cost_s')} s"),
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
