import json

import numpy as np
import pytest

from tailrace.config import parse
from tailrace.errors import TailraceError
from tailrace.learn.exploration import Exploration, ExplorationSettings, ExplorationValues


def make(**settings) -> Exploration:
    return Exploration(ExplorationSettings(**settings))


def test_everything_is_off_by_default():
    exploration = make()
    exploration.after_update(0.0)
    for update in range(5):
        exploration.after_evaluation(update, 1.0)
    exploration.red_flag(5)
    assert exploration.values(6) == ExplorationValues(0.0, 1.0, 0.0, False)


def test_schedules_go_from_start_to_end_and_stay_there():
    exploration = make(
        entropy_start=0.04,
        entropy_end=0.02,
        entropy_updates=10,
        temperature_start=2.0,
        temperature_end=1.0,
        temperature_updates=4,
        epsilon_start=0.3,
        epsilon_updates=3,
    )
    first, third, late = (exploration.values(update) for update in (0, 2, 50))
    assert first == ExplorationValues(0.04, 2.0, 0.3, False)
    assert third == pytest.approx(ExplorationValues(0.036, 1.5, 0.1, False))
    assert late == ExplorationValues(0.02, 1.0, 0.0, False)


def test_the_bonus_seeks_the_target_entropy_from_both_sides():
    exploration = make(entropy_start=0.01, entropy_end=0.01, target_entropy=0.5, target_rate=1.25)
    for _ in range(3):
        exploration.after_update(0.3)
    assert exploration.values(3).entropy_weight == pytest.approx(0.01 * 1.25**3)
    for _ in range(3, 10):
        exploration.after_update(0.7)
    assert exploration.values(10).entropy_weight == pytest.approx(0.01 * 1.25**-4)
    for _ in range(10, 200):
        exploration.after_update(0.0)
    assert exploration.values(200).entropy_weight == pytest.approx(10.0)  # bounded


def test_the_floor_raises_the_bonus_at_once_and_lets_go_slowly():
    exploration = make(entropy_start=0.001, entropy_end=0.001, entropy_floor=0.2, floor_weight=0.1)
    exploration.after_update(0.21)
    assert exploration.values(1).entropy_weight == 0.001
    exploration.after_update(0.19)
    assert exploration.values(2).entropy_weight == 0.1
    exploration.after_update(0.5)
    assert exploration.values(3).entropy_weight == pytest.approx(0.09)
    for _ in range(3, 100):
        exploration.after_update(0.5)
    assert exploration.values(100).entropy_weight == 0.001


def test_stagnation_starts_a_pulse_that_lasts_and_decays():
    exploration = make(pulse_factor=3.0, pulse_updates=2, pulse_decay=0.5, pulse_patience=2)
    exploration.after_evaluation(0, 1.0)
    exploration.after_evaluation(1, 0.9)
    exploration.after_evaluation(2, 0.9)
    assert exploration.values(3).temperature == 1.0
    exploration.after_evaluation(3, 0.8999)  # better, but by less than the margin
    assert [exploration.values(u).temperature for u in range(3, 9)] == [1, 3, 3, 2, 1.5, 1.25]
    assert [exploration.values(u).pulse for u in range(3, 7)] == [False, True, True, False]
    assert exploration.values(40).temperature == 1.0


def test_after_a_pulse_the_policy_gets_as_much_time_again():
    exploration = make(pulse_factor=2.0, pulse_updates=1, pulse_patience=2)
    for update in range(3):
        exploration.after_evaluation(update, 1.0)
    assert exploration.values(3).pulse
    exploration.after_evaluation(3, 1.0)
    assert not exploration.values(4).pulse
    exploration.after_evaluation(4, 1.0)
    assert exploration.values(5).pulse


def test_an_improving_score_never_pulses_and_a_red_flag_always_does():
    exploration = make(pulse_factor=2.0, pulse_updates=3, pulse_patience=1)
    for update in range(10):
        exploration.after_evaluation(update, 1.0 - 0.05 * update)
        assert exploration.values(update + 1).temperature == 1.0
    exploration.red_flag(10)
    exploration.red_flag(11)  # one is under way: it is not prolonged
    assert [exploration.values(u).pulse for u in range(10, 15)] == [False, True, True, True, False]


def test_negative_scores_improve_downwards_too():
    exploration = make(pulse_factor=2.0, pulse_patience=1)
    exploration.after_evaluation(0, -1.0)
    exploration.after_evaluation(1, -1.1)
    assert not exploration.values(2).pulse
    exploration.after_evaluation(2, -1.0)
    assert exploration.values(3).pulse


