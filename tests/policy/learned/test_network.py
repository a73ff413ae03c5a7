"""The trainable network: masks, symmetry, memory, prior, initialisation, gradients."""

from typing import Any

import numpy as np
import pytest

from policy.networks import SMALL, VARIANTS, random_inputs, small
from tailrace.policy.learned.architecture import FEATURE_NAMES, NetworkConfig, pack, tensor_shapes
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.policy.learned.policy import forward_many

torch = pytest.importorskip("torch")
from tailrace.policy.learned.network import Network, RunningNorm  # noqa: E402

torch.set_num_threads(1)
F, G = 9, 4
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def network(variant: str = "plain", noise: float = 0.2, **changes: Any) -> Network:
    """A network off its initial weights, since those hide mistakes in the last layer."""
    torch.manual_seed(1)
    made = Network(small(variant, **changes), F, G)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += noise * torch.randn_like(parameter)
    made.update_norms(1 + 2 * torch.randn(30, 4, F), torch.randn(30, G), torch.rand(30, 4) < 0.8)
    return made


def batch(size: int, n: int, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    inputs = [random_inputs(n, 1000 * seed + k, F, G) for k in range(size)]
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*inputs, strict=True))


@each_variant
@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_any_number_of_replicas(variant: str, n: int) -> None:
    x, g, mask, prior = batch(6, n)
    logits, value = network(variant)(x, g, mask, prior)
    assert logits.shape == (6, n)
    assert value.shape == (6,)
    assert torch.isfinite(logits[mask]).all()
    assert (logits[~mask] == -torch.inf).all()
    assert torch.isfinite(value).all()


@each_variant
def test_the_tensors_are_those_the_layout_expects(variant: str) -> None:
    made = network(variant)
    shapes = {name: array.shape for name, array in made.tensors().items()}
    assert shapes == tensor_shapes(made.config, F, G)
    other = Network(made.config, F, G)
    other.load_tensors(made.tensors())
    x, g, mask, prior = batch(2, 3)
    assert torch.equal(other(x, g, mask, prior)[0], made(x, g, mask, prior)[0])


