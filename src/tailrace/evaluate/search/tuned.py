"""Files of tuning results: constants of rules as JSON, learned baselines as policy files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.search import linear
from tailrace.evaluate.search.tune import Tuned, TuningObjective, tune_linear
from tailrace.files import dumps, write_text
from tailrace.parallel import WorkerPool
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.observation import REPLICA_FEATURES
from tailrace.policy.shipped import LINEAR, PREDICTOR, spec_of


def record_of(rule: str, tuned: Tuned, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of one rule."""
    return {
        "constants": tuned.constants,
        "spec": spec_of(rule, tuned.constants),
        "score": tuned.score,
        "default_score": tuned.default_score,
        "tried": tuned.tried,
        "method": tuned.method,
        "on": dict(conditions),
    }


def merge(path: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Merge records of rules into a file; records of other rules are kept."""
    rules: dict[str, Any] = {}
    if path.is_file():
        try:
            rules = json.loads(path.read_text(encoding="utf-8"))["rules"]
        except (ValueError, KeyError, TypeError):
            raise TailraceError(f"{path} is no file of tuned constants; name another") from None
    merged = {**rules, **records}
    write_text(path, dumps({"rules": {name: merged[name] for name in sorted(merged)}}) + "\n")


def _conditions(traffics: Sequence[Traffic]) -> dict[str, Any]:
    return {
        "scenarios": list(dict.fromkeys(t.scenario.name for t in traffics)),
        "requests": traffics[0].scenario.workload.requests,
    }


def _seeds(traffics: Sequence[Traffic]) -> list[int]:
    return sorted({t.seed for t in traffics})


def save_linear(
    path: Path,
    traffics: Sequence[Traffic],
    pool: WorkerPool,
    generations: int,
    progress: Callable[[int], None],
) -> dict[str, float]:
    """Tune ``linear_es`` into a file, which holds the best so far from the first generation on."""
    names = [REPLICA_FEATURES[k].name for k in linear.COLUMNS]
    last = float("inf")

    def report(generation: int, score: float, weights: NDArray[np.float64]) -> None:
        nonlocal last
        progress(generation)
        if score >= last and generation < generations:
            return
        last = score
        training = {
            "kind": LINEAR,
            "method": "CMA-ES",
            "generations": generation,
            **_conditions(traffics),
            "weights": dict(zip(names, weights.tolist(), strict=True)),
        }
        checkpoint.save(
            path,
            linear.CONFIG,
            linear.tensors_of(weights),
            training=training,
            seeds=_seeds(traffics),
            scores={"tuning": score},
        )

    tune_linear(TuningObjective(traffics, pool), traffics, generations, report)
    return {"score": last}


def save_predictor(
    path: Path,
    traffics: Sequence[Traffic],
    pool: WorkerPool,
    rounds: int,
    progress: Callable[[int], None],
) -> dict[str, float]:
    """Train ``predict_greedy`` into a file."""
    try:
        from tailrace.evaluate.search import predictor
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TailraceError("predict_greedy needs torch: pip install 'tailrace[train]'") from None

    metrics: dict[str, float] = {}

    def report(number: int, error: float, decisions: int) -> None:
        progress(number)
        metrics.update(error=error, decisions=decisions)

    tensors = predictor.train(traffics, pool, rounds=rounds, report=report)
    training = {"kind": PREDICTOR, "rounds": rounds, **_conditions(traffics)}
    checkpoint.save(
        path,
        predictor.CONFIG,
        tensors,
        training={**training, "drivers": list(predictor.DRIVERS)},
        seeds=_seeds(traffics),
        scores=metrics,
    )
    return metrics
