"""The Python book-keeper: snapshots in time, and records that return to rest."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config import Replica, RouterSettings
from tailrace.view.bookkeeper import Bookkeeper, RequestFacts, Sent, table_facts
from tailrace.workload.library import make


@dataclass
class Request:
    id: int
    streamed: int = 0


class Book(Bookkeeper):
    """Two servers that publish whatever the test says."""

    def __init__(self, staleness_s: float = 0.5) -> None:
        super().__init__([Replica(), Replica()], RouterSettings(staleness_s=staleness_s), seed=1)
        self.taken: list[float] = []

    def server_metrics(self, replica: int) -> tuple[int, int, float]:
        return 3 + replica, 2, 0.25

    def streamed_context(self, sent: Sent) -> int:
        return sent.facts.prompt_tokens + int(sent.request.streamed)

    def take_snapshot(self, now: float) -> None:
        super().take_snapshot(now)
        self.taken.append(now)


@settings(deadline=None)  # the first example compiles
@given(st.integers(1, 100_000), st.sampled_from([0.001, 0.1, 0.3, 0.5, 0.7, 1 / 3, 10.0]))
def test_a_snapshot_is_taken_when_it_is_due_whatever_division_rounds_to(
    number: int, interval: float
) -> None:
    book = Book(interval)
    due = number * interval
    book.snapshots_by(due, before=True)
    assert book.taken == [(number - 1) * interval]
    book.snapshots_by(due)
    book.snapshots_by(due)
    assert book.taken[1:] == [due]
    assert book.views["metrics_at"].tolist() == [due, due]
    assert book.views["waiting"].tolist() == [3, 4]


def test_fresh_metrics_are_read_at_every_decision() -> None:
    book = Book(0.0)
    book.snapshots_by(5.0)
    assert not book.taken
    book.show(RequestFacts(0, 10, 5, 1), 1.0, 2.0)
    assert book.taken == [2.0]


def test_records_follow_a_request_and_return_to_rest() -> None:
    book, request = Book(), Request(9)
    facts = RequestFacts(0, 100, 7, prefix_hash=1, session=4, predicted=20.0)
    view = book.show(facts, 1.0, 1.5)
    assert (view.request["arrived_at"], view.request["now"]) == (1.0, 1.5)
    assert view.request["last_replica"] == -1
    assert book.record_sent(1, request, facts).predicted == 20
    assert view.replicas["queued_tokens"].tolist() == [0, 100]
    assert book.is_waiting(1, request)
    assert not book.is_waiting(0, request)
    book.show(facts, 2.0, 2.0)
    assert view.request["last_replica"] == 1
    assert view.replicas["oldest_sent"][1] == 1.5
    book.record_first_token(1, request)
    request.streamed = 3
    book.show(facts, 3.0, 3.0)
    assert view.replicas["context_tokens"].tolist() == [0, 103]
    book.record_finished(1, request)
    book.show(facts, 4.0, 4.0)
    for name in ("in_flight", "queued", "queued_tokens", "context_tokens", "predicted_tokens"):
        assert not view.replicas[name].any(), name
    assert view.router["finished_tokens"] == 7


def test_a_death_takes_everything_along() -> None:
    book, facts = Book(), RequestFacts(0, 100, 7, prefix_hash=1)
    for number in range(2):
        book.show(facts, 0.0, 0.0)
        book.record_sent(0, Request(number), facts)
    book.record_first_token(0, Request(0))
    book.record_death(0)
    assert book.views["in_flight"].tolist() == [0, 0]
    assert not book.is_waiting(0, Request(1))
    with pytest.raises(KeyError):
        book.record_finished(0, Request(0))


def test_facts_of_a_table() -> None:
    table = make("sessions-hot", 20, 5.0, seed=2)
    plain = table_facts(table, RouterSettings(), 0)
    exact = table_facts(table, RouterSettings(predictor="exact"), 0)
    for number, row in enumerate(table.rows):
        assert plain[number].number == number
        assert plain[number].prompt_tokens == row["prompt_tokens"]
        assert plain[number].session == row["session"]
        assert plain[number].predicted is None
        assert exact[number].predicted == row["output_tokens"]
