"""`tailrace compare --engine vidur`."""

import json

import pytest
from click.testing import CliRunner

from tailrace.cli import cli
from tailrace.integrations.vidur.compare import DEFAULT_REQUESTS

pytestmark = pytest.mark.vidur

SMALL = ("--requests", "80", "--rate", "15", "--seeds", "2", "-j", "1")
TWO = ("-p", "tailrace", "-p", "round_robin")


def run(*args):
    result = CliRunner().invoke(cli, ["compare", *args])
    assert result.exit_code == 0, result.output
    return result


def test_the_table_is_that_of_the_simulator():
    options = (*SMALL, *TWO, "--scheduler", "sarathi", "--json")
    there = json.loads(run("--engine", "vidur", *options).stdout)
    here = json.loads(run(*options).stdout)
    for a, b in zip(there["entries"], here["entries"], strict=True):
        assert a["policy"] == b["policy"]
        assert a["mean"]["cost_s"] == pytest.approx(b["mean"]["cost_s"], rel=1e-9)
        assert a["mean"]["ttft_s"]["p99"] == pytest.approx(b["mean"]["ttft_s"]["p99"], rel=1e-9)
        assert a["versus_reference"]["low"] == pytest.approx(b["versus_reference"]["low"])
        assert a["mean"]["replica_share"] == b["mean"]["replica_share"]


def test_what_was_changed_is_said_on_standard_error():
    result = run("--engine", "vidur", *SMALL, *TWO)
    assert "the replicas run sarathi" in result.stderr
    first_words = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    assert {"tailrace", "round_robin"} < first_words


def test_few_requests_unless_more_are_asked_for():
    options = ("--rate", "25", "--seeds", "1", "-j", "1", "-p", "least_outstanding", "--json")
    result = run("--engine", "vidur", "--scenario", "uniform-chat-80", *options)
    found = json.loads(result.stdout)
    assert found["scenario"]["workload"]["requests"] == DEFAULT_REQUESTS
    assert f"{DEFAULT_REQUESTS} requests; --requests gives more" in result.stderr


def test_look_ahead_is_refused():
    result = CliRunner().invoke(cli, ["compare", "--engine", "vidur", "-p", "lookahead"])
    assert result.exit_code == 2
    assert result.stderr == "error: lookahead runs inside Tailrace's simulator, not in Vidur\n"
