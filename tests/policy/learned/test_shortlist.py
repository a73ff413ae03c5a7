"""A learned policy in a large cluster: it looks at a shortlist, and the others stand behind it."""

import numpy as np
import pytest

from policy.networks import random_inputs, random_tensors, small
from tailrace.errors import TailraceError
from tailrace.policy.learned.architecture import SKETCH, looked_at, pack
from tailrace.policy.learned.inference import forward
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.policy.learned.policy import LearnedPolicy

FEATURES, GLOBALS = 11, 6


def made(shortlist, seed=0, **options):
    config = small(shortlist=shortlist, **options)
    tensors = random_tensors(config, seed, FEATURES, GLOBALS)
    tensors[SKETCH] = np.random.default_rng(seed).normal(size=FEATURES).astype(np.float32)
    return config, tensors


def logits_of(params, inputs):
    replica_obs, request_obs, mask, prior = inputs
    out = np.zeros(len(mask))
    forward(params, replica_obs, request_obs, mask, prior, out)
    return out


@pytest.mark.parametrize("replicas", [3, 5, 6, 9, 30])
@pytest.mark.parametrize("seed", range(4))
def test_those_on_the_list_are_scored_as_if_they_were_alone(replicas, seed):
    config, tensors = made(5, seed)
    inputs = random_inputs(replicas, seed, FEATURES, GLOBALS)
    inputs[3][:] = 0
    got = logits_of(pack(config, tensors), inputs)
    listed = looked_at(config, tensors, inputs[0], inputs[2])
    assert listed.sum() == min(inputs[2].sum(), 5 if replicas > 5 else replicas)
    alone = [inputs[0][listed], inputs[1], inputs[2][listed], inputs[3][listed]]
    without = {name: tensor for name, tensor in tensors.items() if name != SKETCH}
    np.testing.assert_allclose(got[listed], logits_of(pack(config, without), alone), atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_others_stand_behind_in_the_order_of_the_sketch(seed):
    config, tensors = made(4, seed)
    inputs = random_inputs(20, seed, FEATURES, GLOBALS)
    inputs[2][:] = True
    got = logits_of(pack(config, tensors), inputs)
    listed = looked_at(config, tensors, inputs[0], inputs[2])
    assert got[~listed].max() <= got[listed].min()
    sketched = (inputs[0] @ tensors[SKETCH])[~listed]
    assert (np.argsort(got[~listed]) == np.argsort(sketched)).all()


def test_the_order_of_the_replicas_does_not_matter():
    config, tensors = made(4)
    params = pack(config, tensors)
    inputs = random_inputs(20, 1, FEATURES, GLOBALS)
    got = logits_of(params, inputs)
    order = np.random.default_rng(0).permutation(20)
    moved = [inputs[0][order], inputs[1], inputs[2][order], inputs[3][order]]
    np.testing.assert_allclose(logits_of(params, moved), got[order], atol=1e-5)


def test_fewer_available_than_the_list_is_long_and_none():
    config, tensors = made(8)
    params = pack(config, tensors)
    inputs = random_inputs(20, 2, FEATURES, GLOBALS)
    inputs[2][:] = False
    assert (logits_of(params, inputs) == -np.inf).all()
    inputs[2][[3, 17]] = True
    got = logits_of(params, inputs)
    assert (np.isfinite(got) == inputs[2]).all()


def test_without_a_sketch_all_are_looked_at():
    config, tensors = made(4)
    del tensors[SKETCH]
    inputs = random_inputs(9, 0, FEATURES, GLOBALS)
    assert looked_at(config, tensors, inputs[0], inputs[2]) is inputs[2]
    wide = config.model_copy(update={"shortlist": 100})
    got, all_ = (logits_of(pack(c, tensors), inputs) for c in (config, wide))
    assert (got == all_).all()


def test_a_sketch_of_another_length_is_refused():
    config = small()
    tensors = random_tensors(config, 0, N_REPLICA_FEATURES, N_REQUEST_FEATURES)
    with pytest.raises(TailraceError, match=r"sketch.weight"):
        LearnedPolicy(config, {**tensors, SKETCH: np.zeros(3, np.float32)})
