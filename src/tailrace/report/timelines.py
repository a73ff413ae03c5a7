"""Timelines: queues around a burst and a failure, and shares of replicas."""

from dataclasses import dataclass

import numpy as np

from tailrace.config import Event
from tailrace.evaluate.judge.replays import Replays, Timeline, coarser
from tailrace.evaluate.judge.results_folder import Results
from tailrace.report.charts import Figure, runs_of
from tailrace.report.svg import Panel, Scale, around

#: Seconds shown before and after what happens.
BEFORE_S, AFTER_S, AFTER_BURST_S = 30.0, 60.0, 150.0
#: A burst is the busiest stretch of so many seconds.
BURST_S = 10.0
#: Replicas that can be told apart by colour, and stretches of the plots of their shares.
MAX_COLOURS, SHARE_BINS = 8, 40
#: The reference is left out of a queue's plot if its queue is so many times as long as the others'.
TOO_LONG = 4.0
#: Room above a plot for its title and two rows of events.
TOP_WITH_EVENTS = 36


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
        runs = runs_of(results, replays, scenario)
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
        runs = runs_of(results, replays, scenario)
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
    runs = runs_of(results, replays, stretch.scenario)
    shown_ = [(run, part, _cut(coarser(run.time, 2), stretch)) for run, part in runs]
    note = ""
    calm = max((float(t.queue.max()) for _, part, t in shown_ if part != "reference"), default=0.0)
    if shown_[-1][1] == "reference" and shown_[-1][2].queue.max() > TOO_LONG * max(calm, 1.0):
        run, _, time = shown_.pop()
        note = f"Not drawn: {run.policy}, up to {time.queue.max():.0f} waiting."
    queue = Panel(
        Scale(stretch.start_s, stretch.stop_s),
        around([float(v) for _, _, time in shown_ for v in time.queue]),
        f"requests waiting for a first token over time in {stretch.scenario}: "
        + ", ".join(f"{r.policy} at most {t.queue.max():.0f}" for r, _, t in shown_),
        top=TOP_WITH_EVENTS,
    )
    queue.axes("time, s", "waiting for a first token")
    for row, event in enumerate(stretch.events):
        queue.upright(event.at_s, event_text(event), row % 2)
    for run, part, time in reversed(shown_):
        tip = f"{run.policy}: at most {time.queue.max():.0f} waiting"
        queue.steps(time.edges_s.tolist(), time.queue.tolist(), part, tip)
    time = shown_[0][2]
    arrivals = Panel(
        queue.x,
        around(time.arrivals_rps.tolist()),
        f"arrivals over time in {stretch.scenario}",
        top=TOP_WITH_EVENTS,
    )
    arrivals.axes("time, s", "arrivals, requests/s")
    arrivals.steps(time.edges_s.tolist(), time.arrivals_rps.tolist(), "plain", "arrivals")
    follows = f"As they came under {results.subject}: turns follow answers."
    return [
        Figure(f"{stretch.scenario}: queue", queue.svg(), note),
        Figure(f"{stretch.scenario}: arrivals", arrivals.svg(), follows),
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
    """Return an event as text."""
    verbs = {"die": "dies", "return": "is back", "drain": "drains"}
    verb = verbs.get(event.kind, f"slows to {event.factor:g}")
    return f"{event.replica} {verb}"


def share_scenarios(results: Results, replays: Replays) -> list[str]:
    """Scenarios whose shares over time are worth showing: replicas fail or differ in speed."""
    found: dict[str, str] = {}
    for scenario in results.grid.scenarios:
        settings = results.scenario(scenario) if runs_of(results, replays, scenario) else None
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
    for run, part in runs_of(results, replays, scenario):
        if part not in ("subject", "single"):
            continue
        time = coarser(run.time, len(run.time.queue) // SHARE_BINS)
        panel = Panel(
            Scale(0.0, float(time.edges_s[-1])),
            Scale(0.0, 1.0),
            f"share of the requests per replica over time under {run.policy} in {scenario}",
            top=TOP_WITH_EVENTS,
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
        for row, event in enumerate(e for e in settings.events if e.at_s < panel.x.high):
            panel.upright(event.at_s, event_text(event), row % 2)
        found.append(Figure(f"{scenario}: {run.policy}", panel.svg()))
    return found
