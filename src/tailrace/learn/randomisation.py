"""Domain randomisation: a distribution over clusters, traffic, and what the router can know."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from tailrace.config import (
    MAX_REPLICAS,
    MIN_STALENESS_S,
    Cluster,
    Event,
    Positive,
    PredictorName,
    PrefixLearns,
    Replica,
    RouterSettings,
    Scenario,
    Settings,
    Share,
    SpeedFactor,
    Workload,
)
from tailrace.errors import unknown_name
from tailrace.saturation import saturation_rps
from tailrace.seeds import generator
from tailrace.view.devices import num_blocks_of
from tailrace.workload import library

Load = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Age = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=16, le=2**20)]
Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
#: Replicas of the cluster on which the capacity of a workload is measured.
MEASURED_REPLICAS = 4


class RandomisationSettings(Settings):
    """What may vary from one world to the next."""

    share: Share = 1.0
    """Share of the worlds that are drawn like this; the others are the run's scenarios."""
    workloads: dict[str, float] = Field(
        default={
            "chat": 2, "chat-bursty": 1, "code-completion": 1, "mixed": 1, "reasoning": 1,
            "rag": 1.5, "agents": 1.5, "sessions-hot": 4,
        },
        min_length=1,
    )  # fmt: skip
    """Built-in workloads and how often each is drawn, relative to the others."""
    replicas: tuple[Replicas, Replicas] = (2, 12)
    """Fewest and most replicas; small and large clusters are equally likely (log-uniform)."""
    load: tuple[Load, Load] = (0.3, 1.1)
    """Lowest and highest load, as a fraction of capacity; high loads are drawn more often."""
    load_scale: dict[str, Load] = Field(default={"code-completion": 0.3})
    """Factor on the load of these workloads: some are so bursty that a low mean load is heavy."""
    mixed_speed: Share = 0.5
    """Share of clusters whose replicas differ in speed."""
    speeds: tuple[SpeedFactor, SpeedFactor] = (0.4, 2.0)
    """Slowest and fastest of such replicas."""
    bursts: Share = 0.2
    """Share of worlds whose arrivals come in bursts instead of the workload's own way."""
    staleness_s: tuple[Age, ...] = (0.05, 0.5, 0.5, 1.0, 5.0)
    """Ages of metrics to draw from, s."""
    predictors: tuple[PredictorName, ...] = ("mean", "mean", "mean", "noisy")
    """Predictors of output length to draw from."""
    ttft_slo_s: tuple[Positive, Positive] = (1.0, 1.0)
    """Lowest and highest target for the time to first token, s (log-uniform)."""
    failures: Share = 0.15
    """Share of worlds in which a replica dies and returns, or slows down for a while."""
    variants: int = Field(default=0, ge=0, le=1000)
    """Combinations of workload, prompt_scale, think_scale, kv_tokens, chunk_size and session_ids
    that a run draws from; the capacity of each is measured first. 0: the workloads as they are."""
    prompt_scale: tuple[Positive, Positive] = (1.0, 1.0)
    """Lowest and highest multiple of prompt lengths (log-uniform)."""
    think_scale: tuple[Positive, Positive] = (1.0, 1.0)
    """Lowest and highest multiple of the pauses within sessions (log-uniform)."""
    kv_tokens: tuple[Positive, Positive] | None = None
    """Smallest and largest KV memory of a replica, tokens (log-uniform), but at least twice the
    longest request; none: the device's."""
    chunk_size: tuple[Tokens, Tokens] = (512, 512)
    """Fewest and most tokens per iteration, in powers of two."""
    anonymous: Share = 0.0
    """Share of variants whose requests do not say which session they belong to."""
    speed_error: Share = 0.0
    """Largest relative error of the speed that the router assumes of a replica."""
    fleet_speed: tuple[SpeedFactor, SpeedFactor] = (1.0, 1.0)
    """Lowest and highest multiple of the speeds of all replicas of a world (log-uniform): weak and
    strong devices. The rate of requests follows it."""
    prefix_learns: tuple[PrefixLearns, ...] = ("sent",)
    """Ways in which the router's prefix index learns to draw from."""
    events_lag_s: tuple[Age, Age] = (0.0, 0.0)
    """Lowest and highest delay of the servers' KV events, s (uniform)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, (low, high) in (
            ("replicas", self.replicas), ("load", self.load), ("speeds", self.speeds),
            ("ttft_slo_s", self.ttft_slo_s), ("prompt_scale", self.prompt_scale),
            ("think_scale", self.think_scale), ("kv_tokens", self.kv_tokens or (1.0, 1.0)),
            ("chunk_size", self.chunk_size), ("fleet_speed", self.fleet_speed),
            ("events_lag_s", self.events_lag_s),
        ):  # fmt: skip
            if low > high:
                raise ValueError(f"{name} = [{low:g}, {high:g}] must be two rising numbers")
        if self.replicas[0] < 2:
            raise ValueError("with fewer than 2 replicas there is nothing to route")
        if any(0 < age < MIN_STALENESS_S for age in self.staleness_s):
            raise ValueError(f"staleness_s must be 0 or at least {MIN_STALENESS_S:g}")
        if not (self.staleness_s and self.predictors and self.prefix_learns):
            raise ValueError("staleness_s, predictors and prefix_learns need at least one entry")
        for name in (*self.workloads, *self.load_scale):
            if name not in library.names():
                raise ValueError(str(unknown_name("workload", name, library.names())))
        for name, weight in self.workloads.items():
            if not 0 <= weight < np.inf:
                raise ValueError(f"the weight of workload {name} must not be negative")
        if not sum(self.workloads.values()) > 0:
            raise ValueError("all workloads have weight 0")
        if not self.variants and self.varies_servers:
            raise ValueError(
                "prompt_scale, think_scale, kv_tokens, chunk_size and anonymous need variants: how "
                "many combinations to draw from"
            )
        return self

    @property
    def varies_servers(self) -> bool:
        """Whether anything is set that only variants have."""
        ranges = (self.prompt_scale, self.think_scale)
        scaled = any(pair != (1.0, 1.0) for pair in ranges) or self.chunk_size != (512, 512)
        return scaled or self.kv_tokens is not None or self.anonymous > 0


@dataclass(frozen=True)
class Variant:
    """A workload and the servers it is played on."""

    name: str
    workload: Workload
    replica: Replica


def variants(settings: RandomisationSettings) -> list[tuple[Variant, float]]:
    """Return what worlds are drawn from, and how often each is drawn, relative to the others."""
    named = [(name, weight) for name, weight in settings.workloads.items() if weight > 0]
    if not settings.variants:
        plain = [Variant(name, Workload(name=name), Replica()) for name, _ in named]
        return list(zip(plain, (weight for _, weight in named), strict=True))
    # Workloads in turn by their weights, so that a few dozen variants hold all of them.
    shares = np.array([weight for _, weight in named]) / sum(weight for _, weight in named)
    counts = np.zeros(len(named))
    found = []
    for number in range(settings.variants):
        which = int(np.argmax(shares * (number + 1) - counts))
        counts[which] += 1
        found.append((_variant(settings, named[which][0], number), 1.0))
    return found


def _variant(s: RandomisationSettings, name: str, number: int) -> Variant:
    """Return one combination; ``number`` is its place in the list."""
    rng = generator(number, "variant")

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    prompt_scale = round(between(*s.prompt_scale), 3)
    workload = Workload(
        name=name,
        prompt_scale=prompt_scale,
        think_scale=round(between(*s.think_scale), 3),
        session_ids=rng.random() >= s.anonymous,
    )
    chunk = 2 ** round(float(rng.uniform(*np.log2(s.chunk_size))))
    longest = library.max_tokens(name, prompt_scale)
    kv_tokens = max(between(*s.kv_tokens), 2.0 * longest) if s.kv_tokens else 0.0
    replica = Replica(chunk_size=int(np.clip(chunk, *s.chunk_size)))
    if kv_tokens or longest > num_blocks_of(replica) * replica.block_size:
        blocks = math.ceil(max(kv_tokens, 2.0 * longest) / replica.block_size)
        replica = replica.model_copy(update={"num_blocks": blocks})
    return Variant(f"{name} #{number}", workload, replica)


@dataclass(frozen=True)
class Distribution:
    """Scenarios by seed; ``capacities`` are requests/s per replica of speed 1, by variant."""

    settings: RandomisationSettings
    capacities: tuple[tuple[str, float], ...]

    def __hash__(self) -> int:
        """Weights of workloads are a dict, which has no hash."""
        return hash((self.settings.model_dump_json(), self.capacities))

    @cached_property
    def variants(self) -> list[tuple[Variant, float]]:
        """What worlds are drawn from, with their weights, in the order of ``capacities``."""
        return variants(self.settings)

    @classmethod
    def measured(cls, settings: RandomisationSettings) -> "Distribution":
        """Measure what a replica can take of each variant."""
        found = []
        for variant, _ in variants(settings):
            servers = variant.replica.model_copy(update={"count": MEASURED_REPLICAS})
            scenario = Scenario(
                name=variant.name,
                cluster=Cluster(replicas=(servers,)),
                workload=variant.workload,
            )
            rps = saturation_rps(scenario, rough=settings.variants > 0)
            found.append((variant.name, rps / MEASURED_REPLICAS))
        return cls(settings, tuple(found))

    def __call__(self, seed: int, load_factor: float = 1.0) -> Scenario:
        """Return the scenario of a seed; its load is multiplied by a factor."""
        s = self.settings
        rng = generator(seed, "randomisation")
        known = self.variants
        weights = np.array([weight for _, weight in known])
        which = int(rng.choice(len(known), p=weights / weights.sum()))
        variant, (_, capacity) = known[which][0], self.capacities[which]
        name = variant.workload.name
        # What came later has generators of its own, so that its ranges change nothing else.
        fleet, index = generator(seed, "fleet"), generator(seed, "index")
        speeds = self._speeds(rng)
        fleet_speed = float(np.exp(fleet.uniform(*np.log(s.fleet_speed))))
        if fleet_speed != 1.0:
            speeds = [round(speed * fleet_speed, 3) for speed in speeds]
        # The larger of two draws: most of what routing can win or lose is won or lost under load.
        load = float(rng.uniform(*s.load, size=2).max()) * load_factor
        load *= s.load_scale.get(name, 1.0)
        rate = load * capacity * sum(speeds)
        bursty = rng.random() < s.bursts
        changes = {
            "rate": rate,
            "load": None,
            "arrivals": "gamma" if bursty else "native",
            "arrival_cv": float(rng.uniform(1.5, 4.0)),
            "ttft_slo_s": float(np.exp(generator(seed, "target").uniform(*np.log(s.ttft_slo_s)))),
        }
        router = RouterSettings(
            staleness_s=float(rng.choice(s.staleness_s)),
            predictor=s.predictors[int(rng.integers(len(s.predictors)))],
            predictor_sigma=float(rng.uniform(0.2, 1.0)),
            prefix_learns=s.prefix_learns[int(index.integers(len(s.prefix_learns)))],
            events_lag_s=float(index.uniform(*s.events_lag_s)),
        )
        return Scenario(
            name=f"random-{seed}",
            cluster=Cluster(replicas=self._replicas(variant.replica, speeds, seed)),
            workload=variant.workload.model_copy(update=changes),
            router=router,
            events=self._events(rng, len(speeds), rate),
        )

    def _replicas(
        self, replica: Replica, speeds: Sequence[float], seed: int
    ) -> tuple[Replica, ...]:
        """Return replicas of given speeds, of which the router may assume wrong ones."""
        error = np.log1p(self.settings.speed_error)
        factors = np.exp(generator(seed, "assumed").uniform(-error, error, len(speeds)))
        changes = [{"speed": speed} for speed in speeds]
        if error > 0:
            for change, factor in zip(changes, factors, strict=True):
                change["assumed_speed"] = round(float(change["speed"] * factor), 3)
        return tuple(replica.model_copy(update=change) for change in changes)

    def _speeds(self, rng: np.random.Generator) -> list[float]:
        s = self.settings
        low, high = np.log(s.replicas[0] - 0.5), np.log(s.replicas[1] + 0.5)
        count = int(np.clip(round(float(np.exp(rng.uniform(low, high)))), *s.replicas))
        if rng.random() >= s.mixed_speed:
            return [1.0] * count
        # A few kinds of machine, as in real fleets.
        slowest, fastest = np.log(s.speeds)
        kinds = np.exp(rng.uniform(slowest, fastest, size=int(rng.integers(2, 4))))
        return [round(float(kind), 3) for kind in rng.choice(kinds, count)]

    def _events(self, rng: np.random.Generator, replicas: int, rate: float) -> tuple[Event, ...]:
        """One replica fails at a time; times are in the reach of a world of some 2 000 requests."""
        if rng.random() >= self.settings.failures:
            return ()
        replica = int(rng.integers(replicas))
        start = float(rng.uniform(100, 1000)) / rate
        back = start + float(rng.uniform(300, 1500)) / rate
        returns = Event(at_s=back, replica=replica, kind="return")
        if rng.random() < 0.5:
            return Event(at_s=start, replica=replica, kind="die"), returns
        factor = float(rng.uniform(0.2, 0.7))
        return Event(at_s=start, replica=replica, kind="slow", factor=factor), returns
