"""How long does PPO take, from random weights, to beat the rules? Stable-Baselines3's beside it.

    python benchmarks/time_to_beat.py [--seeds 3] [-o docs/results/time_to_beat.json]

Both train the same network on chat at 80 % load on four replicas, one thread: ours by the preset
``ppo-scratch``, Stable-Baselines3 with the same learning rate, discount, epochs and decisions per
update, through the shipped adapter and with the normaliser of observations taught beforehand. After
every update the policy plays validation traffic, always taking its best choice. What is told is the
CPU time of training, without these evaluations, after which its cost was below a rule's for the
first time, and from when on it stayed below.
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
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from bench_sim import machine
from bench_train import NetworkPolicy
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
#: Rollouts of Stable-Baselines3 that an episode is long: queues need a while to build up.
EPISODE = 4
RULES = ("random", "round_robin", "least_outstanding")


class Clock:
    """CPU seconds of training, and the score after each update."""

    def __init__(self, validation: Validation, workers: WorkerPool) -> None:
        """Stand still until :meth:`start`."""
        self.validation, self.workers = validation, workers
        self.spent, self._since = 0.0, 0.0
        self.curve: list[tuple[float, float]] = []

    def start(self) -> None:
        """Count from here on."""
        self._since = time.process_time()

    def stop(self) -> None:
        """Do not count what follows."""
        self.spent += time.process_time() - self._since

    def judge(self, network: Network) -> None:
        """Play validation traffic."""
        policy = CompiledPolicy(LEARNED_CODE, pack(network.config, network.tensors()))
        score = self.validation.evaluate(policy, self.workers).score
        self.curve.append((round(self.spent, 2), round(score, 4)))

    def told(self) -> dict[str, Any]:
        """Return for each rule when it was beaten first, and from when on always; None: never."""
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
    """Follows a run of ours."""

    def __init__(self, clock: Clock) -> None:
        """Wait for the trainer."""
        self.clock = clock
        self.trainer: Trainer | None = None

    def phase(self, name: str) -> None:
        """Count updates alone."""
        if name == "ppo":
            self.clock.start()
        elif name == "evaluating":
            self.clock.stop()

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """Judge the policy after an update."""
        del step, steps
        if "score" not in metrics:  # otherwise the trainer's own evaluation has stopped the clock
            self.clock.stop()
        assert self.trainer is not None
        self.clock.judge(self.trainer.network)


def ours(seed: int, clock: Clock) -> None:
    """Train by the preset."""
    with TemporaryDirectory() as folder:
        watcher = Watched(clock)
        watcher.trainer = Trainer(Path(folder) / "run", settings_of(seed), 1, watcher)
        watcher.trainer.run()


class AfterUpdate(BaseCallback):
    """Follows a run of Stable-Baselines3's."""

    def __init__(self, clock: Clock) -> None:
        """Count from the first rollout on."""
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
    model = PPO(
        NetworkPolicy,
        env,
        learning_rate=lambda left: last + left * (first - last),
        n_steps=p.decisions,
        batch_size=p.minibatch,
        n_epochs=p.epochs,
        gamma=p.gamma,
        gae_lambda=p.gae_lambda,
        vf_coef=p.value_weight,
        max_grad_norm=p.max_grad_norm,
        clip_range=p.clip_range,
        device="cpu",
        seed=seed,
        verbose=0,
    )
    network: Any = model.policy.network
    rng = np.random.default_rng(seed)
    env.reset()
    for _ in range(p.decisions):
        seen: Any = env.step(rng.integers(0, 4, p.clusters))[0]
        given = (torch.from_numpy(seen[name]) for name in ("replicas", "request"))
        network.update_norms(*given, torch.from_numpy(seen["mask"]).bool())
    model.learn(settings.updates * p.clusters * p.decisions, AfterUpdate(clock))


def main() -> None:
    """Train both with several seeds and print."""
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
