"""Hand-made and random views for the tests of rules and policies."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import CostModel
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.registry import get
from tailrace.policy.rules import RULES, Rule
from tailrace.view.cost_model import cost_rows
from tailrace.view.records import NEVER, REPLICA_VIEW, REQUEST_VIEW, ROUTER, View
from tailrace.view.selection import choose

COST = CostModel(base_ms=10.0, per_token_ms=0.1)
CALLABLE = tuple(rule for rule in RULES if not rule.in_engine)
METRICS = ("waiting", "running", "kv_used")


def make_view(
    n: int = 3,
    request: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    costs: list[CostModel] | None = None,
    **replicas: Any,
) -> View:
    """An idle cluster of equal replicas and a request of 1000 tokens, with some fields changed."""
    rows = np.zeros(n, REPLICA_VIEW)
    defaults = {
        "available": 1,
        "speed": 1.0,
        "capacity_tokens": 16_000,
        "block_size": 16,
        "token_budget": 500,
        "batch_cap": 64,
        "prefill_tokens_per_s": 10_000.0,
        "metrics_at": NEVER,
    }
    for name, value in (defaults | replicas).items():
        rows[name] = value
    requests = np.zeros(1, REQUEST_VIEW)
    defaults = {
        "prompt_tokens": 1000,
        "predicted_output": 100.0,
        "session": -1,
        "last_replica": -1,
        "ttft_slo_s": 1.0,
    }
    for name, value in (defaults | (request or {})).items():
        requests[name] = value
    routers = np.zeros(1, ROUTER)
    for name, value in (router or {}).items():
        routers[name] = value
    return View(requests[0], rows, cost_rows(costs or [COST] * n), routers[0])


def random_view(seed: int) -> View:
    """A view with many ties and a fair share of extreme values; at least one replica available."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    few = int(rng.choice([2, 5, 200]))  # a small range makes ties
    queued = rng.integers(0, few, n)
    tokens = queued * rng.integers(1, 2000, n)
    prompt = int(rng.choice([1, 20, 300, 5000]))
    available = (rng.random(n) < 0.7).astype(int)
    available[rng.integers(n)] = 1
    return make_view(
        n,
        request={
            "now": 100.0,
            "prompt_tokens": prompt,
            "predicted_output": float(rng.choice([1.0, 300.0])),
            "last_replica": int(rng.integers(-1, n)),
            "prefix_hash": rng.integers(0, 2**63, dtype=np.uint64),
            "ttft_slo_s": float(rng.choice([0.05, 1.0, 30.0])),
            "content_hash": rng.integers(0, 2**63, dtype=np.uint64),
        },
        router={"rng": rng.integers(0, 2**63, dtype=np.uint64), "cursor": int(rng.integers(n))},
        costs=[
            CostModel(
                base_ms=float(rng.uniform(1, 20)),
                per_token_ms=0.05,
                knots=((256.0, 0.02),),
                per_context_ms=1e-5,
                per_prefill_ms=1e-6,
            )
            for _ in range(n)
        ],
        available=available,
        speed=rng.choice([0.5, 1.0, 2.0], n),
        capacity_tokens=rng.choice([4_000, 400_000], n),
        token_budget=rng.choice([64, 2048], n),
        batch_cap=rng.choice([4, 256], n),
        prefill_tokens_per_s=rng.choice([5_000.0, 20_000.0], n),
        in_flight=queued + rng.integers(0, few, n),
        queued=queued,
        queued_tokens=tokens,
        queued_uncached=tokens // 2,
        context_tokens=rng.integers(0, 3000, n),
        answering_prompts=rng.integers(0, 3000, n),
        sent_tokens=rng.integers(0, 500, n),
        sent_requests=rng.integers(0, 3, n),
        recent_work=rng.choice([0.0, 1000.0, 50_000.0], n),
        recent_at=rng.choice([0.0, 99.0], n),
        metrics_at=rng.choice([NEVER, 99.5], n),
        waiting=rng.integers(0, few, n),
        running=rng.integers(0, few, n),
        kv_used=rng.choice([0.0, 0.5, 1.0], n),
        cached_tokens=rng.integers(0, prompt // 16 + 1, n) * 16 * (rng.random(n) < 0.5),
        index_tokens=rng.choice([0, 4_000, 300_000], n),
        active_blocks=rng.integers(0, 300, n),
        new_blocks=rng.integers(0, prompt // 16 + 1, n),
    )


def copy_view(view: View) -> View:
    """A view that shares nothing with the given one."""
    return View(view.request.copy(), view.replicas.copy(), view.costs.copy(), view.router.copy())


def scores_of(rule: Rule | str, view: View, **params: float) -> NDArray[np.float64]:
    """Scores of a built-in rule; the given view is not changed."""
    policy = get(rule, **params) if isinstance(rule, str) else BuiltinPolicy(rule, params)
    return policy.scores(copy_view(view))


def pick(name: str, view: View, **params: float) -> int:
    """The replica a built-in rule chooses; advances the view's generator and cursor."""
    policy = get(name, **params)
    return int(choose(policy.scores(view), view.replicas, view.router, policy.lowest_id_wins))
