"""Routers on several machines tell each other what they do; messages travel by hand here."""

import msgpack
import numpy as np
import pytest

from router.clusters import Clock, chat, decided, new_chooser
from tailrace.config import Replica
from tailrace.router.settings import BackendSettings
from tailrace.router.state.arrival import Decision
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.exact_caches import ExactCaches
from tailrace.router.state.outbox import MOST_CHANGES
from tailrace.router.state.peers import BEAT_S, Peers
from tailrace.router.state.shared_state import new_shared_state

LONG = "x" * 4096
URLS = ("http://a:1", "http://b:1")


class Machine:
    """A router: its cluster, its clock, what it tells and knows of others."""

    def __init__(
        self, number: int, now: float = 0.0, urls: tuple[str, ...] = URLS, room: int = 4
    ) -> None:
        backends = [BackendSettings(url=url, server=Replica(num_blocks=4000)) for url in urls]
        self.clock = Clock(now)
        view = new_shared_state(backends, peers=room).of(0)
        self.cluster = ClusterState(backends, self.clock, worker_view=view, seed=number)
        self.peers = Peers(self.cluster, number)
        self.chooser = new_chooser(self.cluster, "lmetric")

    def send(self, *texts: str, replica: int = 0) -> Attempt:
        arrival = self.cluster.arrive(chat(*texts))
        return Attempt(self.cluster, arrival, replica, decided(self.cluster, arrival, replica))

    def decide(self, *texts: str) -> Decision:
        """Decide, after which ``cluster.seen`` is what the policy saw."""
        decision = self.chooser.choose(self.cluster.arrive(chat(*texts)))
        assert decision is not None
        return decision

    def seen(self, field: str, *texts: str) -> list[float]:
        self.decide(*(texts or ("short",)))
        return [float(value) for value in self.cluster.seen[field]]


def exchange(*machines: Machine, lose: int = 0) -> list[bytes]:
    """Let every machine tell all others; return the messages."""
    sent: list[bytes] = []
    for machine in machines:
        for message in machine.peers.collect(machine.clock()):
            sent.append(message)
            if lose:
                lose -= 1
                continue
            for other in machines:
                other.peers.apply(message, other.clock())
    return sent


def pair(**second: object) -> tuple[Machine, Machine]:
    """Two machines that know each other."""
    a, b = Machine(1, 1000.0), Machine(2, **{"now": 5.0, **second})  # type: ignore[arg-type]
    for _ in range(4):
        exchange(a, b)
    return a, b


def test_requests_in_flight_are_seen_by_the_others() -> None:
    a, b = pair()
    attempt = a.send(LONG)
    assert b.seen("in_flight") == [0, 0]
    exchange(a, b)
    assert b.seen("in_flight") == [1, 0]
    assert b.seen("queued_tokens")[0] == pytest.approx(attempt.prompt_tokens)
    attempt.tokens(3)
    exchange(a, b)
    assert b.seen("queued") == [0, 0]
    attempt.close("done")
    exchange(a, b)
    assert b.seen("in_flight") == [0, 0]
    assert b.seen("finished_tokens") == [3, 0]


def test_clocks_need_not_agree() -> None:
    a, b = pair()
    a.send(LONG)
    a.clock.now += 2.0
    b.clock.now += 2.0
    exchange(a, b)
    assert b.seen("oldest_sent")[0] == pytest.approx(b.clock() - 2.0)
    assert b.seen("queued_since_sum")[0] == pytest.approx(b.clock() - 2.0)
    a.cluster.scraped(0, 4, 5, 0.5)
    a.clock.now += 1.0
    b.clock.now += 1.0
    exchange(a, b)
    assert b.seen("metrics_at")[0] == pytest.approx(b.clock() - 1.0)
    assert b.seen("waiting")[0] == 4


def test_prompts_are_found_where_another_router_has_sent_them() -> None:
    a, b = pair()
    attempt = a.send(LONG, replica=1)
    assert b.seen("cached_tokens", LONG) == [0, 0]
    attempt.close("done")
    exchange(a, b)
    assert b.seen("cached_tokens", LONG)[1] > 900
    assert b.decide(LONG).replica == 1


def test_a_conversation_is_continued_where_it_was() -> None:
    a, b = pair()
    attempt = a.send(LONG, replica=1)
    attempt.tokens(50)
    attempt.close("done")
    exchange(a, b)
    arrival = b.cluster.arrive(chat(LONG, "answer", "next"))
    assert arrival.session is not None
    assert (arrival.session.last_replica, arrival.turn) == (1, 1)
    assert b.seen("cached_tokens", LONG, "y" * 200, "next")[1] > 900


def test_backends_are_known_by_their_address() -> None:
    a, b = pair(urls=("http://c:1", "http://b:1", "http://a:1"))
    a.send(LONG)
    exchange(a, b)
    assert b.seen("in_flight", LONG) == [0, 0, 1]
    assert b.seen("cached_tokens", LONG)[:2] == [0, 0]


