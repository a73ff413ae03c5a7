"""The section on what a policy does differently from the best single rule."""

from collections.abc import Sequence

from tailrace.evaluate.explain.decisions import Decisions, Difference, replicas_apart, states_apart
from tailrace.evaluate.judge.replays import Replays
from tailrace.evaluate.judge.results_folder import Results
from tailrace.report.blocks import Block, Cards, Section, Tabular, Words
from tailrace.report.tables import Row, Table, TableCell, plain, share_bar, share_text

#: Features shown, and examples.
FEATURES, EXAMPLES = 7, 4
_TITLE = "What it does differently"


def differently(results: Results, replays: Replays) -> list[Section]:
    """Return how often, in which states and why the subject deviates from the best rule."""
    rule, subject = results.data.best_single, results.subject
    if rule == subject or not replays.runs:
        return []
    found = [d for d in replays.decisions if len(d.differs)]
    if not found:
        words = (
            f"{subject} and {rule} cannot be compared decision by decision: that takes a trained "
            "policy or a built-in rule on the compiled engine."
        )
        return [Section("differently", _TITLE, (Words(words),))]
    total = sum(len(d.differs) for d in found)
    differ = sum(int(d.differs.sum()) for d in found)
    blocks: list[Block] = [
        Words(
            f"While {subject} routed seed {results.data.seeds[0]} of each scenario, {rule}, the "
            f"best single rule, was asked on the side what it would do, at {total} decisions "
            f"evenly spaced. It would have chosen another replica in {share_text(differ / total)} "
            "of them (ties count as agreement)."
        ),
        Tabular(_shares(found)),
    ]
    blocks += _features(found, subject, rule)
    examples = [d.example for d in found if d.example is not None]
    if examples:
        examples.sort(key=lambda e: -e.margin)
        blocks.append(
            Words(
                "The clearest decision of each scenario, of the scenarios where it is clearest. "
                "Reasons are gradients times differences between the two replicas: about how much "
                "of the lead in the policy's score comes from where."
            )
        )
        blocks.append(Cards(tuple(examples[:EXAMPLES]), subject, rule))
    return [Section("differently", _TITLE, tuple(blocks))]


def _shares(found: Sequence[Decisions]) -> Table:
    rows = []
    for one in sorted(found, key=lambda d: -float(d.differs.mean())):
        share = float(one.differs.mean())
        bar = share_bar(share, f"{one.scenario}: {share_text(share)}")
        cells = plain(one.scenario, share_text(share), "", str(len(one.differs)))
        rows.append(Row((*cells[:2], TableCell("", picture=bar), cells[3])))
    return Table(
        "How often it deviates.",
        ("scenario", "it deviates in", "", "of so many decisions"),
        tuple(rows),
        pictures=2,
    )


def _features(found: Sequence[Decisions], subject: str, rule: str) -> list[Block]:
    blocks: list[Block] = []
    states = states_apart(found, FEATURES)
    if states:
        blocks += [
            Words(
                "In which states: means within each scenario, then over scenarios. In deviations "
                "means how far apart the two means are, in standard deviations."
            ),
            Tabular(_differences("Request and cluster.", ("where they agree", "deviate"), states)),
        ]
    replicas = replicas_apart(found, FEATURES)
    if replicas:
        blocks += [
            Words(f"Where they deviate, the replica of {subject} differs from that of {rule} in:"),
            Tabular(_differences("The two replicas.", (f"{rule}'s", f"{subject}'s"), replicas)),
        ]
    return blocks


def _differences(caption: str, heads: tuple[str, str], differences: Sequence[Difference]) -> Table:
    rows = [
        Row(plain(d.name, d.help, d.first, d.second, f"{d.deviations:+.2f}")) for d in differences
    ]
    return Table(
        f"{caption} Typical values: means on the scale the policy sees, mostly logarithmic.",
        ("feature", "what it is", *heads, "in deviations"),
        tuple(rows),
        frozenset({0, 1}),
    )
