"""Speed of PPO: decisions collected and learnt from per second, beside Stable-Baselines3's PPO.

    python benchmarks/bench_train.py [--json] [--quick | --one-core | --passes]

Both play the same environment (4 replicas with prefix caches, chat at 80 % load) with the same
network, number of clusters, decisions per update, epochs, minibatch, loss weights and one thread,
in turns in one process; Stable-Baselines3 through the shipped adapter, with our network wrapped as
its policy. New traffic after every update is counted on both sides. ``ratio_to_sb3`` is the median
over the turns of the ratio of CPU seconds at the default settings of PPO. Other settings, and the
best ones of each on all cores stand beside it; those are by the wall clock, so they say something
only if their ``load_average``, our own work of about 1 included, says that nothing else was on.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from rich.console import Console
from stable_baselines3 import PPO
from stable_baselines3.common.distributions import CategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor

from bench_sim import machine
from tailrace.env.sb3 import RouterVecEnv
from tailrace.env.vector_env import RouterVectorEnv
from tailrace.learn.exploration import ExplorationValues
from tailrace.learn.improve import experience, fused
from tailrace.learn.improve.learner import Learner
from tailrace.learn.improve.ppo_settings import PpoSettings
from tailrace.learn.improve.rollout import RolloutTask, collect
from tailrace.parallel import WorkerPool
from tailrace.policy.learned.architecture import NetworkConfig
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.seeds import Purpose, seeds

SCENARIO = "uniform-chat-80"
ENTROPY = ExplorationValues(entropy_weight=0.01)
#: Equal for both: a discount per decision, which is all that Stable-Baselines3 has.
GAMMA, GAE_LAMBDA = 0.99, 0.95
#: Updates that are not counted. After one only, Stable-Baselines3 still takes a fifth longer.
WARM_UPS = 2

say = Console(stderr=True).log


class Size(NamedTuple):
    """How much is played and learnt per update."""

    clusters: int
    decisions: int
    epochs: int
    minibatch: int

    @property
    def steps(self) -> int:
        """Decisions per update."""
        return self.clusters * self.decisions

    @property
    def settings(self) -> PpoSettings:
        """Settings of PPO, for both sides."""
        return PpoSettings(
            **self._asdict(), discount_by="decision", gamma=GAMMA, gae_lambda=GAE_LAMBDA, warmup=0
        )


DEFAULTS = PpoSettings()
DEFAULT = Size(DEFAULTS.clusters, DEFAULTS.decisions, DEFAULTS.epochs, DEFAULTS.minibatch)
#: Other settings at which both are measured, and by which they differ.
OTHERS = {
    "10 epochs": DEFAULT._replace(epochs=10),
    "1 epoch": DEFAULT._replace(epochs=1),
    "minibatches of 256": DEFAULT._replace(minibatch=256),
    "8 clusters": DEFAULT._replace(clusters=8),
    "256 clusters": DEFAULT._replace(clusters=256, decisions=64),
}


def new_network() -> Network:
    """The default network."""
    torch.manual_seed(1)
    return Network(NetworkConfig(), N_REPLICA_FEATURES, N_REQUEST_FEATURES)


# ---- ours ---------------------------------------------------------------------------------------


class Tailrace:
    """Roll-outs and updates."""

    def __init__(self, size: Size, processes: int = 1) -> None:
        """Make network, learner and, if there are several processes, workers."""
        self.size, self.processes = size, processes
        self.learner = Learner(new_network(), size.settings, 1000)
        self.workers = WorkerPool(processes)
        self.done = 0

    def update(self) -> None:
        """One update, with roll-outs on as many processes as there are."""
        network, size = self.learner.network, self.size
        each = size.clusters // self.processes
        tasks = [
            RolloutTask(
                (SCENARIO,),
                tuple(seeds(Purpose.TRAINING, each, (self.done * self.processes + k) * each)),
                network.config,
                network.tensors(),
                seeds(Purpose.TRAINING, 1, self.done * self.processes + k)[0],
                clusters=each,
                decisions=size.decisions,
            )
            for k in range(self.processes)
        ]
        rollouts = list(self.workers.map(collect, tasks))
        rng = torch.Generator().manual_seed(self.done)
        self.learner.update(rollouts, ENTROPY, self.done, rng)
        self.done += 1

    def close(self) -> None:
        """Stop the workers."""
        self.workers.close()


# ---- Stable-Baselines3 --------------------------------------------------------------------------


class NetworkPolicy(ActorCriticPolicy):
    """Our network as a policy of Stable-Baselines3."""

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        self.network = new_network()
        self.action_dist: CategoricalDistribution
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr_schedule(1), eps=1e-5)

    def _look(self, obs: Any) -> tuple[CategoricalDistribution, Tensor]:
        logits, values = self.network(obs["replicas"], obs["request"], obs["mask"].bool())
        return self.action_dist.proba_distribution(action_logits=logits), values

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, values and log-probabilities."""
        choice, values = self._look(obs)
        actions = choice.get_actions(deterministic=deterministic)
        return actions, values, choice.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values, log-probabilities and entropies."""
        choice, values = self._look(obs)
        return values, choice.log_prob(actions), choice.entropy()

    def predict_values(self, obs: Any) -> Tensor:
        """Return values."""
        return self._look(obs)[1]


def sb3_ppo(
    env: RouterVecEnv,
    settings: PpoSettings,
    seed: int,
    policy: Any = NetworkPolicy,
    **changes: Any,
) -> PPO:
    """Return Stable-Baselines3's PPO with our settings; ``changes`` are arguments of its own."""
    arguments = {
        "learning_rate": settings.learning_rate,
        "n_steps": settings.decisions,
        "batch_size": settings.minibatch,
        "n_epochs": settings.epochs,
        "gamma": settings.gamma,
        "gae_lambda": settings.gae_lambda,
        "vf_coef": settings.value_weight,
        "max_grad_norm": settings.max_grad_norm,
        "clip_range": settings.clip_range,
    }
    return PPO(policy, env, **arguments | changes, device="cpu", seed=seed, verbose=0)


