"""What the endpoint picker costs: added latency behind a real Envoy, and CPU time per request.

``python benchmarks/bench_pick.py --json``: emulated servers, bodies of 1, 16, 128 and 400 KB. Each
size is sent through two Envoys in turn: one asks the picker, the other goes round by itself. The
difference is what the picker adds. Then the same at a fixed rate of short requests. For comparison
``--grpcio`` also measures a picker of forty lines on grpcio's asyncio server, which parses no body
and always names the same endpoint.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import uvloop

import envoy_rig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/results/bench_pick.json"
SIZES_KB = (1, 16, 128, 400)
SERVERS = 4
_WORDS = [f"word{k}" for k in range(2000)]
_TICKS = os.sysconf("SC_CLK_TCK")
#: What deploy/envoy.yaml has between these is left out for the Envoy without a picker.
_FILTER = "                  - name: envoy.filters.http.ext_proc\n"
_ROUTER = "                  - name: envoy.filters.http.router\n"


# ---- processes ----------------------------------------------------------------------------------


@contextlib.contextmanager
def process(*command: str, until: str) -> Iterator[tuple[int, str]]:
    """Run a program until it has printed a line with a text; yield its pid and that line."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if until in line:
                yield child.pid, line
                return
        raise SystemExit(f"{command[:4]} has ended")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def tailrace(*arguments: str) -> tuple[str, ...]:
    """Return a command line of Tailrace."""
    return (sys.executable, "-m", "tailrace.cli", *arguments)


# ---- load ---------------------------------------------------------------------------------------


def bodies(kb: int, count: int, rng: random.Random, *, stream_tokens: int = 0) -> list[bytes]:
    """Return requests of about ``kb`` KB, half of it a prefix that all share."""
    text = " ".join(rng.choices(_WORDS, k=kb * 200))[: kb * 1000]
    made = []
    for _ in range(count):
        own = " ".join(rng.choices(_WORDS, k=kb * 100))[: kb * 500 - 60]
        content = text[: kb * 500 - 60] + own
        more: dict[str, Any] = {"max_tokens": 1}
        if stream_tokens:
            more = {"max_tokens": stream_tokens, "stream": True}
        data = {"model": "emulated", "messages": [{"role": "user", "content": content}], **more}
        made.append(orjson.dumps(data))
    return made


class Connection:
    """One connection of a client to Envoy."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> float:
        """Send a request and read the response; return how long it took, s."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        began = time.perf_counter()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        lower = head.lower()
        answer = b""
        if b"transfer-encoding: chunked" in lower:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                answer = await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            at = lower.index(b"content-length: ") + 16
            answer = await reader.readexactly(int(lower[at : lower.index(b"\r\n", at)]))
        if status != 200:
            raise SystemExit(f"a request to port {self._port} got {head!r} {answer[:500]!r}")
        return time.perf_counter() - began


async def one_by_one(port: int, requests: Sequence[bytes]) -> list[float]:
    """Send requests on one connection; return their latencies, s."""
    connection = Connection(port)
    return [await connection.ask(body) for body in requests]


async def at_rate(port: int, requests: Sequence[bytes], rate: float) -> list[float]:
    """Send requests at a rate per second whatever the responses do; return latencies, s."""
    idle: list[Connection] = []
    found: list[float] = []
    clock = time.perf_counter  # the loop's own has a resolution of a millisecond
    began = clock() + 0.1

    async def send(k: int, body: bytes) -> None:
        due = began + k / rate
        await asyncio.sleep(due - clock())
        connection = idle.pop() if idle else Connection(port)
        await connection.ask(body)
        idle.append(connection)
        found.append(clock() - due)  # lateness of this program counts, for both Envoys

    await asyncio.gather(*(send(k, body) for k, body in enumerate(requests)))
    return found


