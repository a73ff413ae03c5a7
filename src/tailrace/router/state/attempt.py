"""A request on its way: what is known when it arrives, and its time at one replica."""

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailrace.router.intake.prompt_blocks import PromptBlocks
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.intake.tokens import USAGE
from tailrace.router.state import kernels
from tailrace.router.state.sessions import Session
from tailrace.view.records import REPLICA_VIEW

if TYPE_CHECKING:
    from tailrace.router.state.cluster import ClusterState

#: Numbers per REPLICA_VIEW record, and where some of them stand in it.
WIDTH = REPLICA_VIEW.itemsize // 8
CONTEXT = list(REPLICA_VIEW.names or ()).index("context_tokens")
OLDEST = list(REPLICA_VIEW.names or ()).index("oldest_sent")
_INF = float("inf")


@dataclass(slots=True)
class Decision:
    """Where one request goes, and why."""

    replica: int
    policy: str
    """Name of the policy that was asked, whoever decided in the end."""
    scores: NDArray[np.float64]
    """[n] of the policy that decided, lower is better."""
    runner_up: int
    """Second choice, -1: there was no other."""
    reason: str
    """What speaks most for the replica against the runner-up."""
    fell_back: str | None = None
    """Why the fallback rule decided: nan, range, guard, error or time; None: it did not."""
    shadow: int | None = None
    """What the shadow policy would have chosen."""
    took_s: float = 0.0
    """Time of the decision."""
    cached: int = 0
    """Tokens of the prompt that the replica is thought to have cached."""
    ttft_s: float = 0.0
    """Predicted time to first token on the replica, by the cost model."""
    shadow_ttft_s: float | None = None
    """How much later the first token is predicted at the shadow's choice; negative: earlier."""


class Arrival:
    """A request that has arrived. Times are in seconds of the cluster's clock."""

    __slots__ = (
        "arrived_at", "asked", "attempts", "how_long", "id", "implicit", "predicted_output",
        "prompt_tokens", "runs", "session", "size", "turn",
    )  # fmt: skip

    id: int
    asked: RequestBody
    arrived_at: float
    size: int  #: of the prompt's text, bytes
    prompt_tokens: int
    how_long: str  #: how the length is known: ids, server, local, estimated or assumed
    runs: PromptBlocks
    session: Session | None
    implicit: bool  #: the session was recognised by its content, not by an id
    turn: int
    predicted_output: float  #: tokens, as the last decision saw it
    attempts: int  #: replicas it was sent to so far


