"""What the benchmarks of the router share: trivial backends, contenders, and their CPU time.

``python benchmarks/router_rig.py PORT...`` is the process of the trivial backends: it answers every
chat completion at once with a fixed reply, so that what is measured is the router. A body that
holds ``"stream":true`` gets a stream of numbered events at a fixed pace instead.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"
#: Peers by name, and their packages there.
PEER_PACKAGES = {"sglang-router": "sglang_router", "smg": "smg", "vllm-router": "vllm_router"}
HOST = "127.0.0.1"
BACKENDS = 4
START_S = 90.0
CHUNKS_PER_S = 20.0
#: Version of each peer that the published figures are of.
PEER_VERSIONS = {"sglang-router": "0.3.2", "smg": "1.13.0", "vllm-router": "0.1.16"}

_METRICS = b"""vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.1
"""
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


# ---- backends -----------------------------------------------------------------------------------


def _answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ndate: Mon, 05 Jan 2026 10:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-length: %d\r\ncontent-type: %b\r\n\r\n%b" % (len(body), kind, body)
    )


_ANSWERS = {
    b"/health": _answer(b"{}"),
    b"/metrics": _answer(_METRICS, b"text/plain"),
    b"/v1/models": _answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}'),
    b"/get_model_info": _answer(b'{"model_path":"m","is_generation":true}'),
    b"/get_server_info": _answer(b'{"model_path":"m","served_model_name":"m"}'),
}
_CHATS: dict[int, bytes] = {}


def _chat_answer(size: int) -> bytes:
    """The answer to a request of so many bytes, as vLLM gives it."""
    if size not in _CHATS:
        message = {"role": "assistant", "content": "An answer in a few words. " * 8}
        prompt = size // 4
        body = orjson.dumps(
            {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
             "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
             "usage": {"prompt_tokens": prompt, "completion_tokens": 48,
                       "total_tokens": prompt + 48, "prompt_tokens_details": None},
             "kv_transfer_params": None}
        )  # fmt: skip
        _CHATS[size] = _answer(body)
    return _CHATS[size]


class Backend(asyncio.Protocol):
    """A connection that answers without looking at more than it must."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._have: list[bytes] = []
        self._lacks = self._size = 0
        self._chunked = False  # a request's body is being received in chunks
        self._stream: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a stream."""
        del exc
        if self._stream is not None:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer as soon as a request is complete."""
        if self._lacks:
            self._lacks -= len(data)
            if self._lacks <= 0:
                self._chat(b"".join(self._have))
            return
        if self._chunked:
            self._have.append(data)
            self._size += len(data)
            if b"".join(self._have[-5:]).endswith(b"0\r\n\r\n"):  # JSON has no such line
                self._chunked = False
                self._chat(b"".join(self._have))
            return
        end = data.find(b"\r\n\r\n") + 4
        head = data[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        length = int(head[at + 17 : head.find(b"\r\n", at + 2)]) if at >= 0 else 0
        if at < 0 and b"\r\ntransfer-encoding: chunked" in head:
            self._size, self._have, self._chunked = 0, [], True
            if len(data) > end:
                self.data_received(data[end:])
            return
        if data.startswith(b"POST"):
            self._size = length
            self._lacks = length - (len(data) - end)
            self._have = [data[end : end + 512]]
            if self._lacks <= 0:
                self._chat(self._have[0])
            return
        assert self._transport is not None
        path = data.split(b" ", 2)[1].partition(b"?")[0]
        self._transport.write(_ANSWERS.get(path, _answer(b"{}")))

    def _chat(self, body: bytes) -> None:
        self._lacks = 0
        assert self._transport is not None
        if b'"stream":true' not in body:
            self._transport.write(_chat_answer(self._size))
            return
        at = body.find(b'"max_tokens":') + 13
        count = int(body[at : at + 12].split(b",")[0].split(b"}")[0])
        self._transport.write(_STREAM_HEAD)
        loop = asyncio.get_running_loop()
        self._next(0, count, loop.time())

    def _next(self, number: int, count: int, began_at: float) -> None:
        """Send event ``number`` and the time of it, and come again."""
        assert self._transport is not None
        if number == count:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        event = b'data: {"n":%d,"at":%.7f,"choices":[{"delta":{"content":"word"}}]}\n\n' % (
            number, time.monotonic(),
        )  # fmt: skip
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        due = began_at + (number + 1) / CHUNKS_PER_S
        loop = asyncio.get_running_loop()
        self._stream = loop.call_at(due, self._next, number + 1, count, began_at)


async def _serve(ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Backend, HOST, port, backlog=4096) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


# ---- processes ----------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A way to the backends."""

    name: str
    port: int
    pids: list[int]


class Rig:
    """Processes of one benchmark; all end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.backends: list[str] = []
        self.direct = Contender("direct", 0, [])
        self.contenders: list[Contender] = []

    def start(
        self, name: str, command: Sequence[str | Path], **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a process; its output goes to a file of its own."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log, cwd=self.folder,
                env=os.environ | environment,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def start_backends(self, count: int = BACKENDS) -> None:
        """Start the trivial backends, all in one process."""
        ports = free_ports(count)
        process = self.start("backends", [sys.executable, __file__, *map(str, ports)])
        self.backends = [f"http://{HOST}:{port}" for port in ports]
        self.direct = Contender("direct", ports[0], [process.pid])
        self.wait(ports[0], process, "backends")

    def start_router(
        self,
        *options: str,
        policy: str = "tailrace",
        routers: int = 1,
        program: Sequence[str] = ("-m", "tailrace.cli", "serve"),
        checkout: Path | None = None,
    ) -> Contender:
        """Start our router with everything on: metrics, telemetry and the decision log.

        ``routers`` processes share the port. ``program`` is run instead of ``tailrace serve``.
        ``checkout``: the router of another checkout of this repository, named ``before``.
        """
        port, admin = free_ports(2)
        name = "tailrace" if checkout is None else "before"
        name = name if routers == 1 else f"{name} x{routers}"
        command: list[str | Path] = [
            sys.executable, *program, "--policy", policy,
            "--listen", f"{HOST}:{port}", "--admin", f"{HOST}:{admin}",
            "--processes", str(routers),
            "--set", f"decisions.folder={self.folder / 'decisions'}", *options,
        ]  # fmt: skip
        for url in self.backends:
            command += ["--backend", url]
        sources = {} if checkout is None else {"PYTHONPATH": str(checkout / "src")}
        process = self.start(f"{name}-{admin}", command, **sources)
        self.wait(admin, process, f"{name}-{admin}")
        workers = children_of(process.pid) if routers > 1 else []  # else: one that compiles
        return Contender(name, port, [process.pid, *workers])

    def start_peers(self) -> list[Contender]:
        """Start the peers that are installed, each with its own defaults."""
        return [c for name in (*PEER_PACKAGES, "nginx") if (c := self.start_peer(name)) is not None]

    def start_peer(self, name: str, options: Sequence[str] = ()) -> Contender | None:
        """Start a peer; None: it is not installed or does not start, and a note says so.

        ``options``: of its command line, besides its own defaults.
        """
        if name.startswith("nginx"):
            return self._start_nginx(name)
        package = PEER_PACKAGES[name]
        if not any(PEERS.glob(f"lib/python*/site-packages/{package}")):
            self.notes.append(f"{name} is not installed in {PEERS.name}: left out")
            return None
        port, prometheus = free_ports(2)
        command: list[str | Path] = [
            PEERS / "bin" / "python", "-m", f"{package}.launch_router",
            "--host", HOST, "--port", str(port), "--prometheus-port", str(prometheus),
            "--log-level", "error", *options, "--worker-urls", *self.backends,
        ]  # fmt: skip
        process = self.start(name, command)
        if not self.wait(port, process, name, must=False):
            return None
        return Contender(name, port, [process.pid])

    def _start_nginx(self, name: str) -> Contender | None:
        """Start nginx; ``nginx METHOD`` balances by one of its methods, such as least_conn."""
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if nginx is None:
            self.notes.append("nginx is not installed: left out")
            return None
        method = name.partition(" ")[2]
        (port,) = free_ports(1)
        servers = f"{method};" if method else ""
        servers += "".join(f"server {url.removeprefix('http://')};" for url in self.backends)
        config = self.folder / "nginx.conf"
        config.write_text(
            f"daemon off; worker_processes 1; pid {self.folder}/nginx.pid; error_log stderr error;"
            "events { worker_connections 8192; } http { access_log off; "
            "client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 100000000;"
            f"client_body_temp_path {self.folder}/b; proxy_temp_path {self.folder}/p;"
            f"fastcgi_temp_path {self.folder}/f; uwsgi_temp_path {self.folder}/u;"
            f"scgi_temp_path {self.folder}/s;"
            f"upstream backends {{ {servers} keepalive 256; keepalive_requests 100000000; }}"
            f"server {{ listen {HOST}:{port} backlog=4096; location / {{ proxy_buffering off;"
            "proxy_pass http://backends; proxy_http_version 1.1; "
            'proxy_set_header Connection ""; } } }'
        )
        process = self.start(name, [nginx, "-c", config, "-p", self.folder])
        self.wait(port, process, name, "/v1/models")
        return Contender(name, port, [process.pid, *children_of(process.pid)])

    def wait(
        self, port: int, process: subprocess.Popen[bytes], name: str, path: str = "/health",
        *, must: bool = True,
    ) -> bool:  # fmt: skip
        """Wait until it answers."""
        limit = time.monotonic() + START_S
        while time.monotonic() < limit and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=2) as answer:
                    if answer.status == 200:
                        return True
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.1)
        said = (self.folder / f"{name}.log").read_text(errors="replace")[-500:]
        if must:
            raise SystemExit(f"{name} does not start: {said}")
        self.notes.append(f"{name} does not start: left out ({said.strip()[-100:]})")
        return False

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
    """Processes with a folder of their own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        made = Rig(Path(folder))
        try:
            yield made
        finally:
            made.stop()


def free_ports(count: int) -> list[int]:
    """Return ports nobody listens on."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def fetch_text(url: str) -> str:
    """Return the text at an address."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time of processes with all their threads, s."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def chat_body(size: int, number: int, **more: Any) -> bytes:
    """A chat request of about ``size`` bytes: a system prompt all share, then text of its own."""
    system = "You are a careful assistant who answers in few words. " * 8
    rest = max(1, size - 640)
    own = f"{number}: " + f"Question {number} of many, with words of its own. " * (rest // 40 + 1)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": own[:rest]}]
    return orjson.dumps({"model": "m", "max_tokens": 64, **more, "messages": messages})


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve([int(port) for port in sys.argv[1:]]))