class StableBaselines3:
    """Its PPO on the same environment."""

    def __init__(self, size: Size, policy: Any = NetworkPolicy) -> None:
        """Make environment and model; an episode is as long as a roll-out, as ours is."""
        self.size = size
        env = RouterVectorEnv(size.clusters, SCENARIO, copy=False, decisions=size.decisions)
        self.model = sb3_ppo(
            RouterVecEnv(env), size.settings, 1, policy, ent_coef=ENTROPY.entropy_weight
        )

    def update(self) -> None:
        """One update."""
        self.model.learn(self.size.steps, reset_num_timesteps=False)


# ---- measuring ----------------------------------------------------------------------------------


def seconds(update: Callable[[], None], clock: Callable[[], float]) -> float:
    """What an update takes."""
    begin = clock()
    update()
    return clock() - begin


def compare(size: Size, turns: int) -> dict[str, Any]:
    """Both in turns, on one thread; decisions per CPU second."""
    torch.set_num_threads(1)
    ours, theirs = Tailrace(size), StableBaselines3(size)
    for _ in range(WARM_UPS):
        ours.update()
        theirs.update()
    pairs = [
        (seconds(ours.update, time.process_time), seconds(theirs.update, time.process_time))
        for _ in range(turns)
    ]
    ratios = [b / a for a, b in pairs]
    return {
        "settings": size._asdict(),
        "steps_per_s": size.steps / statistics.median(a for a, _ in pairs),
        "sb3_steps_per_s": size.steps / statistics.median(b for _, b in pairs),
        "ratio_to_sb3": statistics.median(ratios),
        "ratios": ratios,
    }


def passes(turns: int) -> dict[str, Any]:
    """Updates with our network pass, with torch's own and with torch.compile's, in turns."""
    torch.set_num_threads(1)
    compiled: Any = torch.compile(lambda network, *given: network(*given), dynamic=False)
    ways: dict[str, Any] = {
        "fused": None,
        "torch": lambda network, *given: network(*given),
        "torch.compile": compiled,
    }
    learners = {name: Tailrace(DEFAULT) for name in ways}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UPS + turns):
        for name, learner in learners.items():
            fused.COMPILED = ways[name] is None
            experience._single = ways[name]
            took = seconds(learner.update, time.process_time)
            if turn >= WARM_UPS:
                taken[name].append(took)
            else:
                say(f"{name}: {took:.1f} CPU s while warming up")
    ours = taken["fused"]
    return {
        name: {
            "cpu_s_per_update": statistics.median(values),
            "ratio_to_fused": statistics.median(b / a for a, b in zip(ours, values, strict=True)),
        }
        for name, values in taken.items()
    }


def best(turns: int) -> dict[str, Any]:
    """The better of two sizes for each on all cores, by the wall clock."""
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    sizes = [DEFAULT, DEFAULT._replace(clusters=256, decisions=64, minibatch=8192)]
    found: dict[str, Any] = {"cores": cores, "load_average": os.getloadavg()[0]}
    makers: dict[str, Callable[[Size], Tailrace | StableBaselines3]] = {
        "tailrace": lambda size: Tailrace(size, cores),
        "sb3": StableBaselines3,
        "sb3_own_network": lambda size: StableBaselines3(size, "MultiInputPolicy"),
    }
    for name, make in makers.items():
        rates = []
        for size in sizes:
            learner = make(size)
            for _ in range(WARM_UPS):
                learner.update()
            taken = [seconds(learner.update, time.perf_counter) for _ in range(turns)]
            rates.append((size.steps / statistics.median(taken), size))
            if isinstance(learner, Tailrace):
                learner.close()
        rate, size = max(rates)
        found[name] = {"steps_per_s": rate, "settings": size._asdict()}
    return found


def measure(quick: bool, one_core: bool, only_passes: bool) -> dict[str, Any]:
    """Everything, as plain data."""
    turns = 5 if quick else 11
    report: dict[str, Any] = {
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "scenario": SCENARIO,
        "network": NetworkConfig().model_dump(),
        "threads": 1,
        "versions": {name: version(name) for name in ("torch", "stable-baselines3", "numba")},
    }
    if only_passes:
        return report | {"passes": passes(turns)}
    say("measuring the default settings …")
    report |= compare(DEFAULT, turns)
    if quick:
        return report
    say("measuring other settings …")
    report["other_settings"] = {name: compare(size, 5) for name, size in OTHERS.items()}
    if not one_core:
        say("measuring each one's best …")
        report["best"] = best(3)
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--quick", action="store_true", help="the default settings only")
    parser.add_argument(
        "--one-core", action="store_true", help="leave out what needs an idle machine: the best"
    )
    parser.add_argument(
        "--passes", action="store_true", help="compare ways through the network only"
    )
    arguments = parser.parse_args()
    report = measure(arguments.quick, arguments.one_core, arguments.passes)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    Console().print_json(json.dumps(report))


if __name__ == "__main__":
    main()
