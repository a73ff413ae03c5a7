"""The recorder: what it writes down is what the environments would have, wherever it sits."""

import numpy as np
import pytest

from policy.networks import random_tensors, small
from tailrace.config import Cluster, Engine, Event, Replica, Scenario, Workload
from tailrace.env.core import Core, EnvSettings
from tailrace.env.reward import RewardSettings
from tailrace.errors import TailraceError
from tailrace.learn.cost_ledger import PLACES, CostLedger
from tailrace.learn.improve.recorder import Recorder, Recording, warm_up
from tailrace.policy.base import Policy
from tailrace.policy.learned.architecture import pack
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.seeds import Purpose, seeds
from tailrace.sim import cost_accounts
from tailrace.sim.simulator import simulate
from tailrace.view.cost_model import cost_rows
from tailrace.view.devices import cost_of
from tailrace.view.objective import composite_cost
from tailrace.view.records import REQUEST_VIEW, ROUTER, View
from tailrace.view.replicas import idle_views

SEED = seeds(Purpose.TRAINING, 1)[0]
#: Every term counts, so that none can be wrong unseen.
REWARD = RewardSettings(
    e2e=0.3, soft_late=0.7, early=0.4, throughput=0.5, balance=0.2, improvement=0.3, relative=0.5,
    soft_centre=0.8, early_share=0.6, history_s=5.0,
)  # fmt: skip
SCENARIO = Scenario(
    name="three",
    cluster=Cluster(
        replicas=(Replica(count=2, num_blocks=3000), Replica(speed=0.5, num_blocks=3000))
    ),
    workload=Workload(name="sessions-hot", rate=40.0, ttft_slo_s=0.3),
    engine=Engine(exact=True),
    # Some requests are lost and some are sent again; for a while there are two replicas.
    events=(Event(at_s=1.5, replica=0, kind="die"), Event(at_s=2.5, replica=0, kind="return")),
)
DECISIONS, WARMUP = 96, 8


def recording(config=None, **changes) -> Recording:
    values = {"config": config or small("plain"), "decisions": 8, "chunk": 4, "seed": SEED}
    return Recording(**(values | changes))


def recorder_of(found=None, **changes) -> Recorder:
    asked = recording(**changes)
    params = pack(asked.config, random_tensors(asked.config))
    return Recorder(asked, params, (found if found is not None else []).append)


class Between(Policy):
    """Passes everything on to a recorder; overrules it where ``overrule`` says so."""

    def __init__(self, recorder, sent, overrule=lambda decision: False):
        self.recorder, self._sent, self._overrule = recorder, sent, overrule
        self.reset, self.first_token = recorder.reset, recorder.first_token
        self.finished, self.failed = recorder.finished, recorder.failed
        self._decision = -1

    def scores(self, view):
        scores = self.recorder.scores(view)
        self._decision += 1
        return -scores if self._overrule(self._decision) else scores

    def sent(self, replica, request_id, now):
        self._sent.append(replica)
        self.recorder.sent(replica, request_id, now)


def play(recorder: Policy, engine: str, decisions: int = DECISIONS + WARMUP):
    """Run the requests of an episode through a whole simulation."""
    core = Core((SCENARIO,), 1, EnvSettings(decisions=decisions, reward=REWARD))
    episode = core.episodes.make(SEED)
    return core, simulate(
        SCENARIO.cluster,
        episode.table,
        recorder,
        router=SCENARIO.router,
        engine=SCENARIO.engine.model_copy(update={"engine": engine}),
        events=SCENARIO.events,
        seed=SEED,
    )


