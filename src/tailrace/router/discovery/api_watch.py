"""Reads a Kubernetes API: lists objects, then watches for changes.

The official client needs a thread for each watch, 50 MB and five times the CPU time per change
(benchmarks/bench_watch.py); this is the one part of it that is needed here. A watch goes on from
the version of the last object or bookmark. When the API no longer knows that version (410),
everything is listed again.
"""

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from tailrace.errors import TailraceError
from tailrace.net.client import Call, FetchError, Pool
from tailrace.net.heads import ResponseHead
from tailrace.net.origin import Origin
from tailrace.net.tls import TlsContexts, TlsFiles
from tailrace.router.discovery.settings import ACCOUNT, KubernetesSettings

#: How long one watch lasts, s; then it is begun again where it was.
WATCH_S = 120
#: What a watch may last beyond that before its connection counts as dead, s.
GRACE_S = 15.0
#: Time for a page of a list, s, and its objects.
LIST_S, PAGE = 30.0, 500
#: Pause after a failure, s: at first, and at most.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: A watch that lasted for so long counts as a success, s.
GOOD_S = 5.0
#: Longest line of a watch: one object, in bytes.
MAX_LINE = 4 * 2**20

_log = logging.getLogger("tailrace.router")

Object = dict[str, Any]


class KubernetesError(Exception):
    """The API did not answer as it should."""


class ExpiredError(KubernetesError):
    """The API no longer knows the version to go on from."""


