"""Looking into policies that were made to have one habit: exactly that one must be found."""

import numpy as np
import pytest

from policy.networks import random_policy, random_tensors, small
from tailrace import scenario as scenarios
from tailrace.config import Cluster, Engine, Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.explain import audit as audits
from tailrace.evaluate.explain.audit import (
    States,
    among_replicas,
    audit,
    exchanged,
    join,
    log_policy,
)
from tailrace.evaluate.explain.inspect import (
    _extremes,
    _habit,
    _Watcher,
    inspect,
    learned,
    parameters,
    visit,
)
from tailrace.evaluate.measure.runner import traffic
from tailrace.policy.learned.observation import (
    N_REPLICA_FEATURES,
    N_REQUEST_FEATURES,
    REPLICA_FEATURES,
    REQUEST_FEATURES,
)
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.sim.simulator import Simulation, simulate

pytestmark = pytest.mark.compiled
WORLD = Scenario(
    name="mixed",
    cluster=Cluster(
        replicas=(Replica(num_blocks=3000, speed=2.0), Replica(count=2, num_blocks=3000))
    ),
    workload=Workload(name="sessions-hot", rate=14.0, requests=150),
)
SEED = 7
NAMES = [f.name for f in (*REPLICA_FEATURES, *REQUEST_FEATURES)]


def only(*features, seed=0):
    """A network whose first layer reads nothing but these features."""
    config = small()
    tensors = random_tensors(config, seed)
    for k, name in enumerate(NAMES):
        if name not in features:
            tensors["actor.input.weight"][:, k] = 0
    return LearnedPolicy(config, tensors)


def prior_only(rule):
    """A network that plays a rule: what it has learned is nothing."""
    config = small(prior=rule, prior_weight=5.0)
    tensors = random_tensors(config)
    tensors["scorer.output.weight"][:] = 0
    return LearnedPolicy(config, tensors, name="rule in disguise")


