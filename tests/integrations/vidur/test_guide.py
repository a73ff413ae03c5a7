"""The examples of docs/vidur.md and from-vidur.md run, and what the pages claim is true."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tailrace.cli import cli

pytestmark = pytest.mark.vidur

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "vidur.md").read_text(encoding="utf-8")
FROM_VIDUR = (DOCS / "from-vidur.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    one_call, demonstrations, steps, environment = EXAMPLES
    exec(one_call, names)
    router = names["simulator"].scheduler.router
    assert router.view.router["finished"] == 200
    exec(demonstrations, names)
    samples = names["samples"]
    assert len(samples) == 200
    # The choice costs nothing, every other one 1.
    assert (np.sort(samples.costs, axis=1) == [0, 1, 1, 1]).all()
    with np.load("seen.npz", allow_pickle=False) as file:
        assert "replica_obs" in file
    exec(steps, names)
    assert names["done"]
    assert np.isfinite(names["world"].result().requests["finished_s"]).all()
    exec(environment, names)
    assert names["env"].action_space.n == 4
    assert names["reward"] <= 0


def test_the_adapted_scenario_is_as_the_page_says():
    from tailrace.cli.train import VIDUR_REQUESTS, VIDUR_WORLDS
    from tailrace.integrations.vidur.setup import ADAPTED_REQUESTS

    assert f"{VIDUR_WORLDS} x {VIDUR_REQUESTS} requests" in TEXT
    assert f"{ADAPTED_REQUESTS:,} requests".replace(",", " ") in TEXT


def test_the_command_of_from_vidur_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```\ntailrace (.*?)\n```", FROM_VIDUR, re.DOTALL)
    words = shlex.split(example.replace("\\\n", " "))
    place = words.index("--vidur-args") + 1
    words[place] += " --execution_time_predictor_config_type tailrace"
    words += ["--requests", "40", "--seeds", "1", "-j", "1"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    for policy in ("random", "round_robin", "least_outstanding", "tailrace"):
        assert policy in result.stdout


def test_without_profiling_data_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prefix = "random_forrest_execution_time_predictor_config_"
    arguments = (
        "--replica_config_num_pipeline_stages 1 --execution_time_predictor_config_type "
        f"random_forrest --{prefix}model_profiling_dataset no/data --{prefix}no_cache"
    )
    words = ["compare", "--vidur-args", arguments, "-p", "random"]
    result = CliRunner().invoke(cli, [*words, "--requests", "40", "-j", "1"])
    assert result.exit_code == 2
    assert "Vidur cannot make its execution-time predictor" in result.stderr
    assert "--execution_time_predictor_config_type tailrace" in result.stderr
