"""Emulated servers on real ports: addresses, faults, the admin server, real clients."""

import asyncio
import json
import subprocess
import sys

import orjson
import pytest

from tailrace.bench.load import JSON_LINE, open_pool
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.emulate.faults import Fault
from tailrace.errors import TailraceError
from tailrace.net.client import Call, FetchError, failure_kind

FAST = {"time_scale": 0.02}


def emulate(function, cluster=None, **options):
    """Run ``await function(emulator, clients)`` with one client per replica."""

    async def run():
        async with Emulator(
            cluster or Cluster(replicas=(Replica(count=2),)), **(FAST | options)
        ) as emulator:
            clients = [open_pool(url) for url in emulator.urls]
            try:
                return await function(emulator, clients)
            finally:
                for client in clients:
                    client.abort()

    return asyncio.run(run())


async def complete(client, tokens=3, **more):
    body = orjson.dumps({"prompt": "x", "max_tokens": tokens, **more})
    return await fetch(client, "POST", "/v1/completions", body)


async def fetch(client, method, path, body=b"", timeout_s=30.0):
    response = await client.fetch(method, path, None, body, timeout_s)
    return response.status, response.body


class Watched(Call):
    """A call that tells when something has come, and how it ended."""

    def __init__(self, *request):
        super().__init__(*request)
        self.came = asyncio.Event()
        self.outcome = asyncio.get_running_loop().create_future()

    def received(self, data):
        self.came.set()

    def ended(self):
        self.outcome.set_result("ended")

    def broken(self, why, *, connecting):
        self.outcome.set_result(failure_kind(why, connecting=connecting))


def begin_stream(client, tokens=100_000):
    body = orjson.dumps({"prompt": "x", "max_tokens": tokens, "stream": True})
    head = client.head(b"POST", b"/v1/completions", len(body), JSON_LINE)
    watched = Watched(client, b"POST", head, body)
    watched.start()
    return watched


def test_every_replica_answers_at_its_address():
    async def run(emulator, clients):
        assert len(set(emulator.ports)) == 2
        assert emulator.admin_url is None
        codes = [(await complete(client))[0] for client in clients]
        return codes, [r.meter.success["length"] for r in emulator.replicas]

    assert emulate(run) == ([200, 200], [1, 1])


def test_death_and_return():
    async def run(emulator, clients):
        stream, other = begin_stream(clients[0]), begin_stream(clients[1])
        await stream.came.wait()
        await emulator.fault(0, Fault(kind="die"))
        assert await stream.outcome == "disconnected"
        with pytest.raises(FetchError, match="cannot connect"):
            await complete(clients[0])
        assert emulator.replicas[0].running == 0
        await emulator.fault(0, Fault(kind="return"))
        assert (await complete(clients[0]))[0] == 200
        assert not other.outcome.done()

    emulate(run)


def test_hanging_until_return():
    async def run(emulator, clients):
        stream = begin_stream(clients[0])
        await stream.came.wait()
        await emulator.fault(0, Fault(kind="hang"))
        given = emulator.replicas[0].meter.generated_tokens
        with pytest.raises(FetchError, match="no answer within"):
            await fetch(clients[0], "GET", "/health", timeout_s=0.05)
        assert emulator.replicas[0].meter.generated_tokens == given
        assert (await complete(clients[1]))[0] == 200
        await emulator.fault(0, Fault(kind="return"))
        assert await stream.outcome == "disconnected"
        assert (await complete(clients[0]))[0] == 200

    emulate(run)


def test_another_fault_ends_a_hang():
    async def run(emulator, clients):
        await emulator.fault(0, Fault(kind="hang"))
        await emulator.fault(0, Fault(kind="error"))
        assert (await complete(clients[0]))[0] == 500
        await emulator.fault(0, Fault(kind="return"))
        assert (await complete(clients[0]))[0] == 200

    emulate(run)


