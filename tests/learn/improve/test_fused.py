"""The fast pass against the network's own, values and gradients."""

import pytest

torch = pytest.importorskip("torch")

from policy.networks import small  # noqa: E402
from tailrace.errors import TailraceError  # noqa: E402
from tailrace.learn.exploration import ExplorationValues  # noqa: E402
from tailrace.learn.improve import fused  # noqa: E402
from tailrace.learn.improve.experience import Experience  # noqa: E402
from tailrace.learn.improve.learner import Learner  # noqa: E402
from tailrace.learn.improve.ppo_settings import PpoSettings  # noqa: E402
from tailrace.policy.learned.network import Network  # noqa: E402

FEATURES, GLOBALS = 5, 3


def network_of(variant: str, **changes) -> Network:
    """With weights that matter everywhere and a normaliser that does something."""
    torch.manual_seed(0)
    network = Network(small(variant, **changes), FEATURES, GLOBALS)
    torch.nn.init.orthogonal_(network.scorer.output.weight, 1.0)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    network.replica_norm.update(torch.randn(50, FEATURES) * 3 + 2)
    network.request_norm.update(torch.randn(50, GLOBALS) * 0.3 - 2)
    return network


def by_torch(network: Network, given, of_logits, of_values):
    """Logits, values and the gradients that follow from those of the two."""
    network.zero_grad()
    logits, values = network(*given)
    ((logits.masked_fill(~given[2], 0.0) * of_logits).sum() + (values * of_values).sum()).backward()
    return logits.detach(), values.detach(), gradients(network)


def by_hand(network: Network, given, of_logits, of_values):
    """The same by the pass over tiles."""
    network.zero_grad()
    through, found = fused.NetworkPass(network), []
    for rows in fused.tiles(*given[2].shape):
        logits, values = through.forward(*(None if x is None else x[rows] for x in given))
        found.append((logits.clone(), values.clone()))
        through.backward(of_logits[rows], of_values[rows])
    through.set_gradients()
    logits, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logits, values, gradients(network)


def gradients(network: Network):
    return {name: p.grad.clone() for name, p in network.named_parameters()}


def both(network: Network, *given: torch.Tensor | None):
    """Logits, values and gradients of a random function of them, by either pass."""
    mask, rng = given[2], torch.Generator().manual_seed(1)
    of_logits = torch.randn(mask.shape, generator=rng) * mask
    of_values = torch.randn(len(mask), generator=rng)
    return [way(network, given, of_logits, of_values) for way in (by_torch, by_hand)]


@pytest.fixture(params=["oneDNN", "torch"])
def products(request, monkeypatch):
    """With oneDNN's matrix products, and with torch's, as builds without oneDNN have them."""
    if request.param == "torch":
        monkeypatch.setattr(fused, "_onednn", None)
    elif fused._onednn is None:
        pytest.skip("this torch has no oneDNN")


@pytest.fixture(params=[1, 6, 4096])
def tile_rows(request, monkeypatch):
    """A state at a time, tiles of different sizes, and all at once."""
    monkeypatch.setattr(fused, "TILE_ROWS", request.param)


@pytest.mark.usefixtures("tile_rows", "products")
@pytest.mark.parametrize(
    ("variant", "attention", "heads"),
    [("plain", 6, 3), ("decoupled", 6, 3), ("prior", 6, 3), ("plain", 32, 2), ("plain", 40, 1)],
)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_values_and_gradients_are_those_of_the_network(variant, attention, heads, n):
    """Heads of less than a vector, of one, and of two and a half."""
    network = network_of(variant, attention=attention, heads=heads)
    torch.manual_seed(2)
    mask = torch.rand(7, n) < 0.7
    mask[:, 0] = True
    mask[3] = False  # no replica at all
    inputs = (torch.randn(7, n, FEATURES) * 2, torch.randn(7, GLOBALS), mask)
    prior = torch.randn(7, n) if network.config.prior else None
    (logits, values, grads), (fast_logits, fast_values, fast_grads) = both(network, *inputs, prior)
    torch.testing.assert_close(fast_logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast_values, values, rtol=1e-5, atol=1e-5)
    assert fast_grads.keys() == grads.keys()
    for name, grad in grads.items():
        tolerance = 1e-5 * max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(fast_grads[name], grad, rtol=1e-4, atol=tolerance, msg=name)
        if n > 1 or not name.endswith(("query.weight", "key.weight")):
            assert grad.abs().max() > 0


