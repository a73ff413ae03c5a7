"""Constants of the rules, and weights of ``linear_es``, tuned on tuning seeds.

What is minimised is the score by which evaluations rank: the geometric mean over scenarios of mean
composite cost / that of the reference rule, on the same requests. Rules with one constant are tried
on a grid; all others are tuned by CMA-ES, from the constants they come with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import unknown_name
from tailrace.evaluate.judge.baselines import REFERENCE
from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import play
from tailrace.evaluate.measure.runner import traffic as requests_of
from tailrace.evaluate.search import linear
from tailrace.evaluate.search.cmaes import CmaEs
from tailrace.evaluate.search.recorded_states import record
from tailrace.parallel import WorkerPool
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.policy.learned.observation import REPLICA_FEATURES
from tailrace.seeds import Purpose, generator, require
from tailrace.view.ordering import Order

Array = NDArray[np.float64]
#: Turns numbers into a policy; must stand at the top of a module, so that workers find it.
Maker = Callable[[Array], Policy]

WARMUP = 0.1
#: Points on the grid of a rule with one constant.
GRID = 15
#: Candidates tried for a rule with several.
BUDGET = 64
#: First deviation of CMA-ES: share of a constant's range, or weight per deviation of a feature.
RULE_SIGMA, WEIGHT_SIGMA = 0.25, 0.3


@dataclass(frozen=True)
class Knob:
    """A constant of a rule and its search range."""

    name: str
    low: float
    high: float
    linear: bool = False  #: else its logarithm is searched evenly

    def value(self, share: float) -> float:
        """Return the constant at a share of the range, rounded to three digits."""
        share = min(max(share, 0.0), 1.0)
        if self.linear:
            found = self.low + share * (self.high - self.low)
        else:
            found = self.low * (self.high / self.low) ** share
        return float(f"{found:.3g}")

    def share(self, value: float) -> float:
        """Return where a constant lies in the range."""
        if self.linear:
            return (value - self.low) / (self.high - self.low)
        return float(np.log(value / self.low) / np.log(self.high / self.low))


_VETO = (Knob("veto_waiting", 1, 256), Knob("veto_kv", 0.1, 1, linear=True))
#: What can be tuned. Only the ratio of llm_d's weights matters, so one of them stays as it is.
KNOBS: dict[str, tuple[Knob, ...]] = {
    "vllm_dp": (Knob("waiting_weight", 0.5, 64),),
    "tolerant_sticky": (Knob("tolerance", 1, 32),),
    "cache_aware": (
        Knob("load_gap", 1, 256),
        Knob("load_ratio", 1, 8),
        Knob("match_rate", 0, 1, linear=True),
    ),
    "sglang_cache_aware": (
        Knob("load_gap", 1, 256),
        Knob("load_ratio", 1, 8),
        Knob("match_rate", 0, 1, linear=True),
    ),
    "smg_cache_aware": (
        Knob("load_gap", 1, 256),
        Knob("load_ratio", 1, 8),
        Knob("match_rate", 0, 1, linear=True),
        *_VETO,
    ),
    "prefix_hash": (Knob("load_factor", 1, 4),),
    "smg_prefix_hash": (Knob("load_factor", 1, 4), *_VETO),
    "dynamo": (Knob("overlap_weight", 0.1, 200),),
    "llm_d": (Knob("queue_weight", 0.1, 40), Knob("prefix_weight", 0.1, 40)),
    "llm_d_sticky": (Knob("match_rate", 0.02, 1), Knob("max_penalty_s", 0.05, 60)),
    "load_aware": (Knob("load_weight", 0.05, 16),),
    "least_load": (Knob("kv_weight", 0.005, 5),),
    "smg_expected_wait": _VETO,
    "smg_power_of_two": _VETO,
    "aibrix_prefix": (Knob("load_gap", 1, 128), Knob("deviations", 0, 6, linear=True)),
    "preble": (Knob("exploit_share", 0, 1, linear=True), Knob("eviction_weight", 0.02, 16)),
    "dual_map": (Knob("slo_share", 0.03, 8),),
}


#: Weight of an order (``RULE+order``), in s per s of prefill.
ORDER_KNOB = Knob("w", 0.5, 200)


@dataclass(frozen=True)
class Tuned:
    """The best constants found for a rule."""

    constants: dict[str, float]
    score: float
    default_score: float  #: with the constants it comes with
    tried: int
    method: str


@dataclass(frozen=True)
class CostTask:
    """Several candidates on the same traffic."""

    traffic: Traffic
    make: Maker
    candidates: Array  #: [C, d]


def costs(task: CostTask) -> Array:
    """Return the mean composite cost of each candidate [C], s."""
    traffic = task.traffic
    scenario = traffic.scenario
    table = requests_of(scenario, traffic.rate_rps, traffic.seed)
    found = np.empty(len(task.candidates))
    for k, candidate in enumerate(task.candidates):
        result = play(scenario, table, task.make(candidate), traffic.seed)
        found[k] = summarise(result, WARMUP).cost_s
    return found


def rule_of(name: str, constants: Array) -> Policy:
    """Return a rule with its knobs set to ``constants``."""
    values = dict(zip((knob.name for knob in KNOBS[name]), constants.tolist(), strict=True))
    return registry.get(name, **values)


def ordered_rule(name: str, weights: Array) -> Policy:
    """Return a policy with its order's weight set; 0: as it is, without an order."""
    base, _ = registry.split_order(name)
    policy = registry.get(base)
    return registry.with_order(policy, Order(w=float(weights[0]))) if weights[0] > 0 else policy


