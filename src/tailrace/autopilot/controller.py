"""What to do next: a pure function of the state and of what a round has found.

    watching --a policy is simulated to be better--> shadow --it works--> canary
    canary --the test says better--> guard, with the candidate in charge
    canary --worse, undecided, or no longer better in simulation--> watching
    guard --the former policy is better by now--> watching, with the former policy in charge
    guard --time is over--> watching

Only the sequential test on live requests puts a policy in charge. The simulator chooses whom to
try, and lowers the noise of the test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailrace.autopilot.sequential import change_detected, evidence
from tailrace.autopilot.state import PilotState
from tailrace.router.settings import AutopilotSettings

#: Mean number of cycles until the former policy is put back although there is no difference.
MEAN_CYCLES_TO_FALSE_RETURN = 1000.0
#: Fewest decisions of a shadow.
LEAST_SHADOWED = 100
#: A candidate that the simulator takes back may be tried again after this, s.
SHORT_REST_S = 1800.0


@dataclass(frozen=True)
class SimulatedCost:
    """What a policy would cost on the traffic of the window, as simulated."""

    policy: str
    cost_s: float


@dataclass(frozen=True)
class Findings:
    """What a round has found."""

    now: float
    """Unix time, s."""
    settings_policy: str
    """Policy in charge if the autopilot does nothing."""
    prospects: Sequence[SimulatedCost]
    """Of all policies that could be simulated."""
    twin_error: float
    """Of the simulated mean end-to-end time under the recorded decisions, as a share."""
    shadowed: int = 0
    """Decisions of the shadow since it began."""
    vetoed: frozenset[str] = frozenset()
    overruled: str = ""
    """What an operator has done meanwhile: changed the settings, or given policies other roles.
    Empty: nothing."""


def step(state: PilotState, found: Findings, settings: AutopilotSettings) -> PilotState:
    """Return the state after a round; ``routing`` says what it means for the router."""
    now, acts = found.now, settings.mode == "act"
    state = replace(
        state, settings_policy=found.settings_policy, vetoed=tuple(sorted(found.vetoed))
    )
    vetoed = {state.present, state.candidate} & found.vetoed
    if vetoed or found.overruled:
        why = f"{', '.join(sorted(vetoed))} was vetoed" if vetoed else found.overruled
        fresh = replace(state, present="", candidate="")
        if (state.stage, state.present) == ("watching", ""):
            return fresh.noted(now, f"waiting: {why}", "waiting")
        return fresh.enter("watching", now, f"stopped: {why}", vetoed=sorted(found.vetoed))
    if not acts and (state.stage != "watching" or state.present):
        state = replace(state, present="", candidate="")
        return state.enter("watching", now, "stopped: it may only suggest")
    if state.stage == "watching":
        return _watch(state, found, settings)
    if state.stage == "shadow":
        return _shadow(state, found, settings)
    if state.stage == "canary":
        return _judge(state, found, settings)
    return _guard(state, found, settings)


def _is_trusted(found: Findings, settings: AutopilotSettings) -> bool:
    """Whether the simulation is accurate enough to give a policy anything more than it has.

    To take something away from one, live requests alone are enough.
    """
    return abs(found.twin_error) <= settings.max_error


def _distrusted(state: PilotState, found: Findings, settings: AutopilotSettings) -> PilotState:
    return state.noted(
        found.now, "waiting: the simulation is not accurate enough to act on", "waiting",
        error=found.twin_error, limit=settings.max_error,
    )  # fmt: skip


def gain(found: Findings, present: str, policy: str) -> float | None:
    """Return by which share a policy is simulated to be cheaper than the present one."""
    costs = {p.policy: p.cost_s for p in found.prospects}
    if present not in costs or policy not in costs:
        return None
    return 1 - costs[policy] / costs[present]


def _watch(state: PilotState, found: Findings, settings: AutopilotSettings) -> PilotState:
    if not _is_trusted(found, settings):
        return _distrusted(state, found, settings)
    now, rests = found.now, state.rests or {}
    present = state.present or found.settings_policy
    able = [
        p for p in found.prospects
        if p.policy != present and p.policy not in found.vetoed and rests.get(p.policy, 0.0) <= now
    ]  # fmt: skip
    best = min(able, key=lambda p: p.cost_s, default=None)
    better = None if best is None else gain(found, present, best.policy)
    if present not in [p.policy for p in found.prospects]:
        return state.noted(now, f"waiting: {present} cannot be simulated", "waiting")
    if best is None or better is None or better < settings.least_gain:
        return state.noted(
            now, f"{present} is the best policy for this traffic, as simulated", "prospects"
        )
    figures = {"policy": best.policy, "simulated_gain": better, "twin_error": found.twin_error}
    if settings.mode != "act":
        return state.noted(
            now, f"suggests {best.policy}: {better:.0%} cheaper, as simulated", "prospects",
            **figures,
        )  # fmt: skip
    return replace(state, candidate=best.policy).enter(
        "shadow", now, f"{best.policy} is {better:.0%} cheaper, as simulated: it shadows", **figures
    )


def _shadow(state: PilotState, found: Findings, settings: AutopilotSettings) -> PilotState:
    now, policy = found.now, state.candidate
    if now - state.since < settings.shadow_s:
        return state
    if found.shadowed < LEAST_SHADOWED:
        if now - state.since > settings.trial_s:
            return _dismiss(state, found, settings, "it hardly decided anything as a shadow")
        return state
    if not _is_trusted(found, settings):
        return _distrusted(state, found, settings)
    still = gain(found, state.present or found.settings_policy, policy)
    if still is None or still <= 0:
        rest_s = min(settings.rest_s, SHORT_REST_S)
        return _dismiss(state, found, settings, "no longer better, as simulated", rest_s=rest_s)
    return state.enter(
        "canary", now, f"{policy} has its first turns", shadowed=found.shadowed,
        simulated_gain=still,
    )  # fmt: skip


def _judge(state: PilotState, found: Findings, settings: AutopilotSettings) -> PilotState:
    now, policy = found.now, state.candidate
    seen = evidence(state.listed(), alpha=settings.alpha, margin=settings.margin)
    figures = vars(seen) | {"alpha": settings.alpha, "margin": settings.margin}
    proven = seen.better >= 1 / settings.alpha
    if proven and _is_trusted(found, settings):
        former = state.present or found.settings_policy
        return replace(state, present=policy, candidate=former).enter(
            "guard", now, f"{policy} has proven better than {former} and is in charge", **figures
        )
    if seen.worse >= 1 / settings.alpha:
        return _dismiss(state, found, settings, "it has proven worse", **figures)
    if now - state.since > settings.trial_s:
        return _dismiss(state, found, settings, "neither better nor worse", **figures)
    if not _is_trusted(found, settings):
        return _distrusted(state, found, settings)
    return state.noted(now, f"{policy} has turns", "turns", **figures)


def _guard(state: PilotState, found: Findings, settings: AutopilotSettings) -> PilotState:
    now, former = found.now, state.candidate
    figures = vars(evidence(state.listed(), alpha=settings.alpha))
    if change_detected(state.listed(), mean_cycles=MEAN_CYCLES_TO_FALSE_RETURN):
        worse = state.present
        back = "" if former == found.settings_policy else former
        returned = replace(state, present=back, candidate="").enter(
            "watching", now, f"{worse} has become worse: {former} is in charge again", **figures
        )
        return returned.rested(worse, now + settings.rest_s)
    if now - state.since > settings.guard_s:
        return replace(state, candidate="").enter(
            "watching", now, f"{state.present} has stayed better than {former}", **figures
        )
    what = f"{state.present} is in charge, {former} has turns"
    return state.noted(now, what, "turns", **figures)


def _dismiss(
    state: PilotState, found: Findings, settings: AutopilotSettings, why: str,
    rest_s: float | None = None, **figures: Any,
) -> PilotState:  # fmt: skip
    now, policy = found.now, state.candidate
    rest_s = settings.rest_s if rest_s is None else rest_s
    left = replace(state, candidate="").rested(policy, now + rest_s)
    return left.enter("watching", now, f"{policy} is dismissed: {why}", **figures)


def routing(state: PilotState, now: float, settings: AutopilotSettings) -> dict[str, Any]:
    """Return the roles of policies for the router (``POST /routing``); empty: the settings' own.

    Turns end by themselves when no round renews them, for instance because this process died.
    """
    roles: dict[str, Any] = {"policy": state.present} if state.present else {}
    if state.stage == "shadow":
        roles["shadow"] = state.candidate
    elif state.stage in ("canary", "guard"):
        turns = state.turns(settings.share, settings.block_s)
        lease_s = 3 * settings.every_s + 2 * turns.cycle_s
        roles |= {
            "canary": state.candidate,
            "canary_share": 1 / turns.blocks,
            "canary_block_s": turns.block_s,
            "canary_seed": turns.seed,
            # In steps, as every change makes the router load its policies anew.
            "canary_until": (now // lease_s + 2) * lease_s,
        }
    return roles
