"""Changes at run time: all or nothing, nothing grows, and what needs a restart is told."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.conftest import (
    SSE_HEAD,
    Backend,
    Client,
    Clock,
    Seen,
    World,
    chunked,
    event,
    post,
    run,
    running_backends,
    serving,
    settings_for,
)
from tailrace.errors import TailraceError
from tailrace.router.app import CATCH_UP_S, Router
from tailrace.router.configuration import Configuration, SharedConfigurationStore
from tailrace.router.serve_settings import ServeSettings, load
from tailrace.router.settings import BackendSettings, ClientSettings
from tailrace.router.workers.peer_workers import PeerWorkers
from tailrace.router.workers.worker import join_peers


class File:
    """Settings that can be changed and read again."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def read(self) -> ServeSettings:
        return ServeSettings.model_validate(self.settings)

    def list(self, *backends: Backend, **more: Any) -> None:
        """Name these backends only; ``more``: other settings of theirs."""
        self.settings["backends"] = [{"url": b.url, **more} for b in backends]


@asynccontextmanager
async def running(n: int, **over: Any) -> AsyncIterator[tuple[World, File]]:
    """A router in front of ``n`` backends, of which the first two are in its settings."""
    async with running_backends(n) as backends:
        file = File(settings_for(backends[:2], **over).model_dump(exclude_unset=True))
        file.list(*backends[:2])
        router = Router(file.read(), load=file.read)
        made = World(router, backends, None, None)  # type: ignore[arg-type]
        async with serving(router, made.opened):
            yield made, file


