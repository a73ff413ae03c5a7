"""A few marks on two axes, as SVG that lives in a page: colours and fonts are the page's.

Panels are drawn for the width of a phone, and a page puts several of them in a row, so that their
text keeps its size. Colours are CSS classes; see templates/style.css.

Why not matplotlib, which draws the figures of ``--plot``: a panel of a distribution (four curves,
sixteen dots) takes 8 kB and 4 ms here, 32 kB and 165 ms there (``benchmarks/bench_libraries.py``,
docs/results/bench_libraries.json), and a report on the standard suite has some seventy. Its SVG has
fixed colours, so no dark theme, and neither tooltips nor marks that take the keyboard's focus. Nor
can this replace matplotlib: figures may be PNG and PDF.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup, escape

#: Points of a path; None breaks it.
Points = Iterable[tuple[float, float | None]]


@dataclass(frozen=True)
class Scale:
    """From values to places on an axis."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high one; kept within."""
        if self.high <= self.low:
            return 0.5
        if not self.log:
            place = (value - self.low) / (self.high - self.low)
        elif value <= 0:
            place = 0.0
        else:
            place = math.log(value / self.low) / math.log(self.high / self.low)
        return min(max(place, 0.0), 1.0)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values, at most ``most`` of them."""
        # Within a factor of three even steps look even enough, and are easier to read.
        if self.log and self.high > 3 * self.low:
            return _log_ticks(self.low, self.high, most)
        return self._even_ticks(most)

    def _even_ticks(self, most: int) -> list[float]:
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        power = 10 ** math.floor(math.log10(span / most))
        step = next(m * power for m in (1, 2, 5, 10, 20) if span / (m * power) <= most - 1 + 1e-9)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with others between them as far as they fit."""
    choices: tuple[Sequence[float], ...] = (
        (1, 1.5, 2, 3, 5, 7),
        (1, 2, 5),
        (1, 3),
        (1,),
    )
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in choices:
        found = [m * 10.0**p for p in powers for m in steps]
        found = [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


def around(values: Iterable[float | None], *, log: bool = False, margin: float = 0.06) -> Scale:
    """Return a scale that holds all finite values, with some margin; a linear one begins at 0."""
    known = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    if not known:
        return Scale(0.1 if log else 0.0, 1.0, log)
    low, high = min(known), max(known)
    if not log:
        return Scale(min(0.0, low), high * (1 + margin) if high > 0 else 1.0)
    room = max((high / low) ** margin, 1.02)
    return Scale(low / room, high * room, True)


def tick_text(value: float) -> str:
    """Return a value as an axis shows it."""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value / 1000:.4g}k"