def quantiles(latencies: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile, ms."""
    cuts = statistics.quantiles(latencies, n=20)
    return {"p50_ms": round(cuts[9] * 1e3, 3), "p95_ms": round(cuts[18] * 1e3, 3)}


# ---- measurements -------------------------------------------------------------------------------

Load = Callable[[int, Sequence[bytes]], Any]


class Rig(NamedTuple):
    """Two Envoys in front of the same servers, one with a picker, and all their processes."""

    picked: envoy_rig.Envoy
    plain: envoy_rig.Envoy
    pids: dict[str, int]
    """Of the picker, its Envoy, the servers and this program."""

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each process so far, s."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


async def compare(
    rig: Rig, load: Load, requests: Sequence[bytes], rounds: int, rest_s: float = 0.0
) -> dict[str, Any]:
    """Send the same requests through both Envoys in turn; ``rest_s``: pause before each."""
    with_picker: list[float] = []
    without: list[float] = []
    used_s = dict.fromkeys(rig.pids, 0.0)
    took_s = 0.0
    await load(rig.picked.port, requests[:20])
    await load(rig.plain.port, requests[:20])
    for _ in range(rounds):
        await asyncio.sleep(rest_s)
        without += await load(rig.plain.port, requests)
        await asyncio.sleep(rest_s)
        before, began = rig.cpu_s(), time.perf_counter()
        with_picker += await load(rig.picked.port, requests)
        took_s += time.perf_counter() - began
        used_s = {name: used_s[name] + now - before[name] for name, now in rig.cpu_s().items()}
    a, b = quantiles(with_picker), quantiles(without)
    return {
        "requests": len(with_picker),
        "with_picker": a,
        "without": b,
        "added_p50_ms": round(a["p50_ms"] - b["p50_ms"], 3),
        "added_p95_ms": round(a["p95_ms"] - b["p95_ms"], 3),
        "picker_cpu_ms_per_request": round(used_s["picker"] * 1e3 / len(with_picker), 3),
        "cores_used": {name: round(used / took_s, 2) for name, used in used_s.items()},
    }


def without_picker() -> dict[str, str]:
    """Return the edits of deploy/envoy.yaml that leave the picker out."""
    text = envoy_rig.CONFIG.read_text()
    return {text[text.index(_FILTER) : text.index(_ROUTER)]: ""}


async def measure(
    picker: int, pids: dict[str, int], servers: Sequence[str], given: argparse.Namespace
) -> dict[str, Any]:
    """Measure one picker at a port; ``pids``: of the picker and the servers."""
    rng = random.Random(given.seed)
    found: dict[str, Any] = {}
    with (
        envoy_rig.envoy(picker, servers) as picked,
        envoy_rig.envoy(picker, servers, edits=without_picker()) as plain,
    ):
        rig = Rig(picked, plain, {**pids, "envoy": picked.pid, "load generator": os.getpid()})
        await asyncio.sleep(2.0)  # Envoy's first health check
        for kb in given.sizes:
            requests = bodies(kb, given.requests, rng)
            result = await compare(rig, one_by_one, requests, given.rounds)
            found[f"{kb} KB"] = result
            print(f"  {kb:4} KB  {_line(result)}", flush=True)
        requests = bodies(1, int(given.rate * given.seconds), rng)

        def paced(port: int, some: Sequence[bytes]) -> Any:
            return at_rate(port, some, given.rate)

        result = await compare(rig, paced, requests, given.rounds, rest_s=1.0)
        found[f"1 KB at {given.rate:g}/s"] = result
        print(f"  1 KB at {given.rate:g}/s  {_line(result)}", flush=True)
        requests = bodies(1, 30, rng, stream_tokens=100)
        result = await compare(rig, one_by_one, requests, 1)
        found["1 KB, 100 tokens streamed"] = result
        print(f"  1 KB, 100 tokens streamed  {_line(result)}", flush=True)
        for what in ("upstream_cx_protocol_error", "upstream_rq_pending_overflow"):
            count = sum(picked.stats(f"cluster.picker.{what}").values())
            if count:
                raise SystemExit(f"Envoy counts {count} of cluster.picker.{what}")
    return found


def _line(result: dict[str, Any]) -> str:
    return (
        f"added P50 {result['added_p50_ms']:.2f} ms, P95 {result['added_p95_ms']:.2f} ms, "
        f"with it {result['with_picker']['p50_ms']:.2f} and {result['with_picker']['p95_ms']:.2f}, "
        f"picker CPU {result['picker_cpu_ms_per_request']:.2f} ms/request, "
        f"cores {result['cores_used']}"
    )


# ---- the picker to compare with ------------------------------------------------------------------


async def fixed_picker(port: int, endpoint: str) -> None:
    """Serve a picker that always names the same endpoint, on grpcio."""
    import grpc
    import grpc.aio

    from tailrace.picker import messages
    from tailrace.picker.messages import UNCHANGED

    routed = messages.routed(endpoint, (), ())

    async def process(requests: Any, context: Any) -> Any:
        del context
        body: list[bytes] = []
        async for data in requests:
            request = messages.read(data)
            assert request is not None
            kind = request.WhichOneof("request")
            if kind == "request_body":
                body.append(request.request_body.body)
                if request.request_body.end_of_stream:
                    yield routed
                    for part in messages.chunks(b"".join(body), end=True):
                        yield part
            elif kind != "request_headers":
                yield UNCHANGED[kind]

    async def check(data: bytes, context: Any) -> bytes:
        del data, context
        return b"\x08\x01"

    server = grpc.aio.server()
    service, health = grpc.stream_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(messages.SERVICE, {"Process": service(process)}),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": health(check)}),
        )
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("listening", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Measure, print, and perhaps write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=100, help="per size and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=500.0, help="requests/s of the last part")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long that takes")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_KB), metavar="KB")
    parser.add_argument("--policy", default="tailrace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grpcio", action="store_true", help="also a picker on grpcio")
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--fixed-picker", nargs=2, metavar=("PORT", "ENDPOINT"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.fixed_picker:
        asyncio.run(fixed_picker(int(given.fixed_picker[0]), given.fixed_picker[1]))
        return
    found: dict[str, Any] = {}
    emulate = tailrace("emulate", "--speeds", ",".join(["1"] * SERVERS), "--port", "0",
                       "--time-scale", "0.001", "--json")  # fmt: skip
    with process(*emulate, until="{") as (emulator, line):
        urls = _urls(json.loads(line))
        servers = [url.removeprefix("http://") for url in urls]
        port = envoy_rig.free_port()
        pick = tailrace("pick", "--listen", f"127.0.0.1:{port}", "--admin", "off", "-p",
                        given.policy, "--log-level", "error",
                        *(word for url in urls for word in ("-b", url)))  # fmt: skip
        with process(*pick, until="listening") as (pid, _):
            print("tailrace pick")
            pids = {"picker": pid, "servers": emulator}
            found["tailrace pick"] = uvloop.run(measure(port, pids, servers, given))
        if given.grpcio:
            port = envoy_rig.free_port()
            fixed = (sys.executable, __file__, "--fixed-picker", str(port), servers[0])
            with process(*fixed, until="listening") as (pid, _):
                print("grpcio, fixed endpoint")
                pids = {"picker": pid, "servers": emulator}
                found["grpcio, fixed endpoint"] = uvloop.run(measure(port, pids, servers, given))
    if given.json:
        import platform

        data = {
            "command": "python benchmarks/bench_pick.py --json" + " --grpcio" * given.grpcio,
            "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
            "settings": {k: v for k, v in vars(given).items() if k not in ("json", "fixed_picker")},
            "results": found,
        }
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        print(f"written to {RESULTS.relative_to(ROOT)}")


def _urls(told: Any) -> list[str]:
    """Return the addresses that ``tailrace emulate --json`` prints."""
    return [str(url) for url in told["urls"]]


if __name__ == "__main__":
    main()
