"""What the live router knows of its replicas: the records every policy reads, kept up to date.

A request is an :class:`Arrival` (length, content, session), then an :class:`Attempt` for each
replica it is sent to. The records are those of ``view/records.py``. Only the functions of the
ledger and of the prefix index change them, as in the simulator, so that a policy sees live what it
saw in training. How rows come and go is in replica_records.py; what requests change in them is
here, and attempts (attempt.py) call it.
"""

import heapq
import itertools
import struct
import time
from collections.abc import Callable, Sequence, Set
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.base import Policy, call_hook
from tailrace.router.intake.prompt_blocks import (
    BLOCK_UNITS,
    array_blocks,
    private_block,
    root_of,
    text_blocks,
    token_blocks,
)
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.intake.tokens import SERVER, TokenCounter
from tailrace.router.settings import BackendSettings
from tailrace.router.state import kernels, server_model
from tailrace.router.state.active_blocks import ActiveBlocks
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.replica_records import WIDTH, ReplicaRecords
from tailrace.router.state.sessions import Sessions, SharedSessions
from tailrace.router.state.shared_state import WorkerView, memory_of, new_shared_state
from tailrace.view import prefix_index
from tailrace.view.records import REPLICA_VIEW, REQUEST_VIEW
from tailrace.workload.table import DEFAULT_TPOT_SLO_S, DEFAULT_TTFT_SLO_S

PRIOR_OUTPUT_TOKENS = 256.0
#: Share of the answers thought cached that must turn out so for the belief to be kept up, and how
#: much one more case counts.
_ANSWERS_TRUST, _ANSWERS_STEP = 0.5, 0.2
#: Ended requests that may stay among those whose first token is expected.
_MAX_ENDED = 32
#: Prompts in a row that should have been cached and were not at all: there is no cache.
_NO_CACHE_AFTER = 8

#: Places of some numbers of a REPLICA_VIEW record.
_CONTEXT, _OLDEST = (
    list(REPLICA_VIEW.names or ()).index(name) for name in ("context_tokens", "oldest_sent")
)
_REQUEST = struct.Struct("=dqdqdqqqQqddQ")
assert _REQUEST.size == REQUEST_VIEW.itemsize
_ATTEMPT = struct.Struct("=qdqqdqqddqqqq")
assert _ATTEMPT.size == kernels.ATTEMPT.itemsize
_HOOKS = ("sent", "first_token", "finished", "failed")


class LedgerEntry(Protocol):
    """What the cluster reads of an attempt. It writes nothing to it."""

    arrival: Arrival
    replica: int
    epoch: int  #: of the replica when it was sent; in a later epoch it no longer counts
    serial: int  #: unique number of the attempt
    sent_at: float  #: s
    prompt_tokens: int
    cached: int  #: prompt tokens believed to be cached when it was sent
    predicted: float  #: predicted output, tokens
    used_at: float  #: when the last cached run was used before, s
    answer_tokens: int  #: tokens of ``cached`` that are an earlier answer
    answering: bool  #: its first token is in the ledger
    streamed: int  #: tokens so far
    lesson: NDArray[np.float64] | None  #: [LESSON_SHAPE], if a server's speed is learned from it
    first_at: float | None  #: when its first token came, s; None: it has not, or was presumed
    reported_prompt: int | None  #: by the server's own count; None: it has not said
    reported_cached: int | None
    outcome: str | None  #: None: it has not ended

    def presume_first_token(self) -> None:
        """Called when the predicted time of its first token has come."""


