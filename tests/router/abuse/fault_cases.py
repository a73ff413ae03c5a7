"""Faults and bad days: requests that break servers, servers and workers that die, reloads, stops.

Each is a coroutine that takes a :class:`Target`; ``CASES`` lists them.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson

from router.abuse.case import Case, Target
from router.abuse.http_attacks import (
    CHAT,
    CHUNKED,
    COMPLETIONS,
    HEALTH,
    SMALL,
    connect,
    one,
    outcomes,
    post,
    send,
    status_of,
    told,
)
from router.abuse.innocents import request
from router.abuse.malformed import malformed
from router.abuse.stage import Stage
from router.processes import HOST, Outcome, ask, free_ports, until

WORKERS = {"processes": 2, "routing__policy": "round_robin", "watchdog_s": 3}
#: Failures of innocent requests that were with a process when it was killed.
WITH_SERVER = frozenset({"cut"})
WITH_WORKER = frozenset({"cut", "reset"})


async def wait(what: str, holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait for something that must become true."""
    await asyncio.to_thread(until, what, holds, limit_s)


def all_available(stage: Stage) -> bool:
    """Whether every replica gets requests."""
    return all(b["available"] for b in stage.backends())


def admin(stage: Stage, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Call the admin listener; return status and body."""
    call = urllib.request.Request(
        f"http://{HOST}:{stage.admin}{path}", method=method,
        data=orjson.dumps(body) if body is not None else None,
    )  # fmt: skip
    try:
        with urllib.request.urlopen(call, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


async def replicas_used(stage: Stage, count: int) -> set[str]:
    """Send short requests, each on a connection of its own; return which replicas answered."""
    found: list[Outcome] = [
        await ask(stage.listen, request(1, stream=False, every_ms=1)) for _ in range(count)
    ]
    assert all(o.status == 200 for o in found), f"answers: {[o.status for o in found]}"
    return {o.replica for o in found}


def address(port: int) -> str:
    """Name of a replica."""
    return f"{HOST}:{port}"


# ---- requests that break servers ----------------------------------------------------------------


def poisonous(what: bytes) -> Callable[[Target], Any]:
    """The attack with chats on which servers fail; no replica may be lost by them."""

    async def attack(target: Target) -> str:
        body = b'{"model":"emulated","messages":[{"role":"user","content":"poison"}]}'
        data = post(CHAT, body, extra=b"x-do: %b\r\n" % what)
        found: Counter[str] = Counter()
        least = len(target.stage.ports)
        for _ in range(target.count(10, 2)):
            for outcome in await asyncio.gather(*(one(target, data) for _ in range(8))):
                found[outcome] += 1
            usable = sum(b["available"] for b in target.stage.backends())
            least = min(least, usable)
        target.figures["replicas_left"] = least
        assert least >= len(target.stage.ports) / 2, f"only {least} replicas were left"
        await wait("all replicas are back", lambda: all_available(target.stage))
        return told(found) + f"; {least} of {len(target.stage.ports)} replicas left"

    return attack


async def stale_connections(target: Target) -> str:
    """Servers that execute a request and drop the connection: POSTs must not be repeated."""
    stage = target.stage
    count = target.count(100, 10)
    found: Counter[str] = Counter()
    for i in range(count):
        # The first makes the connection one that is dropped at its next request.
        for what, path in ((f"f{i}", b"/v1/unknown"), (f"c{i}", COMPLETIONS)):
            await one(target, post(COMPLETIONS, SMALL, extra=b"x-do: drop-next\r\n"))
            data = post(path, SMALL, extra=b"x-id: %b\r\n" % what.encode())
            found[f"{path.decode()} {await one(target, data)}"] += 1
    executed: dict[str, int] = stage.counts()["executed"]
    unknown = max((n for name, n in executed.items() if name[0] == "f"), default=0)
    known = max((n for name, n in executed.items() if name[0] == "c"), default=0)
    target.figures |= {"unknown_executed_at_most": unknown, "known_executed_at_most": known}
    assert unknown <= 1, f"an unknown POST was executed {unknown} times"
    assert known <= 3, f"a completion was executed {known} times"
    return told(found) + f"; executed at most {unknown} and {known} times"


CLOSED = (
    b"/sleep", b"/wake_up", b"/pause", b"/collective_rpc", b"/update_weights", b"/metrics",
    b"/v1/load_lora_adapter", b"/shutdown", b"/server_info", b"/v1/../metrics", b"/%73leep",
    b"//sleep", b"/v1/completions/../../sleep", b"/SLEEP", b"/sleep?x", b"/v1/completions/",
)  # fmt: skip


async def closed_paths(target: Target) -> str:
    """Paths of servers that are no inference: none of them reaches a server."""
    stage = target.stage
    found: Counter[str] = Counter()
    for _ in range(target.count(20)):
        for path in CLOSED:
            found[await one(target, post(path, b"{}", extra=b"x-id: closed\r\n"))] += 1
            get = b"GET %b HTTP/1.1\r\nhost: x\r\nx-id: closed\r\n\r\n" % path
            found[await one(target, get)] += 1
    reached = stage.counts()["executed"].get("closed", 0)
    assert reached == 0, f"{reached} requests reached a server"
    return told(found)


# ---- servers that die ---------------------------------------------------------------------------


async def killed_replica(target: Target) -> str:
    """A replica is killed ten times under load, and comes back."""
    stage = target.stage
    port = stage.ports[0]
    for _ in range(target.count(10, 2)):
        await asyncio.sleep(1.0)
        await asyncio.to_thread(stage.kill, f"server{port}")
        await asyncio.sleep(0.7)
        await asyncio.to_thread(stage.start_server_process, [port])
        await wait("it is back", lambda: all_available(stage))
    return "back each time"


async def lasting(target: Target) -> str:
    """Nothing but the innocent clients, who are many."""
    await asyncio.sleep(60 * target.size)
    status = target.stage.status()
    target.figures["streams"] = status["in_flight"]
    return f"{status['in_flight']} in flight at the end"


# ---- malformed requests -------------------------------------------------------------------------


async def fuzz(target: Target) -> str:
    """Ten thousand malformed requests, eight at a time."""
    rng = random.Random(target.seed)
    left = target.count(10_000)
    found: Counter[str] = Counter()

    async def sender() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            found[await ended(target, malformed(rng))] += 1

    await asyncio.gather(*(sender() for _ in range(8)))
    return told(found)


async def ended(target: Target, data: bytes) -> str:
    """Send data, end our side, and wait for the answer and the end of the connection."""
    reader, writer = await connect(target)
    try:
        await send(writer, data)
        with contextlib.suppress(OSError):
            writer.write_eof()
        found = await status_of(reader)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(20):
                await reader.read()
        return found if found in ("closed", "reset", "tolerated") else found[0] + "xx"
    finally:
        writer.transport.abort()


# ---- waiting, and limits over workers -----------------------------------------------------------


async def cancelled_waiters(target: Target) -> str:
    """Large requests that wait for room and are given up: their bodies must not stay."""
    stage = target.stage
    size = target.count(2_000_000, 100_000)
    busy = post(COMPLETIONS, SMALL, extra=b"x-tokens: 300\r\n")
    large = post(COMPLETIONS, b'{"model":"emulated","prompt":"' + b"a" * size + b'"}')
    most = 0
    for _ in range(3):
        writers = []
        for data in [busy] * 20 + [large] * 100:
            _, writer = await connect(target)
            writers.append(writer)
            await send(writer, data)
        most = max(most, stage.status()["waiting"])
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.5)
    return f"{most} waited at most"


async def over_workers(target: Target) -> str:
    """Many requests at once: no server gets more than max_in_flight from all workers together."""
    stage = target.stage
    data = request(5, stream=False, every_ms=20)
    found = await asyncio.gather(*(ask(stage.listen, data) for _ in range(target.count(200, 20))))
    most = max(stage.counts()["most"].values())
    target.figures["most_in_flight"] = most
    assert all(o.status == 200 for o in found), "not all were answered"
    limit = stage.settings["admission__max_in_flight"]
    assert most <= limit, f"{most} at once, allowed are {limit}"
    return f"at most {most} at once, allowed are {limit}"


KEYS = {"SOAK_KEY_ONE": "secret-one", "SOAK_KEY_MANY": "secret-many"}
CLIENTS = """
[[clients]]
name = "one"
key_env = "SOAK_KEY_ONE"
[[clients]]
name = "many"
key_env = "SOAK_KEY_MANY"
"""


async def sixty_against_one(target: Target) -> str:
    """A client with 60 connections against another with one, while the cluster is full."""
    asked: dict[str, Counter[str]] = {"one": Counter(), "many": Counter()}
    end = time.monotonic() + max(3.0, 20 * target.size)

    async def loop(name: str) -> None:
        extra = f"authorization: Bearer secret-{name}\r\n"
        data = request(5, stream=False, every_ms=20, extra=extra)
        while time.monotonic() < end:
            outcome = await ask(target.port, data)
            asked[name][str(outcome.status)] += 1
            if outcome.status != 200:
                await asyncio.sleep(0.05)

    await asyncio.gather(loop("one"), *(loop("many") for _ in range(60)))
    share = asked["one"]["200"] / asked["one"].total()
    target.figures |= {"share_of_one": share, "share_of_many":
                       asked["many"]["200"] / asked["many"].total()}  # fmt: skip
    assert share >= 0.9, f"one client got {share:.0%}"
    return f"one: {told(asked['one'])}; many: {told(asked['many'])}"


# ---- workers, reloads, stops --------------------------------------------------------------------


async def _kill_worker(stage: Stage, number: int, sent: int = signal.SIGKILL) -> None:
    before = stage.workers()
    os.kill(before[number], sent)
    await wait(
        "a new worker", lambda: stage.workers().get(number, before[number]) != before[number]
    )
    await wait("all workers listen", lambda: stage.listeners() == len(before))


async def restarted_worker(target: Target) -> str:
    """Workers that are killed after a reload and a drain must know of both."""
    stage = target.stage
    new = f"http://{HOST}:{stage.spare[0]}"
    old = [f"http://{address(port)}" for port in stage.ports]
    await asyncio.to_thread(stage.write_settings, backends=[*old, new])
    await asyncio.to_thread(stage.reload)
    admin(stage, "POST", "/backends/0/drain", {})
    expected = {address(stage.ports[1]), address(stage.spare[0])}
    for number in (0, 1):
        await _kill_worker(stage, number)
        await wait("all are available", lambda: sum(b["available"] for b in stage.backends()) == 2)
        used = await replicas_used(stage, 60)
        assert used == expected, f"used {used}, not {expected}"
    return "settings and drain kept"


async def reload_storm(target: Target) -> str:
    """A reload every tenth of a second while workers are killed; at the end all agree."""
    stage = target.stage
    rng = random.Random(target.seed)
    one_more = f"http://{HOST}:{stage.spare[0]}"
    all_of = [*(f"http://{address(port)}" for port in stage.ports), one_more]
    killed = 0
    for i in range(target.count(60, 6)):
        await asyncio.to_thread(
            stage.write_settings, backends=all_of if i % 2 else all_of[:-1],
            health__failures=rng.randrange(3, 9),
        )  # fmt: skip
        await asyncio.to_thread(admin, stage, "POST", "/reload", {})
        if i % 10 == 5:
            await _kill_worker(stage, killed % 2)
            killed += 1
        await asyncio.sleep(0.1)
    await asyncio.to_thread(stage.write_settings, backends=all_of)
    await wait("a last reload", lambda: admin(stage, "POST", "/reload", {})[0] == 200)
    await wait("all are there", lambda: len(stage.backends()) == 3 and all_available(stage))
    used = await replicas_used(stage, 60)
    assert len(used) == 3, f"used {used}"
    return f"{killed} workers killed, all agree"


async def refused_reload(target: Target) -> str:
    """A file with one mistake: nothing of it is taken over."""
    stage = target.stage
    before = stage.backends()
    urls = [f"http://{address(stage.ports[0])}", f"http://{address(stage.spare[0])}"]
    good = dict(stage.settings)
    mistakes: tuple[dict[str, Any], ...] = (
        {"backends": urls, "routing__policy": "no_such_policy"},
        {"backends": urls, "limits__header_s": -1},
        {"backends": [*urls, urls[0]]},
        {"backends": [*urls, "http://a..b:80"]},
    )
    statuses = []
    for changes in mistakes * target.count(5):
        await asyncio.to_thread(stage.write_settings, **changes)
        statuses.append(admin(stage, "POST", "/reload", {})[0])
        stage.settings = dict(good)
    await asyncio.to_thread(stage.write_settings)
    after = stage.backends()
    assert set(statuses) == {400}, f"statuses {set(statuses)}"
    names = [[b["name"] for b in found] for found in (before, after)]
    assert names[0] == names[1], f"backends changed: {names}"
    assert await replicas_used(stage, 20) <= {address(port) for port in stage.ports}
    return f"{len(statuses)} x 400, nothing changed"


async def changed_backends(target: Target) -> str:
    """Backends added and removed by admin calls: memory and decisions must not suffer."""
    stage = target.stage
    changes = target.count(300, 20)
    before_us, before_mb = await decision_us(stage), stage.anonymous_mb
    for i in range(changes):
        url = f"http://{HOST}:{stage.spare[0]}/p{i}"
        status, text = await asyncio.to_thread(admin, stage, "POST", "/backends", {"url": url})
        assert status == 200, f"change {i} was refused: {text.decode()[:200]}"
        name = orjson.loads(text).get("name", address(stage.spare[0]))
        if i % 10 == 0:
            await replicas_used(stage, 5)
        status, text = await asyncio.to_thread(admin, stage, "DELETE", f"/backends/{name}")
        assert status == 200, f"removal {i} was refused: {text.decode()[:200]}"
    await asyncio.sleep(2.0)
    after_us, after_mb = await decision_us(stage), stage.anonymous_mb
    target.figures |= {
        "changes": changes, "decision_us_before": before_us, "decision_us_after": after_us,
        "memory_mb_before": before_mb, "memory_mb_after": after_mb,
    }  # fmt: skip
    assert after_us < 1.5 * before_us + 10, f"decisions: {before_us:.0f} to {after_us:.0f} us"
    seen = stage.counts()["paths"]
    await asyncio.sleep(2.0)
    again = stage.counts()["paths"]
    polled = [p for p in again if p.startswith("/p") and again[p] != seen.get(p)]
    assert not polled, f"removed replicas are still polled: {polled[:3]}"
    return f"{changes} changes; decisions {before_us:.0f} us before, {after_us:.0f} us after"


async def decision_us(stage: Stage, count: int = 400) -> float:
    """Mean time of the next decisions."""
    before = stage.status()["decisions"]
    for _ in range(count // 20):
        await asyncio.gather(
            *(ask(stage.listen, request(1, stream=False, every_ms=1)) for _ in range(20))
        )
    after = stage.status()["decisions"]
    spent_s = after["total"] * after["mean_s"] - before["total"] * (before["mean_s"] or 0.0)
    return float(spent_s / (after["total"] - before["total"]) * 1e6)


async def stopped_worker(target: Target) -> str:
    """A worker that does nothing (SIGSTOP) is replaced by the watchdog."""
    stage = target.stage
    start = time.monotonic()
    await _kill_worker(stage, 0, signal.SIGSTOP)
    took_s = time.monotonic() - start
    target.figures["replaced_after_s"] = took_s
    await replicas_used(stage, 20)
    return f"replaced after {took_s:.1f} s"


async def killed_autopilot(target: Target) -> str:
    """The autopilot is killed under load; requests do not notice, and it is started again."""
    stage = target.stage
    kills = target.count(2, 1)
    for _ in range(kills):
        await wait("the autopilot runs", lambda: stage.autopilot() is not None)
        pid = stage.autopilot()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait("a new one", lambda pid=pid: stage.autopilot() not in (None, pid), 60.0)
    await wait("it reports", lambda: stage.status()["autopilot"] is not None, 60.0)
    return f"started again {kills} times"


async def lame_duck(target: Target) -> str:
    """SIGTERM: readiness fails first, connections are refused later, no request is lost."""
    stage = target.stage
    streams = [
        asyncio.ensure_future(ask(stage.listen, request(150, stream=True, every_ms=20)))
        for _ in range(target.count(100, 10))
    ]
    await asyncio.sleep(1.0)
    router = stage.processes["router"]
    router.send_signal(signal.SIGTERM)
    start = time.monotonic()
    ready = b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"
    not_ready_s = refused_s = None
    shorts = []
    while refused_s is None and time.monotonic() < start + 20:
        answer = await one(target, ready)
        elapsed_s = time.monotonic() - start
        if answer == "503" and not_ready_s is None:
            not_ready_s = elapsed_s
        if elapsed_s < 1.5:
            shorts.append((await ask(stage.listen, request(1, stream=False, every_ms=1))).status)
        if answer == "refused":
            refused_s = elapsed_s
        await asyncio.sleep(0.02)
    found = await asyncio.gather(*streams)
    code = await asyncio.to_thread(router.wait, 30)
    assert not_ready_s is not None, "it was ready to the end"
    assert refused_s is not None, "it accepted connections to the end"
    target.figures |= {"not_ready_after_s": not_ready_s, "refused_after_s": refused_s}
    assert not_ready_s < 0.5, f"not ready after {not_ready_s} s"
    assert refused_s > 1.8, f"refused after {refused_s} s"
    assert set(shorts) == {200}, f"answers after SIGTERM: {set(shorts)}"
    lost = sum(not o.answered for o in found)
    assert lost == 0, f"{lost} streams were lost"
    assert code == 0, f"exit code {code}"
    return f"not ready after {not_ready_s:.2f} s, refused after {refused_s:.2f} s, none lost"


async def many_after_one(target: Target) -> str:
    """Several processes right after one on the same port, and on both families of localhost."""
    stage = target.stage
    closing = HEALTH.replace(b"host: x", b"host: x\r\nconnection: close")
    await outcomes(one(target, closing) for _ in range(100))  # they leave the port in TIME_WAIT
    assert await asyncio.to_thread(stage.stop_router) in (0, 130)
    start = time.monotonic()
    await asyncio.to_thread(stage.start_router, processes=2)
    took_s = time.monotonic() - start
    await replicas_used(stage, 20)
    await asyncio.to_thread(stage.stop_router)
    stage.listen = free_ports(1)[0]
    await asyncio.to_thread(stage.start_router, processes=2, listen=f"localhost:{stage.listen}")
    there = {str(info[4][0]) for info in socket.getaddrinfo("localhost", stage.listen)}
    reached = {host for host in there for _ in range(10) if _connects(host, stage.listen)}
    assert reached == there, f"of localhost's {there} it serves {reached}"
    await asyncio.to_thread(stage.stop_router)
    await asyncio.to_thread(stage.start_router, processes=1)
    target.figures["started_after_s"] = took_s
    return f"two workers after {took_s:.1f} s; localhost is {' and '.join(sorted(reached))}"


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


# ---- small ones ---------------------------------------------------------------------------------


async def small_ones(target: Target) -> str:
    """Requests, answers and addresses that are odd; each is handled at once."""
    stage = target.stage
    for _ in range(target.count(20)):
        # A status without a body that comes with one; the connection must stay in step.
        reader, writer = await connect(target)
        await send(writer, post(COMPLETIONS, SMALL, extra=b"x-do: 205\r\n") + HEALTH)
        first, second = await status_of(reader), await status_of(reader)
        assert (first, second) in (("205", "200"), ("502", "200")), f"205: {first} {second}"
        writer.transport.abort()
        deep = b'{"model":"emulated","tools":' + b'[{"a":' * 300 + b"1" + b"}]" * 300
        deep += b',"messages":[{"role":"user","content":"a"}]}'
        assert await one(target, post(CHAT, deep)) in ("200", "400")
        start = time.monotonic()
        assert await one(target, CHUNKED + b"5\nhello\n0\n\n") == "400"
        assert time.monotonic() < start + 2, "chunks with LF only wait"
        reader, writer = await connect(target)
        await send(writer, post(COMPLETIONS, SMALL, extra=b"x-tokens: 50\r\n"))
        writer.write_eof()
        assert await status_of(reader) == "200", "a client that ended its side got no answer"
        writer.transport.abort()
    start = time.monotonic()
    status, _ = await asyncio.to_thread(admin, stage, "POST", "/backends", {"url": "http://a..b"})
    assert status == 400, f"http://a..b: {status}"
    assert time.monotonic() < start + 2, "http://a..b waits"
    for path in (b"/../secret", b"/v1/../../secret", b"/%2e%2e/secret", b"/v1/..%2f..%2fsecret"):
        await one(target, b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
    escaped = [path for path in stage.counts()["paths"] if not path.startswith("/inner/")]
    assert set(escaped) <= {"/v1/models", "/counts"}, f"outside of the prefix: {escaped}"
    return "as they should be"


async def full_disk(target: Target) -> str:
    """The decision log cannot be written: clients notice nothing, no empty files are left."""
    stage = target.stage
    for _ in range(target.count(30)):
        await outcomes(one(target, post(COMPLETIONS, SMALL)) for _ in range(20))
    folder = stage.folder / str(stage.settings["decisions__folder"])
    sizes = [path.stat().st_size for path in folder.glob("decisions-*")]
    assert all(sizes), f"empty files: {sizes}"
    return f"{len(sizes)} files of {sum(sizes)} bytes"


CASES = (
    Case("poisonous chats: servers close", poisonous(b"close"), {"health__failures": 3},
         servers=4),
    Case("poisonous chats: time-outs", poisonous(b"hang"), {"limits__first_byte_s": 1}, servers=4),
    Case("stale connections", stale_connections,
         {"paths": ["/v1/completions", "/v1/chat/completions", "/v1/unknown"]}),
    Case("closed paths", closed_paths),
    Case("a replica killed ten times", killed_replica, separate=True, servers=3, streams=60,
         every_ms=50, may_fail=WITH_SERVER),
    Case("1000 streams for 60 s", lasting, streams=1000, every_ms=500),
    Case("10 000 malformed requests", fuzz),
    Case("cancelled waiters", cancelled_waiters, {"admission__max_in_flight": 8}),
    Case("max_in_flight over two workers", over_workers,
         {**WORKERS, "admission__max_in_flight": 3, "admission__max_wait_s": 60}, innocents=False),
    Case("60 connections against one", sixty_against_one,
         {"admission__max_in_flight": 2, "admission__queue": 20}, clients=CLIENTS,
         innocents=False),
    Case("workers killed after reload and drain", restarted_worker, WORKERS,
         may_fail=WITH_WORKER),
    Case("reload storm, workers killed", reload_storm, WORKERS, may_fail=WITH_WORKER),
    Case("refused reloads", refused_reload),
    Case("300 changes of backends", changed_backends),
    Case("stopped worker", stopped_worker, WORKERS, may_fail=WITH_WORKER),
    Case("SIGTERM", lame_duck, {"lame_duck_s": 2}, innocents=False, ends=True),
    Case("two processes after one", many_after_one, innocents=False),
    Case("odd requests and answers", small_ones, prefix="/inner"),
    Case("autopilot killed", killed_autopilot,
         {"decisions__folder": "decisions", "autopilot__mode": "act", "autopilot__every_s": 1}),
    Case("no more room on the disk", full_disk, {"decisions__folder": "decisions"},
         file_bytes=20_000),
)  # fmt: skip
