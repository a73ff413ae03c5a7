"""Content models of single requests: private, shared-prompt and document traffic.

A content model turns sorted start times into a draft. Times before 0 belong to a warm-up: a model
with memory uses them to reach its steady state by 0, any other ignores them. Only rows that arrive
at 0 or later are returned. Conversations are in :mod:`tailrace.workload.sessions`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.workload.arrivals import zipf_weights
from tailrace.workload.draft import Draft, merge, set_runs
from tailrace.workload.lengths import JointMixture, Lognormals, Streams, pick
from tailrace.workload.table import RUN, blank_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ContentModel(Protocol):
    """Fills start times with prompts and outputs."""

    @property
    def warmup_s(self) -> float:
        """Length of the warm-up it needs, s: starts before 0."""

    @property
    def rows_per_start(self) -> float:
        """Mean number of requests that follow from one start, itself included."""

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Upper bounds of prompts and of answers, in tokens."""

    def draft(self, start_s: Floats, streams: Streams) -> Draft:
        """Return the requests of sorted starts [n] that arrive at 0 or later."""


@dataclass(frozen=True)
class OneShot:
    """Requests that share nothing with each other."""

    lengths: JointMixture
    warmup_s: float = 0.0
    rows_per_start: float = 1.0

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Longest prompt and answer."""
        return self.lengths.max_lengths

    def draft(self, start_s: Floats, streams: Streams) -> Draft:
        """Return one request per start [n]."""
        rows = _rows_at(start_s)
        rows["prompt_tokens"], rows["output_tokens"] = self.lengths.draw(len(rows), streams)
        return Draft(rows, np.zeros(0, RUN), 0, 0)


@dataclass(frozen=True)
class PromptPool:
    """``count`` shared prompts of random length, requested with Zipf popularity."""

    count: int
    tokens: Lognormals
    zipf: float = 1.0

    def draw_lengths(self, streams: Streams) -> Ints:
        """Draw the length of each shared prompt [count]."""
        return self.tokens.draw(self.count, streams.below("shared"))

    def draw_choice(self, count: int, streams: Streams) -> Ints:
        """Draw which shared prompt each of ``count`` requests begins with."""
        popularity = zipf_weights(self.count, self.zipf)
        return pick(popularity, streams.rng("choice").random(count))


@dataclass(frozen=True)
class SharedPrompts:
    """A shared system prompt from a pool, then a private tail."""

    pool: PromptPool
    tail: Lognormals
    output: JointMixture  # only its outputs are used
    warmup_s: float = 0.0
    rows_per_start: float = 1.0

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Longest shared prompt with its tail, and longest answer."""
        return self.pool.tokens.clip.high + self.tail.clip.high, self.output.output.high

    def draft(self, start_s: Floats, streams: Streams) -> Draft:
        """Return one request per start [n]."""
        rows = _rows_at(start_s)
        count = len(rows)
        which = self.pool.draw_choice(count, streams)
        shared = self.pool.draw_lengths(streams)[which]
        tail = self.tail.draw(count, streams.below("tail"))
        _, rows["output_tokens"] = self.output.draw(count, streams.below("output"))
        return _shared_then_private(rows, which, shared, tail, self.pool.count)


@dataclass(frozen=True)
class Family:
    """Requests that begin with one and the same prompt of ``shared_tokens``."""

    weight: float
    shared_tokens: int
    tail: Lognormals
    output: Lognormals


@dataclass(frozen=True)
class PromptFamilies:
    """A few shared prompts, each with its own tails and outputs."""

    families: tuple[Family, ...]
    warmup_s: float = 0.0
    rows_per_start: float = 1.0

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Longest of all families' prompts with their tails, and longest answer."""
        prompt = max(f.shared_tokens + f.tail.clip.high for f in self.families)
        return prompt, max(f.output.clip.high for f in self.families)

    def draft(self, start_s: Floats, streams: Streams) -> Draft:
        """Return one request per start [n]."""
        rows = _rows_at(start_s)
        weights = np.array([f.weight for f in self.families])
        which = pick(weights, streams.rng("family").random(len(rows)))
        tail = np.zeros(len(rows), np.int64)
        for i, family in enumerate(self.families):
            member = which == i
            count = int(member.sum())
            tail[member] = family.tail.draw(count, streams.below(f"tail{i}"))
            rows["output_tokens"][member] = family.output.draw(count, streams.below(f"output{i}"))
        shared = np.array([f.shared_tokens for f in self.families])[which]
        return _shared_then_private(rows, which, shared, tail, len(self.families))


