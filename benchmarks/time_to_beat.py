"""CPU time that PPO needs to beat the rules from random weights, next to Stable-Baselines3's.

    python benchmarks/time_to_beat.py [--seeds 3] [-o docs/results/time_to_beat.json]

Both train the same network on chat at 80 % load on four replicas, on one thread: Tailrace with the
preset ``ppo-scratch``, Stable-Baselines3 with the same learning rate, discount, epochs and
decisions per update, through the shipped adapter and with observation statistics collected
beforehand. The greedy policy is evaluated on validation traffic after every update. The benchmark
reports two CPU times of training for each rule: when the policy's cost first fell below the rule's,
and since when it has stayed below. Evaluations are not counted.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback

from bench_sim import machine
from bench_train import sb3_ppo
from tailrace.env.sb3 import RouterVecEnv
from tailrace.env.vector_env import RouterVectorEnv
from tailrace.files import atomic_path
from tailrace.learn import settings as s
from tailrace.learn.progress import Silent
from tailrace.learn.trainer import Trainer
from tailrace.learn.validation import Validation
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.learn.worlds import CompiledPolicy
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.network import Network
from tailrace.sim.engine import LEARNED_CODE

SCENARIO = "uniform-chat-80"
#: Length of an episode of Stable-Baselines3 in rollouts: queues take a while to build up.
EPISODE = 4
RULES = ("random", "round_robin", "least_outstanding")


class Clock:
    """CPU seconds of training, and the score after each update."""

    def __init__(self, validation: Validation, workers: WorkerPool) -> None:
        """Create a stopped clock."""
        self.validation, self.workers = validation, workers
        self.spent, self._since = 0.0, 0.0
        self.curve: list[tuple[float, float]] = []

    def start(self) -> None:
        """Start counting CPU time."""
        self._since = time.process_time()

    def stop(self) -> None:
        """Stop counting CPU time."""
        self.spent += time.process_time() - self._since

    def judge(self, network: Network) -> None:
        """Evaluate the greedy policy on validation traffic."""
        policy = CompiledPolicy(LEARNED_CODE, pack(network.config, network.tensors()))
        score = self.validation.evaluate(policy, self.workers).score
        self.curve.append((round(self.spent, 2), round(score, 4)))

    def told(self) -> dict[str, Any]:
        """Return when each rule was first beaten, and since when for good; None: never."""
        found: dict[str, Any] = {}
        for rule in RULES:
            bar = self.validation.score(self.validation.rule_costs[rule])
            below = [score < bar for _, score in self.curve]
            first = below.index(True) if True in below else None
            always = len(below) - below[::-1].index(False) if False in below else 0
            found[rule] = {
                "score": round(bar, 4),
                "first_s": None if first is None else self.curve[first][0],
                "for_good_s": self.curve[always][0] if always < len(below) else None,
            }
        return found | {"cpu_s": round(self.spent, 1), "curve": self.curve}


def settings_of(seed: int) -> s.TrainSettings:
    """Return the preset ppo-scratch on the one scenario."""
    return s.build(s.read("ppo-scratch"), {"seed": seed, "scenarios": [SCENARIO]})


class Watched(Silent):
    """Times a Tailrace run."""

    def __init__(self, clock: Clock) -> None:
        """The trainer is set later: it needs the watcher first."""
        self.clock = clock
        self.trainer: Trainer | None = None

    def phase(self, name: str) -> None:
        """Count updates only."""
        if name == "ppo":
            self.clock.start()
        elif name == "evaluating":
            self.clock.stop()

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """Evaluate the policy after an update."""
        del step, steps
        if "score" not in metrics:  # otherwise the trainer's own evaluation has stopped the clock
            self.clock.stop()
        assert self.trainer is not None
        self.clock.judge(self.trainer.network)


def ours(seed: int, clock: Clock) -> None:
    """Train with the preset."""
    with TemporaryDirectory() as folder:
        watcher = Watched(clock)
        watcher.trainer = Trainer(Path(folder) / "run", settings_of(seed), 1, watcher)
        watcher.trainer.run()


class AfterUpdate(BaseCallback):
    """Times a Stable-Baselines3 run."""

    def __init__(self, clock: Clock) -> None:
        """Counting starts with the first rollout."""
        super().__init__()
        self.clock = clock

    def _on_training_start(self) -> None:
        self.clock.start()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self._judge()

    def _on_training_end(self) -> None:
        self._judge()

    def _judge(self) -> None:
        self.clock.stop()
        network: Any = self.model.policy.network
        self.clock.judge(network)
        self.clock.start()


def theirs(seed: int, clock: Clock) -> None:
    """Train with Stable-Baselines3."""
    settings = settings_of(seed)
    p = settings.ppo
    env = RouterVecEnv(
        RouterVectorEnv(p.clusters, SCENARIO, copy=False, decisions=EPISODE * p.decisions)
    )
    first, last = p.learning_rate, p.final_learning_rate
    model = sb3_ppo(env, p, seed, learning_rate=lambda left: last + left * (first - last))
    network: Any = model.policy.network
    rng = np.random.default_rng(seed)
    env.reset()
    for _ in range(p.decisions):
        seen: Any = env.step(rng.integers(0, 4, p.clusters))[0]
        given = (torch.from_numpy(seen[name]) for name in ("replicas", "request"))
        network.update_norms(*given, torch.from_numpy(seen["mask"]).bool())
    model.learn(settings.updates * p.clusters * p.decisions, AfterUpdate(clock))


def main() -> None:
    """Train both with several seeds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="write JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    workers = WorkerPool(1)
    validation = Validation(WorldSchedule(settings_of(0), ()).validation(), RULES[::-1])
    validation.evaluate_rules(workers)
    told: dict[str, Any] = {"machine": machine(), "scenario": SCENARIO, "runs": {}}
    sides: dict[str, Callable[[int, Clock], None]] = {"tailrace": ours, "sb3": theirs}
    for seed in range(options.seeds):
        for name, train in sides.items():
            clock = Clock(validation, workers)
            train(seed, clock)
            found = told["runs"].setdefault(name, {})[f"seed {seed}"] = clock.told()
            beaten = ", ".join(f"{rule} {found[rule]['first_s']} s" for rule in RULES)
            print(f"{name}, seed {seed}, CPU time until beaten: {beaten}; "
                  f"last {found['curve'][-1]}", flush=True)  # fmt: skip
            if options.output is not None:
                with atomic_path(options.output) as temporary:
                    temporary.write_text(json.dumps(told, indent=1) + "\n")
    workers.close()


if __name__ == "__main__":
    main()