def test_garbage():
    async def run(emulator, clients):
        await emulator.fault(0, Fault(kind="garbage"))
        with pytest.raises(FetchError, match="malformed"):
            await complete(clients[0])
        await emulator.fault(0, Fault(kind="return"))
        assert (await complete(clients[0]))[0] == 200

    emulate(run)


def test_error_status():
    async def run(emulator, clients):
        await emulator.fault(0, Fault(kind="error", status=503))
        code, body = await complete(clients[0])
        assert (code, orjson.loads(body)["error"]["code"]) == (503, 503)
        assert (await fetch(clients[0], "GET", "/health"))[0] == 503
        assert (await fetch(clients[0], "GET", "/metrics"))[0] == 200
        await emulator.fault(0, Fault(kind="return"))
        assert (await complete(clients[0]))[0] == 200

    emulate(run)


def test_faults_by_http():
    async def run(emulator, clients):
        admin = open_pool(emulator.admin_url)

        async def post(path, body):
            code, reply = await fetch(admin, "POST", path, orjson.dumps(body))
            return code, orjson.loads(reply)

        try:
            code, state = await post("/replicas/1/fault", {"kind": "slow", "factor": 0.25})
            assert (code, state["speed"], state["fault"]) == (200, 0.25, None)
            code, state = await post("/replicas/1/fault", {"kind": "die"})
            assert (code, state["fault"]) == (200, "die")
            _, states = await fetch(admin, "GET", "/replicas")
            assert [s["fault"] for s in orjson.loads(states)] == [None, "die"]
            code, state = await post("/replicas/1/fault", {"kind": "return"})
            assert (code, state["speed"], state["fault"]) == (200, 1.0, None)
            assert (await complete(clients[1]))[0] == 200
            for path, body, status in (
                ("/replicas/2/fault", {"kind": "die"}, 404),
                ("/replicas/0/fault", {"kind": "explode"}, 400),
                ("/replicas/0/fault", {"kind": "die", "when": 3}, 400),
                ("/other", {}, 404),
            ):
                code, reply = await post(path, body)
                assert (code, reply["error"]["code"]) == (status, status)
        finally:
            admin.abort()

    emulate(run, faults=True)


def test_a_port_that_is_taken_is_named():
    async def run(emulator, clients):
        with pytest.raises(TailraceError, match=f"cannot listen on 127.0.0.1:{emulator.ports[0]}"):
            async with Emulator(Cluster(), port=emulator.ports[0]):
                pass

    emulate(run)


def test_bad_clusters_are_refused():
    with pytest.raises(TailraceError, match="time_scale"):
        Emulator(Cluster(), time_scale=0.0)
    with pytest.raises(TailraceError, match="num_stages"):
        Emulator(Cluster(replicas=(Replica(num_stages=2),)))


def test_the_openai_package_can_talk_to_it():
    openai = pytest.importorskip("openai")

    async def run(emulator, clients):
        async with openai.AsyncOpenAI(base_url=f"{emulator.urls[0]}/v1", api_key="none") as client:
            messages = [{"role": "user", "content": "hello"}]
            stream = await client.chat.completions.create(
                model="emulated", messages=messages, max_tokens=6, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert len(text) == 24
            assert chunks[-1].usage.completion_tokens == 6
            whole = await client.chat.completions.create(
                model="emulated", messages=messages, max_tokens=6
            )
            assert whole.choices[0].message.content == text
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="x")
            assert [m.id async for m in client.models.list()] == ["emulated"]

    emulate(run)


COMMAND = "from tailrace.cli.emulate import command; command()"


def test_command_prints_addresses_and_stops_on_interrupt():
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "--speeds", "1,0.5", "--port", "0", "--json", "--faults"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        about = json.loads(process.stdout.readline())
        assert len(about["urls"]) == 2
        assert about["admin_url"].startswith("http://127.0.0.1:")

        async def ask():
            client = open_pool(about["urls"][1])
            try:
                return await complete(client)
            finally:
                client.abort()

        assert asyncio.run(ask())[0] == 200
        process.send_signal(2)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "", "")
