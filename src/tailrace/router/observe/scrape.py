"""Metrics of the servers: reading their text, and asking all of them again and again.

vLLM has renamed some metrics over time and SGLang has names of its own; all are known here. What a
server does not say is None, and the router's own ledger stands in for it. A server that does not
answer keeps its last snapshot, whose age every policy can see.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, fields

from pydantic import Field

from tailrace.config import Settings
from tailrace.router.state.cluster import ClusterState

Fetch = Callable[[int, str], Awaitable[bytes]]

#: Names of each quantity, the current one first. Later ones count only if earlier ones are absent.
_SUMS = {
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "prefix_queries": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
    ),
    "prefix_hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
    ),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
}
_MEANS = {
    "kv_used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
_CACHE_CONFIG = "vllm:cache_config_info"
_SGLANG_TOKENS = "sglang:max_total_num_tokens"
_SIZES = re.compile(r'(?:^|,)(num_gpu_blocks|block_size)="([0-9]{1,12})"')
_WANTED = frozenset(name for names in (*_SUMS.values(), *_MEANS.values()) for name in names) | {
    _CACHE_CONFIG,
    _SGLANG_TOKENS,
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one server said, summed over its engines; None: it does not say."""

    waiting: float | None = None
    """Requests in its queue."""
    running: float | None = None
    """Requests in its batch."""
    kv_used: float | None = None
    """Share of KV memory held by requests, 0..1; mean over its engines."""
    kv_tokens: int | None = None
    """Size of its KV memory."""
    block_size: int | None = None
    """Tokens per KV block."""
    prefix_queries: float | None = None
    """Prompt tokens looked up in its prefix cache since it started."""
    prefix_hits: float | None = None
    """Those that were found."""
    preemptions: float | None = None
    """Requests it had to interrupt since it started."""

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing at all."""
        return all(getattr(self, field.name) is None for field in fields(self))


def parse_metrics(text: str) -> Snapshot:
    """Read Prometheus text. Lines that are damaged or unknown are passed over."""
    found: dict[str, list[float]] = {}
    sizes: list[tuple[int, int]] = []
    for name, labels, value in _samples(text):
        if name == _CACHE_CONFIG:
            size = _cache_size(labels)
            if size is not None:
                sizes.append(size)
        elif value == value and abs(value) != float("inf"):
            found.setdefault(name, []).append(value)
    values: dict[str, float | int | None] = {}
    for quantity, names in (*_SUMS.items(), *_MEANS.items()):
        numbers = next((found[name] for name in names if name in found), None)
        if numbers is None:
            continue
        total = max(0.0, sum(numbers))
        values[quantity] = min(1.0, total / len(numbers)) if quantity in _MEANS else total
    if sizes:
        values["kv_tokens"] = sum(blocks * size for blocks, size in sizes)
        values["block_size"] = sizes[0][1]
    elif _SGLANG_TOKENS in found:
        values["kv_tokens"] = int(sum(found[_SGLANG_TOKENS]))
    return Snapshot(**values)  # type: ignore[arg-type]


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of the samples that matter."""
    for line in text.splitlines():
        if not line.startswith(("vllm:", "sglang:")):
            continue
        brace = line.find("{")
        name = line[:brace] if brace >= 0 else line.split(None, 1)[0]
        if name not in _WANTED:
            continue
        labels, rest = "", line[len(name) :]
        if brace >= 0:
            end = line.rfind("}")
            if end < brace:
                continue
            labels, rest = line[brace + 1 : end], line[end + 1 :]
        try:
            yield name, labels, float(rest.split()[0])  # a time stamp may follow
        except (ValueError, IndexError):
            continue


def _cache_size(labels: str) -> tuple[int, int] | None:
    """Blocks and tokens per block from the labels of vLLM's cache configuration."""
    numbers = {name: int(value) for name, value in _SIZES.findall(labels)}
    blocks, size = numbers.get("num_gpu_blocks", 0), numbers.get("block_size", 0)
    return (blocks, size) if blocks > 0 and size > 0 else None


class ScrapeSettings(Settings):
    """How the servers' metrics are read."""

    path: str = Field(default="/metrics", pattern=r"^(/[!-~]*|off)$")
    """What is asked; off: never, the router's own ledger is enough."""
    interval_s: float = Field(default=0.5, gt=0, le=3600, allow_inf_nan=False)
    """Seconds between two snapshots; policies are trained with 0.5."""
    timeout_s: float = Field(default=2.0, gt=0, le=3600, allow_inf_nan=False)
    """For one answer."""


class Scraper:
    """Asks every replica for its metrics at an interval, all of them at the same time."""

    def __init__(
        self,
        cluster: ClusterState,
        fetch: Fetch,
        settings: ScrapeSettings | None = None,
        present: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """``fetch`` gets a path of a replica and returns the body of its response, or raises.

        ``present``: numbers of the replicas to ask; default: all of the cluster.
        """
        self.cluster = cluster
        self.fetch = fetch
        self.settings = settings or ScrapeSettings()
        self.snapshots: dict[int, Snapshot] = {}
        """The latest of each replica."""
        self.failures: dict[int, int] = {}
        """Failed attempts of each replica."""
        self._present = present or (lambda: range(len(cluster)))
        self._asking: set[int] = set()

    async def run(self) -> None:
        """Ask until cancelled. A replica that is slow to answer delays no other."""
        if self.settings.path == "off":
            return
        async with asyncio.TaskGroup() as group:
            while True:
                for r in self._present():
                    if r not in self._asking:
                        group.create_task(self._ask(r))
                await asyncio.sleep(self.settings.interval_s)

    async def scrape(self) -> None:
        """Ask every replica once and enter its metrics."""
        await asyncio.gather(*(self._ask(r) for r in self._present()))

    async def _ask(self, replica: int) -> None:
        self._asking.add(replica)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                body = await self.fetch(replica, self.settings.path)
            self._enter(replica, parse_metrics(body.decode("utf-8", errors="replace")))
        except Exception:  # any failure means: no metrics now
            self._count_failure(replica)
        finally:
            self._asking.discard(replica)

    def _count_failure(self, replica: int) -> None:
        self.failures[replica] = self.failures.get(replica, 0) + 1

    def _enter(self, replica: int, snapshot: Snapshot) -> None:
        if snapshot.is_empty:
            self._count_failure(replica)
            return
        self.snapshots[replica] = snapshot
        self.cluster.scraped(replica, snapshot.waiting, snapshot.running, snapshot.kv_used)
        if snapshot.kv_tokens is not None:
            self.cluster.set_capacity(replica, snapshot.kv_tokens, snapshot.block_size)
