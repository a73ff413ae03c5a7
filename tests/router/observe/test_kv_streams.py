"""Event streams over real sockets: gaps, cuts, restarts, skewed clocks, garbage."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from router.clusters import new_cluster
from tailrace.emulate.kv_publisher import KvPublisher
from tailrace.net import kv_events
from tailrace.net.kv_events import BlocksRemoved, BlocksStored, EventBatch
from tailrace.router.observe.kv_streams import KvStream, KvStreams, Lag
from tailrace.router.settings import BackendSettings, EventSettings
from tailrace.router.state.exact_caches import ESTIMATED, EXACT, STALE, ExactCaches


def stored(k: int) -> BlocksStored:
    """A prompt of one block of its own."""
    return BlocksStored([k + 1], None, [k, 0], 2)


class Reader:
    """A publisher, and the streams that read it."""

    def __init__(self, publisher: KvPublisher, streams: KvStreams) -> None:
        self.publisher, self.streams = publisher, streams

    @property
    def stream(self) -> KvStream:
        return self.streams.streams[0]

    @property
    def trust(self) -> str:
        return self.streams.caches.trust_of(0)

    @property
    def blocks(self) -> set[object]:
        return set(self.streams.caches.mirrors[0].ours)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def reading(replay: bool = True, **publisher: object) -> AsyncIterator[Reader]:
    """Publish numbers as hashes, and read them."""
    published = KvPublisher(bytes_as_hashes=False, **publisher)  # type: ignore[arg-type]
    streams = KvStreams(ExactCaches(new_cluster(1, num_blocks=100), 1000), EventSettings())
    backend = BackendSettings(
        url="http://127.0.0.1:1", kv_events=published.endpoint,
        kv_replay=published.replay if replay else "",
    )  # fmt: skip
    try:
        streams.follow({0: backend})
        reader = Reader(published, streams)
        await reader.until(lambda: reader.stream.connected)
        yield reader
    finally:
        await streams.close()
        published.close()


def run(test: Callable[[], object]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@pytest.mark.parametrize("as_maps", [False, True])
def test_events_arrive_and_are_exact(as_maps: bool) -> None:
    async def check() -> None:
        async with reading(as_maps=as_maps) as reader:
            await reader.until(lambda: reader.trust == EXACT)  # nothing published: an empty cache
            reader.publisher.publish([stored(1), stored(2)])
            reader.publisher.publish([BlocksRemoved([2])])
            await reader.until(lambda: reader.stream.messages == 2)
            assert reader.blocks == {3}
            assert reader.trust == EXACT

    run(check)


def test_a_router_that_comes_later_gets_what_was_before() -> None:
    async def check() -> None:
        async with reading() as reader:
            for k in range(5):
                reader.publisher.publish([stored(k)])
            await reader.until(lambda: reader.stream.messages == 5)
            backend = BackendSettings(
                url="http://127.0.0.1:1", kv_events=reader.publisher.endpoint,
                kv_replay=reader.publisher.replay,
            )  # fmt: skip
            reader.streams.follow({})
            assert not reader.streams.streams
            reader.streams.follow({0: backend})
            await reader.until(lambda: reader.trust == EXACT)
            assert reader.blocks == {1, 2, 3, 4, 5}
            assert reader.stream.replayed == 5

    run(check)


def test_a_gap_is_replayed() -> None:
    async def check() -> None:
        async with reading() as reader:
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.stream.messages == 1)
            reader.publisher.drop = 3
            for k in range(1, 6):
                reader.publisher.publish([stored(k)])
            await reader.until(lambda: reader.stream.messages == 6)
            assert reader.blocks == {1, 2, 3, 4, 5, 6}
            assert (reader.stream.gaps, reader.stream.lost) == (1, 0)
            assert reader.trust == EXACT

    run(check)


def test_a_gap_without_replay_ends_trust() -> None:
    async def check() -> None:
        async with reading(replay=False) as reader:
            await asyncio.sleep(0.2)  # the subscription reaches the publisher
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.trust == EXACT)  # number 0: the cache was empty
            reader.publisher.drop = 1
            reader.publisher.publish([stored(1)])
            reader.publisher.publish([stored(2)])
            await reader.until(lambda: reader.stream.lost == 1)
            assert reader.trust == ESTIMATED
            assert reader.blocks == {3}

    run(check)


def test_a_cut_stream_is_stale_until_the_missed_events_are_there() -> None:
    async def check() -> None:
        async with reading() as reader:
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.stream.messages == 1)
            reader.publisher.cut()
            await reader.until(lambda: reader.trust == STALE)
            reader.publisher.publish([stored(1)])
            reader.publisher.open()
            await reader.until(lambda: reader.trust == EXACT)
            assert reader.blocks == {1, 2}

    run(check)


def test_a_server_that_restarts_has_an_empty_cache() -> None:
    async def check() -> None:
        async with reading() as reader:
            for k in range(3):
                reader.publisher.publish([stored(k)])
            await reader.until(lambda: reader.stream.messages == 3)
            reader.publisher.restart()
            await reader.until(lambda: not reader.blocks)
            await reader.until(lambda: reader.trust == EXACT)
            reader.publisher.publish([stored(7)])
            await reader.until(lambda: reader.blocks == {8})

    run(check)


def test_a_restart_is_noticed_even_if_it_has_published_more_than_before() -> None:
    async def check() -> None:
        async with reading() as reader:
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.stream.messages == 1)
            reader.publisher.cut()
            await reader.until(lambda: reader.trust == STALE)
            reader.publisher._kept.clear()
            reader.publisher._next = 0
            for k in range(10, 14):
                reader.publisher.publish([stored(k)])
            reader.publisher.open()
            await reader.until(lambda: reader.trust == EXACT)
            assert reader.blocks == {11, 12, 13, 14}

    run(check)


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_skewed_clock_is_no_lag(skew_s: float) -> None:
    async def check() -> None:
        async with reading(clock_skew_s=skew_s) as reader:
            for k in range(5):
                reader.publisher.publish([stored(k)])
            await reader.until(lambda: len(reader.blocks) == 5)
            assert reader.stream.lag.seconds < 1.0
            assert reader.trust == EXACT

    run(check)


def test_garbage_is_counted_and_the_stream_goes_on() -> None:
    async def check() -> None:
        async with reading() as reader:
            await reader.until(lambda: reader.trust == EXACT)
            socket = reader.publisher._sockets[0]
            for frames in ((b"",), (b"", b"x", b""), (b"", bytes(8), b"\xc1")):
                socket.send_multipart(frames)
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.blocks == {1})
            assert reader.stream.bad == 3

    run(check)


def test_lag_is_what_goes_beyond_the_least_delay() -> None:
    lag = Lag()
    for sent, received in ((0.0, 100.0), (1.0, 101.5), (2.0, 102.0)):
        lag.observe(sent, received)
        assert lag.seconds == {0.0: 0.0, 1.0: 0.5, 2.0: 0.0}[sent]
    for k in range(3000):  # the server's clock is set back by ten seconds
        lag.observe(3.0 + k, 113.0 + k)
    assert lag.seconds == 0.0
    assert lag.offset_s == 110.0
    for k in range(70):  # a minute of a slow stream is enough as well
        lag.observe(4000.0 + k, 4200.0 + k)
    assert lag.offset_s == 200.0


def test_late_events_make_the_caches_stale() -> None:
    async def check() -> None:
        async with reading() as reader:
            number = 0
            while reader.stream.lag.offset_s is None:  # the first ones may come by replay
                reader.publisher.publish([stored(number)])
                number += 1
                await asyncio.sleep(0.01)
            await reader.until(lambda: reader.trust == EXACT)
            reader.publisher.clock_skew_s = -5.0  # sent five seconds ago
            reader.publisher.publish([stored(number)])
            await reader.until(lambda: reader.trust == STALE)
            reader.publisher.clock_skew_s = 0.0
            reader.publisher.publish([stored(number + 1)])
            await reader.until(lambda: reader.trust == EXACT)

    run(check)


def test_without_a_publisher_the_caches_stay_stale() -> None:
    async def check() -> None:
        streams = KvStreams(ExactCaches(new_cluster(1), 100), EventSettings())
        backend = BackendSettings(url="http://127.0.0.1:1", kv_events="tcp://127.0.0.1:1")
        streams.follow({0: backend})
        await asyncio.sleep(0.2)
        assert streams.caches.trust_of(0) == STALE
        await streams.close()
        assert streams.caches.trust_of(0) == ESTIMATED

    run(check)


def test_a_replay_without_an_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For instance because the connection is cut right after a gap."""

    async def check() -> None:
        async with reading() as reader:
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.stream.messages == 1)
            asks, ask = 0, reader.streams._ask

            async def once_in_vain(stream: KvStream, start: int) -> list[tuple[int, bytes]] | None:
                nonlocal asks
                asks += 1
                return None if asks == 1 else await ask(stream, start)

            monkeypatch.setattr(reader.streams, "_ask", once_in_vain)
            reader.publisher.drop = 2
            for k in range(1, 4):
                reader.publisher.publish([stored(k)])
            await reader.until(lambda: asks == 1)
            await reader.until(lambda: reader.trust == STALE)
            reader.publisher.publish([stored(4)])
            await reader.until(lambda: reader.trust == EXACT)
            assert reader.blocks == {1, 2, 3, 4, 5}
            assert (reader.stream.gaps, reader.stream.lost) == (1, 0)

    run(check)


