"""What was found in a trained policy, as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tailrace.evaluate.explain.audit import OUTSIDE, Audit, FeatureAudit
from tailrace.evaluate.explain.explain_state import StateExplanation
from tailrace.evaluate.explain.inspect import Behaviour, Habit, Inspection
from tailrace.terminal.listings import print_record
from tailrace.terminal.tables import UNKNOWN, Column, print_columns

#: Features in the table without --all.
TOP_FEATURES = 20
#: Features that the first lines name.
LEADING = 3
#: Values of a list in a file's description that are shown.
SHOWN_VALUES = 4


def print_about(console: Console, name: str, parameters: int, about: Mapping[str, Any]) -> None:
    """Print what a policy's file says of it."""
    fields = {"parameters": f"{parameters}"}
    for section, content in about.items():
        text = _plain(content)
        if text:
            fields[section] = text
    print_record(console, name, fields)


def print_brief(console: Console, found: Inspection) -> None:
    """Print in a few lines what a policy is, what it looks at and what it resembles."""
    training = found.about.get("training") or {}
    settings = training.get("settings") or {}
    how = [str(settings.get(key, "")) for key in ("method", "name")]
    fields = {"parameters": f"{found.parameters}"}
    if how[0]:
        fields["trained by"] = how[0] + (f", preset {how[1]}" if how[1] else "")
    leading = [f for f in found.audit.features if f.changed][:LEADING]
    if leading:
        fields["looks most at"] = ", ".join(f"{f.name} ({_percent(f.changed)})" for f in leading)
    for behaviour in found.behaviours:
        known = [rule for rule in behaviour.rules if rule.best is not None]
        if known:
            nearest = max(known, key=lambda rule: rule.best or 0.0)
            text = f"{nearest.name}, {_percent(nearest.best)} of choices"
            fields[f"nearest rule in {behaviour.scenario}"] = text
    print_record(console, found.policy, fields)
    console.print(
        Text(
            "Looks at: share of choices that change if the feature is exchanged. The "
            "settings of its training: --all.",
            style="dim",
        )
    )


def _plain(value: Any) -> str:
    """A nested description on one line: ``a = 1, b.c = 2``."""
    if isinstance(value, Mapping):
        flat = ((key, _plain(item)) for key, item in value.items())
        return ", ".join(f"{key} = {item}" for key, item in flat if item != "")
    if isinstance(value, list | tuple):
        first = ", ".join(_plain(item) for item in value[:SHOWN_VALUES])
        more = len(value) - SHOWN_VALUES
        return f"{first} and {more} more" if more > 0 else first
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def print_inspection(console: Console, found: Inspection, *, all_features: bool = False) -> None:
    """Print the main points, then each scenario, the features and the attention.

    ``all_features``: all of them, and what the policy's file says of its training.
    """
    print_brief(console, found)
    for behaviour in found.behaviours:
        console.print()
        _print_behaviour(console, behaviour)
    console.print()
    _print_features(console, found.audit, all_features)
    console.print()
    _print_sources(console, found.audit)
    console.print()
    _print_attention(console, found.audit)
    if all_features:
        console.print()
        print_about(console, found.policy, found.parameters, found.about)


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold underline"))


# ---- behaviour ----------------------------------------------------------------------------------


def _print_behaviour(console: Console, found: Behaviour) -> None:
    _heading(
        console,
        f"{found.scenario}: {found.requests} requests of seed {found.seed}, {found.states} states",
    )
    numbers = range(len(found.replicas))
    print_columns(
        console,
        [
            Column(("", "replica"), [str(k) for k in numbers]),
            Column(("", "device"), list(found.replicas), left=True),
            Column(("share of", "requests"), [_percent(s) for s in found.shares]),
        ],
    )
    console.print(
        Text(f"Its choice has probability {found.confidence:.0%} on average.", style="dim")
    )
    console.print()
    _print_habits(console, "takes the replica with", found.facts)
    console.print()
    _print_habits(console, "agrees with", found.rules)


def _print_habits(console: Console, title: str, habits: Sequence[Habit]) -> None:
    print_columns(
        console,
        [
            Column(("", title), [h.name for h in habits], left=True),
            Column(("", "states"), [str(h.states) for h in habits]),
            Column(("its", "best"), [_percent(h.best) for h in habits]),
            Column(("by", "chance"), [_percent(h.chance) for h in habits]),
            Column(("its", "worst"), [_percent(h.worst) for h in habits], 1),
        ],
    )


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}"


# ---- features -----------------------------------------------------------------------------------


