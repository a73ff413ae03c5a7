"""Conversations: closed loops in which a turn follows the end of the last one by a think time.

A conversation is one segment of which every turn uses a longer prefix, behind a shared system
prompt. Its later turns have a parent and a think time; their ``arrival_s`` is nominal (parent's
nominal arrival + nominal service + think) and only orders the table.

**Start.** A table that began without live conversations would spend its first minutes filling up.
So starts begin ``warmup_s`` before 0, and a conversation still live at 0 enters the table with as
many turns as it has left, beginning with a first turn: rate and number of conversations are right
from the start, every conversation in the table is whole, and no long context appears that no
replica can have cached. Only the lengths of prompts take a conversation's lifetime to settle.
**End.** The table is cut after the requested number of rows; the last conversations lose turns.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.content import PromptPool
from tailrace.workload.draft import Draft, merge, set_runs
from tailrace.workload.lengths import Lognormals, Streams
from tailrace.workload.table import blank_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Nominal service of a turn: an 8B model on one A100 at moderate load. It orders rows and turns
# arrival-to-arrival gaps into think times; the simulator computes the real one.
NOMINAL_BASE_S = 0.05
NOMINAL_PREFILL_TOKENS_PER_S = 10_000.0
NOMINAL_TPOT_S = 0.025


def nominal_service_s(new_tokens: Ints, output_tokens: Ints) -> Floats:
    """Return seconds [n] to prefill what is new in a prompt [n] and to decode its answer [n]."""
    prefill_s = new_tokens / NOMINAL_PREFILL_TOKENS_PER_S
    return NOMINAL_BASE_S + prefill_s + NOMINAL_TPOT_S * output_tokens


class TurnModel(Protocol):
    """How many turns conversations have."""

    def begin(self, count: int, streams: Streams) -> Floats:
        """Draw what decides the length of each conversation [count]."""

    def go_on(self, state: Floats, turn: int, prompt: Ints, rng: np.random.Generator) -> Bools:
        """Say which conversations [n] have a turn after ``turn``, whose prompts [n] are given."""


@dataclass(frozen=True)
class UniformTurns:
    """Any number of turns from ``low`` to ``high``, equally likely."""

    low: int
    high: int

    def begin(self, count: int, streams: Streams) -> Floats:
        """Draw the number of turns [count]."""
        return streams.rng("turns").integers(self.low, self.high + 1, count).astype(np.float64)

    def go_on(self, state: Floats, turn: int, prompt: Ints, rng: np.random.Generator) -> Bools:
        """Go on until the drawn number is reached."""
        del prompt, rng
        return turn + 1 < state


@dataclass(frozen=True)
class BetaGeometricTurns:
    """Each conversation stops after a turn with its own probability, which is beta-distributed.

    So the longer one has lasted, the likelier it continues. ``factors`` multiply the probability to
    continue by prompt length, between the ``edges`` (tokens).
    """

    stop_a: float
    stop_b: float
    edges: tuple[int, ...] = ()
    factors: tuple[float, ...] = (1.0,)

    def begin(self, count: int, streams: Streams) -> Floats:
        """Draw each conversation's chance to go on [count]."""
        return 1.0 - streams.rng("stop").beta(self.stop_a, self.stop_b, count)

    def go_on(self, state: Floats, turn: int, prompt: Ints, rng: np.random.Generator) -> Bools:
        """Draw which go on."""
        del turn
        factor = np.array(self.factors)[np.searchsorted(self.edges, prompt, side="right")]
        on: Bools = rng.random(len(state)) < state * factor
        return on


@dataclass(frozen=True)
class _GivenTurns:
    """The numbers of turns [n] are known."""

    turns: Ints

    def begin(self, count: int, streams: Streams) -> Floats:
        del count, streams
        return self.turns.astype(np.float64)

    def go_on(self, state: Floats, turn: int, prompt: Ints, rng: np.random.Generator) -> Bools:
        del prompt, rng
        return turn + 1 < state


@dataclass(frozen=True)
class Think:
    """Lognormal pause (``mu``, ``sigma`` of log seconds) before the next turn.

    With ``from_arrival`` the pause is counted from the arrival of the turn before, as traces show
    it; nominal service is taken off, but at least ``least_s`` remain.
    """

    mu: float
    sigma: float
    from_arrival: bool = False
    least_s: float = 0.0

    def draw(self, service_s: Floats, rng: np.random.Generator) -> Floats:
        """Draw seconds [n] from the end of turns before, whose service took ``service_s`` [n]."""
        pause_s = np.exp(self.mu + self.sigma * rng.standard_normal(len(service_s)))
        if self.from_arrival:
            pause_s = pause_s - service_s
        think_s: Floats = np.maximum(pause_s, self.least_s)
        return think_s


@dataclass(frozen=True)
class Borrow:
    """With some chance a conversation begins like another one that started shortly before.

    They share the first max(``least_tokens``, Beta(a, b) x prompt) tokens.
    """

    chance: float
    beta_a: float
    beta_b: float
    window_s: float
    least_tokens: int


class _Turns(NamedTuple):
    """Turns [R] of conversations, ordered by turn number, then by conversation."""

    session: Ints
    turn: Ints
    parent: Ints
    arrival_s: Floats
    think_s: Floats
    prompt: Ints
    output: Ints


