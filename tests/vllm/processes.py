"""Real vLLM servers and the router as processes of their own, always ended by their id."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .client import Address, get

ROOT = Path(__file__).parents[2]
#: The Python that has vLLM; see `make test-vllm`.
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
MODEL = "tiny"
BLOCK_TOKENS, BLOCKS, BATCH = 32, 128, 8
#: vLLM needs a minute on an idle machine, several on a busy one.
START_S = 900.0

_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # auto would pin every server to the first core
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def vllm_environment() -> dict[str, str]:
    """Environment for anything that imports vLLM."""
    return {**os.environ, **_VLLM_ENVIRONMENT}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A server on 127.0.0.1, started in a group of its own so that its children end with it."""

    def __init__(self, name: str, command: list[str], port: int, log: Path) -> None:
        self.name = name
        self.command = command
        self.address = Address("127.0.0.1", port)
        self.log = log
        self.environment = dict(os.environ)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address.host}:{self.address.port}"

    def start(self) -> None:
        with self.log.open("ab") as out:
            self._child = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.log.parent,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def wait_until_healthy(self, limit_s: float = START_S) -> None:
        wait_for(self.is_healthy, limit_s, f"{self.name} to answer /health", self._check_alive)

    def is_healthy(self) -> bool:
        try:
            return get(self.address, "/health", timeout_s=5).status == 200
        except OSError:
            return False

    def _check_alive(self) -> None:
        if self._child is None or self._child.poll() is not None:
            raise AssertionError(f"{self.name} has ended:\n{self.last_lines()}")

    def last_lines(self, count: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def kill(self) -> None:
        """Kill -9 the server with all its children."""
        self._signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()
            self._child = None

    def stop(self, limit_s: float = 20.0) -> int | None:
        """Ask it to end, and make it if it does not; return its exit status."""
        child = self._child
        if child is None:
            return None
        # The server alone is asked; it tells its children.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        return status

    def _signal(self, number: int) -> None:
        # The group's id is the child's, which is ours until it is waited for; its children may
        # outlive it.
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)


def vllm_server(
    name: str,
    model: Path,
    log: Path,
    *,
    longest: int = 2048,
    batch: int = BATCH,
    blocks: int = BLOCKS,
    more: tuple[str, ...] = (),
) -> Process:
    """A real server with the tiny model; not started.

    ``longest``: tokens of prompt and answer. ``more``: further flags.
    """
    port = free_port()
    flags = [
        "--model", str(model), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", str(longest), "--enforce-eager",
        "--max-num-seqs", str(batch), "--block-size", str(BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details", *more,
    ]  # fmt: skip
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *flags]
    server = Process(name, command, port, log)
    server.environment = vllm_environment()
    return server


class Router(Process):
    """``tailrace serve`` in front of some addresses."""

    def __init__(
        self, backends: dict[str, str], folder: Path, policy: str, *, by_priority: bool = False
    ) -> None:
        """``by_priority``: the servers were started to serve by priority."""
        port, admin_port = free_port(), free_port()
        self.decisions = folder / "decisions"
        settings = folder / "router.toml"
        lines = [
            f'listen = "127.0.0.1:{port}"',
            f'admin = {{ listen = "127.0.0.1:{admin_port}" }}',
            "[health]", "interval_s = 0.5", "open_s = 1.0", "slow_start_s = 2.0",
            "[metrics]", "interval_s = 0.25",
            "[routing]", f"policy = {json.dumps(policy)}",
            "[decisions]", f"folder = {json.dumps(str(self.decisions))}",
        ]  # fmt: skip
        for name, url in backends.items():
            lines += ["[[backends]]", f"name = {json.dumps(name)}", f"url = {json.dumps(url)}"]
            if by_priority:
                lines += ["[backends.server]", 'scheduling_policy = "priority"']
        settings.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "tailrace.cli", "serve", "--config", str(settings)]
        super().__init__("router", command, port, folder / "router.log")
        self.admin = Address("127.0.0.1", admin_port)

    def status(self) -> dict[str, Any]:
        return get(self.admin, "/status").json()

    def backends(self) -> dict[str, dict[str, Any]]:
        """What the router says of its replicas, by name."""
        return {replica["name"]: replica for replica in get(self.admin, "/backends").json()}

    def errors(self) -> list[str]:
        """Lines of its log that tell of a mistake of its own."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if '"level":"error"' in line or "Traceback" in line]

    def decided(self) -> list[dict[str, Any]]:
        """Return the decision log so far: a line per request and replica."""
        lines = []
        for path in sorted(self.decisions.glob("decisions-*.jsonl")):
            # The last line may not be whole yet.
            text = path.read_text().rpartition("\n")[0]
            lines += [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if "replica" in line]

    def decided_since(self, start: float, count: int) -> list[dict[str, Any]]:
        """Return ``count`` lines on requests since ``start`` (Unix time, s), once written."""

        def found() -> list[dict[str, Any]] | None:
            lines = [line for line in self.decided() if line["arrived"] >= start]
            return lines if len(lines) >= count else None

        lines = wait_for(found, 30, f"{count} lines in the decision log")
        assert len(lines) == count
        return lines


def wait_for(condition, limit_s: float, what: str, check=lambda: None, every_s: float = 0.2):
    """Wait until ``condition()`` is true and return its value."""
    end = time.monotonic() + limit_s
    while True:
        check()
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:g} s for {what}")
        time.sleep(every_s)
