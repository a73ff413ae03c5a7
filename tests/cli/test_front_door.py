"""What stopped a new user once: names, help pages and options that did not hold together."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tailrace.cli import COMMANDS, GROUPS, cli


def test_commands_stand_in_groups(run):
    said = run("--help").stdout
    headings = [line[:-1] for line in said.splitlines() if line.endswith(":")]
    assert headings[-len(GROUPS) :] == list(GROUPS)


@pytest.mark.parametrize("name", COMMANDS)
def test_o_is_out_everywhere(name):
    command = cli.get_command(None, name)
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for one in commands:
        for param in one.params:
            if "-o" in param.opts:
                assert "--out" in param.opts, one.name


def test_help_shows_first_what_a_newcomer_needs(run):
    """The rest, with what only a comparison with Vidur needs, is one option away."""
    first, everything = run("simulate", "--help").stdout, run("simulate", "--help-all").stdout
    for name in ("--scenario", "--workload", "--requests", "--rate", "--policy", "--replicas"):
        assert name in first
    assert "--help-all" in first
    assert len(first.splitlines()) < 50
    for name in ("--watermark", "--vidur-compat", "--staleness-s", "--chunk-size"):
        assert name not in first
        assert name in everything
    for param in cli.get_command(None, "simulate").params:
        assert param.opts[0] in everything


@pytest.mark.parametrize("command", ["emulate", "assess", "calibrate"])
def test_what_only_vidur_needs_is_one_option_away(run, command):
    assert "--watermark" not in run(command, "--help").stdout
    assert "--watermark" in run(command, "--help-all").stdout


@pytest.mark.parametrize("arguments", [["--help"], ["workload", "--help"]])
def test_every_command_is_described_in_one_whole_line(arguments):
    """Click cuts what is too long for a terminal of 80 columns, and ends it in dots."""
    text = CliRunner().invoke(cli, arguments, terminal_width=78).stdout
    assert "..." not in text.replace("[ARGS]...", "")


def test_pages_and_help_agree_on_how_long_the_preset_full_takes(run):
    root = Path(__file__).parents[2]
    texts = [
        " ".join(run("train", "--help").stdout.split()),
        (root / "src/tailrace/presets/full.toml").read_text().replace("\n# ", " "),
        (root / "docs/training.md").read_text(),
        (root / "docs/model-card.md").read_text(),
    ]
    for text in texts:
        assert "about 20 minutes" in text.lower(), text[:80]


def test_import_names_the_log_of_serve(run):
    assert "decisions" in run("workload", "import", "--help").stdout


def test_a_part_of_a_name_is_enough_for_a_device(run_json):
    assert run_json("devices", "h100") == run_json("devices", "h100-llama2-7b")


@pytest.mark.compiled
def test_targets_given_hold_for_a_file_without_any(run, run_json, tmp_path):
    (tmp_path / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{k:02d}.0,100,10\n" for k in range(40))
    )
    run("workload", "import", "trace.csv", "--out", "trace.parquet")
    simulate = ("simulate", "--workload", "trace.parquet", "--requests", "40")
    strict = run_json(*simulate, "--ttft-slo-s", "0.0001")["summary"]
    loose = run_json(*simulate, "--ttft-slo-s", "1000")["summary"]
    assert strict["slo_attainment"] == 0.0
    assert loose["slo_attainment"] == 1.0


@pytest.mark.compiled
def test_a_check_of_serve_says_what_it_found_and_nothing_else():
    command = (sys.executable, "-m", "tailrace.cli", "serve", "--check", "-b", "http://127.0.0.1:9")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "0 of 1 backends answer\n"
    said = [line for line in done.stderr.splitlines() if not line.startswith("compiling, once")]
    assert [line[:33] for line in said] == ["warning: backend http://127.0.0.1"]
