"""Statistics of a request table, for people."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.terminal.listings import print_record
from tailrace.terminal.tables import number


def print_statistics(console: Console, name: str, found: Mapping[str, Any]) -> None:
    """Print what :func:`tailrace.workload.stats.statistics` returned."""
    idc = ", ".join(f"{number(value)} in {window}" for window, value in found["idc"].items())
    fields = {
        "requests": f"{found['requests']} in {found['span_s']:.1f} s",
        "rate": f"{number(found['rate_rps'])} requests/s",
        "gaps": f"coefficient of variation {number(found['gap_cv'])}",
        "dispersion": f"{idc} (variance / mean of counts; Poisson: 1)",
        "repeated": (
            f"{100 * found['repeated_share']:.1f} % of prompt tokens stood in an earlier prompt, "
            f"{100 * found['repeated_share_with_answers']:.1f} % in an earlier prompt or answer"
        ),
    }
    sessions = found["sessions"]
    if sessions:
        fields["sessions"] = (
            f"{sessions['count']} of {sessions['turns_mean']:.1f} turns, "
            f"think time {number(sessions['think_s_median'])} s (median)"
        )
    print_record(console, name, fields)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    lengths = {"prompt": found["prompt_tokens"], "output": found["output_tokens"]}
    quantiles = list(lengths["prompt"]["quantiles"])
    table.add_column("tokens")
    for heading in ("mean", "min", *quantiles, "max"):
        table.add_column(heading, justify="right")
    for label, about in lengths.items():
        cells = [about["mean"], about["min"], *about["quantiles"].values(), about["max"]]
        table.add_row(label, *(f"{value:.0f}" for value in cells))
    console.print(table)
