"""Plain lists of things: names with a few columns about each, or one thing in full."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_listing(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings; the first column is never broken, the others wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for k, heading in enumerate(headings):
        short = max((len(row[k]) for row in rows), default=0) <= 12
        table.add_column(heading, no_wrap=k == 0 or short, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def print_record(console: Console, title: str, fields: Mapping[str, str]) -> None:
    """Print one thing: its name, then a line per field."""
    console.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in fields.items():
        table.add_row(label, Text(text))
    console.print(table)
