"""The pictures of a report."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from tailrace.config import Event
from tailrace.evaluate.compare import Interval
from tailrace.evaluate.opponents import Role
from tailrace.output.tables import number
from tailrace.report.replays import SHARES, LoadPoint, Replay, Replays, Timeline, coarser, shown
from tailrace.report.source import Results
from tailrace.report.svg import Panel, Scale, around, tick_text

#: Percentiles marked on the axis of a distribution.
PERCENTILES = ((0.5, "P50"), (0.9, "P90"), (0.99, "P99"), (0.999, "P99.9"))
#: Beyond this multiple of the best single rule a policy is not drawn, but named.
FAR = 4.0
#: Names written beside the best policies of the plot of all of them.
NAMED = 3
#: Seconds shown before and after what happens.
BEFORE_S, AFTER_S, AFTER_BURST_S = 30.0, 60.0, 150.0
#: A burst is the busiest stretch of so many seconds.
BURST_S = 10.0
#: Replicas that can be told apart by colour, and stretches of the plots of their shares.
MAX_COLOURS, SHARE_BINS = 8, 60
_SIZE = re.compile(r"scale-(\d+)$|(?:^|-)(\d+)-replicas$")


@dataclass(frozen=True)
class Figure:
    """A picture with its words."""

    title: str
    svg: Markup
    note: str = ""


def pareto(results: Results) -> Figure:
    """Mean end to end against P99 TTFT of every policy, as multiples of the best single rule."""
    points = []
    beyond = []
    for name, standing in results.standing.items():
        versus = standing.vs_best_single
        if versus.mean_e2e is None or versus.p99_ttft is None:
            continue
        if max(versus.mean_e2e, versus.p99_ttft) > FAR:
            beyond.append(name)
        else:
            points.append((name, versus.mean_e2e, versus.p99_ttft))
    panel = Panel(
        around([x for _, x, _ in points], log=True, margin=0.12),
        around([y for _, _, y in points], log=True, margin=0.12),
        f"P99 time to first token over mean end-to-end time of {len(points)} policies",
        width=440,
        height=340,
    )
    panel.axes("mean end to end, relative", "P99 TTFT, relative")
    front = _front([(x, y) for _, x, y in points])
    panel.line([p for pair in _stairs(front) for p in pair], "front", "no policy is better in both")
    named = _named(results)
    taken: list[tuple[float, float]] = []
    for name, x, y in sorted(points, key=lambda p: p[0] in named):
        part = _part(results, name)
        tip = f"{name}: mean end to end {x:.3f}x, P99 TTFT {y:.3f}x of {results.data.best_single}"
        panel.dot(x, y, part, tip, 5.5 if part == "subject" else 4)
        if name in named:
            before = panel.x.share(x) > 0.6
            place = (panel.px(x), panel.py(y))
            shift = 12.0 * sum(abs(place[1] - t[1]) < 11 and abs(place[0] - t[0]) < 110
                               for t in taken)  # fmt: skip
            taken.append(place)
            panel.words(x, y, name, part, before=before, shift=shift)
    note = f"Not drawn, more than {FAR:g} times as slow: {', '.join(beyond)}." if beyond else ""
    return Figure("Mean against tail", panel.svg(), note)


def _named(results: Results) -> set[str]:
    best = [n for n, s in results.standing.items() if s.role not in (Role.SUBJECT, Role.ORACLE)]
    named = {results.subject, results.data.best_single, *best[:NAMED], *results.look_aheads}
    return named | {results.data.best_hand_made}


def _part(results: Results, name: str) -> str:
    """What a policy is in plots over all scenarios."""
    if name == results.subject:
        return "subject"
    if name == results.data.best_single:
        return "single"
    return "oracle" if name in results.look_aheads else "other"


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other one beats in both, from left to right."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _stairs(front: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    return [[(x, y), (x2, y), (x2, y2)] for (x, y), (x2, y2) in pairwise(front)]


# ---- distributions ------------------------------------------------------------------------------


def distributions(results: Results, replays: Replays, figure: str) -> list[Figure]:
    """One panel per scenario: latency at every percentile; ``figure``: ttft_s or e2e_s."""
    what = {"ttft_s": "time to first token, s", "e2e_s": "end to end, s"}[figure]
    found = []
    for scenario in results.grid.scenarios:
        runs = _of(results, replays, scenario)
        if not runs:
            continue
        curves = [(run, part, np.asarray(getattr(run, figure))) for run, part in runs]
        values = [float(v) for _, _, curve in curves for v in curve[SHARES >= 0.1]]
        panel = Panel(
            around(values, log=True, margin=0.02),
            Scale(0.0, _depth(0.999)),
            f"{what} in {scenario}: " + ", ".join(_at_p99(run, curve) for run, _, curve in curves),
            height=206,
        )
        panel.axes(what, "", y_ticks=[(_depth(p), text) for p, text in PERCENTILES])
        depths = [_depth(p) for p in SHARES]
        for run, part, curve in reversed(curves):
            panel.line(zip(curve.tolist(), depths, strict=True), part, run.policy)
        for run, part, curve in reversed(curves):
            for p, text in PERCENTILES:
                value = float(np.interp(p, SHARES, curve))
                if np.isfinite(value):
                    tip = f"{run.policy}: {text} {number(value)} s"
                    panel.dot(value, _depth(p), f"{part} point", tip, 2.6)
        found.append(Figure(scenario, panel.svg()))
    return found


def _depth(share: float) -> float:
    """Place of a percentile: each nine is as long as the one before."""
    return float(-np.log10(1 - min(share, 0.9995)))


def _at_p99(run: Replay, curve: NDArray[np.float64]) -> str:
    return f"{run.policy} P99 {number(float(np.interp(0.99, SHARES, curve)))} s"


def _of(results: Results, replays: Replays, scenario: str) -> list[tuple[Replay, str]]:
    """The replays of a scenario with their parts, the subject first."""
    runs = {r.policy: r for r in replays.runs if r.scenario == scenario}
    return [(runs[name], part) for name, part in shown(results, scenario).items() if name in runs]


# ---- over load ----------------------------------------------------------------------------------


def over_load(results: Results, replays: Replays) -> list[Figure]:
    """For each scenario whose load was varied: P99 TTFT and mean end to end over load."""
    found = []
    for scenario in dict.fromkeys(p.scenario for p in replays.loads):
        points = [p for p in replays.loads if p.scenario == scenario]
        for name, title in (("p99_ttft_s", "P99 TTFT, s"), ("mean_e2e_s", "mean end to end, s")):
            curves = {p.policy: _means(points, p.policy, name) for p in points}
            loads = sorted({p.load for p in points})
            panel = Panel(
                Scale(loads[0], loads[-1]),
                around([v for curve in curves.values() for _, v in curve], log=True),
                f"{title} over load in {scenario}",
            )
            panel.axes("load, share of capacity", title)
            if panel.x.low < 1 < panel.x.high:
                panel.upright(1.0, "capacity")
            for policy, part in reversed(shown(results, scenario).items()):
                curve = curves.get(policy, [])
                panel.line(curve, part, policy)
                for load, value in curve:
                    panel.dot(load, value, part, f"{policy} at {load:g}: {number(value)} s", 3.2)
            found.append(Figure(f"{scenario}: {title.partition(',')[0]}", panel.svg()))
    return found


def _means(points: Sequence[LoadPoint], policy: str, figure: str) -> list[tuple[float, float]]:
    """A figure over load [(load, mean over seeds)]."""
    values: dict[float, list[float]] = {}
    for point in points:
        if point.policy == policy:
            values.setdefault(point.load, []).append(float(getattr(point, figure)))
    return sorted((load, float(np.mean(of))) for load, of in values.items())


# ---- over time ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """Part of a scenario's run."""

    scenario: str
    start_s: float
    stop_s: float
    events: tuple[Event, ...] = ()


