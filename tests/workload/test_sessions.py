"""Conversations: closed loops, growing prefixes, a start in full swing."""

import signal

import numpy as np
import pytest
from numpy.typing import NDArray

from tailrace.workload import library
from tailrace.workload.catalogue import lognormal
from tailrace.workload.content import PromptPool
from tailrace.workload.lengths import Streams
from tailrace.workload.sessions import (
    Borrow,
    Conversations,
    Think,
    UniformTurns,
    nominal_service_s,
)
from tailrace.workload.table import RequestTable
from workload import naive

TALKS = ("multi-turn-chat", "agents", "sessions-hot")
each_talk = pytest.mark.parametrize("name", TALKS)


@pytest.fixture(scope="module")
def tables() -> dict[str, RequestTable]:
    return {name: library.make(name, 10_000, None, 1) for name in TALKS}


def later(rows: NDArray[np.void]) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Rows that have a parent, and their parents."""
    child = np.flatnonzero(rows["parent"] >= 0)
    return rows[child], rows[rows["parent"][child]]


@each_talk
def test_turns_form_chains(name: str, tables: dict[str, RequestTable]) -> None:
    rows = tables[name].rows
    child, parent = later(rows)
    assert len(child) > 1000
    assert np.array_equal(child["session"], parent["session"])
    assert np.array_equal(child["turn"], parent["turn"] + 1)
    roots = rows[rows["parent"] < 0]
    assert (roots["turn"] == 0).all()
    assert (roots["think_s"] == 0).all()
    # Dense numbers by first appearance, one first turn each.
    assert np.array_equal(roots["session"], np.arange(len(roots)))


@each_talk
def test_context_grows_by_the_answer_and_new_text(
    name: str, tables: dict[str, RequestTable]
) -> None:
    child, parent = later(tables[name].rows)
    assert (child["prompt_tokens"] > parent["prompt_tokens"] + parent["output_tokens"]).all()


@each_talk
def test_a_turn_continues_the_content_of_the_turn_before(
    name: str, tables: dict[str, RequestTable]
) -> None:
    table = tables[name]
    later_turns = np.flatnonzero(table.rows["parent"] >= 0)[:500]
    assert later_turns.size >= 100
    for row in later_turns:
        parent = int(table.rows["parent"][row])
        now, before = naive.runs_of(table, int(row)), naive.runs_of(table, parent)
        assert now[:-1] == before[:-1]
        assert now[-1][0] == before[-1][0]
        answered = before[-1][1] + int(table.rows["output_tokens"][parent])
        assert now[-1][1] > answered


@each_talk
def test_nominal_arrival_is_service_and_think_after_the_parent(
    name: str, tables: dict[str, RequestTable]
) -> None:
    rows = tables[name].rows
    child, parent = later(rows)
    second = parent["turn"] >= 1  # of a first turn the system prompt counts as cached
    grand = rows[parent["parent"][second]]
    new = parent["prompt_tokens"][second] - grand["prompt_tokens"] - grand["output_tokens"]
    service = nominal_service_s(new.astype(np.int64), parent["output_tokens"][second])
    expected = parent["arrival_s"][second] + service + child["think_s"][second]
    assert child["arrival_s"][second] == pytest.approx(expected)


@each_talk
def test_the_table_starts_in_full_swing(name: str) -> None:
    # Begun with no conversation under way, the first fifth would have a fraction of the rate.
    spec = library.describe(name)
    early = []
    for seed in range(6):
        arrival_s = library.make(name, 4000, None, seed).rows["arrival_s"]
        span_s = 0.2 * 4000 / spec.default_rate_rps
        early.append((arrival_s < span_s).sum() / 800)
    assert np.mean(early) == pytest.approx(1.0, abs=0.1)


def test_multi_turn_chat_turns_and_gaps() -> None:
    rows = library.make("multi-turn-chat", 60_000, None, 1).rows
    child, parent = later(rows)
    # Conversations not near the end, of which later turns are cut off.
    first = rows["turn"] == 0
    early = rows["session"][first & (rows["arrival_s"] < 0.8 * rows["arrival_s"][-1])]
    turns = np.bincount(rows["session"])[early]
    # Trace: 0.32 go on after the first turn (prompts the blocks cannot link included), 0.41, 0.54.
    assert (turns > 1).mean() == pytest.approx(0.33, abs=0.03)
    assert (turns > 2).sum() / (turns > 1).sum() == pytest.approx(0.43, abs=0.05)
    assert (turns > 3).sum() / (turns > 2).sum() == pytest.approx(0.53, abs=0.06)
    gaps = np.log(child["arrival_s"] - parent["arrival_s"])
    assert gaps.mean() == pytest.approx(4.885, abs=0.05)
    assert gaps.std() == pytest.approx(0.984, abs=0.05)
    assert child["think_s"].min() >= 5.0


def test_multi_turn_chat_has_one_system_prompt_and_some_borrowed_beginnings() -> None:
    table = library.make("multi-turn-chat", 20_000, None, 1)
    first = table.runs[table.rows["run_start"]]
    assert len(set(first["segment"].tolist())) == 1
    assert set(first["tokens"].tolist()) == {880}
    roots = table.rows[table.rows["parent"] < 0]
    # 8.5 % want to; prompts under 1 100 tokens cannot.
    assert (roots["run_count"] == 3).mean() == pytest.approx(0.07, abs=0.015)


def test_agents_think_for_about_a_second_and_take_5_to_20_turns() -> None:
    table = library.make("agents", 20_000, None, 1)
    rows = table.rows
    think = rows["think_s"][rows["parent"] >= 0]
    assert np.percentile(think, [5, 50, 95]) == pytest.approx([0.5, 1.0, 2.0], rel=0.05)
    ended = np.bincount(rows["session"])[100:-300]
    assert ended.min() >= 5
    assert ended.max() == 20
    assert ended.mean() == pytest.approx(12.5, rel=0.05)
    shared = table.runs["tokens"][rows["run_start"]]
    assert shared.min() >= 2000
    assert shared.max() <= 8000
    assert len(set(shared.tolist())) <= 8


def test_sessions_hot_keeps_32_sessions_live_per_replica() -> None:
    rows = library.make("sessions-hot", 20_000, None, 1).rows
    think = rows["think_s"][rows["parent"] >= 0]
    assert np.median(think) == pytest.approx(10, rel=0.05)
    context = np.percentile(rows["prompt_tokens"], [5, 95])
    assert 700 < context[0] < 1500
    assert 4000 < context[1] < 6000
    start = np.full(rows["session"].max() + 1, np.inf)
    end = np.zeros_like(start)
    np.minimum.at(start, rows["session"], rows["arrival_s"])
    np.maximum.at(end, rows["session"], rows["arrival_s"])
    middle = np.linspace(0.2, 0.8, 50) * rows["arrival_s"][-1]
    live = np.mean([((start <= t) & (t <= end)).sum() for t in middle])
    # Counted up to the last turn's arrival: the last answer's 5 s in 180 are missing.
    assert live / 4 == pytest.approx(32, rel=0.15)


def conversations(**changes: object) -> Conversations:
    settings: dict[str, object] = {
        "pool": PromptPool(3, lognormal(100, 0.3, 50, 200)),
        "first": lognormal(200, 0.5, 10, 1000),
        "user": lognormal(40, 0.5, 1, 500),
        "output": lognormal(50, 0.5, 1, 500),
        "prompt_cap": 5000,
        "turns": UniformTurns(2, 5),
        "mean_turns": 3.5,
        "think": Think(1.0, 0.5),
        "warmup_s": 100.0,
    }
    return Conversations(**(settings | changes))  # type: ignore[arg-type]


def test_conversations_do_not_change_with_the_rate() -> None:
    start_s = np.cumsum(np.random.default_rng(1).random(200))
    slow = conversations().draft(start_s, Streams(1, "x"))
    fast = conversations().draft(start_s / 10, Streams(1, "x"))
    for column in ("prompt_tokens", "output_tokens", "session", "turn", "parent", "think_s"):
        assert np.array_equal(slow.rows[column], fast.rows[column])
    assert np.array_equal(slow.runs, fast.runs)


def test_conversations_under_way_enter_with_the_turns_they_have_left() -> None:
    start_s = np.sort(np.random.default_rng(2).uniform(-60, 0, 3000))
    draft = conversations(turns=UniformTurns(6, 6)).draft(start_s, Streams(1, "x"))
    rows = draft.rows
    assert (rows["arrival_s"] >= 0).all()
    turns = np.bincount(rows["session"])
    assert set(turns.tolist()) == {1, 2, 3, 4, 5}  # caught at every stage
    entry = rows[rows["turn"] == 0]
    assert len(entry) == len(turns)
    assert (entry["parent"] == -1).all()
    # They begin with a first turn, not with a context that nobody has seen.
    assert entry["prompt_tokens"].max() <= 1200


def test_prompt_cap_ends_conversations() -> None:
    start_s = np.linspace(0, 100, 500)
    rows = (
        conversations(turns=UniformTurns(50, 50), prompt_cap=900)
        .draft(start_s, Streams(1, "x"))
        .rows
    )
    assert rows["prompt_tokens"].max() <= 900
    turns = np.bincount(rows["session"])
    assert 1 < turns.mean() < 15


def test_think_from_arrival_takes_service_off() -> None:
    think = Think(np.log(20.0), 0.0, from_arrival=True, least_s=5.0)
    drawn = think.draw(np.array([3.0, 18.0, 100.0]), np.random.default_rng(1))
    assert drawn == pytest.approx([17.0, 5.0, 5.0])


def test_borrowers_share_the_beginning_of_a_recent_conversation() -> None:
    borrow = Borrow(chance=0.5, beta_a=2.0, beta_b=2.0, window_s=20.0, least_tokens=110)
    model = conversations(
        pool=PromptPool(1, lognormal(100, 0.0, 100, 100)), borrow=borrow, turns=UniformTurns(1, 1)
    )
    start_s = np.linspace(0, 1000, 2000)
    draft = model.draft(start_s, Streams(1, "x"))
    table = RequestTable(draft.rows, draft.runs)
    owner = {naive.runs_of(table, row)[-1][0]: row for row in range(len(table))}
    borrowers = np.flatnonzero(draft.rows["run_count"] == 3)
    assert len(borrowers) / len(table) == pytest.approx(0.5, abs=0.05)
    for row in borrowers[:200]:
        system, lent, own = naive.runs_of(table, int(row))
        lender = owner[lent[0]]
        assert naive.runs_of(table, lender)[0] == system
        assert table.rows["run_count"][lender] == 2
        assert 0 <= start_s[row] - start_s[lender] <= 20.0
        assert lent[1] >= 10
        assert own[1] >= 1


def test_borrowing_needs_a_common_system_prompt() -> None:
    with pytest.raises(ValueError, match="one system prompt"):
        conversations(borrow=Borrow(0.5, 1.0, 1.0, 10.0, 10))


def test_traffic_whose_first_starts_all_fall_into_the_warm_up_is_made_all_the_same():
    """This seed used to go on for ever: nothing had started by time 0, and nothing was added."""

    def too_long(*_: object) -> None:
        raise TimeoutError("made no progress")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    try:
        table = library.make("sessions-hot", 20, 35.6, seed=1_002_000_015)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert len(table.rows) == 20
