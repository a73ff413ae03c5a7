"""What a plain router learns of two real servers predicts the latencies of another load."""

import json
import subprocess
import sys

import pytest

from .processes import ROOT

pytestmark = pytest.mark.vllm
#: The largest error of a mean latency.
WITHIN = 0.15


@pytest.fixture(scope="module")
def found(servers):
    backends = [word for server in servers for word in ("-b", server.url)]
    script = str(ROOT / "benchmarks" / "learned_servers.py")
    ran = subprocess.run(
        [sys.executable, script, *backends, "--shrink", "6", "--rate", "2", "--requests", "40",
         "--rounds", "4", "--json"],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("latency", ["TTFT", "E2E"])
def test_mean_latencies_are_predicted(found, latency):
    """Needs a machine that is otherwise idle: other work slows the servers down."""
    assert abs(found[latency]["mean_error"]) < WITHIN, json.dumps(found, indent=1)


def test_nothing_was_told_and_both_servers_are_understood(found):
    for known in found["known"]:
        assert known["source"] != "given"
        assert not known["unexplained"], json.dumps(found, indent=1)
