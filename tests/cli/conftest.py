import json

import pytest
from click.testing import CliRunner

from tailrace.cli import cli

#: A run that takes a moment: few requests, a given rate, so that no capacity is measured.
QUICK = ("--requests", "60", "--rate", "20")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in an empty folder; returns click's result."""
    monkeypatch.chdir(tmp_path)
    # Where nothing is compiled yet, its progress would be among what tests look at.
    monkeypatch.setattr("tailrace.cli.console.PATIENCE_S", float("inf"))

    def run(*args, code=0):
        result = CliRunner().invoke(cli, [str(a) for a in args], prog_name="tailrace")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def run_json(run):
    """Run a command with --json; returns what it printed, which must be JSON without NaN."""

    def run_json(*args):
        result = run(*args, "--json")
        return json.loads(result.stdout, parse_constant=pytest.fail)

    return run_json


@pytest.fixture
def refuse(run, tmp_path):
    """Run a command that must fail in one sentence and write nothing; returns the sentence."""

    def files():
        """All but what Python keeps of modules, such as a policy file."""
        return sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts)

    def refuse(*args):
        before = files()
        result = run(*args, code=2)
        assert files() == before
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return refuse
