"""The router as a whole: admin, models, reload, shutdown, and the command."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from router.conftest import (
    SSE_HEAD,
    Backend,
    Client,
    Seen,
    World,
    chunked,
    event,
    post,
    raw,
    reply,
    run,
    run_with_process,
    settings_for,
    world,
)
from tailrace.cli import serve
from tailrace.errors import TailraceError
from tailrace.router.app import Router
from tailrace.router.serve_settings import load


async def admin(w: World, line: str, *headers: str) -> tuple[int, Any]:
    assert w.router.admin_at is not None
    reader, writer = await asyncio.open_connection(*w.router.admin_at)
    client = Client(reader, writer)
    lines = "".join(f"{h}\r\n" for h in (headers or ("Host: 127.0.0.1:1",)))
    client.send(f"{line} HTTP/1.1\r\n{lines}\r\n".encode())
    answer = await client.answer()
    writer.close()
    is_json = answer.headers["content-type"] == "application/json"
    return answer.status, orjson.loads(answer.body) if is_json else answer.body


def test_health_is_the_routers_own() -> None:
    async def test() -> None:
        async with world(2) as w:
            request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            assert orjson.loads((await w.ask(request)).body) == {"status": "ok", "available": 2}
            for backend in w.router.backends.all:
                backend.health.drain(True)
            assert (await w.ask(request)).status == 503
            assert not w.backends[0].seen

    run(test())


def test_models_of_all_backends() -> None:
    async def test() -> None:
        async with world(3) as w:
            w.backends[0].default = reply(b'{"object":"list","data":[{"id":"a"},{"id":"b"}]}')
            w.backends[1].default = reply(b'{"object":"list","data":[{"id":"b"},{"id":"c"}]}')
            await w.backends[2].kill()
            request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n\r\n"
            answer = await w.ask(request)
            assert sorted(m["id"] for m in orjson.loads(answer.body)["data"]) == ["a", "b", "c"]
            assert w.backends[0].seen[0].headers["authorization"] == "Bearer k"
            for backend in w.backends[:2]:
                backend.default = reply(b'{"error":"key"}', "401 No")
            answer = await w.ask(request)
            assert (answer.status, answer.body) == (401, b'{"error":"key"}')
            for backend in w.backends[:2]:
                backend.default = reply(b"nonsense")
            assert (await w.ask(request)).status == 503

    run(test())


def test_admin_pages() -> None:
    async def test() -> None:
        async with world(2) as w:
            await w.ask(post())
            status, body = await admin(w, "GET /status")
            assert status == 200
            assert (body["policy"], body["in_flight"], len(body["replicas"])) == (
                "round_robin", 0, 2,
            )  # fmt: skip
            assert (await admin(w, "GET /metrics"))[0] == 200
            assert [b["name"] for b in (await admin(w, "GET /backends"))[1]] == ["b0", "b1"]
            assert (await admin(w, "GET /v1/models"))[0] == 404
            assert (await admin(w, "POST /nothing"))[0] == 404
            assert (await admin(w, "DELETE /backends"))[0] == 405
            assert (await admin(w, "POST /reload"))[0] == 400
            assert not any(s for b in w.backends for s in b.seen if "models" in s.line)

    run(test())


def test_metrics_and_status_of_a_whole_router() -> None:
    async def test() -> None:
        backend = Backend()
        await backend.start()
        router = Router(settings_for([backend]))
        await router.start()
        w = World(router, [backend], None, None)  # type: ignore[arg-type]
        assert (await w.ask(post())).status == 200
        status, body = await admin(w, "GET /status")
        assert (status, body["requests"]) == (200, {"done": 1})
        assert b'outcome="done"' in (await admin(w, "GET /metrics"))[1]
        assert (await admin(w, "GET /status/history"))[0] == 200
        assert b"<html" in (await admin(w, "GET /"))[1]
        for opened in w.opened:
            opened.writer.close()
        await router.stop()
        await backend.kill()

    run(test())


def test_drain_and_back() -> None:
    async def test() -> None:
        async with world(2) as w:
            assert (await admin(w, "POST /backends/0/drain"))[1]["state"] == "draining"
            replicas = {(await w.ask(post())).headers["x-tailrace-replica"] for _ in range(4)}
            assert replicas == {"b1"}
            assert (await admin(w, "POST /backends/b0/undrain"))[1]["state"] == "closed"
            replicas = {(await w.ask(post())).headers["x-tailrace-replica"] for _ in range(4)}
            assert replicas == {"b0", "b1"}
            assert (await admin(w, "POST /backends/7/drain"))[0] == 400

    run(test())


def test_strangers_at_the_admin_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "t0k")

    async def test() -> None:
        async with world(1) as w:
            drain = "POST /backends/0/drain"
            assert (await admin(w, drain, "Host: evil.example:1"))[0] == 403
            assert (await admin(w, drain, "Host: 127.0.0.1:1", "Origin: http://evil"))[0] == 403
            assert w.router.backends.all[0].health.available
        async with world(1, admin={"listen": "127.0.0.1:0", "token_env": "TOKEN"}) as w:
            assert (await admin(w, "GET /status"))[0] == 401
            assert (await admin(w, "GET /status", "Host: x", "Authorization: Bearer no"))[0] == 401
            good = ("Host: router", "Authorization: Bearer t0k")
            assert (await admin(w, "GET /status", *good))[0] == 200

    run(test())


def test_reload_while_streams_go_on(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"

    def write(*backends: Backend, policy: str = "round_robin") -> None:
        entries = "".join(f'[[backends]]\nurl = "{b.url}"\n' for b in backends)
        file.write_text(
            f'listen = "127.0.0.1:0"\nadmin.listen = "127.0.0.1:0"\nmetrics.path = "off"\n'
            f'routing.policy = "{policy}"\nrouting.limit_ms = 10000\nhealth.interval_s = 1000\n'
            f"{entries}"
        )

    async def test() -> None:
        a, b, c = Backend(), Backend(), Backend()
        for backend in (a, b, c):
            await backend.start()
        write(a, b)
        router = Router(load(file, {}), load=lambda: load(file, {}))
        await router.start()
        w = World(router, [a, b, c], None, None)  # type: ignore[arg-type]
        go = asyncio.Event()

        async def slow(seen: Seen, reader: Any, writer: Any) -> None:
            writer.write(SSE_HEAD + chunked(event("a"), end=False))
            await go.wait()
            writer.write(chunked(event("b")))

        a.scripts.append(slow)
        client = await w.client()
        client.send(post())
        await client.reader.readuntil(b"\r\n\r\n")
        write(b, c, policy="least_outstanding")
        assert router.reload() == {"added": [f"127.0.0.1:{c.port}"],
                                   "removed": [f"127.0.0.1:{a.port}"]}  # fmt: skip
        assert router.backends.chooser.policy.name == "least_outstanding"
        before = len(a.seen)
        for _ in range(6):
            assert (await w.ask(post())).status == 200
        assert len(a.seen) == before
        assert b.seen
        assert c.seen
        go.set()
        rest = chunked(event("a"), end=False) + chunked(event("b"))
        assert await client.reader.readexactly(len(rest)) == rest
        # A file with a mistake changes nothing; a backend that comes back has its old number.
        file.write_text("backends = 5")
        with pytest.raises(TailraceError, match="backends"):
            router.reload()
        assert (await w.ask(post())).status == 200
        write(a, b)
        router.reload()
        assert [t.health.removed for t in router.backends.all] == [False, False, True]
        for _ in range(6):
            assert (await w.ask(post())).status == 200
        assert len(a.seen) > before
        w.assert_quiet()
        for opened in w.opened:
            opened.writer.close()
        await router.stop()
        for backend in (a, b, c):
            await backend.kill()

    run(test())


def test_the_metrics_of_a_removed_backend_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"

    def write(*numbers: int) -> None:
        urls = "".join(f'[[backends]]\nurl = "http://127.0.0.1:{n}"\n' for n in numbers)
        file.write_text(f'listen = "127.0.0.1:0"\nrouting.policy = "round_robin"\n{urls}')

    async def test() -> None:
        write(1, 2)
        router = Router(load(file, {}), load=lambda: load(file, {}))
        write(2)
        router.reload()
        await router.scraper.scrape()
        assert router.scraper.failures == {1: 1}
        router.decision_log.close()

    run(test())


def test_reload_brings_new_health_settings(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"

    def write(failures: int, more: str = "") -> None:
        file.write_text(
            'listen = "127.0.0.1:0"\nadmin.listen = "off"\nmetrics.path = "off"\n'
            f'routing.policy = "round_robin"\nhealth.failures = {failures}\n'
            f'[[backends]]\nurl = "http://127.0.0.1:1"\n{more}'
        )

    write(3)
    router = Router(load(file, {}), load=lambda: load(file, {}))
    health = router.backends.all[0].health
    health.failure(1.0, "x")
    write(2, '[[backends]]\nurl = "http://127.0.0.1:2"\n')
    router.reload()
    assert [t.health.settings.failures for t in router.backends.all] == [2, 2]
    health.failure(1.0, "x")  # the first one counts still
    assert health.state == "open"
    # A backend that was out for a while has the new ones too.
    write(5)
    router.reload()
    write(5, '[[backends]]\nurl = "http://127.0.0.1:2"\n')
    router.reload()
    back = router.backends.all[1].health
    for _ in range(4):
        back.failure(1.0, "x")
    assert back.state == "closed"
    router.decision_log.close()


def test_an_orderly_end() -> None:
    async def test() -> None:
        async with world(1) as w:
            go = asyncio.Event()

            async def slow(seen: Seen, reader: Any, writer: Any) -> None:
                await go.wait()
                await raw(SSE_HEAD + chunked(event("a")))(seen, reader, writer)

            w.backends[0].scripts.append(slow)
            idle, busy = await w.client(), await w.client()
            idle.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await idle.answer()
            busy.send(post())
            await w.backends[0].arrived.wait()
            stopping = asyncio.create_task(w.router.stop(drain_s=100))
            assert await idle.closed() == b""
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection(*w.router.listen_at)
            assert not stopping.done()
            go.set()
            answer = await busy.answer()
            assert (answer.body, answer.complete) == (event("a"), True)
            busy.writer.close()
            await stopping
            assert await busy.closed() == b""
            w.assert_quiet()

    run(test())


def test_readiness_fails_before_connections_are_refused() -> None:
    async def status(where: tuple[str, int], path: str) -> int:
        client = Client(*await asyncio.open_connection(*where))
        client.send(f"GET {path} HTTP/1.1\r\nHost: {where[0]}\r\n\r\n".encode())
        found = (await client.answer()).status
        client.writer.close()
        return found

    async def test() -> None:
        backend = Backend()
        await backend.start()
        os.environ["LAME_TOKEN"] = "secret"
        admin = {"listen": "127.0.0.1:0", "token_env": "LAME_TOKEN"}
        router = Router(settings_for([backend], admin=admin, lame_duck_s=1000))
        started = asyncio.Event()
        serving = asyncio.create_task(router.run(started.set))
        await started.wait()
        w = World(router, [backend], None, None)  # type: ignore[arg-type]
        assert router.admin_at is not None
        both = (router.listen_at, router.admin_at)
        assert [await status(at, p) for at in both for p in ("/live", "/ready")] == [200] * 4
        kept = [await w.client() for _ in range(3)]
        for one in kept:
            one.send(post())
            assert "connection" not in (await one.answer()).headers
        os.kill(os.getpid(), signal.SIGTERM)
        while not router.draining:
            await asyncio.sleep(0)
        assert [await status(at, "/ready") for at in both] == [503, 503]
        assert [await status(at, "/live") for at in both] == [200, 200]
        assert await status(router.listen_at, "/health") == 503
        assert (await w.ask(post())).status == 200  # new connections are served
        backend.scripts = [reply(b"{}"), raw(SSE_HEAD + chunked(b"data: [DONE]\n\n"))]
        live = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
        for one, request in zip(kept, (post(), post(), live), strict=True):
            one.send(request)
            answer = await one.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await one.reader.read() == b""
        assert await status(router.admin_at, "/status") == 401
        assert not serving.done()
        os.kill(os.getpid(), signal.SIGTERM)  # who is in a hurry says it twice
        assert await serving == 0
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection(*router.listen_at)
        for opened in w.opened:
            opened.writer.close()
        await backend.kill()

    run(test())


def test_the_end_has_a_limit() -> None:
    async def test() -> None:
        async with world(1, admission={"max_in_flight": 1}) as w:

            async def never(seen: Seen, reader: Any, writer: Any) -> None:
                await reader.read()

            w.backends[0].default = never
            busy, waiting = await w.client(), await w.client()
            busy.send(post())
            await w.backends[0].arrived.wait()
            waiting.send(post())
            while not len(w.router.dispatcher.queue):
                await asyncio.sleep(0)
            await w.router.stop(drain_s=0.01)
            await w.backends[0].lost.wait()
            w.assert_quiet()

    run(test())


def test_an_admin_connection_outlives_the_first_sweep() -> None:
    async def test() -> None:
        async with world(1) as w:
            assert w.router.admin_at is not None
            client = Client(*await asyncio.open_connection(*w.router.admin_at))
            while not w.router.admin.clients:
                await asyncio.sleep(0)
            w.router.sweep(w.clock())
            client.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await client.answer()).status == 200
            client.writer.close()

    run(test())


def test_probes_take_out_what_does_not_answer() -> None:
    async def test() -> None:
        async with world(2) as w:
            w.backends[0].healthy = False
            for _ in range(3):
                failing = await w.router.probe()
                assert [t.label for t, _ in failing] == ["b0"]
            assert w.router.backends.all[0].health.state == "open"
            assert not w.router.backends.cluster.available(0)

    run(test())


def test_an_address_that_is_taken() -> None:
    async def test() -> None:
        async with world(1) as w:
            host, port = w.router.listen_at
            again = Router(settings_for(w.backends, listen=f"{host}:{port}"))
            with pytest.raises(TailraceError, match="listens there already"):
                await again.start()
            again = Router(settings_for(w.backends, admin={"listen": f"{host}:{port}"}))
            with pytest.raises(TailraceError, match="listens there already"):
                await again.start()

    run(test())


# ---- the command --------------------------------------------------------------------------------


def test_help_says_what_matters() -> None:
    out = CliRunner().invoke(serve.command, ["--help"]).output
    for word in ("--backend", "--config", "--policy", "--listen", "--admin", "SIGTERM", "off"):
        assert word in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there is no backend"),
        (["-b", "nonsense"], "is no address"),
        (["-b", "http://h:1", "--policy", "nothing"], "unknown policy"),
        (["-b", "http://h:1", "--listen", "x"], "host:port"),
        (["-b", "http://h:1", "--admin", "0.0.0.0:1"], "token_env"),
        (["-b", "http://h:1", "--set", "limits.nothing=1"], "unknown setting"),
        (["--config", "/nowhere.toml"], "cannot read"),
    ],
)
def test_mistakes_are_told_in_a_sentence(args: list[str], message: str) -> None:
    error = CliRunner().invoke(serve.command, args).exception
    assert isinstance(error, TailraceError)
    assert message in str(error)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.cli.console.find_spec", lambda name: None)
    error = CliRunner().invoke(serve.command, ["-b", "http://h:1"]).exception
    assert isinstance(error, TailraceError)
    assert "pip install 'tailrace[serve]'" in str(error)


CODE = (
    "from tailrace.cli.serve import command; import sys; sys.exit(command(standalone_mode=False))"
)


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Backend()
        await backend.start()
        file = tmp_path / "serve.toml"
        file.write_text(
            f'[[backends]]\nurl = "{backend.url}"\n[[backends]]\nurl = "http://127.0.0.1:1"\n'
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CODE, "--config", str(file), "--listen", "127.0.0.1:0",
            "--admin", "127.0.0.1:0", "--policy", "round_robin", "--set", "lame_duck_s=0",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert b"2 backends with policy round_robin" in await process.stdout.readline()
            line = (await process.stdout.readline()).decode()
            assert b"status page on" in await process.stdout.readline()
            port = int(line.rpartition(":")[2].partition("/")[0])
            for _ in range(4):
                client = Client(*await asyncio.open_connection("127.0.0.1", port))
                client.send(post())
                assert (await client.answer()).status == 200
                client.writer.close()
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
            assert process.returncode == 0
            assert b"warning: backend http://127.0.0.1:1 does not answer" in errors
            lines = [orjson.loads(x) for x in errors.splitlines() if x.startswith(b"{")]
            assert {"reloaded", "stopped"} <= {entry["message"] for entry in lines}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await backend.kill()

    run_with_process(test())


@pytest.mark.parametrize(("alive", "code"), [(True, 0), (False, 1)])
def test_check_only_asks(alive: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.router.observe.logs.to_stderr", lambda level: None)

    async def test() -> None:
        backend = Backend()
        await backend.start()
        if not alive:
            await backend.kill()
        try:
            result = await asyncio.to_thread(
                CliRunner().invoke, serve.command,
                ["-b", backend.url, "--check", "-p", "round_robin"], standalone_mode=False,
            )  # fmt: skip
        finally:
            await backend.kill()
        assert f"{int(alive)} of 1 backends answer" in result.output
        assert result.return_value == code

    run(test())
