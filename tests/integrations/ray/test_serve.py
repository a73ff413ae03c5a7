"""Policies in a real Ray Serve: requests go where the policy says."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from ray import serve
from serve_helpers import Echo

from tailrace.errors import TailraceError
from tailrace.integrations.ray.serve_router import TailraceRouter, router_config

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
#: No decision falls back to the rule because this machine is slow.
PATIENT = {"limit_ms": 1e6}


@pytest.fixture(scope="module")
def started(cluster):
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()


@pytest.fixture
def deploy(started, request):
    """Deploy so many replicas behind a policy; returns their handle."""
    # A process has one router for all handles of a deployment, so each has a name of its own.
    name = request.node.name

    def deploy(policy, replicas):
        config = router_config(policy, choose=PATIENT)
        app = Echo.options(num_replicas=replicas, request_router_config=config).bind()
        handle = serve.run(app, name=name, route_prefix=None)
        ask(handle)  # the router is made with the first request, and hears of replicas one by one
        until(lambda: list(state_of(handle).in_flight.values()) == [0] * replicas)
        return handle

    yield deploy
    serve.delete(name)


def state_of(handle):
    """What the router behind a handle remembers."""
    router = handle._router._asyncio_router.request_router
    assert type(router) is TailraceRouter
    return router.handle_state


def ask(handle, text="hello", session=""):
    used = handle.options(session_id=session) if session else handle
    return used.remote({"prompt": text}).result(timeout_s=120)


def until(happens):
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_round_robin_takes_turns_and_every_request_is_accounted_for(deploy):
    handle = deploy("round_robin", 3)
    found = [ask(handle) for _ in range(9)]
    assert Counter(found).keys() == set(found[:3])
    assert found == found[:3] * 3
    state = state_of(handle)
    until(lambda: set(state.in_flight.values()) == {0})
    assert state.chooser.counts["decisions"] == 10


def test_requests_under_way_count(deploy):
    handle = deploy("least_outstanding", 2)
    held = [handle.hold.remote("wait") for _ in range(4)]
    state = state_of(handle)
    until(lambda: sorted(state.in_flight.values()) == [2, 2])
    # Whoever is released is idle then, and gets all that comes next.
    handle.release.remote().result(timeout_s=120)
    until(lambda: sorted(state.in_flight.values()) == [0, 2])
    assert len({ask(handle) for _ in range(4)}) == 1
    assert len(held) == 4  # the other two are held to the end


def test_a_session_stays_with_its_replica_and_a_dead_one_is_survived(deploy):
    handle = deploy("sticky_session", 2)
    # Two sessions at once, so that they begin at different replicas.
    both = [handle.options(session_id=name).hold.remote("hi") for name in ("s", "t")]
    state = state_of(handle)
    until(lambda: sorted(state.in_flight.values()) == [1, 1])
    for name in ("s", "t"):
        handle.options(session_id=name).release.remote().result(timeout_s=120)
    homes = [answer.result(timeout_s=120) for answer in both]
    assert homes[0] != homes[1]
    for _ in range(4):
        assert [ask(handle, session=name) for name in ("s", "t")] == homes
    pid = handle.options(session_id="s").pid.remote().result(timeout_s=120)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}/exe").exists())
    assert [ask(handle, session="t") for _ in range(3)] == [homes[1]] * 3
    new = ask(handle, session="s")
    assert new != homes[0]
    assert [ask(handle, session="s") for _ in range(3)] == [new] * 3
    until(lambda: len(state.in_flight) == 2)  # Serve has started another one
    assert set(state.in_flight.values()) == {0}


def test_the_trained_policy_routes_by_content(deploy):
    handle = deploy("tailrace", 2)
    answers = [ask(handle, f"{k} " + "words " * 50) for k in range(10)]
    assert len(answers) == 10
    counts = state_of(handle).chooser.counts
    assert counts["decisions"] == 11
    text = "a long text that all have in common " * 400
    home = ask(handle, text)
    assert {ask(handle, text + str(k)) for k in range(5)} == {home}


def test_mistakes_show_before_anything_is_deployed():
    with pytest.raises(TailraceError, match="servr"):
        router_config("tailrace", servr={})
