import numpy as np
import pytest

from tailrace.learn.samples import Samples, join


def samples(costs: list[list[float]], mask: list[list[bool]], world: int = 0) -> Samples:
    made = Samples.empty(len(costs), len(costs[0]), world)
    made.costs[:] = costs
    made.mask[:] = mask
    return made


def test_advantages_are_centred_on_possible_choices_and_scaled_per_world():
    one = samples([[1.0, 3.0, 9.0], [2.0, 2.0, 2.0]], [[True, True, False], [True] * 3], 0)
    ten = samples([[10.0, 30.0, 0.0]], [[True, True, False]], 1)
    advantages = join([one, ten]).advantages()
    assert advantages[0, 0] == -advantages[0, 1] > 0
    assert advantages[0, 2] == advantages[2, 2] == 0
    assert (advantages[1] == 0).all()
    # Ten times the costs in another world: the same advantages but for that world's own spread.
    assert advantages[2, 0] == pytest.approx(1.0)


def test_joining_pads_smaller_clusters_with_impossible_choices():
    joined = join([samples([[1.0, 2.0]], [[True, True]]), samples([[1.0, 2.0, 3.0]], [[True] * 3])])
    assert joined.mask.tolist() == [[True, True, False], [True, True, True]]
    assert np.isinf(joined.costs[0, 2])
    assert joined.replica_obs.shape[:2] == (2, 3)
    assert np.isfinite(joined.advantages()).all()
