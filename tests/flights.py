"""An autopilot without a router, for tests: rounds on a decision log of simulated traffic."""

import time
from pathlib import Path
from typing import Any

from tailrace.autopilot.pilot import Orders, Pilot
from tailrace.router.settings import AutopilotSettings


class Router:
    """The admin listener of a router."""

    def __init__(self) -> None:
        self.roles: dict[str, Any] = {
            "policy": "round_robin", "canary": "", "shadow": "", "vetoed": [],
            "settings_policy": "round_robin", "given_by": "settings", "takes_priorities": False,
        }  # fmt: skip
        self.posted: list[dict[str, Any]] = []

    def get(self, path: str) -> Any:
        return {"/routing": self.roles, "/backends": []}[path]

    def post(self, path: str, value: Any) -> Any:
        if path == "/autopilot/veto":
            self.roles["vetoed"] = list(value)
            return self.roles
        assert path == "/autopilot/routing"
        self.posted.append(value)
        self.give(value, "autopilot")
        return self.roles

    def give(self, value: dict[str, Any], by: str) -> None:
        own = {"policy": self.roles["settings_policy"], "canary": "", "shadow": ""}
        self.roles |= own | {k: v for k, v in value.items() if k in own}
        self.roles["given_by"] = by if value else "settings"


def flown(folder: Path, file: Path, router: Router, **given: Any) -> Pilot:
    usual = {"policies": ("round_robin", "load_aware", "random"), "max_error": 0.5}
    settings = AutopilotSettings(**{**usual, **given})
    orders = Orders(folder, file, settings)
    return Pilot(orders, router, clock=lambda: time.time() + 100)  # type: ignore[arg-type]
