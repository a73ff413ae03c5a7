"""A Kubernetes API for tests: lists, watches, bookmarks, and all that can go wrong with them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import orjson

Object = dict[str, Any]

PODS = "/api/v1/namespaces/default/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"


def pod(
    name: str, address: str = "", *, ready: bool = True, phase: str = "Running",
    deleted: bool = False, app: str = "vllm", uid: str = "",
) -> Object:  # fmt: skip
    about: Object = {"name": name, "uid": uid or f"uid-{name}", "labels": {"app": app}}
    if deleted:
        about["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status: Object = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }
    if address:
        status["podIP"] = address
    return {"metadata": about, "status": status}


class FakeApi:
    """Serves objects; ``requests`` are the targets it was asked for, in order."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.version = 100
        self.oldest = 0
        """Watches from earlier versions are answered with 410."""
        self.gone_as_event = False
        self.page = 10_000
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[bytes] = []
        """Sent as they are instead of the next answers."""
        self._history: list[tuple[int, str, str, Object]] = []
        self._watches: dict[asyncio.StreamWriter, tuple[str, dict[str, str]]] = {}
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop()
        await asyncio.sleep(0)

    @property
    def watching(self) -> int:
        return len(self._watches)

    def asked(self, what: str) -> list[str]:
        """Requests whose target contains a text."""
        return [target for target in self.requests if what in target]

    # Changes.

    def put(self, path: str, item: Object) -> None:
        known = self.objects.setdefault(path, {})
        kind = "MODIFIED" if item["metadata"]["uid"] in known else "ADDED"
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        known[item["metadata"]["uid"]] = item
        self._tell(kind, path, item)

    def delete(self, path: str, name: str) -> None:
        known = self.objects[path]
        (uid,) = [uid for uid, item in known.items() if item["metadata"]["name"] == name]
        item = known.pop(uid)
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", path, item)

    def bookmark(self) -> None:
        self.version += 50
        item = {"metadata": {"resourceVersion": str(self.version)}}
        for writer in self._watches:
            self._send(writer, "BOOKMARK", item)

    def drop(self) -> None:
        """Cut all watches off, within a chunk."""
        for writer in tuple(self._watches):
            writer.write(b"ff\r\n{")
            writer.transport.abort()
        self._watches.clear()

    def end(self) -> None:
        """End all watches, as the time limit does."""
        for writer in tuple(self._watches):
            writer.write(b"0\r\n\r\n")
            writer.close()
        self._watches.clear()

    def forget(self, *, as_event: bool) -> None:
        """Forget the history: watches cannot go on."""
        self.gone_as_event = as_event
        self.version += 1
        self.oldest = self.version
        self._history.clear()

    def send(self, line: bytes) -> None:
        """Send anything to all watches."""
        for writer in self._watches:
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    def _tell(self, kind: str, path: str, item: Object) -> None:
        item = orjson.loads(orjson.dumps(item))
        self._history.append((self.version, kind, path, item))
        for writer, (watched, query) in self._watches.items():
            if watched == path and _selects(query, item):
                self._send(writer, kind, item)

    @staticmethod
    def _send(writer: asyncio.StreamWriter, kind: str, item: Object) -> None:
        line = orjson.dumps({"type": kind, "object": item}) + b"\n"
        # In two parts, so that lines do not come in one piece.
        for part in (line[:7], line[7:]):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))

    # Requests.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                target = first.split()[1]
                self.requests.append(unquote(target))
                pairs = (line.split(": ", 1) for line in lines)
                self.headers.append({name.lower(): value for name, value in pairs})
                if self.answers:
                    writer.write(self.answers.pop(0))
                    continue
                parts = urlsplit(target)
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                if "watch" in query:
                    self._watch(writer, parts.path, query)
                else:
                    self._list(writer, parts.path, query)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._watches.pop(writer, None)
            writer.close()

    def _list(self, writer: asyncio.StreamWriter, path: str, query: dict[str, str]) -> None:
        items = [i for i in self.objects.get(path, {}).values() if _selects(query, i)]
        start = int(query.get("continue", 0))
        about: Object = {"resourceVersion": str(self.version)}
        if start + self.page < len(items):
            about["continue"] = str(start + self.page)
        body = {"metadata": about, "items": items[start : start + self.page]}
        writer.write(answer(200, body))

    def _watch(self, writer: asyncio.StreamWriter, path: str, query: dict[str, str]) -> None:
        version = int(query["resourceVersion"])
        gone = {"code": 410, "message": "too old resource version", "reason": "Expired"}
        if version < self.oldest and not self.gone_as_event:
            writer.write(answer(410, gone))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        if version < self.oldest:
            self._send(writer, "ERROR", gone)
            return
        for at, kind, changed, item in self._history:
            if at > version and changed == path and _selects(query, item):
                self._send(writer, kind, item)
        self._watches[writer] = path, query


def answer(status: int, body: Object) -> bytes:
    data = orjson.dumps(body)
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status, len(data), data,
    )  # fmt: skip


def _selects(query: dict[str, str], item: Object) -> bool:
    about = item["metadata"]
    field = query.get("fieldSelector", "")
    if field and field != f"metadata.name={about['name']}":
        return False
    labels = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    return all(about.get("labels", {}).get(name) == value for name, value in labels)


@asynccontextmanager
async def fake_api() -> AsyncIterator[FakeApi]:
    api = FakeApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()
