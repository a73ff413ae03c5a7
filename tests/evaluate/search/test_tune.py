import json
from functools import partial

import numpy as np
import pytest

from tailrace.config import Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.search import linear, tuned
from tailrace.evaluate.search.cmaes import CmaEs
from tailrace.evaluate.search.recorded_states import record
from tailrace.evaluate.search.tune import (
    KNOBS,
    Knob,
    TuningObjective,
    rule_of,
    tune_linear,
    tune_rule,
)
from tailrace.parallel import WorkerPool
from tailrace.policy import registry
from tailrace.policy.learned.checkpoint import load
from tailrace.policy.learned.observation import (
    N_REPLICA_FEATURES,
    N_REQUEST_FEATURES,
    REPLICA_FEATURES,
)
from tailrace.policy.learned.policy import forward_many
from tailrace.seeds import Purpose, seeds

SMALL = Scenario(name="small", workload=Workload(name="sessions-hot", requests=150, rate=40.0))
TUNING, TRAINING = (seeds(p, 1)[0] for p in (Purpose.TUNING, Purpose.TRAINING))


def minimise(function, dimensions, generations, start=1.0):
    search = CmaEs(np.full(dimensions, start), 0.5, np.random.default_rng(0))
    for _ in range(generations):
        candidates = search.ask()
        search.tell(candidates, np.array([function(x) for x in candidates]))
    return search


def test_cma_es_finds_the_bottom_of_a_stretched_bowl():
    scales = 10.0 ** np.arange(6)  # a hundred thousand times as steep along one axis
    found = minimise(lambda x: float((scales * (x - 3) ** 2).sum()), 6, 400)
    np.testing.assert_allclose(found.mean, 3.0, atol=1e-5)
    assert found.sigma < 1e-4


