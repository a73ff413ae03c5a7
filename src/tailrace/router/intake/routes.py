"""The endpoints that clients can reach, and what kind of request each one takes.

To add an endpoint that servers answer, add a line to ``INFERENCE`` and, if its body is read in a
new way, a reader to ``request_body.py``. Everything else of a server (metrics, weights, LoRA
adapters, sleep, shutdown) is out of reach unless the setting ``paths`` names it.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

#: Kinds of requests that the router answers itself.
LIVE, READY, MODELS = "live", "ready", "models"
#: A request that is passed on without being read.
OTHER = "other"

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")


class Route(NamedTuple):
    """An endpoint for clients."""

    path: str
    """Exact path, or with ``/*`` at its end all paths below it."""
    kind: str
    """How its body is read and how the request counts in the ledger, see ``RequestBody.kind``."""
    methods: frozenset[bytes] = frozenset((b"POST",))
    needs_key: bool = True
    """Whether clients must show a key, if there are any."""


_READ = frozenset((b"GET", b"HEAD"))
_ANY = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))

#: Answered by the router.
OWN = (
    Route("/live", LIVE, _READ, needs_key=False),
    Route("/ready", READY, _READ, needs_key=False),
    Route("/health", READY, _READ, needs_key=False),
    Route("/v1/models", MODELS, _READ),
    Route("/v1/models/*", MODELS, _READ),
)

#: Answered by the servers.
INFERENCE = (
    Route("/v1/chat/completions", "chat"),
    Route("/v1/completions", "completion"),
    Route("/v1/responses", "response"),
    Route("/v1/messages", "message"),
    Route("/v1/messages/count_tokens", "count_tokens"),
    Route("/v1/embeddings", "embedding"),
    Route("/v1/rerank", "rerank"),
    Route("/v2/rerank", "rerank"),
    Route("/rerank", "rerank"),
    Route("/v1/score", "score"),
    Route("/score", "score"),
    Route("/pooling", "pooling"),
    Route("/classify", "classify"),
    Route("/tokenize", "tokenize"),
    Route("/detokenize", "detokenize"),
)

#: What is passed on by default.
INFERENCE_PATHS = tuple(route.path for route in INFERENCE)


@lru_cache(maxsize=256)
def kind_of(path: str) -> str:
    """Return the kind of request a path stands for, whatever is before ``/v1/``."""
    plain = path.partition("?")[0].rstrip("/")
    best = max((r for r in INFERENCE if _ends(plain, r.path)), key=_length, default=None)
    return best.kind if best is not None else OTHER


def _length(route: Route) -> int:
    return len(route.path)


def _ends(path: str, known: str) -> bool:
    """Whether a path is a known one, perhaps with another prefix instead of ``/v1``."""
    return path.endswith((known, known.removeprefix("/v1")))


class RouteTable:
    """Routes by path. Only the very bytes of a listed path lead to it.

    Nothing is decoded or normalised: a path with ``%``, ``..``, ``//`` or another case is another
    path, which is not served, so the router and a server cannot understand it differently.
    """

    def __init__(self, paths: Iterable[str] = INFERENCE_PATHS) -> None:
        """``paths``: what is passed on to servers, see the setting ``paths``."""
        self._exact: dict[bytes, Route] = {}
        self._below: list[tuple[bytes, Route]] = []
        for path in paths:
            kind = kind_of(path)
            self._add(Route(path, kind, _ANY) if kind == OTHER else Route(path, kind))
            for route in INFERENCE:
                if path.endswith("/*") and route.path.startswith(path[:-1]):
                    self._add(route)
        for route in OWN:
            self._add(route)

    def _add(self, route: Route) -> None:
        path = route.path.encode("ascii")
        if path.endswith(b"/*"):
            self._below.insert(0, (path[:-1], route))
        else:
            self._exact[path] = route

    def find(self, path: bytes) -> Route | None:
        """Return the route of a path; None: it is not served."""
        route = self._exact.get(path)
        if route is None:
            for prefix, below in self._below:
                if path.startswith(prefix) and (below.kind == MODELS or _is_plain(path)):
                    return below
        return route


def is_listable(path: str) -> bool:
    """Whether a path can be listed in the settings: plain, perhaps with ``/*`` at its end."""
    plain = path.removesuffix("/*")
    return path == "/*" or (plain[:1] == "/" and plain.isascii() and _is_plain(plain.encode()))


def _is_plain(path: bytes) -> bool:
    """Whether every server reads a path the same way: no empty or dotted parts, no escapes."""
    return all(
        part and part not in (b".", b"..") and _PLAIN.issuperset(part)
        for part in path[1:].split(b"/")
    )
