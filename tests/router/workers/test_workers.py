"""Several router processes on one port."""

import asyncio
import mmap
import os
import signal
import struct
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

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
from tailrace.errors import TailraceError
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.workers import aggregate
from tailrace.router.workers.peer_workers import WorkerResponse
from tailrace.router.workers.supervisor import Supervisor, SupervisorPipes, reserve
from tailrace.router.workers.worker import part_of

# ---- real processes -----------------------------------------------------------------------------


def pids_of(made: Cluster) -> dict[int, int]:
    """Processes of the workers by their number."""
    return {w["worker"]: w["pid"] for w in made.status()["workers"]}


def answered(made: Cluster, count: int) -> set[str]:
    """Send requests, each on a connection of its own; return the replicas that answered."""

    async def send() -> set[str]:
        found = set()
        for i in range(count):
            outcome = await ask(made.listen, completion(2, f"{i} "))
            assert outcome.answered
            found.add(outcome.replica)
        return found

    return run(send(), limit_s=120)


async def killed_under_load(made: Cluster, pid: int) -> list[Outcome]:
    """Kill a worker while all stream."""
    outcomes = [Outcome() for _ in range(24)]
    tasks = [
        asyncio.create_task(ask(made.listen, completion(200, f"{i} "), outcome))
        for i, outcome in enumerate(outcomes)
    ]
    while not all(outcome.began for outcome in outcomes):
        await asyncio.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*tasks)
    return outcomes


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def samples(text: str) -> dict[str, float]:
    """Sums of all samples by name."""
    total: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["worker"] in "01"
            total[sample.name] = total.get(sample.name, 0) + sample.value
    return total


