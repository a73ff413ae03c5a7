"""A learned policy in compiled code: the same choices as torch, symmetry, memory, prior."""

import subprocess
import sys

import numpy as np
import pytest

from policy.networks import (
    VARIANTS,
    random_inputs,
    random_policy,
    random_tensors,
    small,
)
from policy.views import CALLABLE, copy_view, make_view, random_view, scores_of
from tailrace.config import MAX_REPLICAS, Cluster, Engine, Event, Replica
from tailrace.errors import TailraceError
from tailrace.policy.base import checked_scores
from tailrace.policy.learned import architecture
from tailrace.policy.learned.architecture import NetworkConfig, pack
from tailrace.policy.learned.explain import explain
from tailrace.policy.learned.inference import forward
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.policy.learned.policy import (
    PRIOR_LIMIT,
    LearnedPolicy,
    forward_many,
    prior_scores,
    standardise,
)
from tailrace.policy.rules import LEARNED, RULES, Rule
from tailrace.sim.simulator import simulate
from tailrace.view.records import View
from tailrace.view.selection import choose
from tailrace.workload import library

each_variant = pytest.mark.parametrize("variant", VARIANTS)
#: Draw random numbers when they score, so two calls differ.
RANDOM = {"random", "power_of_two"}


def logits_of(params, inputs):
    replica_obs, request_obs, mask, prior = inputs
    out = np.zeros(len(mask))
    forward(params, replica_obs, request_obs, mask, prior, out)
    return out


def observed(view: View):
    replica_obs = np.zeros((len(view.replicas), N_REPLICA_FEATURES), np.float32)
    request_obs = np.zeros(N_REQUEST_FEATURES, np.float32)
    observe(view, replica_obs, request_obs)
    return replica_obs, request_obs


# ---- the arithmetic


def assert_equals_torch(config: NetworkConfig, sizes: list[int], repeats: int) -> None:
    torch = pytest.importorskip("torch")
    from tailrace.policy.learned.network import Network

    torch.set_num_threads(1)
    features, globals_ = 11, 6
    tensors = random_tensors(config, 2, features, globals_)
    network = Network(config, features, globals_)
    network.load_tensors(tensors)
    params = pack(config, tensors)
    memory = network.first_memory(1)
    for k, n in enumerate(sizes * repeats):
        inputs = random_inputs(n, k, features, globals_)
        if not config.prior:
            inputs[3][:] = 0
        got = logits_of(params, inputs)
        with torch.no_grad():
            x, g, mask, prior = (torch.from_numpy(part)[None] for part in inputs)
            expected, _, memory = network.step(x, g, mask, memory, prior)
        np.testing.assert_allclose(got, expected[0].numpy(), rtol=1e-4, atol=1e-4)
        assert got.argmax() == expected.argmax()


@each_variant
def test_equals_torch(variant: str) -> None:
    assert_equals_torch(small(variant), [1, 2, 3, 4, 7], 2)


@pytest.mark.compiled
@each_variant
def test_equals_torch_at_full_size(variant: str) -> None:
    config = NetworkConfig(**VARIANTS[variant])
    assert_equals_torch(config, [1, 2, 3, 4, 5, 8, 16, 31, 64, 127, 128], 6)


@each_variant
def test_equals_the_explanation_in_numpy(variant: str) -> None:
    policy = random_policy(variant)
    for n in (1, 2, 5):
        inputs = random_inputs(n, n)
        prior = inputs[3] if policy.config.prior else None
        policy.reset(n, 0)
        explained = explain(policy, *inputs[:3], prior)
        shown = (*inputs[:3], inputs[3] if policy.config.prior else np.zeros(n))
        np.testing.assert_allclose(logits_of(policy.params, shown), explained.logits, atol=1e-4)


def test_many_states_at_once_with_their_memories() -> None:
    policy = random_policy("all")
    inputs = [random_inputs(4, k) for k in range(3)]
    memory = np.random.default_rng(0).normal(size=(3, policy.config.memory))
    first = memory.astype(np.float32)
    got = np.zeros((3, 4))
    forward_many(
        policy.params, *(np.stack(part) for part in zip(*inputs, strict=True)), memory, got
    )
    start = int(policy.params[architecture.M])
    for k in range(3):
        state = policy.params.view(np.float32)[start : start + policy.config.memory]
        state[:] = first[k]
        np.testing.assert_array_equal(logits_of(policy.params, inputs[k]), got[k])
        np.testing.assert_array_equal(state, memory[k].astype(np.float32))


