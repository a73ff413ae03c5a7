"""Scenarios of recorded traffic: every trace of a folder on the clusters of a suite.

Each trace is imported once into a file of requests per half of its conversations, from which the
traffic of a scenario is drawn (workload/recorded/resample.py). Loads are fractions of a capacity
that is measured on both halves, so that a load means the same rate in both.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tailrace.config import Cluster, Replica, Scenario, Settings, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.cells import source_digest
from tailrace.files import dumps, make_folder, write_text
from tailrace.parallel import WorkerPool
from tailrace.saturation import saturation_rps
from tailrace.view.devices import num_blocks_of
from tailrace.workload import traces
from tailrace.workload.draft import reorder
from tailrace.workload.prefix import repeated_tokens
from tailrace.workload.recorded.conversations import (
    Half,
    conversation_keys,
    in_half,
    numbered,
    without,
)
from tailrace.workload.recorded.folder import FoundTrace, find
from tailrace.workload.table import RequestTable
from tailrace.workload.traces import Trace

CAPACITIES = "capacity.json"
#: A trace needs this many requests in a half, or its runs would repeat a handful.
FEWEST_REQUESTS = 20


class TraceCluster(Settings):
    """A cluster of a suite of recorded traffic, and the loads it is judged at."""

    name: str
    """Name of the cluster."""
    replicas: tuple[Replica, ...] = Field(min_length=1)
    """Its servers."""
    loads: tuple[float, ...] = Field(min_length=1)
    """Loads, as fractions of the capacity measured with the trace."""
    prompts: tuple[int, int] = (0, 2**24)
    """P90 prompt lengths of the traces it serves, tokens: above the first, up to the last."""
    shared_prefixes: bool = False
    """Serve only traces whose prompts share prefixes: for others it would equal another cluster."""

    @property
    def cluster(self) -> Cluster:
        """The servers as a cluster."""
        return Cluster(replicas=self.replicas)


@dataclass(frozen=True)
class Recorded:
    """Scenarios of recorded traffic."""

    scenarios: tuple[Scenario, ...]  #: of the half that was asked for
    others: tuple[Scenario, ...]  #: the same on the other half, for choosing the best rules
    notes: tuple[str, ...]  #: sentences on what was left out


@dataclass(frozen=True)
class _Part:
    """The requests of one half of a trace that a cluster can hold."""

    path: Path
    requests: int
    conversations: int


def scenarios_of(
    folder: Path,
    clusters: Sequence[TraceCluster],
    half: Half,
    into: Path,
    *,
    requests: int,
    keep_capacities: bool = False,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Recorded:
    """Return the scenarios of all traces in ``folder`` on ``clusters``, with capacities.

    Files of requests and measured capacities are kept in ``into``, which must stay as long as the
    scenarios are used. A scenario gives other traffic for every seed, of ``requests`` requests; its
    conversations are those of ``half``. For training, use those of ``Half.TRAIN``.
    ``keep_capacities`` takes capacities from ``into`` although sources have changed since.
    """
    found, skipped = find(folder)
    notes = [f"{s.path.relative_to(folder.parent)} was left out: {s.why}" for s in skipped]
    notes.insert(0, f"Recorded conversations of the half '{half}'.")
    make_folder(into)
    mine: list[Scenario] = []
    others: list[Scenario] = []
    wholes: list[Scenario] = []
    for trace in found:
        progress(trace.name)
        try:
            read = trace.read()
        except TailraceError as error:
            notes.append(f"{trace.name} was left out: {error}")
            continue
        for cluster in _fitting(clusters, read.table):
            parts = _parts(trace, read, cluster, half, into, notes)
            if parts is None:
                continue
            for load in cluster.loads:
                for part, kept in zip(parts, (mine, others, wholes), strict=True):
                    kept.append(_scenario(trace, cluster, load, part, requests))
    if not mine:
        raise TailraceError(
            f"there is no recorded traffic to use in {folder}"
            + (": " + "; ".join(notes[1:]) if notes[1:] else ", it is empty")
        )
    capacities = _capacities(wholes, into / CAPACITIES, keep_capacities, jobs, progress)
    return Recorded(
        tuple(_with_capacity(mine, capacities)),
        tuple(_with_capacity(others, capacities)),
        tuple(dict.fromkeys(notes)),
    )


def _fitting(clusters: Sequence[TraceCluster], table: RequestTable) -> list[TraceCluster]:
    """Return the clusters that serve such prompts."""
    p90 = float(np.percentile(table.rows["prompt_tokens"], 90))
    shares = bool(repeated_tokens(table).any())
    return [
        c for c in clusters if c.prompts[0] < p90 <= c.prompts[1] and shares >= c.shared_prefixes
    ]


def _parts(
    trace: FoundTrace, read: Trace, cluster: TraceCluster, half: Half, into: Path, notes: list[str]
) -> tuple[_Part, _Part, _Part] | None:
    """Write what a cluster can hold of a trace: the half, the other half, and both together.

    None, with a note, if that is too little.
    """
    table = read.table
    too_large = _too_large(table, cluster.cluster)
    fits = without(table, too_large)
    label = f"{trace.name} on {cluster.name}"
    if not fits.all():
        after = int((~fits).sum() - too_large.sum())
        follow = f" and {after} that follow them" * (after > 0)
        notes.append(
            f"{label}: {too_large.sum()} requests that exceed the KV memory of a server{follow} "
            f"were left out, of {len(table)}"
        )
    keys = conversation_keys(table, read.session_keys)
    mine, other = fits & in_half(keys, half), fits & ~in_half(keys, half)
    if int(mine.sum()) < FEWEST_REQUESTS:
        why = f"{int(mine.sum())} requests in its half '{half}' are fewer than {FEWEST_REQUESTS}"
        notes.append(f"{label} was left out: {why}")
        return None
    if int(other.sum()) < FEWEST_REQUESTS:
        notes.append(f"{label}: the best rules are chosen on the same conversations, as the other "
                     f"half has {int(other.sum())} requests")  # fmt: skip
        other = mine
    # Clusters that hold all of it share a file.
    limit = "" if fits.all() else f".{cluster.name}"
    other_half = Half.TRAIN if half is Half.JUDGE else Half.JUDGE
    names = (half, half if other is mine else other_half, "all")
    written = [
        _written(into / f"{trace.name}{limit}.{name}.parquet", read, rows, keys)
        for name, rows in zip(names, (mine, other, fits), strict=True)
    ]
    return written[0], written[1], written[2]


def _too_large(table: RequestTable, cluster: Cluster) -> NDArray[np.bool_]:
    """Return which requests [R] some server could never finish."""
    tokens = table.rows["prompt_tokens"].astype(np.int64) + table.rows["output_tokens"]
    bad: NDArray[np.bool_] = tokens > min(
        num_blocks_of(replica) * replica.block_size for replica in cluster.replicas
    )
    return bad


def _written(path: Path, read: Trace, rows: NDArray[np.bool_], keys: NDArray[np.uint64]) -> _Part:
    """Write some rows of a trace to a file."""
    count = int(rows.sum())
    part = _Part(path, count, int(numbered(keys[rows]).max()) + 1)
    # Times of conversations count from their beginning, so they are kept in any case.
    traces.write(reorder(read.table, np.flatnonzero(rows)), path, has_slos=read.has_slos)
    return part


def _scenario(
    trace: FoundTrace, cluster: TraceCluster, load: float, part: _Part, requests: int
) -> Scenario:
    workload = Workload(
        name=str(part.path),
        requests=requests,
        load=load,
        arrivals="resampled",
        ttft_slo_s=trace.options.ttft_slo_s,
        tpot_slo_s=trace.options.tpot_slo_s,
    )
    return Scenario(
        name=f"{trace.name}-{cluster.name}-{100 * load:.0f}",
        description=f"{part.conversations} conversations, {part.requests} requests of {trace.name}",
        cluster=cluster.cluster,
        workload=workload,
    )


# ---- capacities ---------------------------------------------------------------------------------


def _capacities(
    wholes: Sequence[Scenario],
    path: Path,
    keep: bool,
    jobs: int | None,
    progress: Callable[[str], None],
) -> dict[str, float]:
    """Return the capacity of each scenario by name, measured once and kept in a file.

    It is kept by what was measured, with and without the version of the sources; ``keep`` takes it
    whatever the version.
    """
    known: dict[str, float] = {}
    try:
        known = {str(k): float(v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        known = {}
    keys = {s.name: _capacity_keys(s)[keep] for s in wholes}
    missing = {keys[s.name]: s for s in wholes if keys[s.name] not in known}
    progress(f"capacity of {len(missing)} clusters" if missing else "capacities are known")
    with WorkerPool(jobs) as pool:
        for scenario, capacity in pool.run(saturation_rps, list(missing.values())):
            known |= dict.fromkeys(_capacity_keys(scenario), capacity)
            write_text(path, dumps(known) + "\n")
    return {name: known[key] for name, key in keys.items()}


def _capacity_keys(scenario: Scenario) -> tuple[str, str]:
    """Return digests of all that a capacity depends on, with and without the sources."""
    settings = {"cluster": scenario.cluster, "router": scenario.router, "engine": scenario.engine}
    about: dict[str, object] = {
        name: of.model_dump(mode="json", exclude_defaults=True) for name, of in settings.items()
    }
    about["traffic"] = hashlib.sha256(Path(scenario.workload.name).read_bytes()).hexdigest()
    defaults = {name: of.model_dump(mode="json") for name, of in settings.items()}
    version = {"defaults": defaults, "sources": source_digest()}
    first, second = (
        hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()[:16]
        for text in (about | version, about)
    )
    return first, second


def _with_capacity(found: Sequence[Scenario], capacities: dict[str, float]) -> Iterator[Scenario]:
    for scenario in found:
        yield scenario.model_copy(update={"capacity_rps": capacities[scenario.name]})
