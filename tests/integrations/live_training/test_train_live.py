"""Learning from the requests of a live router, against emulated replicas."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

pytest.importorskip("torch")

from learn.tiny import SETTINGS, Noted
from policy.networks import random_tensors, small
from router.clusters import Clock, chat, new_chooser, new_cluster
from router.conftest import Client, run_with_process
from tailrace.bench.load import load
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.errors import TailraceError
from tailrace.integrations.live_training import process as live_process
from tailrace.integrations.live_training.process import LiveRecorder, OutcomeSink
from tailrace.integrations.live_training.rollout_source import LiveRollouts
from tailrace.integrations.live_training.router import POLICY, LiveRouter
from tailrace.learn import settings as s
from tailrace.learn.improve.recorder import Recording
from tailrace.learn.trainer import Trainer
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.router.decide.chooser import Chooser
from tailrace.router.intake.request_body import read_request
from tailrace.router.observe.telemetry import Telemetry
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.sim.result import FINISHED
from tailrace.workload import library
from tailrace.workload.table import RequestTable

pytestmark = pytest.mark.usefixtures("short_sketches")

SCALE = 0.05
DECISIONS, UPDATES = 104, 2
CONFIG = small()
SCENARIO = {
    "name": "three",
    "cluster": {"replicas": [{"count": 2, "num_blocks": 3000}, {"speed": 0.5, "num_blocks": 3000}]},
    "workload": {"name": "chat", "rate": 12.0},
}


def params_of(seed: int = 0) -> np.ndarray:
    return pack(CONFIG, random_tensors(CONFIG, seed))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def router_file(folder: Path, urls: list[str], port: int, admin: str = "off") -> Path:
    """Settings of a router that has time: this machine may be busy."""
    path = folder / "router.toml"
    backends = "".join(f'[[backends]]\nurl = "{url}"\n' for url in urls)
    path.write_text(
        f'listen = "127.0.0.1:{port}"\n'
        f'admin.listen = "{admin}"\n'
        'routing = {policy = "round_robin", limit_ms = 10000}\n'
        f"drain_s = 5\n{backends}"
    )
    return path


def short(requests: int, seed: int) -> RequestTable:
    """Requests with short answers, so that a load takes a moment."""
    table = library.make("chat", requests, 30.0, seed)
    table.rows["output_tokens"] = np.minimum(table.rows["output_tokens"], 12)
    return table


class Hold(Noted):
    """Keeps a run from ending while there is still traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt, self.go_on = threading.Event(), threading.Event()

    def step(self, step: int, steps: int, metrics: Any) -> None:
        super().step(step, steps, metrics)
        if step == steps:
            self.learnt.set()
            self.go_on.wait(600)


async def listens(port: int, training: "asyncio.Future[Any]") -> None:
    while not training.done():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    training.result()