@dataclass
class Panel:
    """One plot; all coordinates of its methods are values on its axes."""

    x: Scale
    y: Scale
    label: str  #: what a screen reader says
    width: int = 372
    height: int = 260
    left: int = 46
    right: int = 12
    top: int = 22
    bottom: int = 38
    _marks: list[Markup] = field(default_factory=list)

    def px(self, value: float) -> float:
        """Horizontal place of a value."""
        return self.left + self.x.share(value) * (self.width - self.left - self.right)

    def py(self, value: float) -> float:
        """Vertical place of a value."""
        return self.height - self.bottom - self.y.share(value) * self.inner_height

    @property
    def floor(self) -> float:
        """Vertical place of the x axis."""
        return self.height - self.bottom

    @property
    def inner_height(self) -> float:
        """Height between the axes."""
        return self.height - self.top - self.bottom

    def axes(
        self,
        x_title: str,
        y_title: str,
        x_ticks: Sequence[tuple[float, str]] | None = None,
        y_ticks: Sequence[tuple[float, str]] | None = None,
    ) -> None:
        """Draw grid, ticks and titles; the title of y stands above its axis."""
        right, floor = self.width - self.right, self.floor
        if x_ticks is None:
            x_ticks = [(t, tick_text(t)) for t in self.x.ticks()]
        if y_ticks is None:
            y_ticks = [(t, tick_text(t)) for t in self.y.ticks()]
        for value, text in y_ticks:
            y = self.py(value)
            self._add('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>', self.left, y, right)
            self._text(self.left - 6, y + 3.5, text, "end")
        for value, text in x_ticks:
            x = self.px(value)
            self._add('<path class="tick" d="M{:.1f} {:.1f}v4"/>', x, floor)
            self._text(x, floor + 16, text, "middle")
        self._add('<path class="axis" d="M{:.1f} {:.1f}H{:.1f}"/>', self.left, floor, right)
        self._text((self.left + right) / 2, self.height - 5, x_title, "middle", "title")
        if y_title:
            self._text(2, 9, y_title, "start", "title")

    def line(self, points: Points, style: str, tip: str = "") -> None:
        """Draw a path through points."""
        parts, pen = [], "M"
        for x, y in points:
            if y is None or not math.isfinite(y):
                pen = "M"
                continue
            parts.append(f"{pen}{self.px(x):.1f} {self.py(y):.1f}")
            pen = "L"
        if parts:
            title = Markup("<title>{}</title>").format(tip) if tip else ""
            self._add('<path class="line {}" d="{}">{}</path>', style, "".join(parts), title)

    def steps(self, edges: Sequence[float], values: Sequence[float], style: str, tip: str) -> None:
        """Draw values that hold between two edges each."""
        points = []
        for (start, stop), value in zip(pairwise(edges), values, strict=True):
            points += [(start, value), (stop, value)]
        self.line(points, style, tip)

    def dot(self, x: float, y: float, style: str, tip: str, radius: float = 4) -> None:
        """Draw a dot with a tooltip."""
        self._add(
            '<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{:g}" tabindex="0">'
            "<title>{}</title></circle>",
            *(style, self.px(x), self.py(y), radius, tip),
        )

    def area(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float],
             style: str, tip: str) -> None:  # fmt: skip
        """Fill what lies between two lines."""
        up = [f"{self.px(x):.1f} {self.py(y):.1f}" for x, y in zip(xs, high, strict=True)]
        back = [f"{self.px(x):.1f} {self.py(y):.1f}" for x, y in zip(xs, low, strict=True)]
        path = "M" + "L".join([*up, *reversed(back)]) + "Z"
        self._add('<path class="area {}" d="{}"><title>{}</title></path>', style, path, tip)

    def upright(self, x: float, text: str, row: int = 0) -> None:
        """Mark a place on the x axis with a line, and a word above it; rows keep them apart."""
        place = self.px(x)
        self._add('<path class="mark" d="M{:.1f} {:.1f}V{:.1f}"/>', place, self.top,
                  self.height - self.bottom)  # fmt: skip
        anchor = "end" if self.x.share(x) > 0.7 else "start"
        shift = 3 if anchor == "end" else -3
        self._text(place + shift, self.top - 3 - 11 * row, text, anchor, "note")

    def level(self, y: float, style: str = "mark") -> None:
        """Draw a horizontal line at a value of y."""
        self._add('<path class="{}" d="M{:.1f} {:.1f}H{:.1f}"/>', style, self.left, self.py(y),
                  self.width - self.right)  # fmt: skip

    def names(self, labels: Sequence[tuple[float, float, str]], dots: Sequence[tuple[float, float]],
              ) -> None:  # fmt: skip
        """Write names beside their points, each where it covers no other name and fewest dots."""
        taken: list[tuple[float, float, float]] = []  # left, right, baseline
        places = [(self.px(x), self.py(y)) for x, y in dots]
        for x, y, text in labels:
            px, py, width = self.px(x), self.py(y), 6.3 * len(text)
            best: tuple[float, float, float, str] | None = None
            for shift in (0, 13, -13, 26, -26, 39, -39, 52, -52):
                for anchor, left in (("start", px + 8), ("end", px - 8 - width)):
                    line = py + 3.5 + shift
                    if left < self.left or left + width > self.width or line > self.floor - 2:
                        continue
                    if any(left < r and left + width > q and abs(line - b) < 12
                           for q, r, b in taken):  # fmt: skip
                        continue
                    covered = sum(left - 3 < a < left + width + 3 and line - 12 < b < line + 4
                                  for a, b in places)  # fmt: skip
                    bad = 10 * covered + abs(shift) / 13 + (anchor == "end") / 2
                    if best is None or bad < best[0]:
                        best = (bad, left, line, anchor)
            if best is None:
                continue
            _, left, line, anchor = best
            taken.append((left, left + width, line))
            at = left if anchor == "start" else left + width
            if abs(line - 3.5 - py) > 6:
                self._add('<path class="leader" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>', px, py,
                          at + (-2 if anchor == "start" else 2), line - 3.5)  # fmt: skip
            self._text(at, line, text, anchor, "name")

    def svg(self) -> Markup:
        """Return the panel as SVG."""
        return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
            self.width, self.height, self.label, Markup("").join(self._marks)
        )

    def _text(self, x: float, y: float, text: str, anchor: str, style: str = "") -> None:
        self._add(
            '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>',
            *(style, x, y, anchor, text),
        )

    def _add(self, template: str, *values: object) -> None:
        self._marks.append(Markup(template).format(*values))


def whisker(scale: Scale, ratio: float, low: float | None, high: float | None, style: str,
            tip: str, width: int = 170) -> Markup:  # fmt: skip
    """Return a ratio with its interval on a line of its own, for a cell of a table.

    The dot is hollow if the interval holds 1, or if there is none.
    """
    pad, middle = 6, 11

    def place(value: float) -> float:
        return pad + scale.share(value) * (width - 2 * pad)

    sure = low is not None and high is not None and not low <= 1 <= high
    bar = Markup("")
    if low is not None and high is not None:
        bar = Markup('<path class="bar {}" d="M{:.1f} {}H{:.1f}"/>').format(
            style, place(low), middle, place(high)
        )
    return Markup(
        '<svg class="whisker" viewBox="0 0 {w} 22" width="{w}" height="22" role="img" '
        'aria-label="{tip}"><path class="one" d="M{one:.1f} 0v22"/>{bar}'
        '<circle class="dot {style} {fill}" cx="{at:.1f}" cy="{middle}" r="4.5"><title>{tip}'
        "</title></circle></svg>"
    ).format(
        w=width,
        tip=escape(tip),
        one=place(1.0),
        bar=bar,
        style=style,
        fill="" if sure else "hollow",
        at=place(ratio),
        middle=middle,
    )