class Attempt:
    """One request at one replica. Every method may be called more than once."""

    __slots__ = (
        "_at", "_cluster", "_epoch", "_open", "answer_tokens", "answering", "arrival", "cached",
        "decision", "estimated", "first_at", "last_at", "outcome", "predicted", "prompt_tokens",
        "replica", "reported_cached", "reported_output", "reported_prompt", "sent_at", "serial",
        "streamed", "used_at",
    )  # fmt: skip

    def __init__(
        self, cluster: "ClusterState", arrival: Arrival, replica: int, decision: Decision
    ) -> None:
        """Enter the request into the ledger and its prompt into the prefix index."""
        self._cluster = cluster
        self.arrival = arrival
        self.replica = replica
        self.decision = decision
        self.sent_at = now = cluster.clock()
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.estimated = False  # whether first_at is an estimate
        self.answering = False  # in the ledger
        self.streamed = 0
        self.outcome: str | None = None
        self.reported_prompt: int | None = None
        self.reported_output: int | None = None
        self.reported_cached: int | None = None
        self.prompt_tokens = arrival.prompt_tokens
        self.predicted = arrival.predicted_output
        self._open = True
        self._epoch = cluster.epochs[replica]
        self._at = replica * WIDTH + CONTEXT
        self.serial = serial = (arrival.id << 8) | (arrival.attempts & 0xFF)
        arrival.attempts += 1
        runs, index = arrival.runs, cluster.index
        self.cached = decision.cached
        if replica != decision.replica:
            self.cached = cluster.cached_on(arrival, replica)
        self.used_at, self.answer_tokens = kernels.opened(
            cluster.replicas, cluster.routers, index.entries, index.slots, index.totals, replica,
            now, self.prompt_tokens, self.cached, self.predicted, runs.keys, runs.units,
            runs.branch_at, runs.total, cluster.caching, cluster.counter.units_per_token,
        )  # fmt: skip
        waiting = cluster.waiting[replica]
        if not waiting:
            cluster.times[replica * WIDTH + OLDEST] = now
        waiting[serial] = now
        self._enter_session()
        if not arrival.asked.streams:
            ttft_s = decision.ttft_s
            if ttft_s < _INF:
                heapq.heappush(cluster.due, (now + ttft_s, serial, self))
        if cluster.listeners:
            cluster.tell("sent", replica, arrival.id, now)

    def _enter_session(self) -> None:
        arrival, sessions = self.arrival, self._cluster.sessions
        session, asked = arrival.session, arrival.asked
        if session is None:
            if not arrival.implicit or asked.kind not in ("chat", "response"):
                return
            # It may turn out to be the first turn of a conversation.
            session = arrival.session = sessions.new()
        key: str | int | None = asked.session
        if key is None:
            key = arrival.runs.end_key
        if arrival.implicit:
            sessions.put(key, session)
        session.last_replica = self.replica
        session.turns = arrival.turn + 1
        if sessions.shared:
            sessions.entered(key, session)

    def tokens(self, n: int) -> None:
        """Take note of ``n`` more tokens that have streamed back."""
        if not self._open:
            return
        if self.first_at is None:
            self._first(n)
            return
        self.streamed += n
        cluster = self._cluster
        if self._epoch == cluster.epochs[self.replica]:
            cluster.cells[self._at] += n

    def _first(self, n: int) -> None:
        cluster = self._cluster
        self.first_at = now = cluster.clock()
        if self.answering:  # presumed before
            self.streamed += n
            if self._epoch == cluster.epochs[self.replica]:
                cluster.cells[self._at] += n
        else:
            self._answered(n)
        if cluster.listeners:
            cluster.tell("first_token", self.replica, self.arrival.id, now)

    def _answered(self, n: int) -> None:
        cluster = self._cluster
        self.answering = True
        self.streamed = n
        if self._epoch == cluster.epochs[self.replica]:
            kernels.answered(
                cluster.replicas, self.replica, self.prompt_tokens, self.cached, self.sent_at, n
            )
            cluster.left_queue(self.replica, self.serial)

    def _presume_first(self) -> None:
        """Its first token should have been computed by now, though nobody can see it."""
        if self._open and not self.answering:
            self._answered(1)

    def usage(self, prompt: int | None, output: int | None, cached: int | None) -> None:
        """Take the server's own figures, in tokens; None: it does not say."""
        if not self._open:
            return
        asked = self.arrival.asked
        if prompt is not None and prompt > 0 and self.reported_prompt is None:
            self.reported_prompt = prompt
            if self.arrival.size and not asked.has_media:
                self._cluster.counter.learn(asked.model, self.arrival.size, prompt)
        if output is not None and output >= 0:
            self.reported_output = output
        if cached is not None and cached >= 0 and self.reported_cached is None:
            self.reported_cached = cached
            if self._epoch == self._cluster.epochs[self.replica]:
                self._cluster.corrected(self, cached)

    def close(self, outcome: str) -> None:
        """End it: "done", "client_gone", "backend_failed", "timeout" or "shed"."""
        if not self._open:
            return
        self._open = False
        self.outcome = outcome
        cluster = self._cluster
        self.last_at = now = cluster.clock()
        done = outcome == "done"
        each_s = 0.0
        if self._epoch == cluster.epochs[self.replica]:
            each_s = self._leave_ledger(now, self.output_tokens if done else -1)
        if done and self.first_at is None:
            self.first_at, self.estimated = self._estimated_first(now, each_s), True
        if not self.arrival.asked.streams:
            cluster.not_due()
        if cluster.listeners:
            hook = "finished" if done else "failed"
            cluster.tell(hook, self.replica, self.arrival.id, now)

    def _leave_ledger(self, now: float, output: int) -> float:
        """Take it out of the ledger; return the time of an iteration at the replica, s."""
        cluster = self._cluster
        arrival, index = self.arrival, cluster.index
        runs = arrival.runs
        if arrival.asked.kind == "embedding":
            output = -1  # no answer to learn the length of answers from
        each_s = kernels.ended(
            cluster.request, cluster.replicas, cluster.costs, cluster.routers, index.entries,
            index.slots, index.totals, self.replica, now, self.prompt_tokens, self.cached,
            self.predicted, self.sent_at, int(self.answering), self.streamed, output, runs.keys,
            runs.units, cluster.caching, cluster.counter.units_per_token,
        )  # fmt: skip
        cluster.left_queue(self.replica, self.serial)
        return float(each_s)

    def _estimated_first(self, now: float, each_s: float) -> float:
        """When its first token was there, from its duration split as the cost model says."""
        ttft_s, sent_at, tokens = self.decision.ttft_s, self.sent_at, self.output_tokens
        if tokens <= 1 or not 0 < ttft_s < _INF:
            return now
        share = ttft_s / (ttft_s + (tokens - 1) * each_s)
        return sent_at + share * (now - sent_at)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer so far: the server's figure, else those that streamed."""
        return self.streamed if self.reported_output is None else self.reported_output

    @property
    def known_prompt_tokens(self) -> tuple[int, str]:
        """Length of the prompt as best known now, and how it is known."""
        if self.reported_prompt is not None:
            return self.reported_prompt, USAGE
        return self.prompt_tokens, self.arrival.how_long