def reference_rule(constants: Array) -> Policy:
    """Return the rule that scores are relative to."""
    del constants
    return registry.get(REFERENCE)


class TuningObjective:
    """Scores candidates on scenarios and tuning seeds; the reference is run once."""

    def __init__(self, traffics: Sequence[Traffic], pool: WorkerPool) -> None:
        for traffic in traffics:
            require(traffic.seed, Purpose.TUNING)
        self._traffics = list(traffics)
        self._pool = pool
        names = [t.scenario.name for t in traffics]
        kinds = list(dict.fromkeys(names))
        self._mean = np.array([[n == k for n in names] for k in kinds], float)
        self._mean /= self._mean.sum(axis=1, keepdims=True)
        self._reference = self._means(reference_rule, np.zeros((1, 0)))

    def _means(self, make: Maker, candidates: Array) -> Array:
        """Mean cost over the seeds of each scenario [S, C]."""
        tasks = [CostTask(traffic, make, candidates) for traffic in self._traffics]
        return np.asarray(self._mean @ np.array(list(self._pool.map(costs, tasks))))

    def scores(self, make: Maker, candidates: Array) -> Array:
        """Return the scores of candidates [C, d]; 1: as good as the reference, lower is better."""
        relative = self._means(make, candidates) / self._reference
        return np.asarray(np.exp(np.log(relative).mean(axis=0)))


def tune_rule(name: str, objective: TuningObjective, budget: int = BUDGET) -> Tuned:
    """Tune the constants of a rule; those it comes with are among the candidates.

    Of a name with ``+order`` (any policy) the order's weight w; none at all is a candidate.
    """
    if registry.split_order(name)[1]:
        tried = np.array([0.0, *map(ORDER_KNOB.value, np.linspace(0, 1, GRID))])[:, None]
        scores = objective.scores(partial(ordered_rule, name), tried)
        return _best((ORDER_KNOB,), tried, scores, "grid")
    if name not in KNOBS:
        raise unknown_name("rule with constants to tune", name, KNOBS)
    knobs = KNOBS[name]
    (rule,) = (r for r in registry.rules() if r.name == name)
    default = np.array([rule.params[knob.name] for knob in knobs])
    make = partial(rule_of, name)

    def values(shares: Array) -> Array:
        return np.array([[k.value(s) for k, s in zip(knobs, row, strict=True)] for row in shares])

    if len(knobs) == 1:
        tried = np.vstack([default, values(np.linspace(0, 1, GRID)[:, None])])
        scores = objective.scores(make, tried)
    else:
        start = np.array([k.share(v) for k, v in zip(knobs, default, strict=True)])
        search = CmaEs(start, RULE_SIGMA, generator(0, f"tune {name}"))
        tried, scores = default[None], objective.scores(make, default[None])
        while len(tried) < budget:
            shares = np.clip(search.ask(), 0.0, 1.0)
            found = objective.scores(make, values(shares))
            search.tell(shares, found)
            tried, scores = np.vstack([tried, values(shares)]), np.append(scores, found)
    return _best(knobs, tried, scores, "grid" if len(knobs) == 1 else "CMA-ES")


def _best(knobs: Sequence[Knob], tried: Array, scores: Array, method: str) -> Tuned:
    """Return the best of the candidates [C, d]; the first are the constants it comes with."""
    best = int(np.argmin(scores))
    return Tuned(
        dict(zip((k.name for k in knobs), tried[best].tolist(), strict=True)),
        float(scores[best]),
        float(scores[0]),
        len(tried),
        method,
    )


#: Where the search for weights begins: by predicted time to first token, then by load.
_START = {"ttft": -1.0, "decode": -0.5, "tokens_to_come": -0.2, "cached_share": 0.2}


def tune_linear(
    objective: TuningObjective,
    traffics: Sequence[Traffic],
    generations: int,
    report: Callable[[int, float, Array], None],
    *,
    population: int | None = None,
) -> Array:
    """Tune the weights [len(COLUMNS)] of a linear score; ``report`` gets every new best.

    It gets the generation, the score and the weights. The search runs over weights per deviation of
    a feature among the replicas, as seen under ``load_aware``.
    """
    columns = list(linear.COLUMNS)
    seen = [record(t, partial(registry.get, "load_aware"), 0.1).spread for t in traffics]
    scale = 1 / np.maximum(np.mean(seen, axis=0)[columns], 0.01)
    names = [REPLICA_FEATURES[k].name for k in columns]
    start = np.array([_START.get(name, 0.0) for name in names])
    search = CmaEs(start, WEIGHT_SIGMA, generator(0, "tune linear"), population)
    best: Array = start * scale
    best_score = float(objective.scores(linear.policy_of, best[None])[0])
    report(0, best_score, best)
    for generation in range(1, generations + 1):
        candidates = search.ask()
        # The mean is often better than any of the candidates drawn around it.
        tried = np.vstack([candidates, search.mean]) * scale
        scores = objective.scores(linear.policy_of, tried)
        k = int(np.argmin(scores))
        if scores[k] < best_score:
            best_score, best = float(scores[k]), tried[k]
        search.tell(candidates, scores[:-1])
        report(generation, best_score, best)
    return best
