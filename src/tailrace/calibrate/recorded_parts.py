"""What a log or recording has of one replica: its requests, their times, and sums of iterations.

Times are ms from the sending; NaN: not known, or not to be used.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.calibrate.recorded_capacity import Occupancy
from tailrace.calibrate.run_fit import Times
from tailrace.replay.recorded import RecordedTraffic
from tailrace.workload.table import RequestTable

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RecordedPart:
    """The requests of one replica, in order of sending, and their recorded times."""

    table: RequestTable
    ttft_ms: Floats
    answer_ms: Floats
    """From the first token to the end; NaN for answers of one token."""
    cached: Floats
    """Prompt tokens that were cached, as far as the server said so."""
    begin_ms: Floats
    """First iteration, from the sending; NaN: not known."""

    def times(self, count: int) -> Times:
        """Return the first ``count`` requests with recorded times in s."""
        rows = self.table.rows[:count]
        first, answer = self.ttft_ms[:count], self.answer_ms[:count]
        last = np.where(rows["output_tokens"] > 1, first + answer, first)
        return Times(RequestTable(rows, self.table.runs), 1e-3 * first, 1e-3 * last)

    def occupancy(self) -> Occupancy:
        """Return when requests ran; a first token stands for a first iteration not known."""
        sent = self.table.rows["arrival_s"]
        first = sent + 1e-3 * self.ttft_ms
        begin = np.where(np.isnan(self.begin_ms), first, sent + 1e-3 * self.begin_ms)
        last = first + 1e-3 * np.where(self.table.rows["output_tokens"] > 1, self.answer_ms, 0.0)
        begin = np.where(np.isnan(first), np.nan, begin)
        is_exact = bool(np.isfinite(self.begin_ms).any())
        return Occupancy(self.table, begin, first, last, is_exact)

    def beginning(self, count: int) -> "RecordedPart":
        """Return the first requests only."""
        columns = (self.ttft_ms, self.answer_ms, self.cached, self.begin_ms)
        table = RequestTable(self.table.rows[:count], self.table.runs)
        return RecordedPart(table, *(values[:count] for values in columns))


def part_of(
    recorded: RecordedTraffic, replica: int, only: NDArray[np.bool_] | None
) -> RecordedPart:
    """Return one replica's part; ``only`` [R]: the requests whose times may be used, None: all."""
    rows = recorded.by_sending(replica)
    done = recorded.outcomes[rows]
    table = recorded.at(rows)
    unused = done["is_estimated"] if only is None else done["is_estimated"] | ~only[rows]
    ttft = np.where(unused, np.nan, 1e3 * (done["first_s"] - done["sent_s"]))
    answer = np.where(unused, np.nan, 1e3 * (done["last_s"] - done["first_s"]))
    begin = np.where(unused, np.nan, 1e3 * (done["scheduled_s"] - done["sent_s"]))
    several = table.rows["output_tokens"] > 1
    cached = np.maximum(done["cached_tokens"], 0).astype(np.float64)
    return RecordedPart(
        table, ttft, np.where(several & (answer > 0), answer, np.nan), cached, begin
    )


def sums_of_answers(part: RecordedPart) -> tuple[Floats, Floats]:
    """Return the iterations of answers, roughly, as sums [k, interval_fit.FIXED], and their ms."""
    about = part.table.rows
    used = np.flatnonzero(np.isfinite(part.answer_ms) & np.isfinite(part.ttft_ms))
    prompt, output = (about[n][used].astype(np.float64) for n in ("prompt_tokens", "output_tokens"))
    first = about["arrival_s"][used] + 1e-3 * part.ttft_ms[used]
    last = first + 1e-3 * part.answer_ms[used]
    held = prompt + output / 2
    fresh = prompt - np.minimum(part.cached[used], prompt)
    work = fresh * (prompt - fresh / 2)
    seconds = last - first

    def mean(amount: Floats) -> Floats:
        """Mean over each answer's time of an amount that each answer under way adds."""
        moments = np.concatenate([first, last])
        order = np.argsort(moments, kind="stable")
        level = np.cumsum(np.concatenate([amount, -amount])[order])
        at = moments[order]
        area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(at))])
        spans: Floats = np.interp(last, at, area) - np.interp(first, at, area)
        return spans / seconds

    def meanwhile(amount: Floats) -> Floats:
        """Sum of an amount over the first tokens during each answer."""
        order = np.argsort(first, kind="stable")
        total = np.concatenate([[0.0], np.cumsum(amount[order])])
        sooner = first[order]
        until, since = (np.searchsorted(sooner, at, side="right") for at in (last, first))
        found: Floats = total[until] - total[since]
        return found

    steps = output - 1
    columns = (
        steps, steps * mean(np.ones_like(steps)) + meanwhile(fresh), steps * mean(held),
        meanwhile(work), np.zeros_like(steps),
    )  # fmt: skip
    return np.column_stack(columns), part.answer_ms[used]
