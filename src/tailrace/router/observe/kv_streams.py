"""Reads the KV events of the servers (ZMQ), asks for missed ones, and measures how late they are.

Every worker process reads all streams by itself: a publisher sends to any number of subscribers.
Nothing here is on the path of a request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.errors import TailraceError
from tailrace.net import kv_events
from tailrace.router.settings import BackendSettings, EventSettings
from tailrace.router.state.exact_caches import ESTIMATED, STALE, ExactCaches

#: Time-out of a replay, and pause before a stream that failed is tried again, s.
REPLAY_S = 5.0
RETRY_S = 1.0
#: Requests for a replay in a row without an answer after which the messages count as lost.
MOST_UNANSWERED = 3
#: Most bytes of a replay.
MAX_REPLAY_BYTES = 256 * 2**20
#: Longest time events are read without a pause for requests, s.
SLICE_S = 0.002
#: Messages that wait to be read; beyond it the newest are dropped, and asked for later.
HIGH_WATER = 10_000
#: How often a silent peer is checked for, and when it counts as gone, ms.
_HEARTBEAT_MS, _GONE_MS = 1000, 3000
#: Messages, and seconds, over which the least delay is taken, see :class:`Lag`.
_LAG_WINDOW, _LAG_WINDOW_S = 1024, 30.0

_log = logging.getLogger("tailrace.router")


@dataclass(slots=True)
class Lag:
    """How late messages are, whatever the clocks of server and router say.

    A message says by the server's clock when it was sent. The least difference to the router's
    clock among the latest messages is taken for the difference between the clocks; what is beyond
    it is delay. A constant delay cannot be told from such a difference, and is left out.
    """

    seconds: float = 0.0
    """Delay of the latest message, s."""
    offset_s: float | None = None
    """The least difference; None: no message has come."""
    _next_s: float = float("inf")
    _count: int = 0
    _ends: float = float("inf")

    def observe(self, sent: float, received: float) -> None:
        """A message that was sent at ``sent`` has come at ``received``, Unix times in s."""
        difference = received - sent
        self._next_s = min(self._next_s, difference)
        if self.offset_s is None or difference < self.offset_s:
            self.offset_s = difference
        if self._count == 0:
            self._ends = received + _LAG_WINDOW_S
        self._count += 1
        if self._count >= _LAG_WINDOW or received >= self._ends:
            # Clocks drift and are set: forget what is older than two windows.
            self.offset_s, self._next_s, self._count = self._next_s, float("inf"), 0
        self.seconds = max(0.0, difference - self.offset_s)


@dataclass(slots=True)
class KvStream:
    """The events of one backend: where they come from and what has been read."""

    replica: int
    endpoint: str
    replay: str
    """Where missed events are asked for; empty: nowhere."""
    lag: Lag = field(default_factory=Lag)
    next_number: int = 0
    """Sequence number of the next message."""
    last_sent: float = 0.0
    """When the latest message was sent, by the server's clock, s."""
    messages: int = 0
    gaps: int = 0
    """Times messages were missing."""
    replayed: int = 0
    """Messages that came by replay."""
    lost: int = 0
    """Gaps that could not be filled."""
    unanswered: int = 0
    """Requests for a replay in a row that got no answer."""
    bad: int = 0
    """Messages that could not be read."""
    connected: bool = False
    reconnected: bool = False
    """Whether the connection was lost since the latest message."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while messages are applied: a replay takes several turns of the event loop."""
    task: "asyncio.Task[None] | None" = None