def test_a_wrong_number_of_features_or_replicas_is_an_error() -> None:
    policy = random_policy()
    x, g, mask, prior = random_inputs(3, 0)
    with pytest.raises(ValueError, match="number of features"):
        logits_of(policy.params, (x[:, 1:], g, mask, prior))
    with pytest.raises(ValueError, match="features of the request"):
        logits_of(policy.params, (x, g[1:], mask, prior))
    with pytest.raises(ValueError, match="more replicas"):
        policy.scores(make_view(MAX_REPLICAS + 1))


def test_weights_that_do_not_fit_or_are_no_numbers_are_refused() -> None:
    config = small()
    good = random_tensors(config)
    for change, message in (
        (
            {"scorer.hidden.bias": np.zeros(4, np.float32)},
            r"'scorer.hidden.bias'.*\(4,\) of float32, not",
        ),
        ({"scorer.hidden.bias": np.full(5, np.nan, np.float32)}, "not finite"),
        ({"replica_norm.var": -good["replica_norm.var"]}, "negative variance"),
        ({"other": np.zeros(1, np.float32)}, "'other' that does not belong"),
    ):
        with pytest.raises(TailraceError, match=message):
            LearnedPolicy(config, good | change)
    del good["actor.norm.bias"]
    with pytest.raises(TailraceError, match=r"has no tensor 'actor.norm.bias'"):
        LearnedPolicy(config, good)


# ---- as a policy


@each_variant
@pytest.mark.parametrize("seed", range(8))
def test_scores_are_minus_the_logits_of_what_is_observed(variant: str, seed: int) -> None:
    policy = random_policy(variant)
    view = random_view(seed)
    mask = view.replicas["available"] != 0
    prior = np.zeros(len(mask))
    prior_scores(view, policy.params, prior)
    expected = logits_of(random_policy(variant).params, (*observed(view), mask, prior))
    np.testing.assert_allclose(checked_scores(policy, view), -expected, rtol=1e-6, atol=1e-6)


@each_variant
@pytest.mark.parametrize("seed", range(8))
def test_renaming_replicas_renames_the_scores(variant: str, seed: int) -> None:
    view = random_view(seed)
    order = np.random.default_rng(seed).permutation(len(view.replicas))
    request = view.request.copy()
    if request["last_replica"] >= 0:
        request["last_replica"] = np.flatnonzero(order == request["last_replica"])[0]
    renamed = View(request, view.replicas[order], view.costs[order], view.router)
    scores = random_policy(variant).scores(view)
    np.testing.assert_allclose(random_policy(variant).scores(renamed), scores[order], atol=1e-4)


@each_variant
@pytest.mark.parametrize("seed", range(8))
def test_an_unavailable_replica_has_no_influence(variant: str, seed: int) -> None:
    view = random_view(seed)
    gone = view.replicas["available"] == 0
    other = copy_view(view)
    for name in ("in_flight", "queued", "queued_tokens", "queued_uncached", "index_tokens"):
        other.replicas[name][gone] += 1000
    scores = random_policy(variant).scores(view)
    np.testing.assert_allclose(random_policy(variant).scores(other), scores, atol=1e-5)
    assert (scores[gone] == np.inf).all()


def test_memory_moves_on_and_a_reset_empties_it() -> None:
    policy = random_policy("memory")
    views = [random_view(k) for k in range(4)]
    first = [policy.scores(view) for view in views]
    assert not np.array_equal(policy.scores(views[0]), first[0])
    twin = policy.copy()
    for one in (policy, twin):
        one.reset(4, 0)
        for view, expected in zip(views, first, strict=True):
            np.testing.assert_array_equal(one.scores(view), expected)


# ---- prior


def silent(prior: str) -> LearnedPolicy:
    """A policy that is nothing but its prior."""
    config = small(prior=prior)
    tensors = random_tensors(config)
    for name in ("weight", "bias"):
        tensors[f"scorer.output.{name}"] *= 0
    return LearnedPolicy(config, tensors)


@pytest.mark.parametrize(
    "rule", [r for r in CALLABLE if r.name not in RANDOM], ids=lambda r: r.name
)
def test_a_prior_alone_chooses_as_its_rule(rule: Rule) -> None:
    policy = silent(rule.name)
    for seed in range(40):
        view = random_view(seed)
        available = view.replicas["available"] != 0
        scores = scores_of(rule, view)[available]
        best = np.flatnonzero(scores == scores.min())
        chosen = np.argmin(policy.scores(view)[available])
        # As good as the rule's choice, but for differences too small for float32.
        assert chosen in best or scores[chosen] == pytest.approx(scores.min(), rel=1e-5)


