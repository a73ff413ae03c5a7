"""tailrace assess."""

import html
import json
import re
import shlex
from pathlib import Path

import pytest

from replay.logged import write_log
from tailrace.cli.assess import _again
from tailrace.config import Cluster, Replica, Workload
from tailrace.workload.library import from_settings

pytestmark = pytest.mark.compiled
CLUSTER = Cluster(replicas=(Replica(speed=1.4), Replica(speed=0.6)))
FEW = ("-p", "tailrace", "-p", "load_aware", "-j", 1)


@pytest.fixture
def log(run, tmp_path):
    table = from_settings(Workload(name="sessions-hot", requests=240, rate=7, load=None), 7, 5)
    folder = tmp_path / "decisions"
    write_log(folder, CLUSTER, table, policy="round_robin")
    return folder


def test_a_log_becomes_a_paragraph_a_table_and_a_page(run, log):
    text = run("assess", "--log", log, *FEW).stdout
    assert "Your 2 servers answered 240 requests" in " ".join(text.split())
    assert "recorded: round_robin" in text
    assert "round_robin (now, replayed)" in text
    data = json.loads(Path("assessment/assessment.json").read_text())
    assert data["present"] == "round_robin"
    assert data["policies"][0]["policy"] == data["best"]
    assert data["replay_errors"]["held_out"] is True
    assert abs(data["replay_errors"]["e2e"]) < 0.1
    assert f"To switch: {data['switch']}\n" in text
    assert data["switch"].startswith("tailrace serve -b URL -b URL --cluster assessment/cluster")
    page = Path("assessment/assessment.html").read_text()
    assert "Tailrace assessment" in page
    assert " ".join(data["summary"].split()[:8]) in page
    # Nothing is fetched: the policy of the page forbids it, and nothing asks for it.
    assert "default-src 'none'" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", page)
    assert "url(" not in page.replace("url(data:", "")
    assert command_again(page) == [
        "tailrace", "assess", "--log", str(log), "-p", "tailrace", "-p", "load_aware",
        "-o", "assessment",
    ]  # fmt: skip
    # The cluster it wrote is one that other commands read.
    again = run("replay", log, "--cluster", "assessment/cluster.toml", "-p", "tailrace", "-j", 1)
    assert "recorded: round_robin" in again.stdout


def test_a_trace_needs_servers(run_json, refuse, run, log):
    run("workload", "import", log, "-o", "t.parquet")
    message = refuse("assess", "--log", "t.parquet", "--since", "24h", *FEW)
    assert "--since needs the times of a decision log" in message
    message = refuse("assess", "--log", "t.parquet", *FEW)
    assert "describe them with --cluster" in message
    Path("c.toml").write_text("[[cluster.replicas]]\ncount = 2\n")
    data = run_json("assess", "--log", "t.parquet", "--cluster", "c.toml", *FEW)
    assert data["recorded"] is data["replay_errors"] is None
    assert data["present"] == "least_outstanding"
    assert {p["policy"] for p in data["policies"]} == {
        "tailrace", "load_aware", "least_outstanding"
    }  # fmt: skip

    given = (
        "--log", "t.parquet", "--present", "round_robin", "-p", "tailrace", "--ttft-slo-s", "0.5",
        "--cluster", "c.toml", "--seed", "3", "-o", "b b",
    )  # fmt: skip
    run("assess", *given)
    assert command_again(Path("b b/assessment.html").read_text()) == ["tailrace", "assess", *given]


def test_the_command_to_make_the_page_again_knows_the_servers():
    """Also what was read from /metrics, which is not there later."""
    known = Replica(num_blocks=30_000, batch_cap=64, prefix_caching=False)
    settings = {"ttft_slo_s": None, "tpot_slo_s": 0.1, "same": True}
    words = _again(Path("d"), None, None, (), None, known, 0, Path("o"), settings)
    assert words == [
        "tailrace", "assess", "--log", "d", "--tpot-slo-s", "0.1", "--same", "--num-blocks",
        "30000", "--batch-cap", "64", "--no-prefix-caching", "-o", "o",
    ]  # fmt: skip


def command_again(page):
    """The words of the command under 'Makes this page again'."""
    found = re.search(r"Makes this page again.*?<code>(.*?)</code>", page, flags=re.DOTALL)
    return shlex.split(html.unescape(re.sub(r"<[^>]+>", "", found[1])))


def test_a_folder_that_cannot_be_made(refuse, log):
    """For a user who may not write where the command runs, too."""
    Path("file").write_text("")
    message = refuse("assess", "--log", log, "-o", "file/assessment", *FEW)
    assert message == "cannot make folder file/assessment: Not a directory"


def test_servers_that_do_not_answer(refuse):
    """Said at once, not after every request has waited for them."""
    dead = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert "none of the servers can be reached" in refuse("assess", *dead)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the addresses of your servers, or --log"),
        (("http://127.0.0.1:1", "--log", "x"), "give the addresses of your servers, or --log"),
        (("--log", "missing"), "cannot read missing"),
        (("10.0.0.1",), "is no address"),
        (("http://127.0.0.1:1", "http://127.0.0.1:1"), "given twice"),
        (("http://127.0.0.1:1", "--listen", "nowhere"), "nowhere"),
        (("http://127.0.0.1:1", "--present", "lode_aware"), "did you mean load_aware"),
        (("http://127.0.0.1:1", "--rate", "3"), "--rate is the pace of --send"),
        (("http://127.0.0.1:1", "--send", "chatt"), "did you mean chat"),
        (("--log", "x", "--send", "chat"), "--send needs the addresses"),
        (("http://127.0.0.1:1", "--since", "24h"), "--since chooses from a decision log"),
        (("--log", "x", "--since", "yesterday"), "--since must be a duration such as 24h"),
        (("--log", "x", "--since", "-5h"), "--since must be a duration such as 24h"),
        (("--log", "x", "--since", "0h"), "--since must be a duration such as 24h"),
        (("--log", ".", "--since", "24h"), "a folder without a decision log"),
    ],
)
def test_mistakes(refuse, arguments, message):
    assert message in refuse("assess", *arguments)