# ---- the same as the environments ---------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize("engine", ["reference", "compiled"])
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_what_is_recorded_is_what_the_environment_shows_for_the_same_choices(engine, variant):
    found, sent = [], []
    recorder = recorder_of(
        found, config=small(variant), reward=REWARD, decisions=DECISIONS, chunk=8, warmup=WARMUP,
    )  # fmt: skip
    recorder.record(temperature=2.0, epsilon=0.1)
    core, result = play(Between(recorder, sent), engine)
    assert result.requests["reroutes"].any()
    assert (result.requests["status"] == 2).any()  # lost
    (rollout,) = found
    core.reset([SEED])
    for replica in sent[:WARMUP]:
        core.step(np.array([replica]))
    for t in range(DECISIONS):
        seen = core.observation()
        np.testing.assert_allclose(rollout.replica_obs[t, 0], seen["replicas"][0], atol=1e-6)
        np.testing.assert_allclose(rollout.request_obs[t, 0], seen["request"][0], atol=1e-6)
        np.testing.assert_array_equal(rollout.mask[t, 0], seen["mask"][0] != 0)
        reward, _ = core.step(rollout.action[t])
        assert rollout.reward[t, 0] == pytest.approx(reward[0], abs=1e-9), t
        assert rollout.elapsed_s[t, 0] == pytest.approx(core.step_out.elapsed_s[0], abs=1e-12)
    assert rollout.action.ravel().tolist() == sent[WARMUP : WARMUP + DECISIONS]
    np.testing.assert_allclose(
        rollout.bootstrap.replica_obs, core.observation()["replicas"], atol=1e-6
    )
    assert not rollout.mask.all()
    assert rollout.reward.std() > 0
    assert rollout.metrics["terms/lost"] > 0
    assert rollout.metrics["terms/finished_tokens"] > 0
    assert rollout.metrics["overruled"] == 0
    assert rollout.metrics["raw_reward"] == pytest.approx(rollout.reward.mean())


@pytest.mark.compiled
def test_a_greedy_warm_up_draws_nothing():
    sent = {"a": [], "b": []}
    for stream in sent:
        found = []
        recorder = recorder_of(found, warmup=WARMUP, greedy_warmup=True, stream=stream)
        recorder.record(temperature=100.0)
        play(Between(recorder, sent[stream]), "compiled", decisions=24)
        assert found[0].action.ravel().tolist() == sent[stream][WARMUP : WARMUP + 8]
    assert sent["a"][:WARMUP] == sent["b"][:WARMUP]
    assert sent["a"][WARMUP:] != sent["b"][WARMUP:]


# ---- what is not learnt from --------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize("variant", ["plain", "memory"])
def test_an_overruled_decision_is_the_worlds_and_its_cost_is_not_lost(variant):
    found, sent = [], []
    recorder = recorder_of(found, config=small(variant), decisions=24)
    recorder.record()
    core, _ = play(Between(recorder, sent, lambda k: k % 3 == 2), "compiled", 40)
    (rollout,) = found
    assert rollout.metrics["overruled"] == pytest.approx(1 / 3, abs=0.02)
    own = [k for k in range(40) if k % 3 != 2][:24]
    assert rollout.action.ravel().tolist() == [sent[k] for k in own]
    core = Core((SCENARIO,), 1, EnvSettings(decisions=40))
    core.reset([SEED])
    rewards, seen = [], []
    for replica in sent[: own[-1] + 1]:
        seen.append(core.observation()["replicas"][0].copy())
        rewards.append(core.step(np.array([replica]))[0][0])
    np.testing.assert_allclose(rollout.replica_obs[:, 0], np.array(seen)[own], atol=1e-6)
    due = [sum(rewards[k : k + 2]) if k % 3 == 1 else rewards[k] for k in own]
    # The one that follows the last own decision is not waited for.
    due[-1] = rewards[own[-1]] if own[-1] + 1 == len(rewards) else due[-1]
    assert rollout.reward.ravel() == pytest.approx(np.array(due), abs=1e-9)


def view_of(number: int, now: float, available=(1, 1, 1)) -> View:
    """What a router sees of idle replicas."""
    views = idle_views([Replica()] * len(available))
    views["available"] = available
    request, router = np.zeros(1, REQUEST_VIEW)[0], np.zeros(1, ROUTER)[0]
    request["id"], request["now"], request["arrived_at"] = number, now, now
    request["prompt_tokens"], request["ttft_slo_s"] = 100, 1.0
    return View(request, views, cost_rows([cost_of(Replica())] * len(available)), router)


def decide(recorder: Recorder, number: int, available=(1, 1, 1), replica=None) -> int:
    scores = recorder.scores(view_of(number, float(number), available))
    chosen = int(np.argmin(scores)) if replica is None else replica
    recorder.sent(chosen, number, float(number))
    return chosen


def test_nothing_is_recorded_or_tried_out_unless_asked_for():
    found = []
    recorder = recorder_of(found)
    first = [decide(recorder, k) for k in range(20)]
    assert len(set(first)) == 1  # the same view, so the same choice
    assert not found
    assert recorder.recorded == 0
    recorder.record(temperature=100.0)
    tried = [decide(recorder, k) for k in range(20, 28)]
    assert recorder.recorded == 8
    assert len(set(tried)) > 1
    assert not found
    decide(recorder, 28)  # what follows is needed for the reward
    (rollout,) = found
    assert rollout.action.ravel().tolist() == tried
    assert rollout.elapsed_s.ravel().tolist() == [1.0] * 8
    assert len({decide(recorder, k) for k in range(29, 40)}) == 1
    assert len(found) == 1


