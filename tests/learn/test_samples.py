import numpy as np
import pytest

from tailrace.errors import TailraceError
from tailrace.learn.samples import Samples, by_cluster_size, read_samples, write_samples


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


# ---- files --------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    """Five decisions over two replicas in a file."""
    made = samples([[0.0, 1.0]] * 5, [[True, True]] * 5, world=4)
    made.replica_obs[:] = np.random.default_rng(1).normal(size=made.replica_obs.shape)
    write_samples(made, tmp_path / "seen.npz")
    return tmp_path / "seen.npz"


def rewritten(path, **changes):
    """The same file with other arrays; None: without that one."""
    with np.load(path) as file:
        arrays = dict(file) | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def test_a_file_gives_back_what_was_written(path):
    found = read_samples(path, memory=2)
    assert len(found) == 5
    assert found.costs.tolist() == [[0.0, 1.0]] * 5
    assert (found.world == 4).all()
    # Files of before the names were written along.
    rewritten(path, replica_features=None, request_features=None)
    assert len(read_samples(path)) == 5


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"costs": None}, "it has no costs"),
        ({"extra": np.zeros(3)}, "it has extra, which is not part"),
        ({"replica_features": np.array(["queued"])}, "replica_features are not those"),
        (
            {"request_obs": np.zeros((5, 3), np.float32)},
            r"request_obs is float32 \[5, 3\], expected",
        ),
        ({"costs": np.zeros((5, 2), np.float32)}, "costs is float32"),
        ({"costs": np.full((5, 2), np.nan)}, "costs has numbers that are not finite"),
        ({"prior": np.zeros((4, 2))}, r"prior is float64 \[4, 2\], expected float64 \[5, 2\]"),
        ({"tried": np.zeros((5, 2), np.bool_)}, "needs a choice with a cost"),
        ({"mask": np.zeros((0, 2), np.bool_)}, "no decisions"),
        ({"world": np.array([object()] * 5)}, "allow_pickle=False"),
    ],
)
def test_a_file_with_anything_wrong_is_refused(path, changes, complaint):
    rewritten(path, **changes)
    with pytest.raises(TailraceError, match=f"seen.npz holds no demonstrations: .*{complaint}"):
        read_samples(path)


def test_observations_beyond_the_bounds_are_refused(path):
    found = read_samples(path)
    found.replica_obs[2, 1, 0] = 11
    write_samples(found, path)
    with pytest.raises(TailraceError, match=r"replica_obs has numbers beyond \+-10"):
        read_samples(path)


def test_what_is_no_such_file_is_refused(path, tmp_path):
    with pytest.raises(TailraceError, match="cannot read"):
        read_samples(tmp_path / "none.npz")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(TailraceError, match="holds no demonstrations"):
        read_samples(path)
    path.write_text("a,b")
    with pytest.raises(TailraceError, match=r"holds no demonstrations: it is no NumPy archive$"):
        read_samples(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(TailraceError, match="a single array"):
        read_samples(tmp_path / "one.npy")


def test_a_memory_of_another_size_is_refused(path):
    with pytest.raises(TailraceError, match="a memory of 2 units, and the network has 0"):
        read_samples(path, memory=0)
