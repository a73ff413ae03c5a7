"""Listening sockets: all addresses of a host, on one port, with or without TLS."""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tailrace.errors import TailraceError
from tailrace.net.tls import TlsContext, TlsListener
from tailrace.router.settings import address

BACKLOG = 4096
#: Ports tried until one is free for all addresses of a host, if the system chooses it.
_TRIES = 20
#: A name may stand for addresses of a family that this machine does not have.
_NO_FAMILY = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT))


@dataclass(slots=True)
class RouterListener:
    """What listens on host:port."""

    at: tuple[str, int]
    """Address and port; of several addresses the first."""
    _servers: Sequence[asyncio.AbstractServer | TlsListener]

    def close(self) -> None:
        """Accept no more connections."""
        for server in self._servers:
            server.close()

    def abort(self) -> None:
        """End TLS handshakes in progress."""
        for server in self._servers:
            if isinstance(server, TlsListener):
                server.abort()


async def serve(
    where: str,
    make: Callable[[], asyncio.Protocol],
    *,
    shared: bool,
    tls: TlsContext | None = None,
    handshake_s: float = 10.0,
) -> RouterListener:
    """Listen on host:port; ``make`` returns the protocol of a connection.

    ``tls``: with TLS, whose handshake may take ``handshake_s``. ``shared``: see :func:`listen`.
    """
    sockets = listen(where, shared=shared)
    name = sockets[0].getsockname()
    at = str(name[0]), int(name[1])
    if tls is not None:
        return RouterListener(at, [TlsListener(each, tls, make, handshake_s) for each in sockets])
    loop = asyncio.get_running_loop()
    return RouterListener(
        at, [await loop.create_server(make, sock=each, backlog=BACKLOG) for each in sockets]
    )


def listen(where: str, *, shared: bool = False) -> list[socket.socket]:
    """Listen on host:port; several addresses of a host get the same port, also if that is 0.

    ``shared``: other processes of this user may listen there too, and the system spreads
    connections over them.
    """
    sockets = bind(where, reuse_port=shared)
    try:
        for each in sockets:
            each.listen(BACKLOG)
    except OSError as error:
        close(sockets)
        raise _refused(where, error) from None
    return sockets


def bind(where: str, *, reuse_port: bool) -> list[socket.socket]:
    """Bind all addresses of host:port; nothing listens there yet, so there are no connections."""
    host, port = address(where)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys((family, target) for family, _, _, _, target in found))
        for left in reversed(range(_TRIES if port == 0 else 1)):
            try:
                return _bind_all(addresses, reuse_port=reuse_port)
            except OSError as error:
                if left == 0 or error.errno != errno.EADDRINUSE:
                    raise
    except OSError as error:
        raise _refused(where, error) from None
    raise AssertionError


def _bind_all(
    addresses: Sequence[tuple[int, tuple[object, ...]]], *, reuse_port: bool
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, (host, port, *rest) in addresses:
            try:
                each = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                missing = error
                continue
            sockets.append(each)
            # Both: without the first, connections that have ended keep the port for a minute.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            taken = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            try:
                each.bind((host, taken, *rest))
            except OSError as error:
                if error.errno not in _NO_FAMILY:
                    raise
                missing = error
                sockets.pop().close()
    except OSError:
        close(sockets)
        raise
    if not sockets:
        raise missing or OSError(errno.EADDRNOTAVAIL, "there is no such address")
    return sockets


def close(sockets: Iterable[socket.socket]) -> None:
    """Close all."""
    for each in sockets:
        with suppress(OSError):
            each.close()


def _refused(where: str, error: OSError) -> TailraceError:
    in_use = error.errno == errno.EADDRINUSE
    why = "something listens there already" if in_use else error.strerror or str(error)
    return TailraceError(f"cannot listen on {where}: {why}; choose another port")
