"""What the endpoint picker costs: added latency behind a real Envoy, and CPU time per request.

``python benchmarks/bench_pick.py --json``: bodies of 1, 16, 128 and 400 KB. Each size is sent
through two Envoys in turn: one asks the picker, the other goes round by itself. The difference is
what the picker adds. Then the same at a fixed rate of short requests, and with streamed responses.
The servers are one process that gives every request the same small response at once
(``router_rig.py``), so that they and the load generator leave the cores to Envoy and the picker.
What each process used is part of the results. For comparison
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
from typing import Any, NamedTuple, cast

import orjson
import uvloop

import envoy_rig
import router_rig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/results/bench_pick.json"
SIZES_KB = (1, 16, 128, 400)
SERVERS = 4
#: A turn in which more cores than this went to others counts as disturbed.
MOST_LOST = 0.05
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


def busy_s() -> float:
    """CPU time of all programs of this machine so far, and what its host kept from it, s."""
    user, nice, system, *_, stolen = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, stolen))) / _TICKS


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
        data = {"model": "m", **more, "messages": [{"role": "user", "content": content}]}
        made.append(orjson.dumps(data))
    return made


class Connection(asyncio.Protocol):
    """One connection of a client to Envoy; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._began = 0.0
        self._read = b""
        self._missing = -1  # bytes of the body; -1: the head is not complete, -2: it is chunked
        self._answered: Callable[[Connection, float], None] | None = None

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connect to a port."""
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(cls, "127.0.0.1", port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def ask(
        self, body: bytes, began: float, answered: Callable[["Connection", float], None]
    ) -> None:
        """Send a request; ``answered`` gets the time since ``began`` (s) with the last byte."""
        assert self._transport is not None
        self._began, self._answered = began, answered
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        """Read until the response is complete."""
        self._read = data = self._read + data if self._read else data
        if self._missing == -1:
            head, end, _ = data.partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"a request got {data[:1000]!r}")
            lower = head.lower()
            at = lower.find(b"content-length: ")
            self._missing = -2
            if at >= 0:
                length = int(lower[at + 16 :].partition(b"\r\n")[0])
                self._missing = len(head) + 4 + length
        if self._missing == -2:
            if not data.endswith(b"\r\n0\r\n\r\n"):
                return
        elif len(data) < self._missing:
            return
        self._read, self._missing = b"", -1
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(self, time.perf_counter() - self._began)

    def connection_lost(self, exc: Exception | None) -> None:
        """A connection that is lost with a request on it ends the measurement."""
        if self._answered is not None:
            print(f"Envoy has closed a connection: {exc}", file=sys.stderr, flush=True)
            os._exit(1)


async def one_by_one(port: int, requests: Sequence[bytes]) -> list[float]:
    """Send requests on one connection; return their latencies, s."""
    connection = await Connection.open(port)
    found: list[float] = []
    next_one = asyncio.Event()

    def answered(_: Connection, seconds: float) -> None:
        found.append(seconds)
        next_one.set()

    for body in requests:
        next_one.clear()
        connection.ask(body, time.perf_counter(), answered)
        await next_one.wait()
    return found


async def at_rate(port: int, requests: Sequence[bytes], rate: float) -> list[float]:
    """Send requests at a rate per second whatever the responses do; return latencies, s."""
    loop, clock = asyncio.get_running_loop(), time.perf_counter
    idle = [await Connection.open(port) for _ in range(32)]
    found: list[float] = []
    complete = loop.create_future()

    def answered(connection: Connection, seconds: float) -> None:
        idle.append(connection)
        found.append(seconds)
        if len(found) == len(requests):
            complete.set_result(None)

    began = clock() + 0.1
    for k, body in enumerate(requests):
        due = began + k / rate
        if (early := due - clock()) > 0:
            await asyncio.sleep(early)
        connection = idle.pop() if idle else await Connection.open(port)
        # From when it is due: lateness of this program counts, for both Envoys.
        connection.ask(body, due, answered)
    await complete
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
    """Of the picker, both Envoys, the servers and this program."""

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each process so far, s."""
        return {name: router_rig.cpu_s([pid]) for name, pid in self.pids.items()}


class Turn(NamedTuple):
    """Some requests through one Envoy."""

    latencies: list[float]
    """In s."""
    used_s: dict[str, float]
    """CPU time of each process."""
    took_s: float
    lost: float
    """Cores that the host, or other programs here, kept from the measurement."""


async def turn(rig: Rig, load: Load, envoy: envoy_rig.Envoy, requests: Sequence[bytes]) -> Turn:
    """Send requests through an Envoy."""
    before, busy, began = rig.cpu_s(), busy_s(), time.perf_counter()
    latencies = await load(envoy.port, requests)
    took_s = time.perf_counter() - began
    used_s = {name: now - before[name] for name, now in rig.cpu_s().items()}
    lost = max(0.0, busy_s() - busy - sum(used_s.values())) / took_s
    return Turn(latencies, used_s, took_s, lost)