@pytest.mark.parametrize(
    ("scores", "available", "expected"),
    [
        ([1.0, 3.0], [1, 1], [-1, 1]),
        ([1.0, 3.0, 99.0], [1, 1, 0], [-1, 1, 0]),
        ([5.0, 5.0, 5.0], [1, 1, 1], [0, 0, 0]),
        ([0.1, 0.1 + 1e-17, 0.1], [1, 1, 1], [0, 0, 0]),
        ([np.inf, 2.0, 4.0], [1, 1, 1], [PRIOR_LIMIT, -1, 1]),
        ([-np.inf, 2.0, np.nan], [1, 1, 1], [-PRIOR_LIMIT, 0, PRIOR_LIMIT]),
        ([np.inf, np.inf], [1, 1], [PRIOR_LIMIT, PRIOR_LIMIT]),
        ([7.0], [1], [0]),
    ],
)
def test_standardised_scores(scores: list[float], available: list[int], expected: list) -> None:
    out = np.array(scores)
    standardise(make_view(len(scores), available=available).replicas, out)
    np.testing.assert_allclose(out, expected, atol=1e-9)


# ---- in the simulator


def test_its_code_is_no_rule_s() -> None:
    assert LEARNED.code == 1 + max(rule.code for rule in RULES)
    assert LEARNED.name not in {rule.name for rule in RULES}
    assert LEARNED.uses_metrics
    assert LEARNED.uses_prefix
    assert LEARNED.uses_context


@each_variant
def test_decides_alike_in_both_engines(variant: str) -> None:
    table = library.make("sessions-hot", 60, 15.0, seed=8)
    cluster = Cluster(replicas=(Replica(count=2, num_blocks=900), Replica(speed=0.5)))
    events = (
        Event(at_s=1.0, replica=1, kind="die"),
        Event(at_s=2.0, replica=1, kind="return"),
    )
    policy = random_policy(variant)
    runs = [
        simulate(cluster, table, policy, engine=engine, events=events, seed=2).requests
        for engine in (Engine(engine="reference"), Engine(exact=True), Engine(exact=True))
    ]
    assert len(np.unique(runs[0]["replica"])) > 1
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0]["replica"], other["replica"])
        np.testing.assert_allclose(runs[0]["finished_s"], other["finished_s"])


def test_routes_as_its_prior_in_the_simulator() -> None:
    table = library.make("sessions-hot", 80, 15.0, seed=8)
    cluster = Cluster(replicas=(Replica(count=3),))
    rule = simulate(cluster, table, "least_predicted_ttft", seed=2).requests["replica"]
    learned = simulate(cluster, table, silent("least_predicted_ttft"), seed=2).requests["replica"]
    assert (rule == learned).mean() > 0.9  # ties are drawn, float32 makes a few more


def test_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from tailrace.policy import registry\n"
        "from tailrace.policy.learned import checkpoint, explain, policy\n"
        "import tailrace.sim.simulator, tailrace.cli\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- explanations


@each_variant
def test_explanation_equals_torch(variant: str) -> None:
    torch = pytest.importorskip("torch")
    from tailrace.policy.learned.network import Network

    policy = random_policy(variant)
    config = policy.config
    network = Network(config, N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    network.load_tensors(policy.tensors)
    network.double()
    x, g, mask, prior = random_inputs(5, 3)
    memory = np.random.default_rng(0).normal(size=config.memory)
    explained = explain(policy, x, g, mask, prior if config.prior else None, memory)
    tx, tg, tmask, tprior, tmemory = (
        torch.from_numpy(v)[None] for v in (x, g, mask, prior, memory)
    )
    tx, tg = tx.double().requires_grad_(), tg.double().requires_grad_()
    logits = network.step(tx, tg, tmask, tmemory, tprior.double())[0][0]
    np.testing.assert_allclose(explained.logits, logits.detach(), atol=1e-9)
    np.testing.assert_allclose(explained.probabilities, logits.detach().softmax(0), atol=1e-9)
    attention = network.attention(tx, tg, tmask)[0]
    np.testing.assert_allclose(explained.attention, attention.detach(), atol=1e-9)
    for i in range(5):
        if not mask[i]:
            assert not explained.replica_gradients[i].any()
            assert not explained.request_gradients[i].any()
            continue
        standing = logits[i] - logits[tmask[0]].mean()
        of_x, of_g = torch.autograd.grad(standing, (tx, tg), retain_graph=True)
        got, expected = explained.replica_gradients[i], of_x[0, i] * network.replica_norm.std
        np.testing.assert_allclose(got, expected, atol=1e-6)
        got, expected = explained.request_gradients[i], of_g[0] * network.request_norm.std
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_explains_a_view_s_choice() -> None:
    policy = random_policy()
    view = make_view(3, in_flight=[5, 0, 2], available=[1, 1, 0])
    explained = explain(policy, *observed(view), view.replicas["available"] != 0)
    chosen = choose(policy.scores(view), view.replicas, view.router, False)
    assert chosen == explained.probabilities.argmax()
    assert explained.probabilities.sum() == pytest.approx(1)
    assert explained.probabilities[2] == 0
