"""Tables from descriptions of workloads: arrivals times content, superposed by weight.

A workload is one or more parts; a part has an arrival process and a content model. A mixture is
just a workload of several parts, so any workloads can be mixed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.arrivals import ArrivalProcess
from tailrace.workload.classes import RequestClass
from tailrace.workload.content import ContentModel, Documents
from tailrace.workload.draft import Draft, finish, merge
from tailrace.workload.lengths import Streams, pick
from tailrace.workload.sessions import Conversations
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]

#: At very high rates the warm-up is shortened to this many starts in all, or to this many per
#: requested row, whichever is more, so that the work stays in proportion to the table.
WARMUP_STARTS = 20_000
WARMUP_STARTS_PER_REQUEST = 8


@dataclass(frozen=True)
class Part:
    """One stream of traffic; ``weight`` is its share of the requests."""

    name: str
    arrivals: ArrivalProcess
    content: ContentModel
    weight: float = 1.0
    request_class: RequestClass | None = None  #: None: requests have no priority and no tenant

    def draft(self, start_s: Floats, streams: Streams) -> Draft:
        """Return the rows of starts at ``start_s`` [n], s."""
        draft = self.content.draft(start_s, streams)
        if self.request_class is not None:
            self.request_class.mark(draft.rows)
        return draft


@dataclass(frozen=True)
class WorkloadSpec:
    """A named workload: what it is, where its numbers come from, and how to make it."""

    name: str
    description: str
    source: str
    default_rate_rps: float
    parts: tuple[Part, ...]

    @property
    def classes(self) -> tuple[RequestClass, ...]:
        """The classes of its requests; empty: they have none."""
        return tuple(p.request_class for p in self.parts if p.request_class is not None)


def with_think_scale(spec: WorkloadSpec, scale: float) -> WorkloadSpec:
    """Return a workload whose pauses within sessions are ``scale`` times as long."""
    parts = tuple(replace(part, content=_slower(part.content, scale)) for part in spec.parts)
    return spec if scale == 1.0 else replace(spec, parts=parts)


def _slower(content: ContentModel, scale: float) -> ContentModel:
    """Return a content model with longer pauses; one without pauses is the same."""
    if isinstance(content, Conversations):
        mu = content.think.mu + math.log(scale)
        think = replace(content.think, mu=mu, least_s=content.think.least_s * scale)
        return replace(content, think=think, warmup_s=content.warmup_s * scale)
    if isinstance(content, Documents):
        gap_s = content.gap_scale_s * scale
        return replace(content, gap_scale_s=gap_s, warmup_s=content.warmup_s * scale)
    return content


def mix(
    name: str,
    description: str,
    source: str,
    default_rate_rps: float,
    shares: Mapping[str, float],
    known: Sequence[WorkloadSpec],
) -> WorkloadSpec:
    """Return the mixture of known workloads by their share of the requests."""
    specs = {spec.name: spec for spec in known}
    parts = []
    for part_name, share in shares.items():
        spec = specs[part_name]
        total = sum(p.weight for p in spec.parts)
        parts += [replace(p, weight=share * p.weight / total) for p in spec.parts]
    return WorkloadSpec(name, description, source, default_rate_rps, tuple(parts))


def compose(
    spec: WorkloadSpec,
    requests: int,
    rate_rps: float,
    seed: int,
    process: ArrivalProcess | None = None,
) -> RequestTable:
    """Make the first ``requests`` requests of a workload at a total rate.

    With ``process`` all parts together follow that one process instead of their own: it sets the
    times of single requests and of conversations' and documents' starts.
    """
    total = sum(p.weight for p in spec.parts)
    start_rates = [rate_rps * p.weight / total / p.content.rows_per_start for p in spec.parts]
    groups: list[_Stream]
    if process is None:
        groups = [
            _Stream(p.arrivals, [p], [rate], requests * p.weight / total, seed)
            for p, rate in zip(spec.parts, start_rates, strict=True)
        ]
    else:
        groups = [_Stream(process, list(spec.parts), start_rates, requests, seed)]
    while True:
        horizon_s = min(group.horizon_s for group in groups)
        draft = merge([d for group in groups for d in group.drafts])
        if int((draft.rows["arrival_s"] <= horizon_s).sum()) >= requests:
            break
        # The horizon is negative if all starts so far fell into the warm-up.
        limit_s = horizon_s + 0.2 * abs(horizon_s)
        for group in groups:
            if group.horizon_s <= limit_s:
                group.generate(1.5)
    table = finish(draft, requests)
    table.validate()
    return table


class _Stream:
    """Starts of one arrival process, split among one or more parts, and the drafts they give.

    Rows that arrive up to ``horizon_s`` are complete: no later start can add to them.
    """

    def __init__(
        self,
        process: ArrivalProcess,
        parts: list[Part],
        start_rates: list[float],
        requests: float,
        seed: int,
    ) -> None:
        self._process = process
        self._parts = parts
        self._shares = np.array(start_rates)
        self._rate_rps = sum(start_rates)
        self._seed = seed
        starts = (
            requests
            * self._rate_rps
            / sum(
                rate * p.content.rows_per_start for p, rate in zip(parts, start_rates, strict=True)
            )
        )
        most = max(WARMUP_STARTS, WARMUP_STARTS_PER_REQUEST * requests)
        longest_s = most / self._rate_rps
        self._warmup_s = min(max(p.content.warmup_s for p in parts), longest_s)
        self._count = int(1.05 * starts + 1.02 * self._warmup_s * self._rate_rps) + 50
        self.generate(1.0)

    def generate(self, growth: float) -> None:
        """Make the parts' drafts from ``growth`` times as many starts as before."""
        self._count = math.ceil(self._count * growth)
        names = "+".join(p.name for p in self._parts)
        streams = Streams(self._seed, names)
        start_s = self._process.times(self._rate_rps, self._count, streams.rng("arrivals"))
        start_s -= self._warmup_s
        part = pick(self._shares, streams.rng("part").random(self._count))
        self.horizon_s = float(start_s[-1])
        self.drafts: list[Draft] = [
            p.draft(start_s[part == i], Streams(self._seed, p.name))
            for i, p in enumerate(self._parts)
        ]
