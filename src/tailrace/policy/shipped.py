"""Data files of the package: trained policies, and tuned constants of rules.

``tailrace`` is the policy to use. ``linear_es`` (a linear score, by CMA-ES) and ``predict_greedy``
(a predictor of cost) are simple learned baselines; ``tailrace tune`` makes both, and the constants.
"""

import json
from pathlib import Path
from typing import Any

from tailrace.errors import TailraceError, unknown_name
from tailrace.policy.learned.checkpoint import SHIPPED, SUFFIX

FOLDER = SHIPPED.parent
TUNED_FILE = FOLDER / "tuned.json"
TUNED_SUFFIX = ":tuned"
LINEAR, PREDICTOR = "linear_es", "predict_greedy"
#: Learned baselines, each a file in FOLDER.
LEARNING = (LINEAR, PREDICTOR)
SHIPPED_NAME = "tailrace"
#: What each trained policy of the package is.
TRAINED = {
    SHIPPED_NAME: "the trained policy that ships with Tailrace; what `serve` uses",
    LINEAR: "learned baseline: a linear score of the features, tuned by evolution (CMA-ES)",
    PREDICTOR: "learned baseline: the replica of least predicted cost",
}


def tuned_constants() -> dict[str, dict[str, float]]:
    """Return the tuned constants of every tuned rule; empty if none is."""
    if not TUNED_FILE.is_file():
        return {}
    rules: dict[str, dict[str, Any]] = json.loads(TUNED_FILE.read_text(encoding="utf-8"))["rules"]
    return {rule: found["constants"] for rule, found in rules.items()}


def constants_of(rule: str) -> dict[str, float]:
    """Return the tuned constants of a rule."""
    tuned = tuned_constants()
    if rule not in tuned:
        if not tuned:
            raise TailraceError(f"no rule has tuned constants yet; run `tailrace tune {rule}`")
        raise unknown_name("tuned rule", rule, tuned)
    return tuned[rule]


def file_of(name: str) -> Path:
    """Return the file of a learned baseline."""
    path = FOLDER / f"{name}{SUFFIX}"
    if not path.is_file():
        raise TailraceError(f"{name} is not trained yet; run `tailrace tune {name}`")
    return path


def spec_of(rule: str, constants: dict[str, float]) -> str:
    """Return the command line's notation for a rule with constants."""
    return f"{rule}:" + ",".join(f"{key}={value:g}" for key, value in constants.items())