def failure_stretch(results: Results, replays: Replays) -> Stretch | None:
    """The first scenario in which something happens to a replica while requests arrive."""
    for scenario in results.grid.scenarios:
        runs = _of(results, replays, scenario)
        settings = results.scenario(scenario) if runs else None
        if settings is None:
            continue
        end = float(runs[0][0].time.edges_s[-1])
        events = tuple(e for e in settings.events if e.at_s < end)
        if events:
            first, last = events[0].at_s, max(e.at_s for e in events)
            return Stretch(scenario, max(0.0, first - BEFORE_S), min(end, last + AFTER_S), events)
    return None


def burst_stretch(results: Results, replays: Replays) -> Stretch | None:
    """The highest burst of arrivals, relative to the mean, of all scenarios without events."""
    best: tuple[float, Stretch] | None = None
    for scenario in results.grid.scenarios:
        runs = _of(results, replays, scenario)
        settings = results.scenario(scenario) if runs else None
        if settings is None or settings.events:
            continue
        time = runs[0][0].time
        width = float(time.edges_s[1] - time.edges_s[0])
        window = min(max(1, round(BURST_S / width)), len(time.arrivals_rps))
        rates = np.convolve(time.arrivals_rps, np.ones(window) / window, "valid")
        height = float(rates.max() / max(time.arrivals_rps.mean(), 1e-9))
        peak = float(time.edges_s[int(rates.argmax())])
        stretch = Stretch(
            scenario,
            max(0.0, peak - 2 * BEFORE_S),
            min(float(time.edges_s[-1]), peak + AFTER_BURST_S),
        )
        if best is None or height > best[0]:
            best = height, stretch
    return None if best is None else best[1]


