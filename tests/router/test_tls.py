"""The router with TLS on both sides, on IPv4 and IPv6: certificates change, and nothing breaks."""

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority, Pair, files
from router.conftest import (
    SSE_HEAD,
    Answer,
    Backend,
    Client,
    chunked,
    event,
    post,
    quiet_settings,
    run,
    serving,
)
from tailrace.errors import TailraceError
from tailrace.net.tls import client_context, server_context
from tailrace.router.app import Router
from tailrace.router.core import CERTIFICATES_S
from tailrace.router.serve_settings import load


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.sign("server")


@asynccontextmanager
async def secure(
    authority: Authority, pair: Pair, *, host: str = "127.0.0.1", server: Any = None, **over: Any
) -> AsyncIterator[tuple[Router, Backend, list[Client]]]:
    """A router with TLS before a server with TLS; ``server``: what else is set for the backend."""
    backend, opened = Backend(), []
    await backend.start(host=host, tls=server_context(files(pair)))
    where = f"[{host}]:0" if ":" in host else f"{host}:0"
    tls = {"certificate": str(pair.certificate), "key": str(pair.key)}
    given = {"url": backend.url, "tls": {"ca": str(authority.ca)}, **(server or {})}
    settings = quiet_settings(
        [given], **{"listen": where, "tls": tls, "admin": {"listen": where, "tls": tls}, **over}
    )
    router = Router(settings)
    try:
        async with serving(router, opened):
            yield router, backend, opened
    finally:
        await backend.kill()


async def connect(
    at: tuple[str, int] | None, authority: Authority, opened: list[Client], own: Pair | None = None
) -> Client:
    assert at is not None
    context = client_context(files(own, authority.ca))
    client = Client(*await asyncio.open_connection(*at, ssl=context))
    opened.append(client)
    return client


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_requests_and_large_bodies_over_tls(authority: Authority, pair: Pair, host: str) -> None:
    async def scenario() -> None:
        async with secure(authority, pair, host=host) as (router, backend, opened):
            client = await connect(router.listen_at, authority, opened)
            for size in (10, 3_000_000):
                client.send(post(body=b'{"prompt":"%b"}' % (b"a" * size)))
                answer = await client.answer()
                assert (answer.status, answer.body) == (200, b'{"ok":true}')
                assert len(backend.seen[-1].body) == size + 13
            backend.scripts.append(stream(asyncio.Event(), wait=False))
            client.send(post())
            assert (await client.answer()).body == event("a") + event("b")
            admin = await connect(router.admin_at, authority, opened)
            shown = f"[{host}]" if ":" in host else host
            admin.send(f"GET /backends HTTP/1.1\r\nhost: {shown}\r\n\r\n".encode())
            answer = await admin.answer()
            assert answer.status == 200
            assert backend.url.removeprefix("https://").encode() in answer.body
            assert backend.seen[0].headers["host"] == f"{shown}:{backend.port}"

    run(scenario())


def stream(go: asyncio.Event, *, wait: bool = True) -> Any:
    """A response of two events; the second comes when it may."""

    async def script(seen: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(event("a"), end=False))
        if wait:
            await go.wait()
        writer.write(chunked(event("b")))
        await writer.drain()

    return script