class KubernetesApi:
    """A connection to the API of a cluster."""

    def __init__(self, settings: KubernetesSettings, tls: TlsContexts | None = None) -> None:
        """Raise if it is not known where the API is."""
        url = settings.api_server or _own_api()
        origin = Origin.parse(url)
        self._token_file = settings.token_file
        context = None
        if origin.tls:
            ca = settings.ca if settings.ca is not None and settings.ca.exists() else None
            context = (tls or TlsContexts()).client(TlsFiles(ca=ca))
        self._pool = Pool(origin, connect_s=5.0, tls=context)

    def close(self) -> None:
        """Close all connections."""
        self._pool.abort()

    def _lines(self) -> bytes:
        """Return headers, with the token as it is now: tokens are renewed every hour."""
        lines = b"accept: application/json\r\nuser-agent: tailrace\r\n"
        token = _read(self._token_file)
        return lines + b"authorization: Bearer %b\r\n" % token if token else lines

    async def _open(self, path: str, query: dict[str, str]) -> "_Stream":
        target = f"{path}?{urlencode(query)}".encode("latin-1")
        stream = _Stream(self._pool, b"GET", self._pool.head(b"GET", target, 0, self._lines()), b"")
        stream.start(fresh=True)
        return stream

    async def list(self, path: str, query: dict[str, str]) -> tuple[list[Object], str]:
        """Return all objects and the version of the list; raise ``KubernetesError``."""
        items: list[Object] = []
        more = ""
        while True:
            asked = {**query, "limit": str(PAGE), **({"continue": more} if more else {})}
            stream = await self._open(path, asked)
            try:
                async with asyncio.timeout(LIST_S):
                    body = await stream.whole_body()
            except TimeoutError:
                raise KubernetesError(f"no answer within {LIST_S:g} s") from None
            finally:
                stream.cancel()
            page = _object(body)
            items += page.get("items") or []
            about = page.get("metadata") or {}
            more = about.get("continue") or ""
            if not more:
                return items, str(about.get("resourceVersion", ""))

    async def watch(
        self, path: str, query: dict[str, str], version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Yield events (ADDED, MODIFIED, DELETED, BOOKMARK) from a version on.

        It ends when the API ends it, which it does after WATCH_S. Raises ``KubernetesError``.
        """
        asked = {
            **query, "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        stream = await self._open(path, asked)
        try:
            async with asyncio.timeout(WATCH_S + GRACE_S):
                async for line in stream.lines():
                    event = _object(line)
                    kind, found = str(event.get("type")), event.get("object") or {}
                    if kind == "ERROR":
                        raise _failure(int(found.get("code") or 0), str(found.get("message")))
                    yield kind, found
        except TimeoutError:
            raise KubernetesError("the watch did not end in time") from None
        finally:
            stream.cancel()


class _Stream(Call):
    """A response as it comes."""

    __slots__ = ("_ended", "_parts", "_status", "_wake", "_why")

    def __init__(self, pool: Pool, method: bytes, head: bytes, body: bytes) -> None:
        super().__init__(pool, method, head, body)
        self._status = 0
        self._parts: list[bytes] = []
        self._ended = False
        self._why = ""
        self._wake = asyncio.Event()

    def began(self, head: ResponseHead) -> None:
        self._status = head.status

    def received(self, data: bytes) -> None:
        self._parts.append(data)
        self._wake.set()

    def ended(self) -> None:
        self._ended = True
        self._wake.set()

    def broken(self, why: str, *, connecting: bool) -> None:
        del connecting
        self._why = why
        self._wake.set()

    async def _more(self) -> bytes:
        """Return what has come; empty at the end of the response."""
        while not self._parts:
            if self._why:
                raise KubernetesError(self._why)
            if self._ended:
                return b""
            self._wake.clear()
            await self._wake.wait()
        parts, self._parts = self._parts, []
        return b"".join(parts)

    async def whole_body(self) -> bytes:
        """Return the body; raise if it reports an error."""
        body = b""
        while part := await self._more():
            body += part
            if len(body) > 16 * MAX_LINE:
                raise KubernetesError("a list is too long")
        if self._status != 200:
            raise _failure(self._status, _message(body))
        return body

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the body; raise if it reports an error."""
        rest = b""
        while part := await self._more():
            if self._status != 200:
                raise _failure(self._status, _message(part))
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > MAX_LINE:
                raise KubernetesError("an object is too long")
            for line in lines:
                if line.strip():
                    yield line
        if self._status != 200:
            raise _failure(self._status, "")


class ObjectWatch:
    """Keeps what matters of the objects of a list up to date."""

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        query: dict[str, str],
        keep: Callable[[Object], Any],
        changed: Callable[[], None],
    ) -> None:
        """``keep`` returns what to keep of an object; ``changed`` is called after changes."""
        self._api = api
        self._path = path
        self._query = query
        self._keep = keep
        self._changed = changed
        self._version = ""
        self.objects: dict[str, Any] = {}
        """What was kept of each object, by its uid."""

    async def run(self) -> None:
        """List and watch until cancelled. What is known stays while the API cannot be reached."""
        pause_s, told = FIRST_PAUSE_S, ""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            why = ""
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ExpiredError:
                self._version = ""
            except (KubernetesError, FetchError, TailraceError) as error:
                why = str(error)
            if loop.time() - began > GOOD_S:
                pause_s, told = FIRST_PAUSE_S, ""
            if why and why != told:
                _log.error("the Kubernetes API fails", extra={"path": self._path, "why": why})
                told = why
            # Also after a watch that ended well: an API may end each at once.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _list(self) -> None:
        items, version = await self._api.list(self._path, self._query)
        self.objects = {_uid(item): self._keep(item) for item in items}
        self._version = version or "0"
        self._changed()

    async def _watch(self) -> None:
        events = self._api.watch(self._path, self._query, self._version)
        async with aclosing(events):
            async for kind, item in events:
                self._enter(kind, item)

    def _enter(self, kind: str, item: Object) -> None:
        version = (item.get("metadata") or {}).get("resourceVersion")
        if version:
            self._version = str(version)
        if kind in ("ADDED", "MODIFIED"):
            self.objects[_uid(item)] = self._keep(item)
        elif kind == "DELETED":
            self.objects.pop(_uid(item), None)
        else:
            return  # a bookmark, or something new
        self._changed()


def _uid(item: Object) -> str:
    about = item.get("metadata") or {}
    return str(about.get("uid") or about.get("name"))


def _failure(status: int, message: str) -> KubernetesError:
    if status == 410:
        return ExpiredError(message)
    if status == 401:
        return KubernetesError("401: it does not accept the token; check kubernetes.token_file")
    if status == 403:
        return KubernetesError(f"403: the service account may not do this: {message[:300]}")
    return KubernetesError(f"{status}: {message[:300]}")


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _object(data: bytes) -> Object:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise KubernetesError("it sent something that is no JSON") from None
    if not isinstance(found, dict):
        raise KubernetesError("it sent something that is no object")
    return found


def _read(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes().strip()
    except OSError:
        return b""


def _own_api() -> str:
    """Return the URL of the API that this pod is told of."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
    if not host or not port:
        raise TailraceError(
            "discovery.kubernetes: this is no pod of Kubernetes; set api_server, token_file and ca"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def own_namespace() -> str:
    """Return the namespace of this pod."""
    return _read(ACCOUNT / "namespace").decode("ascii", "replace") or "default"