def queues(results: Results, replays: Replays, stretch: Stretch) -> list[Figure]:
    """Arrivals, and requests without a first token, over a stretch of time."""
    runs = _of(results, replays, stretch.scenario)
    shown_ = [(run, part, _cut(run.time, stretch)) for run, part in runs]
    queue = Panel(
        Scale(stretch.start_s, stretch.stop_s),
        around([float(v) for _, _, time in shown_ for v in time.queue]),
        f"requests waiting for a first token over time in {stretch.scenario}: "
        + ", ".join(f"{r.policy} at most {t.queue.max():.0f}" for r, _, t in shown_),
    )
    queue.axes("time, s", "waiting for a first token")
    for row, event in enumerate(stretch.events):
        queue.upright(event.at_s, event_text(event), row % 2)
    for run, part, time in reversed(shown_):
        tip = f"{run.policy}: at most {time.queue.max():.0f} waiting"
        queue.steps(time.edges_s.tolist(), time.queue.tolist(), part, tip)
    time = shown_[0][2]
    arrivals = Panel(
        queue.x, around(time.arrivals_rps.tolist()), f"arrivals over time in {stretch.scenario}"
    )
    arrivals.axes("time, s", "arrivals, requests/s")
    arrivals.steps(time.edges_s.tolist(), time.arrivals_rps.tolist(), "plain", "arrivals")
    return [
        Figure(f"{stretch.scenario}: queue", queue.svg()),
        Figure(f"{stretch.scenario}: arrivals", arrivals.svg(), f"Under {results.subject}."),
    ]


def _cut(time: Timeline, stretch: Stretch) -> Timeline:
    first = int(np.searchsorted(time.edges_s, stretch.start_s, "right")) - 1
    last = int(np.searchsorted(time.edges_s, stretch.stop_s, "left"))
    kept = slice(first, last)
    return Timeline(
        time.edges_s[first : last + 1],
        time.arrivals_rps[kept],
        time.queue[kept],
        time.shares[:, kept],
    )


def event_text(event: Event) -> str:
    """What happens to which replica."""
    verbs = {"die": "dies", "return": "is back", "drain": "drains"}
    verb = verbs.get(event.kind, f"slows to {event.factor:g}")
    return f"{event.replica} {verb}"


def share_scenarios(results: Results, replays: Replays) -> list[str]:
    """Scenarios whose shares over time say something: replicas fail, or differ in speed."""
    found: dict[str, str] = {}
    for scenario in results.grid.scenarios:
        settings = results.scenario(scenario) if _of(results, replays, scenario) else None
        if settings is None or not 2 <= settings.cluster.size <= MAX_COLOURS:
            continue
        if settings.events:
            found.setdefault("events", scenario)
        elif len({r.speed for r in settings.cluster.expanded()}) > 1:
            found.setdefault("speeds", scenario)
        else:
            found.setdefault("equal", scenario)
    kinds = [k for k in ("events", "speeds") if k in found] or list(found)[:1]
    return [found[kind] for kind in kinds]


