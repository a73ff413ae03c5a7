"""What is left of the Vidur part where vidur is not installed."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from tailrace import scenario as scenarios
from tailrace.cli import cli
from tailrace.config import Cluster, Replica
from tailrace.errors import TailraceError
from tailrace.integrations import vidur
from tailrace.integrations.vidur.limits import nearest, replicas_for_vidur


def test_tailrace_imports_no_vidur_before_it_is_needed():
    code = (
        "import sys, tailrace.integrations.vidur.compare, tailrace.integrations.vidur.router\n"
        "import tailrace.integrations.vidur.demonstrations, tailrace.cli.compare, tailrace.env\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'vidur']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--engine", "vidur"],
        ["compare", "--vidur-args", "--cluster_config_num_replicas 2"],
        ["train", "--vidur-args", "--cluster_config_num_replicas 2"],
        ["train", "--env", "vidur", "--scenario", "demo"],
    ],
)
def test_without_vidur_the_command_says_how_to_get_it(monkeypatch, tmp_path, arguments):
    monkeypatch.setattr(vidur, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert result.stderr.endswith("error: vidur is not installed: pip install 'tailrace[vidur]'\n")
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_without_vidur_the_environment_says_how_to_get_it(monkeypatch):
    gymnasium = pytest.importorskip("gymnasium")
    import tailrace.env  # noqa: F401

    monkeypatch.setattr(vidur, "find_spec", lambda _: None)
    with pytest.raises(TailraceError, match=r"not installed: pip install 'tailrace\[vidur\]'"):
        gymnasium.make("tailrace/VidurRouter-v0")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["compare", "--vidur-args", "--seed 1", "--engine", "reference"], "--engine vidur"),
        (["compare", "--vidur-args", "--seed '1"], "cannot read --vidur-args"),
        (["compare", "--vidur-args", " "], "--vidur-args is empty"),
        (["compare", "--vidur-import", "mine"], "goes with --vidur-args"),
        (["train", "--vidur-args", "--seed 1", "--env", "sim"], "with --env vidur"),
        (["train", "--vidur-args", "--seed 1", "--resume", "run"], "takes no other settings"),
    ],
)
def test_arguments_that_do_not_fit_together(arguments, complaint):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_sim_as_engine_is_the_default_engine():
    common = ["compare", "--requests", "40", "--rate", "20", "--seeds", "1", "-j", "1", "--json"]
    runs = [CliRunner().invoke(cli, [*common, "-p", "random", *more]) for more in
            ([], ["--engine", "sim"])]  # fmt: skip
    assert runs[0].exit_code == 0
    assert runs[0].stdout == runs[1].stdout


def test_what_vidur_has_not_is_replaced_and_said():
    scenario, notes = nearest(scenarios.load("uniform-chat-80"))
    assert {r.scheduler for r in scenario.cluster.expanded()} == {"sarathi"}
    assert scenario.capacity_rps is None  # it was measured with another scheduler
    assert "the replicas run sarathi" in notes[0]
    assert nearest(scenario) == (scenario, [])


@pytest.mark.parametrize(
    ("replicas", "complaint"),
    [
        ((Replica(scheduler="lightllm", block_size=1),), "no replica scheduler lightllm"),
        ((Replica(scheduler="sarathi", num_stages=2),), "one pipeline stage"),
        (
            (Replica(scheduler="sarathi"), Replica(scheduler="sarathi", chunk_size=256)),
            "same chunk_size, but replica 1 has 256 and replica 0 512",
        ),
        (
            (
                Replica(scheduler="sarathi"),
                Replica(scheduler="sarathi", device="a40-llama2-7b"),
            ),
            "same num_blocks",
        ),
    ],
)
def test_clusters_that_vidur_cannot_play(replicas, complaint):
    with pytest.raises(TailraceError, match=complaint):
        replicas_for_vidur(Cluster(replicas=replicas))


def test_replicas_may_differ_in_speed():
    kinds = (Replica(scheduler="sarathi", speed=2.0), Replica(scheduler="sarathi", count=2))
    assert [r.speed for r in replicas_for_vidur(Cluster(replicas=kinds))] == [2.0, 1.0, 1.0]


def test_failures_are_refused():
    with pytest.raises(TailraceError, match="no failures"):
        nearest(scenarios.load("replica-failure"))
