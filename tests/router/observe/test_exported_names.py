"""What dashboards and scripts read: keys of the admin pages, metrics, labels, response headers.

``exported_names.json`` holds what 0.2.0 exports: a name that goes, or gets other labels, breaks
somebody's dashboard. New names need not be added there before the next version.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from router.conftest import Backend, Client, post, run, settings_for
from tailrace.router.app import Router
from tailrace.router.workers import aggregate

RECORDED = json.loads((Path(__file__).parent / "exported_names.json").read_text())
#: Their keys are outcomes, causes and the like: values, not names.
COUNTS_BY_VALUE = ("requests", "fallbacks", "retries", "shed", "prompts", "figures", "counts")


def keys(value: Any, path: str = "") -> set[str]:
    """All keys as paths; entries of a list have one path."""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        return {path}.union(*(keys(entry, f"{path}[]") for entry in entries))
    if not isinstance(value, dict) or path.rpartition(".")[2] in COUNTS_BY_VALUE:
        return {path}
    return set().union(*(keys(entry, f"{path}.{key}".lstrip(".")) for key, entry in value.items()))


def metrics(text: str) -> dict[str, list[str]]:
    """The type of every family and the labels of every sample."""
    found: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("process_"):
            found[f"{family.name}: {family.type}"] = []
            for sample in family.samples:
                found[sample.name] = sorted(sample.labels)
    return found


def exported() -> dict[str, Any]:
    """Everything that a router exports after some traffic, a retry and a rejected request."""

    async def go() -> dict[str, Any]:
        backend, dead = Backend(), Backend()
        for b in (backend, dead):
            await b.start()
        await dead.kill()
        backend.metrics = (
            b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n"
            b"vllm:kv_cache_usage_perc 0.5\n"
        )
        routing = {
            "policy": "round_robin", "limit_ms": 10_000, "canary": "least_outstanding",
            "canary_share": 0.5, "shadow": "random",
        }  # fmt: skip
        router = Router(settings_for([backend, dead], routing=routing, metrics={}))
        await router.start()
        found: dict[str, Any] = {}

        async def get(where: Any, request: bytes) -> Any:
            client = Client(*await asyncio.open_connection(*where))
            client.send(request)
            answer = await client.answer()
            client.writer.close()
            return answer

        async def admin(path: str, method: str = "GET") -> bytes:
            line = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
            return bytes((await get(router.admin_at, line.encode())).body)

        try:
            for _ in range(6):
                answer = await get(router.listen_at, post())
            found["headers"] = sorted(answer.headers)
            await router.scraper.scrape()
            router.events.shed("queue")
            pages = {path: orjson.loads(await admin(path)) for path in ("/status", "/backends")}
            found["/metrics"] = metrics((await admin("/metrics")).decode())
            pages["/backends/0/drain"] = orjson.loads(await admin("/backends/0/drain", "POST"))
            pages["/health"] = orjson.loads(await admin("/health"))
            pages["/status/history"] = orjson.loads(await admin("/status/history"))
            # What several workers answer together.
            windows = {"1m": [0], "5m": [0]}
            part = pages["/status"] | {"pid": 1, "counts": {"ttft": windows, "e2e": windows}}
            pages["/status of workers"] = aggregate.status([(0, part), (1, part)])
            found |= {path: sorted(keys(page)) for path, page in pages.items()}
            return found
        finally:
            await router.stop()
            await backend.kill()

    return run(go(), limit_s=300)  # it may have to compile


def test_nothing_that_is_exported_has_gone() -> None:
    found = exported()
    recorded = dict(RECORDED)
    metrics_before, metrics_now = recorded.pop("/metrics"), found["/metrics"]
    assert {name: metrics_now.get(name) for name in metrics_before} == metrics_before
    for page, names in recorded.items():
        assert set(names) - set(found[page]) == set(), page
