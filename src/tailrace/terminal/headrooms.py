"""What a reward leaves to be won, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from tailrace.env.reward import TERM_OF_WEIGHT
from tailrace.evaluate.search.headroom import Gain, Headroom, RewardResult
from tailrace.sim.cost_accounts import TERMS
from tailrace.terminal.plots import new_figure, save_figure
from tailrace.terminal.tables import UNKNOWN, Column, print_columns

#: Terms that are there whether they count or not: shown if their weight is not 0, and in the JSON.
_WEIGHT_OF = {TERMS[term]: weight for weight, term in TERM_OF_WEIGHT.items()}
_NEVER_SHOWN = ("elapsed_s", "finished", "finished_tokens", "over_limit")
RULE, LOOK_AHEAD, POLICY = "#818cf8", "#334155", "#0d9488"
_COLOURS = {"rule": RULE, "look-ahead": LOOK_AHEAD, "policy": POLICY}


def print_headrooms(console: Console, found: Sequence[Headroom]) -> None:
    """Print the head-room of each scenario."""
    for k, one in enumerate(found):
        if k:
            console.print()
        print_headroom(console, one)


def print_headroom(console: Console, found: Headroom) -> None:
    """Print all policies, most reward first, and what follows from it."""
    played = found.played
    gains = {gain.policy: gain for gain in (found.teacher, *found.others)}
    columns = [
        Column(("", "policy"), [p.policy for p in played], left=True),
        Column(("reward", "/decision"), [_short(p.reward) for p in played]),
        Column(("against", "best rule"), [_share(p, found, gains) for p in played]),
        Column(("95 %", "interval"), [_interval(gains.get(p.policy)) for p in played], 2),
        Column(("cost", "s"), [_short(p.cost_s) for p in played]),
        Column(("deviation", "/decision"), [_short(p.raw.deviation) for p in played], 4),
        Column(("", "P1"), [_short(p.raw.p01) for p in played], 5),
        Column(("", "P99"), [_short(p.raw.p99) for p in played], 5),
    ]
    if found.reward.bounds != (None, None):
        columns.insert(4, Column(("at", "bound"), [f"{p.at_bound:.0%}" for p in played], 1))
    columns += [
        Column(("", name), [_short(p.terms[name]) for p in played], 3)
        for name in played[0].terms
        if _counts(name, found) and any(p.terms[name] for p in played)
    ]
    best = [k for k, p in enumerate(played) if p.policy == found.best_rule]
    print_columns(console, columns, bold=best)
    console.print(Text(_note(found), style="dim"))
    for verdict in found.verdicts:
        console.print(Text(f"- {verdict}"))


def _counts(term: str, found: Headroom) -> bool:
    if term in _WEIGHT_OF:
        return bool(getattr(found.reward, _WEIGHT_OF[term]))
    return term not in _NEVER_SHOWN


def _note(found: Headroom) -> str:
    seeds = len(found.seeds)
    return (
        f"{found.scenario.name}: {found.decisions} requests, {seeds} training seed"
        f"{'s' * (seeds > 1)}, the same for all. Reward: {_weights(found)}. cost = latency cost "
        f"per decision; terms are per decision and before weights."
    )


def _weights(found: Headroom) -> str:
    """What was changed of the reward, or that nothing was."""
    changed = found.reward.model_dump(exclude_defaults=True)
    if not changed:
        return "the default, minus the latency cost"
    return ", ".join(f"{name} = {value}" for name, value in changed.items())


def _share(played: RewardResult, found: Headroom, gains: dict[str, Gain]) -> str:
    best = next(p for p in found.played if p.policy == found.best_rule)
    if played is best:
        return "best rule"
    gain = gains.get(played.policy)
    difference = played.reward - best.reward
    if gain is not None and gain.share is not None:
        return f"{gain.share:+.1%}"
    if gain is None and best.reward and abs(difference) < 10 * abs(best.reward):
        return f"{difference / abs(best.reward):+.1%}"
    return f"{difference:+.3g}"


def _interval(gain: Gain | None) -> str:
    if gain is None or gain.low is None or gain.high is None:
        return UNKNOWN
    return f"{gain.low:+.3g} to {gain.high:+.3g}"


def _short(value: float) -> str:
    return f"{value:.4g}"


def plot_headroom(found: list[Headroom], path: Path) -> None:
    """Draw reward and latency cost of every policy, a row of panels per scenario."""
    rows = max(len(one.played) for one in found)
    figure = new_figure(10, len(found) * (1.4 + 0.22 * rows))
    panels = figure.subplots(len(found), 2, squeeze=False, sharey="row")
    for one, (left, right) in zip(found, panels, strict=True):
        played = one.played[::-1]
        places = np.arange(len(played))
        colours = [_COLOURS[p.kind] for p in played]
        for axes, values, title in (
            (left, [p.reward for p in played], "reward per decision, more is better"),
            (right, [p.cost_s for p in played], "latency cost (s), less is better"),
        ):
            axes.hlines(places, axes.get_xlim()[0], values, color="#e2e8f0", linewidth=1)
            axes.scatter(values, places, c=colours, s=34, zorder=2)
            axes.set_title(title, fontsize=10)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.grid(axis="y", color="#f1f5f9")
        left.set_yticks(places, [p.policy for p in played], fontsize=8)
        left.axvline(
            next(p.reward for p in played if p.policy == one.best_rule),
            color="#94a3b8",
            linestyle=":",
        )
        left.set_ylabel(one.scenario.name)
    figure.suptitle("rules (violet), look-aheads (grey), policies (green)", fontsize=10)
    save_figure(figure, path)