def test_equal_replicas_share_the_gradient_of_the_largest():
    network = network_of("plain")
    one = torch.randn(4, 1, FEATURES)
    inputs = (one.repeat(1, 3, 1), torch.randn(4, GLOBALS), torch.ones(4, 3, dtype=torch.bool))
    (_, values, grads), (_, fast_values, fast_grads) = both(network, *inputs, None)
    torch.testing.assert_close(fast_values, values, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(fast_grads[name], grad, rtol=1e-3, atol=1e-4, msg=name)


def test_inputs_need_not_lie_in_order():
    network = network_of("plain")
    torch.manual_seed(3)
    x = torch.randn(FEATURES, 3, 4).permute(2, 1, 0)
    inputs = (x, torch.randn(GLOBALS, 4).T, torch.ones(3, 4, dtype=torch.bool).T)
    (logits, _, grads), (fast_logits, _, fast_grads) = both(network, *inputs, None)
    torch.testing.assert_close(fast_logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        fast_grads["actor.input.weight"], grads["actor.input.weight"], rtol=1e-4, atol=1e-5
    )


def test_a_network_with_a_prior_needs_its_scores():
    network = network_of("prior")
    inputs = (torch.randn(2, 3, FEATURES), torch.randn(2, GLOBALS), torch.ones(2, 3).bool())
    with pytest.raises(ValueError, match="needs the scores of its prior"):
        fused.forward(network, *inputs, None)


def test_memory_is_kept_for_a_few_shapes_only():
    network = network_of("plain")
    through = fused.NetworkPass(network)
    for states in range(1, 40):
        given = (torch.randn(states, 2, FEATURES), torch.randn(states, GLOBALS))
        through.forward(*given, torch.ones(states, 2).bool(), None)
    assert len(through._actor._spaces) <= fused.MOST_SHAPES


# ---- loss ---------------------------------------------------------------------------------------


def experience(states: int, n: int) -> Experience:
    """Decisions of which some ratios and values are beyond their bounds."""
    rng = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, states, *shape, generator=rng)

    mask = torch.rand(1, states, n, generator=rng) < 0.7
    mask[..., :2] = True
    unused = torch.zeros(1, states, 0)
    return Experience(
        replica_obs=normal(n, FEATURES),
        request_obs=normal(GLOBALS),
        mask=mask,
        prior=normal(n),
        starts=torch.zeros(1, states, dtype=torch.bool),
        memory=torch.zeros(states, 0),
        choice=torch.randint(2, (1, states, 1), generator=rng),
        log_prob=-1.0 + 0.5 * normal(1),
        advantage=normal(1),
        weight=torch.ones(1, states, 1),
        returns=normal(),
        value=normal(),
        log_policy=torch.log_softmax(normal(n).masked_fill(~mask, -torch.inf), -1).masked_fill(
            ~mask, 0.0
        ),
        start_log_policy=unused,
        target=unused,
    )


LEARNING = [
    {},
    {"value_clip": 0.3},
    {"kl_penalty": True, "target_kl": 0.02},
    {"max_grad_norm": 0.01},
]


@pytest.mark.usefixtures("tile_rows")
@pytest.mark.parametrize("changes", LEARNING, ids=str)
@pytest.mark.parametrize(
    "exploration", [ExplorationValues(), ExplorationValues(0.05, 1.7, 0.2)], ids=["plain", "mixed"]
)
@pytest.mark.parametrize("variant", ["plain", "decoupled", "prior"])
def test_an_update_is_that_of_torch(monkeypatch, changes, exploration, variant):
    """Weights and metrics after two epochs of several minibatches."""
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(fused, "COMPILED", compiled)
        network = network_of(variant)
        settings = PpoSettings(minibatch=16, epochs=2, learning_rate=1e-3, **changes)
        learner = Learner(network, settings, 1)
        metrics = learner.learn(
            [experience(37, 4)], exploration, 0, torch.Generator().manual_seed(0)
        )
        found.append((metrics, dict(network.named_parameters())))
    (slow_metrics, slow), (fast_metrics, fast) = found
    assert fast_metrics.keys() == slow_metrics.keys()
    for name, value in slow_metrics.items():
        assert fast_metrics[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name
    assert 0 < slow_metrics["clip_fraction"] < 1
    for name, weight in slow.items():
        # Adam divides by the size of a gradient: what is nearly 0 is known by its sign only.
        close = torch.isclose(fast[name], weight, rtol=1e-3, atol=1e-4)
        assert close.float().mean() > 0.98, name
        torch.testing.assert_close(fast[name], weight, rtol=0.0, atol=7e-3, msg=name)


def test_a_number_that_is_none_is_refused():
    network, poisoned = network_of("plain"), experience(8, 3)
    poisoned.advantage[0, 3] = torch.nan
    learner = Learner(network, PpoSettings(minibatch=8), 1)
    with pytest.raises(TailraceError, match=r"not finite.*lower ppo.learning_rate"):
        learner.learn([poisoned], ExplorationValues(), 0, torch.Generator())
