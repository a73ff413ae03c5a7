"""What each policy needs, as a table for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tailrace.evaluate.search.sizing import Kind, Need, Trial, Wanted
from tailrace.policy.registry import split_order
from tailrace.terminal.tables import UNKNOWN, Column, counted, number, print_columns


def print_plan(
    console: Console, needs: Sequence[Need], kinds: Sequence[Kind], wanted: Wanted
) -> None:
    """Print what each policy needs, and what the first saves against the best of the others."""
    found = [need.found for need in needs]
    columns = [
        Column(("", "policy"), [need.policy for need in needs], left=True),
        *(
            Column(("", kind.name), [str(t.counts[k]) if t else UNKNOWN for t in found])
            for k, kind in enumerate(kinds)
        ),
        Column(("", "price"), [number(t.price) if t else UNKNOWN for t in found]),
        _aim(found, wanted),
        Column(("TTFT", "P99 s"), [number(t.summary.ttft_s.p99) if t else UNKNOWN for t in found]),
        Column(("E2E", "mean s"), [number(t.summary.e2e_s.mean) if t else UNKNOWN for t in found]),
        Column(("tried", "clusters"), [str(len(need.trials)) for need in needs], keep=1),
    ]
    print_columns(console, columns)
    console.print(Text(verdict(needs, wanted)))
    for sentence in saved_by_order(needs):
        console.print(Text(sentence))


def verdict(needs: Sequence[Need], wanted: Wanted) -> str:
    """Say in a sentence what the first policy saves."""
    aim = " and ".join(map(str, wanted.objectives))
    workload = wanted.scenario.workload
    what = f"{number(workload.rate)} requests/s of {workload.name} within {aim}"
    first, others = needs[0], [need for need in needs[1:] if need.found is not None]
    if first.found is None:
        return f"{first.policy} cannot serve {what} with {counted(wanted.most, 'replica')}."
    text = f"{first.policy} serves {what} with {counted(sum(first.found.counts), 'replica')}"
    best = min(others, key=lambda need: _price(need.found), default=None)
    if best is None:
        return f"{text}."
    saved = 1 - first.found.price / _price(best.found)
    if saved > 0:
        return f"{text}, {saved:.0%} cheaper than {best.policy}."
    if saved < 0:
        return f"{text}, {-saved:.0%} dearer than {best.policy}."
    return f"{text}, as many as {best.policy} needs."


def saved_by_order(needs: Sequence[Need]) -> list[str]:
    """Say for each policy that was tried with and without an order how many replicas that saves."""
    by_name = {need.policy: need.found for need in needs}
    said = []
    for need in needs:
        base, suffix = split_order(need.policy)
        alone, ordered = by_name.get(base), need.found
        if suffix and alone is not None and ordered is not None:
            counts = sum(alone.counts), sum(ordered.counts)
            said.append(f"{base}: {counted(counts[0], 'replica')}, with its order {counts[1]}.")
    return said


def _price(trial: Trial | None) -> float:
    return float("inf") if trial is None else trial.price


def _aim(found: Sequence[Trial | None], wanted: Wanted) -> Column:
    """Return the targets that were used if there was a choice, else the shares that met theirs."""
    if wanted.targets_s:
        targets = [number(t.target_s) if t else UNKNOWN for t in found]
        return Column(("target", "s"), targets)
    return Column(("within", "SLO"), [_share(t) for t in found])


def _share(trial: Trial | None) -> str:
    return f"{trial.summary.slo_attainment:.1%}" if trial else UNKNOWN
