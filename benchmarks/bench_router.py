"""What the router costs, against its peers: ``python benchmarks/bench_router.py [--json]``.

Chat requests of several sizes go to trivial backends directly, through the router with everything
on (learned policy, metrics, telemetry, decision log) and through each peer that is installed:
sglang-router, smg and vllm-router in a virtual environment ``.venv-peers``, nginx on the system.
``added_p50_ms`` is the median latency on one connection less that of the direct way, ``rps`` the
requests per second on 32 connections, ``cpu_us`` the contender's CPU time per request, all threads.
``several`` are the same figures of several router processes that share a port. With ``--before``
the router of an older checkout or commit is one more contender, to see what a change costs. With
``--keys`` our router has that many clients with keys, models and limits of every kind; the load is
one of them and stays below its limits. With ``--tracing`` our router is a second contender,
``traced``, which sends spans of every request to a collector.
All contenders take turns in short rounds, so that what else the machine does hits them alike; the
figures are medians over the rounds. The load on 32 connections is made by wrk if it is there, else
by a client of our own, which is slower and then may be the limit: ``client`` says which.
"""

import argparse
import asyncio
import io
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, cast

from router_rig import HOST, Contender, Rig, chat_body, cpu_s, rig

SIZES_KB = (1, 16, 128)
CONNECTIONS = 32
BODIES = 32


