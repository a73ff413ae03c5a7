"""The admin listener: metrics, status, drain and reload. It never forwards anything."""

import hmac
import ipaddress
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from tailrace.errors import TailraceError
from tailrace.net.byte_budget import ByteBudget
from tailrace.net.head_cache import RequestHeadCache
from tailrace.net.heads import RequestHead
from tailrace.net.limits import ConnectionLimits
from tailrace.net.server import ClientConnection, HttpRequest, Work, error_body

JSON = b"application/json"
MAX_CONNECTIONS = 256
#: Answered by the worker that was asked, without its peers, and without a token: they hold no data
#: and are asked by those who watch over processes.
OWN_PATHS = frozenset(("/", "/health", "/live", "/ready"))
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"DELETE"))


class AdminResponse(NamedTuple):
    """What an admin endpoint responds."""

    status: int
    content_type: bytes
    body: bytes
    extra: bytes = b""
    """Header lines, each ended by CRLF."""


class TakesBody(NamedTuple):
    """An endpoint that is given the body of the request too, after the parts of the path."""

    endpoint: Callable[..., AdminResponse]


Endpoint = Callable[..., AdminResponse] | TakesBody
#: Endpoints by method and path. A part of a path in braces is given to the endpoint as text. GET
#: serves HEAD too.
AdminRoutes = Mapping[tuple[str, str], Endpoint]


class Admin:
    """Serves the admin endpoints of a table."""

    def __init__(self, routes: AdminRoutes, token: str | None) -> None:
        self.limits = ConnectionLimits(body_bytes=65_536)
        self.heads = RequestHeadCache()
        self.held = ByteBudget()
        self.now = 0.0
        self.clients: set[ClientConnection] = set()
        self.routes = routes
        self.ask_workers: Callable[[HttpRequest, str], Work] | None = None
        """Asks all workers for a path, if this is one of several: then it answers for all."""
        self._token = token.encode() if token else None

    def opened(self, client: ClientConnection) -> bool:
        """Accept a client unless there are too many."""
        self.clients.add(client)
        return len(self.clients) <= MAX_CONNECTIONS

    def closed(self, client: ClientConnection) -> None:
        """Forget a client."""
        self.clients.discard(client)

    def refused(self, status: int, why: str) -> None:
        """Requests that were not accepted are not counted here."""

    def check_head(self, head: RequestHead) -> None:
        """Bodies are short here: all are read."""

    def handle(self, request: HttpRequest) -> Work | None:
        """Respond at once, or ask all workers first."""
        refused = self._refused(request)
        path = request.path.decode("latin-1")
        if refused is None and self.ask_workers is not None and path not in OWN_PATHS:
            return self.ask_workers(request, path)
        status, kind, body, extra = refused or self.response(request)
        request.client.respond(request.head, status, body, content_type=kind, extra=extra)
        return None

    def _refused(self, request: HttpRequest) -> AdminResponse | None:
        """Return why a request is not served, if so."""
        head = request.head
        if head.method in (b"GET", b"HEAD") and request.path.decode("latin-1") in OWN_PATHS:
            return None  # the page asks for the token itself
        if self._token is not None:
            given = head.lower.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                return error(401, "the admin listener needs its token")
        elif not _is_direct(head.lower.get(b"host", b"")):
            # A page in a browser could reach a local port through a name it controls.
            return error(403, "call the admin listener by its address, or set admin.token_env")
        if head.method not in _METHODS:
            return error(405, "GET, POST and DELETE are served here")
        if head.method in (b"POST", b"DELETE") and b"origin" in head.lower:
            return error(403, "changes are not taken from pages of other origins")
        return None

    def response(self, request: HttpRequest) -> AdminResponse:
        """Return what the endpoint of a request responds."""
        path, method = request.path.decode("latin-1"), request.head.method.decode()
        wanted = "GET" if method == "HEAD" else method
        known = False
        for (served, pattern), endpoint in self.routes.items():
            given = _match(pattern, path)
            if given is None:
                continue
            known = True
            if served != wanted:
                continue
            try:
                if isinstance(endpoint, TakesBody):
                    return endpoint.endpoint(*given, request.body)
                return endpoint(*given)
            except TailraceError as failure:
                return error(400, str(failure))
        if known:
            return error(405, f"{path[:80]} does not serve {method}")
        return error(404, f"there is no {path[:80]}")


def json(value: Any) -> AdminResponse:
    """Respond with JSON."""
    return AdminResponse(200, JSON, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def error(status: int, why: str) -> AdminResponse:
    """Respond with an error in OpenAI's form."""
    return AdminResponse(status, JSON, error_body(status, why))


def _match(pattern: str, path: str) -> list[str] | None:
    """Return the parts of a path that stand for those in braces; None: it is another path."""
    if "{" not in pattern:
        return [] if path == pattern else None
    parts = path.strip("/").split("/")
    wanted = pattern.strip("/").split("/")
    if len(parts) != len(wanted):
        return None
    given = []
    for part, name in zip(parts, wanted, strict=True):
        if name.startswith("{"):
            given.append(part)
        elif part != name:
            return None
    return given


def _is_direct(host: bytes) -> bool:
    """Whether a Host header is an address or localhost, not some other name."""
    name = host.decode("latin-1").strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name == "localhost" or not name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
