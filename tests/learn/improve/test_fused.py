"""The fast pass against the network's own, values and gradients."""

import pytest

torch = pytest.importorskip("torch")

from policy.networks import small  # noqa: E402
from tailrace.learn.improve import fused  # noqa: E402
from tailrace.learn.improve.experience import log_behaviour, log_policy  # noqa: E402
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


def both(network: Network, *given: torch.Tensor | None):
    """Logits, values and gradients of a random function of them, by either pass."""
    found = []
    for forward in (network, lambda *inputs: fused.forward(network, *inputs)):
        network.zero_grad()
        logits, values = forward(*given)
        mask = given[2]
        rng = torch.Generator().manual_seed(1)
        scores = logits.masked_fill(~mask, 0.0) * torch.randn(mask.shape, generator=rng)
        (scores.sum() + (values * torch.randn(len(mask), generator=rng)).sum()).backward()
        grads = {name: p.grad.clone() for name, p in network.named_parameters()}
        found.append((logits.detach(), values.detach(), grads))
    return found


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


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_choices_are_those_of_the_policy(temperature, epsilon):
    torch.manual_seed(4)
    mask = torch.rand(1, 6, 5) < 0.7
    mask[..., :2] = True
    choice = torch.randint(2, (1, 6, 1))
    found = []
    for way in ("torch", "fused"):
        torch.manual_seed(5)
        scores = (3 * torch.randn(1, 6, 5)).requires_grad_()
        logits = scores.masked_fill(~mask, -torch.inf)
        if way == "fused":
            log_prob, entropy = fused.choices(logits, mask, choice, temperature, epsilon)
        else:
            policy = log_policy(logits, mask, temperature)
            log_prob = log_behaviour(policy, mask, choice, epsilon)
            entropy = -(policy.exp() * policy).sum(-1)
        (log_prob.sin().sum() + 0.3 * (entropy**2).sum()).backward()
        found.append((log_prob, entropy, scores.grad))
    for slow, fast in zip(*found, strict=True):
        assert slow.abs().max() > 0
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
