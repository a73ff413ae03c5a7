"""Charts of a report, except timelines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.replays import SHARES, LoadPoint, Replay, Replays, shown
from tailrace.evaluate.judge.results_folder import Results
from tailrace.evaluate.measure.contender import Role
from tailrace.report.svg import Panel, Scale, around, tick_text
from tailrace.terminal.tables import number

#: Percentiles marked on the axis of a distribution.
PERCENTILES = ((0.5, "P50"), (0.9, "P90"), (0.99, "P99"), (0.999, "P99.9"))
#: Beyond this multiple of the best single rule a policy is not drawn, but named.
FAR = 2.0
_SIZE = re.compile(r"scale-(\d+)$|(?:^|-)(\d+)-replicas$")


@dataclass(frozen=True)
class Figure:
    """A picture with its caption."""

    title: str
    svg: Markup
    note: str = ""


#: All of so few dots are named.
FEW_POINTS = 10


def pareto(results: Results) -> list[Figure]:
    """Mean against P99 of both latencies, of every policy, as multiples of the best single rule."""
    found = []
    for what, mean, tail in (
        ("TTFT", "mean_ttft", "p99_ttft"),
        ("end to end", "mean_e2e", "p99_e2e"),
    ):
        xs, ys = _relative(results, mean), _relative(results, tail)
        points = {n: (xs[n], ys[n]) for n in xs if np.isfinite(xs[n]) and np.isfinite(ys[n])}
        near = {n: p for n, p in points.items() if max(p) <= FAR}
        beyond = [n for n in points if n not in near]
        note = f"Not drawn, more than {FAR:g} times as slow: {', '.join(beyond)}." if beyond else ""
        found.append(
            Figure(
                f"{what[0].upper()}{what[1:]}: mean against P99", _cloud(results, near, what), note
            )
        )
    return found


def has_front(results: Results) -> bool:
    """Whether no single policy is best in mean and P99 of a latency: then there is a line."""
    pairs = (("mean_ttft", "p99_ttft"), ("mean_e2e", "p99_e2e"))
    fronts = [
        _front(
            list(zip(_relative(results, x).values(), _relative(results, y).values(), strict=True))
        )
        for x, y in pairs
    ]
    return any(len(front) > 1 for front in fronts)


def _relative(results: Results, metric: str) -> dict[str, float]:
    """Geometric means over scenarios of a metric / the best single rule's."""
    grid = results.grid
    means = grid.values(metric).mean(axis=2)
    others = means[:, [grid.policies.index(results.data.best_single)]]
    return dict(
        zip(grid.policies, np.exp(np.log(means / others).mean(axis=0)).tolist(), strict=True)
    )


def _cloud(results: Results, points: dict[str, tuple[float, float]], what: str) -> Markup:
    panel = Panel(
        around([x for x, _ in points.values()], log=True, margin=0.1),
        around([y for _, y in points.values()], log=True, margin=0.1),
        f"{what}: P99 over mean of {len(points)} policies, relative to {results.data.best_single}",
        width=400,
        height=340,
    )
    panel.axes(f"mean {what}, relative", f"P99 {what}, relative")
    front = _front(list(points.values()))
    stairs = [p for pair in _stairs(front) for p in pair]
    panel.line(stairs, "front", "the others are beaten in both")
    named = [n for n in _named(results) if n in points]
    if len(points) <= FEW_POINTS:
        named = list(points)
    for name in sorted(points, key=lambda n: n in named):
        x, y = points[name]
        part = _part(results, name)
        panel.dot(
            x, y, part, f"{name}: mean {x:.3f}x, P99 {y:.3f}x", 5.5 if part == "subject" else 4
        )
    panel.names([(*points[name], name) for name in named], list(points.values()))
    return panel.svg()


def _named(results: Results) -> list[str]:
    """Policies whose names are written out."""
    best = [n for n, s in results.standing.items() if s.role not in (Role.SUBJECT, Role.ORACLE)]
    data = results.data
    names = (
        results.subject,
        data.best_single,
        data.best_hand_made,
        *results.look_aheads,
        *best[:1],
    )
    return list(dict.fromkeys(names))


def _part(results: Results, name: str) -> str:
    """Role of a policy in plots over all scenarios."""
    if name == results.subject:
        return "subject"
    if name == results.data.best_single:
        return "single"
    return "oracle" if name in results.look_aheads else "other"


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pareto-optimal points, from left to right."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _stairs(front: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    return [[(x, y), (x2, y), (x2, y2)] for (x, y), (x2, y2) in pairwise(front)]


# ---- distributions ------------------------------------------------------------------------------


def distributions(results: Results, replays: Replays, metric: str) -> list[Figure]:
    """One panel per scenario: latency at every percentile; ``metric``: ttft_s or e2e_s."""
    what = {"ttft_s": "time to first token, s", "e2e_s": "end to end, s"}[metric]
    found = []
    for scenario in results.grid.scenarios:
        runs = runs_of(results, replays, scenario)
        if not runs:
            continue
        curves = [(run, part, np.asarray(getattr(run, metric))) for run, part in runs]
        values = [float(v) for _, _, curve in curves for v in curve[SHARES >= 0.1]]
        panel = Panel(
            around(values, log=True, margin=0.02),
            Scale(0.0, _depth(0.999)),
            f"{what} in {scenario}: " + ", ".join(_at_p99(run, curve) for run, _, curve in curves),
            height=206,
            top=10,
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


def runs_of(results: Results, replays: Replays, scenario: str) -> list[tuple[Replay, str]]:
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


def _means(points: Sequence[LoadPoint], policy: str, metric: str) -> list[tuple[float, float]]:
    """A metric over load [(load, mean over seeds)]."""
    values: dict[float, list[float]] = {}
    for point in points:
        if point.policy == policy:
            values.setdefault(point.load, []).append(float(getattr(point, metric)))
    return sorted((load, float(np.mean(of))) for load, of in values.items())


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
    for metric, title in (("cost", "latency cost"), ("p99_ttft", "P99 TTFT")):
        curves = {}
        for policy in (results.subject, *results.look_aheads):
            others = [results.data.best_single] * len(results.grid.scenarios)
            each = results.grid.ratios(metric, policy, others).each()
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