def _print_features(console: Console, found: Audit, all_features: bool) -> None:
    _heading(console, f"Features, by what exchanging their values does in {found.states} states")
    features = list(found.features)
    flagged = [f for f in features[TOP_FEATURES:] if "outside training range" in f.flags]
    if not all_features:
        features = features[:TOP_FEATURES]
    print_columns(
        console,
        [
            Column(("", "feature"), [f.name for f in features], left=True),
            Column(("", "of"), [f.of for f in features], 3, left=True),
            Column(("choices", "changed"), [_percent(f.changed) for f in features]),
            Column(("", "KL"), [f"{f.kl:.4f}" for f in features]),
            Column(("mean", "gradient"), [_gradient(f) for f in features]),
            Column(("", "now"), [_spread(f.mean, f.deviation) for f in features], 2),
            Column(
                ("in", "training"),
                [_spread(f.trained_mean, f.trained_deviation) for f in features],
                2,
            ),
            Column(("", ""), [", ".join(f.flags) for f in features], left=True, label="flags"),
        ],
    )
    if not all_features:
        hidden = len(found.features) - len(features)
        console.print(Text(f"{hidden} more with --all.", style="dim"))
        _print_named(console, "Also outside the training range", flagged)
    for flag in ("constant here", "constant in training", "ignored"):
        having = [f for f in found.features if flag in f.flags]
        _print_named(console, flag.capitalize(), having)
    console.print(
        Text(
            "Gradient: change of a replica's logit per deviation of the feature, against the other "
            f"replicas (+- for features of the request: its size). Outside the training range: "
            f"over 1 % of values more than {OUTSIDE:g} deviations from the mean in training. "
            "Features that say much the same share their importance.",
            style="dim",
        )
    )


def _gradient(feature: FeatureAudit) -> str:
    if feature.of == "request":  # the same for all replicas: it has no sign of its own
        return f"+-{feature.sensitivity:.2f}"
    return f"{feature.gradient:+.2f}"


def _spread(mean: float, deviation: float) -> str:
    return f"{round(mean, 2) + 0.0:.2f} +- {deviation:.2f}"  # + 0.0: no minus before zero


def _print_named(console: Console, title: str, features: Sequence[FeatureAudit]) -> None:
    if features:
        console.print(Text(f"{title}: {', '.join(f.name for f in features)}."))


def _print_sources(console: Console, found: Audit) -> None:
    print_columns(
        console,
        [
            Column(("all features", "of the"), [s.name for s in found.sources], left=True),
            Column(("choices", "changed"), [_percent(s.changed) for s in found.sources]),
            Column(("", "KL"), [f"{s.kl:.4f}" for s in found.sources]),
        ],
    )


def _print_attention(console: Console, found: Audit) -> None:
    heads = found.attention
    if not heads:
        console.print("There never were two replicas, so attention has nothing to look at.")
        return
    print_columns(
        console,
        [
            Column(("attention", "head"), [str(h.head) for h in heads]),
            Column(("to", "itself"), [_percent(h.to_self) for h in heads]),
            Column(("to the", "chosen"), [_percent(h.to_chosen) for h in heads]),
            Column(("if all", "alike"), [_percent(h.even) for h in heads]),
            Column(("", "entropy"), [f"{h.entropy:.2f}" for h in heads]),
        ],
    )
    console.print(
        Text(
            f"Means over {found.explained} states. To the chosen: by the other replicas. Entropy: "
            "1 looks at all alike, 0 at one only.",
            style="dim",
        )
    )


# ---- situations ---------------------------------------------------------------------------------


def print_explanation(console: Console, found: StateExplanation) -> None:
    """Print what a policy does in a situation, and why."""
    _heading(console, f"{found.name}: {found.policy} takes replica {found.chosen}")
    if found.description:
        console.print(Text(found.description, style="dim"))
    options = found.options
    print_columns(
        console,
        [
            Column(("", "replica"), [str(o.replica) for o in options]),
            Column(("", "queued"), [str(o.queued) for o in options]),
            Column(("in", "flight"), [str(o.in_flight) for o in options]),
            Column(("cached", "tokens"), [str(o.cached_tokens) for o in options]),
            Column(("", "speed"), [f"{o.speed:g}" for o in options]),
            Column(
                ("", "logit"),
                ["unavailable" if o.logit is None else f"{o.logit:.2f}" for o in options],
            ),
            Column(("prob-", "ability"), [f"{o.probability:.1%}" for o in options]),
        ],
        bold=[found.chosen],
    )
    for option in options:
        if option.reasons:
            console.print(Text(f"Replica {option.replica}:", style="bold"))
        for reason in option.reasons:
            console.print(Text(f"  {reason.effect:+.2f}  {reason.text}"))
    by_choice: dict[tuple[int, ...], list[str]] = {}
    for rule, replicas in found.rules.items():
        by_choice.setdefault(replicas, []).append(rule)
    for replicas, rules in sorted(by_choice.items()):
        numbers = " or ".join(map(str, replicas))
        console.print(Text(f"Rules for replica {numbers}: {', '.join(rules)}."))
