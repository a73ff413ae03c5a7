import numpy as np
import pytest

from tailrace.learn.samples import Samples, by_cluster_size


def samples(costs, tried, world=0) -> Samples:
    made = Samples.empty(len(costs), len(costs[0]), world, memory=2)
    made.costs[:] = costs
    made.tried[:] = tried
    made.mask[:] = True
    return made


def test_regrets_are_against_the_cheapest_choice_that_was_tried():
    made = samples(
        [[1.0, 3.0, 0.0], [5.0, 2.0, 4.0], [0.0, 0.0, 0.0]],
        [[True, True, False], [True] * 3, [False] * 3],
    )
    assert made.regrets().tolist() == [[0, 2, 0], [3, 0, 2], [0, 0, 0]]


def test_advantages_are_centred_on_choices_tried_and_scaled_per_world():
    one = samples([[1.0, 3.0, 9.0], [2.0, 2.0, 2.0]], [[True, True, False], [True] * 3], 0)
    ten = samples([[10.0, 30.0, 0.0]], [[True, True, False]], 1)
    (joined,) = by_cluster_size([one, ten])
    advantages = joined.advantages()
    # Minus the costs 1 and 3, centred: 1 and -1; over the deviation of (1, -1, 0, 0, 0).
    assert advantages[0].tolist() == pytest.approx([np.sqrt(5 / 2), -np.sqrt(5 / 2), 0])
    assert (advantages[1] == 0).all()
    # Ten times the costs in another world: as large as any, but for that world's own spread.
    assert advantages[2].tolist() == pytest.approx([1, -1, 0])


def test_groups_by_number_of_replicas_keep_the_order_of_what_they_join():
    parts = [
        samples([[1.0, 2.0, 3.0]], [[True] * 3], world=7),
        samples([[4.0, 5.0]], [[True] * 2], world=8),
        samples([[6.0, 7.0, 8.0], [9.0, 9.0, 9.0]], [[True] * 3] * 2, world=9),
        Samples.empty(0, 5, 1),
    ]
    two, three = by_cluster_size(parts)
    assert (two.replicas, three.replicas) == (2, 3)
    assert three.world.tolist() == [7, 9, 9]
    assert three.costs[:, 0].tolist() == [1, 6, 9]
    # In steps or at once: a resumed run collects all its demonstrations at once.
    stepwise = by_cluster_size([*by_cluster_size(parts[:2]), *parts[2:]])
    assert [g.costs.tolist() for g in stepwise] == [g.costs.tolist() for g in (two, three)]


def test_head_and_arrays():
    made = samples([[1.0, 2.0], [3.0, 4.0]], [[True] * 2] * 2)
    assert len(made.head(1)) == 1
    assert made.head(1).memory.shape == (1, 2)
    assert Samples(**made.arrays()).costs.tolist() == made.costs.tolist()
