"""The public interface: ``import tailrace as tr``."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace as tr
from learn.tiny import scenario_file
from tailrace import api

STATES = Path(tr.__file__).parents[2] / "examples" / "states"
#: A change here is a change for users: say so in the changelog.
SIGNATURES = {
    "compare": "scenario policies seeds requests reference warmup jobs",
    "evaluate": "scenario policies against seeds selection_seeds requests warmup folder jobs",
    "explain": "state policy",
    "load_policy": "policy params",
    "load_scenario": "scenario",
    "recorded": "traces folder half suite_name requests jobs",
    "simulate": "scenario policy seed requests warmup",
    "train": "preset folder seed scenarios settings jobs",
}


def test_the_names_are_stable():
    assert tr.__all__ == ["__version__", "Scenario", "TailraceError", *SIGNATURES]
    stub = (Path(tr.__file__).parent / "__init__.pyi").read_text(encoding="utf-8")
    for name, parameters in SIGNATURES.items():
        assert " ".join(inspect.signature(getattr(api, name)).parameters) == parameters
        assert f"import {name} as {name}\n" in stub
    assert (Path(tr.__file__).parent / "py.typed").is_file()


def test_importing_it_imports_nothing_heavy():
    code = "import sys, tailrace; print({'numba', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    with pytest.raises(AttributeError, match="no attribute 'simluate'"):
        tr.simluate  # noqa: B018


def test_simulate_compare_and_a_scenario_of_ones_own():
    scenario = tr.load_scenario("demo").with_workload(requests=40)
    assert isinstance(scenario, tr.Scenario)
    one = tr.simulate(scenario, "round_robin", seed=3)
    assert one.to_arrow().num_rows == one.summary.requests == 40
    found = tr.compare(scenario, ["round_robin", "lmetric"], seeds=2, jobs=1)
    table = found.to_arrow()
    assert table.num_rows == 6
    assert {"policy", "seed", "cost_s", "ttft_s_p99"} <= set(table.column_names)
    assert found.best == table["policy"][0].as_py()


def test_policies_and_decisions():
    assert tr.load_policy().name == "tailrace"
    assert tr.load_policy("cache_aware", match_rate=0.5).name == "cache_aware"
    with pytest.raises(tr.TailraceError, match="unknown policy"):
        tr.load_policy("lmetrik")
    found = tr.explain(STATES / "hot-prefix.toml")
    assert found.policy == "tailrace"
    assert found.options[found.chosen].probability > 0.5


def test_one_policy_needs_no_list_and_an_object_is_refused():
    """A string is a sequence of its letters: 'unknown policy t' would help nobody."""
    found = tr.compare("demo", "round_robin", seeds=1, requests=5, jobs=1)
    assert found.best in ("round_robin", "least_outstanding")
    message = "by its name or file, with parameters like cache_aware:match_rate=0.5, not as a Built"
    rule = tr.load_policy("cache_aware", match_rate=0.5)
    for wrong in (
        lambda: tr.simulate("demo", rule),
        lambda: tr.compare("demo", [rule]),
        lambda: tr.evaluate("demo", [rule]),
    ):
        with pytest.raises(tr.TailraceError, match=message):
            wrong()


def test_a_folder_may_be_a_string(tmp_path):
    found = tr.evaluate(
        "demo", "lmetric", against="round_robin", seeds=1, selection_seeds=1, requests=40,
        folder=str(tmp_path), jobs=1,
    )  # fmt: skip
    assert {"lmetric", "round_robin"} <= set(found.to_arrow()["policy"].to_pylist())
    assert (tmp_path / "cells").is_dir()


def test_a_frame_without_pandas_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(tr.TailraceError, match=r"to_frame\(\) needs pandas; to_arrow\(\) does not"):
        tr.simulate("demo", "round_robin", requests=5).to_frame()


def test_a_frame_has_the_rows_of_the_table():
    pandas = pytest.importorskip("pandas")
    run = tr.simulate("demo", "round_robin", requests=5)
    frame = run.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == run.to_arrow().column_names
    assert len(frame) == 5


#: A run that takes a moment.
TINY_TRAINING = {
    "updates": 1,
    "network": {"hidden": 8, "attention": 4, "scorer_hidden": 4, "value_hidden": 4},
    "demonstrations": {"rounds": 1, "worlds": 2, "decisions": 60, "warmup": 30, "epochs": 2},
    "branching": {
        "worlds": 2,
        "states": 4,
        "gap": 8,
        "warmup": 30,
        "epochs": 1,
        "minibatch": 16,
        "min_horizon_s": 1.0,
        "max_horizon_s": 2.0,
    },
    "evaluation": {"worlds": 1, "requests": 120, "baselines": ["least_outstanding"]},
}


@pytest.mark.compiled
def test_a_policy_is_trained(tmp_path, short_sketches):
    pytest.importorskip("torch")
    scenario = scenario_file(tmp_path)
    found = tr.train(
        folder=tmp_path / "run", seed=1, scenarios=[scenario], settings=TINY_TRAINING, jobs=1
    )
    assert found.best.is_file()
    assert found.score > 0.0
    assert found.to_arrow().num_rows > 0
    assert tr.load_policy(found.best).name
    with pytest.raises(tr.TailraceError):  # its folder holds a run now
        tr.train(folder=tmp_path / "run", jobs=1)