def shares(results: Results, replays: Replays, scenario: str) -> list[Figure]:
    """Which share of the requests went where over time: of the subject and of the best rule."""
    settings = results.scenario(scenario)
    if settings is None:
        return []
    kinds = settings.cluster.expanded()
    found = []
    for run, part in _of(results, replays, scenario):
        if part not in ("subject", "single"):
            continue
        time = coarser(run.time, len(run.time.queue) // SHARE_BINS)
        panel = Panel(
            Scale(0.0, float(time.edges_s[-1])),
            Scale(0.0, 1.0),
            f"share of the requests per replica over time under {run.policy} in {scenario}",
        )
        ticks = [(t, f"{t:.0%}") for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
        panel.axes("time, s", "share of requests", y_ticks=ticks)
        middle = ((time.edges_s[1:] + time.edges_s[:-1]) / 2).tolist()
        tops = np.nan_to_num(time.shares).cumsum(axis=0)
        bottoms = tops - np.nan_to_num(time.shares)
        for i, kind in enumerate(kinds):
            mean = float(np.nanmean(time.shares[i]))
            tip = f"replica {i}, speed {kind.speed:g}: {mean:.0%} on average"
            panel.area(middle, bottoms[i].tolist(), tops[i].tolist(), f"replica-{i}", tip)
        for event in settings.events:
            if event.at_s < panel.x.high:
                panel.upright(event.at_s, event_text(event))
        found.append(Figure(f"{scenario}: {run.policy}", panel.svg()))
    return found


# ---- cluster size -------------------------------------------------------------------------------


def sizes(results: Results) -> list[tuple[int, str]]:
    """Scenarios that are of one kind but for the number of replicas, by that number."""
    found = []
    for scenario in results.grid.scenarios:
        match = _SIZE.search(scenario)
        if match:
            found.append((int(match.group(1) or match.group(2)), scenario))
    return sorted(found) if len(found) > 1 else []


def over_size(results: Results) -> list[Figure]:
    """Cost and P99 TTFT against the best single rule over the number of replicas."""
    scenarios = sizes(results)
    rows = [results.grid.scenarios.index(name) for _, name in scenarios]
    found = []
    for figure, title in (("cost", "composite cost"), ("p99_ttft", "P99 TTFT")):
        curves = {}
        for policy in (results.subject, *results.look_aheads):
            others = [results.data.best_single] * len(results.grid.scenarios)
            each = results.grid.ratios(figure, policy, others).each()
            curves[policy] = [each[row] for row in rows]
        values = [v for c in curves.values() for i in c for v in (i.ratio, i.low, i.high)]
        counts = [count for count, _ in scenarios]
        panel = Panel(
            Scale(counts[0] / 1.3, counts[-1] * 1.3, log=True),
            around([*values, 1.0], log=True),
            f"{title} against {results.data.best_single} over the number of replicas",
        )
        ticks = [(float(count), tick_text(count)) for count in counts]
        panel.axes("replicas", f"{title}, relative", x_ticks=ticks)
        panel.level(1.0, "line single")
        for policy, curve in reversed(curves.items()):
            _with_intervals(panel, counts, curve, _part(results, policy), policy)
        found.append(Figure(title[0].upper() + title[1:], panel.svg()))
    return found


def _with_intervals(
    panel: Panel, xs: Sequence[float], curve: Sequence[Interval], part: str, policy: str
) -> None:
    panel.line([(x, i.ratio) for x, i in zip(xs, curve, strict=True)], part, policy)
    for x, interval in zip(xs, curve, strict=True):
        if interval.low is not None:
            panel.line([(x, interval.low), (x, interval.high)], f"{part} bar")
        panel.dot(x, interval.ratio, part, f"{policy}, {x:g} replicas: {interval.ratio:.3f}x")