@dataclass(frozen=True)
class Conversations:
    """Conversations with a shared system prompt, growing context and think times."""

    pool: PromptPool
    first: Lognormals  # text of the first turn, beyond the system prompt
    user: Lognormals  # new text of each later turn
    output: Lognormals
    prompt_cap: int  # a conversation ends before its prompt would exceed it
    turns: TurnModel
    mean_turns: float
    think: Think
    warmup_s: float
    borrow: Borrow | None = None

    def __post_init__(self) -> None:
        if self.borrow is not None and self.pool.count != 1:
            raise ValueError("borrowing needs one system prompt common to all")

    @property
    def rows_per_start(self) -> float:
        """Mean number of turns."""
        return self.mean_turns

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Longest prompt and answer."""
        return self.prompt_cap, self.output.clip.high

    def draft(self, start_s: Floats, streams: Streams) -> Draft:
        """Return the turns of conversations that start at [n]; see the head of the file."""
        shared = self.pool.draw_lengths(streams)
        first = int(np.searchsorted(start_s, 0.0))
        before = self._walk(start_s[:first], shared, self.turns, streams.below("before"))
        late = before.arrival_s >= 0
        left = np.bincount(before.session[late], minlength=first)
        entry_s = np.full(first, np.inf)
        np.minimum.at(entry_s, before.session[late], before.arrival_s[late])
        going_on = np.flatnonzero(left)
        going_on = going_on[np.argsort(entry_s[going_on], kind="stable")]
        entered = self._draft(
            entry_s[going_on], shared, _GivenTurns(left[going_on]), streams.below("entered")
        )
        fresh = self._draft(start_s[first:], shared, self.turns, streams.below("fresh"))
        return merge([entered, fresh], common_segments=self.pool.count)

    def _draft(self, start_s: Floats, shared: Ints, turns: TurnModel, streams: Streams) -> Draft:
        """Return all turns of the conversations that start at [n]."""
        t = self._walk(start_s, shared, turns, streams)
        count = len(start_s)
        which = self.pool.draw_choice(count, streams)
        donor, borrowed = self._borrowed(start_s, t.prompt[:count], shared[which], streams)
        rows = blank_rows(len(t.session))
        rows["session"], rows["turn"], rows["parent"] = t.session, t.turn, t.parent
        rows["arrival_s"], rows["think_s"] = t.arrival_s, t.think_s
        rows["prompt_tokens"], rows["output_tokens"] = t.prompt, t.output
        system = shared[which][t.session]
        common = borrowed[t.session]
        columns = [
            (which[t.session], system),
            (self.pool.count + donor[t.session], common),
            (self.pool.count + t.session, t.prompt - system - common),
        ]
        if self.borrow is None:
            del columns[1]
        return Draft(rows, set_runs(rows, columns), self.pool.count + count, count)

    def _walk(self, start_s: Floats, shared: Ints, turns: TurnModel, streams: Streams) -> _Turns:
        """Play the conversations that start at [n], turn by turn, all at once."""
        count = len(start_s)
        session = np.arange(count)
        which = self.pool.draw_choice(count, streams)
        text = self.first.draw(count, streams.below("first"))
        prompt = np.minimum(shared[which] + text, self.prompt_cap)
        new = prompt - shared[which]
        state = turns.begin(count, streams)
        arrival_s, think_s = start_s, np.zeros(count)
        parent = np.full(count, -1, np.int64)
        waves: list[_Turns] = []
        rows = turn = 0
        while True:
            here = streams.below(f"turn{turn}")
            output = self.output.draw(len(session), here.below("output"))
            number = np.full(len(session), turn)
            waves.append(_Turns(session, number, parent, arrival_s, think_s, prompt, output))
            on = np.flatnonzero(turns.go_on(state, turn, prompt, here.rng("on")))
            service_s = nominal_service_s(new, output)[on]
            think_s = self.think.draw(service_s, here.rng("think"))
            new = self.user.draw(len(on), here.below("user"))
            fits = prompt[on] + output[on] + new <= self.prompt_cap
            on, think_s, new = on[fits], think_s[fits], new[fits]
            if len(on) == 0:
                break
            arrival_s = arrival_s[on] + service_s[fits] + think_s
            prompt = prompt[on] + output[on] + new
            parent, rows = rows + on, rows + len(session)
            session, state, turn = session[on], state[on], turn + 1
        return _Turns(*(np.concatenate(column) for column in zip(*waves, strict=True)))

    def _borrowed(
        self, start_s: Floats, prompt: Ints, system: Ints, streams: Streams
    ) -> tuple[Ints, Ints]:
        """Return for each conversation [n] the one whose text it begins with, and how many tokens.

        Lenders have borrowed nothing themselves, so a prompt has at most three runs.
        """
        count = len(start_s)
        donor = np.arange(count)
        borrowed = np.zeros(count, np.int64)
        b = self.borrow
        if b is None:
            return donor, borrowed
        wants = streams.rng("borrows").random(count) < b.chance
        part = streams.rng("borrowed").beta(b.beta_a, b.beta_b, count)
        uniform = streams.rng("lender").random(count)
        lenders = np.flatnonzero(~wants)
        first = np.searchsorted(start_s[lenders], start_s - b.window_s)
        last = np.searchsorted(start_s[lenders], start_s)
        tokens = np.maximum(b.least_tokens, np.rint(part * prompt)).astype(np.int64)
        wants &= (last > first) & (tokens < prompt) & (tokens > system)
        chosen = first + (uniform * (last - first)).astype(np.int64)
        donor[wants] = lenders[chosen[wants]]
        borrowed[wants] = (tokens - system)[wants]
        return donor, borrowed
