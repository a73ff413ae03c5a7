"""Traffic drawn from recorded conversations: rate, rhythm, turns, text."""

import numpy as np
import pytest

from tailrace.workload.prefix import repeated_tokens
from tailrace.workload.recorded.resample import LEAD_IN, LONGEST_PAUSE_S, ConversationPool
from tailrace.workload.table import RequestTable


def chats(count: int = 40, turns: int = 30, gap_s: float = 60.0) -> RequestTable:
    """Conversations that all begin at 0: a system prompt (segment 0), then a chain of turns."""
    rows = [(k * gap_s, s, k) for s in range(count) for k in range(turns)]
    rows.sort()
    row_of = {(s, k): i for i, (_, s, k) in enumerate(rows)}
    runs = [[(0, 100), (1 + s, 50 * (k + 1))] for _, s, k in rows]
    return RequestTable.build(
        np.array([at for at, _, _ in rows]),
        np.array([150 + 50 * k for _, _, k in rows]),
        np.full(len(rows), 10),
        runs,
        session=np.array([s for _, s, _ in rows]),
        turn=np.array([k for _, _, k in rows]),
        parent=np.array([row_of.get((s, k - 1), -1) for _, s, k in rows]),
        think_s=np.array([gap_s * (k > 0) for _, _, k in rows]),
    )


def test_the_rate_is_as_asked_after_the_lead_in_though_conversations_outlast_the_window() -> None:
    drawn = ConversationPool(chats()).draw(4000, 10.0, seed=1)  # 400 s of conversations of 1740 s
    at = drawn.rows["arrival_s"]
    lead_s = LEAD_IN * 400
    assert len(drawn) == 4000
    after = at[at > lead_s]
    assert len(after) / (after[-1] - lead_s) == pytest.approx(10.0, rel=0.15)
    first = at[at < lead_s / 4]
    assert len(first) < 0.5 * 10.0 * lead_s / 4  # they join one by one


def test_turns_keep_their_order_think_times_and_numbers() -> None:
    drawn = ConversationPool(chats()).draw(3000, 10.0, seed=2)
    rows = drawn.rows
    has = np.flatnonzero(rows["parent"] >= 0)
    before = rows["parent"][has]
    assert (rows["session"][has] == rows["session"][before]).all()
    assert (rows["turn"][has] == rows["turn"][before] + 1).all()
    assert (rows["think_s"][has] == 60.0).all()
    np.testing.assert_allclose(rows["arrival_s"][has] - rows["arrival_s"][before], 60.0)
    joined = (rows["parent"] < 0) & (rows["turn"] > 0)
    assert joined.any()
    assert (rows["think_s"][rows["parent"] < 0] == 0).all()


def test_copies_of_a_conversation_share_the_system_prompt_only() -> None:
    one = ConversationPool(chats(count=2)).draw(600, 5.0, seed=3)
    rows = one.rows
    assert rows["session"].max() > 10
    repeated = repeated_tokens(one)
    starts = np.flatnonzero(np.diff(rows["session"], prepend=-1) > 0)[1:]
    starts = [i for i in starts if not (rows["session"][:i] == rows["session"][i]).any()]
    assert starts
    assert (repeated[starts] == 100).all()


def test_seeds_draw_other_traffic_and_the_same_seed_the_same() -> None:
    recording = ConversationPool(chats())
    a, b, c = (recording.draw(500, 5.0, seed) for seed in (1, 1, 2))
    assert (a.rows == b.rows).all()
    assert (a.runs == b.runs).all()
    assert not np.array_equal(a.rows["arrival_s"], c.rows["arrival_s"])


def test_recorded_beginnings_keep_their_rhythm() -> None:
    bursts = np.repeat(np.arange(50) * 100.0, 20)  # 20 at once, every 100 s
    table = RequestTable.build(bursts, np.full(1000, 9), np.full(1000, 9))
    at = ConversationPool(table).draw(800, 10.0, seed=4).rows["arrival_s"]
    assert (np.diff(at) == 0).mean() > 0.9
    assert 799 / at[-1] == pytest.approx(10.0, rel=0.1)


def test_a_night_counts_as_an_hour() -> None:
    table = RequestTable.build(
        np.array([0.0, 80_000.0]), np.full(2, 9), np.full(2, 9),
        session=np.zeros(2, int), parent=np.array([-1, 0]), think_s=np.array([0.0, 79_999.0]),
    )  # fmt: skip
    rows = ConversationPool(table).draw(4000, 0.5, seed=5).rows
    followed = rows["parent"] >= 0
    assert followed.any()
    assert (rows["think_s"][followed] == LONGEST_PAUSE_S).all()


@pytest.mark.parametrize("rate", [0.001, 3.0, 5000.0])
def test_any_rate_and_a_single_request_will_do(rate: float) -> None:
    table = RequestTable.build(np.zeros(1), np.full(1, 9), np.full(1, 9))
    assert len(ConversationPool(table).draw(50, rate, seed=6)) == 50


def test_copies_of_segments_with_large_numbers_stay_apart() -> None:
    small = chats(count=3, turns=4)
    large = RequestTable(small.rows, small.runs.copy())
    large.runs["segment"] += 10**18 - 10
    for seed in (1, 2):
        a, b = (ConversationPool(table).draw(200, 5.0, seed) for table in (small, large))
        assert repeated_tokens(a).tolist() == repeated_tokens(b).tolist()