class ClusterState(ReplicaRecords):
    """The replicas behind the router and all that is known of them."""

    def __init__(
        self,
        backends: Sequence[BackendSettings],
        clock: Callable[[], float] = time.monotonic,
        *,
        counter: TokenCounter | None = None,
        salt: bytes = b"",
        seed: int = 0,
        max_sessions: int = 100_000,
        prior_output_tokens: float = PRIOR_OUTPUT_TOKENS,
        worker_view: WorkerView | None = None,
        learn_speeds: bool = True,
    ) -> None:
        """Start with idle replicas of which nothing is known.

        ``learn_speeds``: learn from answers how fast servers are that do not say it themselves.
        ``salt``: this installation's secret, which makes content hashes its own. ``worker_view``:
        the state shared by several workers, which must have the same salt; None: a worker alone.
        """
        if worker_view is None:
            worker_view = new_shared_state(backends).of(0)
        shared, worker = worker_view.shared, worker_view.worker
        shared.clear(worker)
        super().__init__(worker_view, clock, seed=seed, learn_speeds=learn_speeds)
        self.counter = counter or TokenCounter()
        self.sessions = Sessions(max_sessions)
        if not shared.alone:
            cells = memory_of(shared.sessions)
            self.sessions = SharedSessions(max_sessions, cells, worker, shared.workers)
        self.prior_output_tokens = prior_output_tokens
        self.request: NDArray[np.void] = np.zeros(1, REQUEST_VIEW)
        self._request_buffer = memory_of(self.request.view(np.uint8))
        self._attempt: NDArray[np.void] = np.zeros(1, kernels.ATTEMPT)
        self._attempt_buffer = memory_of(self._attempt.view(np.uint8))
        self._seed = int.from_bytes(salt[:8].ljust(8, b"\0"), "little")
        self._roots: dict[tuple[str, str], int] = {}
        self._ids = itertools.count()
        self.listeners: list[tuple[Policy, frozenset[str]]] = []
        self.hook_errors = 0
        self.due: list[tuple[float, int, LedgerEntry]] = []
        """Heap of the predicted times of first tokens of responses that do not stream."""
        self._ended_due = 0  # entries of it that have ended already, about
        self.index_later = False
        """Whether the prefix index learns of a prompt at its first token, not when it is sent."""
        self._grow(backends)

    @property
    def units_per_token(self) -> float:
        """Units of content per token, as calibrated so far."""
        return self.counter.units_per_token

    @property
    def mean_output(self) -> float:
        """Mean tokens of an answer so far, at this worker."""
        router = self.router
        finished, tokens = float(router["finished"]), float(router["finished_tokens"])
        return (tokens + self.prior_output_tokens) / (finished + 1)

    # ---- policies that listen -------------------------------------------------------------------

    def listen(self, policy: Policy) -> None:
        """Call the hooks a user's policy has overridden, from now on."""
        kind = type(policy)
        names = {n for n in _HOOKS if getattr(kind, n, None) is not getattr(Policy, n)}
        if names:
            self.listeners.append((policy, frozenset(names)))

    def unlisten(self, policy: Policy) -> None:
        """Call them no more."""
        self.listeners = [item for item in self.listeners if item[0] is not policy]

    def notify(self, hook: str, replica: int, request_id: int, now: float) -> None:
        """Call a hook of all listening policies; one that fails is counted and does no harm."""
        for policy, names in self.listeners:
            if hook in names:
                try:
                    call_hook(policy, hook, replica, request_id, now)
                except Exception:
                    self.hook_errors += 1

    # ---- requests -------------------------------------------------------------------------------

    def arrive(
        self, asked: RequestBody, prompt_tokens: int | None = None, *, keep: bool = False
    ) -> Arrival:
        """Take in a request: its length (``prompt_tokens`` if a server has said it), content and
        session. ``keep``: it may keep ``asked`` and take the text out of it."""
        arrival = Arrival()
        arrival.id = number = next(self._ids)
        arrival.arrived_at = self.clock()
        arrival.attempts = 0
        arrival.predicted_output = self.prior_output_tokens
        array, text, data = asked.data, asked.text, b""
        if array is not None:
            arrival.size = size = 0 if asked.ids else array.size
        else:
            data = text.encode(errors="surrogatepass") if text else b""
            arrival.size = size = len(data)
        if prompt_tokens is not None:
            arrival.prompt_tokens, arrival.how_long = prompt_tokens, SERVER
        else:
            arrival.prompt_tokens, arrival.how_long = self.counter.count(asked, size)
        root = self._roots.get((asked.model, asked.salt)) or self._root(asked.model, asked.salt)
        if array is not None:
            arrival.runs = array_blocks(array, root, asked.answer)
        elif data:
            answer = asked.answer
            if answer is not None and len(data) != len(text or ""):
                answer = _in_bytes(text or "", answer)
            arrival.runs = text_blocks(data, root, answer)
        elif asked.token_ids:
            arrival.runs = token_blocks(asked.token_ids, root)
        else:
            arrival.runs = private_block(number, arrival.prompt_tokens)
        arrival.implicit = asked.session is None
        if asked.session is not None:
            arrival.session = self.sessions.of(asked.session)
        elif arrival.runs.branch_key:
            arrival.session = self.sessions.find(arrival.runs.branch_key)
        else:
            arrival.session = None
        arrival.turn = arrival.session.turns if arrival.session is not None else 0
        # The text would be kept as long as the answer takes.
        if keep:
            asked.text = asked.token_ids = asked.answer = asked.data = None
            arrival.asked = asked
        else:
            arrival.asked = asked.without_text()
        return arrival

    def set_content_secret(self, secret: bytes) -> None:
        """Make content hashes from another secret; prompts hashed before are not found again."""
        seed = int.from_bytes(secret[:8].ljust(8, b"\0"), "little")
        if seed != self._seed:
            self._seed = seed
            self._roots.clear()

    def _root(self, model: str, salt: str) -> int:
        root = self._roots.get((model, salt))
        if root is None:
            if len(self._roots) > 4096:  # both come from clients
                self._roots.clear()
            root = self._roots[model, salt] = root_of(model, salt, self._seed)
        return root

    def show_request(self, arrival: Arrival, now: float) -> None:
        """Fill the request's record for a decision at ``now`` (s)."""
        session = arrival.session
        asked = arrival.asked
        slo_s = asked.ttft_slo_s
        _REQUEST.pack_into(
            self._request_buffer,
            0,
            now,
            arrival.id,
            arrival.arrived_at,
            arrival.prompt_tokens,
            0.0,  # predicted output: kernels.show
            session.number if session is not None else -1,
            arrival.turn,
            session.last_replica if session is not None else -1,
            arrival.runs.prefix_hash,
            -asked.priority,  # in the records higher is more urgent
            DEFAULT_TTFT_SLO_S if slo_s is None else slo_s,
            DEFAULT_TPOT_SLO_S,
            arrival.runs.end_key,
        )

    # ---- attempts -------------------------------------------------------------------------------

    def cached_on(self, arrival: Arrival, replica: int) -> int:
        """Tokens of a prompt that a replica is thought to have cached."""
        if not self.caching[replica]:
            return 0
        runs, index = arrival.runs, self.index
        cached = kernels.cached_on(
            index.entries, index.slots, index.totals, self.replicas, self.beliefs, replica,
            arrival.prompt_tokens, runs.keys, runs.units, runs.branch_at, runs.total,
        )  # fmt: skip
        return int(cached)

    def least_work_s(self, arrival: Arrival, excluded: Set[int]) -> float:
        """Prefill of a prompt where it takes least, s; on none of ``excluded``, 0 if on all."""
        runs, index = arrival.runs, self.index
        hidden = np.zeros(len(self.replicas), np.bool_)
        if excluded:
            hidden[[r for r in excluded if r < hidden.size]] = True
        work_s = kernels.least_work_s(
            index.entries, index.slots, index.totals, self.replicas, self.seen, self.beliefs,
            hidden, arrival.prompt_tokens, runs.keys, runs.units, runs.branch_at, runs.total,
        )  # fmt: skip
        return float(work_s)

    def sent(self, entry: LedgerEntry) -> tuple[float, int]:
        """Enter an attempt; return its ``used_at`` and ``answer_tokens``."""
        replica, now, runs, index = entry.replica, entry.sent_at, entry.arrival.runs, self.index
        _ATTEMPT.pack_into(
            self._attempt_buffer, 0, replica, now, entry.prompt_tokens, entry.cached,
            entry.predicted, runs.branch_at, runs.total, self.counter.units_per_token, now, 0, 0, 0,
            self.index_later,
        )  # fmt: skip
        found: tuple[float, int] = kernels.opened(
            self._attempt, self.replicas, self.routers, index.entries, index.slots, index.totals,
            self.beliefs, runs.keys, runs.units,
        )  # fmt: skip
        if self.outbox is not None and not self.index_later:
            self.outbox.entered(replica, runs)
        if self.active is not None:
            self.active.begin(replica, runs)
        waiting = self.waiting[replica]
        if not waiting:
            self.times[replica * WIDTH + _OLDEST] = now
        waiting[entry.serial] = now
        return found

    def answering(self, entry: LedgerEntry) -> None:
        """The first ``entry.streamed`` tokens of an attempt have come back."""
        r = entry.replica
        if entry.epoch == self.epochs[r]:
            if entry.lesson is not None and entry.first_at is not None:
                server_model.first_token(
                    self._all_models, self._all_views, r, entry.lesson, entry.first_at,
                    entry.prompt_tokens, entry.cached,
                )  # fmt: skip
            if self.index_later:
                self._index(entry, self.clock())
            kernels.answered(
                self.replicas, self.models, r, entry.prompt_tokens, entry.cached, entry.sent_at,
                entry.streamed,
            )  # fmt: skip
            self._left_queue(r, entry.serial)

    def _index(self, entry: LedgerEntry, now: float) -> None:
        """Let the prefix index learn at ``now`` (s) that a replica has a prompt."""
        runs, index = entry.arrival.runs, self.index
        _ATTEMPT.pack_into(
            self._attempt_buffer, 0, entry.replica, now, entry.prompt_tokens, entry.cached,
            entry.predicted, runs.branch_at, runs.total, self.counter.units_per_token,
            entry.sent_at, 0, 0, 0, 0,
        )  # fmt: skip
        kernels.indexed(
            self._attempt, self.replicas, index.entries, index.slots, index.totals, self.beliefs,
            runs.keys, runs.units,
        )  # fmt: skip
        if self.outbox is not None:
            self.outbox.entered(entry.replica, runs)

    def count_active_blocks(self) -> None:
        """Count the prompt blocks in flight from now on."""
        if self.active is None:
            self.active = ActiveBlocks()

    def show_active_blocks(self, arrival: Arrival) -> None:
        """Fill ``active_blocks`` and ``new_blocks`` of this worker for a decision."""
        assert self.active is not None
        for replica, view in enumerate(self.replicas):
            in_flight, new = self.active.count(replica, arrival.runs)
            tokens = BLOCK_UNITS / self.counter.units_per_token
            per_block = tokens / max(1, int(view["block_size"]))
            view["active_blocks"], view["new_blocks"] = in_flight * per_block, new * per_block

    def streamed(self, entry: LedgerEntry, n: int) -> None:
        """``n`` more tokens of an attempt have come back."""
        r = entry.replica
        if entry.epoch == self.epochs[r]:
            self.cells[r * WIDTH + _CONTEXT] += n

    def ended(self, entry: LedgerEntry, now: float, output: int) -> float:
        """Take an attempt out of the ledger at ``now`` (s); return the replica's iteration time, s.

        ``output``: tokens of a complete answer, -1: there is none.
        """
        r = entry.replica
        if entry.epoch != self.epochs[r]:
            return 0.0
        runs, index = entry.arrival.runs, self.index
        if self.active is not None:
            self.active.end(r, runs)
        if self.index_later and output >= 0 and not entry.answering:
            self._index(entry, now)
        if entry.lesson is not None and output > 1:
            believed, counted = _prompt_counts(entry)
            if not entry.answering:  # it did not stream, and ended sooner than predicted
                uncached, cached = believed
                self.models["prefilled"][r] += uncached
                self.models["prefill_work"][r] += uncached * (cached + 0.5 * uncached)
            server_model.ended(
                self._all_models, self._all_views, self.costs, self.worker_view.worker, r,
                entry.lesson, now, output, believed, counted,
            )  # fmt: skip
        _ATTEMPT.pack_into(
            self._attempt_buffer, 0, r, now, entry.prompt_tokens, entry.cached, entry.predicted,
            runs.branch_at, runs.total, self.counter.units_per_token, entry.sent_at,
            entry.answering, entry.streamed, output, 0,
        )  # fmt: skip
        decode_s = kernels.ended(
            self._attempt, self.request, self.replicas, self.costs, self.routers, index.entries,
            index.slots, index.totals, self.beliefs, runs.keys, runs.units,
        )  # fmt: skip
        self._left_queue(r, entry.serial)
        if self.outbox is not None and output >= 0:
            self.outbox.answered(r, runs, int(output * self.counter.units_per_token))
        return float(decode_s)

    def _left_queue(self, replica: int, serial: int) -> None:
        """A request got its first token or ended: the longest waiting one may be another."""
        waiting = self.waiting[replica]
        waiting.pop(serial, None)
        if waiting:
            self.times[replica * WIDTH + _OLDEST] = next(iter(waiting.values()))

    def expect_first_token(self, at: float, serial: int, entry: LedgerEntry) -> None:
        """The first token of a response that does not stream is predicted at ``at`` (s)."""
        heapq.heappush(self.due, (at, serial, entry))

    def catch_up(self, now: float) -> None:
        """Count responses that do not stream as begun when their first token was predicted."""
        due = self.due
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].presume_first_token()

    def forget_expected(self) -> None:
        """A response that does not stream has ended; drop the ended ones if they are the most."""
        self._ended_due += 1
        if self._ended_due > _MAX_ENDED and 2 * self._ended_due > len(self.due):
            self.due = [entry for entry in self.due if entry[2].outcome is None]
            heapq.heapify(self.due)
            self._ended_due = 0

    def correct_cached(self, entry: LedgerEntry, cached: int) -> None:
        """The server reports how much of a prompt was cached: believe it, not the index."""
        r, believed = entry.replica, entry.cached
        if entry.epoch != self.epochs[r]:
            return
        block = int(self.replicas[r]["block_size"])
        if cached > 0:
            self._misses[r] = 0
            if not self.caching[r]:
                self.caching[r] = self._believed(self.backends[r].server)
        expected = entry.answer_tokens
        if expected > 0:
            # What is missing of an answer is not evicted, but has never been there: thinking that
            # is not sent back, or an answer that is put into tokens differently the second time.
            self._trust_answers(r, cached > believed - expected // 2)
            believed -= expected
        elif not self.answers[r] and entry.arrival.runs.branch_at >= 0:
            self._trust_answers(r, cached > believed + 2 * block)
        if cached >= believed - block or self.beliefs[r]["exact"]:
            return
        # The server evicts what was not used for longest, so whatever the index saw used no later
        # than the run that is missing is gone too.
        index = self.index
        kernels.evict_until(index.entries, index.slots, index.totals, r, entry.used_at)
        if self.outbox is not None:
            self.outbox.evicted(r, self.clock() - entry.used_at)
        if cached == 0:
            self._misses[r] += 1
            if self._misses[r] >= _NO_CACHE_AFTER:
                self.caching[r] = 0
                prefix_index.forget(index, r)

    def _trust_answers(self, replica: int, came_true: bool) -> None:
        """Learn whether earlier answers are found cached on a replica."""
        share = self._answer_share[replica]
        share += _ANSWERS_STEP * (float(came_true) - share)
        self._answer_share[replica] = share
        self.answers[replica] = int(share >= _ANSWERS_TRUST)


def _prompt_counts(entry: LedgerEntry) -> tuple[tuple[float, float], tuple[float, float]]:
    """Uncached and cached tokens of a prompt: as believed when it was sent, and as counted."""
    cached = float(entry.cached)
    believed = entry.prompt_tokens - cached, cached
    prompt = entry.reported_prompt
    if prompt is None:
        return believed, believed
    if entry.reported_cached is not None:
        cached = float(entry.reported_cached)
    else:
        cached *= prompt / max(1, entry.prompt_tokens)
    return believed, (max(1.0, prompt - cached), cached)


def _in_bytes(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """A part of a text, given in characters, in bytes of its encoding."""
    start = len(text[: span[0]].encode(errors="surrogatepass"))
    return start, start + len(text[span[0] : span[1]].encode(errors="surrogatepass"))