@dataclass(frozen=True)
class Documents:
    """Short questions, long one-off prompts, and documents that are queried repeatedly.

    Weights are shares of requests. A document draws its length once; every further question about
    it arrives a Weibull gap after the one before, whether that has been answered or not.
    """

    short_weight: float
    short: JointMixture
    single_weight: float
    single: JointMixture
    document_weight: float
    document: JointMixture
    extra_questions_mean: float  # questions beyond the first two, negative binomial
    extra_questions_shape: float
    question: Lognormals
    gap_shape: float
    gap_scale_s: float
    warmup_s: float

    @property
    def _event_weights(self) -> Floats:
        """Weights [3] of short, single and document among starts."""
        per_document = 2.0 + self.extra_questions_mean
        return np.array(
            [self.short_weight, self.single_weight, self.document_weight / per_document]
        )

    @property
    def rows_per_start(self) -> float:
        """Mean number of requests per start."""
        requests = self.short_weight + self.single_weight + self.document_weight
        return requests / float(self._event_weights.sum())

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Longest question, alone or about a document, and longest answer."""
        prompts, outputs = zip(
            *(part.max_lengths for part in (self.short, self.single, self.document)), strict=True
        )
        return max(prompts) + self.question.clip.high, max(outputs)

    def draft(self, start_s: Floats, streams: Streams) -> Draft:
        """Return the requests of starts [n]; a document opened before 0 keeps later questions."""
        first = int(np.searchsorted(start_s, 0.0))
        before = self._requests(start_s[:first], streams.below("before"))
        return merge([before, self._requests(start_s[first:], streams.below("after"))])

    def _requests(self, start_s: Floats, streams: Streams) -> Draft:
        starts = len(start_s)
        kind = pick(self._event_weights, streams.rng("class").random(starts))
        shape = self.extra_questions_shape
        extra = streams.rng("asks").negative_binomial(
            shape, shape / (shape + self.extra_questions_mean), starts
        )
        questions = np.where(kind == 2, 2 + extra, 1)
        group = np.repeat(np.arange(starts), questions)
        is_first = np.diff(group, prepend=-1) > 0
        gap_s = self.gap_scale_s * streams.rng("gap").weibull(self.gap_shape, group.size)
        clock_s = np.cumsum(gap_s)
        rows = blank_rows(group.size)
        rows["arrival_s"] = start_s[group] + clock_s - clock_s[is_first][group]
        document, question = self._lengths(rows, kind, group, streams)
        segment = starts + np.arange(group.size)
        runs = set_runs(rows, [(group, document), (segment, question)])
        keep = rows["arrival_s"] >= 0
        return Draft(rows[keep], runs, starts + group.size, 0)

    def _lengths(
        self, rows: NDArray[np.void], kind: Ints, group: Ints, streams: Streams
    ) -> tuple[Ints, Ints]:
        """Set the lengths of rows [R]; return document and question tokens [R], 0 where private."""
        row_kind = kind[group]
        for number, mixture in ((0, self.short), (1, self.single)):
            member = row_kind == number
            prompt, output = mixture.draw(int(member.sum()), streams.below(f"class{number}"))
            rows["prompt_tokens"][member], rows["output_tokens"][member] = prompt, output
        below = streams.below("document")
        opened = np.flatnonzero(kind == 2)
        number_of = np.zeros(len(kind), np.int64)
        number_of[opened] = np.arange(opened.size)
        which = self.document.draw_component(opened.size, below)
        normal = below.rng("prompt").standard_normal(opened.size)
        tokens = self.document.prompt_tokens(which, normal)
        member = row_kind == 2
        numbers = number_of[group[member]]
        document = np.zeros(len(rows), np.int64)
        question = np.zeros(len(rows), np.int64)
        document[member] = tokens[numbers]
        question[member] = self.question.draw(int(member.sum()), streams.below("question"))
        output = self.document.output_tokens(which[numbers], normal[numbers], below)
        rows["prompt_tokens"][member] = (document + question)[member]
        rows["output_tokens"][member] = output
        return document, question


def _rows_at(start_s: Floats) -> NDArray[np.void]:
    """Return blank rows for the starts at 0 or later."""
    start_s = start_s[start_s >= 0]
    rows = blank_rows(len(start_s))
    rows["arrival_s"] = start_s
    return rows


def _shared_then_private(
    rows: NDArray[np.void], which: Ints, shared: Ints, tail: Ints, prompts: int
) -> Draft:
    """Give rows [R] a shared prompt ``which`` [R] and a private tail of ``tail`` tokens [R]."""
    rows["prompt_tokens"] = shared + tail
    private = prompts + np.arange(len(rows))
    runs = set_runs(rows, [(which, shared), (private, tail)])
    return Draft(rows, runs, prompts + len(rows), 0)
