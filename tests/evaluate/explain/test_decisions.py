import numpy as np
import pytest

from policy.networks import random_tensors, small
from tailrace.evaluate.explain import decisions as d
from tailrace.evaluate.explain.decisions import Decisions, DecisionWatcher, Question, decisions
from tailrace.evaluate.explain.inspect import visit
from tailrace.evaluate.judge.suite import load_scenarios
from tailrace.evaluate.measure.cells import Traffic
from tailrace.evaluate.measure.runner import policy_for, run, simulation
from tailrace.evaluate.search import linear
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.observation import (
    N_REPLICA_FEATURES,
    N_REQUEST_FEATURES,
    REPLICA_FEATURES,
    REQUEST_FEATURES,
)
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.seeds import Purpose, seeds

pytestmark = pytest.mark.compiled
SEED = seeds(Purpose.TUNING, 1)[0]
REPLICA = {f.name: k for k, f in enumerate(REPLICA_FEATURES)}
REQUEST = {f.name: k for k, f in enumerate(REQUEST_FEATURES)}


@pytest.fixture(scope="module")
def traffic():
    (scenario,) = load_scenarios(["hot-sessions"], 400)
    return Traffic(scenario, 30.0, SEED)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "mine.tailrace"
    config = small("memory")
    checkpoint.save(path, config, random_tensors(config, 4))
    return str(path)


@pytest.mark.parametrize("policy", ["lmetric", "plain", "prior"])
def test_a_policy_agrees_with_itself(traffic, tmp_path, policy):
    spec = policy
    if policy != "lmetric":
        spec = str(tmp_path / "mine.tailrace")
        checkpoint.save(tmp_path / "mine.tailrace", small(policy), random_tensors(small(policy)))
    found = decisions(Question(traffic, spec, spec, 50))
    assert len(found.differs) == 50
    assert not found.differs.any()
    assert found.example is None
    assert (found.taken == found.instead).all()


def test_choices_and_what_was_seen_of_them(traffic, trained):
    found = decisions(Question(traffic, trained, "least_outstanding", 60))
    in_flight = REPLICA["in_flight"]
    assert 0 < found.differs.sum() < 60
    # The rule takes the fewest in flight: where they differ, the policy's replica has more.
    differ = found.differs
    assert (found.taken[differ, in_flight] > found.instead[differ, in_flight]).all()
    example = found.example
    (taken,) = [c for c in example.choices if c.taken]
    (instead,) = [c for c in example.choices if c.instead]
    assert instead.in_flight == min(c.in_flight for c in example.choices) < taken.in_flight
    assert sum(c.probability for c in example.choices) == pytest.approx(1)
    assert taken.probability == max(c.probability for c in example.choices)
    assert example.margin > 0
    assert 0 < len(example.reasons) <= d.REASONS
    effects = [abs(r.effect) for r in example.reasons]
    assert effects == sorted(effects, reverse=True)


@pytest.mark.parametrize("rule", ["random", "power_of_two", "round_robin"])
def test_asking_on_the_side_changes_nothing(traffic, trained, rule):
    """The run that is looked at ends like one that is not, though the rule draws lots."""
    policy, asked = (policy_for(traffic.scenario, name) for name in (trained, rule))
    for one in (policy, asked):
        one.reset(traffic.scenario.cluster.size, SEED)
    play = simulation(traffic.scenario, traffic.rate_rps, SEED)
    watcher = DecisionWatcher(play, policy, asked, "any")
    visit(play, policy, 30, watcher.look)
    assert len(watcher) == 30
    play.run(policy)
    watched, alone = play.result(), run(traffic.scenario, trained, traffic.rate_rps, SEED)
    for name in ("replica", "finished_s"):
        assert (watched.requests[name] == alone.requests[name]).all()


def test_reasons_of_a_policy_that_looks_at_one_thing():
    weights = np.zeros(len(linear.COLUMNS))
    names = [REPLICA_FEATURES[k].name for k in linear.COLUMNS]
    weights[names.index("in_flight")] = 1.0
    policy = LearnedPolicy(linear.CONFIG, linear.tensors_of(weights))
    slopes = np.zeros((2, N_REPLICA_FEATURES))
    slopes[:, REPLICA["in_flight"]] = -2.0
    seen = np.zeros((2, N_REPLICA_FEATURES), np.float32)
    seen[:, REPLICA["in_flight"]] = np.log1p([3.0, 8.0])
    (reason,) = d.contrast(policy, slopes, seen, taken=0, instead=1)
    deviation = float(np.sqrt(policy.tensors["replica_norm.var"][REPLICA["in_flight"]]))
    assert reason.effect == pytest.approx(2 * (np.log1p(8) - np.log1p(3)) / deviation, rel=1e-5)
    assert "3 requests there, 8 requests at the rule's" in reason.text


def made(scenario, differs, prompts, taken=0.0, instead=0.0):
    count = len(differs)
    request_obs = np.zeros((count, N_REQUEST_FEATURES), np.float32)
    request_obs[:, REQUEST["prompt"]] = prompts
    sides = []
    for value in (taken, instead):
        side = np.zeros((count, N_REPLICA_FEATURES), np.float32)
        side[:, REPLICA["queued"]] = value
        sides.append(side)
    return Decisions(scenario, np.array(differs), request_obs, *sides, None)


def test_states_are_compared_within_scenarios():
    """Long prompts are where it deviates only because that scenario has long ones."""
    rng = np.random.default_rng(0)
    often = made("often", [True] * 90 + [False] * 20, 8 + rng.normal(0, 0.1, 110))
    seldom = made("seldom", [True] * 20 + [False] * 90, 2 + rng.normal(0, 0.1, 110))
    (prompt,) = d.states_apart([often, seldom], 5)
    assert prompt.name == "prompt"
    assert abs(prompt.deviations) < 0.5
    # Within one scenario the difference is real.
    mixed = made("mixed", [True] * 50 + [False] * 50, [5.0, 5.2] * 25 + [3.0, 3.2] * 25)
    (prompt,) = d.states_apart([mixed], 5)
    assert prompt.deviations == pytest.approx(20, rel=0.01)
    assert d.states_apart([made("few", [True] * 3 + [False] * 90, np.arange(93))], 5) == []


def test_replicas_are_compared_where_choices_differ():
    taken = np.log1p(np.array([4.0, 5.0] * 10 + [50.0] * 20))
    instead = np.log1p(np.array([1.0, 1.0] * 10 + [50.0] * 20))
    found = made("a", [True] * 20 + [False] * 20, 1.0, taken, instead)
    (queued,) = d.replicas_apart([found], 5)
    assert (queued.name, queued.first, queued.second) == ("queued", "1 requests", "4.5 requests")
    assert queued.deviations > 5