def test_a_restored_state_goes_on_exactly():
    settings = {
        "entropy_start": 0.01,
        "entropy_end": 0.002,
        "entropy_updates": 30,
        "target_entropy": 0.5,
        "entropy_floor": 0.3,
        "pulse_factor": 2.0,
        "pulse_patience": 2,
    }

    def play(exploration: Exploration, first: int, last: int) -> list[ExplorationValues]:
        out = []
        for update in range(first, last):
            out.append(exploration.values(update))
            exploration.after_update(0.2 + 0.05 * (update % 9))
            exploration.after_evaluation(update, 1.0 - 0.01 * (update % 4))
        return out

    whole = make(**settings)
    expected = play(whole, 0, 40)
    for cut in (0, 1, 17, 23):
        first, second = make(**settings), make(**settings)
        before = play(first, 0, cut)
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert before + play(second, cut, 40) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_entropy": 0.5}, "set entropy_start and entropy_end"),
        (
            {"target_entropy": 0.3, "entropy_start": 1, "entropy_end": 1, "entropy_floor": 0.4},
            "entropy_floor = 0.4 lies above",
        ),
        ({"pulse_patience": 3}, "set pulse_factor above 1"),
        ({"temperature_start": 0}, "temperature_start"),
        ({"epsilon_start": 1.5}, "epsilon_start"),
        ({"entropy_end": float("nan")}, "entropy_end"),
        ({"temprature_start": 2}, "did you mean"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(TailraceError, match=message):
        parse(ExplorationSettings, settings)


# ---- schedules of several points, periodic pulses, a held entropy -------------------------------


def test_a_schedule_of_several_points_is_linear_between_them():
    exploration = make(
        entropy_points=[[2, 0.02], [10, 0.004], [20, 0.0]],
        temperature_points=[[0, 2.0], [4, 1.0]],
        epsilon_points=[[0, 0.5]],
    )
    found = [exploration.values(u).entropy_weight for u in (0, 2, 6, 10, 15, 20, 99)]
    assert found == pytest.approx([0.02, 0.02, 0.012, 0.004, 0.002, 0.0, 0.0])
    found = [exploration.values(u).temperature for u in (0, 1, 4, 9)]
    assert found == pytest.approx([2.0, 1.75, 1.0, 1.0])
    assert {exploration.values(u).epsilon for u in range(5)} == {0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entropy_points": [[0, 0.1], [0, 0.2]]}, "must rise"),
        ({"temperature_points": [[0, 0.0]]}, "must lie from 0.01 to 100"),
        ({"epsilon_points": [[0, 1.5]]}, "must lie from 0 to 1"),
        ({"epsilon_points": [[0, 0.5]], "epsilon_start": 0.2}, "choose one"),
        ({"pulse_interval": 10}, "set pulse_factor above 1"),
        ({"pulse_interval": 5, "pulse_factor": 2.0}, "leaves no time between pulses"),
        (
            {"entropy_start": 0.1, "entropy_end": 0.1, "target_entropy": 0.4,
             "temperature_entropy": 0.4},
            "both steer the entropy",
        ),
        ({"entropy_points": [[0, 0.1], [9, 0.0]], "target_entropy": 0.4}, "above zero"),
    ],
)  # fmt: skip
def test_exploration_that_makes_no_sense(settings, message):
    with pytest.raises(TailraceError, match=message):
        parse(ExplorationSettings, settings)


def test_periodic_pulses_come_at_their_interval_beside_others():
    exploration = make(pulse_factor=3.0, pulse_updates=2, pulse_decay=0.5, pulse_interval=6)
    found = [exploration.values(u).temperature for u in range(14)]
    assert found == [1, 1, 1, 1, 1, 1, 3, 3, 2, 1.5, 1.25, 1.125, 3, 3]
    assert [u for u in range(20) if exploration.values(u).pulse] == [6, 7, 12, 13, 18, 19]
    exploration.red_flag(8)
    assert [u for u in range(20) if exploration.values(u).pulse] == [6, 7, 9, 10, 12, 13, 18, 19]


def test_the_temperature_holds_an_entropy():
    exploration = make(temperature_entropy=0.5, target_rate=1.2)
    exploration.after_update(0.2)  # far too low: the full rate
    assert exploration.values(1).temperature == pytest.approx(1.2)
    exploration.after_update(0.55)  # half the deviation of the full rate above it
    assert exploration.values(2).temperature == pytest.approx(1.2 * 1.2**-0.5)
    exploration.after_update(0.5)
    assert exploration.values(3).temperature == pytest.approx(1.2**0.5)
    again = make(temperature_entropy=0.5, target_rate=1.2)
    again.restore(json.loads(json.dumps(exploration.state())))
    assert again.values(4) == exploration.values(4)
    for _ in range(200):
        exploration.after_update(0.0)
    assert exploration.values(9).temperature == pytest.approx(10.0)  # bounded


def test_a_policy_of_fixed_logits_is_brought_to_the_held_entropy():
    """Entropy of softmax(logits / T) over 4 replicas, as the controller sees it."""
    logits = np.array([3.0, 1.0, 0.0, -1.0])
    exploration = make(temperature_entropy=0.7, target_rate=1.2)
    for update in range(100):
        policy = np.exp(logits / exploration.values(update).temperature)
        policy /= policy.sum()
        fraction = float(-(policy * np.log(policy)).sum() / np.log(4))
        exploration.after_update(fraction)
    assert fraction == pytest.approx(0.7, abs=1e-3)