@each_variant
def test_permuting_replicas_permutes_logits(variant: str) -> None:
    made = network(variant)
    x, g, mask, prior = batch(8, 6)
    logits, value = made(x, g, mask, prior)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    again, same = made(x[:, order], g, mask[:, order], prior[:, order])
    torch.testing.assert_close(again, logits[:, order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(same, value, rtol=1e-5, atol=1e-5)


@each_variant
def test_a_masked_replica_is_as_good_as_absent(variant: str) -> None:
    made = network(variant)
    x, g, _, prior = batch(4, 5)
    mask = torch.tensor([[True, False, True, True, False]]).expand(4, 5)
    left = [0, 2, 3]
    logits, value = made(x, g, mask, prior)
    fewer, same = made(x[:, left], g, mask[:, left], prior[:, left])
    torch.testing.assert_close(logits[:, left], fewer, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value, same, rtol=1e-5, atol=1e-5)


@each_variant
def test_a_state_without_any_replica_spoils_no_gradient(variant: str) -> None:
    made = network(variant)
    x, g, mask, prior = batch(3, 4)
    mask[1] = False
    logits, value = made(x, g, mask, prior)
    assert torch.isfinite(value).all()
    (logits[mask].sum() + value.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in made.parameters())


def test_starts_near_uniform_and_orthogonal() -> None:
    torch.manual_seed(3)
    made = Network(NetworkConfig(), F, G)
    x, g, mask, _ = batch(32, 4)
    logits, _ = made(x, g, mask)
    assert logits[mask].std() < 0.05
    weight = made.actor.hidden.weight
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(64), rtol=1e-4, atol=1e-4)
    assert not made.actor.hidden.bias.any()


def test_a_prior_is_what_step_0_plays() -> None:
    made = Network(small("prior"), F, G)
    x, g, mask, prior = batch(5, 4)
    logits, _ = made(x, g, mask, prior)
    torch.testing.assert_close(logits[mask], -1.5 * prior[mask])
    with pytest.raises(ValueError, match="needs the scores of its prior load_aware"):
        made(x, g, mask)


def used(made: Network) -> set[str]:
    """The parts of a network that got a gradient."""
    return {
        name.split(".")[0]
        for name, parameter in made.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().sum() > 0
    }


@pytest.mark.parametrize(
    ("variant", "by_logits", "by_value"),
    [
        ("plain", {"actor", "scorer"}, {"actor", "value_head"}),
        ("memory", {"actor", "scorer", "gru"}, {"actor", "value_head", "gru"}),
        ("decoupled", {"actor", "scorer"}, {"critic", "value_head"}),
        ("critic_memory", {"actor", "scorer", "gru"}, {"critic", "value_head", "critic_gru"}),
    ],
)
def test_gradients_reach_what_they_should(
    variant: str, by_logits: set[str], by_value: set[str]
) -> None:
    x, g, mask, prior = batch(5, 4)
    for which, expected in ((0, by_logits), (1, by_value)):
        made = network(variant)
        out = made(x, g, mask, prior)[which]
        (out[torch.isfinite(out)] ** 2).sum().backward()
        assert used(made) == expected
        # Of a part that is used, every tensor is. (A GRU's memory weights need a memory.)
        for name, parameter in made.named_parameters():
            if name.split(".")[0] in expected and not name.endswith("gru.weight_hh"):
                assert parameter.grad.abs().sum() > 0, name


@each_variant
def test_decisions_in_a_row_give_the_probabilities_they_were_made_with(variant: str) -> None:
    """The ratio of PPO is 1 on unchanged weights, over episode borders too."""
    made = network(variant)
    steps, clusters = 7, 3
    x, g, mask, prior = (part.unflatten(0, (steps, clusters)) for part in batch(21, 4))
    starts = torch.zeros(steps, clusters, dtype=torch.bool)
    starts[0, :2] = True
    starts[4, 1] = True
    first = torch.randn_like(made.first_memory(clusters))
    memory, acted = first, []
    for t in range(steps):
        memory = memory * (~starts[t])[:, None]
        logits, value, memory = made.step(x[t], g[t], mask[t], memory, prior[t])
        acted.append((logits, value))
    logits, value, last = made.sequence(x, g, mask, first, starts, prior)
    old = torch.stack([a for a, _ in acted]).log_softmax(-1)
    ratio = (logits.log_softmax(-1) - old)[mask].exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    torch.testing.assert_close(value, torch.stack([v for _, v in acted]), rtol=1e-5, atol=1e-5)
    if made.config.memory:
        torch.testing.assert_close(last, memory, rtol=1e-5, atol=1e-5)


def test_memory_matters_and_a_start_empties_it() -> None:
    made = network("memory")
    x, g, mask, _ = (part.unsqueeze(0) for part in batch(4, 3))
    go_on, begin = torch.zeros(1, 4, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    memory = torch.randn(4, made.config.memory)
    kept = made.sequence(x, g, mask, memory, go_on)[0][mask]
    emptied = made.sequence(x, g, mask, memory, begin)[0][mask]
    assert not torch.allclose(kept, emptied, atol=1e-3)
    torch.testing.assert_close(emptied, made(x[0], g[0], mask[0])[0][mask[0]])


def test_the_values_own_memory_is_what_a_sequence_makes_of_it() -> None:
    made = network("critic_memory")
    units, steps, clusters = made.config.memory, 6, 3
    x, g, mask, _ = (part.unflatten(0, (steps, clusters)) for part in batch(18, 4))
    starts = torch.zeros(steps, clusters, dtype=torch.bool)
    starts[3, 1] = True
    own = made.critic_memories(x, g, mask, starts)
    assert own.shape == (steps + 1, clusters, made.config.critic_memory)
    for t in range(steps + 1):
        memory = made.first_memory(clusters)
        if t:
            memory = made.sequence(x[:t], g[:t], mask[:t], memory, starts[:t])[2]
        torch.testing.assert_close(own[t], memory[:, units:])


def test_attention_is_a_distribution_over_available_replicas() -> None:
    made = network()
    x, g, mask, _ = batch(5, 6)
    weights = made.attention(x, g, mask)
    assert weights.shape == (5, made.config.heads, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, made.config.heads, 6))
    assert not weights.transpose(1, 3)[~mask].any()


def test_running_moments_are_those_of_all_values() -> None:
    rng = np.random.default_rng(0)
    norm = RunningNorm(2)
    parts = [rng.normal([5, -1], [3, 0.001], (k, 2)) for k in (1, 10, 0, 200)]
    for part in parts:
        norm.update(torch.from_numpy(part).float())
    values = np.concatenate(parts)
    np.testing.assert_allclose(norm.mean, values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.var[0], values[:, 0].var(), rtol=1e-5)
    assert norm.count == 211
    assert norm.std[1] == pytest.approx(0.1)  # hardly varied: not blown up
    x = torch.randn(4, 2)
    torch.testing.assert_close(norm.denormalise(norm.normalise(x)), x, rtol=1e-4, atol=1e-4)


def test_the_normaliser_leaves_masked_replicas_out() -> None:
    made = Network(small(), F, G)
    x, g = torch.zeros(2, 3, F), torch.zeros(2, G)
    x[:, 2] = 1e6
    mask = torch.tensor([[True, True, False]] * 2)
    made.update_norms(x, g, mask)
    assert made.replica_norm.count == 4
    assert not made.replica_norm.mean.any()


@each_variant
def test_features_that_vary_for_the_first_time_are_normalised_and_begin_without_weight(
    variant: str,
) -> None:
    made = network(variant)
    made.replica_norm.var[2], made.request_norm.var[1] = 1e-4, 0.0
    made.replica_norm.mean[2], made.request_norm.mean[1] = 3.0, 0.0
    x, g, mask, prior = batch(6, 4)
    x[..., 2], g[:, 1] = 3.0, 0.0
    before, _ = made(x, g, mask, prior)
    kept = made.replica_norm.mean.clone()
    made.learn_new_norms(5 + 2 * torch.randn(4000, F), 1 + torch.randn(4000, G))
    assert made.replica_norm.mean[2] == pytest.approx(5, abs=0.2)
    assert made.replica_norm.var[2] == pytest.approx(4, rel=0.1)
    assert made.request_norm.mean[1] == pytest.approx(1, abs=0.1)
    kept[2] = made.replica_norm.mean[2]
    assert (made.replica_norm.mean == kept).all()
    torch.testing.assert_close(made(x, g, mask, prior)[0], before)
    x[..., 2], g[:, 1] = 9.0, 4.0  # far from what it knew: no influence before it is learnt
    torch.testing.assert_close(made(x, g, mask, prior)[0], before)


def test_a_feature_that_still_does_not_vary_is_left_alone() -> None:
    made = network()
    made.replica_norm.var[2] = 1e-4
    weight = made.actor.input.weight.detach().clone()
    rows = torch.randn(100, F)
    rows[:, 2] = 7.0
    made.learn_new_norms(rows, torch.randn(100, G))
    assert (made.actor.input.weight == weight).all()
    assert made.replica_norm.var[2] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": 7, "heads": 2}, "attention = 7 is no multiple of heads = 2"),
        ({"prior": "load_awar"}, "unknown rule for a prior 'load_awar'; did you mean load_aware"),
        ({"prior": "lookahead"}, "unknown rule for a prior 'lookahead'"),
        ({"prior": "random", "prior_params": {"x": 1}}, "policy random has no parameters"),
        ({"prior_params": {"x": 1}}, "prior_params are given, but no prior"),
        ({"memory": 4, "critic_memory": 4}, "critic_memory needs memory and decoupled_critic"),
        ({"hiden": 3}, "Extra inputs are not permitted"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NetworkConfig(**(SMALL | settings))


def test_ignored_features_change_nothing_even_when_trained_or_compiled() -> None:
    torch.manual_seed(3)
    config = NetworkConfig(hidden=8, attention=4, heads=2, ignore=("cached", "prompt"))
    network = Network(config, N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    x, g = torch.randn(16, 3, N_REPLICA_FEATURES), torch.randn(16, N_REQUEST_FEATURES)
    mask = torch.ones(16, 3, dtype=torch.bool)
    network.update_norms(x, g, mask)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(5):
        logits, values = network(x, g, mask)
        optimiser.zero_grad()
        (logits[:, 0].mean() + values.mean()).backward()
        optimiser.step()
    other_x, other_g = x.clone(), g.clone()
    other_x[:, :, FEATURE_NAMES.index("cached")] += 5.0
    other_g[:, FEATURE_NAMES.index("prompt") - N_REPLICA_FEATURES] -= 5.0
    with torch.no_grad():
        before, after = network(x, g, mask)[0], network(other_x, other_g, mask)[0]
        seen = network(x + 5.0, g, mask)[0]
    assert torch.allclose(before, after, atol=1e-6)
    assert not torch.allclose(before, seen, atol=1e-2)
    packed = pack(config, network.tensors())
    logits = np.zeros((16, 3), np.float32)
    nothing = np.zeros((16, 3), np.float32)
    forward_many(
        packed, other_x.numpy(), other_g.numpy(), np.ones((16, 3), np.float32), nothing,
        np.zeros((16, 0), np.float32), logits,
    )  # fmt: skip
    np.testing.assert_allclose(logits, before.numpy(), atol=1e-5)


def test_an_unknown_feature_to_ignore_is_named() -> None:
    with pytest.raises(ValueError, match="cached"):
        NetworkConfig(ignore=("cachd",))
