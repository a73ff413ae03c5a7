import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from tailrace import __version__
from tailrace.cli import COMMANDS, cli
from tailrace.policy import registry, shipped
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.view import devices
from tailrace.workload import library


def test_help_names_every_command_and_loads_no_compiler():
    code = "import sys; from tailrace.cli import main; sys.argv = ['tailrace', '--help']\n"
    code += "try: main()\nfinally: print({'numba', 'numpy', 'pyarrow', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


def pages() -> Iterator[str]:
    """Every command, and the commands below a command."""
    for name in COMMANDS:
        yield name
        command = cli.get_command(click.Context(cli), name)
        if isinstance(command, click.Group):
            yield from (f"{name} {below}" for below in command.commands)


@pytest.mark.parametrize("name", list(pages()))
def test_every_command_has_help(run, name):
    page = run(*name.split(), "--help").stdout
    assert page.startswith(f"Usage: tailrace {name} ")
    assert " RANGE" not in page
    assert "9223372036854775807" not in page


def test_python_m_works_too():
    done = subprocess.run(
        [sys.executable, "-m", "tailrace.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"tailrace {__version__}\n"


def test_version(run, run_json):
    assert run("version").stdout.startswith(f"tailrace {__version__}\npython 3.")
    assert {"tailrace", "numba", "numpy"} <= set(run_json("version"))


def test_policies(run, run_json):
    text = run("policies").stdout
    for rule in registry.rules():
        assert f"\n{rule.name} " in text
    assert {p["name"] for p in run_json("policies")} >= {r.name for r in registry.rules()}
    assert "load_weight" in run("policies", "load_aware").stdout
    assert run_json("policies", "load_aware")["source"]


def test_the_trained_policies_come_first(run, run_json):
    lines = run("policies").stdout.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "][1:4] == list(shipped.TRAINED)
    assert [p["name"] for p in run_json("policies")][:3] == list(shipped.TRAINED)
    for name in shipped.TRAINED:
        assert "weights" in run("policies", name).stdout
        assert run_json("policies", name)["about"]["network"]


def test_features_are_named_by_their_columns(run, run_json):
    rows = run_json("features")
    for key, features in (("replicas", REPLICA_FEATURES), ("request", REQUEST_FEATURES)):
        shown = [row for row in rows if row["in"] == key]
        assert [row["column"] for row in shown] == list(range(len(features)))
        for row, feature in zip(shown, features, strict=True):
            named = (row["name"], row["unit"], row["scaling"], row["source"])
            assert named == (feature.name, feature.unit, feature.scaling, feature.source)
    text = run("features").stdout
    for row in rows:
        assert f"\n{row['name']} " in text
    one = run_json("features", "oldest_wait")
    assert one["scaling"] == "log1p(x/0.1)"
    assert one in rows
    assert "waiting time of the oldest queued request" in run("features", "oldest_wait").stdout


def test_devices(run, run_json):
    text = run("devices").stdout
    for name in devices.names():
        assert f"\n{name} " in text
    assert "(derived)" in run("devices", "a40-llama2-7b").stdout
    assert run_json("devices", "a40-llama2-7b")["cost"]["base_ms"] == 24.3
    assert len(run_json("devices")) == len(devices.names())


def test_scenarios(run, run_json):
    assert "\ndemo " in run("scenarios").stdout
    assert run("scenarios", "demo").stdout.startswith("description = ")
    assert run_json("scenarios", "demo")["cluster"]["replicas"]
    assert len(run_json("scenarios")) > 10


def test_workload_list_and_describe(run, run_json):
    text = run("workload", "list").stdout
    for name in library.names():
        assert f"\n{name} " in text
    assert "40 % chat" in run("workload", "describe", "mixed").stdout
    assert sum(p["share"] for p in run_json("workload", "describe", "mixed")["parts"]) == (
        pytest.approx(1.0)
    )
    assert [w["name"] for w in run_json("workload", "list")] == library.names()


def test_workload_statistics(run, run_json):
    text = run("workload", "stats", "sessions-hot", "--requests", 300).stdout
    assert "300 in " in text
    assert "think time" in text
    found = run_json("workload", "stats", "chat", "--requests", 200, "--rate", 50, "--seed", 3)
    assert found["requests"] == 200
    assert found["rate_rps"] == pytest.approx(50, rel=0.3)


def test_workload_write_then_read_back(run, run_json):
    assert run("workload", "write", "agents", "--requests", 80, "--out", "a.parquet").stdout == (
        "80 requests written to a.parquet\n"
    )
    assert run_json("workload", "stats", "a.parquet")["requests"] == 80


def test_workload_import(run, run_json):
    Path("azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    text = run("workload", "import", "azure.csv", "--out", "mine.csv").stdout
    assert text == "2 requests written to mine.csv (read as azure)\n"
    assert run_json("workload", "stats", "mine.csv")["prompt_tokens"]["mean"] == 385.0
    Path("vidur.csv").write_text("num_prefill_tokens,num_decode_tokens\n10,20\n")
    text = run("workload", "import", "vidur.csv", "--format", "vidur", "--out", "v.csv").stdout
    assert "no arrival times" in text
    for out in ("v.csv", "v.parquet"):
        run("workload", "import", "vidur.csv", "--out", out)
        assert "no arrival times to replay" in run("workload", "stats", out, code=2).stderr
        args = ("workload", "stats", out, "--arrivals", "poisson")
        assert run_json(*args)["prompt_tokens"]["mean"] == 10.0
    found = run_json("workload", "import", "azure.csv", "--out", "mine.parquet")
    assert (found["requests"], found["format"], found["skipped"]) == (2, "azure", 0)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(run, shell):
    text = run("completion", shell).stdout
    assert text.startswith("# To install, ")
    assert "_TAILRACE_COMPLETE" in text


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        (["simulate", "--policy"], "load_", ["load_aware"]),
        (["compare", "-p"], "round", ["round_robin"]),
        (["simulate", "--workload"], "sess", ["sessions-hot"]),
        (["simulate", "--scenario"], "dem", ["demo"]),
        (["simulate", "--device"], "a40", ["a40-llama2-7b"]),
        (["simulate", "--scheduler"], "sar", ["sarathi"]),
        (["workload", "describe"], "doc", ["doc-qa"]),
        ([], "sim", ["simulate"]),
    ],
)
def test_completion_of_names(words, incomplete, expected):
    complete = ShellComplete(cli, {}, "tailrace", "_TAILRACE_COMPLETE")
    assert [c.value for c in complete.get_completions(words, incomplete)] == expected


def test_a_reader_that_leaves_early_is_no_failure():
    done = subprocess.run(
        f"{sys.executable} -m tailrace.cli scenarios --json | head -n 1",
        shell=True, capture_output=True, text=True, check=True, env=os.environ,
    )  # fmt: skip
    assert done.stdout == "[\n"
    assert done.stderr == ""
