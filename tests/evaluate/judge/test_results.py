"""results.json: what is written, what is read, and files of earlier versions."""

import json
from pathlib import Path

import numpy as np
import pytest

from results import make_result
from tailrace import __version__
from tailrace.config import Scenario, Workload
from tailrace.evaluate.judge import results
from tailrace.evaluate.judge.baselines import contender
from tailrace.evaluate.judge.suite import EvaluationPlan, evaluate, ranking_seeds, selection_seeds
from tailrace.evaluate.measure.cells import source_digest

#: Written by 0.1.0 for the evaluation of :func:`found`; its digest of sources is "SOURCES".
RECORDED = Path(__file__).parent / "data" / "results_0_1_0.json"
PUBLISHED = Path(__file__).parents[3] / "docs" / "results"
POLICIES = ("lmetric", "least_outstanding", "round_robin", "lookahead")


def player(traffic, spec):
    """Times that depend on nothing but arithmetic; round_robin loses all of one scenario."""
    count = traffic.scenario.workload.requests
    k = np.arange(count)
    arrived = k / 8
    wait = 0.1 + ((7 * k + 3 * len(spec) + traffic.seed) % 11) / 16
    answering = 0.5 + ((5 * k + len(spec)) % 13) / 4
    if traffic.scenario.name == "lossy" and spec == "round_robin":
        nothing = np.full(count, np.nan)
        return make_result(arrived, nothing, nothing, status=0, replica=-1)
    return make_result(arrived, arrived + wait, arrived + wait + answering, replica=k % 2)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    worlds = tuple(
        Scenario(name=name, workload=Workload(name="chat", requests=requests, rate=30.0))
        for name, requests in (("small", 40), ("lossy", 60))
    )
    plan = EvaluationPlan(
        "custom",
        worlds,
        tuple(contender(name, worlds[0]) for name in POLICIES),
        "lmetric",
        ranking_seeds(3),
        selection_seeds(2),
    )
    return evaluate(plan, tmp_path_factory.mktemp("cells"), jobs=1, player=player)


def test_the_bytes_are_those_of_earlier_versions(found):
    new = results.results_of(found)
    policies = (policy.model_copy(update={"other_weightings": {}}) for policy in new.policies)
    without = new.model_copy(update={"policies": tuple(policies)})
    text = results.as_text(without).replace(source_digest(), "SOURCES")
    text = text.replace(f'"tailrace": "{__version__}"', '"tailrace": "0.1.0"')
    assert text == RECORDED.read_text(encoding="utf-8")


def test_what_is_written_is_read_back(found, tmp_path):
    results.write(found, tmp_path)
    read = results.read(tmp_path / results.JSON)
    assert results.as_text(read) == results.as_text(results.results_of(found))
    lossy = read.vs_best_per_scenario.scenarios["lossy"]
    assert lossy.policy != "round_robin"
    (lost,) = (c for c in read.cells if (c.scenario, c.policy) == ("lossy", "round_robin"))
    assert (lost.finished, lost.ttft_s_p99, lost.queue_grows) == (0, None, True)
    assert next(p for p in read.policies if p.policy == "round_robin").vs_best_single.cost > 1


@pytest.mark.parametrize("name", ["standard", "holdout", "quick"])
def test_published_results_are_read_and_written_alike(name):
    path = PUBLISHED / f"{name}.json"
    assert results.as_text(results.read(path)) + "\n" == path.read_text(encoding="utf-8")


def test_files_with_more_and_with_fewer_keys_are_read(tmp_path):
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    data["some_new_key"] = 1
    for name in ("scenarios", "cells", "vs_best_single", "vs_best_hand_made"):
        del data[name]
    path = tmp_path / results.JSON
    path.write_text(json.dumps(data))
    assert results.read(path).scenarios == {}
