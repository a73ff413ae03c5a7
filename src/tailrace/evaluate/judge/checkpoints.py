"""Checkpoints of a training run as contenders: the last one need not be the best."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.judge.baselines import contender
from tailrace.evaluate.measure.contender import Contender, Role
from tailrace.policy.learned.checkpoint import SUFFIX

CHECKPOINTS, BEST, SETTINGS = "checkpoints", f"best{SUFFIX}", "settings.json"


def run_scenarios(run: Path) -> list[str]:
    """Return the names of the scenarios on which a run is evaluated."""
    path = run / SETTINGS
    if not run.is_dir():
        raise TailraceError(f"there is no training run {run}; name the folder of `tailrace train`")
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["scenarios"]
    except OSError as error:
        raise TailraceError(
            f"{run} is no training run: cannot read {path}: {error.strerror or error}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise TailraceError(
            f"{path} does not say which scenarios the run is judged on; name them with --scenario"
        ) from None
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or not names:
        raise TailraceError(f"{path}: 'scenarios' must be a list of names; use --scenario instead")
    return names


def run_checkpoints(run: Path, scenario: Scenario) -> list[Contender]:
    """Return all checkpoints of a run in training order; the best is labelled as such.

    Files with equal content are included once.
    """
    paths = sorted((run / CHECKPOINTS).glob(f"*{SUFFIX}"))
    best = run / BEST
    if best.is_file():
        paths.append(best)
    if not paths:
        raise TailraceError(f"{run} holds no checkpoints; there should be {run / CHECKPOINTS}")
    found: dict[str, Contender] = {}
    for path in paths:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest in found:
            kept = found[digest]
            if path == best:
                found[digest] = replace(kept, label=f"{kept.label} (best)")
        else:
            found[digest] = contender(str(path), scenario, Role.SUBJECT)
    return list(found.values())
