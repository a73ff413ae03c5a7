import dataclasses

import pytest

from policy.networks import random_tensors, small
from tailrace.evaluate.judge import results
from tailrace.evaluate.judge.baselines import contender
from tailrace.evaluate.judge.suite import (
    Plan,
    evaluate,
    load_scenarios,
    ranking_seeds,
    selection_seeds,
)
from tailrace.evaluate.measure.contender import Role
from tailrace.policy.learned import checkpoint
from tailrace.report.source import load

#: Three shipped scenarios: few requests, known capacity, two sizes.
SCENARIOS = ("uniform-chat-80", "scale-2", "scale-8")
REQUESTS = 240


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A results folder with a trained policy under test; not to be changed."""
    folder = tmp_path_factory.mktemp("evaluation")
    policy = folder / "mine.tailrace"
    config = small("memory")
    checkpoint.save(policy, config, random_tensors(config))
    worlds = tuple(load_scenarios(SCENARIOS, REQUESTS))
    names = ("least_outstanding", "lmetric", "round_robin", "lookahead")
    tested = contender(str(policy), worlds[0], Role.SUBJECT)
    plan = Plan(
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
