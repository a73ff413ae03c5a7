"""``predict_greedy``: learn what a request will cost on a replica, send it where that is least.

A supervised predictor as several routers have it today: a small network sees one replica and the
request, and predicts the logarithm of the composite cost that followed. It is blind to the harm a
request does to those after it. Needs torch (extra ``train``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as fn

from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.search.recorded_states import RecordedStates, record
from tailrace.parallel import WorkerPool
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.policy.learned.architecture import NetworkConfig
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.policy.shipped import PREDICTOR
from tailrace.seeds import Purpose, require

#: Without attention: a replica is judged by itself.
CONFIG = NetworkConfig(hidden=64, attention=1, heads=1, scorer_hidden=32, value_hidden=1)
#: Rules whose decisions are learned from, and the share of random choices among them.
DRIVERS = ("load_aware", "lmetric", "least_outstanding")
EPSILON = 0.15
BATCH, LEARNING_RATE = 512, 2e-3

Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class RecordTask:
    """Record decisions on some traffic, of a rule or of the predictor itself."""

    traffic: Traffic
    driver: str
    tensors: Tensors | None = None  #: of the predictor, if it drives


def recorded(task: RecordTask) -> RecordedStates:
    """Run a task."""
    return record(task.traffic, partial(_driver, task), EPSILON)


def _driver(task: RecordTask) -> Policy:
    if task.tensors is None:
        return registry.get(task.driver)
    return LearnedPolicy(CONFIG, task.tensors, PREDICTOR)


def train(
    traffics: Sequence[Traffic],
    pool: WorkerPool,
    *,
    rounds: int = 3,
    epochs: int = 6,
    report: Callable[[int, float, int], None] = lambda *_: None,
) -> Tensors:
    """Return the tensors of a predictor, learned on training seeds.

    The first round learns from the rules of DRIVERS, each later one also from the predictor of the
    round before, on traffic of other seeds. ``report`` gets the round, the error (deviation of
    the logarithm of the cost) and the number of decisions learned from.
    """
    for traffic in traffics:
        require(traffic.seed, Purpose.TRAINING)
    torch.manual_seed(0)
    network = Network(CONFIG, N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    torch.nn.init.zeros_(network.actor.output.weight)
    network.actor.output.weight.requires_grad_(False)
    data: list[RecordedStates] = []
    for number in range(rounds):
        drivers = DRIVERS if number == 0 else (PREDICTOR,)
        tensors = None if number == 0 else network.tensors()
        tasks = [
            RecordTask(replace(t, seed=require(t.seed + 1000 * k, Purpose.TRAINING)), d, tensors)
            for t in traffics
            for k, d in enumerate(drivers, start=3 * number)
        ]
        data += pool.map(recorded, tasks)
        error = _fit(network, data, epochs, first=number == 0)
        report(number + 1, error, sum(len(part.cost_s) for part in data))
    return network.tensors()


def _fit(network: Network, data: Sequence[RecordedStates], epochs: int, *, first: bool) -> float:
    """Regress minus the logit on the logarithm of the cost; returns the error of the last epoch."""
    x = torch.from_numpy(np.concatenate([d.replica_obs for d in data]))[:, None]
    g = torch.from_numpy(np.concatenate([d.request_obs for d in data]))
    log_cost = np.log(np.concatenate([d.cost_s for d in data]) + 1e-3)
    target = torch.from_numpy(log_cost).float()
    mask = torch.ones(len(x), 1, dtype=torch.bool)
    if first:
        network.update_norms(x, g, mask)
        with torch.no_grad():
            network.scorer.output.bias.fill_(-float(target.mean()))
    trained = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=LEARNING_RATE)
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    squares = 0.0
    for _ in range(epochs):
        squares = 0.0
        for index in torch.randperm(len(x)).split(BATCH):
            logits, _ = network(x[index], g[index], mask[index])
            # Few requests wait for minutes; they must not outweigh all others.
            loss = fn.huber_loss(-logits[:, 0], target[index], delta=1.0)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            squares += float(((logits[:, 0] + target[index]) ** 2).sum().detach())
    return float(np.sqrt(squares / len(x)))
