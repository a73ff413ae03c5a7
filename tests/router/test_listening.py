"""Sockets that listen: all addresses of a name on one port, also right after another process."""

import socket
from typing import Any

import pytest

from tailrace.errors import TailraceError
from tailrace.router import listening
from tailrace.router.workers.supervisor import reserve

BOTH = [
    (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
]
MISSING = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))


def resolve(monkeypatch: pytest.MonkeyPatch, found: list[Any]) -> None:
    """Let every name stand for these addresses; this machine's hosts file may say less."""

    def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
        return [(f, t, p, c, (a[0], port, *a[2:])) for f, t, p, c, a in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def connect(family: int, host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.connect((host, port))


@pytest.mark.parametrize("shared", [False, True])
def test_a_name_of_two_families_gets_one_port(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        resolve(patched, [*BOTH, MISSING])
        if shared:  # as several workers do, one after the other
            where, kept = reserve("localhost:0")
            groups = [listening.listen(where, shared=True) for _ in range(2)]
            kept.close()
        else:
            groups = [listening.listen("localhost:0")]
    for sockets in groups:
        assert [s.family for s in sockets] == [socket.AF_INET6, socket.AF_INET]
    (port,) = {s.getsockname()[1] for sockets in groups for s in sockets}
    connect(socket.AF_INET6, "::1", port)
    connect(socket.AF_INET, "127.0.0.1", port)
    for sockets in groups:
        listening.close(sockets)


def test_a_port_that_one_family_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        resolve(monkeypatch, BOTH)
        for attempt in (lambda: listening.listen(f"localhost:{port}"),
                        lambda: reserve(f"localhost:{port}")):  # fmt: skip
            with pytest.raises(TailraceError, match="something listens there already"):
                attempt()


def test_a_family_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, [MISSING, BOTH[1]])
    sockets = listening.listen("localhost:0")
    assert [s.getsockname()[0] for s in sockets] == ["127.0.0.1"]
    listening.close(sockets)
    resolve(monkeypatch, [MISSING])
    with pytest.raises(TailraceError, match="cannot listen on localhost:0"):
        listening.listen("localhost:0")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("then", [False, True])
def test_connections_that_have_ended_do_not_keep_the_port(first: bool, then: bool) -> None:
    """One process after several, several after one: nobody has to wait for a minute."""
    (server,) = listening.listen("127.0.0.1:0", shared=first)
    where = f"127.0.0.1:{server.getsockname()[1]}"
    with socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        connection.close()  # whoever closes first keeps the port for a while
        assert client.recv(1) == b""
    server.close()
    if then:
        where, kept = reserve(where)
        listening.close(listening.listen(where, shared=True))
        kept.close()
    else:
        listening.close(listening.listen(where))


def test_an_address_that_nobody_has() -> None:
    with pytest.raises(TailraceError, match="cannot listen on"):
        listening.listen("no.such.name.invalid:0")
