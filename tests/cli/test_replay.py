"""tailrace replay."""

from pathlib import Path

import pytest

from replay.logged import write_log
from tailrace.config import Cluster, Replica, Workload
from tailrace.workload.library import from_settings

pytestmark = pytest.mark.compiled
TOML = "[[cluster.replicas]]\ncount = 2\n"


@pytest.fixture
def log(run, tmp_path):
    Path("c.toml").write_text(TOML)
    settings = Workload(name="chat", requests=200, rate=3, load=None)
    folder = tmp_path / "decisions"
    write_log(folder, Cluster(replicas=(Replica(count=2),)), from_settings(settings, 3, 5))
    return folder


def asked(traffic, *more):
    return ("replay", traffic, "--cluster", "c.toml", "-p", "round_robin", "-j", 1, *more)


def test_table(run, log):
    text = run(*asked(log, "--replicas", "1,2", "--plot", "p.svg")).stdout
    assert "against recorded" in text
    assert "recorded: least_outstanding" in text
    assert text.count("round_robin") == 2
    assert Path("p.svg").read_bytes().startswith(b"<?xml")


def test_json(run_json, log):
    data = run_json(*asked(log, "-p", "least_outstanding"))
    ttft, e2e = data["fidelity"]["latencies"]
    assert (ttft["name"], e2e["name"]) == ("TTFT", "E2E")
    assert abs(e2e["p99_error"]) < 0.01
    assert {o["policy"] for o in data["outcomes"]} == {"round_robin", "least_outstanding"}
    assert data["recorded"]["summary"]["requests"] == data["requests"] == 200


def test_a_table_has_no_fidelity(run, run_json, log):
    run("workload", "import", log, "-o", "t.parquet")
    data = run_json(*asked("t.parquet"))
    assert data["fidelity"] is data["recorded"] is None
    assert len(data["outcomes"]) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--replicas", "2,x"), "whole numbers with commas"),
        (("--replicas", "0"), "1 to 1024 replicas"),
        (("--overhead-ms", "1,2,3"), "one time in ms, or 2"),
        (("--overhead-ms", "much"), "one time in ms, or 2"),
        (("-p", "nobody"), "nobody"),
        (("--plot", "p.bmp"), ".png or .svg or .pdf"),
    ],
)
def test_mistakes(refuse, log, more, message):
    assert message in refuse(*asked(log, *more))


def test_mistakes_in_files(refuse, log):
    assert "cannot read missing" in refuse(*asked("missing"))
    Path("lengths.csv").write_text("prompt_tokens,output_tokens\n10,10\n")
    assert "no arrival times to replay; `tailrace workload import --session-gap" in refuse(
        *asked("lengths.csv")
    )
    Path("c.toml").write_text("[[cluster.replicas]]\ncount = 1\n")
    assert "names 2 replicas" in refuse(*asked(log))
