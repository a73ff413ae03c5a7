"""Recorded traffic with what became of it: where each request went and when it ended.

Two kinds are read: decision logs of the live router, and recordings of one server's own times
(``replay/server_recording.py``).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import MAX_REPLICAS
from tailrace.errors import TailraceError
from tailrace.replay import server_recording
from tailrace.sim.result import FINISHED, REPLICA_RESULT, REQUEST_RESULT, SimResult
from tailrace.workload import decision_log, traces
from tailrace.workload.columns import MAX_TOKENS
from tailrace.workload.table import RequestTable
from tailrace.workload.trace_formats import checked_number

#: What became of one request. Times are seconds from the first arrival.
OUTCOME = np.dtype(
    [
        ("arrived_s", "f8"),  # at the router
        ("sent_s", "f8"),  # to its replica
        ("scheduled_s", "f8"),  # first iteration began, as the server says; NaN: it does not
        ("first_s", "f8"),  # first token, at the router
        ("last_s", "f8"),  # end of the answer
        ("replica", "i4"),
        ("cached_tokens", "i4"),  # as the server says, -1: it does not
        ("is_estimated", "?"),  # first_s is an estimate: the answer did not stream
    ]
)


@dataclass(frozen=True)
class RecordedTraffic:
    """Answered requests in the order of their arrival, and what became of them [R] (OUTCOME)."""

    table: RequestTable
    outcomes: NDArray[np.void]
    policies: tuple[str, ...]
    """Policies that decided, the one with the most decisions first."""
    skipped: int
    """Requests that were not answered, and are in neither."""
    backends: tuple[str, ...] = ()
    """Names of the replicas by number; empty: the log has none."""
    settings: Mapping[str, int] = field(default_factory=dict)
    """Settings of the server that a recording states, see ``server_recording.Settings``."""

    @property
    def replicas(self) -> int:
        """Replicas that the numbers in the log call for."""
        return int(self.outcomes["replica"].max()) + 1

    def at(self, rows: NDArray[np.int64]) -> RequestTable:
        """Return some requests as their replicas got them: in order of sending, at these times.

        ``rows`` must be in that order. Follow-ups keep their times, whatever the turn before does.
        """
        part = self.table.rows[rows].copy()
        part["arrival_s"] = self.outcomes["sent_s"][rows] - self.outcomes["sent_s"][rows[0]]
        part["parent"] = -1
        part["think_s"] = 0.0
        table = RequestTable(part, self.table.runs)
        table.validate()
        return table

    def by_sending(self, replica: int | None = None) -> NDArray[np.int64]:
        """Return row numbers in order of sending, of one replica or of all."""
        order = np.argsort(self.outcomes["sent_s"], kind="stable")
        return order if replica is None else order[self.outcomes["replica"][order] == replica]

    def result(self) -> SimResult:
        """Return what was recorded as a simulation would: latencies count from the arrival.

        The scheduling delay is the wait at the router, for no more of it is known.
        """
        done = np.zeros(len(self.table), REQUEST_RESULT)
        for name, source in (
            ("arrived_s", "arrived_s"),
            ("scheduled_s", "sent_s"),
            ("first_token_s", "first_s"),
            ("finished_s", "last_s"),
            ("replica", "replica"),
        ):
            done[name] = self.outcomes[source]
        done["status"] = FINISHED
        done["cached_tokens"] = np.maximum(self.outcomes["cached_tokens"], 0)
        replicas = np.zeros(self.replicas, REPLICA_RESULT)
        replicas["requests"] = np.bincount(done["replica"], minlength=self.replicas)
        return SimResult(self.table, done, replicas, len(done))


def is_recorded(path: Path) -> bool:
    """Whether a file, or a folder, is a decision log or a recording of a server."""
    try:
        return server_recording.is_recording(path) or traces.detect(path) == "decisions"
    except IsADirectoryError:
        raise TailraceError(
            f"{path} is a folder without a decision log (decisions-*.jsonl)"
        ) from None
    except traces.UnknownJsonError:
        return False
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None


def read(path: Path, *, since: float = 0.0, most: int | None = None) -> RecordedTraffic:
    """Read a decision log or a recording of a server, a file or a folder, with its times.

    Of a decision log, only requests that arrived at Unix time ``since`` or later, and of those the
    last ``most``.
    """
    if not is_recorded(path):
        raise TailraceError(
            f"{path} is no decision log; `tailrace serve --set decisions.folder=DIR` writes one. A "
            "recording of a server is JSON lines with "
            f"{', '.join(server_recording.NAMES[k][0] for k in server_recording.REQUIRED)}"
        )
    if server_recording.is_recording(path):
        if since:
            raise TailraceError(f"{path} has no times of day to choose from")
        return _of_server(server_recording.read(path))
    try:
        return of_answered(decision_log.answered(path, since=since, most=most))
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None


def of_answered(found: decision_log.Answered) -> RecordedTraffic:
    """Return completed requests of a decision log with what became of them."""
    chosen = found.requests
    outcomes = np.zeros(len(chosen), OUTCOME)
    outcomes["scheduled_s"] = np.nan
    numbers = _Numbers(request.outcome["replica"] for request in chosen)
    start_s = chosen[0].line.arrived
    for row, request in zip(outcomes, chosen, strict=True):
        where, data = request.where, request.outcome
        for name, key in (
            ("arrived_s", "arrived"), ("sent_s", "sent"), ("first_s", "first"), ("last_s", "last")
        ):  # fmt: skip
            row[name] = checked_number(where, data, key, -np.inf, np.inf) - start_s
        row["replica"] = numbers.of(checked_number(where, data, "replica", -1, MAX_REPLICAS), data)
        cached = data["cached_reported"]
        row["cached_tokens"] = min(max(cached, -1), MAX_TOKENS) if isinstance(cached, int) else -1
        row["is_estimated"] = bool(data["estimated"])
        if not row["sent_s"] < row["first_s"] <= row["last_s"] or row["replica"] < 0:
            raise TailraceError(f"{where}: the times of the request are not in order")
    policies = Counter(str(request.outcome["policy"]) for request in chosen)
    names = tuple(name for name, _ in policies.most_common())
    table = decision_log.imported(found).table
    table.validate()
    return RecordedTraffic(table, outcomes, names, found.skipped, numbers.names())


def _of_server(recording: server_recording.ServerRecording) -> RecordedTraffic:
    """Return a recording as traffic of one replica. What it got when is all that is known."""
    rows = recording.requests
    start_s = float(rows["queued_s"][0])
    outcomes = np.zeros(len(rows), OUTCOME)
    for name, source in (
        ("arrived_s", "queued_s"), ("sent_s", "queued_s"), ("scheduled_s", "scheduled_s"),
        ("first_s", "first_s"), ("last_s", "last_s"),
    ):  # fmt: skip
        outcomes[name] = rows[source] - start_s
    outcomes["cached_tokens"] = rows["cached_tokens"]
    table = RequestTable.build(outcomes["arrived_s"], rows["prompt_tokens"], rows["output_tokens"])
    return RecordedTraffic(
        table, outcomes, (), recording.skipped, settings=dict(recording.settings)
    )


class _Numbers:
    """Numbers of replicas, each for one of them only.

    A router gives the number of a removed backend to another one. The second one of a number gets
    one that the log does not use; logs without names of backends are taken as they are.
    """

    def __init__(self, recorded: Iterable[Any]) -> None:
        known = (n for n in recorded if isinstance(n, int) and n <= MAX_REPLICAS)
        self._unused = 1 + max(known, default=-1)
        self._by_name: dict[str, int] = {}
        self._named: dict[int, str] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names in the order of the numbers; empty if some replica has none."""
        by_number = {number: name for name, number in self._by_name.items()}
        found = [by_number.get(k, "") for k in range(1 + max(by_number, default=-1))]
        return tuple(found) if all(found) else ()

    def of(self, number: float, data: dict[str, Any]) -> int:
        """Return the number of a line's replica, which has this one in the log."""
        number, name = int(number), data.get("backend")
        if not isinstance(name, str) or not name:
            return number
        found = self._by_name.get(name)
        if found is None:
            if self._named.setdefault(number, name) == name:
                found = number
            else:
                found, self._unused = self._unused, self._unused + 1
            self._by_name[name] = found
        return found
