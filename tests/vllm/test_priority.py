"""Real vLLM servers that serve by priority: short requests overtake long ones."""

import random
import threading
import time

import pytest

from .client import Reply, post
from .processes import MODEL, Router, vllm_server, wait_for

pytestmark = pytest.mark.vllm

FLAGS = ("--scheduling-policy", "priority")
LONG_WORDS, SHORT_WORDS, ANSWER_TOKENS = 900, 10, 24
PAIRS = 4


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """Two servers that run one request at a time, so that all others wait."""
    folder = tmp_path_factory.mktemp("by_priority")
    pair = [
        vllm_server(name, model, folder / f"{name}.log", batch=1, more=FLAGS)
        for name in ("left", "right")
    ]
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_healthy()
        yield pair
    finally:
        for server in pair:
            server.kill()


@pytest.fixture
def start(servers, tmp_path_factory):
    """Start a router with a policy in front of both servers."""
    started = []

    def start(policy):
        backends = {server.name: server.url for server in servers}
        router = Router(backends, tmp_path_factory.mktemp("router"), policy, by_priority=True)
        started.append(router)
        router.start()
        router.wait_until_healthy()
        return router

    yield start
    for router in started:
        router.kill()
    assert [line for router in started for line in router.errors()] == []


def ended(router, name):
    """Send long requests, then short ones; return (kind, when it ended, reply) in that order."""
    found: list[tuple[str, float, Reply]] = []

    def ask(kind, number, words):
        pick = random.Random(f"{name} {kind} {number}")
        prompt = " ".join(pick.choice(("gate", "river", "boat", "wheel")) for _ in range(words))
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        reply = post(router.address, "/v1/completions", body, timeout_s=600)
        found.append((kind, time.monotonic(), reply))

    threads = []
    for kind, words in (("long", LONG_WORDS), ("short", SHORT_WORDS)):
        for number in range(2 * PAIRS):
            threads.append(threading.Thread(target=ask, args=(kind, number, words)))
            threads[-1].start()
            # Each has reached its server before the next is sent.
            count = len(threads)
            wait_for(
                lambda count=count: (
                    len(found) + sum(b["in_flight"] for b in router.backends().values()) >= count
                ),
                60, f"request {count} to be sent", every_s=0.01,
            )  # fmt: skip
    for thread in threads:
        thread.join()
    assert all(reply.status == 200 for _, _, reply in found)
    return sorted(found, key=lambda one: one[1])


def overtakings(found):
    """Pairs of a short and a long request of one server in which the short one ended first."""
    count = 0
    for at, (kind, _, reply) in enumerate(found):
        if kind == "short":
            later = found[at + 1 :]
            count += sum(k == "long" and r.replica == reply.replica for k, _, r in later)
    return count


def test_short_requests_overtake_long_ones_where_the_router_says_so(start):
    plain = ended(start("round_robin"), "plain")
    assert overtakings(plain) == 0  # equal priorities: first come, first served
    router = start("round_robin+order:w=1000000,most=1000000")
    ordered = ended(router, "ordered")
    told = {kind: [] for kind in ("long", "short")}
    for kind, _, reply in ordered:
        told[kind].append(int(reply.headers["x-tailrace-priority"]))
    assert max(told["short"]) < min(told["long"])
    # On each server four of each kind: all short ones go before all long ones that were waiting
    # when the short ones came; at least the last two long ones were.
    assert overtakings(ordered) >= 2 * PAIRS * 2
