"""Advantages by branching: try several choices in copies of the cluster, all else being equal.

The simulator can be copied, so the choices of one decision are compared on the same arrivals:
without the luck of arrivals and without a value function (the "vine" of TRPO).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.learn.improve.rollout_source import TaskProgress, run_tasks
from tailrace.learn.samples import Samples, by_cluster_size
from tailrace.learn.settings import Stage
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.learn.worlds import BranchTask, branch
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.saturation import resolve_rate
from tailrace.seeds import generator

Arrays = dict[str, NDArray[Any]]
#: Replicas up to which a cluster counts as small; a decision of a larger one takes longer to try.
SMALL = 4


class BranchSource:
    """Decisions with the costs of several choices; those of the last updates are kept."""

    def __init__(self, network: Network, schedule: WorldSchedule, first_seed: int) -> None:
        """``first_seed`` is the number of the first training seed it may use."""
        self._network, self._schedule = network, schedule
        self._settings = schedule.settings.branching
        self._first_seed = first_seed
        self._kept: list[list[Samples]] = []

    def samples(
        self, number: int, stage: Stage | None, workers: WorkerPool, progress: TaskProgress
    ) -> tuple[list[Samples], list[Samples]]:
        """Return what to learn from in the ``number``-th update, and which of it is new.

        Both have one element per number of replicas.
        """
        new = by_cluster_size(run_tasks(workers, branch, self._tasks(number, stage), progress))
        if not new:
            raise TailraceError(
                "all traffic ended before the first decision to branch at: lower branching.warmup, "
                "or train on more requests"
            )
        self._kept = [*self._kept, new][-self._settings.replay_updates :]
        return by_cluster_size([samples for update in self._kept for samples in update]), new

    def _tasks(self, number: int, stage: Stage | None) -> list[BranchTask]:
        b = self._settings
        network = pack(self._network.config, self._network.tensors())
        first = self._first_seed + number * b.worlds
        tasks = []
        for world in self._schedule.worlds(first, b.worlds, 1, stage):
            rng = generator(world.seed, "branching")
            warmup = int(rng.integers(b.warmup // 10, b.warmup + 1))
            gap = int(rng.integers(max(1, b.gap // 2), b.gap + b.gap // 2 + 1))
            rate = resolve_rate(world.scenario) or 1.0
            states = max(1, b.states * SMALL // max(SMALL, world.scenario.cluster.size))
            requests = warmup + states * gap + int(rate * b.max_horizon_s) + 1
            tasks.append(
                BranchTask(
                    replace(world, requests=requests, late_share=b.late_share),
                    network,
                    warmup,
                    states,
                    gap,
                    b.candidates,
                    b.horizon,
                    b.min_horizon_s,
                    b.max_horizon_s,
                    b.return_share,
                    b.logit_margin,
                )
            )
        return tasks

    def state(self) -> Arrays:
        """Return the samples kept."""
        return {
            f"kept.{u}.{g}.{name}": array
            for u, update in enumerate(self._kept)
            for g, samples in enumerate(update)
            for name, array in samples.arrays().items()
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take samples back."""
        found: dict[int, dict[int, Arrays]] = {}
        for key, array in state.items():
            if key.startswith("kept."):
                _, update, group, name = key.split(".")
                found.setdefault(int(update), {}).setdefault(int(group), {})[name] = array
        self._kept = [
            [Samples(**groups[g]) for g in sorted(groups)] for _, groups in sorted(found.items())
        ]