class KvStreams:
    """The event streams of all backends that publish events."""

    def __init__(
        self,
        caches: ExactCaches,
        settings: EventSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock``: Unix time, s."""
        try:
            import msgpack  # noqa: F401
            import zmq.asyncio
        except ImportError:
            raise TailraceError(
                "KV events need the packages pyzmq and msgpack: pip install 'tailrace[cluster]'"
            ) from None
        self.settings = settings
        self.caches = caches
        self.streams: dict[int, KvStream] = {}
        self._clock = clock
        self._zmq: Any = zmq
        self._context: Any = zmq.asyncio.Context()

    def follow(self, backends: Mapping[int, BackendSettings]) -> None:
        """Read the events of these backends, by number, and of no others."""
        wanted = {
            replica: endpoints
            for replica, backend in backends.items()
            if (endpoints := self.settings.endpoints(backend))[0]
        }
        for replica, stream in list(self.streams.items()):
            if wanted.get(replica) != (stream.endpoint, stream.replay):
                self.drop(replica)
        for replica, (endpoint, replay) in wanted.items():
            if replica not in self.streams:
                stream = self.streams[replica] = KvStream(replica, endpoint, replay)
                self.caches.begin(replica)
                stream.task = asyncio.get_running_loop().create_task(self._read_always(stream))

    def drop(self, replica: int) -> None:
        """Read the events of a backend no more."""
        stream = self.streams.pop(replica, None)
        if stream is not None:
            if stream.task is not None:
                stream.task.cancel()
            self.caches.end(replica)

    async def close(self) -> None:
        """Stop reading."""
        tasks = [s.task for s in self.streams.values() if s.task is not None]
        for replica in list(self.streams):
            self.drop(replica)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _read_always(self, stream: KvStream) -> None:
        while True:
            try:
                await self._read(stream)
            except Exception as error:
                _log.warning(
                    "cannot read KV events", extra={"from": stream.endpoint, "why": repr(error)}
                )
            self._cut(stream)
            await asyncio.sleep(RETRY_S)

    async def _read(self, stream: KvStream) -> None:
        """Read a stream until it fails."""
        zmq = self._zmq
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _GONE_MS)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SUBSCRIBE, self.settings.topic.encode())
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        watch = asyncio.get_running_loop().create_task(self._watch(stream, monitor))
        try:
            socket.connect(stream.endpoint)
            slice_ends = time.perf_counter() + SLICE_S
            while True:
                frames = await socket.recv_multipart()
                async with stream.lock:
                    await self._message(stream, frames)
                slice_ends = await _pause(slice_ends)
        finally:
            watch.cancel()
            with contextlib.suppress(Exception):
                socket.disable_monitor()
            socket.close(linger=0)

    async def _watch(self, stream: KvStream, monitor: Any) -> None:
        """Notice that a stream is cut, and that it is there again."""
        from zmq.utils.monitor import parse_monitor_message

        try:
            while True:
                event = parse_monitor_message(await monitor.recv_multipart())["event"]
                if event == self._zmq.EVENT_DISCONNECTED:
                    self._cut(stream)
                    continue
                stream.connected = True
                if stream.replay:
                    async with stream.lock:
                        await self._replay(stream)
                elif stream.messages == 0:
                    # Whatever the server has cached already is not known.
                    self.caches.missed(stream.replica)
                    self.caches.set_trust(stream.replica, ESTIMATED)
        finally:
            monitor.close(linger=0)

    def _cut(self, stream: KvStream) -> None:
        if stream.connected:
            _log.warning("KV events are cut off", extra={"from": stream.endpoint})
        stream.connected, stream.reconnected = False, True
        self.caches.set_trust(stream.replica, STALE)

    async def _message(self, stream: KvStream, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != kv_events.SEQUENCE_BYTES:
            stream.bad += 1
            return
        number = int.from_bytes(frames[1], "big")
        batch = self._decoded(stream, frames[2])
        if batch is None:
            return
        if number < stream.next_number:
            if batch.at <= stream.last_sent and not stream.reconnected:
                return  # it came by replay already
            if number + 1 == stream.next_number and batch.at == stream.last_sent:
                return
            stream.next_number = 0
            self.caches.restarted(stream.replica)
        stream.reconnected = False
        if number > stream.next_number:
            stream.gaps += not stream.unanswered
            if stream.replay and not await self._replay(stream):
                # Asked for again with the next message, or when the connection is back.
                stream.unanswered += stream.connected
                if stream.unanswered < MOST_UNANSWERED:
                    self.caches.set_trust(stream.replica, STALE)
                    return
                stream.unanswered = 0
            elif stream.replay and number > stream.next_number:
                return  # the server does not know it: it was sent before the server began anew
            if number > stream.next_number:
                stream.lost += 1
                self.caches.missed(stream.replica)
            elif number < stream.next_number:
                return  # it was replayed as well
        self._apply(stream, number, batch)
        lag = stream.lag
        lag.observe(batch.at, self._clock())
        if lag.seconds > self.settings.max_lag_s:
            self.caches.set_trust(stream.replica, STALE)
        else:
            self.caches.current(stream.replica)

    def _apply(self, stream: KvStream, number: int, batch: kv_events.EventBatch) -> None:
        if number == 0 and not self.caches.mirrors[stream.replica].complete:
            self.caches.restarted(stream.replica)  # the first event of an empty cache
        self.caches.apply(stream.replica, batch.events)
        stream.next_number, stream.last_sent = number + 1, batch.at
        stream.messages += 1

    def _decoded(self, stream: KvStream, payload: bytes) -> kv_events.EventBatch | None:
        try:
            return kv_events.decode(payload)
        except ValueError as error:
            stream.bad += 1
            if stream.bad == 1:
                why = {"from": stream.endpoint, "why": str(error)}
                _log.warning("KV events that cannot be read", extra=why)
            return None

    async def _replay(self, stream: KvStream) -> bool:
        """Ask for the messages from the next one on; what the server no longer has is lost.

        False: there was no answer, and nothing has changed.
        """
        if not stream.connected:
            return False  # nobody would answer
        # The latest message is asked for again: a server that does not have it has begun anew.
        known = stream.next_number == 0
        start = 0 if known else stream.next_number - 1
        messages = await self._ask(stream, start)
        if messages is None:
            return False
        if not known and (not messages or self._is_other(stream, *messages[0])):
            stream.next_number = 0
            messages = await self._ask(stream, 0)
            if messages is None:
                return False
        if stream.next_number == 0 and (not messages or messages[0][0] == 0):
            self.caches.restarted(stream.replica)  # its cache was empty before the first message
        slice_ends = time.perf_counter() + SLICE_S
        for number, payload in messages:
            self._replayed(stream, number, payload)
            slice_ends = await _pause(slice_ends)
        self.caches.current(stream.replica)
        stream.unanswered, stream.reconnected = 0, False
        return True

    def _is_other(self, stream: KvStream, number: int, payload: bytes) -> bool:
        """Whether a message is not the latest one that was read, but has its number."""
        if number != stream.next_number - 1:
            return False  # the latest one is no longer kept
        batch = self._decoded(stream, payload)
        return batch is None or batch.at != stream.last_sent

    async def _ask(self, stream: KvStream, start: int) -> list[tuple[int, bytes]] | None:
        """Return the messages from a number on that the server still has; None: it does not say."""
        zmq = self._zmq
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)
        messages: list[tuple[int, bytes]] = []
        size = 0
        try:
            socket.connect(stream.replay)
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart((b"", start.to_bytes(kv_events.SEQUENCE_BYTES, "big")))
                slice_ends = time.perf_counter() + SLICE_S
                while True:
                    slice_ends = await _pause(slice_ends)
                    *_, sequence, payload = await socket.recv_multipart()
                    if sequence == kv_events.END:
                        return messages
                    size += len(payload)
                    if size > MAX_REPLAY_BYTES:
                        raise ValueError("too much to replay")
                    messages.append((int.from_bytes(sequence, "big"), payload))
        except (TimeoutError, ValueError, zmq.ZMQError) as error:
            why = {"from": stream.replay, "why": repr(error)}
            _log.warning("missed KV events cannot be replayed", extra=why)
            return None
        finally:
            socket.close(linger=0)

    def _replayed(self, stream: KvStream, number: int, payload: bytes) -> None:
        if number < stream.next_number:
            return
        batch = self._decoded(stream, payload)
        if batch is None:
            return
        if number > stream.next_number:
            stream.lost += 1
            self.caches.missed(stream.replica)
        stream.replayed += 1
        self._apply(stream, number, batch)


async def _pause(slice_ends: float) -> float:
    """Let requests go on if a slice of time is over; return when the present one ends."""
    if time.perf_counter() <= slice_ends:
        return slice_ends
    await asyncio.sleep(0)
    return time.perf_counter() + SLICE_S
