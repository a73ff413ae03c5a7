"""What watching a Kubernetes API costs: Tailrace's own watch and the official Python client.

``python benchmarks/bench_watch.py --official PYTHON [--json]``, where PYTHON is an interpreter with
the package ``kubernetes``. Both list 100 pods of an API on this machine and read the same changes
from as many watches, each in a process of its own: resident memory that importing and watching
add, threads, CPU time per change.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PODS = 100
HOST = "127.0.0.1"
#: What a real pod has beside what matters here: about 4 KB.
PADDING = {f"annotation-{k}": "x" * 60 for k in range(48)}


def pod(number: int, version: int) -> dict[str, Any]:
    """Return a pod as an API sends it."""
    return {
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {"name": f"vllm-{number}", "namespace": "default", "uid": f"uid-{number}",
                     "resourceVersion": str(version), "labels": {"app": "vllm"},
                     "annotations": PADDING},
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        "status": {"phase": "Running", "podIP": f"10.0.0.{number % 250 + 1}",
                   "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip


class Api:
    """Lists pods, and sends every watch the same changes once all have come."""

    def __init__(self, watches: int, changes: int) -> None:
        self._watches, self._changes = watches, changes
        self._there = 0
        self._all = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                target = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
                if b"watch=" not in target:
                    items = [pod(k, k + 1) for k in range(PODS)]
                    about = {"resourceVersion": str(PODS)}
                    data = json.dumps(
                        {"kind": "PodList", "apiVersion": "v1", "metadata": about, "items": items}
                    ).encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                        b"content-length: %d\r\n\r\n%b" % (len(data), data)
                    )
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"transfer-encoding: chunked\r\n\r\n"
                )
                await self._changes_to(writer)

    async def _changes_to(self, writer: asyncio.StreamWriter) -> None:
        self._there += 1
        if self._there >= self._watches:
            self._all.set()
        await self._all.wait()
        await asyncio.sleep(3.0)  # the client looks at its memory
        for k in range(self._changes):
            event = {"type": "MODIFIED", "object": pod(k % PODS, PODS + k + 1)}
            line = json.dumps(event).encode() + b"\n"
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            if k % 50 == 49:
                await writer.drain()
        await asyncio.sleep(60.0)


@contextlib.asynccontextmanager
async def serving(watches: int, changes: int) -> AsyncIterator[int]:
    """An API; its port."""
    api = Api(watches, changes)
    server = await asyncio.start_server(api.serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def memory_mb() -> float:
    """Resident memory of this process, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---- the two clients, each in a process of its own ----------------------------------------------


def own_client(port: int, watches: int, changes: int) -> dict[str, float]:
    """Watch with Tailrace's own code, in a process that has the router's modules already."""
    import tailrace.router.core  # noqa: F401

    before_mb = memory_mb()
    from tailrace.router.discovery import kubernetes
    from tailrace.router.discovery.api_watch import KubernetesApi, ObjectWatch
    from tailrace.router.discovery.settings import KubernetesSettings

    async def run() -> dict[str, float]:
        where = f"http://{HOST}:{port}"
        settings = KubernetesSettings(selector="app=vllm", port=8000, api_server=where)
        api = KubernetesApi(settings)
        seen = 0

        def changed() -> None:
            nonlocal seen
            seen += 1

        path = "/api/v1/namespaces/default/pods"
        made = [ObjectWatch(api, path, {}, kubernetes.pod, changed) for _ in range(watches)]
        tasks = [asyncio.create_task(watch.run()) for watch in made]
        while seen < watches:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        found = {"added_mb": memory_mb() - before_mb, "threads": threading.active_count() - 1}
        began, listed = time.process_time(), seen
        while seen - listed < watches * changes:
            await asyncio.sleep(0.05)
        found["cpu_us_per_change"] = (time.process_time() - began) / (watches * changes) * 1e6
        for task in tasks:
            task.cancel()
        return found

    return asyncio.run(run())


def official_client(port: int, watches: int, changes: int) -> dict[str, float]:
    """Watch with the official client, which needs a thread for each."""
    before_mb = memory_mb()
    from kubernetes import client, watch  # type: ignore[import-not-found,unused-ignore]

    configuration = client.Configuration(host=f"http://{HOST}:{port}")
    counts = [0] * watches
    listed = threading.Semaphore(0)

    def follow(number: int) -> None:
        api = client.CoreV1Api(client.ApiClient(configuration))
        pods = api.list_namespaced_pod("default")
        listed.release()
        version = pods.metadata.resource_version
        for _ in watch.Watch().stream(api.list_namespaced_pod, "default", resource_version=version):
            counts[number] += 1

    for number in range(watches):
        threading.Thread(target=follow, args=(number,), daemon=True).start()
    for _ in range(watches):
        listed.acquire()
    time.sleep(1.0)
    found = {"added_mb": memory_mb() - before_mb, "threads": threading.active_count() - 1}
    began = time.process_time()
    while sum(counts) < watches * changes:
        time.sleep(0.05)
    found["cpu_us_per_change"] = (time.process_time() - began) / (watches * changes) * 1e6
    return found


async def measure(python: str, arm: str, watches: int, changes: int) -> dict[str, float]:
    """Run one client against an API of its own."""
    async with serving(watches, changes) as port:
        process = await asyncio.create_subprocess_exec(
            python, __file__, "--arm", arm, str(port), str(watches), str(changes),
            stdout=subprocess.PIPE,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        if process.returncode:
            raise SystemExit(f"the client '{arm}' has failed")
        return dict(json.loads(out))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--official", help="interpreter with the package kubernetes")
    parser.add_argument("--watches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--changes", type=int, default=1000, help="per watch")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--arm", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        client = own_client if options.arm[0] == "own" else official_client
        print(json.dumps(client(*map(int, options.arm[1:]))))
        return
    arms = {"own": sys.executable, **({"official": options.official} if options.official else {})}
    found: dict[str, Any] = {"pods": PODS, "changes": options.changes, "clients": {}}
    for arm, python in arms.items():
        for watches in options.watches:
            figures = asyncio.run(measure(python, arm, watches, options.changes))
            figures = {name: round(value, 2) for name, value in figures.items()}
            found["clients"].setdefault(arm, {})[f"{watches} watches"] = figures
            if not options.json:
                print(arm, watches, figures, flush=True)
    if options.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
