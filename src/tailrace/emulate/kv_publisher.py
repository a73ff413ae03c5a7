"""Publishes the KV events of an emulated server as vLLM does: over ZMQ, numbered, with replay."""

import asyncio
import time
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from tailrace.net import kv_events
from tailrace.net.kv_events import Event, EventBatch

#: Messages kept for replay.
KEPT = 10_000
#: How often a port that is still in use is tried, and the pause between, s.
REBIND_TRIES, REBIND_S = 100, 0.01
_SEQUENCE = kv_events.SEQUENCE_BYTES


class KvPublisher:
    """A publisher on two free ports of ``host``; needs a running event loop."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        port: int = 0,
        replay_port: int = 0,
        topic: str = "",
        as_maps: bool = True,
        bytes_as_hashes: bool = True,
        clock_skew_s: float = 0.0,
    ) -> None:
        """``as_maps``: events as maps, like newer servers; ``bytes_as_hashes``: block hashes as
        bytes; ``clock_skew_s``: how far the server's clock is ahead of ours."""
        self._context: Any = zmq.asyncio.Context()
        self._host, self._topic = host, topic.encode()
        self._as_maps, self._bytes = as_maps, bytes_as_hashes
        self.clock_skew_s = clock_skew_s
        self.drop = 0
        """Messages to lose instead of sending them."""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._next = 0
        self._sockets: list[Any] = []
        self._task: asyncio.Task[None] | None = None
        self.port, self.replay_port = port, replay_port
        self.open()

    @property
    def endpoint(self) -> str:
        """Where events are published."""
        return f"tcp://{self._host}:{self.port}"

    @property
    def replay(self) -> str:
        """Where they are replayed."""
        return f"tcp://{self._host}:{self.replay_port}"

    def open(self) -> None:
        """Listen, at the same ports as before."""
        publisher = self._context.socket(zmq.PUB)
        router = self._context.socket(zmq.ROUTER)
        self._sockets = [publisher, router]
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, 0)
        for socket, port in zip(self._sockets, (self.port, self.replay_port), strict=True):
            self._bind(socket, port)
        ports = [int(s.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
                 for s in self._sockets]  # fmt: skip
        self.port, self.replay_port = ports
        self._task = asyncio.get_running_loop().create_task(self._serve_replays(router))

    def _bind(self, socket: Any, port: int) -> None:
        for tries_left in reversed(range(REBIND_TRIES)):
            try:
                socket.bind(f"tcp://{self._host}:{port or '*'}")
            except zmq.ZMQError:  # a socket that was closed frees its port a little later
                if not tries_left:
                    raise
                time.sleep(REBIND_S)
            else:
                return

    def cut(self) -> None:
        """Close all connections; what happens meanwhile can be replayed after ``open``."""
        if self._task is not None:
            self._task.cancel()
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = []
        self._task = None

    def restart(self) -> None:
        """Begin anew, as a server that was started again."""
        self.cut()
        self._kept.clear()
        self._next = 0
        self.open()

    def close(self) -> None:
        """Stop."""
        self.cut()
        self._context.destroy(linger=0)

    def publish(self, events: list[Event]) -> None:
        """Publish events of now."""
        if self._bytes:
            events = [_with_bytes(event) for event in events]
        at = time.time() + self.clock_skew_s
        self.send(kv_events.encode(EventBatch(at, events, 0), as_maps=self._as_maps))

    def send(self, payload: bytes) -> None:
        """Publish the next message."""
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        if self.drop > 0:
            self.drop -= 1
        elif self._sockets:
            message = (self._topic, number.to_bytes(_SEQUENCE, "big"), payload)
            self._sockets[0].send_multipart(message)  # a publisher never blocks

    async def _serve_replays(self, router: Any) -> None:
        while True:
            who, _, start = await router.recv_multipart()
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    sequence = number.to_bytes(_SEQUENCE, "big")
                    await router.send_multipart((who, b"", sequence, payload))
            await router.send_multipart((who, b"", kv_events.END, b""))


def _with_bytes(event: Event) -> Event:
    """Return an event with block hashes as 32 bytes, like the digests of a real server."""
    if isinstance(event, kv_events.AllCleared):
        return event
    hashes = [_as_bytes(h) for h in event.hashes]
    if isinstance(event, kv_events.BlocksRemoved):
        return kv_events.BlocksRemoved(hashes)
    parent = None if event.parent is None else _as_bytes(event.parent)
    return kv_events.BlocksStored(
        hashes, parent, event.token_ids, event.block_size, event.extra_keys
    )


def _as_bytes(block: kv_events.BlockHash) -> bytes:
    return block if isinstance(block, bytes) else block.to_bytes(32, "big")
