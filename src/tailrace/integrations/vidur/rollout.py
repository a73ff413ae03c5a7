"""Roll-outs in real Vidur. A task is stateless, as those in the simulator are (rollout.py).

Vidur is imported when a task is played, not before.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.integrations.vidur.setup import VidurSetup
from tailrace.learn.improve.recorder import Recorder, Recording
from tailrace.learn.improve.rollout import PER_CLUSTER, BootstrapStates, Rollout
from tailrace.policy.base import decide
from tailrace.seeds import Purpose, require


@dataclass(frozen=True)
class VidurTask:
    """Which episode to play, with which network, and how much of it."""

    setup: VidurSetup
    episode_seed: int
    """A training seed."""
    params: NDArray[np.float64]
    """[p] a packed network."""
    recording: Recording
    group: int = 1
    """So many clusters play the episode, each with choices of its own."""
    temperature: float = 1.0
    epsilon: float = 0.0


def play(task: VidurTask) -> Rollout:
    """Do a roll-out of ``group`` clusters."""
    return together([_play_one(task, k) for k in range(task.group)])


def _play_one(task: VidurTask, k: int) -> Rollout:
    setup, recording = task.setup, task.recording
    seed = require(task.episode_seed, Purpose.TRAINING)
    # One request more than is decided: it shows what the last decision led to.
    table = setup.requests(recording.warmup + recording.decisions + 1, seed)
    found: list[Rollout] = []
    named = replace(recording, name=setup.scenario.name, stream=f"{recording.stream}-{k}")
    recorder = Recorder(named, task.params, found.append)
    simulator = setup.simulator(table, seed)
    simulator.use(recorder, seed)
    recorder.record(task.temperature, task.epsilon)
    while not found and (view := simulator.next_view()) is not None:
        simulator.assign(decide(recorder, view))
    if not found:
        raise TailraceError(
            f"{setup.scenario.name}: the requests ended after {recorder.recorded} of "
            f"{recording.decisions} decisions; lower ppo.decisions or ppo.warmup"
        )
    return found[0]


def together(parts: list[Rollout]) -> Rollout:
    """Put roll-outs of clusters of one size side by side, as one group."""
    if len(parts) == 1:
        return parts[0]
    whole: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=1)
        for name in (*PER_CLUSTER, "replica_obs", "mask")
    }
    bootstrap = {
        entry.name: np.concatenate([getattr(part.bootstrap, entry.name) for part in parts])
        for entry in fields(BootstrapStates)
    }
    bootstrap["cluster"] = np.arange(len(parts))
    first, priors = parts[0], [part.prior for part in parts if part.prior is not None]
    return replace(
        first,
        **whole,
        prior=np.concatenate(priors, axis=1) if priors else None,
        bootstrap=BootstrapStates(**bootstrap),
        group=len(parts),
        names=tuple(name for part in parts for name in part.names),
        metrics={k: float(np.mean([p.metrics[k] for p in parts])) for k in first.metrics},
        action_share=np.mean([part.action_share for part in parts], axis=0),
        replica_moments=np.mean([part.replica_moments for part in parts], axis=0),
        request_moments=np.mean([part.request_moments for part in parts], axis=0),
    )
