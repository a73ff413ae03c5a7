"""The second listener: metrics, status, drain and reload. It never forwards anything."""

import hmac
import ipaddress
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from tailrace.errors import TailraceError
from tailrace.net.head_cache import RequestHeadCache
from tailrace.net.server import ClientConnection, HttpRequest, Work, error_body
from tailrace.router.settings import LimitSettings
from tailrace.router.workers import aggregate
from tailrace.router.workers.peer_workers import Gathering, Siblings

if TYPE_CHECKING:
    from tailrace.router.app import Router

JSON = b"application/json"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 256
#: What a worker answers without asking the others.
_OWN_PATHS = frozenset(("/", "/health"))


class Answer(NamedTuple):
    """What a page answers."""

    status: int
    content_type: bytes
    body: bytes
    extra: bytes = b""
    """Header lines, each ended by CRLF."""


class Admin:
    """Answers on the admin listener."""

    def __init__(self, router: "Router", token: str | None) -> None:
        self.limits = LimitSettings(body_bytes=65_536)
        self.heads = RequestHeadCache()
        self.now = 0.0
        self.clients: set[ClientConnection] = set()
        self.pages: dict[str, Callable[[], Answer]] = {
            "/health": lambda: Answer(200, JSON, b'{"status":"ok"}'),
            "/metrics": lambda: Answer(200, TEXT, router.telemetry.render()),
            "/status": lambda: _json(router.status()),
            "/backends": lambda: _json(router.status()["replicas"]),
        }
        """What GET answers, by path; others may add to it."""
        self.parts: dict[str, Callable[[], Answer]] = {}
        """What another worker is answered instead, by path."""
        self.siblings: Siblings | None = None
        """All workers, if this is one of several: then it answers for all of them."""
        self._router = router
        self._token = token.encode() if token else None

    def opened(self, client: ClientConnection) -> bool:
        """Take in a client."""
        self.clients.add(client)
        return len(self.clients) <= MAX_CONNECTIONS

    def closed(self, client: ClientConnection) -> None:
        """Forget a client."""
        self.clients.discard(client)

    def refused(self, status: int, why: str) -> None:
        """Nothing is counted here."""

    def handle(self, request: HttpRequest) -> Work | None:
        """Answer at once, or ask all workers first."""
        refused = self._refused(request)
        path = request.path.decode("latin-1")
        siblings = self.siblings
        if refused is None and siblings is not None and path not in _OWN_PATHS:
            return Gathering(request, siblings, path, partial(aggregate.answers, path))
        status, kind, body, extra = refused or self._answer(request.head.method, path)
        request.client.respond(request.head, status, body, content_type=kind, extra=extra)
        return None

    def _refused(self, request: HttpRequest) -> Answer | None:
        """Return why a request is not served, if so."""
        head = request.head
        is_page = head.method == b"GET" and request.path == b"/" and "/" in self.pages
        if is_page and self._token is not None:
            return None  # it holds no data, and asks for the token itself
        if self._token is not None:
            given = head.lower.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                return _error(401, "the admin listener needs its token")
        elif not _is_direct(head.lower.get(b"host", b"")):
            # A page in a browser could reach a local port through a name it controls.
            return _error(403, "call the admin listener by its address, or set admin.token_env")
        if head.method not in (b"GET", b"HEAD", b"POST"):
            return _error(405, "GET and POST are served here")
        if head.method == b"POST" and b"origin" in head.lower:
            return _error(403, "changes are not taken from pages of other origins")
        return None

    def _answer(self, method: bytes, path: str) -> Answer:
        if method == b"POST":
            return self._change(path)
        page = self.pages.get(path)
        return page() if page is not None else _error(404, f"there is no {path[:80]}")

    def _change(self, path: str) -> Answer:
        try:
            if path == "/reload":
                return _json(self._router.reload())
            parts = path.strip("/").split("/")
            if len(parts) == 3 and parts[0] == "backends" and parts[2] in ("drain", "undrain"):
                return _json(self._router.drain(parts[1], parts[2] == "drain"))
        except TailraceError as error:
            return _error(400, str(error))
        return _error(404, f"there is no {path[:80]}")


def _json(value: Any) -> Answer:
    return Answer(200, JSON, orjson.dumps(value))


def _error(status: int, why: str) -> Answer:
    return Answer(status, JSON, error_body(status, why))


def _is_direct(host: bytes) -> bool:
    """Whether a Host header is an address or localhost, not a name somebody made up."""
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
