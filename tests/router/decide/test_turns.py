"""Turns: every block has one owner, each cycle one block of the candidate's, at random."""

from collections import Counter

import pytest

from router.clusters import chat, new_chooser, new_cluster
from tailrace.router.decide import chooser as decide
from tailrace.router.decide.chooser import ChooserSettings
from tailrace.router.decide.turns import Turns


@pytest.mark.parametrize("blocks", [2, 5, 8])
def test_each_cycle_has_one_block_of_the_candidate(blocks: int) -> None:
    turns = Turns(3, 30.0, blocks)
    begin = 1_700_000_000 // turns.cycle_s * turns.cycle_s
    places: Counter[int] = Counter()
    for cycle in range(400):
        at = begin + cycle * turns.cycle_s
        owned = [turns.is_candidates(at + 30.0 * k + 0.5) for k in range(blocks)]
        assert sum(owned) == 1
        assert owned.index(True) == turns.candidates_block(turns.cycle(at))
        # From its first to its last moment.
        first = at + 30.0 * owned.index(True)
        assert turns.is_candidates(first)
        assert turns.is_candidates(first + 29.999)
        places[owned.index(True)] += 1
    assert min(places.values()) > 400 / blocks / 2
    assert len(places) == blocks


def test_seeds_draw_differently() -> None:
    draws = [[Turns(seed, 1.0, 5).candidates_block(c) for c in range(50)] for seed in (1, 2)]
    assert draws[0] != draws[1]


def test_a_canary_by_turns_gets_all_requests_of_its_blocks_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr(decide.time, "time", lambda: now[0])
    chooser = new_chooser(
        new_cluster(3), "least_outstanding", canary="random", canary_share=0.25,
        canary_block_s=10.0, canary_seed=9, canary_until=now[0] + 4000,
    )  # fmt: skip
    turns = chooser.settings.turns
    assert turns == Turns(9, 10.0, 4)
    decided = {}
    for k in range(800):
        now[0] = 1_700_000_000.0 + 5 * k + 0.5
        decision = chooser.choose(chooser.cluster.arrive(chat(f"{k}", user=f"u{k % 3}")))
        assert decision is not None
        decided[now[0]] = decision.policy
        expected = "random" if turns.is_candidates(now[0]) else "least_outstanding"
        assert decision.policy == expected
    assert Counter(decided.values())["random"] == 200
    now[0] += 5000
    while not turns.is_candidates(now[0]):
        now[0] += 10
    decision = chooser.choose(chooser.cluster.arrive(chat("late")))
    assert decision is not None
    assert decision.policy == "least_outstanding"


def test_turns_need_a_share_of_a_half_at_most() -> None:
    with pytest.raises(ValueError, match="takes turns"):
        ChooserSettings(canary="random", canary_share=0.9, canary_block_s=10)


def test_what_a_canary_says_about_waiting_holds_during_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr("tailrace.router.decide.chooser.time.time", lambda: now[0])
    held = "least_outstanding+queue:max_in_flight=1"
    chooser = new_chooser(
        new_cluster(), canary=held, canary_share=0.25, canary_block_s=10.0, canary_seed=9,
        canary_until=now[0] + 4000,
    )  # fmt: skip
    told: list[str] = []
    chooser.follow_room(lambda: told.append("room"))
    turns = chooser.settings.turns
    assert turns is not None
    seen = set()
    for _ in range(40):
        now[0] += 10
        own = turns.is_candidates(now[0])
        assert (chooser.waiting_rules.holding is not None) is own
        seen.add(own)
    assert seen == {True, False}
    while not turns.is_candidates(now[0]):
        now[0] += 10
    chooser.waiting_rules.first_token(0, 1, 0.0)
    assert told == ["room"]
    now[0] += 4000
    assert chooser.waiting_rules.holding is None
    before = len(chooser.cluster.listeners)
    chooser.close()
    assert len(chooser.cluster.listeners) == before - 1