async def admin(w: World, line: str, body: Any = None) -> tuple[int, Any]:
    assert w.router.admin_at is not None
    client = Client(*await asyncio.open_connection(*w.router.admin_at))
    data = b"" if body is None else orjson.dumps(body)
    client.send(
        f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    answer = await client.answer()
    client.writer.close()
    return answer.status, orjson.loads(answer.body)


async def asked(w: World, count: int = 12) -> set[Backend]:
    """Send requests; return who has answered them."""
    before = {b: len(b.seen) for b in w.backends}
    for _ in range(count):
        assert (await w.ask(post())).status == 200
    return {b for b in w.backends if len(b.seen) > before[b]}


async def stream(w: World, backend: Backend) -> tuple[Client, asyncio.Event]:
    """Begin a stream at a backend; it ends when the event is set."""
    go = asyncio.Event()

    async def slow(seen: Seen, reader: Any, writer: Any) -> None:
        writer.write(SSE_HEAD + chunked(event("a"), end=False))
        await go.wait()
        writer.write(chunked(event("b")))

    before = len(backend.seen)
    backend.scripts.append(slow)
    while True:
        client = await w.client()
        client.send(post())
        await client.reader.readuntil(b"\r\n\r\n")
        if len(backend.seen) > before:
            return client, go


async def rest(client: Client) -> None:
    """The stream ends as if nothing had happened."""
    wanted = chunked(event("a"), end=False) + chunked(event("b"))
    assert await client.reader.readexactly(len(wanted)) == wanted


# ---- all or nothing -----------------------------------------------------------------------------

RAISES = "import tailrace\nclass P(tailrace.Policy):\n    def reset(self, n, s):\n        1 / 0\n"
RAISES += "    def scores(self, view):\n        return view.replicas['in_flight'] * 1.0\n"


@pytest.mark.parametrize(
    "mistake",
    [
        "backends = 5",
        "[[backends]\n",
        'limits.nothing = 1\n[[backends]]\nurl = "http://127.0.0.1:1"\n',
        'routing.policy = "nothing"\n[[backends]]\nurl = "http://127.0.0.1:1"\n',
        'routing.fallback = "tailrace"\n[[backends]]\nurl = "http://127.0.0.1:1"\n',
        'routing.policy = "raises.py"\n[[backends]]\nurl = "http://127.0.0.1:1"\n',
        'backends = [{url = "http://h:1"}]\n[routing]\ncanary = "no"\npolicy = "listens.py"\n',
        '[[backends]]\nurl = "http://127.0.0.1:1"\napi_key_env = "IS_NOT_SET"\n',
        '[[backends]]\nurl = "http://127.0.0.1:1"\n[[backends]]\nurl = "http://127.0.0.1:1"\n',
        '[[backends]]\nurl = "http://h:1"\nname = "x"\n[[backends]]\nurl = "http://h:2"\nname="x"\n',
        "backends = []",
        "",
        None,
    ],
)
def test_a_refused_reload_changes_nothing(
    mistake: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raises.py").write_text(RAISES)
    Path("listens.py").write_text(RAISES.replace("1 / 0", "pass").replace("reset", "sent"))
    path = tmp_path / "router.toml"

    async def test() -> None:
        async with running(2, retry={"burst": 7}) as (w, file):
            if mistake is not None:
                path.write_text(mistake)
            w.router._load = lambda: load(path, {})
            before = _state(w.router)
            chooser = w.router.backends.chooser
            for _ in range(3):
                with pytest.raises(TailraceError):
                    w.router.reload()
                assert (await admin(w, "POST /reload"))[0] == 400
            assert _state(w.router) == before
            assert w.router.backends.chooser is chooser
            assert await asked(w) == set(w.backends)
            # And a good one is taken over.
            w.router._load = file.read
            file.settings["retry"] = {"burst": 8}
            w.router.reload()
            assert w.router.dispatcher.context.settings.retry.burst == 8

    run(test())


def _state(router: Router) -> Any:
    backends, context = router.backends, router.dispatcher.context
    return (
        router.configuration, router.settings, context.settings, router.limits,
        [(b.label, b.pool, b.health.state, b.limit) for b in backends.all],
        backends.chooser.policy.name, list(backends.cluster.listeners), len(backends.cluster),
        backends.cluster.replicas["available"].tolist(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("listen", "127.0.0.1:1"),
        ("decisions.folder", "somewhere"),
        ("limits.connect_s", 9.0),
        ("log.level", "error"),
        ("tokenizer", "other.json"),
        ("admin.listen", "off"),
        ("processes", 3),
        ("tokens.source", "auto"),
        ("backends.server", {"speed": 3.0}),
    ],
)
def test_what_needs_a_restart_is_told(path: str, value: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with running(2) as (w, file):
            before = w.router.settings
            group, _, name = path.rpartition(".")
            if group == "backends":
                file.list(*w.backends, server=value)
            elif group:
                file.settings.setdefault(group, {})[name] = value
            else:
                file.settings[name] = value
            file.settings["retry"] = {"burst": 8}
            for _ in range(2):  # until it is restarted
                status, told = await admin(w, "POST /reload")
                assert (status, told["needs_restart"]) == (200, [path])
            assert w.router.settings.retry.burst == 8  # the rest is taken over
            assert w.router.settings.model_copy(update={"retry": before.retry}) == before
            file.settings.pop("processes", None)
            assert await asked(w) == set(w.backends)

    run(test())


def test_settings_that_need_no_restart() -> None:
    async def test() -> None:
        async with running(2) as (w, file):
            file.settings |= {
                "health": {"failures": 9},
                "metrics": {"path": "/metrics", "interval_s": 0.01},
                "admission": {"max_in_flight": 5},
                "decisions": {"keep": 3},
                "lame_duck_s": 1.0,
            }
            assert w.router.reload() == {"added": [], "removed": []}
            assert {b.health.settings.failures for b in w.router.backends.all} == {9}
            assert {b.health.max_in_flight for b in w.router.backends.all} == {5}
            assert w.router.decision_log.settings.keep == 3
            while len(w.router.scraper.failures) < 2:  # metrics are read now
                await asyncio.sleep(0.01)

    run(test())


# ---- nothing grows ------------------------------------------------------------------------------


def test_three_hundred_changes_leave_nothing_behind() -> None:
    async def test() -> None:
        async with running(2) as (w, file):
            kept, spare = w.backends
            for k in range(300):
                file.settings["backends"] = [
                    {"url": kept.url}, {"url": f"http://127.0.0.1:1/{k}", "name": f"n{k}"},
                ]  # fmt: skip
                assert w.router.reload()["added"] == [f"n{k}"]
            file.list(kept, spare)
            w.router.reload()
            w.router.sweep(w.router.clock())
            assert len(w.router.backends.all) == len(w.router.backends.cluster) <= 3
            assert len(w.router.configuration.slots) <= 3
            assert w.router.telemetry.metrics.replicas <= 3
            assert await asked(w) == set(w.backends)
            text = (await _metrics(w)).decode()
            # The last one's number is not needed by another one yet.
            assert set(re.findall(r'"(n\d+)"', text)) <= {"n299"}

    run(test())


async def _metrics(w: World) -> bytes:
    assert w.router.admin_at is not None
    client = Client(*await asyncio.open_connection(*w.router.admin_at))
    client.send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    answer = await client.answer()
    client.writer.close()
    return answer.body


def test_a_cluster_that_has_become_small_decides_as_one() -> None:
    async def test() -> None:
        async with running(2) as (w, file):
            many = [{"url": f"http://127.0.0.1:1/{k}", "name": f"n{k}"} for k in range(30)]
            file.settings["backends"] += many
            w.router.reload()
            assert len(w.router.backends.cluster) == 32
            file.list(*w.backends)
            assert len(w.router.reload()["removed"]) == 30
            w.router.sweep(w.router.clock())
            assert len(w.router.backends.cluster) == len(w.router.backends.all) == 2
            assert await asked(w) == set(w.backends)

    run(test())


def test_what_was_counted_is_not_lost_and_not_given_to_others() -> None:
    async def test() -> None:
        async with running(3) as (w, file):
            a, b, c = w.backends
            await asked(w, 10)
            for _ in range(2):
                file.list(b, c)
                w.router.reload()
                file.list(b, a)
                w.router.reload()
            w.router.sweep(w.router.clock())
            w.router.telemetry.flush()
            counted = w.router.telemetry.requests
            assert sum(counted.values()) == 10
            lines = (await _metrics(w)).decode().splitlines()
            done = {
                line.partition('replica="')[2].partition('"')[0]: float(line.split()[-1])
                for line in lines if line.startswith("tailrace_requests_total{")
            }  # fmt: skip
            assert sum(done.values()) == 10
            ttft = [x for x in lines if x.startswith("tailrace_prompt_tokens_total{")]
            assert any('replica="removed"' in line for line in ttft) == ("removed" in done)

    run(test())


# ---- requests in progress -----------------------------------------------------------------------


def test_the_decision_log_names_backends_that_had_the_same_number(tmp_path: Path) -> None:
    async def test() -> list[tuple[int, str]]:
        async with running(3, decisions={"folder": str(tmp_path)}) as (w, file):
            a, b, c = w.backends
            await asked(w, 10)
            file.list(a)
            w.router.reload()
            file.list(a, c)
            w.router.reload()
            await asked(w, 10)
            return [(k, f"127.0.0.1:{x.port}") for k, x in ((0, a), (1, b), (1, c))]

    wanted = run(test())
    (path,) = tmp_path.glob("*.jsonl")
    lines = [orjson.loads(line) for line in path.read_text().splitlines()]
    found = [(line["replica"], line["backend"]) for line in lines if "replica" in line]
    assert [found.count(pair) for pair in wanted] == [10, 5, 5]


def test_streams_at_removed_backends_go_on_and_keep_their_number() -> None:
    async def test() -> None:
        async with running(6) as (w, file):
            clients = []
            for k in range(4):  # each backend in turn is removed with a stream under way
                client, go = await stream(w, w.backends[k])
                clients.append((client, go))
                file.list(*w.backends[k + 1 : k + 3])
                w.router.reload()
                w.router.sweep(w.router.clock())
                assert await asked(w) == set(w.backends[k + 1 : k + 3])
            held = {b.index for b in w.router.backends.all if b.active}
            assert len(held) == 4
            assert not held & {b.index for b in w.router.backends.present}
            for client, go in clients:
                go.set()
                await rest(client)
            w.assert_quiet()
            file.list(*w.backends[:2])
            w.router.reload()
            file.list(*w.backends[2:4])
            w.router.reload()
            w.router.sweep(w.router.clock())
            assert len(w.router.backends.all) <= 6
            assert await asked(w) == set(w.backends[2:4])
            w.assert_quiet()

    run(test())


def test_a_backend_comes_back_while_its_stream_goes_on() -> None:
    async def test() -> None:
        async with running(3) as (w, file):
            client, go = await stream(w, w.backends[0])
            number = w.router.backends.all[0].index
            for _ in range(3):
                file.list(w.backends[1], w.backends[2])
                w.router.reload()
                assert await asked(w) == set(w.backends[1:])
                file.list(*w.backends[:2])
                w.router.reload()
                assert await asked(w) == set(w.backends[:2])
            assert w.router.backends.all[number].settings.url == w.backends[0].url
            assert w.router.backends.all[number].active == 1
            go.set()
            await rest(client)
            w.assert_quiet()

    run(test())


def test_a_backend_is_renamed() -> None:
    async def test() -> None:
        async with running(2) as (w, file):
            file.settings["backends"][0]["name"] = "first"
            assert w.router.reload() == {"added": [], "removed": []}
            answers = [await w.ask(post()) for _ in range(4)]
            assert "first" in {a.headers["x-tailrace-replica"] for a in answers}
            assert (await admin(w, "POST /backends/first/drain"))[1]["state"] == "draining"
            file.settings["backends"][0]["name"] = "again"
            w.router.reload()
            assert (await admin(w, "GET /backends"))[1][0]["state"] == "draining"

    run(test())


# ---- admin calls --------------------------------------------------------------------------------


def test_backends_by_admin_calls() -> None:
    async def test() -> None:
        async with running(4) as (w, file):
            a, b, c, d = w.backends
            status, added = await admin(w, "POST /backends", {"url": c.url, "name": "c"})
            assert (status, added["name"], added["state"]) == (200, "c", "closed")
            assert await asked(w) == {a, b, c}
            # A reload changes what the file changes, and nothing else.
            assert (await admin(w, "DELETE /backends/0"))[0] == 200
            assert (await admin(w, "POST /backends/c/drain"))[0] == 200
            file.list(a, b, d)
            assert w.router.reload() == {"added": [f"127.0.0.1:{d.port}"], "removed": []}
            assert await asked(w) == {b, d}
            assert (await admin(w, "POST /backends/c/undrain"))[1]["state"] == "closed"
            assert await asked(w) == {b, c, d}
            # One that was removed can be added again, also with other settings.
            status, added = await admin(w, "POST /backends", {"url": a.url, "max_in_flight": 3})
            assert (status, added["url"]) == (200, a.url)
            w.router.reload()
            assert await asked(w) == {a, b, c, d}
            # A backend that the file takes over is the file's.
            file.list(a, b, c)
            w.router.reload()
            assert (await admin(w, "DELETE /backends/c"))[0] == 400  # it has another name there
            file.list(b)
            w.router.reload()
            assert await asked(w) == {a, b}
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize(
    ("line", "body", "status"),
    [
        ("POST /backends", {"url": "nonsense"}, 400),
        ("POST /backends", {"url": "http://127.0.0.1:1", "more": 1}, 400),
        ("POST /backends", {"url": "http://127.0.0.1:1", "api_key_env": "IS_NOT_SET"}, 400),
        ("POST /backends", [], 400),
        ("POST /backends", None, 400),
        ("DELETE /backends/9", None, 400),
        ("DELETE /backends", None, 405),
        ("PUT /backends", None, 405),
        ("POST /backends/9/drain", None, 400),
    ],
)
def test_mistakes_of_admin_calls(line: str, body: Any, status: int) -> None:
    async def test() -> None:
        async with running(2) as (w, _):
            before = _state(w.router)
            assert (await admin(w, line, body))[0] == status
            assert (await admin(w, "POST /backends", {"url": w.backends[0].url}))[0] == 400
            assert _state(w.router) == before
            assert (await admin(w, "DELETE /backends/0"))[0] == 200
            assert (await admin(w, "DELETE /backends/1"))[0] == 400  # the last one
            assert await asked(w) == {w.backends[1]}

    run(test())


# ---- the configuration --------------------------------------------------------------------------


def _configuration(*urls: str) -> Configuration:
    backends = [{"url": url, "server": {"num_blocks": 99}} for url in urls]
    return Configuration.first(ServeSettings.model_validate({"backends": backends}))


def _numbers(configuration: Configuration) -> list[str]:
    return [s.url[-1] if not s.removed_in else "-" for s in configuration.slots]


def test_numbers_are_given_again_when_they_are_idle() -> None:
    always: Callable[[int, int], bool] = lambda number, version: True  # noqa: E731
    never: Callable[[int, int], bool] = lambda number, version: False  # noqa: E731
    c = _configuration("http://a", "http://b", "http://c")
    c = c.without_backend("http://b").placed(9, always)
    assert _numbers(c) == ["a", "-", "c"]
    c = c.with_backend(BackendSettings(url="http://d")).placed(9, never)
    assert _numbers(c) == ["a", "-", "c", "d"]
    c = c.with_backend(BackendSettings(url="http://e")).placed(9, always)
    assert _numbers(c) == ["a", "e", "c", "d"]
    c = c.without_backend("http://d").placed(9, always)
    c = c.without_backend("http://a").placed(9, always)  # the last number is not needed any more
    assert _numbers(c) == ["-", "e", "c"]
    c = c.with_backend(BackendSettings(url="http://a")).placed(9, never)
    assert _numbers(c) == ["a", "e", "c"]  # its own
    with pytest.raises(TailraceError, match="room for 3 backends"):
        c.with_backend(BackendSettings(url="http://f")).placed(3, always)


def test_workers_find_the_latest_configuration(tmp_path: Path) -> None:
    first = _configuration("http://a", "http://b")
    store, other = (SharedConfigurationStore(tmp_path, 9) for _ in range(2))
    assert store.latest() is None
    store.publish(first)
    assert other.latest() == first
    assert "block_size" not in other.latest().backends[0].server.model_fields_set  # type: ignore[union-attr]
    assert other.latest(0) is None
    drained = first.with_drain("http://a", True).placed(9, lambda n, v: True)
    store.publish(drained)
    assert other.latest(0) == drained
    # Two that change the same version at the same time: the second has to look first.
    with pytest.raises(TailraceError, match="at the same time"):
        other.publish(first.with_drain("http://b", True))
    latest = drained
    for _ in range(40):
        latest = latest.with_drain("http://b", True).placed(9, lambda n, v: True)
        store.publish(latest)
    assert other.latest(1) == latest
    with pytest.raises(TailraceError, match="at the same time"):
        other.publish(drained)
    assert len(list(tmp_path.iterdir())) < 20


def test_a_worker_that_cannot_take_over_a_change_is_reported(tmp_path: Path) -> None:
    """It keeps its settings, tries again, and can itself make the next change."""
    bad = {"name": "a", "key_file": str(tmp_path / "no_such_file")}

    async def test() -> None:
        folder = tmp_path / "shared"
        folder.mkdir()
        backend, clock = Backend(), Clock()
        await backend.start()
        file = File(settings_for([backend]).model_dump(exclude_unset=True))
        broken: list[dict[str, Any]] = []

        def part(settings: ServeSettings) -> ServeSettings:
            clients = tuple(ClientSettings.model_validate(c) for c in broken)
            return settings.model_copy(update={"clients": clients})

        SharedConfigurationStore(folder, 9).publish(Configuration.first(file.read()))
        routers = [
            Router(file.read(), load=file.read, clock=clock, part=of,
                   store=SharedConfigurationStore(folder, 9))
            for of in (lambda settings: settings, part)
        ]  # fmt: skip
        for number, router in enumerate(routers):
            await join_peers(router, PeerWorkers(folder, number, 2))
            await router.start()
        first, second = (World(router, [backend], None, None) for router in routers)  # type: ignore[arg-type]

        async def reload(w: World) -> tuple[int, Any]:
            return await admin(w, "POST /reload")

        try:
            assert (await reload(first))[0] == 200
            broken.append(bad)
            file.settings["lame_duck_s"] = 2.0
            status, answer = await reload(first)
            assert status == 500
            assert "worker 1: client a: cannot read keys" in answer["error"]["message"]
            assert [r.settings.lame_duck_s for r in routers] == [2.0, 5.0]
            behind = [(await admin(w, "GET /status"))[1]["behind"] for w in (first, second)]
            assert all("cannot read keys" in why for why in behind)
            # Another change of one that is all right does not hide it, nor can the other make one.
            assert (await reload(first))[0] == 500
            assert (await reload(second))[0] == 400
            broken.clear()
            second.router.sweep(clock())
            assert second.router.behind  # not tried all the time
            clock.ahead_s += CATCH_UP_S
            second.router.sweep(clock())
            assert (second.router.behind, second.router.settings.lame_duck_s) == ("", 2.0)
            file.settings["lame_duck_s"] = 3.0
            assert (await reload(second))[0] == 200
            assert [r.settings.lame_duck_s for r in routers] == [3.0, 3.0]
        finally:
            for router in routers:
                await router.stop()
            await backend.kill()

    run(test())


# ---- roles of policies --------------------------------------------------------------------------


def test_roles_are_given_by_a_call_vetoed_and_given_back() -> None:
    async def main() -> None:
        async with running(2) as (w, file):
            own = file.read().routing.policy
            status, roles = await admin(w, "GET /routing")
            assert (status, roles["policy"], roles["settings_policy"]) == (200, own, own)
            given = {"policy": "random", "canary": "lmetric", "canary_share": 0.25,
                     "canary_block_s": 5.0, "shadow": "load_aware"}  # fmt: skip
            status, roles = await admin(w, "POST /routing", given)
            assert (status, {k: roles[k] for k in given}) == (200, given)
            assert (await admin(w, "GET /status"))[1]["canary"]["block_s"] == 5.0
            assert await asked(w)
            # A reload changes them only if it changes the settings' own.
            assert (await admin(w, "POST /reload"))[0] == 200
            assert (await admin(w, "GET /routing"))[1]["policy"] == "random"
            status, roles = await admin(w, "POST /autopilot/veto")
            assert (status, roles["policy"], roles["canary"]) == (200, own, "")
            assert roles["vetoed"] == ["lmetric", "load_aware", "random"]
            status, why = await admin(w, "POST /routing", {"shadow": "lmetric"})
            assert (status, "was vetoed" in why["error"]["message"]) == (400, True)
            assert (await admin(w, "POST /autopilot/veto"))[0] == 400
            assert (await admin(w, "POST /autopilot/resume"))[1]["vetoed"] == []
            for body, code in ((["lmetric"], 200), ({"a": 1}, 400)):
                assert (await admin(w, "POST /autopilot/veto", body))[0] == code
            assert (await admin(w, "POST /routing", {"policy": "lmetric"}))[0] == 400
            assert (await admin(w, "POST /autopilot/resume"))[0] == 200
            assert (await admin(w, "POST /routing", {"policy": "random"}))[0] == 200
            file.settings["routing"] = {"policy": "lmetric"}
            assert (await admin(w, "POST /reload"))[0] == 200
            assert (await admin(w, "GET /routing"))[1]["policy"] == "lmetric"
            for wrong in ({"policy": "nonsense"}, {"nonsense": 1}, {"canary_share": 2}):
                assert (await admin(w, "POST /routing", wrong))[0] == 400
            assert (await admin(w, "GET /routing"))[1]["policy"] == "lmetric"
            assert await asked(w)

    run(main())
