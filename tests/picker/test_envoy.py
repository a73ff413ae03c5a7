"""The picker behind a real Envoy, set up by deploy/envoy.yaml: make test-envoy."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from picker.pickers import is_idle
from router.conftest import Answer, Client, quiet_settings, run
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.picker.app import Picker

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import envoy_rig

pytestmark = pytest.mark.envoy
CHAT = {"model": "emulated", "messages": [{"role": "user", "content": "Hello"}]}
SUBSET_FILTER = """- name: envoy.filters.http.set_metadata
                    typed_config:
                      "@type": TYPE
                      metadata:
                        - metadata_namespace: envoy.lb.subset_hint
                          value: {x-gateway-destination-endpoint-subset: "ENDPOINT"}
                  - name: envoy.filters.http.ext_proc
""".replace("TYPE", "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config")
EXT_PROC = "- name: envoy.filters.http.ext_proc\n"


@dataclass
class Behind:
    """A picker, its servers, and the Envoy in front of them."""

    picker: Picker
    emulators: list[Emulator]
    envoy: envoy_rig.Envoy

    @property
    def endpoints(self) -> list[str]:
        return [u.removeprefix("http://") for e in self.emulators for u in e.urls]

    async def open(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.envoy.port))

    async def ask(
        self, body: Any = None, headers: str = "", client: Client | None = None
    ) -> Answer:
        client = client or await self.open()
        data = orjson.dumps(body or CHAT)
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
            % (headers.encode(), len(data)) + data
        )  # fmt: skip
        try:
            return await client.answer()
        finally:
            client.writer.close()

    async def settle(self) -> None:
        for _ in range(1000):
            if is_idle(self.picker):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("something is still in progress")


@asynccontextmanager
async def behind(servers: int = 2, edits: Any = None, **over: Any) -> AsyncIterator[Behind]:
    async with AsyncExitStack() as stack:
        emulators = [
            await stack.enter_async_context(
                Emulator(Cluster(replicas=(Replica(),)), time_scale=0.02)
            )
            for _ in range(servers)
        ]
        urls = [url for emulator in emulators for url in emulator.urls]
        settings = quiet_settings(
            [{"url": url} for url in urls], **{"admin": {"listen": "off"}, "models": {}, **over}
        )
        picker = Picker(settings)
        await picker.start()
        endpoints = [url.removeprefix("http://") for url in urls]
        changes = {k: v.replace("ENDPOINT", endpoints[-1]) for k, v in (edits or {}).items()}
        rig = envoy_rig.envoy(picker.listen_at[1], endpoints, edits=changes)
        envoy = await asyncio.to_thread(rig.__enter__)
        made = Behind(picker, emulators, envoy)
        try:
            for _ in range(200):  # until Envoy has found the picker healthy
                if (await made.ask()).status == 200:
                    break
                await asyncio.sleep(0.1)
            await made.settle()
            yield made
        finally:
            rig.__exit__(None, None, None)
            await picker.stop()


def test_requests_reach_the_endpoint_that_was_picked() -> None:
    async def test() -> None:
        async with behind(3) as b:
            seen = []
            for _ in range(6):
                answer = await b.ask()
                assert answer.status == 200
                assert orjson.loads(answer.body)["usage"]["completion_tokens"] > 0
                seen.append(answer.headers["x-tailrace-replica"])
            assert seen[:3] == seen[3:]  # round robin
            assert set(seen) == set(b.endpoints)
            await b.settle()
            picker = b.picker
            picker.telemetry.flush()
            assert sum(picker.telemetry.output_tokens.values()) > 6  # read from usage

    run(test())


def test_streams_pass_through_event_by_event() -> None:
    async def test() -> None:
        async with behind() as b:
            answer = await b.ask({**CHAT, "stream": True, "max_tokens": 20})
            assert answer.status == 200
            assert answer.complete
            assert answer.body.count(b"data: ") >= 21
            assert answer.body.endswith(b"data: [DONE]\n\n")
            await b.settle()
            assert b.picker.backends.cluster.mean_output != 256  # it has seen lengths

    run(test())


@pytest.mark.parametrize("size", [1_000, 100_000, 1_000_000])
def test_large_bodies(size: int) -> None:
    async def test() -> None:
        async with behind() as b:
            messages = [{"role": "user", "content": "a b " * (size // 4)}]
            answer = await b.ask({"model": "emulated", "messages": messages, "max_tokens": 2})
            assert answer.status == 200
            usage = orjson.loads(answer.body)["usage"]
            assert usage["prompt_tokens"] > size // 10
            await b.settle()

    run(test())


def test_models_are_rewritten() -> None:
    async def test() -> None:
        async with behind(models={"aliases": {"a-much-longer-alias": "emulated"}}) as b:
            answer = await b.ask({**CHAT, "model": "a-much-longer-alias"})
            assert orjson.loads(answer.body)["model"] == "emulated"

    run(test())


def test_clients_that_go_free_everything() -> None:
    async def test() -> None:
        async with behind() as b:
            for wait_s in (0.0, 0.05, 0.3):
                client = await b.open()
                data = orjson.dumps({**CHAT, "stream": True, "max_tokens": 5000})
                client.send(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(data), data)
                )
                await asyncio.sleep(wait_s)
                client.writer.transport.abort()
                await b.settle()
            b.picker.telemetry.flush()
            outcomes = [key[2] for key in b.picker.telemetry.requests.elements()]
            assert "client_gone" in outcomes

    run(test())


def test_a_lost_endpoint_is_retried_at_the_fallback() -> None:
    async def test() -> None:
        async with behind(2, health={"failures": 1000, "interval_s": 1000}) as b:
            lost, kept = b.endpoints
            await b.emulators[0].__aexit__(None, None, None)
            served = []
            for _ in range(6):
                answer = await b.ask()
                assert answer.status == 200
                served.append(answer.headers["x-tailrace-replica"])
            assert set(served) == {kept}
            await b.settle()
            assert sum(b.picker.telemetry.retries.values()) == 3  # every second was picked for it
            del lost

    run(test())


def test_only_the_subset_is_used() -> None:
    async def test() -> None:
        async with behind(3, {EXT_PROC: SUBSET_FILTER}) as b:
            for _ in range(4):
                answer = await b.ask()
                assert answer.headers["x-tailrace-replica"] == b.endpoints[-1]

    run(test())


def test_rejections_reach_the_client() -> None:
    async def test() -> None:
        admission = {"max_in_flight": 1, "queue": 0}
        async with behind(1, admission=admission) as b:
            first = asyncio.create_task(b.ask({**CHAT, "stream": True, "max_tokens": 3000}))
            while not b.picker.backends.all[0].active:
                await asyncio.sleep(0.01)
            answer = await b.ask()
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
            first.cancel()
            b.picker.drain("0", True)
            assert (await b.ask()).status == 503

    run(test())


def test_more_streams_at_once_than_envoy_allows_by_itself() -> None:
    """1024 per cluster, unless its circuit breakers are set."""

    async def test() -> None:
        async with behind(4) as b:
            body = {**CHAT, "stream": True, "max_tokens": 10}
            answers = await asyncio.gather(*(b.ask(body) for _ in range(1500)))
            assert {answer.status for answer in answers} == {200}
            assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in answers)
            await b.settle()

    run(test(), limit_s=300)


def test_a_restart_of_one_picker_of_two_loses_no_request() -> None:
    """Envoy sends nothing more to a picker that is not ready, also in its own first minute."""
    port = envoy_rig.free_port()
    first = "cluster_name: picker\n        endpoints:\n          - lb_endpoints:\n"
    another = (
        "              - endpoint: {address: {socket_address: "
        f"{{address: 127.0.0.1, port_value: {port}}}}}}}\n"
    )

    async def test() -> None:
        async with behind(edits={first: first + another}) as b:
            settings = b.picker.settings.model_copy(update={"listen": f"127.0.0.1:{port}"})
            other = Picker(settings)
            await other.start()
            try:
                healthy = "cluster.picker.membership_healthy"
                statuses: list[int] = []

                async def load() -> None:
                    while not stopping:
                        statuses.append((await b.ask({**CHAT, "stream": True})).status)

                async def until_healthy(count: int) -> None:
                    while (await asyncio.to_thread(b.envoy.stats, healthy))[healthy] != count:
                        await asyncio.sleep(0.1)

                await until_healthy(2)
                stopping = False
                clients = [asyncio.create_task(load()) for _ in range(8)]
                other.draining = True  # as after SIGTERM
                await until_healthy(1)
                await other.stop(10.0)
                before = len(statuses)
                while len(statuses) < before + 50:
                    await asyncio.sleep(0.05)
                stopping = True
                await asyncio.gather(*clients)
                assert set(statuses) == {200}
            finally:
                await other.stop()

    run(test(), limit_s=40)


@pytest.mark.parametrize(
    ("fail_open", "mode", "served"),
    [
        (False, "FULL_DUPLEX_STREAMED", False),
        (False, "BUFFERED", False),
        (True, "BUFFERED", True),
        # Envoy has given the body away and cannot send it itself.
        (True, "FULL_DUPLEX_STREAMED", False),
    ],
)
def test_the_picker_is_killed_under_load(fail_open: bool, mode: str, served: bool) -> None:
    """As docs/picker.md says: without a picker requests fail, or go round."""

    async def test() -> None:
        async with Emulator(Cluster(replicas=(Replica(count=2),)), time_scale=0.02) as emulator:
            port = envoy_rig.free_port()
            command = [
                sys.executable, "-m", "tailrace.cli", "pick", "--listen", f"127.0.0.1:{port}",
                "--admin", "off", "-p", "round_robin", "--log-level", "error",
                *(word for url in emulator.urls for word in ("-b", url)),
            ]  # fmt: skip

            async def start() -> asyncio.subprocess.Process:
                picker = await asyncio.create_subprocess_exec(
                    *command, stdout=asyncio.subprocess.PIPE
                )
                assert picker.stdout is not None
                while b"listening" not in await picker.stdout.readline():
                    assert picker.returncode is None
                return picker

            picker = await start()
            endpoints = [url.removeprefix("http://") for url in emulator.urls]
            edits = {"request_body_mode: FULL_DUPLEX_STREAMED": f"request_body_mode: {mode}"}
            rig = envoy_rig.envoy(port, endpoints, fail_open=fail_open, edits=edits)
            envoy = await asyncio.to_thread(rig.__enter__)
            b = Behind(None, [emulator], envoy)  # type: ignore[arg-type]
            try:
                while (await b.ask()).status != 200:
                    await asyncio.sleep(0.1)
                load = [asyncio.create_task(b.ask({**CHAT, "stream": True})) for _ in range(20)]
                await asyncio.sleep(0.1)
                os.kill(picker.pid, signal.SIGKILL)
                await picker.wait()
                results = await asyncio.gather(*load, return_exceptions=True)
                assert len(results) == 20  # none hangs
                before = [(await b.ask()).status for _ in range(10)]
                picker = await start()
                after: list[int] = []
                while after[-10:] != [200] * 10:  # until Envoy's health check has found it
                    after.append((await b.ask()).status)
                    await asyncio.sleep(0.05)
                if served:
                    assert before == [200] * 10
                else:
                    assert all(status >= 500 for status in before)
            finally:
                rig.__exit__(None, None, None)
                picker.kill()
                await picker.wait()

    run(test(), limit_s=240, factory=asyncio.new_event_loop)