def test_what_servers_report_as_evicted_is_told_too() -> None:
    a, b = pair()
    a.send(LONG).close("done")
    exchange(a, b)
    caches = ExactCaches(a.cluster, 1000)
    caches.begin(0)
    assert b.seen("cached_tokens", LONG)[0] > 900
    caches.restarted(0)
    exchange(a, b)
    assert b.seen("cached_tokens", LONG) == [0, 0]


def test_a_lost_message_is_made_good_by_a_snapshot() -> None:
    a, b = pair()
    a.send(LONG)
    exchange(a, b, lose=1)
    assert b.seen("cached_tokens", LONG) == [0, 0]
    for _ in range(5):
        a.clock.now += 1.0
        b.clock.now += 1.0
        exchange(a, b)
    assert b.peers.missed == 1
    assert b.seen("cached_tokens", LONG)[0] > 900
    assert b.seen("in_flight") == [1, 0]


def test_a_router_that_comes_later_learns_what_was_before() -> None:
    a, b = pair()
    a.send(LONG)
    exchange(a, b)
    late = Machine(3, 77.0)
    for _ in range(5):
        for machine in (a, b, late):
            machine.clock.now += 1.0
        exchange(a, b, late)
    assert late.seen("cached_tokens", LONG)[0] > 900
    assert late.seen("in_flight") == [1, 0]
    assert b.seen("in_flight") == [1, 0]


def test_a_silent_router_is_forgotten() -> None:
    a, b = pair()
    a.send(LONG)
    exchange(a, b)
    b.cluster.count_members()
    assert list(b.cluster.caching) == [2, 2]
    b.clock.now += b.peers.gone_s + 0.1
    b.peers.sweep(b.clock())
    b.cluster.count_members()
    assert b.seen("in_flight") == [0, 0]
    assert b.seen("cached_tokens", LONG) == [0, 0]
    assert list(b.cluster.caching) == [1, 1]
    for _ in range(4):
        a.clock.now += 1.0
        b.clock.now += 1.0
        exchange(a, b)
    assert b.seen("in_flight") == [1, 0]
    assert b.seen("cached_tokens", LONG)[0] > 900


def test_without_news_there_is_only_a_sign_of_life() -> None:
    a, _ = pair()
    a.clock.now += BEAT_S
    assert len(a.peers.collect(a.clock())) == 1
    assert a.peers.collect(a.clock() + BEAT_S / 2) == []


def test_too_many_changes_become_a_snapshot() -> None:
    a, b = pair()
    a.send(LONG)
    for _ in range(MOST_CHANGES):
        a.peers.outbox.removed(1, np.zeros(1, np.uint64))
    assert a.peers.outbox.overflowed
    assert len(a.peers.outbox.changes) <= MOST_CHANGES
    for _ in range(3):
        exchange(a, b)
    assert b.seen("cached_tokens", LONG)[0] > 900


def test_there_is_room_for_so_many_and_no_more() -> None:
    machines = [Machine(number, room=2) for number in range(4)]
    for _ in range(2):
        exchange(*machines)
    assert all(len(machine.peers.peers) == 2 for machine in machines)
    assert all(machine.peers.refused > 0 for machine in machines)


def test_messages_of_others_can_do_no_harm() -> None:
    a, b = pair()
    a.send(LONG)
    message = msgpack.unpackb(a.peers.collect(a.clock())[0])
    before = b.cluster.worker_view.shared.replicas.copy()
    bad = [
        b"", b"\xc1", msgpack.packb(5), msgpack.packb([]), msgpack.packb(message[:4]),
        msgpack.packb([0, *message[1:]]),  # another version
        msgpack.packb([*message[:5], [1, 2], *message[6:]]),  # a name without a row
        msgpack.packb([*message[:6], b"12345", *message[7:]]),
        msgpack.packb([*message[:8], [[0, message[5][0], b"1", b"2", 0]], *message[9:]]),
        msgpack.packb([*message[:8], [[0, message[5][0], b"", b"", 0]], *message[9:]]),
        msgpack.packb([*message[:8], [[2, message[5][0], -1, 5]], *message[9:]]),  # a negative key
        msgpack.packb([*message[:9], [[-(2**60), message[5][0], 1]], *message[10:]]),
    ]  # fmt: skip
    refused = b.peers.refused
    for data in bad:
        b.peers.apply(data, b.clock())
    assert b.peers.refused == refused + len(bad)
    rows = b.cluster.worker_view.shared
    np.testing.assert_array_equal(before[0], rows.replicas[0])


def test_hashes_agree_once_the_secret_is_common() -> None:
    backends = [BackendSettings(url=URLS[0])]
    clusters = [ClusterState(backends, Clock(), salt=salt) for salt in (b"one-salt", b"two-salt")]
    ends = [c.arrive(chat(LONG)).runs.end_key for c in clusters]
    assert ends[0] != ends[1]
    for cluster in clusters:
        cluster.set_content_secret(b"0123456789abcdef")
    assert len({c.arrive(chat(LONG)).runs.end_key for c in clusters}) == 1
