"""The autopilot's steps, on made-up findings: whom it tries, when it switches, when it stops."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.autopilot.controller import Findings, SimulatedCost, routing, step
from tailrace.autopilot.sequential import Cycle
from tailrace.autopilot.state import MOST_STEPS, PilotState, load, save
from tailrace.router.decide.chooser import ChooserSettings
from tailrace.router.settings import AutopilotSettings

ACT = AutopilotSettings(mode="act")
SUGGEST = AutopilotSettings(mode="suggest")
NOW = 1_700_000_000.0


def found(now: float = NOW, **given: Any) -> Findings:
    prospects = [
        SimulatedCost("tailrace", 0.9),
        SimulatedCost("load_aware", 1.0),
        SimulatedCost("random", 2.0),
    ]
    return Findings(**{
        "now": now, "settings_policy": "load_aware", "prospects": prospects, "twin_error": 0.05,
        "shadowed": 500, **given,
    })  # fmt: skip


def cycles(effect: float, count: int, seed: int = 0) -> dict[int, Cycle]:
    rng = np.random.default_rng(seed)
    made = {}
    for number in range(count):
        noise, candidate = 0.02 * rng.standard_normal(5), int(rng.integers(5))
        noise[candidate] += math.log1p(effect)
        made[number] = Cycle(candidate, tuple(noise.tolist()), (0.0,) * 5)
    return made


def in_canary(effect: float, count: int = 20) -> PilotState:
    state = step(step(PilotState(), found(), ACT), found(NOW + 400), ACT)
    assert (state.stage, state.candidate) == ("canary", "tailrace")
    return replace(state, cycles=cycles(effect, count))


def test_the_whole_way_of_a_better_policy() -> None:
    state = step(PilotState(), found(), ACT)
    assert (state.stage, routing(state, NOW, ACT)) == ("shadow", {"shadow": "tailrace"})
    assert step(state, found(NOW + 100), ACT) == state  # not long enough
    assert step(state, found(NOW + 400, shadowed=3), ACT) == state  # not often enough
    state = step(state, found(NOW + 400), ACT)
    roles = routing(state, NOW + 400, ACT)
    assert (state.stage, roles["canary"], roles["canary_share"]) == ("canary", "tailrace", 0.2)
    assert "policy" not in roles
    state = replace(state, cycles=cycles(-0.1, 20))
    state = step(state, found(NOW + 6000), ACT)
    roles = routing(state, NOW + 6000, ACT)
    assert (state.stage, roles["policy"], roles["canary"]) == ("guard", "tailrace", "load_aware")
    assert roles["canary_share"] == 0.1
    assert state.steps[-1].evidence["better"] >= 20
    state = step(state, found(NOW + 6000 + ACT.guard_s + 1), ACT)
    assert (state.stage, routing(state, NOW, ACT)) == ("watching", {"policy": "tailrace"})


@pytest.mark.parametrize(("effect", "what"), [(0.1, "proven worse"), (0.0, "neither better")])
def test_a_candidate_that_does_not_prove_better_goes(effect: float, what: str) -> None:
    state = step(in_canary(effect), found(NOW + 400 + ACT.trial_s + 1), ACT)
    assert (state.stage, state.present) == ("watching", "")
    assert what in state.steps[-1].what
    assert routing(state, NOW, ACT) == {}
    # It is not tried again for a while.
    later = step(state, found(NOW + 400 + ACT.trial_s + 600), ACT)
    assert later.stage == "watching"
    rested = step(state, found(NOW + 400 + ACT.trial_s + ACT.rest_s + 600), ACT)
    assert rested.stage == "shadow"


def test_it_hands_back_when_the_new_policy_becomes_worse() -> None:
    state = step(in_canary(-0.1), found(NOW + 6000), ACT)
    assert state.present == "tailrace"
    # The former policy has turns now: it is better by 10 %.
    state = step(replace(state, cycles=cycles(-0.1, 40)), found(NOW + 9000), ACT)
    assert (state.stage, state.present, routing(state, NOW, ACT)) == ("watching", "", {})
    assert "has become worse" in state.steps[-1].what
    assert step(state, found(NOW + 9300), ACT).stage == "watching"


def test_suggest_changes_nothing() -> None:
    state = step(PilotState(), found(), SUGGEST)
    assert (state.stage, routing(state, NOW, SUGGEST)) == ("watching", {})
    assert state.steps[-1].what == "suggests tailrace: 10% cheaper, as simulated"
    # And ends what acting has begun.
    assert step(in_canary(-0.1), found(NOW + 500), SUGGEST).stage == "watching"
    in_charge = replace(PilotState(), present="random")
    assert step(in_charge, found(), SUGGEST).present == ""


@pytest.mark.parametrize("error", [-0.3, math.nan])
@pytest.mark.parametrize("stage", ["watching", "shadow", "canary"])
def test_a_twin_that_is_wrong_may_not_act(stage: str, error: float) -> None:
    shadow = step(PilotState(), found(), ACT)
    before = {"watching": PilotState(), "shadow": shadow, "canary": in_canary(-0.1)}[stage]
    after = step(before, found(NOW + 500, twin_error=error), ACT)
    unchanged = replace(before, settings_policy="load_aware", steps=())
    assert replace(after, steps=()) == unchanged
    assert "not accurate enough" in after.steps[-1].what


def test_a_twin_that_is_wrong_keeps_nobody_in_charge() -> None:
    worse = step(in_canary(0.1), found(NOW + 500, twin_error=-0.3), ACT)
    assert "proven worse" in worse.steps[-1].what
    state = step(in_canary(-0.1), found(NOW + 6000), ACT)
    state = replace(state, cycles=cycles(-0.1, 40))
    assert step(state, found(NOW + 9000, twin_error=-0.3), ACT).present == ""


def test_a_veto_ends_it_and_small_gains_are_not_worth_it() -> None:
    state = step(in_canary(-0.1), found(NOW + 500, vetoed=frozenset({"tailrace"})), ACT)
    assert (state.stage, routing(state, NOW, ACT)) == ("watching", {})
    again = step(state, found(NOW + 800, vetoed=frozenset({"tailrace"})), ACT)
    assert again.stage == "watching"
    close = [SimulatedCost("tailrace", 0.98), SimulatedCost("load_aware", 1.0)]
    assert step(PilotState(), found(prospects=close), ACT).stage == "watching"
    overruled = step(in_canary(-0.1), found(NOW + 500, overruled="an operator"), ACT)
    assert (overruled.stage, overruled.steps[-1].what) == ("watching", "stopped: an operator")


def test_the_router_takes_what_it_is_told_and_turns_end_by_themselves() -> None:
    state = in_canary(-0.1)
    roles = routing(state, NOW + 400, ACT)
    settings = ChooserSettings(**roles)
    assert settings.turns == state.turns(ACT.share, ACT.block_s)
    assert NOW + 400 + 2 * ACT.every_s < roles["canary_until"] < NOW + 3 * 3600
    # The same for a while: the router would load its policies anew each time.
    told = {routing(state, NOW + 400 + k * ACT.every_s, ACT)["canary_until"] for k in range(20)}
    assert len(told) <= 5


def test_a_state_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "autopilot.json"
    assert load(path) == PilotState()
    state = step(in_canary(0.1), found(NOW + 20_000), ACT)
    for known in (state, in_canary(-0.1)):
        save(path, known, {"says": "hello"})
        assert load(path) == known
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert load(path) == PilotState()
    for name, value in (("stage", "x"), ("since", None), ("vetoed", "x"), ("rests", {"x": "y"})):
        path.write_text(json.dumps(json.loads(whole) | {name: value}))
        assert load(path) == PilotState()


def test_a_clock_that_is_set_back_holds_nothing_up() -> None:
    state = step(PilotState(), found(NOW + 1e8), ACT).rested("random", NOW + 1e8)
    assert state.not_ahead_of(NOW + 1e8, ACT.rest_s) == state
    back = state.not_ahead_of(NOW, ACT.rest_s)
    assert (back.stage, back.since, back.rests) == ("shadow", NOW, {"random": NOW + ACT.rest_s})
    assert step(back, found(NOW + 400), ACT).stage == "canary"
    late = replace(in_canary(-0.1), since=NOW + 1e8)
    assert late.not_ahead_of(NOW, ACT.rest_s).cycles == {}  # they belong to other times


def test_steps_are_kept_and_notes_replace_each_other() -> None:
    state = PilotState()
    for k in range(3 * MOST_STEPS):
        state = state.noted(NOW + k, f"{k} requests so far", "waiting")
    assert [s.what for s in state.steps] == [f"{3 * MOST_STEPS - 1} requests so far"]
    for k in range(3 * MOST_STEPS):
        state = state.noted(NOW, "turns", "turns").enter("watching", NOW + k, f"step {k}")
    assert len(state.steps) == MOST_STEPS
    assert [s.what for s in state.steps[-2:]] == ["step 148", "step 149"]
