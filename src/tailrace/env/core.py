"""Shared by all environments: a fleet, the episodes its clusters play, and the reward."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.env.episodes import Episode, Episodes, Worlds
from tailrace.env.latency_limit import LatencyLimit
from tailrace.env.reward import Reward, RewardSettings
from tailrace.errors import LatencyLimitWarning, TailraceError
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.observation import LIMIT, N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.seeds import SEEDS_PER_PURPOSE, Purpose, require, seeds
from tailrace.sim import cost_accounts, engine
from tailrace.sim.allocation import Allocation, new_fleet, new_tables
from tailrace.sim.build import lay_out, set_up
from tailrace.sim.fleet import (
    NO_ACTION,
    SKIP,
    begin,
    follow,
    new_step,
    next_available,
    step_fleet,
)
from tailrace.sim.types import Fleet
from tailrace.view.devices import resolved
from tailrace.view.ordering import Order, order_row

Array = NDArray[np.float64]
Observation = dict[str, NDArray[Any]]


class EnvSettings(LatencyLimit):
    """An environment's episodes and reward."""

    decisions: int = 2048
    """Decisions per episode; its end is a truncation."""
    max_replicas: int | None = None
    """Replicas there is room for in an observation; default: the largest cluster's."""
    group: int = 1
    """Number of neighbouring clusters that play the same scenario with the same requests."""
    reward: RewardSettings = RewardSettings()
    order: Order | None = None
    """Order by which requests get their priorities. Servers whose `scheduling_policy` is auto then
    serve by priority. None: they come as they are sent."""


