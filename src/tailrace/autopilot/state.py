"""What the autopilot remembers: one JSON file, written whole after every round.

It survives a restart of the autopilot and of the router, and the router shows it on ``/status``. It
holds names of policies, times and costs; nothing of any request.
"""

import json
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Literal, get_args

from tailrace.autopilot.sequential import Cycle
from tailrace.files import dumps, write_text
from tailrace.router.decide.turns import Turns

FORMAT = 2
#: Steps that are kept.
MOST_STEPS = 50

Stage = Literal["watching", "shadow", "canary", "guard"]


@dataclass(frozen=True)
class LoggedStep:
    """Something the autopilot did or found, with the figures it went by."""

    at: float
    """Unix time, s."""
    what: str
    evidence: dict[str, Any]
    about: str = ""
    """What a note is about; the next one about the same takes its place. Empty: a step that is
    kept."""


@dataclass(frozen=True)
class PilotState:
    """Where the autopilot stands. Times are Unix times in s.

    watching: one policy is in charge. shadow: a candidate only says what it would do. canary: it
    has turns. guard: it has taken over, and the former policy has turns.
    """

    stage: Stage = "watching"
    present: str = ""
    """Policy in charge; empty: that of the settings."""
    settings_policy: str = ""
    """Policy of the settings when the autopilot looked last; another one means an operator."""
    vetoed: tuple[str, ...] = ()
    """Policies that an operator has vetoed."""
    candidate: str = ""
    """The other policy of this stage; in guard, the former one."""
    since: float = 0.0
    """When the stage began."""
    seed: int = 0
    """Of the turns."""
    cycles: dict[int, Cycle] | None = None
    """Cycles of this stage that have ended, by number."""
    rests: dict[str, float] | None = None
    """When policies that were dismissed may be tried again."""
    steps: tuple[LoggedStep, ...] = ()

    def turns(self, share: float, block_s: float) -> Turns:
        """Return the schedule of the candidate's turns; in guard it gets half of the share."""
        blocks = round(1 / share) * (2 if self.stage == "guard" else 1)
        return Turns(self.seed, block_s, blocks)

    def listed(self) -> list[Cycle]:
        """Return the cycles in their order."""
        cycles = self.cycles or {}
        return [cycles[number] for number in sorted(cycles)]

    def with_cycles(self, found: dict[int, Cycle]) -> "PilotState":
        """Add cycles that have ended; each is judged once, by what was predicted at its time."""
        return replace(self, cycles={**found, **(self.cycles or {})})

    def enter(self, stage: Stage, now: float, what: str, **evidence: Any) -> "PilotState":
        """Begin a stage and note why; notes of the stage before are dropped."""
        seed = int(now) if stage in ("canary", "guard") else self.seed
        step = LoggedStep(now, what, evidence)
        kept = [s for s in self.steps if not s.about]
        return replace(
            self, stage=stage, since=now, seed=seed, cycles={},
            steps=(*kept, step)[-MOST_STEPS:],
        )  # fmt: skip

    def rested(self, policy: str, until: float) -> "PilotState":
        """Do not try a policy before a time."""
        return replace(self, rests={**(self.rests or {}), policy: until})

    def not_ahead_of(self, now: float, rest_s: float) -> "PilotState":
        """Return the state without times in the future: the clock may have been set back.

        A stage that seems to begin later begins now, and no policy rests for longer than
        ``rest_s``.
        """
        rests = {policy: min(until, now + rest_s) for policy, until in (self.rests or {}).items()}
        state = self if rests == (self.rests or {}) else replace(self, rests=rests)
        return state if state.since <= now else replace(state, since=now, cycles={})

    def noted(self, now: float, what: str, about: str, **evidence: Any) -> "PilotState":
        """Note how things stand; the steps before are kept, what was noted about the same is not.

        So rounds in which nothing happens do not push out what has happened.
        """
        steps = tuple(s for s in self.steps if s.about != about)
        return replace(self, steps=(*steps, LoggedStep(now, what, evidence, about))[-MOST_STEPS:])


def save(path: Path, state: PilotState, shown: dict[str, Any]) -> None:
    """Write the state, and what else the router shows."""
    data = {field.name: getattr(state, field.name) for field in fields_of(PilotState)}
    write_text(path, dumps({"format": FORMAT, **data, **shown}) + "\n")


def load(path: Path) -> PilotState:
    """Read the state; a new one if there is none, or if the file is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            return PilotState()
        cycles = {
            int(number): Cycle(int(c["candidate"]), tuple(c["log_cost"]), tuple(c["log_predicted"]))
            for number, c in (data["cycles"] or {}).items()
        }
        steps = tuple(
            LoggedStep(s["at"], s["what"], s["evidence"], s["about"]) for s in data["steps"]
        )
        names = ("stage", "present", "settings_policy", "candidate")
        plain = {name: data[name] for name in names}
        texts = all(isinstance(value, str) for value in plain.values())
        if not texts or plain["stage"] not in get_args(Stage) or type(data["vetoed"]) is not list:
            return PilotState()
        rests = {str(policy): float(until) for policy, until in (data["rests"] or {}).items()}
        return PilotState(
            **plain, since=float(data["since"]), seed=int(data["seed"]), rests=rests or None,
            vetoed=tuple(map(str, data["vetoed"])), cycles=cycles, steps=steps,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return PilotState()
