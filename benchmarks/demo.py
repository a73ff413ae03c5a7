"""The end of `make demo`: a trained policy among all built-in ones, and what that means in words.

python benchmarks/demo.py runs/demo
"""

import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

import tailrace as tr
from tailrace.config import Scenario
from tailrace.evaluate.judge.compare import Comparison
from tailrace.evaluate.measure.runner import default_policies
from tailrace.policy import registry
from tailrace.terminal.tables import print_comparison

SCENARIO = "demo"


def sentences(comparison: Comparison, policy: str) -> list[str]:
    """Say what was trained, what it beats by how much, and what to type next."""
    cost_s = {e.policy: float(np.mean([run.cost_s for run in e.runs])) for e in comparison.entries}
    own_s = cost_s.pop(policy)
    rules = {rule.name for rule in registry.rules() if not rule.in_engine}
    best = min((name for name in cost_s if name in rules), key=lambda name: cost_s[name])
    change, usual = own_s / cost_s[best] - 1, own_s / cost_s[comparison.reference] - 1
    word = "below" if change < 0 else "above"
    size = comparison.scenario.cluster.size
    return [
        (
            f"Trained: {policy}, a routing policy for any number of servers, tried on {size} of "
            "mixed speed with returning conversations."
        ),
        (
            f"Its latency cost is {abs(change):.1%} {word} that of the best of {len(rules)} rules, "
            f"{best}, and {-usual:.0%} below that of {comparison.reference}."
        ),
        (
            f"Next: tailrace inspect {policy} --scenario {SCENARIO} shows what it looks at, and "
            f"tailrace serve -b URL -b URL -p {policy} puts it in front of your servers."
        ),
    ]


def main() -> None:
    """Rank the policy of a run and say what came out."""
    policy = str(Path(sys.argv[1]) / "best.tailrace")
    builtin, _ = default_policies(Scenario())
    comparison = tr.compare(SCENARIO, [*builtin, policy]).comparison
    width = None if sys.stdout.isatty() else 120
    console = Console(width=width, highlight=False)
    print_comparison(console, comparison)
    console.print()
    for sentence in sentences(comparison, policy):
        console.print(Text(sentence))


if __name__ == "__main__":
    main()
