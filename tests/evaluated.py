"""A small evaluation in a results folder, and its replays: fixtures for evaluate and report."""

import dataclasses

import pytest

from policy.networks import random_tensors, small
from tailrace.evaluate.judge import replays, results
from tailrace.evaluate.judge.baselines import contender
from tailrace.evaluate.judge.results_folder import load
from tailrace.evaluate.judge.suite import (
    EvaluationPlan,
    evaluate,
    load_scenarios,
    ranking_seeds,
    selection_seeds,
)
from tailrace.evaluate.measure.contender import Role
from tailrace.policy.learned import checkpoint

#: Three shipped scenarios: few requests, known capacity, two sizes.
SCENARIOS = ("uniform-chat-80", "scale-2", "scale-8")
REQUESTS = 240


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A results folder with a trained policy under test; not to be changed."""
    folder = tmp_path_factory.mktemp("evaluation")
    policy = folder / "mine.tailrace"
    config = small("memory")
    checkpoint.save(policy, config, random_tensors(config, 4))
    worlds = tuple(load_scenarios(SCENARIOS, REQUESTS))
    names = ("least_outstanding", "lmetric", "round_robin", "lookahead")
    tested = contender(str(policy), worlds[0], Role.SUBJECT)
    plan = EvaluationPlan(
        "custom",
        worlds,
        (tested, *(contender(name, worlds[0]) for name in names)),
        tested.label,
        ranking_seeds(3),
        selection_seeds(1),
    )
    found = evaluate(plan, folder / "cells", jobs=1)
    results.write(found, folder)
    return folder


@pytest.fixture(scope="session")
def loaded(made):
    return load(made)


@pytest.fixture
def changed(loaded):
    """Returns the results with other data: changed(subject=..., suite=...)."""

    def changed(subject=None, **data):
        other = loaded.data.model_copy(update=data)
        return dataclasses.replace(loaded, data=other, subject=subject or loaded.subject)

    return changed


@pytest.fixture(scope="session")
def played(loaded):
    """What a report plays again, with few loads and decisions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "LOADS", (0.5, 1.0))
        patch.setattr(replays, "LOOKS", 60)
        return replays.play(loaded, replays.tasks_of(loaded), jobs=1)
