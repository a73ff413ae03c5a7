"""Learning from branches: every estimate of the advantage and both objectives share one learner."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learn.imitate.test_fit import fresh_network, rng, toy  # noqa: E402
from learn.played import learn, network_of, pays, play, settings  # noqa: E402
from policy.networks import random_tensors  # noqa: E402
from tailrace.errors import TailraceError  # noqa: E402
from tailrace.learn.exploration import ExplorationValues  # noqa: E402
from tailrace.learn.imitate.fit import ImitationDataset  # noqa: E402
from tailrace.learn.improve.experience import log_policies, of_branches  # noqa: E402
from tailrace.learn.improve.learner import Learner  # noqa: E402
from tailrace.learn.improve.objective import clipped, tilted_targets  # noqa: E402
from tailrace.learn.samples import Samples  # noqa: E402
from tailrace.learn.settings import BranchingSettings  # noqa: E402

IMPROVING = {"kl_limit": 0.03, "epochs": 12, "minibatch": 128, "learning_rate": 4e-3,
             "final_learning_rate": 4e-3}  # fmt: skip


def improve(network, groups, objective="kl_limited", demonstrations=(), **changes):
    """One update from branches; returns its metrics."""
    learner = Learner(network, BranchingSettings(**IMPROVING | changes), 1, objective)
    seen = [of_branches(network, group) for group in groups]
    return learner.learn(seen, ExplorationValues(), 0, rng(), demonstrations)


def policy(network, samples: Samples):
    return log_policies(network, of_branches(network, samples), 1.0)[0].exp()


# ---- objectives ---------------------------------------------------------------------------------


def test_the_clipped_objective_by_hand():
    """One choice of weight 1 is PPO's loss; several, weighted by old probability, its mean."""
    change = torch.log(torch.tensor([[1.5, 0.5]]))
    advantage = torch.tensor([[2.0, -1.0]])
    first = clipped(change[:, :1], advantage[:, :1], torch.ones(1, 1), 0.2)
    second = clipped(change[:, 1:], advantage[:, 1:], torch.ones(1, 1), 0.2)
    assert float(first) == pytest.approx(-1.2 * 2)
    assert float(second) == pytest.approx(0.8)
    both = clipped(change, advantage, torch.tensor([[0.25, 0.75]]), 0.2)
    assert float(both) == pytest.approx(0.25 * float(first) + 0.75 * float(second), abs=1e-6)


def test_targets_tilt_the_policy_to_the_limit():
    old = torch.log_softmax(torch.randn(50, 3, generator=rng()), -1)
    advantage = torch.randn(50, 3, generator=rng())
    eta, (target,) = tilted_targets([old], [advantage], [torch.ones(50, 3, dtype=bool)], 0.03)
    kl = (target * (target.log() - old)).sum(-1).mean()
    assert float(kl) == pytest.approx(0.03, rel=1e-3)
    by_hand = torch.softmax(old + eta * advantage, -1)
    torch.testing.assert_close(target, by_hand)


# ---- branches -----------------------------------------------------------------------------------


def test_a_kl_limited_update_raises_the_advantage_and_keeps_to_its_limit():
    network, samples = fresh_network(), toy()
    told = improve(network, [samples, toy(replicas=3, seed=4)])
    assert told["gain"] > 0.05
    assert 0.005 < told["kl"] < 0.06
    assert told["eta"] > 0
    assert 0 < told["entropy_fraction"] < 1
    wider = improve(fresh_network(), [samples], kl_limit=0.3)
    assert wider["kl"] > 2 * told["kl"]


def test_a_clipped_update_learns_from_branches_too():
    network, samples = fresh_network(), toy()
    costs = torch.from_numpy(samples.costs).float()
    before = float((policy(network, samples) * costs).sum(-1).mean())
    told = improve(network, [samples], "clipped", learning_rate=1e-2)
    after = float((policy(network, samples) * costs).sum(-1).mean())
    assert after < before - 0.05
    assert 0 < told["clip_fraction"] < 1
    assert "value_loss" not in told


def test_choices_that_were_not_tried_keep_their_share():
    network, samples = fresh_network(), toy()
    samples.mask[:] = True
    samples.tried[:] = [True, True, True, False]
    before = float(policy(network, samples)[:, 3].mean())
    improve(network, [samples])
    assert float(policy(network, samples)[:, 3].mean()) == pytest.approx(before, abs=0.02)


def test_demonstrations_hold_an_update_back_by_their_weight():
    """The teacher wants the opposite of what branches say."""
    samples, opposite = toy(300), toy(300)
    opposite.costs[:] = -opposite.costs
    datasets = [ImitationDataset.of(opposite, 0.1)]
    gains = [
        improve(fresh_network(), [samples], demonstrations=datasets, imitation_weight=weight)[
            "gain"
        ]
        for weight in (0.0, 0.02, 1.0)
    ]
    assert gains[0] > gains[1] > gains[2]
    assert gains[2] < 0
    assert improve(fresh_network(), [samples])["gain"] == gains[0]


def test_equal_choices_are_nothing_to_learn_from():
    samples = toy()
    samples.costs[:] = 1.0
    with pytest.raises(TailraceError, match=r"no choice makes any difference.*raise the load"):
        improve(fresh_network(), [samples])


def test_a_loss_that_is_no_number_is_refused():
    poisoned = toy()
    poisoned.replica_obs[3, 0, 0] = np.nan
    with pytest.raises(TailraceError, match=r"not finite.*lower branching.learning_rate"):
        improve(fresh_network(), [poisoned])


def test_memory_and_prior_belong_to_what_is_seen():
    network = fresh_network(memory=3, prior="load_aware")
    network.load_tensors(random_tensors(network.config))
    made = toy(rows=4)
    samples = Samples(**{**made.arrays(), "memory": np.zeros((4, 3), np.float32)})
    samples.mask[:] = True
    plain = policy(network, samples)
    samples.memory[:] = 5.0
    remembering = policy(network, samples)
    assert (remembering != plain).any()
    samples.prior[:, 1] = 3.0  # a high score is a bad one
    assert (policy(network, samples)[:, 1] < remembering[:, 1] * 0.5).all()


# ---- rollouts -----------------------------------------------------------------------------------


def test_a_kl_limited_update_learns_from_rollouts_too():
    network = network_of()
    options = settings(discount_by="decision", gamma=0.1, gae_lambda=0.0, kl_limit=0.05)
    learner = Learner(network, options, 25, "kl_limited")
    told = learn(learner, range(25))
    assert told["kl"] < 0.2
    assert play(network, np.random.default_rng(10**6), pays).reward.mean() > 0.85


def test_the_wrong_sign_of_the_advantage_makes_it_worse():
    """Whoever turns a cost into a reward twice would see this fail."""

    def costs(replica_obs, action):
        return -pays(replica_obs, action)

    network = network_of()
    learner = Learner(network, settings(discount_by="decision", gamma=0.1, gae_lambda=0.0), 15)
    for number in range(15):
        rollout = play(network, np.random.default_rng(number), costs)
        learner.update(
            [rollout], ExplorationValues(), number, torch.Generator().manual_seed(number)
        )
    assert play(network, np.random.default_rng(10**6), pays).reward.mean() < 0.2