class EpisodicClusters(ABC):
    """``n`` clusters of up to ``replicas`` replicas, wherever they are played.

    A step is shown in ``step_out``; the reward and the observation follow from it.
    """

    def __init__(self, n: int, largest: int, settings: EnvSettings) -> None:
        """``largest``: replicas of the largest cluster."""
        if n < 1 or n % settings.group:
            raise TailraceError(f"{n} clusters cannot be split into groups of {settings.group}")
        if settings.max_replicas is not None and settings.max_replicas < largest:
            raise TailraceError(
                f"max_replicas = {settings.max_replicas}, but a cluster has {largest}"
            )
        self.n = n
        self.settings = settings
        self.replicas = max(settings.max_replicas or 0, largest)
        self.reward = Reward(settings.reward, n)
        self.step_out = new_step(n, self.replicas)
        self._chosen = np.zeros(n, np.int64)
        self.decisions = np.zeros(n, np.int64)
        self.alarms = np.zeros(n, np.int64)
        """[n] requests beyond the latency limit that ended in the last step."""
        self.terminated = np.zeros(n, np.bool_)
        """[n] episodes that an alarm ended in the last step."""

    @abstractmethod
    def reset(self, episode_seeds: Sequence[int]) -> None:
        """Start new episodes on all clusters, with one training seed per group."""

    @abstractmethod
    def step(self, actions: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_]]:
        """Carry out actions [n]; return rewards [n] and which episodes are over [n]."""

    def _result(self, rewards: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return rewards [n] after alarms, and which episodes are over [n]."""
        out, settings = self.step_out, self.settings
        over = (self.decisions >= settings.decisions) | (out.status == engine.OVER)
        if settings.latency_limit_s is None:
            return rewards, over
        self.alarms = out.terms[:, cost_accounts.OVER_LIMIT].astype(np.int64)
        if settings.warns and self.alarms.any():
            warnings.warn(
                f"requests that took longer than latency_limit_s = {settings.latency_limit_s:g}: "
                f"{self.alarms.sum()}",
                LatencyLimitWarning,
                stacklevel=4,
            )
        if not settings.ends_episodes:
            return rewards, over
        self.terminated = self.alarms > 0
        return rewards - settings.latency_penalty * self.terminated, over | self.terminated

    def draw_seeds(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw training seeds, one per group of clusters."""
        starts = rng.integers(SEEDS_PER_PURPOSE, size=count)
        return [seeds(Purpose.TRAINING, 1, int(start))[0] for start in starts]

    def valid(self, actions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return actions [n] with every unavailable replica replaced, in an array used again."""
        actions = np.asarray(actions, np.int64)
        if actions.shape != (self.n,):
            raise TailraceError(f"expected {self.n} actions, got an array {actions.shape}")
        if not next_available(self.step_out.mask, actions, self._chosen):
            raise TailraceError(f"an action must be a replica from 0 to {self.replicas - 1}")
        return self._chosen

    def observation(self) -> Observation:
        """Return what the routers see: arrays [n, ...] that the next step overwrites."""
        out = self.step_out
        return {
            "replicas": out.replica_obs,
            "request": out.request_obs,
            "mask": out.mask.view(np.int8),
        }


class Core(EpisodicClusters):
    """``n`` simulated clusters; each starts another episode when its own is over."""

    def __init__(self, worlds: Worlds, n: int, settings: EnvSettings) -> None:
        """Find the size of the clusters; arrays are allocated at the first reset."""
        self.episodes = Episodes(worlds, settings.decisions)
        largest = self.episodes.largest(seeds(Purpose.TRAINING, 1)[0])
        super().__init__(n, largest.replicas, settings)
        self.allocation = largest.joined(Allocation(replicas=self.replicas)).with_slack()
        self.playing: list[Episode | None] = []
        self._rule = _builtin(settings.reward.rule)
        self._reference_out = new_step(n, self.replicas)
        self._fleets: list[Fleet] = []  # its own, and that of the reference rule if there is one
        self._tables = new_tables(Allocation(), 0)

    # ---- episodes -------------------------------------------------------------------------------

    def reset(self, episode_seeds: Sequence[int]) -> None:
        """Start new episodes on all clusters, with one seed per group."""
        if len(episode_seeds) * self.settings.group != self.n:
            raise TailraceError(
                f"{len(episode_seeds)} seeds were given for {self.n // self.settings.group} groups"
            )
        self._play(np.arange(self.n), episode_seeds, fresh=True)

    def restart(self, which: NDArray[np.int64], episode_seeds: Sequence[int]) -> None:
        """Start new episodes on some clusters: whole groups, with one seed per group."""
        self._play(which, episode_seeds)

    def _play(
        self, which: NDArray[np.int64], episode_seeds: Sequence[int], fresh: bool = False
    ) -> None:
        episodes = [self.episodes.make(require(s, Purpose.TRAINING)) for s in episode_seeds]
        needed = reduce(Allocation.joined, map(self._checked, episodes), self.allocation)
        if not self._fleets:
            self.allocation = needed
            self._lay_out_fleets()
        elif needed != self.allocation and fresh:  # no running episode has to be moved
            self.allocation = needed.with_slack()
            self._lay_out_fleets()
        elif needed != self.allocation:
            self._grow(needed.with_slack())
        for k, c in enumerate(which):
            self._start(int(c), episodes[k // self.settings.group])
        self.decisions[which] = 0
        self.reward.restart(which)
        actions = np.full(self.n, SKIP)
        actions[which] = NO_ACTION
        step_fleet(self._fleets[0], self._tables, actions, self.step_out)
        self._check()

    def _checked(self, episode: Episode) -> Allocation:
        needed = episode.allocation
        if needed.replicas > self.replicas:
            raise TailraceError(
                f"{episode.scenario.name} has {needed.replicas} replicas, but there is room for "
                f"{self.replicas}; set max_replicas"
            )
        return needed

    def _lay_out_fleets(self) -> None:
        count = 1 if self._rule is None else 2
        self._fleets = [new_fleet(self.allocation, self.n) for _ in range(count)]
        self._tables = new_tables(self.allocation, self.n)
        self.playing = [None] * self.n

    def _grow(self, needed: Allocation) -> None:
        """Move to larger arrays. Hash tables and stacks cannot be stretched while in use."""
        for name in ("slots", "blocks", "index_entries", "explicit_slots"):
            wanted, there = getattr(needed, name), getattr(self.allocation, name)
            if wanted > there:
                raise TailraceError(
                    f"an episode needs room for {wanted} {name}, the largest seen "
                    f"before had {there}; make the sampler's replicas alike in "
                    "batch_cap, num_blocks and index_entries, or smaller than its first draws"
                )
        self.allocation = needed
        playing = self.playing
        before: list[Any] = [*self._fleets, self._tables]
        self._lay_out_fleets()
        after: list[Any] = [*self._fleets, self._tables]
        for old, new in zip(before, after, strict=True):
            for source, target in zip(old, new, strict=True):
                target[tuple(slice(size) for size in source.shape)] = source
        self.playing = playing

    def _start(self, c: int, episode: Episode) -> None:
        self.playing[c] = episode
        scenario, reward, order = episode.scenario, self.settings.reward, self.settings.order
        servers = resolved(scenario.cluster.served_by(order=order is not None))
        lay_out(self._tables, c, episode.table, scenario.events, scenario.router, episode.seed)
        for fleet in self._fleets:
            set_up(
                fleet,
                self._tables,
                c,
                c,
                servers,
                episode.table,
                scenario.router,
                scenario.engine,
                episode.seed,
            )
            reward.shape(fleet.clusters[c])
            fleet.clusters[c]["order"] = order_row(order)
            fleet.clusters[c]["latency_limit"] = self.settings.latency_limit_s or np.inf
        begin(self.step_out, c)
        begin(self._reference_out, c)

    # ---- decisions ------------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """The clusters themselves, for what is not in the observation; available after a reset."""
        return self._fleets[0]

    def step(self, actions: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_]]:
        """Carry out actions [n]; return rewards [n] and which episodes are over [n].

        An unavailable replica is replaced by the next available one, counting up from it.
        """
        if not self._fleets:
            raise TailraceError("call reset() before step()")
        step_fleet(self._fleets[0], self._tables, self.valid(actions), self.step_out)
        self._check()
        self.decisions += 1
        reference_cost = None
        if self._rule is not None:
            follow(
                self._fleets[1],
                self._tables,
                self._rule.rule.code,
                self._rule.params,
                self._rule.lowest_id_wins,
                self.step_out.time_before,
                self._reference_out,
            )
            reference_cost = self._reference_out.cost
        return self._result(self.reward(self.step_out, reference_cost))

    def _check(self) -> None:
        if self.step_out.status.max() == engine.STUCK:  # the largest there is
            episode = self.playing[self.step_out.status.argmax()]
            name = episode.scenario.name if episode else ""
            raise TailraceError(
                f"{name}: a replica has requests waiting but can start none of them; "
                "raise its num_blocks"
            )


def _builtin(name: str | None) -> BuiltinPolicy | None:
    if name is None:
        return None
    policy = registry.get(name)
    if not isinstance(policy, BuiltinPolicy) or policy.rule.in_engine:
        raise TailraceError(f"the reward's reference must be a built-in rule, not {name}")
    return policy


def spaces_of(replicas: int) -> tuple[Any, Any]:
    """Return the observation and action space of one cluster."""
    from gymnasium import spaces

    def box(*shape: int) -> Any:
        return spaces.Box(-LIMIT, LIMIT, shape, np.float32)

    observation = spaces.Dict(
        {
            "replicas": box(replicas, N_REPLICA_FEATURES),
            "request": box(N_REQUEST_FEATURES),
            "mask": spaces.MultiBinary(replicas),
        }
    )
    return observation, spaces.Discrete(replicas)
