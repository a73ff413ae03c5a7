"""Faults of real processes: nothing is lost that need not be, and the ledgers end empty."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from router.abuse.malformed import malformed
from router.conftest import run
from router.processes import (
    HOST,
    Cluster,
    Outcome,
    ask,
    cluster,
    completion,
    fetch,
    free_ports,
    until,
)

#: Quick to notice and to forgive, so that tests need not wait; a decision may take its time.
QUICK = {
    "routing__policy": "round_robin",
    "routing__limit_ms": 10_000,
    "health__interval_s": 0.2,
    "health__open_s": 0.2,
    "health__slow_start_s": 0,
    "metrics__interval_s": 0.2,
}
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three replicas that can be made to fail."""
    with cluster(tmp_path_factory.mktemp("faulty")) as made:
        made.start_emulator(3)
        # A replica that never answers is given up after a second.
        made.start_router(**QUICK, limits__first_byte_s=1, limits__between_chunks_s=1)
        yield made


@pytest.fixture(scope="module")
def patient(faulty: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A router in front of the same replicas that gives up none of them, however busy they are."""
    made = Cluster(tmp_path_factory.mktemp("patient"), ports=faulty.ports, faults=faulty.faults)
    try:
        made.start_router(**QUICK)
        yield made
    finally:
        made.stop()


@pytest.fixture
def healthy(faulty: Cluster) -> Iterator[Cluster]:
    """The same, well before and after the test."""
    yield faulty
    for replica in range(3):
        faulty.fault(replica, "return")
    until("all are back", lambda: all(b["state"] == "closed" for b in faulty.backends()))
    faulty.assert_alive_and_quiet()


def ask_all(made: Cluster, requests: list[bytes]) -> list[Outcome]:
    """Send requests at the same time."""

    async def send() -> list[Outcome]:
        return await asyncio.gather(*(ask(made.listen, request) for request in requests))

    return run(send(), limit_s=LIMIT_S)


# ---- kill -9 ------------------------------------------------------------------------------------


async def _killed_under_load(
    made: Cluster, streams: int, wholes: int, tokens: int, turn: int
) -> list[Outcome]:
    outcomes = [Outcome() for _ in range(streams + wholes)]
    tasks = []
    for i, outcome in enumerate(outcomes):
        # New prompts each time: those of the last time are cached where nobody was killed.
        request = completion(tokens, f"{turn} {i} " * 50, stream=i < streams)
        tasks.append(asyncio.create_task(ask(made.listen, request, outcome)))
    dead = f"{HOST}:{made.ports[0]}"
    # As soon as it streams: on a busy machine its streams may end before the others have begun.
    while not any(o.began and o.replica == dead for o in outcomes[:streams]):
        assert not all(task.done() for task in tasks), "no stream went to the replica"
        await asyncio.sleep(0.01)
    # Some that have not begun: they arrive as the replica dies.
    late = [asyncio.create_task(ask(made.listen, completion(5))) for _ in range(12)]
    await asyncio.sleep(0)
    await asyncio.to_thread(made.kill, "replica0")
    late += [asyncio.create_task(ask(made.listen, completion(5))) for _ in range(12)]
    await asyncio.gather(*tasks)
    return [*outcomes, *await asyncio.gather(*late)]


def _kill_and_return(
    made: Cluster, streams: int, wholes: int, tokens: int = 150, turn: int = 0
) -> None:
    dead = f"{HOST}:{made.ports[0]}"
    outcomes = run(_killed_under_load(made, streams, wholes, tokens, turn), limit_s=LIMIT_S)
    broken = [o for o in outcomes if not o.answered]
    # Only what had begun to stream from the dead one is lost, and its clients are told.
    assert 0 < len(broken) <= streams
    assert all(o.replica == dead and o.broken_off_cleanly for o in broken)
    assert all(o.answered for o in outcomes[streams:])
    living = {f"{HOST}:{port}" for port in made.ports[1:]}
    assert living <= {o.replica for o in outcomes if o.answered}
    made.assert_alive_and_quiet()
    made.start_replica(0)
    until("it is back", lambda: all(b["state"] == "closed" for b in made.backends()))
    # Prompts that no replica has cached: a policy that knows has no reason to avoid the new one.
    fresh = [completion(3, f"{i} of {turn} " * 40) for i in range(60)]
    again = ask_all(made, fresh)
    assert all(o.answered for o in again)
    assert dead in {o.replica for o in again}
    made.assert_alive_and_quiet()


def _own_processes(folder: Path) -> Cluster:
    made = Cluster(folder)
    made.ports = free_ports(3)
    for number in range(3):
        made.start_replica(number)
    return made


def test_a_replica_is_killed_under_load_and_returns(tmp_path: Path) -> None:
    made = _own_processes(tmp_path)
    try:
        made.start_router(**QUICK)
        _kill_and_return(made, streams=9, wholes=9)
    finally:
        made.stop()


# ---- replicas that misbehave --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hang", "garbage", "error", "die"])
def test_a_replica_that_fails_costs_no_request(healthy: Cluster, kind: str) -> None:
    healthy.fault(1, kind, **({"status": 503} if kind == "error" else {}))
    bad = f"{HOST}:{healthy.ports[1]}"
    outcomes = ask_all(healthy, [completion(4, f"{i} ", stream=i % 2 == 0) for i in range(24)])
    assert all(o.answered for o in outcomes)
    assert bad not in {o.replica for o in outcomes}
    if kind != "error":  # health probes see the others
        until("it is taken out", lambda: healthy.backends()[1]["state"] == "open")
    healthy.fault(1, "return")
    until("it is back", lambda: healthy.backends()[1]["state"] == "closed")
    again = ask_all(healthy, [completion(2) for _ in range(9)])
    assert bad in {o.replica for o in again}


def test_streams_that_hang_midway_end_with_an_error(healthy: Cluster) -> None:
    async def test() -> list[Outcome]:
        outcomes = [Outcome() for _ in range(6)]
        tasks = [
            asyncio.create_task(ask(healthy.listen, completion(400), outcome))
            for outcome in outcomes
        ]
        while not all(outcome.began for outcome in outcomes):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(healthy.fault, 2, "hang")
        await asyncio.gather(*tasks)
        return outcomes

    outcomes = run(test(), limit_s=LIMIT_S)
    hung = [o for o in outcomes if o.replica == f"{HOST}:{healthy.ports[2]}"]
    assert len(hung) == 2
    assert all(o.broken_off_cleanly for o in hung)
    assert all(o.answered for o in outcomes if o not in hung)


def test_a_slow_replica_gets_less(tmp_path: Path, faulty: Cluster) -> None:
    made = Cluster(tmp_path, ports=faulty.ports)
    faulty.fault(0, "slow", factor=0.05)
    try:
        made.start_router(**{**QUICK, "routing__policy": "least_outstanding"})
        counts: Counter[str] = Counter()

        async def client() -> None:
            for _ in range(8):
                outcome = await ask(made.listen, completion(8))
                assert outcome.answered
                counts[outcome.replica] += 1

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(12)))

        run(clients(), limit_s=LIMIT_S)
        slow, *others = (counts[f"{HOST}:{port}"] for port in made.ports)
        assert slow < min(others)
        made.assert_alive_and_quiet()
    finally:
        made.stop()
        faulty.fault(0, "return")


# ---- clients that misbehave ---------------------------------------------------------------------


def test_clients_that_go_away(patient: Cluster) -> None:
    """The replicas stop working for them, and nothing of them stays."""

    async def test() -> None:
        outcomes = [Outcome() for _ in range(60)]
        tasks = [
            asyncio.create_task(ask(patient.listen, completion(4000, stream=i % 3 > 0), outcome))
            for i, outcome in enumerate(outcomes)
        ]
        while not all(outcome.began for i, outcome in enumerate(outcomes) if i % 3):
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test(), limit_s=LIMIT_S)
    patient.assert_alive_and_quiet()
    until("the replicas have noticed", lambda: not _under_way(patient))


def _under_way(made: Cluster) -> int:
    return sum(r["waiting"] + r["running"] for r in fetch(made.faults, "/replicas"))


def _send_malformed(made: Cluster, count: int, seed: int) -> None:
    def send(request: bytes) -> None:
        with socket.create_connection((HOST, made.listen), timeout=LIMIT_S) as connection:
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass
            except ConnectionError:
                pass

    rng = random.Random(seed)
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(send, [malformed(rng) for _ in range(count)]))


def _survives(made: Cluster, count: int) -> None:
    _send_malformed(made, 100, 0)  # whatever is loaded on the way
    made.assert_alive_and_quiet()
    files, memory_mb = made.open_files, made.memory_mb
    _send_malformed(made, count, 1)
    made.assert_alive_and_quiet()
    until("no client is left", lambda: made.status()["clients"] == 0)
    until("no connection is left", lambda: made.open_files <= files + 16)
    until("memory is returned", lambda: made.memory_mb < memory_mb + 30, 30)
    assert all(o.answered for o in ask_all(made, [completion(2) for _ in range(9)]))


def test_malformed_requests(patient: Cluster) -> None:
    _survives(patient, 400)
