"""Building blocks of a report; templates/ renders them."""

from dataclasses import dataclass, field

from tailrace.evaluate.explain.decisions import Example
from tailrace.report.charts import Figure
from tailrace.report.tables import Table


@dataclass(frozen=True)
class Gallery:
    """Pictures in a row, with what their colours mean: (class, words)."""

    figures: tuple[Figure, ...]
    legend: tuple[tuple[str, str], ...] = ()
    kind: str = "gallery"


@dataclass(frozen=True)
class Tabular:
    """A table; with a summary it is collapsed."""

    table: Table
    summary: str = ""
    about: str = ""
    kind: str = "table"


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str
    kind: str = "words"


@dataclass(frozen=True)
class Cards:
    """Single decisions with their reasons."""

    examples: tuple[Example, ...]
    subject: str
    rule: str
    kind: str = "cards"


@dataclass(frozen=True)
class Folded:
    """Collapsed pictures."""

    summary: str
    gallery: Gallery
    kind: str = "folded"


@dataclass(frozen=True)
class Commands:
    """Lines for a terminal."""

    lines: tuple[str, ...]
    kind: str = "commands"


Block = Gallery | Tabular | Words | Cards | Folded | Commands


@dataclass(frozen=True)
class Section:
    """A part with a heading."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Tile:
    """One figure of the headline."""

    label: str
    value: str
    note: str
    verdict: str  #: better, worse or even
    words: str


@dataclass(frozen=True)
class ReportContent:
    """The whole report."""

    subject: str
    title: str
    facts: tuple[str, ...]  #: in a line under the title
    tiles: tuple[Tile, ...]
    sentences: tuple[str, ...]
    sections: tuple[Section, ...]
    warnings: tuple[str, ...] = field(default=())
    kicker: str = "Tailrace evaluation"  #: above the title
    made_by: str = "tailrace report"  #: the command
