"""The autopilot's rounds: read the log, simulate, judge, tell the router, write down.

It is a process of its own at the lowest priority, started and watched by ``tailrace serve``. It
reads the decision log and talks to the router's admin listener and to nobody else, except that it
asks the servers once how large their KV memory is. Everything that goes wrong in a round is noted
and tried again in the next one.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.autopilot import controller
from tailrace.autopilot.blocks import cycles_of
from tailrace.autopilot.controller import Findings, SimulatedCost
from tailrace.autopilot.sizing import ReplicasWanted, replicas_wanted
from tailrace.autopilot.state import PilotState, load, save
from tailrace.autopilot.twin import Twin, Window
from tailrace.calibrate.live import reported_capacity
from tailrace.config import Replica, parse
from tailrace.errors import TailraceError
from tailrace.router.settings import AutopilotSettings

#: A twin is fitted anew after so long, s.
REFIT_S = 3600.0
#: Fewest requests to say anything about.
LEAST_REQUESTS = 500
#: Policies that are shown, the best first.
SHOWN_PROSPECTS = 10
ADMIN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Orders:
    """What the router tells its autopilot at the start."""

    admin: str
    """Address of the admin listener, http://host:port."""
    token_env: str | None
    """Variable with its token."""
    folder: Path
    """Of the decision log."""
    file: Path
    """That keeps the state."""
    settings: AutopilotSettings


class AdminClient:
    """The router's admin listener."""

    def __init__(self, orders: Orders) -> None:
        self._url = orders.admin
        self._headers = {}
        if orders.token_env is not None:
            self._headers["Authorization"] = f"Bearer {os.environ.get(orders.token_env, '')}"

    def get(self, path: str) -> Any:
        """Read a page."""
        return self._ask(urllib.request.Request(self._url + path, headers=self._headers))

    def post(self, path: str, value: Any) -> Any:
        """Make a change."""
        body = json.dumps(value).encode()
        return self._ask(
            urllib.request.Request(
                self._url + path, body, self._headers | {"Content-Type": "application/json"}
            )
        )

    def _ask(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=ADMIN_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            why = error.read(500).decode(errors="replace")
            raise TailraceError(f"the router refuses {request.selector}: {why}") from None
        except (OSError, ValueError) as error:
            raise TailraceError(f"the router does not answer: {error}") from None


class Pilot:
    """Keeps the state from round to round."""

    def __init__(
        self, orders: Orders, admin: AdminClient, clock: Callable[[], float] = time.time
    ) -> None:
        self._orders, self._admin, self._clock = orders, admin, clock
        self.state = load(orders.file)
        self._twin: Twin | None = None
        self._fitted_at = 0.0
        self._capacity: dict[str, int] | None = None
        self._applied: dict[str, Any] | None = None  # roles; None: not known after a start

    def round(self) -> None:
        """Do all of it once; what goes wrong is noted."""
        settings, now = self._orders.settings, self._clock()
        shown: dict[str, Any] = {"mode": settings.mode, "at": now}
        try:
            shown |= self._fly(now)
        except TailraceError as error:
            self.state = self.state.noted(now, f"waiting: {error}")
        shown["says"] = self.state.steps[-1].what if self.state.steps else "has just begun"
        shown["took_s"] = self._clock() - now
        save(self._orders.file, self.state, shown)

    def _fly(self, now: float) -> dict[str, Any]:
        settings = self._orders.settings
        roles = self._roles()
        window = Window.read(self._orders.folder, now - settings.window_s, settings.requests)
        requests = len(window.recorded.table)
        if requests < LEAST_REQUESTS:
            raise TailraceError(f"{requests} requests so far, {LEAST_REQUESTS} are needed")
        twin, error = self._fitted(window, now)
        present = self.state.present or roles["settings_policy"]
        names = twin.portfolio(settings.policies, present, orders=roles["takes_priorities"])
        prospects = twin.prospects(window, names)
        self.state = self._with_cycles(twin, window, present, now)
        found = Findings(
            now, roles["settings_policy"], prospects, error,
            shadowed=int((window.shadowed_s >= self.state.since).sum()),
            vetoed=frozenset(roles["vetoed"]), reset=self._was_reset(roles),
        )  # fmt: skip
        self.state = controller.step(self.state, found, settings)
        if settings.mode == "act":
            self._apply(now)
        return {
            "requests": requests,
            "twin_error": error,
            "prospects": [asdict(p) for p in prospects[:SHOWN_PROSPECTS]],
            "wanted": self._wanted(twin, window, present, prospects),
        }

    def _roles(self) -> dict[str, Any]:
        """Return the roles of policies; tell a router that has just started of earlier vetoes."""
        roles: dict[str, Any] = self._admin.get("/routing")
        if self._applied is None and set(self.state.vetoed) - set(roles["vetoed"]):
            roles = self._admin.post("/autopilot/veto", list(self.state.vetoed))
        return roles

    def _fitted(self, window: Window, now: float) -> tuple[Twin, float]:
        """Return the twin and its error; it is fitted anew if it is old, or wrong."""
        twin = self._twin
        if twin is not None and twin.fits(window) and now - self._fitted_at < REFIT_S:
            error = twin.error(window)
            if abs(error) <= self._orders.settings.max_error / 2:
                return twin, error
        if self._capacity is None:
            urls = [backend["url"] for backend in self._admin.get("/backends")]
            self._capacity = reported_capacity(urls)
        twin = Twin.fit(window, parse(Replica, dict(self._capacity)))
        self._twin, self._fitted_at = twin, now
        return twin, twin.error(window)

    def _with_cycles(self, twin: Twin, window: Window, present: str, now: float) -> PilotState:
        """Return the state with the cycles that have ended since the last round."""
        state, settings = self.state, self._orders.settings
        if state.stage not in ("canary", "guard"):
            return state
        turns = state.turns(settings.share, settings.block_s)
        # Requests of the last blocks may still be running, and are not in the log yet. Those of a
        # slow policy must not be left out.
        outcomes = window.recorded.outcomes
        longest_s = float(np.quantile(outcomes["last_s"] - outcomes["arrived_s"], 0.99))
        end_s = min(now, float(np.max(window.arrived_s))) - max(turns.block_s, 3 * longest_s)
        found = cycles_of(
            turns, window.arrived_s, window.costs_s(), twin.predicted_s(window, present),
            washout_s=settings.washout_s, begin_s=max(state.since, window.start_s), end_s=end_s,
        )  # fmt: skip
        return state.with_cycles(found)

    def _was_reset(self, roles: dict[str, Any]) -> bool:
        """Whether somebody else has changed the settings, or what this process had set."""
        if self.state.settings_policy not in ("", roles["settings_policy"]):
            return True
        if not self._applied:
            return False
        return any(roles[name] != self._applied.get(name, "") for name in ("canary", "shadow")) or (
            roles["policy"] != self._applied.get("policy", roles["settings_policy"])
        )

    def _apply(self, now: float) -> None:
        wanted = controller.routing(self.state, now, self._orders.settings)
        if wanted != self._applied:
            self._admin.post("/routing", wanted)
            self._applied = wanted

    def _wanted(
        self, twin: Twin, window: Window, present: str, prospects: list[SimulatedCost]
    ) -> ReplicasWanted | None:
        if present not in [p.policy for p in prospects]:
            return None
        return replicas_wanted(
            window.recorded.table, twin.model, present,
            attainment=self._orders.settings.attainment,
        )  # fmt: skip
