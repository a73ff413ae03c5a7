"""Constants of the rules, orders and queues, and weights of ``linear_es``, tuned on tuning seeds.

What is minimised is the score by which evaluations rank: the geometric mean over scenarios of mean
composite cost / that of the reference rule, on the same requests. Rules with one constant are tried
on a grid; all others are tuned by CMA-ES, from the constants they come with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError, unknown_name
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
from tailrace.view.holding import Holding
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


#: Weights of an order (view/ordering.py): of a policy with ``+order``, and of those that wait by
#: ``+queue``.
ORDER_KNOBS = (Knob("w", 0.5, 200), Knob("most", 0.5, 300), Knob("d", 0, 2, linear=True))
#: Limits and order of a queue at the router (view/holding.py), of a policy with ``+queue``.
QUEUE_KNOBS = (
    Knob("max_in_flight", 2, 512),
    Knob("max_queued", 1, 128),
    Knob("max_prefill_s", 0.02, 20),
    *ORDER_KNOBS,
)
#: Where the searches begin, and what stands for no order or queue at all.
ORDER_START, NO_ORDER = (5.0, 30.0, 0.0), (0.0, 30.0, 0.0)
QUEUE_START, NO_QUEUE = (64.0, 8.0, 1.0, 10.0, 30.0, 0.0), (1e6, 1e6, 1e6, *NO_ORDER)


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


def costs_and_tails(task: CostTask) -> Array:
    """Return mean composite cost and P99 TTFT of each candidate [C, 2], s."""
    traffic = task.traffic
    scenario = traffic.scenario
    table = requests_of(scenario, traffic.rate_rps, traffic.seed)
    found = np.empty((len(task.candidates), 2))
    for k, candidate in enumerate(task.candidates):
        result = play(scenario, table, task.make(candidate), traffic.seed)
        summary = summarise(result, WARMUP)
        found[k] = summary.cost_s, summary.ttft_s.p99 or np.inf
    return found


def rule_of(name: str, constants: Array) -> Policy:
    """Return a rule with its knobs set to ``constants``."""
    return registry.get(name, **_named(KNOBS[name], constants))


def ordered_rule(base: str, weights: Array) -> Policy:
    """Return a policy that orders by ORDER_KNOBS; NO_ORDER: as it is."""
    policy = registry.get(base)
    if tuple(weights) == NO_ORDER:
        return policy
    return registry.with_order(policy, Order.of(_named(ORDER_KNOBS, weights)))


def queued_rule(base: str, settings: Array) -> Policy:
    """Return a policy with a queue of QUEUE_KNOBS; NO_QUEUE: as it is."""
    policy = registry.get(base)
    if tuple(settings) == NO_QUEUE:
        return policy
    return registry.with_queue(policy, Holding.of(_named(QUEUE_KNOBS, settings)))


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
        """Mean cost and P99 TTFT over the seeds of each scenario [S, C, 2]."""
        tasks = [CostTask(traffic, make, candidates) for traffic in self._traffics]
        found = np.array(list(self._pool.map(costs_and_tails, tasks)))
        means: Array = np.einsum("st,tcf->scf", self._mean, found)
        return means

    def scores(self, make: Maker, candidates: Array) -> Array:
        """Return the scores of candidates [C, d]; 1: as good as the reference, lower is better."""
        return self.scores_and_tails(make, candidates)[0]

    def scores_and_tails(self, make: Maker, candidates: Array) -> tuple[Array, Array]:
        """Return the scores of candidates [C, d], and the same of their P99 TTFT."""
        relative = self._means(make, candidates) / self._reference
        both = np.exp(np.log(relative).mean(axis=0))
        return both[:, 0], both[:, 1]


@dataclass(frozen=True)
class Tunable:
    """What can be tuned about a policy."""

    knobs: tuple[Knob, ...]
    make: Maker
    default: Array  #: values [d] of the knobs it comes with: the first candidate
    start: Array  #: values [d] where the search for several knobs begins


def tunable(name: str) -> Tunable:
    """Return what is tuned of a name: a rule's constants, or a policy's ``+order`` or ``+queue``.

    A policy with one of these comes without it.
    """
    base, suffix = registry.split_order(name)
    if suffix == registry.ORDER_SUFFIX:
        make = partial(ordered_rule, base)
        return Tunable(ORDER_KNOBS, make, np.array(NO_ORDER), np.array(ORDER_START))
    if suffix == registry.QUEUE_SUFFIX:
        make = partial(queued_rule, base)
        return Tunable(QUEUE_KNOBS, make, np.array(NO_QUEUE), np.array(QUEUE_START))
    if suffix:
        raise TailraceError(f"'{name}' has its settings already; write {base}{suffix[:6]} to tune")
    if name not in KNOBS:
        raise unknown_name("rule with constants to tune", name, KNOBS)
    (rule,) = (r for r in registry.rules() if r.name == name)
    default = np.array([rule.params[knob.name] for knob in KNOBS[name]])
    return Tunable(KNOBS[name], partial(rule_of, name), default, default)


def tune_rule(
    name: str, objective: TuningObjective, budget: int = BUDGET, *, keep_tail: bool = False
) -> Tuned:
    """Tune what :func:`tunable` says; what the policy comes with is among the candidates.

    ``keep_tail``: only candidates count whose P99 TTFT is not above that of the policy as it comes.
    """
    found = tunable(name)
    knobs, default = found.knobs, found.default
    trials = _Trials(objective, found.make, keep_tail)

    def values(shares: Array) -> Array:
        return np.array([[k.value(s) for k, s in zip(knobs, row, strict=True)] for row in shares])

    trials.rank(default[None])
    if len(knobs) == 1:
        trials.rank(values(np.linspace(0, 1, GRID)[:, None]))
    else:
        if not np.array_equal(default, found.start):
            trials.rank(found.start[None])
        start = np.array([k.share(v) for k, v in zip(knobs, found.start, strict=True)])
        search = CmaEs(start, RULE_SIGMA, generator(0, f"tune {name}"))
        while len(trials.tried) < budget:
            shares = np.clip(search.ask(), 0.0, 1.0)
            search.tell(shares, trials.rank(values(shares)))
        trials.simplify(default)
    best = trials.best
    return Tuned(
        _named(knobs, trials.tried[best]),
        trials.scores[best],
        trials.scores[0],
        len(trials.tried),
        "grid" if len(knobs) == 1 else "CMA-ES",
    )


class _Trials:
    """The candidates of a search; the first is the policy as it comes."""

    def __init__(self, objective: TuningObjective, make: Maker, keep_tail: bool) -> None:
        self._objective = objective
        self._make = make
        self._keep_tail = keep_tail
        self.tried: list[Array] = []
        self.scores: list[float] = []
        self.best = 0
        """Number of the best candidate; of equals the first."""
        self._lowest = np.inf
        self._tail = 0.0

    def rank(self, candidates: Array) -> Array:
        """Try candidates [C, d]; return what the search minimises [C]: the scores.

        A candidate whose tail is too long ranks behind all others, the longer the further.
        """
        if self._keep_tail:
            scores, tails = self._objective.scores_and_tails(self._make, candidates)
            self._tail = self._tail or float(tails[0])
            ranks = np.where(tails > self._tail, 1e6 * tails, scores)
        else:
            ranks = scores = self._objective.scores(self._make, candidates)
        k = int(np.argmin(ranks))
        if ranks[k] < self._lowest:
            self.best, self._lowest = len(self.tried) + k, float(ranks[k])
        self.tried += list(candidates)
        self.scores += scores.tolist()
        return np.asarray(ranks)

    def simplify(self, default: Array) -> None:
        """Put knobs of the best candidate back to ``default`` [d] where that costs nothing."""
        for k, value in enumerate(default):
            simpler = self.tried[self.best].copy()
            simpler[k] = value
            if value != self.tried[self.best][k] and self.rank(simpler[None])[0] <= self._lowest:
                self.best = len(self.tried) - 1


def _named(knobs: Sequence[Knob], values: Array) -> dict[str, float]:
    """Return the values [d] of knobs by name."""
    return dict(zip((knob.name for knob in knobs), values.tolist(), strict=True))


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
