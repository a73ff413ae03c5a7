"""A policy that routes with a network, tries things out, and writes down all that happened.

It can sit wherever a policy written in Python can: in the simulator, in real Vidur, in the live
router. What it writes down is a roll-out of one cluster, as :mod:`tailrace.learn.improve.rollout`
makes them, with the same observations and the same reward. No torch in here.

Somebody may overrule it: the router's guard, its time limit, a canary. Such a decision was not
drawn from the policy, so it has no log-probability to learn with and is left out. It belongs to
the world then: what it costs counts for the decision before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Replica
from tailrace.env.reward import Reward, RewardSettings
from tailrace.errors import TailraceError
from tailrace.learn.cost_ledger import CostLedger, spread
from tailrace.learn.improve.rollout import (
    BootstrapStates,
    RewardStatistics,
    Rollout,
    behaviour,
    moments,
    sample,
)
from tailrace.policy.base import Policy
from tailrace.policy.learned.architecture import NetworkConfig
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.policy.learned.policy import forward_many, prior_scores
from tailrace.seeds import generator
from tailrace.sim import cost_accounts
from tailrace.sim.fleet import new_step
from tailrace.view.records import REQUEST_VIEW, ROUTER, View
from tailrace.view.replicas import idle_views, replica_costs
from tailrace.workload.table import DEFAULT_TTFT_SLO_S

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Recording:
    """What to write down."""

    config: NetworkConfig
    reward: RewardSettings = field(default_factory=RewardSettings)
    decisions: int = 256
    """Decisions of a roll-out."""
    chunk: int = 32
    """Decisions per chunk: the memory at the start of each is kept."""
    warmup: int = 0
    """Decisions before the first roll-out that are not recorded."""
    seed: int = 0
    """Of the choices; ``stream`` tells recorders of one seed apart."""
    stream: str = "choices"
    name: str = ""
    """Of the world, in the roll-out."""
    latency_limit_s: float | None = None
    """End-to-end latency above which requests are counted as alarms; none: no alarms."""
    greedy_warmup: bool = False
    """The best choice is always taken in the warm-up."""

    def __post_init__(self) -> None:
        """Refuse what cannot be recorded."""
        if self.decisions % self.chunk:
            raise TailraceError(
                f"{self.decisions} decisions cannot be cut into chunks of {self.chunk}"
            )
        if self.reward.needs_answer_lengths:
            raise TailraceError(
                "reward.tpot_late, tpot_soft_late and tpot_early need the length of every answer, "
                "which only the simulator knows: set them to 0, or env = 'sim'"
            )
        if self.reward.rule is not None:
            raise TailraceError(
                f"reward.reference = {self.reward.rule} routes the same requests a second time, "
                "which only the simulator can do: set it to past, or env = 'sim'"
            )


class _Observation(NamedTuple):
    """What one decision is made of."""

    replica_obs: F32  # [n, F]
    request_obs: F32  # [G]
    mask: NDArray[np.bool_]  # [n]
    prior: F32  # [n]
    memory: F32  # [M] before it is seen


class _PendingDecision(NamedTuple):
    """A decision that was made but not carried out yet."""

    number: int  # of the request
    choice: int
    log_prob: float
    observation: _Observation
    memory: F32  # [M] after it
    wanted: bool  # to be recorded


@dataclass
class _Transition:
    """A decision of the roll-out under way; what follows from it is added up."""

    observation: _Observation
    choice: int
    log_prob: float
    starts: bool
    reward: float = 0.0
    elapsed_s: float = 0.0


class Recorder(Policy):
    """Routes by a network; while it records, choices are drawn from it, else the best is taken."""

    name = "recorder"

    def __init__(
        self,
        recording: Recording,
        params: F64,
        done: Callable[[Rollout], None] = lambda _: None,
    ) -> None:
        """``params`` [p]: a packed network (architecture.pack); ``done`` gets each roll-out."""
        self.recording = recording
        self._params = params.copy()
        self._done = done
        self._rng = generator(recording.seed, recording.stream)
        self._temperature, self._epsilon, self._explores = 1.0, 0.0, False
        self._left_to_skip = recording.warmup
        self.overruled = 0
        """Decisions in the current roll-out that the guard, a time limit or a canary made
        instead."""
        self.dropped = 0
        """Roll-outs given up because the number of replicas changed."""
        self._transitions: list[_Transition] | None = None
        self.reset(0, 0)

    # ---- what the learner says ------------------------------------------------------------------

    def use(self, params: F64) -> None:
        """Go on with other weights [p] of the same network, from the next decision on.

        The roll-out under way, if any, is given up: it would be of two policies.
        """
        self._params = params.copy()  # it contains scratch space
        self._transitions, self._explores = None, False

    def record(self, temperature: float = 1.0, epsilon: float = 0.0) -> None:
        """Begin a roll-out with the next decision, after the warm-up if it is still to be done."""
        self._temperature, self._epsilon, self._explores = temperature, epsilon, True
        self._begin()

    def _begin(self) -> None:
        self._transitions, self.overruled = [], 0
        self._reward_statistics = RewardStatistics(self._reward)

    @property
    def recorded(self) -> int:
        """Decisions of the roll-out under way so far."""
        return 0 if self._transitions is None else len(self._transitions)

    # ---- what the world says --------------------------------------------------------------------

    def reset(self, n_replicas: int, seed: int) -> None:  # noqa: ARG002
        """Begin an episode: no requests, an empty memory."""
        self._ledger = CostLedger(self.recording.reward, self.recording.latency_limit_s)
        self._reward = Reward(self.recording.reward, 1)
        self._step = new_step(1, 1)
        self._memory = np.zeros(self.recording.config.memory, np.float32)
        self._pending: _PendingDecision | None = None
        self._starts = True
        if self._transitions is not None:
            self._begin()

    def is_learnt_from(self, view: View) -> bool:  # noqa: ARG002
        """Whether the decision about a request may be explored and recorded."""
        return True

    def scores(self, view: View) -> F64:
        """Return scores [n] that make the choice win; settles what the last decision cost."""
        request, n = view.request, len(view.replicas)
        number, now = int(request["id"]), float(request["now"])
        self._ledger.arrived(number, float(request["arrived_at"]), float(request["ttft_slo_s"]))
        observation = self._observe(view)
        self._credit_reward(view, now)
        self._pending = None
        if not observation.mask.any():
            return np.zeros(n)
        if self._transitions and self._transitions[0].observation.mask.size != n:
            self.dropped += 1
            self._begin()
        if self._transitions is not None and len(self._transitions) == self.recording.decisions:
            self._finish(observation)
        logits, memory = np.zeros((1, n), np.float32), self._memory[None].copy()
        batch = (array[None] for array in observation[:4])
        forward_many(self._params, *batch, memory, logits)
        learns = self._explores and self.is_learnt_from(view)
        if not learns or (self.recording.greedy_warmup and self._left_to_skip):
            self._left_to_skip = max(0, self._left_to_skip - learns)
            choice, log_prob = int(np.argmax(np.where(observation.mask, logits[0], -np.inf))), 0.0
            self._pending = _PendingDecision(
                number, choice, log_prob, observation, memory[0], False
            )
            return np.where(observation.mask, -logits[0].astype(np.float64), np.inf)
        policy = behaviour(logits, observation.mask[None], self._temperature, self._epsilon)
        choice = int(sample(policy, self._rng.random(1))[0])
        log_prob = float(np.log(policy[0, choice]))
        wanted = self._transitions is not None and self._left_to_skip == 0
        self._left_to_skip = max(0, self._left_to_skip - 1)
        self._pending = _PendingDecision(number, choice, log_prob, observation, memory[0], wanted)
        return np.where(np.arange(n) == choice, 0.0, 1.0)

    def sent(self, replica: int, request_id: int, now: float) -> None:
        """See whether the choice was carried out, and if so, write it down."""
        # A request that it was not asked about costs all the same.
        self._ledger.arrived(request_id, now, DEFAULT_TTFT_SLO_S)
        pending, self._pending = self._pending, None
        if pending is None or pending.number != request_id or pending.choice != replica:
            self.overruled += 1
            return
        self._memory = pending.memory
        if pending.wanted and self._transitions is not None:
            self._transitions.append(
                _Transition(pending.observation, pending.choice, pending.log_prob, self._starts)
            )
        self._starts = False

    def first_token(self, replica: int, request_id: int, now: float) -> None:  # noqa: ARG002
        """Enter it into the accounts."""
        self._ledger.first_token(request_id, now)

    def finished(self, replica: int, request_id: int, now: float) -> None:  # noqa: ARG002
        """Enter it into the accounts."""
        self._ledger.ended(request_id, now)

    def failed(self, replica: int, request_id: int, now: float) -> None:  # noqa: ARG002
        """A request that had begun to answer is lost; any other will be sent again."""
        if not self._ledger.is_unanswered(request_id):
            self._ledger.ended(request_id, now, lost=True)

    # ---- a decision -----------------------------------------------------------------------------

    def _observe(self, view: View) -> _Observation:
        n = len(view.replicas)
        replica_obs = np.zeros((n, N_REPLICA_FEATURES), np.float32)
        request_obs = np.zeros(N_REQUEST_FEATURES, np.float32)
        observe(view, replica_obs, request_obs)
        prior = np.zeros(n, np.float32)
        if self.recording.config.prior:
            prior_scores(view, self._params, prior)
        mask = view.replicas["available"] != 0
        return _Observation(replica_obs, request_obs, mask, prior, self._memory)

    def _credit_reward(self, view: View, now: float) -> None:
        """Give the last decision what has accrued since."""
        step = self._step
        accrued = self._ledger.accrued(now)
        accrued[cost_accounts.FINISHED_TOKENS] = view.router["finished_tokens"]
        step.terms[0], step.terms_before[0] = accrued - step.terms_before[0], accrued
        step.elapsed_s[0], step.time_before[0] = now - step.time_before[0], now
        step.spread[0] = spread(view.replicas)
        if self._starts:  # there was no decision before
            return
        reward = float(self._reward(step)[0])
        if self._transitions:
            self._transitions[-1].reward += reward
            self._transitions[-1].elapsed_s += float(step.elapsed_s[0])
            self._reward_statistics.add()

    def _finish(self, end: _Observation) -> None:
        """Hand the roll-out over; ``end`` is what is seen after its last decision."""
        transitions, recording = self._transitions, self.recording
        assert transitions is not None
        action = np.array([t.choice for t in transitions], np.int64)[:, None]
        replica_obs = np.stack([t.observation.replica_obs for t in transitions])[:, None]
        request_obs = np.stack([t.observation.request_obs for t in transitions])[:, None]
        mask = np.stack([t.observation.mask for t in transitions])[:, None]
        prior = np.stack([t.observation.prior for t in transitions])[:, None]
        bootstrap = BootstrapStates(
            np.array([len(transitions) - 1]),
            np.array([0]),
            end.replica_obs[None],
            end.request_obs[None],
            end.mask[None],
            end.memory[None],
            np.zeros(1, np.bool_),
        )
        rollout = Rollout(
            replica_obs,
            request_obs,
            mask,
            prior if recording.config.prior else None,
            action,
            np.array([t.log_prob for t in transitions], np.float32)[:, None],
            np.array([t.reward for t in transitions])[:, None],
            np.array([t.elapsed_s for t in transitions])[:, None],
            np.array([t.starts for t in transitions])[:, None],
            np.stack([t.observation.memory for t in transitions[:: recording.chunk]])[:, None],
            bootstrap,
            recording.chunk,
            1,
            (recording.name,),
            {
                **self._reward_statistics.metrics(),
                "overruled": self.overruled / (self.overruled + len(transitions)),
            },
            np.bincount(action.ravel(), minlength=mask.shape[2]) / action.size,
            moments(replica_obs.reshape(-1, N_REPLICA_FEATURES), mask.ravel()),
            moments(
                request_obs.reshape(-1, N_REQUEST_FEATURES), np.ones(len(transitions), np.bool_)
            ),
        )
        self._transitions, self._explores = None, False
        self._done(rollout)


def warm_up(recording: Recording, params: F64) -> None:
    """Compile all that a recorder needs, so that no decision has to wait for it."""
    recorder = Recorder(replace(recording, decisions=1, chunk=1, warmup=0), params)
    recorder.record()
    replicas = [Replica(), Replica()]
    request: Any = np.zeros(1, REQUEST_VIEW)[0]
    request["prompt_tokens"], request["ttft_slo_s"] = 1, 1.0
    router: Any = np.zeros(1, ROUTER)[0]
    view = View(request, idle_views(replicas), replica_costs(replicas), router)
    for number in range(3):
        request["id"], request["now"], request["arrived_at"] = number, number, number
        recorder.sent(int(np.argmin(recorder.scores(view))), number, float(number))
        recorder.first_token(0, number, number + 0.5)
        recorder.finished(0, number, number + 0.75)