def random_states(count=40, n=4, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((count, n)) < 0.7
    mask[np.arange(count), rng.integers(n, size=count)] = True
    return States(
        rng.normal(0, 1, (count, n, N_REPLICA_FEATURES)).astype(np.float32),
        rng.normal(0, 1, (count, N_REQUEST_FEATURES)).astype(np.float32),
        mask,
        np.zeros((count, n), np.float32),
        np.zeros((count, 0), np.float32),
    )


def by_name(found):
    return {f.name: f for f in found.features}


# ---- exchanging ---------------------------------------------------------------------------------


def test_values_are_exchanged_within_a_replica_and_only_where_it_is_available() -> None:
    states = random_states()
    keys = np.random.default_rng(1).random(len(states))
    other = exchanged(states, [3, 5], [2], keys)
    changed = other.replica_obs != states.replica_obs
    assert changed[..., [3, 5]].any()
    assert not changed[~states.mask].any()
    assert not np.delete(changed, [3, 5], axis=2).any()
    assert not np.delete(other.request_obs != states.request_obs, 2, axis=1).any()
    np.testing.assert_array_equal(
        np.sort(other.request_obs[:, 2]), np.sort(states.request_obs[:, 2])
    )
    for i in range(4):
        there = states.mask[:, i]
        before, after = states.replica_obs[there, i], other.replica_obs[there, i]
        # Several columns are exchanged together: pairs stay pairs.
        assert sorted(map(tuple, before[:, [3, 5]])) == sorted(map(tuple, after[:, [3, 5]]))


def test_values_are_exchanged_among_the_replicas_of_a_state() -> None:
    states = random_states()
    keys = np.random.default_rng(1).random(states.mask.shape)
    other = among_replicas(states, 4, keys)
    changed = other.replica_obs != states.replica_obs
    assert changed[..., 4].any()
    assert not changed[~states.mask].any()
    assert not np.delete(changed, 4, axis=2).any()
    for before, after in zip(states.replica_obs, other.replica_obs, strict=True):
        assert sorted(before[:, 4]) == sorted(after[:, 4])


def test_join_pads_with_replicas_that_are_not_there() -> None:
    policy = only("queued")
    two, four = random_states(5, 2), random_states(6, 4)
    both = join([two, four])
    assert both.mask.shape == (11, 4)
    assert not both.mask[:5, 2:].any()
    np.testing.assert_allclose(log_policy(policy, both)[:5, :2], log_policy(policy, two), atol=1e-5)


# ---- the audit ----------------------------------------------------------------------------------


def test_a_policy_that_reads_one_feature_is_found_out() -> None:
    found = audit(only("kv_used"), random_states())
    features = by_name(found)
    assert found.features[0].name == "kv_used"
    assert features["kv_used"].changed > 0.1
    assert features["kv_used"].sensitivity > 0.01
    assert "ignored" not in features["kv_used"].flags
    for name in set(NAMES) - {"kv_used"}:
        assert features[name].kl < 1e-6
        assert features[name].changed == 0
        assert features[name].sensitivity == pytest.approx(0, abs=1e-6)
        assert "ignored" in features[name].flags
    assert found.sources[0].name == "metrics"
    assert all(source.kl < 1e-6 for source in found.sources[1:])


def test_a_request_feature_alone_does_not_tell_replicas_apart() -> None:
    features = by_name(audit(only("prompt"), random_states()))
    assert features["prompt"].kl < 1e-6
    together = by_name(audit(only("prompt", "queued"), random_states()))
    assert together["prompt"].changed > 0


def test_the_gradient_turns_with_the_logit() -> None:
    policy = only("queued")
    output = "scorer.output.weight"
    turned = LearnedPolicy(policy.config, policy.tensors | {output: -policy.tensors[output]})
    one, other = (by_name(audit(p, random_states()))["queued"] for p in (policy, turned))
    assert one.gradient == pytest.approx(-other.gradient, rel=1e-4)
    assert one.sensitivity == pytest.approx(other.sensitivity, rel=1e-4)
    assert one.sensitivity >= abs(one.gradient) > 1e-3


def test_what_never_changes_on_a_replica_is_exchanged_among_replicas() -> None:
    states = random_states()
    column = NAMES.index("speed")
    states.replica_obs[..., column] = np.arange(4)
    features = by_name(audit(only("speed"), states))
    assert features["speed"].exchanged == "replicas"
    assert features["speed"].changed > 0.1
    assert "ignored" not in features["speed"].flags
    assert features["queued"].exchanged == "states"


def test_constant_and_far_off_features_are_flagged() -> None:
    policy = only("kv_used")
    for norm in ("replica_norm", "request_norm"):
        policy.tensors[f"{norm}.mean"][:] = 0
        policy.tensors[f"{norm}.var"][:] = 1
    policy.tensors["request_norm.var"][NAMES.index("turn") - N_REPLICA_FEATURES] = 0
    states = random_states()
    states.replica_obs[..., NAMES.index("cached")] = 0.5
    states.replica_obs[..., NAMES.index("trend")] += 100
    features = by_name(audit(policy, states))
    assert features["cached"].flags == ("constant here",)
    assert "outside training range" in features["trend"].flags
    assert features["trend"].outside == 1
    assert features["trend"].mean == pytest.approx(100, abs=0.5)
    assert "constant in training" in features["turn"].flags
    assert [f.name for f in features.values() if "constant here" in f.flags] == ["cached"]


def test_attention_that_looks_at_all_alike_and_at_one_only() -> None:
    policy = random_policy()
    policy.tensors["actor.query.weight"][:] = 0
    even = audit(LearnedPolicy(policy.config, policy.tensors), random_states())
    assert len(even.attention) == policy.config.heads
    for head in even.attention:
        assert head.to_self == pytest.approx(head.even)
        assert head.to_chosen == pytest.approx(head.even)
        assert head.entropy == pytest.approx(1)
    sharp = random_policy()
    sharp.tensors["actor.query.weight"][:] *= 1e4
    for head in audit(LearnedPolicy(sharp.config, sharp.tensors), random_states()).attention:
        assert head.entropy < 0.05


def test_one_replica_has_nobody_to_look_at() -> None:
    assert audit(only("queued"), random_states(n=1)).attention == ()


def test_too_many_replicas_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(audits, "MAX_EXPLAINED", 3)
    with pytest.raises(TailraceError, match="up to 3 replicas, not 4"):
        audit(only("queued"), random_states())


# ---- habits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "mask", "marks"),
    [
        ([1, 1, 2], [1, 1, 1], [1, 1, -1]),
        ([1, 1, 1], [1, 1, 1], [0, 0, 0]),
        ([3, 0, 2], [1, 0, 1], [-1, 0, 1]),
        ([0, np.inf, np.inf], [1, 1, 1], [1, -1, -1]),
        ([-np.inf, 0, 5], [1, 1, 1], [1, 0, -1]),
        ([np.nan, 0, 5], [1, 1, 1], [-1, 1, 0]),
        ([np.nan, np.inf, 5], [1, 1, 0], [0, 0, 0]),
        ([1.0, 1.0 + 1e-12, 2.0], [1, 1, 1], [1, 1, -1]),
    ],
)
def test_best_and_worst_of_scores(scores, mask, marks) -> None:
    found = _extremes(np.array(scores, float), np.array(mask, bool))
    assert found.tolist() == marks


