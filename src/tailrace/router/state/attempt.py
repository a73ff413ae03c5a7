"""One request at one replica, from sending to its end."""

import numpy as np
from numpy.typing import NDArray

from tailrace.router.intake.tokens import USAGE
from tailrace.router.state.arrival import Arrival, Decision
from tailrace.router.state.cluster import ClusterState

_INF = float("inf")


class Attempt:
    """One request at one replica. Every method may be called more than once.

    It owns the facts of this attempt; the records of the replica are the cluster's, which reads
    these facts and enters them.
    """

    __slots__ = (
        "_cluster", "_open", "answer_tokens", "answering", "arrival", "cached", "decision", "epoch",
        "estimated", "first_at", "last_at", "lesson", "outcome", "predicted", "prompt_tokens",
        "replica", "reported_cached", "reported_output", "reported_prompt", "sent_at", "serial",
        "streamed", "unseen", "used_at",
    )  # fmt: skip

    def __init__(
        self, cluster: ClusterState, arrival: Arrival, replica: int, decision: Decision
    ) -> None:
        """Send a request to a replica: enter it into the ledger and the prefix index."""
        self._cluster = cluster
        self.arrival = arrival
        self.replica = replica
        self.decision = decision
        self.sent_at = now = cluster.clock()
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.estimated = False  # whether first_at is an estimate
        self.answering = False  # in the ledger
        self.unseen = False  # its response cannot be seen, but for its end
        self.streamed = 0
        self.outcome: str | None = None
        self.reported_prompt: int | None = None
        self.reported_output: int | None = None
        self.reported_cached: int | None = None
        self.prompt_tokens = arrival.prompt_tokens
        self.predicted = arrival.predicted_output
        self._open = True
        self.epoch = cluster.epochs[replica]
        self.serial = serial = (arrival.id << 8) | (arrival.attempts & 0xFF)
        arrival.attempts += 1
        self.cached = decision.cached
        if replica != decision.replica:
            self.cached = cluster.cached_on(arrival, replica)
        self.lesson: NDArray[np.float64] | None = None
        asked = arrival.asked
        if now >= cluster.lesson_at[replica] and asked.generates and asked.prompts == 1:
            self.lesson = cluster.begin_lesson(replica, now)
        self.used_at, self.answer_tokens = cluster.sent(self)
        self._enter_session()
        if not asked.streams:
            ttft_s = decision.ttft_s
            if ttft_s < _INF:
                cluster.expect_first_token(now + ttft_s, serial, self)
        if cluster.listeners:
            cluster.notify("sent", replica, arrival.id, now)

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
            sessions.publish(key, session)

    def tokens(self, n: int) -> None:
        """Count ``n`` more tokens that have streamed back."""
        if not self._open:
            return
        if self.first_at is None:
            self._first(n)
            return
        self.streamed += n
        self._cluster.streamed(self, n)

    def _first(self, n: int) -> None:
        cluster = self._cluster
        self.first_at = now = cluster.clock()
        if self.answering:  # presumed before
            self.streamed += n
            cluster.streamed(self, n)
        else:
            self._begin_answer(n)
        if cluster.listeners:
            cluster.notify("first_token", self.replica, self.arrival.id, now)

    def _begin_answer(self, n: int) -> None:
        self.answering = True
        self.streamed = n
        self._cluster.answering(self)

    def presume_first_token(self) -> None:
        """Count the first token of a response that does not stream: it is due by now."""
        if self._open and not self.answering:
            self._begin_answer(1)

    def hide(self) -> None:
        """Its response will not be seen: count its first token when it is due."""
        ttft_s = self.decision.ttft_s
        if self._open and not self.unseen:
            self.unseen = True
            if self.arrival.asked.streams and ttft_s < _INF:
                self._cluster.expect_first_token(self.sent_at + ttft_s, self.serial, self)

    def usage(self, prompt: int | None, output: int | None, cached: int | None) -> None:
        """Take the server's own counts, in tokens; None: it does not report one."""
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
            self._cluster.correct_cached(self, cached)

    def close(self, outcome: str) -> None:
        """End it: "done", "client_gone", "backend_failed", "timeout" or "shed"."""
        if not self._open:
            return
        self._open = False
        self.outcome = outcome
        cluster, asked = self._cluster, self.arrival.asked
        self.last_at = now = cluster.clock()
        done = outcome == "done"
        # An embedding, for instance, has no answer to learn the length of answers from.
        tokens = self.streamed if self.reported_output is None else self.reported_output
        unknown = self.unseen and self.reported_output is None
        decode_s = cluster.ended(
            self, now, tokens if done and asked.generates and not unknown else -1
        )
        if done and unknown:
            self.streamed = tokens = self._estimated_output(now, decode_s)
        if done and self.first_at is None:
            self.first_at, self.estimated = self._estimated_first(now, decode_s, tokens), True
        if not asked.streams or self.unseen:
            cluster.forget_expected()
        if cluster.listeners:
            hook = "finished" if done else "failed"
            cluster.notify(hook, self.replica, self.arrival.id, now)

    def _estimated_output(self, now: float, decode_s: float) -> int:
        """Tokens of an answer that was not seen, from its duration by the cost model."""
        asked, ttft_s = self.arrival.asked, self.decision.ttft_s
        if not asked.generates:
            return 0
        if decode_s <= 0 or not ttft_s < _INF:
            return max(1, round(self.predicted))
        tokens = 1 + max(0.0, now - self.sent_at - ttft_s) / decode_s
        return round(min(tokens, _INF if asked.max_tokens is None else asked.max_tokens))

    def _estimated_first(self, now: float, decode_s: float, tokens: int) -> float:
        """Time of the first token, from the duration split as the cost model predicts."""
        ttft_s, sent_at = self.decision.ttft_s, self.sent_at
        if tokens <= 1 or not 0 < ttft_s < _INF:
            return now
        share = ttft_s / (ttft_s + (tokens - 1) * decode_s)
        return sent_at + share * (now - sent_at)

    @property
    def cluster(self) -> ClusterState:
        """The state it is entered into."""
        return self._cluster

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer so far: the server's count, else those that streamed."""
        return self.streamed if self.reported_output is None else self.reported_output

    @property
    def known_prompt_tokens(self) -> tuple[int, str]:
        """Length of the prompt as best known now, and how it is known."""
        if self.reported_prompt is not None:
            return self.reported_prompt, USAGE
        return self.prompt_tokens, self.arrival.how_long
