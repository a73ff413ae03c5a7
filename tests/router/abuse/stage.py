"""A router for one case of the soak suite: its servers, its clients, its settings file."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.processes import HOST, Cluster, fetch, free_ports, until

#: Quick to notice and to forgive, so that cases need not wait; a decision may take its time.
DEFAULTS = {
    "routing__limit_ms": 1000,
    "health__interval_s": 0.5,
    "health__open_s": 0.5,
    "health__slow_start_s": 0,
    "metrics__interval_s": 0.5,
}


@dataclass
class Stage(Cluster):
    """A cluster whose router reads its settings from a file."""

    spare: list[int] = field(default_factory=list)
    """Ports of servers that the router does not know at first."""
    settings: dict[str, Any] = field(default_factory=dict)
    clients: str = ""
    """TOML of the router's clients."""
    files: int | None = None
    """Limit of the router's open files; None: the system's."""
    file_bytes: int | None = None
    """Limit of the size of each file that it writes."""
    prefix: str = ""
    """Path of the servers' addresses."""

    def start_servers(self, count: int, *, separate: bool = False) -> None:
        """Start servers: all in one process, or each in one of its own."""
        ports = free_ports(count + 1)
        self.ports, self.spare = ports[:count], ports[count:]
        groups = [[port] for port in ports] if separate else [ports]
        for group in groups:
            self.start_server_process(group)

    def start_server_process(self, ports: list[int]) -> None:
        """Start servers on ports of their own."""
        self._module(f"server{ports[0]}", "router.abuse.backend", *map(str, ports))
        until("the servers", lambda: bool(fetch(ports[-1], "/v1/models")), 20)

    def start_emulator_with(self, *arguments: str) -> None:
        """Start emulated servers on any free ports, and wait until they are there.

        A router takes servers that it has not asked yet to be available.
        """
        process = self.run("emulator", "emulate", "--port", "0", "--json", *arguments)
        said = self.folder / "emulator.log"

        def announced() -> bool:
            assert process.poll() is None, f"the emulator has ended: {said.read_text()}"
            return "urls" in said.read_text()

        until("the emulator", announced)
        urls = json.loads(said.read_text().partition("\n")[0])["urls"]
        self.ports = [int(url.rpartition(":")[2]) for url in urls]

    def _module(self, name: str, module: str, *arguments: str, **pipes: Any) -> Any:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stderr=log, **{"stdout": log, **pipes}
            )
        self.processes[name] = process
        return process

    def start_innocents(self, streams: int = 4, every_ms: float = 10.0, extra: str = "") -> None:
        """Start clients that do nothing wrong."""
        pipe = subprocess.PIPE
        self._module(
            "innocents", "router.abuse.innocents", str(self.listen), f"--streams={streams}",
            f"--every-ms={every_ms}", f"--extra={extra}", stdin=pipe, stdout=pipe,
        )  # fmt: skip

    def stop_innocents(self) -> dict[str, Any]:
        """Let them finish, and return what they have seen."""
        out, _ = self.processes.pop("innocents").communicate(timeout=60)
        return dict(json.loads(out))

    @property
    def settings_file(self) -> Path:
        """What the router reads at start and at a reload."""
        return self.folder / "router.toml"

    def write_settings(self, **changes: Any) -> None:
        """Write the file; ``backends`` is a list of URLs."""
        self.settings |= changes
        lines = [
            f"{key.replace('__', '.')} = {json.dumps(value)}"
            for key, value in self.settings.items()
            if key != "backends"
        ]
        urls = self.settings.get("backends") or [
            f"http://{HOST}:{port}{self.prefix}" for port in self.ports
        ]
        lines += [f'[[backends]]\nurl = "{url}"' for url in urls]
        self.settings_file.write_text("\n".join([*lines, self.clients, ""]), encoding="utf-8")

    def start_router(self, **settings: Any) -> None:
        """Start the router with settings by their paths, dots written as two underscores."""
        if not self.listen:
            self.listen, self.admin = free_ports(2)
        own = {"listen": f"{HOST}:{self.listen}", "admin__listen": f"{HOST}:{self.admin}"}
        self.write_settings(**{**DEFAULTS, **own, **settings})
        router = self.run("router", "serve", "--config", str(self.settings_file))
        if self.files is not None:
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (self.files, self.files))
        if self.file_bytes is not None:
            limit = (self.file_bytes, self.file_bytes)
            resource.prlimit(router.pid, resource.RLIMIT_FSIZE, limit)
        count = int(self.settings.get("processes", 1))
        until("the router", lambda: self.is_up(count))

    def is_up(self, workers: int) -> bool:
        """Whether all workers run and all replicas are available."""
        assert self.processes["router"].poll() is None, "the router has ended"
        status = self.status()
        there = status.get("replicas", [])  # none while workers are being asked
        return (
            len(there) > 0
            and all(r["available"] for r in there)
            and (workers == 1 or len(status.get("workers", [])) == workers)
        )

    def stop_router(self, limit_s: float = 30.0) -> int:
        """End it as its operator would; return its exit code."""
        router = self.processes["router"]
        router.send_signal(signal.SIGTERM)
        router.send_signal(signal.SIGINT)  # without the lame duck's time
        return router.wait(limit_s)

    def reload(self) -> dict[str, Any]:
        """Make the router read its file again."""
        return dict(fetch(self.admin, "/reload", {}))

    def workers(self) -> dict[int, int]:
        """Processes of the workers by number."""
        return {w["worker"]: w["pid"] for w in self.status()["workers"]}

    def autopilot(self) -> int | None:
        """Process of the autopilot; None: it does not run."""
        for pid in _tree(self.processes["router"].pid):
            try:
                if b"tailrace.autopilot" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        return None

    def listeners(self) -> int:
        """Sockets that listen on the router's port, one for each worker that serves."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[1].endswith(f":{self.listen:04X}") and row[3] == "0A" for row in rows)

    def counts(self) -> dict[str, Any]:
        """What the servers have seen, if all are one process."""
        return dict(fetch(self.spare[0], "/counts"))

    def is_quiet(self) -> bool:
        """Whether all counters are zero."""
        status = self.status()
        return not (
            status["clients"] or status["waiting"] or status["in_flight"]
            or any(b["in_flight"] or b["ledger_in_flight"] for b in self.backends())
        )  # fmt: skip

    @property
    def anonymous_mb(self) -> float:
        """Memory of the router's processes that is no file's: own, and shared by all once.

        Without its autopilot, which comes and goes and has a limit of its own.
        """
        pilot = self.autopilot()
        others = set(_tree(pilot)) if pilot is not None else set()
        return _anonymous_mb(set(_tree(self.processes["router"].pid)) - others)

    @property
    def autopilot_mb(self) -> float:
        """The same of the autopilot and what it has started; 0: it does not run."""
        pilot = self.autopilot()
        return 0.0 if pilot is None else _anonymous_mb(set(_tree(pilot)))

    def log_text(self) -> str:
        """What the router has logged."""
        return (self.folder / "router.log").read_text(encoding="utf-8", errors="replace")


def _tree(pid: int) -> list[int]:
    """A process and those below it."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(p for child in below for p in _tree(int(child)))]


def _anonymous_mb(pids: Iterable[int]) -> float:
    """Memory of processes that is no file's: own, and shared by all once."""
    own, shared = 0, 0
    for pid in pids:
        figures = _status(pid)
        own += figures.get("RssAnon", 0)
        shared = max(shared, figures.get("RssShmem", 0))
    return (own + shared) / 1024


def _status(pid: int) -> Mapping[str, int]:
    """Figures of /proc/PID/status in kB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {p[0].rstrip(":"): int(p[1]) for p in pairs if len(p) == 3 and p[2] == "kB"}


def wait_for_memory(stage: Stage, limit_mb: float, seconds: float) -> float:
    """Return the router's memory, once it is below a limit or the time is over."""
    end = time.monotonic() + seconds
    while (found := stage.anonymous_mb) > limit_mb and time.monotonic() < end:
        time.sleep(0.2)
    return found