async def compare(
    rig: Rig, load: Load, requests: Sequence[bytes], rounds: int, blocks: int = 1
) -> dict[str, Any]:
    """Send the same requests through both Envoys in turn, ``blocks`` times in each round.

    The turns are short, so that what disturbs the machine meets both.
    """
    await load(rig.picked.port, requests[:20])
    await load(rig.plain.port, requests[:20])
    size = -(-len(requests) // blocks)
    pairs = []
    for at in [*range(0, len(requests), size)] * rounds:
        some = requests[at : at + size]
        pairs.append([await turn(rig, load, e, some) for e in (rig.plain, rig.picked)])
    used = {n: sum(picked.used_s[n] for _, picked in pairs) for n in rig.pids}
    took_s = sum(picked.took_s for _, picked in pairs)
    count = sum(len(picked.latencies) for _, picked in pairs)
    quiet = [pair for pair in pairs if max(turn.lost for turn in pair) <= MOST_LOST]
    return {
        **difference(pairs),
        "picker_cpu_ms_per_request": round(used["picker"] * 1e3 / count, 3),
        "cores_used": {name: round(s / took_s, 2) for name, s in used.items()},
        "cores_lost": round(statistics.mean(t.lost for pair in pairs for t in pair), 3),
        "undisturbed": difference(quiet) if len(quiet) > 1 else None,
    }


def difference(pairs: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """Latencies of turns without and with the picker."""
    plain, picked = ([s for pair in pairs for s in pair[k].latencies] for k in (0, 1))
    a, b = quantiles(picked), quantiles(plain)
    return {
        "turns": len(pairs),
        "requests": len(picked),
        "with_picker": a,
        "without": b,
        "added_p50_ms": round(a["p50_ms"] - b["p50_ms"], 3),
        "added_p95_ms": round(a["p95_ms"] - b["p95_ms"], 3),
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
        own = {"envoy": picked.pid, "plain envoy": plain.pid, "load generator": os.getpid()}
        rig = Rig(picked, plain, {**pids, **own})
        await asyncio.sleep(2.0)  # Envoy's first health check
        for kb in given.sizes:
            requests = bodies(kb, given.requests, rng)
            result = await compare(rig, one_by_one, requests, given.rounds)
            found[f"{kb} KB"] = result
            print(f"  {kb:4} KB  {_line(result)}", flush=True)
        requests = bodies(1, int(given.rate * given.seconds), rng)

        def paced(port: int, some: Sequence[bytes]) -> Any:
            return at_rate(port, some, given.rate)

        result = await compare(rig, paced, requests, given.rounds, blocks=round(given.seconds))
        found[f"1 KB at {given.rate:g}/s"] = result
        print(f"  1 KB at {given.rate:g}/s  {_line(result)}", flush=True)
        requests = bodies(1, 30, rng, stream_tokens=40)

        def streamed(port: int, some: Sequence[bytes]) -> Any:
            return at_rate(port, some, 10.0)

        result = await compare(rig, streamed, requests, 1)
        found["1 KB, 40 tokens streamed"] = result
        print(f"  1 KB, 40 tokens streamed  {_line(result)}", flush=True)
        for what in ("upstream_cx_protocol_error", "upstream_rq_pending_overflow"):
            count = sum(picked.stats(f"cluster.picker.{what}").values())
            if count:
                raise SystemExit(f"Envoy counts {count} of cluster.picker.{what}")
    return found


def _line(result: dict[str, Any]) -> str:
    quiet = result["undisturbed"]
    text = "no" if quiet is None else f"{quiet['turns']} of {result['turns']}"
    if quiet is not None:
        text += f" (P50 {quiet['added_p50_ms']:.2f}, P95 {quiet['added_p95_ms']:.2f} ms)"
    return (
        f"added P50 {result['added_p50_ms']:.2f} ms, P95 {result['added_p95_ms']:.2f} ms, "
        f"with it {result['with_picker']['p50_ms']:.2f} and {result['with_picker']['p95_ms']:.2f}; "
        f"{text} turns undisturbed; "
        f"picker CPU {result['picker_cpu_ms_per_request']:.2f} ms/request, "
        f"cores {result['cores_used']}, lost {result['cores_lost']}"
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
    with router_rig.rig() as made:
        made.start_backends(SERVERS)
        servers = [url.removeprefix("http://") for url in made.backends]
        port = envoy_rig.free_port()
        pick = (sys.executable, "-m", "tailrace.cli", "pick", "--listen", f"127.0.0.1:{port}",
                "--admin", "off", "-p", given.policy, "--log-level", "error",
                *(word for url in made.backends for word in ("-b", url)))  # fmt: skip
        with process(*pick, until="listening") as (pid, _):
            print("tailrace pick")
            pids = {"picker": pid, "servers": made.direct.pids[0]}
            found["tailrace pick"] = uvloop.run(measure(port, pids, servers, given))
        if given.grpcio:
            port = envoy_rig.free_port()
            fixed = (sys.executable, __file__, "--fixed-picker", str(port), servers[0])
            with process(*fixed, until="listening") as (pid, _):
                print("grpcio, fixed endpoint")
                pids = {"picker": pid, "servers": made.direct.pids[0]}
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


if __name__ == "__main__":
    main()