def test_new_weights_count_from_the_next_decision_on_and_end_the_roll_out():
    found = []
    recorder = recorder_of(found)
    recorder.record()
    for k in range(7):
        decide(recorder, k)
    other = pack(recorder.recording.config, random_tensors(recorder.recording.config, 1))
    view = view_of(7, 7.0)
    before = recorder.scores(view)
    recorder.use(other)
    learned = LearnedPolicy(recorder.recording.config, random_tensors(small("plain"), 1))
    after = recorder.scores(view)
    np.testing.assert_allclose(after, learned.scores(view), rtol=1e-5)
    assert (after != before).any()
    recorder.sent(0, 7, 7.0)
    for k in range(8, 20):
        decide(recorder, k)
    assert not found
    recorder.record()
    for k in range(20, 29):
        decide(recorder, k)
    assert len(found) == 1


def test_a_replica_more_begins_the_roll_out_anew():
    found = []
    recorder = recorder_of(found)
    recorder.record()
    for k in range(5):
        decide(recorder, k)
    for k in range(5, 14):
        decide(recorder, k, (1, 1, 0, 1))
    (rollout,) = found
    assert recorder.dropped == 1
    assert rollout.mask.shape == (8, 1, 4)
    assert not (rollout.action == 2).any()


def test_without_a_replica_there_is_nothing_to_choose():
    recorder = recorder_of()
    recorder.record()
    decide(recorder, 0)
    assert recorder.scores(view_of(1, 1.0, (0, 0, 0))).tolist() == [0, 0, 0]
    assert recorder.recorded == 1


def test_requests_it_was_not_asked_about_cost_too():
    """A router that leaves it alone for a while still tells what it sends."""
    found = []
    recorder = recorder_of(found, decisions=1, chunk=1)
    recorder.record()
    decide(recorder, 0)
    recorder.first_token(0, 0, 0.5)
    recorder.finished(0, 0, 0.5)
    recorder.sent(1, 1, 1.0)
    decide(recorder, 3)
    (rollout,) = found
    assert rollout.metrics["overruled"] == 0.5
    # The first 0.5 s of request 0; 2 s of the other, and late from its target of 1 s on.
    assert rollout.reward[0, 0] == pytest.approx(
        -(composite_cost(0.5, 0.5, 0, 0) + composite_cost(2, 2, 1, 0))
    )


def test_what_cannot_be_recorded():
    with pytest.raises(TailraceError, match="chunks of 3"):
        recording(chunk=3)
    with pytest.raises(TailraceError, match=r"only the simulator can do: set it to past"):
        recording(reward=RewardSettings(relative=0.5, reference="round_robin"))


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_a_warm_up_leaves_no_trace(variant):
    asked = recording(config=small(variant), warmup=3)
    params = pack(asked.config, random_tensors(asked.config))
    before = params.copy()
    warm_up(asked, params)
    assert (params == before).all()


# ---- accounts -----------------------------------------------------------------------------------


def test_accounts_by_hand_with_more_requests_than_there_was_room_for():
    ledger = CostLedger()
    count = 2 * PLACES + 3
    for k in range(count):
        ledger.arrived(k, 100.0, 1.0)
        ledger.arrived(k, 101.0, 9.0)  # is there already
    terms = ledger.accrued(102.0)
    assert terms[cost_accounts.E2E] == terms[cost_accounts.TTFT] == pytest.approx(2.0 * count)
    assert terms[cost_accounts.LATE] == pytest.approx(1.0 * count)
    for k in range(count - 1):
        ledger.first_token(k, 102.0)
        ledger.first_token(k, 103.0)  # came already
        ledger.ended(k, 104.0, lost=k == 0)
        ledger.ended(k, 105.0)
    ledger.ended(count - 1, 104.0)  # an answer in one piece
    assert len(ledger) == 0
    assert 5 not in ledger
    terms = ledger.accrued(110.0)
    assert terms[cost_accounts.E2E] == pytest.approx(4.0 * count)
    assert terms[cost_accounts.TTFT] == pytest.approx(2.0 * (count - 1) + 4.0)
    assert terms[cost_accounts.LATE] == pytest.approx(1.0 * (count - 1) + 3.0)
    assert terms[cost_accounts.LOST_REQUESTS] == 1
    assert terms[cost_accounts.FINISHED] == count - 1
    assert ledger.ended_at == 104.0
