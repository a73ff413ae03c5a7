"""The ledger: a field that a function forgets is found here, also one that is new."""

import numpy as np
import pytest

from tailrace.config import Replica
from tailrace.view import ledger
from tailrace.view.records import REPLICA_VIEW, ROUTER
from tailrace.view.replicas import idle_views

#: Set by the router itself, not by the ledger.
CONFIGURATION = {
    *("available", "speed", "capacity_tokens", "block_size", "token_budget", "batch_cap"),
    "prefill_tokens_per_s",
}
PREFIX_INDEX = {"cached_tokens", "index_tokens", "new_blocks"}
METRICS = {"metrics_at", "waiting", "running", "kv_used"}
#: Totals and moving averages: they do not return to zero when all requests have ended.
TOTALS = {
    *("sent_tokens", "sent_requests", "recent_work", "recent_at"),
    *("finished", "finished_tokens"),
    *("streamed", "recent_tokens", "recent_in_flight"),
}
#: Set by whoever counts tokens or knows the queue, before a decision.
GIVEN = {"context_tokens", "oldest_sent", "active_blocks"}
FIELDS = set(REPLICA_VIEW.names or ())


def idle() -> np.ndarray:
    return idle_views([Replica()])


def test_all_fields_are_listed_above() -> None:
    listed = [CONFIGURATION, PREFIX_INDEX, METRICS, TOTALS, GIVEN]
    assert set().union(*listed) <= FIELDS
    assert sum(map(len, listed)) == len(set().union(*listed))


@pytest.mark.parametrize("end", ["finished", "cancelled", "lost"])
def test_requests_that_have_ended_leave_nothing_behind(end: str) -> None:
    views, router = idle(), np.zeros(1, ROUTER)
    replica = views[0]
    ledger.sent(replica, 100, 30, 12, 1.0)
    ledger.sent(replica, 50, 0, 8, 2.0)
    changed = {name for name in FIELDS if replica[name] != idle()[0][name]}
    assert changed >= FIELDS - CONFIGURATION - PREFIX_INDEX - METRICS - TOTALS - GIVEN - {
        "answering_prompts"
    }
    ledger.answering(replica, 100, 30, 1.0)
    ledger.answering(replica, 50, 0, 2.0)
    assert replica["answering_prompts"] == 150
    if end == "finished":
        ledger.finished(replica, router[0], 100, 12, 20)
        ledger.finished(replica, router[0], 50, 8, 9)
        assert (replica["finished"], replica["finished_tokens"]) == (2, 29)
        assert (router["finished"], router["finished_tokens"]) == (2, 29)
    elif end == "cancelled":
        ledger.cancelled(replica, 100, 12, 3)
        ledger.cancelled(replica, 50, 8, 0)
        assert (replica["finished"], replica["finished_tokens"]) == (0, 3)
    else:
        ledger.lost(replica)
    for name in FIELDS - METRICS - TOTALS - GIVEN:
        assert replica[name] == idle()[0][name], name


def test_the_records_of_two_workers_add_up() -> None:
    """Every field that a worker counts shows in the sum."""
    view, other = idle()[0], idle()[0]
    for name in FIELDS - CONFIGURATION - PREFIX_INDEX:
        view[name], other[name] = 2, 5
    view["oldest_sent"], other["oldest_sent"] = 5, 2  # the earlier one counts
    before = view.copy()
    ledger.add(view, other, 0.5)
    for name in FIELDS - CONFIGURATION - PREFIX_INDEX - {"recent_at"}:
        assert view[name] != before[name], name
    for name in CONFIGURATION | PREFIX_INDEX | {"recent_at"}:
        assert view[name] == before[name], name
    assert view["in_flight"] == 7
    assert view["recent_tokens"] == 2 + 5 * 0.5
    assert (view["waiting"], view["oldest_sent"]) == (5, 2)


def test_the_newer_metrics_snapshot_counts() -> None:
    view, other = idle()[0], idle()[0]
    ledger.scraped(view, 3, 4, 0.5, 9.0)
    ledger.scraped(other, 1, 1, 0.1, 8.0)
    ledger.add(view, other, 1.0)
    assert (view["metrics_at"], view["waiting"], view["kv_used"]) == (9.0, 3, 0.5)
