"""An assessment in words and as a table for people."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tailrace.assess.assessment import LEAST_GAIN, Assessment, Estimate, Prospect
from tailrace.terminal.tables import UNKNOWN, Column, counted, number, print_columns

#: Policies in the table of the terminal, beside the present rule and tailrace; the page has all.
SHOWN = 8
ALWAYS = "tailrace"


def as_json(found: Assessment, switch: str, page: Path) -> dict[str, Any]:
    """Return everything as plain values."""
    trust = found.fidelity
    return {
        "requests": found.requests,
        "duration_s": found.duration_s,
        "replicas": found.replicas,
        "present": found.present,
        "best": found.best.policy,
        "gains": found.gains,
        "summary": paragraph(found),
        "recorded": found.recorded,
        "policies": found.prospects,
        "replay_errors": found.errors,
        "fidelity": None if trust is None else trust.latencies,
        "notes": found.notes,
        "switch": switch if found.gains else None,
        "page": page,
    }


def paragraph(found: Assessment) -> str:
    """Say what there is, what the best policy would give, and how far to trust that."""
    return " ".join([_now(found), _gain(found), _trust(found), *found.notes])


def _now(found: Assessment) -> str:
    now = found.recorded or found.now
    assert now is not None
    answer, take, miss = ("answered", "took", "missed")
    if not found.recorded:
        answer, take, miss = ("would answer", "would take", "would miss")
    return (
        f"Your {servers(found)} {answer} {found.requests} requests in {_time(found.duration_s)} "
        f"under {found.present}: the first token {take} {number(now.ttft_s.value)} s on average "
        f"(P99 {number(now.ttft_p99_s.value)} s), a whole answer {number(now.e2e_s.value)} s, and "
        f"{share(now.missed.value)} {miss} their SLO."
    )


def servers(found: Assessment) -> str:
    """Return how many servers there are."""
    return counted(found.replicas, "server")


def _gain(found: Assessment) -> str:
    best, now = found.best, found.now
    assert now is not None
    if best.policy == found.present:
        return f"No other policy does better on these requests: keep {found.present}."
    changes = (
        f"{best.policy} would have the first token {_change(best.ttft_change)} and whole answers "
        f"{_change(best.e2e_change)}, with {_missed(found)}"
    )
    if not found.gains:
        cost = best.cost_change
        if cost is not None and cost.low >= -LEAST_GAIN:
            return f"No policy gains {LEAST_GAIN:.0%} on these requests: keep {found.present}."
        return (
            f"No clear gain: on the same requests {changes}; that is within the interval or the "
            f"replay's error, so keep {found.present} or record for longer."
        )
    off = best.spare
    less = ""
    if off is not None and found.replicas > 1:
        between = f"({off.low:.0f} to {off.high:.0f})"
        less = (
            f" With it you could switch off {off.value:.0f} of {found.replicas} replicas "
            f"{between} and be no worse than now."
            if off.value
            else f" It has no replica to spare {between}: with fewer you would be worse off."
        )
    return f"On the same requests {changes}.{less}"


def _missed(found: Assessment) -> str:
    """Say how many SLOs the best policy misses, and against what.

    The replay of the present rule may miss more or fewer than the rule did; then it is named.
    """
    now = found.now
    assert now is not None
    before, after = share(now.missed.value), share(found.best.missed.value)
    text = f"{after} missed SLOs"
    if found.recorded is not None and share(found.recorded.missed.value) != before:
        return f"{text} ({found.present} replayed: {before})"
    return f"{text} instead of {before}" if before != after else f"{text} as now"


def _trust(found: Assessment) -> str:
    errors = found.errors
    if errors is None:
        if found.recorded is None:
            return "A trace has no latencies, so the replay's own error is not known."
        return ""
    kind = f"{errors.requests} requests"
    if errors.held_out:
        kind += " that it was not fitted to"
    ttft = "" if errors.ttft is None else f"mean first token {signed(errors.ttft)}, "
    text = f"The replay's own error, on {kind}: {ttft}mean whole answer {signed(errors.e2e)}."
    if errors.rule_ttft is None or errors.rule_e2e is None or errors.rule_missed is None:
        return text
    points = round(100 * errors.rule_missed, 1) or 0.0  # no "-0.0"
    return (
        f"{text} With {found.present} deciding anew it gives {signed(errors.rule_ttft)}, "
        f"{signed(errors.rule_e2e)}, and {points:+.1f} points of missed SLOs."
    )


def print_assessment(console: Console, found: Assessment, switch: str, page: Path) -> None:
    """Print the paragraph, the table, the command to switch and where the page is."""
    console.print(Text(paragraph(found)))
    console.print()
    shown = rows_of(found)
    columns = [
        Column(("", "policy"), [name for name, _ in shown], left=True),
        *_both("TTFT", "mean s", [p.ttft_s for _, p in shown]),
        *_both("TTFT", "P99 s", [p.ttft_p99_s for _, p in shown], keep=4),
        *_both("E2E", "mean s", [p.e2e_s for _, p in shown]),
        *_both("missed", "SLO %", [p.missed for _, p in shown], text=_hundredths),
        *_both("replicas", "to spare", [p.spare for _, p in shown], text="{:.0f}".format),
        *_both("cost", "change", [p.cost_change for _, p in shown], text=signed, keep=3)[:1],
    ]
    print_columns(console, columns, bold=[0])
    rest = len(found.prospects) - sum(p in found.prospects for _, p in shown)
    note = "Intervals: 95 %, over blocks of requests; changes and replicas to spare against the "
    note += f"replayed {found.present}."
    if rest:
        note += f" {rest} more policies are on the page."
    console.print(Text(note, style="dim"))
    console.print(Text(f"Page: {page}"))
    if found.gains:
        console.print(Text(f"To switch: {switch}"), soft_wrap=True)


def rows_of(found: Assessment, most: int | None = SHOWN) -> list[tuple[str, Prospect]]:
    """Return what was recorded and the best policies, each with its name in tables."""
    rows = [] if found.recorded is None else [(f"recorded: {found.present}", found.recorded)]
    for place, prospect in enumerate(found.prospects):
        if most is None or place < most or prospect.policy in (found.present, ALWAYS):
            mark = " (now, replayed)" if prospect.policy == found.present else ""
            rows.append((prospect.policy + mark, prospect))
    return rows


def _both(top: str, name: str, values: list[Estimate | None], text: Any = number,
          keep: int = 0) -> list[Column]:  # fmt: skip
    """Return a column of figures, and one of their intervals."""
    label = f"{top} {name}"
    return [
        Column((top, name), [UNKNOWN if v is None else text(v.value) for v in values], keep,
               label=label),
        Column(("95 %", "interval"), [interval(v, text, "-") for v in values], keep or 2,
               label=f"{label} interval"),
    ]  # fmt: skip


def interval(value: Estimate | None, text: Any = number, between: str = " to ") -> str:
    """Return the bounds of an estimate."""
    return UNKNOWN if value is None else f"{text(value.low)}{between}{text(value.high)}"


def _hundredths(value: float) -> str:
    return f"{100 * value:.1f}"


def share(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{100 * value:.1f}%"


def signed(value: float) -> str:
    """Return a change as a percentage with its sign; 0 has none."""
    percent = round(100 * value)
    return f"{percent:+d}%" if percent else "0%"


def _change(change: Estimate | None) -> str:
    """Say a change in words, with its interval."""
    if change is None:
        return "as now"

    def said(share: float) -> str:
        return f"{100 * abs(share):.0f}% {'sooner' if share < 0 else 'later'}"

    if change.low < 0 < change.high:
        return f"about as soon ({said(change.low)} to {said(change.high)})"
    near, far = sorted(abs(bound) for bound in (change.low, change.high))
    return f"{said(change.value)} ({100 * near:.0f} to {100 * far:.0f}%)"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