async def backends(port: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(reader, writer)
    client.send(f"GET /backends HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    answer = await client.answer()
    writer.close()
    return orjson.loads(answer.body)


def test_200_ppo_steps_on_live_requests(tmp_path: Path) -> None:
    """The weights move, nothing is lost, and the router's counters are back at zero."""
    port, admin = free_port(), free_port()
    watcher = Hold()
    cluster = Cluster(replicas=(Replica(count=2), Replica(speed=0.5)))

    made: list[LiveRollouts] = []

    def source_of(network: Network, schedule: WorldSchedule, first_seed: int) -> LiveRollouts:
        made.append(LiveRollouts(network, schedule, first_seed))
        return made[-1]

    async def test() -> list[Any]:
        async with Emulator(cluster, time_scale=SCALE) as emulator:
            over = {
                "start": "tailrace", "env": "live", "advantage": "gae",
                "objective": "clipped", "updates": UPDATES,
                "serve": str(router_file(tmp_path, emulator.urls, port, f"127.0.0.1:{admin}")),
                "scenarios": [SCENARIO],
                "demonstrations": {"rounds": 0},
                "ppo": {"clusters": 1, "decisions": DECISIONS, "warmup": 0, "minibatch": 52},
                "exploration": {"epsilon_start": 0.1, "epsilon_end": 0.1},
            }  # fmt: skip
            settings = s.build(SETTINGS, over)
            trainer = Trainer(tmp_path / "run", settings, 1, watcher, {"live": source_of})
            training = asyncio.get_running_loop().run_in_executor(None, trainer.run)
            loads = []
            try:
                await listens(port, training)
                while not watcher.learnt.is_set() and not training.done():
                    table = short(40, len(loads))
                    url = f"http://127.0.0.1:{port}"
                    loads.append(await load(url, table, stretch=SCALE, timeout_s=300))
                for replica in await backends(admin):
                    assert replica["in_flight"] == replica["ledger_in_flight"] == 0
            finally:
                watcher.go_on.set()
                await training
            (source,) = made
            assert source.router is not None
            return [loads, source.router]

    loads, router = run_with_process(test())
    last = router.last
    assert sum(len(result.requests) for result in loads) > UPDATES * DECISIONS
    for result in loads:
        assert (result.requests["status"] == FINISHED).all()
        assert (result.requests["replica"] >= 0).all()  # the router said where it went
    assert sum(metrics["samples"] for metrics in watcher.metrics) == UPDATES * DECISIONS
    for metrics in watcher.metrics:
        assert metrics["behaviour_gap"] < 1e-4
        assert metrics["raw_reward"] < 0
        assert metrics["terms/lost"] == 0
        assert metrics["epsilon"] == 0.1
    assert (last["open"], last["hook_errors"], last["last_error"]) == (0, 0, "")
    status = last["router"]
    assert (status["policy"], status["in_flight"], status["waiting"]) == ("recorder", 0, 0)
    # Each load also asks /tokenize once.
    assert status["decisions"]["total"] == sum(len(result.requests) + 1 for result in loads)
    assert "error" not in status["fallbacks"]
    shipped = checkpoint.shipped().tensors
    trained = checkpoint.read(tmp_path / "run" / "last.tailrace")[1]
    assert (shipped["scorer.hidden.weight"] != trained["scorer.hidden.weight"]).any()
    assert all(np.isfinite(tensor).all() for tensor in trained.values())
    assert router._process.exitcode == 0


# ---- the process --------------------------------------------------------------------------------


def live(folder: Path, port: int) -> LiveRouter:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    recording = Recording(CONFIG, decisions=8, chunk=8)
    return LiveRouter(router_file(folder, urls, port), recording, params_of())


def test_the_router_outlives_no_learner_and_no_ctrl_c(tmp_path: Path) -> None:
    router = live(tmp_path, 0)
    assert router.address[1] > 0
    process = router._process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)  # as the terminal sends it to both
    router.use(params_of(1))
    router.close()
    assert router.last["open"] == 0
    assert process.exitcode == 0
    router.close()
    # A learner that is gone without a word.
    router = live(tmp_path, 0)
    router._connection.close()
    router._process.join(60)
    assert router._process.exitcode == 0


def test_a_router_that_cannot_start_or_ends_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TailraceError, match="something listens there already"):
            live(tmp_path, taken.getsockname()[1])
    router = live(tmp_path, 0)
    assert router._process.pid is not None  # 0 would be this whole group of processes
    threading.Timer(0.2, os.kill, (router._process.pid, signal.SIGTERM)).start()
    with pytest.raises(TailraceError, match=r"the live router (was stopped|has died)"):
        router.roll_out(params_of(), 1.0, 0.0)
    router.close()
    assert not router._process.is_alive()


# ---- the recorder in the router -----------------------------------------------------------------


@pytest.fixture
def recorder() -> Iterator[LiveRecorder]:
    recording = Recording(CONFIG, decisions=8, chunk=8, seed=3)
    made = live_process.RECORDER = LiveRecorder(recording, params_of(), patience_s=10.0)
    yield made
    live_process.RECORDER = None


def asked(cluster: ClusterState, chooser: Chooser, text: str = "x", **fields: object) -> Attempt:
    """Let a request come, be decided and be sent."""
    arrival = cluster.arrive(chat(text, **fields))
    decision = chooser.choose(arrival)
    assert decision is not None
    return Attempt(cluster, arrival, decision.replica, decision)


def over(recorder: LiveRecorder, attempt: Attempt, outcome: str) -> None:
    attempt.close(outcome)
    OutcomeSink(Telemetry(), recorder).request_done(attempt, 200, outcome, "chat")


def cost_s(recorder: LiveRecorder, now: float) -> dict[str, float]:
    terms = recorder._ledger.accrued(now)
    return {"e2e": terms[0], "ttft": terms[1], "late": terms[2], "lost": terms[3]}


