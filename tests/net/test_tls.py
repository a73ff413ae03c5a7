"""Certificates: what is wrong with files is told in a sentence, and changed ones are used."""

import asyncio
import datetime
import logging
import socket
import ssl
from pathlib import Path

import pytest
import uvloop

from certificates import Authority, Pair, files
from tailrace.errors import TailraceError
from tailrace.net import tls
from tailrace.net.tls import TlsContexts, TlsFiles, TlsListener, client_context, server_context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.sign("server")


def test_faulty_files_are_told_in_a_sentence(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    other = authority.sign("other")
    locked = authority.sign("locked", password="secret")
    empty = tmp_path / "empty.pem"
    empty.touch()
    gone = tmp_path / "gone.pem"
    for given, told in (
        (TlsFiles(pair.certificate, gone), f"cannot read the key {gone}: No such file"),
        (TlsFiles(gone, pair.key), f"cannot read the certificate {gone}"),
        (TlsFiles(pair.certificate, other.key), "does not belong to the certificate"),
        (TlsFiles(pair.certificate, None), "there is no private key in"),
        (TlsFiles(empty, pair.key), f"there is no certificate in {empty}"),
        (TlsFiles(locked.certificate, locked.key), "needs a password"),
        (TlsFiles(*pair, empty), f"there is no certificate in {empty}"),
    ):
        with pytest.raises(TailraceError, match=told):
            server_context(given)
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(TailraceError, match=f"cannot use .*{broken}"):
        client_context(TlsFiles(ca=broken))
    with pytest.raises(TailraceError, match="cannot use certificate"):
        server_context(TlsFiles(broken, pair.key))


def test_when_a_certificate_expires(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    utc = datetime.UTC
    assert tls.expires_at(pair.certificate) == datetime.datetime(2049, 1, 1, tzinfo=utc)
    late = authority.sign("late", until="20600203040506Z")  # years from 2050 on are written in full
    assert tls.expires_at(late.certificate) == datetime.datetime(2060, 2, 3, 4, 5, 6, tzinfo=utc)
    damaged = tmp_path / "damaged.pem"
    text = pair.certificate.read_text()
    for cut in range(0, len(text), 17):
        damaged.write_text(text[:cut] + "\n-----END CERTIFICATE-----\n")
        tls.expires_at(damaged)  # never raises
    damaged.write_text("nothing")
    assert tls.expires_at(damaged) is None


def test_expired_certificates_are_warned_of_once(
    authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    contexts = TlsContexts()
    old = authority.sign("old", until="20210101000000Z")
    kept = [contexts.server(files(p), ("h2",)) for p in (old, pair)]
    with caplog.at_level(logging.WARNING, "tailrace.net"):
        contexts.refresh()
        contexts.refresh()
    (record,) = caplog.records
    assert record.getMessage() == "a certificate has expired"
    assert record.file == str(old.certificate)  # type: ignore[attr-defined]
    assert len(kept) == 2


def replace(path: Path, text: str) -> None:
    """Put another file in its place, as a rename does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_contexts_are_shared_and_forgotten(pair: Pair) -> None:
    contexts = TlsContexts()
    first = contexts.server(files(pair), ("h2",))
    assert contexts.server(files(pair), ("h2",)) is first
    assert contexts.server(files(pair), ("http/1.1",)) is not first
    one = contexts.client(TlsFiles())
    assert contexts.client(TlsFiles()) is one
    del first, one
    assert not contexts._servers
    assert not contexts._clients


def test_changed_files_are_used_and_faulty_ones_are_not(
    authority: Authority, pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Pair(tmp_path / "c.pem", tmp_path / "k.pem")
    for path, source in zip(own, pair, strict=True):
        path.write_text(source.read_text())
    contexts = TlsContexts()
    used = contexts.server(files(own), ())
    first = used.context
    contexts.refresh()
    assert used.context is first
    other = authority.sign("changed")
    replace(own.certificate, other.certificate.read_text())  # the key follows a moment later
    contexts.refresh()
    assert used.context is first
    assert [r.getMessage() for r in caplog.records] == ["the former certificates stay in use"]
    contexts.refresh()
    assert len(caplog.records) == 1, "told once for each change"
    replace(own.key, other.key.read_text())
    contexts.refresh()
    assert used.context is not first
    own.key.unlink()
    contexts.refresh()
    assert used.context is not first


class Echo(asyncio.Protocol):
    """Sends back what it receives, and counts itself."""

    made: list["Echo"]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        type(self).made.append(self)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


def test_handshakes_are_bounded_and_end(
    authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers that connect and say nothing are closed, and never more than some of them wait."""

    async def scenario() -> None:
        Echo.made = []
        context = TlsContexts().server(files(pair), ())
        server = socket.create_server(("127.0.0.1", 0))
        listener = TlsListener(server, context, Echo, handshake_s=0.3)
        port = server.getsockname()[1]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        silent[1][1].write(b"GET / HTTP/1.1\r\n\r\n")  # no TLS
        for reader, _ in silent:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(100)
        while listener.handshakes:
            await asyncio.sleep(0.01)
        assert not Echo.made
        # Two places, both taken: the third connection is closed at once.
        listener._handshake_s = 60.0
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while len(listener.handshakes) < 2:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        listener.abort()
        while listener.handshakes:
            await asyncio.sleep(0.01)
        trusting = client_context(TlsFiles(ca=authority.ca))
        reader, secure = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        secure.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert len(Echo.made) == 1
        for _, each in (*silent, *waiting, (reader, writer), (reader, secure)):
            each.close()
        listener.close()

    async def limited() -> None:
        async with asyncio.timeout(30):
            await scenario()

    monkeypatch.setattr(tls, "MAX_HANDSHAKES", 2)
    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(limited())


def test_old_protocols_are_refused(pair: Pair) -> None:
    assert server_context(files(pair)).minimum_version is ssl.TLSVersion.TLSv1_2
    assert client_context().minimum_version is ssl.TLSVersion.TLSv1_2
