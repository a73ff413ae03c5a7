"""What servers report about their caches is what the prefix index holds."""

import numpy as np
import pytest

from router.clusters import Clock, decided, new_cluster
from tailrace.net.kv_events import AllCleared, BlocksRemoved, BlocksStored
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.exact_caches import ESTIMATED, EXACT, STALE, ExactCaches

SIZE = 16  # tokens of a block
TEXT = "".join(f"{k:04d}" for k in range(512))  # 512 tokens of four bytes: 32 blocks, 8 runs


def ask(text: str) -> RequestBody:
    return RequestBody("completion", text=text, streams=True)


def tokens(text: str) -> list[int]:
    return [int.from_bytes(text[k : k + 4].encode(), "big") for k in range(0, len(text), 4)]


class Server:
    """Names blocks in its own way and publishes what it stores."""

    def __init__(self, caches: ExactCaches, replica: int = 0) -> None:
        self._caches, self._replica = caches, replica

    @staticmethod
    def names(text: str) -> list[bytes]:
        return [text[: 4 * SIZE * (k + 1)].encode() for k in range(len(text) // (4 * SIZE))]

    def store(self, text: str, first: int = 0) -> None:
        names = self.names(text)
        parent = names[first - 1] if first else None
        ids = tokens(text)[first * SIZE : len(names) * SIZE]
        self._caches.apply(self._replica, [BlocksStored(names[first:], parent, ids, SIZE)])

    def remove(self, text: str, first: int, end: int | None = None) -> None:
        self._caches.apply(self._replica, [BlocksRemoved(self.names(text)[first:end])])


def setup(n: int = 1, most: int = 4096) -> tuple[ClusterState, ExactCaches, Server]:
    cluster = new_cluster(n, Clock(5.0), block_size=SIZE, num_blocks=1000)
    caches = ExactCaches(cluster, most)
    for replica in range(n):
        caches.begin(replica)
        caches.restarted(replica)
        caches.current(replica)
    return cluster, caches, Server(caches)


def serve(cluster: ClusterState, text: str, replica: int = 0) -> Attempt:
    arrival = cluster.arrive(ask(text))
    attempt = Attempt(cluster, arrival, replica, decided(cluster, arrival, replica))
    attempt.tokens(1)
    attempt.close("done")
    return attempt


def learn(caches: ExactCaches, attempt: Attempt, text: str, replica: int = 0) -> None:
    runs, ids = attempt.arrival.runs, tokens(text)
    ends = np.arange(1, len(ids) + 1) / len(ids)
    caches.learn(replica, "m", runs.keys[:-1], runs.units[:-1], ids, ends)


def cached(cluster: ClusterState, text: str, replica: int = 0) -> int:
    return cluster.cached_on(cluster.arrive(ask(text + "next")), replica)


def test_evicted_blocks_leave_the_index_and_stored_ones_come_back() -> None:
    cluster, caches, server = setup()
    attempt = serve(cluster, TEXT)
    server.store(TEXT)
    learn(caches, attempt, TEXT)
    assert cached(cluster, TEXT) == 512
    server.remove(TEXT, 16)
    assert cached(cluster, TEXT) == 256
    server.remove(TEXT, 4, 16)
    assert cached(cluster, TEXT) == 64
    server.store(TEXT, 4)
    assert cached(cluster, TEXT) == 512


def test_another_client_may_have_filled_the_cache() -> None:
    """Content this router once sent elsewhere is found where somebody else has sent it."""
    cluster, caches, server = setup(2)
    attempt = serve(cluster, TEXT)
    server.store(TEXT)
    learn(caches, attempt, TEXT)
    assert cached(cluster, TEXT, replica=1) == 0
    Server(caches, 1).store(TEXT)
    assert cached(cluster, TEXT, replica=1) == 512


def test_what_was_evicted_before_its_tokens_were_known_leaves_too() -> None:
    cluster, caches, server = setup()
    attempt = serve(cluster, TEXT)
    server.store(TEXT)
    server.remove(TEXT, 8)
    learn(caches, attempt, TEXT)
    assert cached(cluster, TEXT) == 128


def test_prompts_learned_while_events_were_late_are_compared_afterwards() -> None:
    cluster, caches, server = setup()
    server.store(TEXT[::-1])
    caches.set_trust(0, STALE)
    attempt = serve(cluster, TEXT)
    learn(caches, attempt, TEXT)
    assert cached(cluster, TEXT) == 512
    server.store(TEXT)
    server.remove(TEXT, 8)
    caches.current(0)
    assert cached(cluster, TEXT) == 128


def test_runs_evicted_while_events_were_late_leave_the_index() -> None:
    cluster, caches, server = setup()
    server.store(TEXT[::-1])
    caches.set_trust(0, STALE)
    attempt = serve(cluster, TEXT)
    learn(caches, attempt, TEXT)
    caches.current(0)  # the prompt was stored and evicted, and both before anything was known
    assert cached(cluster, TEXT) == 0


def test_the_end_of_an_answer_may_be_evicted_alone() -> None:
    cluster, caches, server = setup()
    arrival = cluster.arrive(ask(TEXT))
    attempt = Attempt(cluster, arrival, 0, decided(cluster, arrival, 0))
    attempt.tokens(64)
    attempt.close("done")
    whole = TEXT + "answ" * 64
    server.store(whole)
    learn(caches, attempt, TEXT)
    held = int(cluster.index.totals["held_tokens"][0])
    assert held == 512 + 64
    server.remove(whole, 32)
    assert int(cluster.index.totals["held_tokens"][0]) == 512
    assert cached(cluster, TEXT) == 512


def test_an_adapter_has_a_cache_of_its_own() -> None:
    cluster, caches, server = setup()
    attempt = serve(cluster, TEXT)
    names, ids = server.names(TEXT), tokens(TEXT)
    stored = BlocksStored(names, None, ids, SIZE, [["m"]] * len(names))
    caches.apply(0, [stored])
    learn(caches, attempt, TEXT)
    assert cached(cluster, TEXT) == 512
    caches.apply(0, [BlocksRemoved(names)])
    assert cached(cluster, TEXT) == 0


def test_blocks_reported_again_are_the_same_blocks() -> None:
    cluster, caches, server = setup()
    attempt = serve(cluster, TEXT)
    server.store(TEXT)
    server.store(TEXT)  # found cached by a second prompt
    learn(caches, attempt, TEXT)
    server.remove(TEXT, 0)
    assert cached(cluster, TEXT) == 0
    assert not caches.mirrors[0].ours
    assert not caches.mirrors[0].parents


def test_a_cleared_cache_is_empty() -> None:
    cluster, caches, server = setup()
    learn(caches, serve(cluster, TEXT), TEXT)
    server.store(TEXT)
    caches.apply(0, [AllCleared()])
    assert cached(cluster, TEXT) == 0
    assert caches.trust_of(0) == EXACT


def test_while_exact_the_router_does_not_guess_evictions() -> None:
    """A server that reports fewer cached tokens than believed proves nothing about others."""
    cluster, caches, server = setup()
    other = TEXT[::-1]
    for text in (other, TEXT):
        attempt = serve(cluster, text)
        server.store(text)
        learn(caches, attempt, text)
    cluster.clock.now = 9.0  # type: ignore[attr-defined]
    arrival = cluster.arrive(ask(TEXT + "next"))
    attempt = Attempt(cluster, arrival, 0, decided(cluster, arrival, 0))
    attempt.usage(513, 1, 0)
    attempt.close("done")
    assert cached(cluster, other) == 512
    caches.set_trust(0, STALE)
    arrival = cluster.arrive(ask(TEXT + "next"))
    attempt = Attempt(cluster, arrival, 0, decided(cluster, arrival, 0))
    attempt.usage(513, 1, 0)
    attempt.close("done")
    assert cached(cluster, other) == 0


def test_after_missed_events_trust_returns_once_the_cache_has_turned_over() -> None:
    _cluster, caches, server = setup()
    caches.missed(0)
    caches.current(0)
    assert caches.trust_of(0) == ESTIMATED
    rng = np.random.default_rng(1)
    for _ in range(2000 // 32 + 1):
        server.store("".join(f"{k:04d}" for k in rng.integers(0, 9999, 512)))
        caches.current(0)
    assert caches.trust_of(0) == EXACT


def test_more_blocks_than_there_is_room_for_are_not_exact() -> None:
    _cluster, caches, server = setup(most=16)
    server.store(TEXT)
    caches.current(0)
    assert len(caches.mirrors[0].ours) == 16
    assert caches.trust_of(0) == ESTIMATED


@pytest.mark.parametrize("most", [8, 64])
def test_remembered_texts_are_bounded(most: int) -> None:
    cluster, caches, server = setup(most=most)
    for k in range(20):
        text = f"{k:04d}" * 64
        attempt = serve(cluster, text)
        server.store(text)
        learn(caches, attempt, text)
    assert len(caches.runs) <= most


def test_a_prompt_shorter_than_a_block_is_never_cached() -> None:
    cluster, caches, server = setup()
    server.store(TEXT)  # the size of blocks is known
    attempt = serve(cluster, TEXT[:40])
    learn(caches, attempt, TEXT[:40])
    assert int(cluster.index.totals["count"][0]) == 0


def test_a_prompt_may_be_learned_before_the_first_event() -> None:
    cluster, caches, server = setup()
    attempt = serve(cluster, TEXT)
    learn(caches, attempt, TEXT)
    assert caches.learned == 0
    server.store(TEXT)
    assert caches.learned == 1
    server.remove(TEXT, 16)
    assert cluster.cached_on(cluster.arrive(ask(TEXT)), 0) == 256