def test_messages_that_nobody_replays_are_lost_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with reading() as reader:
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.stream.messages == 1)

            async def in_vain(stream: KvStream, start: int) -> None:
                del stream, start

            monkeypatch.setattr(reader.streams, "_ask", in_vain)
            reader.publisher.drop = 1
            for k in range(1, 6):
                reader.publisher.publish([stored(k)])
            await reader.until(lambda: reader.trust == ESTIMATED)
            await reader.until(lambda: reader.stream.next_number == 6)
            assert (reader.stream.gaps, reader.stream.lost) == (1, 1)
            assert reader.blocks == {5, 6}  # messages 2 and 3 waited for the replay in vain

    run(check)


def test_what_a_server_sent_before_it_began_anew_is_left_out() -> None:
    """Such messages may still wait to be read when the new server has been asked for a replay."""

    async def check() -> None:
        async with reading() as reader:
            reader.publisher.publish([stored(0)])
            await reader.until(lambda: reader.stream.messages == 1)
            reader.publisher.restart()
            await reader.until(lambda: reader.stream.next_number == 0 and reader.trust == EXACT)
            old = kv_events.encode(EventBatch(time.time() - 1.0, [stored(7)], 0))
            await reader.streams._message(reader.stream, [b"", (9).to_bytes(8, "big"), old])
            assert reader.trust == EXACT
            assert reader.blocks == set()
            assert reader.stream.lost == 0

    run(check)


def test_what_was_replayed_after_a_cut_may_come_again() -> None:
    """A message that waited to be read while the connection was cut, and was replayed as well."""

    async def check() -> None:
        async with reading() as reader:
            for k in range(3):
                reader.publisher.publish([stored(k)])
            await reader.until(lambda: reader.stream.messages == 3)
            reader.publisher.cut()
            await reader.until(lambda: reader.trust == STALE)
            reader.publisher.publish([stored(3)])
            reader.publisher.open()
            await reader.until(lambda: reader.trust == EXACT)
            number, payload = reader.publisher._kept[1]
            before = reader.stream.replayed
            await reader.streams._message(reader.stream, [b"", number.to_bytes(8, "big"), payload])
            assert reader.stream.replayed == before
            assert reader.blocks == {1, 2, 3, 4}

    run(check)
