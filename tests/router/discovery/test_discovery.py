"""Servers that come and go: Kubernetes, DNS and files, and what happens to their requests."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from picker.pickers import is_idle
from router.conftest import (
    SSE_HEAD,
    Backend,
    Client,
    chunked,
    event,
    post,
    quiet_settings,
    run,
    serving,
)
from router.discovery.fake_api import PODS, POOLS, SLICES, FakeApi, answer, fake_api, pod
from tailrace.errors import TailraceError
from tailrace.picker.app import Picker
from tailrace.router.app import Router
from tailrace.router.core import RouterCore
from tailrace.router.discovery import api_watch, discovery
from tailrace.router.discovery.dns import DnsName
from tailrace.router.discovery.found import FoundServer
from tailrace.router.discovery.settings import DiscoverySettings
from tailrace.router.serve_settings import load


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for seconds elsewhere waits for hundredths here."""
    monkeypatch.setattr(api_watch, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(api_watch, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(discovery, "SETTLE_S", 0.0)
    monkeypatch.setattr(discovery, "AGAIN_S", 0.05)


async def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds; ``run`` limits how long."""
    while not holds():
        await asyncio.sleep(0.005)


class Fleet:
    """Servers at 127.0.0.2, .3, ... on one port, as pods have."""

    def __init__(self) -> None:
        self.servers: dict[str, Backend] = {}
        self.port = 0

    async def start(self, count: int) -> None:
        for number in range(2, 2 + count):
            server, host = Backend(), f"127.0.0.{number}"
            await server.start(self.port, host)
            self.port = server.port
            self.servers[host] = server

    def url(self, number: int) -> str:
        return f"http://127.0.0.{number}:{self.port}"


class World:
    """A router that finds its servers."""

    def __init__(self, router: RouterCore, api: FakeApi, fleet: Fleet) -> None:
        self.router, self.api, self.fleet = router, api, fleet
        self.opened: list[Client] = []

    @property
    def states(self) -> dict[str, str]:
        """State of each backend, by the last number of its address."""
        return {
            re.sub(r".*\.(\d+):.*", r"\1", b.settings.url): b.health.state
            for b in self.router.backends.present
        }

    async def become(self, **states: str) -> None:
        """Wait until there are just these backends, written as _2="closed"."""
        wanted = {name.removeprefix("_"): state for name, state in states.items()}
        await until(lambda: self.states == wanted)

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection(*self.router.listen_at))
        self.opened.append(client)
        return client

    async def ask(self) -> int:
        client = await self.client()
        client.send(post())
        return (await client.answer()).status


@asynccontextmanager
async def finding(
    count: int = 3, make: type[RouterCore] = Router, **kubernetes: Any
) -> AsyncIterator[World]:
    """A router that watches pods with app=vllm, of a fake API, and ``count`` servers."""
    async with AsyncExitStack() as stack:
        api, fleet = await stack.enter_async_context(fake_api()), Fleet()
        await fleet.start(count)
        stack.push_async_callback(lambda: _kill(fleet))
        given = kubernetes or {"selector": "app=vllm", "port": fleet.port}
        settings = quiet_settings(
            [],
            discovery={
                "kubernetes": {
                    "api_server": api.url, "namespace": "default", "token_file": None, **given,
                },
            },
            admin={"listen": "off"}, health={"interval_s": 1000, "slow_start_s": 0},
        )  # fmt: skip
        world = World(make(settings), api, fleet)
        await stack.enter_async_context(serving(world.router, world.opened))  # type: ignore[arg-type]
        yield world


async def _kill(fleet: Fleet) -> None:
    for server in fleet.servers.values():
        await server.kill()


def test_pods_start_become_ready_drain_and_die() -> None:
    async def scenario() -> None:
        async with finding() as w:
            assert await w.ask() == 503
            assert w.router.readiness()[0] == 503
            w.api.put(PODS, pod("a"))  # scheduled: no address yet
            w.api.put(PODS, pod("a", "127.0.0.2", ready=False))
            w.api.put(PODS, pod("b", "127.0.0.3"))
            w.api.put(PODS, pod("other", "127.0.0.4", app="else"))
            await w.become(_3="closed")
            assert await w.ask() == 200
            w.api.put(PODS, pod("a", "127.0.0.2"))
            await w.become(_2="closed", _3="closed")
            for _ in range(4):
                assert await w.ask() == 200
            assert [len(s.seen) for s in w.fleet.servers.values()] == [2, 3, 0]
            assert [b.label for b in w.router.backends.present] == ["b", "a"]
            # A stream at each; one pod is deleted, the other fails its readiness probe.
            go = asyncio.Event()
            clients = []
            for server in (w.fleet.servers["127.0.0.2"], w.fleet.servers["127.0.0.3"]):
                server.arrived.clear()
                server.scripts.append(stream(go))
                server.scripts.append(stream(go))
            while not all(w.fleet.servers[f"127.0.0.{n}"].arrived.is_set() for n in (2, 3)):
                clients.append(await w.client())
                clients[-1].send(post())
                await asyncio.sleep(0.02)
            w.api.put(PODS, pod("a", "127.0.0.2", deleted=True))
            w.api.put(PODS, pod("b", "127.0.0.3", ready=False))
            await w.become(_2="draining", _3="draining")
            assert await w.ask() == 503
            w.api.put(PODS, pod("b", "127.0.0.3"))
            await w.become(_2="draining", _3="closed")
            w.api.delete(PODS, "a")
            await w.become(_3="closed")
            go.set()
            for client in clients:
                found = await client.answer()
                assert found.complete
                assert found.body == event("a") + event("b")
            w.api.put(PODS, pod("b", "127.0.0.3", phase="Failed", ready=False))
            await w.become()
            assert await w.ask() == 503

    run(scenario())


def stream(go: asyncio.Event) -> Any:
    async def script(seen: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(event("a"), end=False))
        await go.wait()
        writer.write(chunked(event("b")))
        await writer.drain()

    return script


def test_a_watch_goes_on_where_it_was_cut_off() -> None:
    async def scenario() -> None:
        async with finding() as w:
            w.api.put(PODS, pod("a", "127.0.0.2"))
            await w.become(_2="closed")
            for cut in (w.api.drop, w.api.end, w.api.drop):
                await until(lambda: w.api.watching)
                cut()
                w.api.put(PODS, pod("b", "127.0.0.3"))  # nobody watches just now
                await w.become(_2="closed", _3="closed")
                await until(lambda: w.api.watching)
                w.api.delete(PODS, "b")
                await w.become(_2="closed")
            assert len(w.api.asked("limit=")) == 1, "it was listed only once"

    run(scenario())


def test_bookmarks_move_the_version_on() -> None:
    async def scenario() -> None:
        async with finding() as w:
            w.api.put(PODS, pod("a", "127.0.0.2"))
            await w.become(_2="closed")
            await until(lambda: w.api.watching)
            w.api.bookmark()
            marked = w.api.version
            w.api.send(b'{"type":"SOMETHING","object":{}}\n')
            await asyncio.sleep(0.05)
            w.api.drop()
            await until(lambda: w.api.watching)
            assert f"resourceVersion={marked}" in w.api.requests[-1]
            assert "allowWatchBookmarks=true" in w.api.requests[-1]
            assert w.states == {"2": "closed"}

    run(scenario())


@pytest.mark.parametrize("as_event", [False, True])
def test_an_expired_version_is_listed_anew(as_event: bool) -> None:
    async def scenario() -> None:
        async with finding() as w:
            for number in (2, 3):
                w.api.put(PODS, pod(f"p{number}", f"127.0.0.{number}"))
            await w.become(_2="closed", _3="closed")
            await until(lambda: w.api.watching)
            w.api.drop()
            w.api.delete(PODS, "p2")
            w.api.put(PODS, pod("p4", "127.0.0.4"))
            w.api.forget(as_event=as_event)
            await w.become(_3="closed", _4="closed")
            assert len(w.api.asked("limit=")) >= 2

    run(scenario())


def test_long_lists_come_in_pages() -> None:
    async def scenario() -> None:
        async with finding() as w:
            w.api.page = 2
            for number in range(5):
                w.api.put(PODS, pod(f"x{number}", f"127.0.1.{number}"))
            w.api.forget(as_event=False)
            await until(lambda: w.api.watching)
            w.api.drop()
            await until(lambda: len(w.states) == 5)
            assert w.api.asked("continue=4")

    run(scenario())


def test_an_api_that_fails_changes_nothing_and_is_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_watch, "MAX_LINE", 20_000)

    async def scenario() -> None:
        async with finding() as w:
            w.api.put(PODS, pod("a", "127.0.0.2"))
            await w.become(_2="closed")
            forbidden = {"message": "pods is forbidden", "code": 403}
            for damage in (
                lambda: w.api.send(b"no JSON\n"),
                lambda: w.api.send(b"[]\n"),
                lambda: w.api.send(b"x" * 50_000),
                lambda: w.api.send(b'{"type":"ERROR","object":{"code":500,"message":"etcd"}}\n'),
                w.api.drop,
            ):
                await until(lambda: w.api.watching)
                w.api.answers += [
                    answer(403, forbidden), answer(401, {}), answer(500, {"message": "broken"}),
                    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nnot", b"nonsense\r\n\r\n",
                ]  # fmt: skip
                damage()
                await until(lambda: not w.api.answers)
                assert w.states == {"2": "closed"}
                await until(lambda: w.api.watching)
            w.api.put(PODS, pod("b", "127.0.0.3"))
            await w.become(_2="closed", _3="closed")
            await w.api.stop()
            await asyncio.sleep(0.1)
            assert w.states == {"2": "closed", "3": "closed"}
            await w.api.start()
            await until(lambda: w.api.watching)

    run(scenario())
    told = {record.why for record in caplog.records if hasattr(record, "why")}
    assert any("the service account may not do this: pods is forbidden" in why for why in told)
    assert any("check kubernetes.token_file" in why for why in told)
    assert "an object is too long" in told


def test_another_pod_with_the_same_address_begins_anew() -> None:
    async def scenario() -> None:
        async with finding() as w:
            w.api.put(PODS, pod("a", "127.0.0.2"))
            await w.become(_2="closed")
            assert await w.ask() == 200
            (first,) = w.router.backends.present
            epoch = w.router.backends.cluster.epochs[first.index]
            # Both events in one turn: there is no moment without a pod.
            w.api.delete(PODS, "a")
            w.api.put(PODS, pod("a2", "127.0.0.2"))
            await until(lambda: [b.label for b in w.router.backends.present] == ["a2"])
            assert w.router.backends.cluster.epochs[first.index] != epoch
            assert await w.ask() == 200

    run(scenario())


def test_tokens_are_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        token = tmp_path / "token"
        token.write_text("first\n")
        async with finding(selector="app=vllm", port=1, token_file=token) as w:
            await until(lambda: w.api.watching)
            token.write_text("second\n")
            w.api.drop()
            await until(lambda: len(w.api.headers) > 2)
            given = [headers["authorization"] for headers in w.api.headers]
            assert given[:2] == ["Bearer first"] * 2
            assert given[-1] == "Bearer second"

    run(scenario())


def endpoint(number: int, **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [f"127.0.0.{number}"], "conditions": conditions,
        "targetRef": {"name": f"p{number}", "uid": f"u{number}"},
    }  # fmt: skip


def slices(name: str, port: int, *endpoints: dict[str, Any], kind: str = "IPv4") -> dict[str, Any]:
    return {
        "metadata": {
            "name": name, "uid": name, "labels": {"kubernetes.io/service-name": "llm"},
        },
        "addressType": kind,
        "ports": [{"name": "http", "port": port}, {"name": "metrics", "port": 9}],
        "endpoints": list(endpoints),
    }  # fmt: skip


def test_endpoints_of_a_service() -> None:
    async def scenario() -> None:
        async with finding(service="llm", port="http") as w:
            port = w.fleet.port
            w.api.put(SLICES, slices("s1", port, endpoint(2), endpoint(3, ready=False)))
            await w.become(_2="closed")
            assert await w.ask() == 200
            # An endpoint moves to another slice, and is in both for a moment.
            w.api.put(SLICES, slices("s2", port, endpoint(2, ready=True), endpoint(4)))
            await w.become(_2="closed", _4="closed")
            w.api.put(SLICES, slices("s1", port, endpoint(3, ready=True)))
            await w.become(_2="closed", _3="closed", _4="closed")
            ending = endpoint(4, ready=False, serving=True, terminating=True)
            w.api.put(SLICES, slices("s2", port, endpoint(2), ending))
            await w.become(_2="closed", _3="closed", _4="draining")
            w.api.put(SLICES, slices("s2", port, endpoint(2)))
            w.api.put(SLICES, slices("names", port, endpoint(9), kind="FQDN"))
            await w.become(_2="closed", _3="closed")
            w.api.delete(SLICES, "s1")
            await w.become(_2="closed")

    run(scenario())


def test_a_service_with_several_ports_needs_one_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with finding(service="llm") as w:
            w.api.put(SLICES, slices("s1", w.fleet.port, endpoint(2)))
            await until(lambda: "port of a service is not clear" in caplog.text)
            assert w.states == {}

    run(scenario())


def pool(port: int, *more: int, **labels: str) -> dict[str, Any]:
    ports = [{"number": number} for number in (port, *more)]
    spec = {"selector": {"matchLabels": labels}, "targetPorts": ports}
    return {"metadata": {"name": "llama", "uid": "pool"}, "spec": spec}


def test_an_inference_pool_selects_pods() -> None:
    async def scenario() -> None:
        async with finding(pool="llama") as w:
            for number, app in ((2, "old"), (3, "new"), (4, "new")):
                w.api.put(PODS, pod(f"p{number}", f"127.0.0.{number}", app=app))
            other = pool(1, app="new")
            other["metadata"] = {"name": "other", "uid": "other"}
            w.api.put(POOLS, other)
            port = w.fleet.port
            w.api.put(POOLS, pool(port, app="old"))
            await w.become(_2="closed")
            assert await w.ask() == 200
            w.api.put(POOLS, pool(port, app="new"))
            await w.become(_3="closed", _4="closed")
            w.api.put(PODS, pod("p2", "127.0.0.2", app="new"))
            await w.become(_2="closed", _3="closed", _4="closed")
            # Two ports: two servers in each pod.
            w.api.put(POOLS, pool(port, 1, app="new"))
            await until(lambda: len(w.router.backends.present) == 6)
            assert f"p3:{port}" in [b.label for b in w.router.backends.present]
            # A pool without labels selects nothing, not everything.
            w.api.put(POOLS, pool(port))
            await w.become()
            w.api.put(POOLS, pool(port, app="old"))
            await until(lambda: w.api.watching == 2)
            w.api.delete(POOLS, "llama")
            await w.become()

    run(scenario())


def test_the_picker_finds_its_endpoints() -> None:
    async def scenario() -> None:
        async with finding(make=Picker) as w:
            picker = w.router
            assert isinstance(picker, Picker)
            w.api.put(PODS, pod("a", "127.0.0.2"))
            await w.become(_2="closed")
            assert picker.readiness()[0] == 200
            (backend,) = picker.backends.present
            assert picker.endpoint(backend) == w.fleet.url(2).removeprefix("http://")
            w.api.delete(PODS, "a")
            await w.become()
            assert picker.readiness()[0] == 503
            assert is_idle(picker)

    run(scenario())


def test_names_with_several_addresses() -> None:
    settings = DiscoverySettings.model_validate(
        {"dns": ["https://vllm.example:8000/base"], "interval_s": 0.01}
    )
    answers: list[list[str] | OSError] = [
        ["10.0.0.2", "10.0.0.1", "10.0.0.1"], OSError(-3, "try again"), ["10.0.0.1", "10.0.0.2"],
        [], ["2001:db8::1"],
    ]  # fmt: skip
    reports: list[list[FoundServer]] = []

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("vllm.example", 8000)
        found = answers.pop(0) if answers else ["2001:db8::1"]
        if isinstance(found, OSError):
            raise found
        return found

    async def scenario() -> None:
        name = DnsName(settings, settings.dns[0], resolve)
        task = asyncio.create_task(name.run(lambda found: reports.append(list(found))))
        await until(lambda: not answers)
        await asyncio.sleep(0.05)
        task.cancel()

    run(scenario())
    urls = [[server.backend.url for server in report] for report in reports]
    assert urls == [
        ["https://10.0.0.1:8000/base", "https://10.0.0.2:8000/base"],
        ["https://[2001:db8::1]:8000/base"],
    ]
    assert reports[0][0].backend.tls.server_name == "vllm.example"


def test_a_real_name_is_resolved() -> None:
    async def scenario() -> None:
        backend, opened = Backend(), list[Client]()
        await backend.start()
        router = Router(quiet_settings([], discovery={"dns": [f"http://localhost:{backend.port}"]}))
        async with serving(router, opened):
            await until(lambda: router.backends.present)
            assert backend.url in [b.settings.url for b in router.backends.present]
        await backend.kill()

    run(scenario())


def test_a_watched_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "backends.toml"

    async def scenario() -> None:
        fleet = Fleet()
        await fleet.start(2)
        first, second = (f'[[backends]]\nurl = "{fleet.url(n)}"\n' for n in (2, 3))
        file.write_text(first)
        discovery = {"file": str(file), "interval_s": 0.01}
        router = Router(quiet_settings([], discovery=discovery))
        async with serving(router, []):

            def urls() -> list[str]:
                return [b.settings.url for b in router.backends.present]

            await until(lambda: urls() == [fleet.url(2)])
            file.write_text(first + second + "max_in_flight = 7\n")
            await until(lambda: urls() == [fleet.url(2), fleet.url(3)])
            assert router.backends.present[1].health.max_in_flight == 7
            for faulty, told in (
                ("[[backends]]\nurl = 1\n", "url"), ("nonsense", "backends.toml"),
                (first + first, "twice"), ('[[backends]]\nurl="http://h"\nport=1', "port"),
            ):  # fmt: skip
                caplog.clear()
                file.write_text(faulty)
                await until(lambda told=told: told in _why(caplog))
                assert urls() == [fleet.url(2), fleet.url(3)]
            file.unlink()
            await until(lambda: "No such file" in _why(caplog))
            assert urls() == [fleet.url(2), fleet.url(3)]
            file.write_text(second)
            await until(lambda: urls() == [fleet.url(3)])
            file.write_text("")
            await until(lambda: not urls())
        await _kill(fleet)

    run(scenario())


def _why(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(str(getattr(record, "why", "")) for record in caplog.records)


def test_found_servers_beside_listed_and_removed_ones(tmp_path: Path) -> None:
    """What the settings and admin calls say goes before what is found."""
    file = tmp_path / "backends.toml"

    async def scenario() -> None:
        fleet = Fleet()
        await fleet.start(3)
        entry = '[[backends]]\nurl = "{}"\nname = "{}"\n'
        file.write_text(
            entry.format(fleet.url(2), "x") + entry.format(fleet.url(3), "own")
            + entry.format(fleet.url(4), "c")
        )  # fmt: skip
        settings = quiet_settings(
            [{"url": fleet.url(2), "name": "own"}],
            discovery={"file": str(file), "interval_s": 0.01},
        )
        router = Router(settings, load=lambda: settings)
        async with serving(router, []):

            def labels() -> list[str]:
                return [b.label for b in router.backends.present]

            # The address of "x" is listed as "own", and the name "own" is taken.
            await until(lambda: labels() == ["own", "c"])
            router.remove_backend("c")
            assert labels() == ["own"]
            router.reload()
            assert labels() == ["own"]
            router.remove_backend("own")
            assert labels() == []
            file.write_text("")
            await until(lambda: router.configuration.found == ())
            file.write_text(entry.format(fleet.url(4), "c"))
            await until(lambda: labels() == ["c"])  # it was gone meanwhile
        await _kill(fleet)

    run(scenario())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kubernetes": {"service": "a", "pool": "b"}}, "only one of"),
        ({"kubernetes": {"selector": "app=x"}}, "selector needs port"),
        ({"kubernetes": {"pool": "x", "port": 1}}, "targetPorts"),
        ({"kubernetes": {"pool": "../x"}}, "pool"),
        ({"kubernetes": {"pool": "x", "api_server": "h"}}, "api_server"),
        ({"dns": ["vllm:8000"]}, "is no address"),
        ({"dns": ["http://u:p@h:1"]}, "is no address"),
        ({"dns": ["http://h:1"], "backend": {"api_key_env": "NOT_SET"}}, "NOT_SET"),
        ({"dns": ["http://h:1"], "backend": {"tls": {"ca": "/gone"}}}, "cannot read"),
    ],
)
def test_faulty_settings_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TailraceError, match=told):
        load(None, {"discovery": given})


def test_outside_of_a_cluster_it_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def scenario() -> None:
        router = Router(quiet_settings([], discovery={"kubernetes": {"pool": "x"}}))
        async with serving(router, []):
            await until(lambda: "this is no pod of Kubernetes" in _why(caplog))

    run(scenario())