def test_workers_are_one_router(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.start_emulator(2)
        made.start_router(
            processes=2, routing__policy="round_robin", routing__limit_ms=10_000, drain_s=5,
            lame_duck_s=0,
            decisions__folder=tmp_path / "decisions",
        )  # fmt: skip
        until("both workers", lambda: len(made.status()["workers"]) == 2)
        before = pids_of(made)

        # Whoever is asked answers for all.
        assert len(answered(made, 40)) == 2
        status = made.status()
        assert status["requests"] == {"done": 40}
        assert status["decisions"]["total"] == 40
        assert sum(w["decisions"] for w in status["workers"]) == 40
        assert status["latency"]["e2e"]["1m"]["count"] == 40
        assert len(status["recent"]) == 40
        assert [r["number"] for r in status["recent"]] == list(range(40, 0, -1))
        assert all(w["decisions"] for w in status["workers"])  # the system spreads connections
        with urllib.request.urlopen(f"http://{HOST}:{made.admin}/metrics", timeout=10) as answer:
            found = samples(answer.read().decode())
        assert found["tailrace_requests_total"] == 40
        assert found["tailrace_e2e_seconds_count"] == 40
        assert fetch(made.admin, "/status/history")["every_s"] > 0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(made.admin, "/nothing")

        # A change is made everywhere.
        drained = f"{HOST}:{made.ports[0]}"
        assert fetch(made.admin, "/backends/0/drain", {})["state"] == "draining"
        assert made.backends()[0]["state"] == "draining"
        assert drained not in answered(made, 20)
        fetch(made.admin, "/backends/0/undrain", {})
        assert drained in answered(made, 20)

        # One that dies under load is started again, and the others' clients do not notice.
        outcomes = run(killed_under_load(made, before[0]), limit_s=120)
        cut_off = [o for o in outcomes if not o.answered]
        assert 0 < len(cut_off) < len(outcomes)
        assert not any(o.complete for o in cut_off)  # and the dead one's can tell
        until("a new one", lambda: pids_of(made).get(0, before[0]) != before[0])
        assert pids_of(made)[1] == before[1]
        answered(made, 20)
        made.assert_alive_and_quiet()

        # The end is orderly, for all of them.
        after = pids_of(made)
        process = made.processes["router"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert all(is_gone(pid) for pid in after.values())
        assert len(list((tmp_path / "decisions").glob("decisions-*"))) >= 2


def test_changes_outlive_the_workers_that_were_told(tmp_path: Path) -> None:
    """A worker that is killed, or stopped, comes back with all that was changed since the start."""
    file = tmp_path / "router.toml"

    with cluster(tmp_path) as made:
        made.start_emulator(3)
        made.listen, made.admin = free_ports(2)
        urls = [f"http://{HOST}:{port}" for port in made.ports]

        def write(policy: str, *listed: str) -> None:
            entries = "".join(f'[[backends]]\nurl = "{url}"\n' for url in listed)
            file.write_text(
                f'listen = "{HOST}:{made.listen}"\nadmin.listen = "{HOST}:{made.admin}"\n'
                f'routing = {{policy = "{policy}", limit_ms = 10000}}\nprocesses = 2\n'
                f"watchdog_s = 2\nlame_duck_s = 0\n{entries}"
            )

        write("round_robin", *urls[:2])
        made.run("router", "serve", "--config", str(file))
        until("both workers", lambda: len(made.status()["workers"]) == 2)
        write("least_outstanding", *urls)
        made.processes["router"].send_signal(signal.SIGHUP)
        until("the reload", lambda: len(made.backends()) == 3)
        fetch(made.admin, "/backends/0/drain", {})
        added = fetch(made.admin, "/backends", {"url": f"http://{HOST}:1", "name": "added"})
        assert added["state"] == "closed"
        fetch(made.admin, "/backends/added/drain", {})
        file.write_text("nonsense")  # what is read again must not matter

        def same() -> None:
            status = made.status()
            assert status["policy"] == "least_outstanding"
            states = {b["url"]: b["state"] for b in made.backends()}
            drained = [url for url, state in states.items() if state == "draining"]
            assert len(states) == 4
            assert sorted(drained) == sorted([urls[0], f"http://{HOST}:1"])
            # A backend gets requests once its models are known.
            expected = {url.removeprefix("http://") for url in urls[1:]}
            until("answers of all", lambda: answered(made, 12) == expected)

        same()
        for kind in (signal.SIGKILL, signal.SIGSTOP):
            before = pids_of(made)
            for number, pid in before.items():
                os.kill(pid, kind)
                until("a new one", lambda n=number, p=pid: pids_of(made).get(n, p) != p)
            until("both workers", lambda: len(made.status()["workers"]) == 2)
            assert not set(pids_of(made).values()) & set(before.values())
            same()
        with pytest.raises(urllib.error.HTTPError, match="400"):
            fetch(made.admin, "/reload", {})
        same()
        made.assert_alive_and_quiet()


def test_a_limit_holds_over_all_workers(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.start_emulator(1)
        made.start_router(
            processes=2, routing__policy="round_robin", routing__limit_ms=10_000,
            admission__max_in_flight=3, metrics__path="off", lame_duck_s=0,
        )  # fmt: skip
        until("both workers", lambda: len(made.status()["workers"]) == 2)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                (replica,) = await asyncio.to_thread(fetch, made.faults, "/replicas")
                most = max(most, replica["waiting"] + replica["running"])

        async def test() -> list[Outcome]:
            watching = asyncio.create_task(watch())
            try:
                requests = (completion(20, f"{i} ") for i in range(60))
                return await asyncio.gather(*(ask(made.listen, r) for r in requests))
            finally:
                watching.cancel()

        assert all(o.answered for o in run(test(), limit_s=120))
        assert 1 < most <= 3
        assert all(w["decisions"] for w in made.status()["workers"])  # both had their share
        made.assert_alive_and_quiet()


def test_workers_do_not_outlive_their_supervisor(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.ports = free_ports(1)
        made.listen, made.admin = free_ports(2)
        made.run(
            "router", "serve", f"--backend=http://{HOST}:{made.ports[0]}", "--processes=2",
            f"--listen={HOST}:{made.listen}", f"--admin={HOST}:{made.admin}", "-pround_robin",
        )  # fmt: skip
        until("both workers", lambda: len(made.status()["workers"]) == 2)
        pids = pids_of(made)
        made.kill("router")
        until("they are gone", lambda: all(is_gone(pid) for pid in pids.values()), 60)


# ---- the supervisor -----------------------------------------------------------------------------


def supervised(folder: Path, count: int, work: Any, grace_s: float = 5.0, **more: Any) -> int:
    """Run a supervisor in a process of its own; return that process."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            sys.stderr = (folder / "errors").open("w")
            code = Supervisor(count, work, drain_s=0.1, grace_s=grace_s, **more).run(
                lambda: (folder / "started").touch(exist_ok=False)
            )
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_worker_that_cannot_start_ends_all(tmp_path: Path) -> None:
    def work(number: int, pipes: SupervisorPipes) -> int:
        if number == 1:
            raise TailraceError("not possible")
        pipes.report_ready()
        signal.pause()
        return 0

    assert exit_code(supervised(tmp_path, 2, work)) == 1
    assert not (tmp_path / "started").exists()
    assert "error: not possible" in (tmp_path / "errors").read_text()


def test_a_reload_that_comes_during_the_start_is_not_lost(tmp_path: Path) -> None:
    def work(number: int, pipes: SupervisorPipes) -> int:
        signal.signal(signal.SIGHUP, lambda *_: (tmp_path / "reloaded").touch())
        (tmp_path / "starting").touch()
        until("the signal", (tmp_path / "signalled").exists)
        time.sleep(0.3)  # the supervisor looks for signals meanwhile
        pipes.report_ready()
        while True:
            time.sleep(0.01)

    pid = supervised(tmp_path, 1, work)
    until("the start", (tmp_path / "starting").exists)
    os.kill(pid, signal.SIGHUP)
    (tmp_path / "signalled").touch()
    until("the reload", (tmp_path / "reloaded").exists)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 0


def test_one_that_is_silent_is_killed_and_started_again(tmp_path: Path) -> None:
    memory = mmap.mmap(-1, 8)

    def beats() -> float:
        return float(struct.unpack("d", memory[:8])[0])

    def work(number: int, pipes: SupervisorPipes) -> int:
        pipes.report_ready()
        first = not (tmp_path / "first").exists()
        (tmp_path / ("first" if first else "second")).touch()
        while not (first and (tmp_path / "stop").exists()):
            memory[:8] = struct.pack("d", beats() + 1)
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    pid = supervised(
        tmp_path, 1, work, grace_s=0.1, beat_at=lambda _: beats(), watchdog_s=lambda: 0.3
    )
    until("the start", (tmp_path / "started").exists)
    (tmp_path / "stop").touch()
    until("the second", (tmp_path / "second").exists)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 0


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_one_that_does_not_end_is_killed(tmp_path: Path, sent: int, code: int) -> None:
    def work(number: int, pipes: SupervisorPipes) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pipes.report_ready()
        while True:
            time.sleep(10)

    pid = supervised(tmp_path, 2, work, grace_s=0.1)
    until("the start", (tmp_path / "started").exists)
    os.kill(pid, sent)
    assert exit_code(pid) == code


def test_a_port_in_use_is_told() -> None:
    where, kept = reserve("127.0.0.1:0")
    kept.listen()
    with pytest.raises(TailraceError, match="choose another port"):
        reserve(where)
    kept.close()


def test_limits_are_divided() -> None:
    settings = ServeSettings.model_validate(
        {
            "backends": [{"url": "http://h:1", "max_in_flight": 5}, {"url": "http://h:2"}],
            "admission": {"max_in_flight": 7, "queue": 3},
            "limits": {"connections": 101},
        }
    )
    parts = [part_of(settings, number, 2) for number in range(2)]
    # What a replica gets at most is counted over all workers.
    assert [p.backends[0].max_in_flight for p in parts] == [5, 5]
    assert [p.admission.max_in_flight for p in parts] == [7, 7]
    assert [p.admission.queue for p in parts] == [2, 1]
    assert [p.limits.connections for p in parts] == [51, 50]


# ---- merged responses ---------------------------------------------------------------------------


def test_responses_of_workers() -> None:
    assert aggregate.merge("/status", [])[0] == 503
    refused = [WorkerResponse(0, 200, b"{}"), WorkerResponse(1, 400, b'{"error":1}')]
    assert aggregate.merge("/reload", refused) == (400, b"application/json", b'{"error":1}')
    assert aggregate.merge("/reload", refused[:1])[2] == b"{}"


def test_metrics_of_workers_are_labelled() -> None:
    text = '# HELP a b\n# TYPE a counter\na_total 1.0\n# TYPE c gauge\nc{x="}y"} 2\n'
    out = aggregate.metrics([(0, text), (1, text)]).decode()
    assert out.splitlines() == [
        "# HELP a b", "# TYPE a counter", 'a_total{worker="0"} 1.0', 'a_total{worker="1"} 1.0',
        "# TYPE c gauge", 'c{worker="0",x="}y"} 2', 'c{worker="1",x="}y"} 2',
    ]  # fmt: skip


def test_history_is_added_slot_by_slot() -> None:
    def part(slots: list[int], queued: list[list[int]]) -> dict[str, Any]:
        return {
            "every_s": 2.0, "slots": slots, "age_s": [10.0 - s for s in slots],
            "in_flight": queued, "queued": queued, "waiting": [1] * len(slots),
            "decisions_per_s": [0.5] * len(slots),
        }  # fmt: skip

    first, second = part([1, 2], [[1], [2, 3]]), part([2, 3], [[4], [5]])
    found = aggregate.history([(0, first), (1, second)])
    assert found["slots"] == [1, 2, 3]
    assert found["in_flight"] == [[1], [6, 3], [5]]
    assert found["waiting"] == [1, 2, 1]
    assert found["age_s"] == [9.0, 8.0, 7.0]


def test_the_store_and_the_caches_of_all_workers_are_shown() -> None:
    """One worker knows the members for all; the least trust of any worker counts."""
    known = {"connected": True, "members": 3, "lost": 1, "missed": 0, "refused": 2}
    other = {**known, "members": 0, "refused": 0}
    found = aggregate._store([other, known])
    assert found == {"connected": True, "members": 3, "lost": 2, "missed": 0, "refused": 2}
    assert aggregate._store([]) is None

    view: dict[str, Any] = {
        "state": "closed", "metrics_age_s": None, "limit": None, "share_1m": None, "opened": 0,
        "waiting": None, "running": None, "kv_used": None, "available": True, "warming": False,
        **dict.fromkeys(("in_flight", "queued", "scrape_failures", "cached_tokens"), 0),
    }  # fmt: skip
    seen = [("exact", 0.0), ("stale", 2.5), ("estimated", None)]
    views = [(1.0, {**view, "caches": trust, "event_lag_s": lag}) for trust, lag in seen]
    merged = aggregate._replica(views)
    assert (merged["caches"], merged["event_lag_s"]) == ("stale", 2.5)