def test_habits_count_only_where_replicas_differ() -> None:
    marks = np.array([[1, -1, 0], [0, 0, 0], [1, 1, -1], [-1, 1, 0]], np.int8)
    mask = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]], bool)
    habit = _habit("x", marks, mask, [0, 2, 2, 1])
    assert (habit.states, habit.best, habit.worst) == (3, 2 / 3, 1 / 3)
    assert habit.chance == pytest.approx((1 / 3 + 2 / 3 + 1 / 2) / 3)
    assert _habit("x", marks[1:2], mask[1:2], [0]).best is None


@pytest.mark.parametrize(
    ("rule", "fact"),
    [("least_outstanding", "fewest in flight"), ("least_predicted_ttft", "earliest first token")],
)
def test_a_rule_in_disguise_is_recognised(rule, fact) -> None:
    (behaviour,) = inspect(prior_only(rule), [WORLD], SEED, states=60).behaviours
    rules = {habit.name: habit for habit in behaviour.rules}
    facts = {habit.name: habit for habit in behaviour.facts}
    assert rules[rule].best == 1
    assert behaviour.rules[0].best == 1
    assert facts[fact].best == 1
    assert facts[fact].worst == 0
    assert rules["sticky_session"].best < 1
    assert {"random", "round_robin"}.isdisjoint(rules)
    assert {"lookahead", "lookahead_oracle"} <= set(rules)


@pytest.mark.parametrize("variant", ["plain", "memory", "all"])
def test_looking_changes_nothing(variant) -> None:
    policy = random_policy(variant)
    found = inspect(policy, [WORLD], SEED, states=50)
    (behaviour,) = found.behaviours
    table = traffic(WORLD, WORLD.workload.rate, SEED)
    result = simulate(WORLD.cluster, table, policy.copy(), seed=SEED)
    shares = result.replicas["requests"] / result.replicas["requests"].sum()
    assert behaviour.shares == pytest.approx(shares.tolist())
    assert behaviour.states == 50
    assert 1 / 3 <= behaviour.confidence <= 1
    again = inspect(policy, [WORLD], SEED, states=50)
    assert again == found


@pytest.mark.parametrize("variant", ["memory", "all"])
def test_what_is_written_down_is_what_the_policy_did(variant) -> None:
    """Choices, and states with their memory and prior, from which the same choices follow."""
    policy = random_policy(variant)
    table = traffic(WORLD, WORLD.workload.rate, SEED)
    simulation = Simulation(WORLD.cluster, table, seed=SEED, lookahead=True)
    policy.reset(3, SEED)
    watcher = _Watcher(policy, simulation)
    requests: list[int] = []

    def look() -> None:
        requests.append(int(simulation.view().request["id"]))
        watcher.look()

    visit(simulation, policy, 25, look)  # it decides more often than we look
    simulation.run(policy)
    assert len(set(requests)) == 25
    assert watcher.chosen == simulation.result().requests["replica"][requests].tolist()
    states = watcher.states()
    assert np.abs(states.memory[1:]).max(axis=1).min() > 0
    probabilities = np.exp(log_policy(policy, states))
    assert probabilities.argmax(axis=1).tolist() == watcher.chosen
    np.testing.assert_allclose(probabilities.max(axis=1), watcher.confidence, rtol=1e-4)


def test_several_scenarios_of_several_sizes() -> None:
    other = scenarios.build(
        {"workload": {"name": "chat", "rate": 8.0, "requests": 100}, "name": "four"}
    )
    done = []
    found = inspect(
        random_policy(), [WORLD, other], SEED, states=30, progress=lambda: done.append(1)
    )
    assert [b.scenario for b in found.behaviours] == ["mixed", "four"]
    assert [len(b.shares) for b in found.behaviours] == [3, 4]
    assert found.audit.states == sum(b.states for b in found.behaviours)
    assert len(done) == 3
    assert found.parameters == parameters(random_policy())


def test_normalisers_are_no_parameters() -> None:
    policy = random_policy()
    norms = 2 * (N_REPLICA_FEATURES + N_REQUEST_FEATURES + 1) + 3
    assert parameters(policy) == sum(t.size for t in policy.tensors.values()) - norms


# ---- mistakes -----------------------------------------------------------------------------------


def test_rules_have_no_weights_to_look_into(tmp_path) -> None:
    with pytest.raises(TailraceError, match=r"lmetric is a built-in rule.*`tailrace policies lmet"):
        learned("lmetric")
    file = tmp_path / "mine.py"
    file.write_text("def scores(view): return view.replicas['in_flight']")
    with pytest.raises(TailraceError, match=r"a rule of your own.*`tailrace compare -p"):
        learned(str(file))


def test_the_reference_engine_is_refused() -> None:
    world = WORLD.model_copy(update={"engine": Engine(engine="reference")})
    with pytest.raises(TailraceError, match="needs the compiled engine"):
        inspect(random_policy(), [world], SEED)