def test_cma_es_follows_a_bent_valley():
    def rosenbrock(x):
        return float((100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum())

    np.testing.assert_allclose(minimise(rosenbrock, 4, 350, start=0.0).mean, 1.0, atol=1e-3)


def test_cma_es_repeats():
    one, other = (minimise(lambda x: float((x**2).sum()), 3, 10) for _ in range(2))
    assert np.array_equal(one.mean, other.mean)


@pytest.mark.compiled
def test_the_network_of_a_linear_score_chooses_as_the_score_does():
    rng = np.random.default_rng(0)
    weights = rng.normal(size=len(linear.COLUMNS))
    policy = linear.policy_of(weights)
    states, n = 300, 6
    x = rng.normal(scale=3.0, size=(states, n, N_REPLICA_FEATURES)).astype(np.float32)
    g = rng.normal(scale=3.0, size=(states, N_REQUEST_FEATURES)).astype(np.float32)
    logits = np.empty((states, n), np.float32)
    everywhere = np.ones((states, n), np.bool_)
    forward_many(
        policy.params, x, g, everywhere, np.zeros((states, n)), np.zeros((states, 0), np.float32),
        logits,
    )  # fmt: skip
    exact = x[:, :, list(linear.COLUMNS)] @ weights
    assert np.array_equal(logits.argmax(axis=1), exact.argmax(axis=1))
    np.testing.assert_array_equal(np.argsort(logits, axis=1), np.argsort(exact, axis=1))


def test_every_feature_but_comparisons_has_a_weight():
    names = {REPLICA_FEATURES[k].name for k in linear.COLUMNS}
    assert {"ttft", "cached_share", "in_flight", "is_last"} <= names
    assert not any("_vs_" in name for name in names)


def test_knobs_are_constants_of_their_rules_and_cover_the_defaults():
    rules = {rule.name: rule for rule in registry.rules()}
    for name, knobs in KNOBS.items():
        for knob in knobs:
            default = rules[name].params[knob.name]
            assert knob.low <= default <= knob.high
            assert knob.value(knob.share(default)) == pytest.approx(default, rel=0.01)
            assert knob.value(-1) == knob.low
            assert knob.value(2) == knob.high
    assert set(KNOBS) == {rule.name for rule in rules.values() if rule.params}
    assert Knob("x", 1, 100).value(0.5) == 10.0
    assert Knob("x", 0, 1, linear=True).value(0.5) == 0.5


class FakeObjective:
    """A bowl instead of simulations: the best load_weight is 4, the best queue_weight 8."""

    def scores(self, make, candidates):
        best = {"load_aware": [4.0], "llm_d": [8.0, 0.5]}[make.args[0]]
        make(candidates[0])
        return (np.log(candidates / best) ** 2).sum(axis=1) + 0.5


def test_one_constant_by_grid_and_several_by_cma_es():
    found = tune_rule("load_aware", FakeObjective())
    assert (found.method, found.tried) == ("grid", 16)
    assert found.constants["load_weight"] == pytest.approx(4.0, rel=0.25)
    assert found.score < found.default_score == pytest.approx(0.5 + np.log(4) ** 2)
    found = tune_rule("llm_d", FakeObjective(), budget=150)
    assert found.method == "CMA-ES"
    assert found.constants["queue_weight"] == pytest.approx(8.0, rel=0.1)
    assert found.constants["prefix_weight"] == pytest.approx(0.5, rel=0.1)
    with pytest.raises(TailraceError, match="unknown rule with constants to tune 'lmetrik'"):
        tune_rule("lmetrik", FakeObjective())


class FakeQueue:
    """The best order has w = 40, the best queue a limit of 16 in flight besides.

    ``plain`` is the score without either.
    """

    def __init__(self, plain):
        self.plain = plain
        self.names = set()

    def scores(self, make, candidates):
        policies = [make(candidate) for candidate in candidates]
        self.names |= {policy.name for policy in policies}
        return np.array([self.score(policy) for policy in policies])

    def score(self, policy):
        if policy.holding is not None:
            limit = np.log(policy.holding.max_in_flight / 16)
            return limit**2 + np.log(max(policy.holding.order.w, 0.1) / 40) ** 2
        return self.plain if policy.order is None else np.log(max(policy.order.w, 0.1) / 40) ** 2


@pytest.mark.parametrize("base", ["load_aware", "linear_es"])
def test_limits_and_order_of_a_queue_are_tuned_as_constants_are(base):
    objective = FakeQueue(plain=9.0)
    found = tune_rule(f"{base}+queue", objective, budget=300)
    assert found.constants["max_in_flight"] == pytest.approx(16, rel=0.1)
    assert found.constants["w"] == pytest.approx(40, rel=0.1)
    assert found.method == "CMA-ES"
    spec = tuned.record_of(f"{base}+queue", found, {})["spec"]
    holding = registry.get(spec).holding
    assert holding.max_in_flight == found.constants["max_in_flight"]
    assert holding.order.w == found.constants["w"]
    assert all(name.startswith(registry.get(base).name) for name in objective.names)


def test_weights_of_an_order_are_tuned_as_constants_are():
    found = tune_rule("lmetric+order", FakeQueue(plain=9.0), budget=150)
    assert found.constants["w"] == pytest.approx(40, rel=0.1)
    assert found.default_score == 9.0
    assert registry.get(tuned.record_of("lmetric+order", found, {})["spec"]).order.w > 30


@pytest.mark.parametrize("name", ["load_aware+order", "load_aware+queue"])
def test_where_order_does_not_pay_the_tuned_policy_does_without(name):
    found = tune_rule(name, FakeQueue(plain=-1.0), budget=20)
    assert found.score == found.default_score == -1.0
    policy = registry.get(tuned.record_of(name, found, {})["spec"])
    if policy.holding is not None:
        assert policy.holding.max_in_flight >= 1e6
        assert policy.holding.max_queued >= 1e6
        assert policy.holding.max_prefill_s >= 1e6
    else:
        assert policy.order.w == policy.order.d == 0  # order of arrival


def test_knobs_without_effect_stay_as_they_were():
    found = tune_rule("lmetric+order", FakeQueue(plain=9.0), budget=40)
    assert (found.constants["most"], found.constants["d"]) == (30.0, 0.0)
    found = tune_rule("lmetric+queue", FakeQueue(plain=9.0), budget=40)
    assert found.constants["max_queued"] == found.constants["max_prefill_s"] == 1e6
    assert found.constants["max_in_flight"] < 1e3


class LongTails(FakeQueue):
    """The more a request gives way, the longer the tail; above w = 10 it is longer than without."""

    def scores_and_tails(self, make, candidates):
        orders = [make(candidate).order for candidate in candidates]
        tails = [1.0 if order is None else order.w / 10 for order in orders]
        return self.scores(make, candidates), np.array(tails)


def test_the_tail_can_be_kept():
    objective = LongTails(plain=9.0)
    assert tune_rule("lmetric+order", objective, budget=60).constants["w"] > 30
    kept = tune_rule("lmetric+order", objective, budget=60, keep_tail=True)
    assert 5 < kept.constants["w"] <= 10
    assert kept.score == pytest.approx(np.log(kept.constants["w"] / 40) ** 2)
    assert tune_rule("lmetric+order", LongTails(plain=0.1), budget=60, keep_tail=True).score == 0.1


def test_a_name_to_tune_has_no_settings():
    with pytest.raises(TailraceError, match=r"write load_aware\+queue to tune"):
        tune_rule("load_aware+queue:max_queued=3", FakeQueue(1.0))


@pytest.mark.compiled
def test_the_objective_scores_by_cost_relative_to_the_reference():
    with WorkerPool(1) as pool:
        objective = TuningObjective([Traffic(SMALL, 40.0, TUNING)], pool)
        make = partial(rule_of, "load_aware")
        one, other = objective.scores(make, np.array([[1.0], [1.0]]))
        assert one == other < 1.0
        with pytest.raises(TailraceError, match="set aside for training, not tuning"):
            TuningObjective([Traffic(SMALL, 40.0, TRAINING)], pool)


@pytest.mark.compiled
def test_tuned_weights_are_never_worse_than_the_first(tmp_path):
    traffics = [Traffic(SMALL, 40.0, TUNING)]
    told = []
    with WorkerPool(1) as pool:
        objective = TuningObjective(traffics, pool)
        best = tune_linear(objective, traffics, 2, lambda *a: told.append(a[:2]), population=4)
        assert [generation for generation, _ in told] == [0, 1, 2]
        scores = [score for _, score in told]
        assert scores == sorted(scores, reverse=True)
        assert objective.scores(linear.policy_of, best[None])[0] == pytest.approx(scores[-1])
        path = tmp_path / "mine.tailrace"
        figures = tuned.save_linear(path, traffics, pool, 1, lambda _: None)
    policy = load(path)
    assert policy.about["scores"] == {"tuning": figures["score"]}
    assert policy.about["seeds"] == [TUNING]
    assert set(policy.about["training"]["weights"]) == {
        REPLICA_FEATURES[k].name for k in linear.COLUMNS
    }


@pytest.mark.compiled
def test_recorded_decisions_are_those_of_the_driver():
    slow = SMALL.model_copy(
        update={"workload": SMALL.workload.model_copy(update={"requests": 300})}
    )
    column = [f.name for f in REPLICA_FEATURES].index("is_last")

    def sent_back(epsilon):
        """Share of later turns that went where their session's last one went."""
        traffic = Traffic(slow, 6.0, TUNING)
        seen = record(traffic, partial(registry.get, "sticky_session"), epsilon)
        assert seen.replica_obs.shape == (300, N_REPLICA_FEATURES)
        assert (seen.cost_s > 0).all()
        assert seen.spread[column] > 0
        later = seen.request_obs[:, 3] > 0
        return (seen.replica_obs[later, column] == 1).mean()

    random = sent_back(1.0)
    assert random < 0.5
    assert sent_back(0.0) > 2 * random


@pytest.mark.compiled
def test_a_predictor_learns_what_requests_cost():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from tailrace.evaluate.search import predictor

    traffics = [Traffic(SMALL, 40.0, TRAINING)]
    told = []
    with WorkerPool(1) as pool:
        tensors = predictor.train(
            traffics, pool, rounds=2, epochs=8, report=lambda *a: told.append(a)
        )
        with pytest.raises(TailraceError, match="set aside for tuning, not training"):
            predictor.train([Traffic(SMALL, 40.0, TUNING)], pool)
    assert [number for number, _, _ in told] == [1, 2]
    assert told[1][2] == 600
    assert not tensors["actor.output.weight"].any()  # a replica is judged by itself
    seen = record(Traffic(SMALL, 40.0, TRAINING + 7), partial(registry.get, "load_aware"), 0.2)
    policy = predictor.LearnedPolicy(predictor.CONFIG, tensors, "p")
    k = len(seen.cost_s)
    logits = np.empty((k, 1), np.float32)
    forward_many(
        policy.params, seen.replica_obs[:, None], seen.request_obs, np.ones((k, 1), np.bool_),
        np.zeros((k, 1)), np.zeros((k, 0), np.float32), logits,
    )  # fmt: skip
    log_cost = np.log(seen.cost_s + 1e-3)
    assert np.corrcoef(-logits[:, 0], log_cost)[0, 1] > 0.3


def test_records_of_rules_are_merged_into_a_file(tmp_path):
    path = tmp_path / "tuned.json"
    record_of = tuned.record_of(
        "load_aware", tuned.Tuned({"load_weight": 0.5}, 0.7, 0.8, 16, "grid"), {"seeds": [1]}
    )
    tuned.merge(path, {"load_aware": record_of})
    tuned.merge(path, {"dynamo": {**record_of, "constants": {"overlap_weight": 2.0}}})
    data = json.loads(path.read_text())["rules"]
    assert list(data) == ["dynamo", "load_aware"]
    assert data["load_aware"]["spec"] == "load_aware:load_weight=0.5"
    registry.get(data["load_aware"]["spec"])
    path.write_text("[]")
    with pytest.raises(TailraceError, match="no file of tuned constants"):
        tuned.merge(path, {"load_aware": record_of})
