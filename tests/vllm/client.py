"""Plain HTTP without a library of its own opinion: what was sent is seen byte for byte."""

import contextlib
import http.client
import json
import socket
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Address(NamedTuple):
    host: str
    port: int


@dataclass
class Reply:
    """An answer. ``broken`` says how it ended before its end; empty: it is complete."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    broken: str = ""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replica(self) -> str:
        return self.headers.get("x-tailrace-replica", "")

    @property
    def events(self) -> list[str]:
        """Data of the server-sent events."""
        parts = self.body.decode().split("\n\n")
        return [part.removeprefix("data: ") for part in parts if part.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def text(self) -> str:
        """Text of a streamed completion or chat."""
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", [])]
        parts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
        return "".join(parts)

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and not self.broken and self.events[-1:] == ["[DONE]"]


def get(address: Address, path: str, timeout_s: float = 30.0) -> Reply:
    return _exchange(address, "GET", path, None, {}, timeout_s)


def post(
    address: Address,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    timeout_s: float = 120.0,
    on_data=None,
) -> Reply:
    """Send JSON; ``on_data(reply)`` is called whenever a piece of the answer arrives."""
    data = json.dumps(body).encode()
    sent = {"content-type": "application/json", **(headers or {})}
    return _exchange(address, "POST", path, data, sent, timeout_s, on_data)


def _exchange(
    address: Address,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    timeout_s: float,
    on_data=None,
) -> Reply:
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    reply = Reply()
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        reply.status = answer.status
        reply.headers = {name.lower(): value for name, value in answer.getheaders()}
        while piece := answer.read1(65536):
            reply.body += piece
            if on_data is not None:
                on_data(reply)
    except http.client.IncompleteRead as error:
        reply.broken = repr(error)
    except (http.client.HTTPException, ConnectionError) as error:
        if not reply.status and method == "GET":
            raise OSError(str(error)) from error
        reply.broken = repr(error)
    finally:
        connection.close()
    return reply


def raw_exchange(address: Address, request: bytes, timeout_s: float = 120.0) -> bytes:
    """Send bytes and return all that comes until the other side closes."""
    received = b""
    with socket.create_connection(address, timeout_s) as connection:
        connection.sendall(request)
        while piece := connection.recv(65536):
            received += piece
    return received


def raw_post(path: str, body: dict[str, Any]) -> bytes:
    """A request as bytes, after which the connection is closed."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


class Tap:
    """Passes connections on to a server and keeps what the server sent, connection by connection.

    What the router got and what it gave can so be compared byte by byte for the same exchange.
    """

    def __init__(self, server: Address) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", int(self._listener.getsockname()[1]))
        self.sent: list[bytearray] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def answers_to(self, marker: bytes) -> bytes:
        """Return all that came back over the connection on which an answer holds ``marker``."""
        found = [bytes(sent) for sent in self.sent if marker in sent]
        assert len(found) == 1, f"{len(found)} connections carried {marker!r}"
        return found[0]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, 10)
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            server.settimeout(None)
            sent = bytearray()
            self.sent.append(sent)
            threading.Thread(target=_pass_on, args=(client, server, None), daemon=True).start()
            threading.Thread(target=_pass_on, args=(server, client, sent), daemon=True).start()

    def close(self) -> None:
        # Shutting down wakes the threads, which then end.
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
    try:
        while piece := source.recv(65536):
            if kept is not None:
                kept += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
