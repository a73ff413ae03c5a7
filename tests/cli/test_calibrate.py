"""tailrace calibrate."""

import asyncio
import threading

import pytest

from replay.logged import write_log
from tailrace import scenario as scenarios
from tailrace.config import Cluster, Replica, Workload
from tailrace.emulate.emulator import Emulator
from tailrace.workload.library import from_settings

pytest.importorskip("httptools")
pytestmark = pytest.mark.compiled


@pytest.fixture
def log(tmp_path):
    settings = Workload(name="chat", requests=150, rate=3, load=None)
    folder = tmp_path / "decisions"
    write_log(folder, Cluster(replicas=(Replica(count=2),)), from_settings(settings, 3, 5))
    return folder


@pytest.fixture
def urls():
    """Emulated servers in a thread, fifty times as fast as real ones."""
    cluster = Cluster(replicas=(Replica(count=2, num_blocks=3000),))
    addresses, ready, over = [], threading.Event(), threading.Event()

    async def serve():
        async with Emulator(cluster, time_scale=0.02) as emulator:
            addresses.extend(emulator.urls)
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield addresses
    over.set()
    thread.join()


def test_a_log_becomes_a_cluster_that_other_commands_take(run, run_json, log):
    known = ("--chunk-size", 512, "--num-blocks", 30208)
    text = run("calibrate", "--log", log, "--same", *known, "-o", "c.toml", "--plot", "p.png")
    assert "2 equal replicas" in text.stdout
    assert "written to c.toml" in text.stdout
    (kind,) = scenarios.load("c.toml").cluster.replicas
    assert (kind.count, kind.chunk_size, kind.num_blocks) == (2, 512, 30208)
    assert kind.cost.base_ms == pytest.approx(10.3, rel=0.05)
    quick = ("--requests", 60, "--rate", 5)
    done = run_json("simulate", "--config", "c.toml", *quick)
    assert done["scenario"]["cluster"]["replicas"][0]["device"] == "calibrated"
    asked = ("plan", "--config", "c.toml", *quick, "-p", "lmetric", "--seeds", 1, "-j", 1)
    assert run_json(*asked)["kinds"] == ["calibrated"]
    run("emulate", "--cluster", "c.toml", "--duration", 0, "--port", 0)


def test_json_names_sources_and_errors(run_json, log):
    data = run_json("calibrate", "--log", log, "--chunk-size", 512, "--same")
    (found,) = data["replicas"]
    assert found["sources"]["chunk_size"] == "given"
    assert found["sources"]["num_blocks"] == "assumed"
    assert {r["name"] for r in found["regimes"]} >= {"first token, prompt > 512"}


def test_live_servers(run, urls):
    done = run("calibrate", *urls, "--budget", 1, "-o", "c.toml", "-q")
    assert "/metrics" in done.stdout
    cluster = scenarios.load("c.toml").cluster
    assert [r.num_blocks for r in cluster.replicas] == [3000, 3000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the addresses of live servers, or --log"),
        (("http://127.0.0.1:9", "--log", "x"), "give the addresses of live servers, or --log"),
        (("http://127.0.0.1:9",), "is it running?"),
        (("http://127.0.0.1:9", "-o", "c.yaml"), "must end in .toml"),
        (("http://127.0.0.1:9", "--plot", "c.bmp"), ".png or .svg or .pdf"),
        (("--log", "missing"), "cannot read missing"),
        (("--mlp", "mlp.csv"), "profiles need --mlp, --attention and --layers"),
    ],
)
def test_mistakes(refuse, arguments, message):
    assert message in refuse("calibrate", *arguments)
