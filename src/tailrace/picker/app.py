"""The endpoint picker: the router's state and policies behind a gRPC listener for a proxy."""

import ipaddress
from typing import Any

from tailrace.errors import TailraceError
from tailrace.net.grpc import UNIMPLEMENTED, GrpcCall
from tailrace.net.http2 import Headers, Http2Connection, Http2Stream, StreamHandler
from tailrace.picker import health, messages
from tailrace.picker.stream import PickStream
from tailrace.router import listening
from tailrace.router.core import RouterCore
from tailrace.router.listening import RouterListener
from tailrace.router.proxy.backends import Backend
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings

#: Where the picker listens unless something else is set.
DEFAULT_LISTEN = "127.0.0.1:9002"


def endpoint_of(backend: BackendSettings) -> str:
    """Return a backend's address as a proxy needs it: ip:port. Raise if it has no such."""
    origin = backend.origin
    try:
        address = ipaddress.ip_address(origin.host)
    except ValueError:
        raise TailraceError(
            f"backend {backend.url}: the proxy needs an address, not a name; "
            "write it like http://10.0.0.1:8000"
        ) from None
    if origin.prefix:
        raise TailraceError(f"backend {backend.url}: a picker cannot add a path; remove it")
    return f"[{address}]:{origin.port}" if address.version == 6 else f"{address}:{origin.port}"


class Picker(RouterCore):
    """The endpoint picker. Make it, ``await start()``, and at the end ``await stop()``."""

    def __init__(self, settings: ServeSettings, **given: Any) -> None:
        """Arguments as for :class:`RouterCore`."""
        self._endpoints: dict[str, str] = {}
        self._keys: dict[str, bytes | None] = {}
        self._check_settings(settings)
        super().__init__(settings, **given)
        self.health = health.HealthService(lambda: self.readiness()[0] == 200)
        self.connections: set[Http2Connection] = set()
        self._messages = self.settings.pick.stream_messages_per_s  # that may be read now
        self._refilled_at = self.clock()

    # Endpoints.

    def endpoint(self, backend: Backend) -> str:
        """Return a backend as ip:port."""
        url = backend.settings.url
        found = self._endpoints.get(url)
        if found is None:
            found = self._endpoints[url] = endpoint_of(backend.settings)
        return found

    def backend_at(self, endpoint: str) -> Backend | None:
        """Return the backend at ip:port, if there is one."""
        return next((b for b in self.backends.present if self.endpoint(b) == endpoint), None)

    def outside(self, subset: frozenset[str]) -> frozenset[int]:
        """Return the numbers of the backends that are not in a subset: ip:port, or ip for all."""
        out = []
        for backend in self.backends.all:
            endpoint = self.endpoint(backend)
            host = endpoint.rpartition(":")[0]
            if endpoint not in subset and host not in subset and host.strip("[]") not in subset:
                out.append(backend.index)
        return frozenset(out)

    def key_of(self, backend: Backend) -> bytes | None:
        """Return the key that a backend needs, if any."""
        url = backend.settings.url
        if url not in self._keys:
            key = backend.settings.api_key()
            self._keys[url] = None if key is None else key.encode()
        return self._keys[url]

    # Which responses are read.

    def reads_response(self, streams: bool) -> bool:
        """Whether to read the body of a response that begins now; ``streams``: part by part."""
        settings = self.settings.pick
        if settings.responses != "auto":
            return settings.responses == "all"
        if not streams:
            return True
        now, rate = self.clock(), settings.stream_messages_per_s
        self._messages = min(rate, self._messages + (now - self._refilled_at) * rate)
        self._refilled_at = now
        return self._messages > 0

    def read_part(self) -> None:
        """Count a part of a response that was read."""
        self._messages -= 1

    # The listener (net.http2.ConnectionOwner).

    async def _listen(self) -> RouterListener:
        settings, limits = self.settings, self.settings.limits

        def connection() -> Http2Connection:
            return Http2Connection(
                self, streams=limits.connections, header_bytes=limits.header_bytes,
                start_s=limits.header_s, stall_s=limits.client_stall_s, frame_s=limits.body_s,
                clock=self.clock,
            )  # fmt: skip

        return await listening.serve(
            settings.listen, connection, shared=settings.share_port,
            tls=self._server_tls(settings.tls, "h2"), handshake_s=limits.header_s,
        )  # fmt: skip

    def opened(self, connection: Http2Connection) -> bool:
        """Accept a connection unless there are too many."""
        self.connections.add(connection)
        return len(self.connections) <= self.settings.limits.connections

    def closed(self, connection: Http2Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)

    def stream(self, stream: Http2Stream, headers: Headers) -> StreamHandler | None:
        """Begin with a call of the proxy."""
        path = next((value for name, value in headers if name == b":path"), b"")
        limits = self.settings.limits
        if path == messages.METHOD:
            call = GrpcCall(stream, limits.body_bytes + limits.header_bytes)
            call.handler = PickStream(self, call)
            return call
        call = GrpcCall(stream, health.MAX_MESSAGE)
        if path in (health.CHECK, health.WATCH):
            self.health.begin(call, path)
        else:
            call.end(UNIMPLEMENTED, "there is no such method")
            return None
        return call

    # What a router core asks for.

    @property
    def open_connections(self) -> int:
        """Open connections of proxies."""
        return len(self.connections)

    def _shutdown_clients(self) -> None:
        for connection in tuple(self.connections):
            connection.shutdown()

    def _abort_clients(self) -> None:
        for connection in tuple(self.connections):
            connection.abort()

    def _check_clients(self, now: float) -> None:
        self.health.refresh()
        for connection in tuple(self.connections):
            connection.check(now)

    def _check_settings(self, settings: ServeSettings) -> None:
        for backend in settings.backends:
            endpoint_of(backend)

    def _take_over(self, settings: ServeSettings) -> None:
        del settings
        self._endpoints.clear()
        self._keys.clear()