def test_what_the_guard_overrules_is_not_learnt_from(recorder: LiveRecorder) -> None:
    """One replica has a long queue: the guard never lets a request go there."""
    clock = Clock()
    cluster = new_cluster(2, clock)
    chooser = new_chooser(cluster, POLICY, guard_ratio=1.0, guard_s=0.5)
    assert chooser.policy is recorder
    busy = [Attempt(cluster, cluster.arrive(chat("long " * 4000)), 0, _to(0)) for _ in range(8)]
    recorder.record(temperature=50.0, epsilon=0.5)
    found: list[Any] = []
    recorder._done = found.append
    overruled = 0
    while not found:
        clock.now += 0.01
        attempt = asked(cluster, chooser)
        overruled += attempt.decision.fell_back == "guard" and not found
        assert attempt.replica == 1
        attempt.tokens(1)
        over(recorder, attempt, "done")
    assert overruled > 0
    assert (found[0].action == 1).all()
    assert found[0].metrics["overruled"] == pytest.approx(overruled / (overruled + 8))
    # The time of what was overruled is not lost: it belongs to the decision before.
    assert found[0].elapsed_s.sum() > 8 * 0.01 - 1e-9
    for attempt in busy:
        over(recorder, attempt, "done")
    assert len(recorder) == 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_requests_that_cost_no_gpu_time_are_not_learnt_from(
    recorder: LiveRecorder, path: str
) -> None:
    clock = Clock()
    cluster = new_cluster(2, clock)
    chooser = new_chooser(cluster, POLICY)
    recorder.record(temperature=50.0, epsilon=0.5)
    body = orjson.dumps({"model": "m", "prompt": "x " * 99, "messages": [], "tokens": [1, 2]})
    for number in range(6):
        clock.now += 0.01
        arrival = cluster.arrive(read_request(path, {}, body))
        decision = chooser.choose(arrival)
        assert decision is not None
        over(recorder, Attempt(cluster, arrival, decision.replica, decision), "done")
        assert recorder.recorded == number
        over(recorder, asked(cluster, chooser, "a prompt of some words"), "done")
        assert recorder.recorded == number + 1
    assert recorder.overruled == 0
    assert len(recorder) == 0


def _to(replica: int) -> Any:
    from tailrace.router.state.arrival import Decision

    return Decision(replica, "mine", np.zeros(2), -1, "")


def test_how_requests_end(recorder: LiveRecorder) -> None:
    clock = Clock(1000.0)
    cluster = new_cluster(2, clock)
    chooser = new_chooser(cluster, POLICY)
    # Complete; given up by its client; refused; lost while it was answering.
    attempts = [asked(cluster, chooser, str(k)) for k in range(4)]
    clock.now += 1.0
    for attempt, outcome in zip(
        attempts, ("done", "client_gone", "rejected", "backend_failed"), strict=True
    ):
        attempt.tokens(1)
        over(recorder, attempt, outcome)
    assert cost_s(recorder, clock.now) == pytest.approx(
        {"e2e": 4.0, "ttft": 4.0, "late": 0.0, "lost": 1.0}
    )
    assert len(recorder) == 0


def test_a_request_that_is_sent_again_is_one_request(recorder: LiveRecorder) -> None:
    clock = Clock()
    cluster = new_cluster(2, clock)
    chooser = new_chooser(cluster, POLICY)
    attempt = asked(cluster, chooser)
    clock.now = 2.0
    attempt.close("backend_failed")
    decision = chooser.choose(attempt.arrival, [attempt.replica])
    assert decision is not None
    again = Attempt(cluster, attempt.arrival, decision.replica, decision)
    clock.now = 3.0
    again.tokens(1)
    over(recorder, again, "done")
    due = {"e2e": 3.0, "ttft": 3.0, "late": 2.0, "lost": 0.0}
    assert cost_s(recorder, 3.0) == pytest.approx(due)


def test_a_request_that_failed_and_never_comes_back_is_lost_once(recorder: LiveRecorder) -> None:
    clock = Clock()
    cluster = new_cluster(2, clock)
    chooser = new_chooser(cluster, POLICY)
    asked(cluster, chooser).close("timeout")
    for clock.now in (5.0, 11.0, 30.0):
        over(recorder, asked(cluster, chooser), "done")
    assert len(recorder) == 0
    found = cost_s(recorder, 30.0)
    assert (found["lost"], found["e2e"]) == (1.0, 11.0)


def test_an_answer_in_one_piece_had_its_first_token_before_its_end(recorder: LiveRecorder) -> None:
    clock = Clock()
    cluster = new_cluster(2, clock)
    chooser = new_chooser(cluster, POLICY)
    attempt = asked(cluster, chooser, stream=False)
    clock.now = 4.0
    attempt.usage(10, 200, 0)
    over(recorder, attempt, "done")
    found = cost_s(recorder, 4.0)
    assert found["e2e"] == 4.0
    assert 0 < found["ttft"] < 2.0
