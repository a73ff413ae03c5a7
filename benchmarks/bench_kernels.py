"""How long the decision kernels take by themselves: ``python benchmarks/bench_kernels.py``.

Every rule scores and chooses among four replicas, and a network of the default size computes its
logits for four, called from compiled code: no Python, no router state. Prints JSON with the best of
several repeats, because the machine may be busy with something else. More than 100 000 decisions/s
per rule and less than 20 us per network are expected.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.compiled import jit, vectorised
from tailrace.config import CostModel
from tailrace.policy.learned.architecture import NetworkConfig, pack, tensor_shapes
from tailrace.policy.learned.inference import forward
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.policy.rules import RULES, score
from tailrace.view.cost_model import cost_rows
from tailrace.view.records import NEVER, REPLICA_VIEW, REQUEST_VIEW, ROUTER, View
from tailrace.view.selection import choose

REPLICAS, CALLS, REPEATS = 4, 2000, 10


@jit  # type: ignore[untyped-decorator]
def _decide(
    code: int, request: Any, replicas: Any, costs: Any, router: Any, params: Any, scores: Any,
    count: int,
) -> None:  # fmt: skip
    """Make ``count`` decisions, each of which changes the view a little."""
    for k in range(count):
        request[0]["prefix_hash"] = np.uint64(k)
        score(code, View(request[0], replicas, costs, router[0]), params, scores)
        choose(scores, replicas, router[0], False)
        replicas[k % replicas.size]["in_flight"] = k % 40


@vectorised  # type: ignore[untyped-decorator]
def _forward(params: Any, inputs: Any, out: Any, count: int) -> None:
    replica_obs, request_obs, mask, prior = inputs
    for _ in range(count):
        forward(params, replica_obs, request_obs, mask, prior, out)


def best_us(work: Callable[[int], None]) -> float:
    """Return the least time of a call in microseconds; ``work`` makes so many of them."""
    work(1)
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work(CALLS)
        taken.append(time.perf_counter() - start)
    return min(taken) / CALLS * 1e6


def rules_us() -> dict[str, float]:
    """Return the time of a decision of every rule, by name."""
    replicas = np.zeros(REPLICAS, REPLICA_VIEW)
    for name, value in {
        "available": 1, "speed": 1.0, "capacity_tokens": 16_000, "block_size": 16,
        "token_budget": 500, "batch_cap": 64, "prefill_tokens_per_s": 10_000.0,
        "metrics_at": NEVER, "queued_uncached": [900, 0, 400, 10],
        "cached_tokens": [0, 320, 640, 0],
    }.items():  # fmt: skip
        replicas[name] = value
    request = np.zeros(1, REQUEST_VIEW)
    for name, value in {
        "prompt_tokens": 1000, "predicted_output": 100.0, "session": -1, "last_replica": -1,
        "ttft_slo_s": 1.0,
    }.items():  # fmt: skip
        request[name] = value
    costs = cost_rows([CostModel(base_ms=10.0, per_token_ms=0.1)] * REPLICAS)
    router, scores = np.zeros(1, ROUTER), np.zeros(REPLICAS)
    return {
        rule.name: best_us(
            lambda count, rule=rule: _decide(  # type: ignore[misc]
                rule.code, request, replicas, costs, router, rule.vector(), scores, count
            )
        )
        for rule in RULES
        if not rule.in_engine
    }


def network_us() -> float:
    """Return the time of a network of the default size with random weights."""
    rng = np.random.default_rng(0)
    config = NetworkConfig()
    shapes = tensor_shapes(config, N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    tensors = {
        name: np.asarray(np.abs(rng.normal(0, 0.3, shape)) + 0.001, np.float32)
        for name, shape in shapes.items()
    }
    inputs = (
        rng.normal(0, 2, (REPLICAS, N_REPLICA_FEATURES)).astype(np.float32),
        rng.normal(0, 2, N_REQUEST_FEATURES).astype(np.float32),
        np.ones(REPLICAS, np.bool_),
        np.zeros(REPLICAS, np.float32),
    )
    params, out = pack(config, tensors), np.zeros(REPLICAS)
    return best_us(lambda count: _forward(params, inputs, out, count))


def main() -> None:
    """Measure and print."""
    print(json.dumps({"rules_us": rules_us(), "network_us": network_us()}, indent=1))


if __name__ == "__main__":
    main()