def request_bytes(port: int, body: bytes) -> bytes:
    """A request as it goes over the wire."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b:%d\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer none\r\nuser-agent: bench\r\naccept: */*\r\n"
        b"content-length: %d\r\n\r\n%b" % (HOST.encode(), port, len(body), body)
    )


def read_answer(connection: socket.socket) -> int:
    """Read one whole answer; return its status."""
    data = connection.recv(65_536)
    while b"\r\n\r\n" not in data:
        more = connection.recv(65_536)
        if not more:
            raise ConnectionError("the answer ends in its head")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at >= 0:
        left = int(lower[at + 15 :].split(b"\r\n", 1)[0]) - len(body)
        while left > 0:
            left -= len(connection.recv(65_536))
    else:
        while not body.endswith(b"0\r\n\r\n"):
            body += connection.recv(65_536)
    return int(head[9:12])


def latency(contender: Contender, bodies: list[bytes], count: int) -> list[float]:
    """Latencies of so many requests one after the other on one connection, s."""
    requests = [request_bytes(contender.port, body) for body in bodies]
    took = []
    with socket.create_connection((HOST, contender.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(count + 3):
            began = time.perf_counter()
            connection.sendall(requests[i % len(requests)])
            status = read_answer(connection)
            if status != 200:
                raise SystemExit(f"{contender.name} answered {status}")
            took.append(time.perf_counter() - began)
    return took[3:]


class _Client(asyncio.Protocol):
    """One connection of our own load generator."""

    def __init__(self, requests: list[bytes], counts: list[int]) -> None:
        self._requests, self._counts, self._at, self._lacks = requests, counts, 0, 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._transport.write(self._requests[self._at % len(self._requests)])
        self._at += 1

    def data_received(self, data: bytes) -> None:
        if not self._lacks:
            end = data.find(b"\r\n\r\n") + 4
            lower = data[:end].lower()
            at = lower.find(b"content-length:")
            length = int(lower[at + 15 :].split(b"\r\n", 1)[0])
            self._counts[0 if data[9:12] == b"200" else 1] += 1
            self._lacks = length + end
        self._lacks -= len(data)
        if not self._lacks:
            self._send()


async def _own_load(contender: Contender, bodies: list[bytes], seconds: float) -> list[int]:
    counts = [0, 0]
    requests = [request_bytes(contender.port, body) for body in bodies]
    loop = asyncio.get_running_loop()
    clients = [
        await loop.create_connection(lambda: _Client(requests, counts), HOST, contender.port)
        for _ in range(CONNECTIONS)
    ]
    await asyncio.sleep(seconds)
    for transport, _ in clients:
        transport.abort()
    return counts


def _wrk_script(folder: Path, bodies: list[bytes], *, ids: bool = False) -> Path:
    """Write the bodies to files, and a script that sends them in turn.

    ``ids``: each request has an id of its own in its head, so that no two heads are alike.
    """
    for i, body in enumerate(bodies):
        (folder / f"body-{i}").write_bytes(body)
    script = folder / "load.lua"
    script.write_text(
        "local requests, at, sent = {}, 0, 0\n"
        "function init(args)\n"
        '  local headers = {["content-type"] = "application/json", '
        '["authorization"] = "Bearer none", ["user-agent"] = "bench", ["accept"] = "*/*"}\n'
        f"  for i = 0, {len(bodies) - 1} do\n"
        f'    local file = io.open("{folder}/body-" .. i, "rb")\n'
        '    requests[i] = wrk.format("POST", "/v1/chat/completions", headers, file:read("*a"))\n'
        "    file:close()\n"
        "  end\n"
        "end\n"
        "function request()\n"
        f"  at = (at + 1) % {len(bodies)}\n"
        + (
            "  sent = sent + 1\n"
            '  return (requests[at]:gsub("user%-agent: bench", "x-request-id: r" .. sent, 1))\n'
            if ids
            else "  return requests[at]\n"
        )
        + "end\n"
        "function done(summary, latency, requests)\n"
        "  local e = summary.errors\n"
        '  print("COUNTS", summary.requests, summary.duration, e.status, '
        "e.connect + e.read + e.write + e.timeout)\n"
        "end\n"
    )
    return script


def load(
    contender: Contender, folder: Path, bodies: list[bytes], seconds: float
) -> dict[str, float]:
    """Load a contender on all connections; return its requests per second and CPU time."""
    before, began = cpu_s(contender.pids), time.perf_counter()
    wrk = shutil.which("wrk")
    if wrk is not None:
        script = folder / "load.lua"
        url = f"http://{HOST}:{contender.port}"
        said = subprocess.run(
            [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", script, url],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        fields = said.partition("COUNTS")[2].split()
        done, errors = int(fields[0]), int(fields[2]) + int(fields[3])
        took = int(fields[1]) / 1e6
    else:
        done, errors = asyncio.run(_own_load(contender, bodies, seconds))
        took = time.perf_counter() - began
    if errors:
        raise SystemExit(f"{contender.name}: {errors} of {done} requests failed")
    used = cpu_s(contender.pids) - before
    return {"rps": done / took, "cpu_us": used / max(1, done) * 1e6}


def write_clients(folder: Path, count: int) -> Path:
    """Write settings with clients; the first has the key that the load shows."""
    path, keys = folder / "clients.toml", ["none", *(f"key-{i}" for i in range(1, count))]
    parts = []
    for i, key in enumerate(keys):
        (folder / f"key-{i}").write_text(key)
        parts.append(
            f'[[clients]]\nname = "client-{i}"\nkey_file = "{folder / f"key-{i}"}"\n'
            'models = ["m", "m-*"]\npriorities = [-1]\nrequests_per_s = 1e6\n'
            "tokens_per_minute = 1_000_000_000_000\nconcurrent = 1_000_000\n"
        )
    path.write_text("\n".join(parts))
    return path


def checkout_of(before: str, folder: Path) -> Path:
    """Return a checkout, or the sources of a commit, which are unpacked into the folder.

    Anything else is refused: Python would skip a folder without sources, and take the installed
    package for the older one.
    """
    if (Path(before) / "src" / "tailrace").is_dir():
        return Path(before).resolve()
    here = Path(__file__).parent.parent
    packed = subprocess.run(
        ["git", "archive", "--format=tar", before, "src"],
        cwd=here, capture_output=True, check=False,
    )  # fmt: skip
    if packed.returncode:
        raise SystemExit(f"--before {before} is neither a checkout nor a commit")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def measure(made: Rig, size_kb: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders with bodies of one size.

    Other work on the machine can only slow a turn down, so the best turn of each counts; P99 is
    taken over all turns.
    """
    bodies = [chat_body(size_kb * 1024, i) for i in range(BODIES)]
    _wrk_script(made.folder, bodies, ids=options.ids)
    contenders = made.contenders
    took: dict[str, list[list[float]]] = {c.name: [] for c in contenders}
    loads: dict[str, list[dict[str, float]]] = {c.name: [] for c in contenders}
    rounds = options.rounds
    for number in range(rounds):
        turn = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        for contender in turn:
            took[contender.name].append(latency(contender, bodies, options.requests // rounds))
        for contender in turn:
            loads[contender.name].append(load(contender, made.folder, bodies, options.seconds))
    p50 = {name: min(map(statistics.median, values)) for name, values in took.items()}
    figures: dict[str, Any] = {"several": {}, "peers": {}}
    for contender in contenders:
        name, values = contender.name, [value for turn in took[contender.name] for value in turn]
        found = {
            "p50_ms": p50[name] * 1e3,
            "p99_ms": statistics.quantiles(values, n=100)[98] * 1e3,
            "added_p50_ms": (p50[name] - p50["direct"]) * 1e3,
            "rps": max(f["rps"] for f in loads[name]),
            "cpu_us": min(f["cpu_us"] for f in loads[name]),
        }
        if name == "tailrace":
            figures |= found
        elif name == "direct":
            figures["direct"] = found
        elif name.startswith("tailrace"):
            figures["several"][name.removeprefix("tailrace x")] = found
        else:
            figures["peers"][name] = found
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--bodies", type=int, nargs="*", default=SIZES_KB, help="sizes in KB")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender")
    parser.add_argument("--requests", type=int, default=900, help="per contender, one connection")
    parser.add_argument("--seconds", type=int, default=1, help="of load per turn")
    parser.add_argument(
        "--ids", action="store_true", help="an id of its own in every head (with wrk only)"
    )
    parser.add_argument("--alone", action="store_true", help="leave the peers out")
    parser.add_argument("--policy", default="tailrace", help="of our router")
    parser.add_argument(
        "--routers", type=int, nargs="*", default=[2],
        help="also several processes of our router on one port",
    )  # fmt: skip
    parser.add_argument("--tracing", action="store_true", help="also with a span per request")
    parser.add_argument("--router", default="", help="more options of our router")
    parser.add_argument(
        "--before", metavar="CHECKOUT",
        help="also the router of another checkout or commit of this repository, as `before`",
    )  # fmt: skip
    parser.add_argument(
        "--keys", type=int, default=0, metavar="N", help="give our router N clients with limits"
    )
    options = parser.parse_args()
    with rig() as made:
        made.start_backends()
        more = options.router.split()
        if options.keys:
            more += ["--config", str(write_clients(made.folder, options.keys))]
        made.contenders = [made.direct, made.start_router(*more, policy=options.policy)]
        for routers in options.routers:
            router = made.start_router(*more, policy=options.policy, routers=routers)
            made.contenders.append(router)
        if options.tracing:  # a server takes the spans: it answers anything
            where = "--set", f"tracing.endpoint={made.backends[0]}"
            traced = made.start_router(*more, *where, policy=options.policy)
            made.contenders.append(traced._replace(name="traced"))
        if options.before is not None:
            before = checkout_of(options.before, made.folder / "before")
            for routers in [1, *options.routers]:
                made.contenders.append(
                    made.start_router(policy=options.policy, routers=routers, checkout=before)
                )
        if not options.alone:
            made.contenders += made.start_peers()
        by_size = {f"{kb}_kb": measure(made, kb, options) for kb in options.bodies}
        notes = made.notes
    first = by_size[f"{options.bodies[0]}_kb"]
    result = {
        "added_p50_ms": first["added_p50_ms"],
        "rps": first["rps"],
        "peers": {
            name: {"added_p50_ms": f["added_p50_ms"], "rps": f["rps"]}
            for name, f in first["peers"].items()
        },
        "bodies": by_size,
        "client": "wrk" if shutil.which("wrk") else "own",
        "notes": notes,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'body':8}{'':16}{'added p50, ms':>14}{'p99, ms':>9}{'rps, 32':>9}{'CPU us':>8}")
    for size, figures in by_size.items():
        several = {f"tailrace x{n}": f for n, f in figures["several"].items()}
        rows = {"direct": figures["direct"], "tailrace": figures, **several, **figures["peers"]}
        for name, f in rows.items():
            print(
                f"{size:8}{name:16}{f['added_p50_ms']:>14.3f}{f['p99_ms']:>9.2f}"
                f"{f['rps']:>9.0f}{f['cpu_us']:>8.0f}"
            )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