def test_changed_certificates_are_used_and_no_connection_is_dropped(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    async def scenario() -> None:
        own = Pair(tmp_path / "c.pem", tmp_path / "k.pem")
        first, second = pair, authority.sign("second")
        for path, source in zip(own, first, strict=True):
            path.write_text(source.read_text())
        listener = {"certificate": str(own.certificate), "key": str(own.key)}
        async with secure(authority, pair, tls=listener) as (router, backend, opened):
            go = asyncio.Event()
            backend.scripts.append(stream(go))
            streaming = await connect(router.listen_at, authority, opened)
            streaming.send(post())
            idle = await connect(router.listen_at, authority, opened)
            assert name_of(idle) == "server"
            await backend.arrived.wait()
            for path, source in zip(own, second, strict=True):
                path.write_text(source.read_text())
            router.sweep(router.clock() + CERTIFICATES_S)
            later = await connect(router.listen_at, authority, opened)
            assert name_of(later) == "second"
            go.set()
            answer = await streaming.answer()
            assert answer.complete
            assert answer.body == event("a") + event("b")
            idle.send(post())
            assert (await idle.answer()).status == 200
            # A key that does not fit: the certificate before stays in use.
            own.key.write_text(first.key.read_text())
            router.sweep(router.clock() + 2 * CERTIFICATES_S)
            assert name_of(await connect(router.listen_at, authority, opened)) == "second"

    run(scenario())


def name_of(client: Client) -> str:
    """The name in the certificate of the other side."""
    shown: Any = client.writer.get_extra_info("peercert")
    return str(dict(entry[0] for entry in shown["subject"])["commonName"])


def test_clients_need_a_certificate_where_it_is_asked_for(authority: Authority, pair: Pair) -> None:
    async def scenario() -> None:
        listener = {
            "certificate": str(pair.certificate), "key": str(pair.key),
            "client_ca": str(authority.ca),
        }  # fmt: skip
        async with secure(authority, pair, tls=listener) as (router, backend, opened):
            known = await connect(router.listen_at, authority, opened, authority.sign("known"))
            known.send(post())
            assert (await known.answer()).status == 200
            came = b""
            with contextlib.suppress(OSError):  # which one depends on the version of TLS
                unknown = await connect(router.listen_at, authority, opened)
                unknown.send(post())
                came = await unknown.reader.read()
            assert not came
            assert len(backend.seen) == 1

    run(scenario())


def test_a_backend_sees_the_routers_certificate(authority: Authority, pair: Pair) -> None:
    async def scenario() -> None:
        own = authority.sign("router")
        asking = server_context(files(pair, authority.ca))
        backend = Backend()
        await backend.start(tls=asking)
        tls = {"ca": str(authority.ca)}
        for more, good in (({}, False), ({"certificate": own.certificate, "key": own.key}, True)):
            settings = quiet_settings([{"url": backend.url, "tls": tls | more}])
            router, opened = Router(settings), list[Client]()
            async with serving(router, opened):
                failing = await router.probe()
                assert bool(failing) is not good
                if failing:
                    assert "TLS failed" in failing[0][1] or "closed" in failing[0][1]
        await backend.kill()

    run(scenario())


def test_why_a_backends_certificate_is_not_accepted(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    expired = authority.sign("expired", until="20210101000000Z")
    elsewhere = authority.sign("elsewhere", names="DNS:elsewhere.example")

    async def why(shown: Pair, **tls: Any) -> str:
        backend = Backend()
        await backend.start(tls=server_context(files(shown)))
        router = Router(quiet_settings([{"url": backend.url, "tls": tls}]))
        try:
            failing = await router.probe()
            return failing[0][1] if failing else ""
        finally:
            await router.stop()
            await backend.kill()

    async def scenario() -> None:
        ca = str(authority.ca)
        assert await why(pair, ca=ca) == ""
        assert "certificate has expired" in await why(expired, ca=ca)
        for unknown in ({}, {"ca": str(stranger.ca)}):
            told = await why(pair, **unknown)
            assert told.startswith("cannot connect: its certificate is not accepted: ")
            assert "issuer" in told or "self-signed" in told
        assert "IP address mismatch" in await why(elsewhere, ca=ca)
        assert await why(elsewhere, ca=ca, server_name="elsewhere.example") == ""

    run(scenario())


def test_faulty_settings_are_told_in_a_sentence(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    gone = tmp_path / "gone.pem"
    backend = {"url": "https://h:1"}
    for data, told in (
        ({"tls": {"certificate": pair.certificate, "key": gone}}, f"cannot read the key {gone}"),
        ({"tls": {"key": pair.key}}, "tls: .*need a certificate"),
        ({"admin": {"tls": {"certificate": gone}}}, f"cannot read the certificate {gone}"),
        ({"backends": [backend | {"tls": {"ca": gone}}]}, f"cannot read the authorities {gone}"),
        ({"backends": [backend | {"tls": {"key": gone}}]}, "key needs a certificate"),
        ({"backends": [{"url": "http://h:1", "tls": {"ca": gone}}]}, "tls is for https"),
    ):
        with pytest.raises(TailraceError, match=told):
            load(None, {"backends": [backend]} | data)


def test_clients_that_end_their_side_or_break_off(authority: Authority, pair: Pair) -> None:
    """TLS knows no half-open connections: a client that ends its side has gone."""

    async def scenario() -> None:
        async with secure(authority, pair) as (router, backend, opened):

            async def endless(seen: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
                writer.write(SSE_HEAD + chunked(event("a"), end=False))
                await reader.read()
                raise ConnectionResetError

            for abort in (False, True):
                backend.arrived.clear()
                backend.lost.clear()
                backend.scripts.append(endless)
                client = await connect(router.listen_at, authority, opened)
                client.send(post())
                await backend.arrived.wait()
                (client.abort if abort else client.writer.close)()
                await backend.lost.wait()
            while router.clients or router.dispatcher.active:
                await asyncio.sleep(0.01)

    run(scenario())


def test_a_reload_changes_certificates_for_backends(authority: Authority, pair: Pair) -> None:
    async def scenario() -> None:
        backend, opened = Backend(), list[Client]()
        await backend.start(tls=server_context(files(pair)))
        wrong = quiet_settings([{"url": backend.url}])
        right = quiet_settings([{"url": backend.url, "tls": {"ca": str(authority.ca)}}])
        router = Router(wrong, load=lambda: right)
        async with serving(router, opened):
            assert await router.probe()
            router.reload()
            assert not await router.probe()
        await backend.kill()

    run(scenario())


async def asked(router: Router, peer: str, *headers: str) -> Answer:
    reader, writer = await asyncio.open_connection(*router.listen_at, local_addr=(peer, 0))
    client = Client(reader, writer)
    client.send(post("/v1/completions", b'{"prompt":"x"}', *headers))
    answer = await client.answer()
    writer.close()
    return answer


def test_forwarded_headers_are_believed_only_from_listed_proxies() -> None:
    invented = "X-Forwarded-For: 10.9.9.9", "Forwarded: for=10.9.9.9", "X-Real-IP: 10.9.9.9"

    async def scenario(trusted: list[str], peer: str, sent: tuple[str, ...]) -> dict[str, str]:
        backend = Backend()
        await backend.start()
        router = Router(quiet_settings([{"url": backend.url}], trusted_proxies=trusted))
        async with serving(router, []):
            assert (await asked(router, peer, *sent)).status == 200
        await backend.kill()
        names = ("x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-proto")
        return {name: backend.seen[0].headers[name] for name in names
                if name in backend.seen[0].headers}  # fmt: skip

    assert run(scenario([], "127.0.0.1", invented)) == {}
    assert run(scenario(["127.0.0.2"], "127.0.0.1", invented)) == {"x-forwarded-for": "127.0.0.1"}
    sent = "X-Forwarded-For: 10.9.9.9", "x-forwarded-for: 192.0.2.7", "X-Forwarded-Proto: https"
    assert run(scenario(["127.0.0.0/30"], "127.0.0.1", sent)) == {
        "x-forwarded-for": "10.9.9.9, 192.0.2.7, 127.0.0.1", "x-forwarded-proto": "https",
    }  # fmt: skip


def test_what_is_no_network_is_told() -> None:
    with pytest.raises(TailraceError, match=re.escape("'10.0.0.0/40' is no address or network")):
        load(None, {"backends": [{"url": "http://h:1"}], "trusted_proxies": ["10.0.0.0/40"]})


def test_ssl_default_context_is_strict() -> None:
    context = client_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
