"""Real processes for tests: emulated replicas and a router, and clients that see every byte."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
START_S = 240.0


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def fetch(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """JSON from a process."""
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", data, timeout=10) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def until(what: str, holds: Callable[[], bool], limit_s: float = START_S) -> None:
    """Wait for something that must become true; it not doing so is a failure, not a hang."""
    limit = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            if holds():
                return
        assert time.monotonic() < limit, f"in vain: {what}"
        time.sleep(0.05)


@dataclass
class Cluster:
    """Replicas and a router in front of them, each a process of its own."""

    folder: Path
    ports: list[int] = field(default_factory=list)
    """Of the replicas."""
    faults: int = 0
    """Port through which replicas can be made to fail; 0: there is none."""
    listen: int = 0
    admin: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a tailrace command."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.cli", *arguments], stdout=log, stderr=log
            )
        self.processes[name] = process
        return process

    def start_replica(self, number: int) -> None:
        """Start a replica in a process of its own."""
        self.run(f"replica{number}", "emulate", "--replicas", "1", "--port",
                 str(self.ports[number]))  # fmt: skip

    def start_emulator(self, replicas: int) -> None:
        """Start all replicas in one process that can be told what goes wrong."""
        (self.faults,) = free_ports(1)
        # The others follow the first port, so they are tried until all are free.
        for _ in range(20):
            first = free_ports(1)[0]
            process = self.run(
                "emulator", "emulate", "--replicas", str(replicas), "--port", str(first),
                "--faults", "--admin-port", str(self.faults),
            )  # fmt: skip
            until("the emulator", lambda p=process: p.poll() is not None or self._emulates())
            if process.poll() is None:
                self.ports = list(range(first, first + replicas))
                return
        raise AssertionError("no ports for the emulator")

    def _emulates(self) -> bool:
        return bool(fetch(self.faults, "/replicas"))

    def start_router(self, **settings: Any) -> None:
        """Start the router with settings by their paths, dots written as two underscores."""
        self.listen, self.admin = free_ports(2)
        arguments = [f"--backend=http://{HOST}:{port}" for port in self.ports]
        for key, value in settings.items():
            arguments.append(f"--set={key.replace('__', '.')}={value}")
        self.run("router", "serve", "--listen", f"{HOST}:{self.listen}", "--admin",
                 f"{HOST}:{self.admin}", *arguments)  # fmt: skip
        until("the router", lambda: all(r["available"] for r in self.status()["replicas"]))

    def status(self) -> dict[str, Any]:
        """The router's own account."""
        return dict(fetch(self.admin, "/status"))

    def backends(self) -> list[dict[str, Any]]:
        """The router's view of the replicas."""
        return list(fetch(self.admin, "/backends"))

    def fault(self, replica: int, kind: str, **more: Any) -> None:
        """Make something go wrong with a replica, or end it (return)."""
        fetch(self.faults, f"/replicas/{replica}/fault", {"kind": kind, **more})

    def kill(self, name: str) -> None:
        """Kill -9."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def assert_alive_and_quiet(self) -> None:
        """The router runs, and nothing is under way in any of its ledgers."""
        assert self.processes["router"].poll() is None

        def quiet() -> bool:
            return not any(b["in_flight"] or b["ledger_in_flight"] for b in self.backends())

        until("all counters are zero", quiet)

    @property
    def open_files(self) -> int:
        """Files and sockets the router has open."""
        return len(list(Path(f"/proc/{self.processes['router'].pid}/fd").iterdir()))

    @property
    def memory_mb(self) -> float:
        """Resident memory of the router."""
        pages = Path(f"/proc/{self.processes['router'].pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stop(self) -> None:
        """End everything."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that is gone afterwards."""
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.stop()


@dataclass
class Outcome:
    """What became of a request."""

    status: int = 0
    replica: str = ""
    body: bytes = b""
    """Decoded."""
    began: bool = False
    """Whether a token has arrived."""
    complete: bool = False
    """Whether the message ended as HTTP says it must."""

    @property
    def answered(self) -> bool:
        """Whether the whole answer is there."""
        done = b"data: [DONE]" in self.body or b'"usage"' in self.body
        return self.status == 200 and self.complete and done

    @property
    def broken_off_cleanly(self) -> bool:
        """Whether a stream that had begun ended with an error that a client can read."""
        last = self.body.rstrip().rpartition(b"data: ")[2]
        return self.began and self.complete and b'"error"' in last


def completion(tokens: int, prompt: str = "words " * 20, *, stream: bool = True) -> bytes:
    """A request for so many tokens."""
    body = json.dumps(
        {"model": "emulated", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
         "stream": stream}
    ).encode()  # fmt: skip
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


async def ask(port: int, request: bytes, outcome: Outcome | None = None) -> Outcome:
    """Send a request on a connection of its own; note what comes as it comes."""
    found = outcome or Outcome()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        found.status = int(top.split()[1])
        headers = dict(line.split(": ", 1) for line in top.strip().split("\r\n")[1:])
        found.replica = headers.get("x-tailrace-replica", "")
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                found.body += (await reader.readexactly(size + 2))[:-2]
                found.began = True
            await reader.readexactly(2)
        else:
            found.body = await reader.readexactly(int(headers["content-length"]))
        found.complete = True
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()
    return found
