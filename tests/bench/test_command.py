"""The command, against emulated servers in a thread of their own."""

import asyncio
import json
import threading

import pyarrow.parquet
import pytest
from click.testing import CliRunner

from tailrace.cli.bench import command
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.errors import TailraceError
from tailrace.workload import library, traces


@pytest.fixture
def url():
    """Address of an emulated server."""
    started, found = threading.Event(), []

    async def serve():
        stop = asyncio.Event()
        async with Emulator(Cluster(replicas=(Replica(),)), time_scale=0.01) as emulator:
            found.extend((emulator.urls[0], asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    address, loop, stop = found
    yield address
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


def run(*args):
    return CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)


def test_json_and_file(url, tmp_path):
    out = tmp_path / "r.parquet"
    result = run(
        "--url", url, "--workload", "rag", "--rate", 50, "--requests", 20, "--stretch", 0.01,
        "--json", "-o", out,
    )  # fmt: skip
    got = json.loads(result.stdout)
    assert got["summary"]["finished"] == 20
    assert got["rate_rps"] == 50
    assert got["prompt_lengths_by"] == "/tokenize"
    assert len(pyarrow.parquet.read_table(out)) == 20


def test_table_of_a_request_file(url, tmp_path):
    path = tmp_path / "own.parquet"
    traces.write(library.make("chat-oneshot", 15, 5.0, 1), path)
    result = run("--url", url, "--workload", path, "--stretch", 0.01)
    assert "15 of 15 finished" in result.stdout
    assert "generator late by" in result.stdout
    assert "failures" not in result.stdout


def test_scenario_gives_traffic_and_rate(url):
    result = run(
        "--url", url, "--scenario", "demo", "--requests", 10, "--stretch", 0.01, "--json"
    )  # fmt: skip
    got = json.loads(result.stdout)
    assert got["rate_rps"] == pytest.approx(0.85 * 39.5895)
    assert got["workload"]["name"] == "sessions-hot"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--load", "0.5"), "--scenario"),
        (("--header", "nothing"), "NAME:VALUE"),
        (("-o", "requests.txt"), ".parquet"),
        (("--workload", "unheard-of"), "unknown workload"),
        (("--scenario", "unheard-of"), "unknown scenario"),
    ],
)
def test_mistakes_are_told(args, says):
    with pytest.raises(TailraceError, match=says):
        run("--url", "http://127.0.0.1:9", *args)


def test_a_key_in_the_environment_is_sent_and_not_shown(monkeypatch):
    from tailrace.cli.bench import headers_of

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert headers_of(("X-A: b",)) == {"authorization": "Bearer secret", "x-a": "b"}
