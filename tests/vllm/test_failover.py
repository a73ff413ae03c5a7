"""A real server is killed and comes back; the router is stopped."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from .client import post
from .processes import BATCH, MODEL, wait_for

pytestmark = pytest.mark.vllm

#: More than both servers run at once, so that some wait when one dies.
LOAD = 3 * BATCH
TOKENS = 300


def request(number, stream=True, max_tokens=TOKENS):
    return {
        "model": MODEL, "prompt": f"{number} boats wait at the gate of the river.",
        "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
    }  # fmt: skip


def long_request(name):
    """A prompt of many blocks that shares none with another name's."""
    return request(name, max_tokens=2) | {"prompt": f"{name}: " + f"The {name} river. " * 60}


def remembered(router):
    """Send long prompts until each replica has one cached; return who has which."""
    held = {}

    def send(name):
        held[name] = post(router.address, "/v1/completions", long_request(name)).replica

    # Several at once: one by one, a policy may find the same replica better every time.
    with ThreadPoolExecutor(4) as pool:
        for first in range(0, 40, 4):
            list(pool.map(send, [f"long {number}" for number in range(first, first + 4)]))
            if len(set(held.values())) == 2:
                return held
    raise AssertionError(f"one replica got all of {held}")


class Load:
    """Requests under way at once; three of four stream."""

    def __init__(self, router, count, first=0, max_tokens=TOKENS):
        self._router = router
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self.begun = Counter()
        """Answers of which something has arrived, by replica."""
        self._pool = ThreadPoolExecutor(count)
        self._replies = [
            self._pool.submit(self._one, k, k % 4 != 3) for k in range(first, first + count)
        ]

    def _one(self, number, stream):
        heard = set()

        def count(reply):
            with self._lock:
                self.begun.update({reply.replica} - heard)
            heard.add(reply.replica)

        body = request(number, stream, self._max_tokens)
        return stream, post(self._router.address, "/v1/completions", body, on_data=count)

    def replies(self):
        replies = [reply.result(300) for reply in self._replies]
        self._pool.shutdown()
        return replies


def error_in(reply):
    """The error that ends a stream; None: there is none."""
    last = reply.events[-1] if reply.events else ""
    return json.loads(last).get("error") if last.startswith("{") else None


def test_killed_server_costs_only_what_it_was_streaming(servers, start_router):
    router = start_router()
    held = remembered(router)
    load = Load(router, LOAD)

    def streaming_and_waiting():
        """A server that has more than it runs at once, so that some have not begun."""
        backends = router.backends()
        return next(
            (s for s in servers if load.begun[s.name] and backends[s.name]["in_flight"] > BATCH),
            None,
        )

    dying = wait_for(streaming_and_waiting, 60, "a server to be full", every_s=0.005)
    other = next(server for server in servers if server is not dying)
    dying.kill()
    whole = broken = 0
    for stream, reply in load.replies():
        assert reply.status == 200
        assert not reply.broken  # however it ends, it ends as HTTP should
        if not stream:
            assert reply.json()["usage"]["completion_tokens"] == TOKENS
            whole += 1
        elif reply.is_whole:
            whole += 1
        else:
            error = error_in(reply)
            assert error is not None, reply.events[-1:]
            assert dying.name in error["message"]
            assert reply.replica == dying.name
            assert len(reply.events) >= 2  # it had begun
            broken += 1
    assert whole + broken == LOAD
    assert 1 <= broken <= BATCH

    # The router goes on with the other one.
    for k in range(4):
        reply = post(router.address, "/v1/completions", request(100 + k, max_tokens=4))
        assert reply.is_whole
        assert reply.replica == other.name
    wait_for(lambda: router.backends()[dying.name]["state"] == "open", 30, "the breaker to open")
    assert router.is_healthy()

    # It comes back on the same address, and nothing is thought to be cached there any more.
    dying.start()
    dying.wait_until_healthy()
    wait_for(
        lambda: router.backends()[dying.name]["state"] == "closed", 60, "the router to trust it"
    )
    start = time.time()
    asked_again = [name for name, replica in held.items() if replica == dying.name]
    for name in asked_again:
        assert post(router.address, "/v1/completions", long_request(name)).is_whole
    for line in router.decided_since(start, len(asked_again)):
        assert line["cached_believed"] == 0
    again = Load(router, LOAD, first=200, max_tokens=20)
    assert all(reply.status == 200 and not reply.broken for _, reply in again.replies())
    assert set(again.begun) == {dying.name, other.name}

    assert router.status()["in_flight"] == 0
    assert all(b["in_flight"] == b["ledger_in_flight"] == 0 for b in router.backends().values())

    assert router.stop() == 0, router.last_lines()
    lines = router.decided()
    lost = [line for line in lines if line["outcome"] == "backend_failed"]
    unbegun = [line for line in lost if line["first"] is None or line["estimated"]]
    retried = {line["id"] for line in lines if line["attempt"] and line["outcome"] == "done"}
    assert len(lost) == broken + len(unbegun)
    assert {line["id"] for line in unbegun} <= retried
    assert retried, "nothing waited at the killed server: the test has shown nothing"


def test_router_that_is_stopped_lets_streams_end(start_router):
    router = start_router()
    asked = threading.Event()
    status = []

    def stop():
        asked.wait(60)
        status.append(router.stop(60))

    stopping = threading.Thread(target=stop)
    stopping.start()
    reply = post(router.address, "/v1/completions", request(0), on_data=lambda _: asked.set())
    stopping.join()
    assert reply.is_whole
    assert reply.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert status == [0]
