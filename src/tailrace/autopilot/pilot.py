"""The autopilot's rounds: read the log, simulate, judge, tell the router, write down.

It is a process of its own at the lowest priority, started and watched by ``tailrace serve``. It
reads the decision log and talks to the router's admin listener and to nobody else, except that it
asks the servers once how large their KV memory is. Everything that goes wrong in a round is noted
and tried again in the next one.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.autopilot import controller, fine_tuning
from tailrace.autopilot.admin_client import AdminClient
from tailrace.autopilot.blocks import cycles_of
from tailrace.autopilot.controller import Findings, SimulatedCost
from tailrace.autopilot.fine_tuning import FineTuning
from tailrace.autopilot.served_costs import ServedCosts
from tailrace.autopilot.sizing import ReplicasWanted, replicas_wanted
from tailrace.autopilot.state import PilotState, load, save
from tailrace.autopilot.twin import Twin, Window, with_order
from tailrace.calibrate.live import reported_capacity
from tailrace.config import Replica, parse
from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.router.settings import AutopilotSettings

#: A twin is fitted anew after so long, s.
REFIT_S = 3600.0
#: Fewest requests to say anything about.
LEAST_REQUESTS = 500
#: Policies that are shown, the best first.
SHOWN_PROSPECTS = 10
#: Least gap to a look-ahead for which to fine-tune; it knows more than any policy can, so a small
#: one is out of reach.
LEAST_GAP = 0.1
#: Its name among the rests: when the gap may be looked at again.
FINE_TUNING = "fine-tuning"

_log = logging.getLogger("tailrace.autopilot")


@dataclass(frozen=True)
class Orders:
    """What the router tells its autopilot at the start."""

    folder: Path
    """Of the decision log."""
    file: Path
    """That keeps the state."""
    settings: AutopilotSettings


class Pilot:
    """Keeps the state from round to round."""

    def __init__(
        self, orders: Orders, admin: AdminClient, clock: Callable[[], float] = time.time
    ) -> None:
        self._orders, self._admin, self._clock = orders, admin, clock
        self.state = load(orders.file)
        self._tuning = FineTuning(orders.file.parent / "autopilot", orders.settings.finetune_s)
        self._twin: Twin | None = None
        self._fitted_at = 0.0
        self._shown: dict[str, Any] = {"mode": orders.settings.mode}  # of the last round
        self._applied: dict[str, Any] | None = None  # roles; None: not known after a start

    def round(self) -> bool:
        """Do all of it once; what goes wrong is noted. Return whether anything was simulated."""
        settings, now = self._orders.settings, self._clock()
        shown: dict[str, Any] = {"mode": settings.mode, "at": now}
        before = self.state.steps
        self.state = self.state.not_ahead_of(now, settings.rest_s)
        try:
            shown |= self._fly(now)
        except (TailraceError, OSError, MemoryError) as error:
            why = str(error) or "there is not enough memory"
            self.state = self.state.noted(now, f"waiting: {why}", "waiting")
        for step in self.state.steps:
            if not step.about and step not in before:
                _log.info("autopilot: %s", step.what, extra={"evidence": step.evidence})
        shown["says"] = self.state.steps[-1].what if self.state.steps else "has just begun"
        shown["took_s"] = self._clock() - now
        self._shown = shown
        save(self._orders.file, self.state, shown)
        return "prospects" in shown

    def _fly(self, now: float) -> dict[str, Any]:
        settings = self._orders.settings
        roles = self._roles()
        window = Window.read(self._orders.folder, now - settings.window_s, settings.requests)
        requests = len(window.recorded.table)
        if requests < LEAST_REQUESTS:
            raise TailraceError(f"{requests} requests so far, {LEAST_REQUESTS} are needed")
        twin, error = self._fitted(window, now)
        present = self.state.present or roles["settings_policy"]
        prospects = self._prospects(twin, window, present, orders=roles["takes_priorities"])
        self.state = self._with_cycles(twin, window, present, now)
        found = Findings(
            self._clock(), roles["settings_policy"], prospects, error,
            shadowed=int((window.shadowed_s >= self.state.since).sum()),
            vetoed=frozenset(roles["vetoed"]), overruled=self._overruled(roles),
        )  # fmt: skip
        self.state = controller.step(self.state, found, settings)
        if settings.mode == "act":
            self._apply(roles)
            self._tune(twin, window, found)
        return {
            "requests": requests,
            "twin_error": error,
            "prospects": [asdict(p) for p in prospects[:SHOWN_PROSPECTS]],
            "wanted": self._wanted(twin, window, present, prospects),
        }

    def _prospects(
        self, twin: Twin, window: Window, present: str, *, orders: bool
    ) -> list[SimulatedCost]:
        """Simulate all rules, what was fine-tuned, and the best of them with order.

        If the settings name policies, only those.
        """
        named = self._orders.settings.policies
        first = twin.portfolio(named, present)
        if named:
            return twin.prospects(window, first)
        first += self._tuning.policies()
        found = twin.prospects(window, first)
        more = [name for name in with_order(found, orders=orders) if name not in first]
        return sorted([*found, *twin.prospects(window, more)], key=lambda p: p.cost_s)

    def _tune(self, twin: Twin, window: Window, found: Findings) -> None:
        """Collect the policy of a training that has ended; begin one if there is much to gain."""
        settings, state, now = self._orders.settings, self.state, found.now
        made = self._tuning.collect({state.present, state.candidate})
        if made is not None:
            what = f"fine-tuning has made {Path(made).name}" if made else "fine-tuning failed"
            self.state = state.noted(now, what, "fine-tuning")
            _log.info("autopilot: %s", what)
            return
        due = (state.rests or {}).get(FINE_TUNING, 0.0) <= now and not self._tuning.is_running
        trusted = abs(found.twin_error) <= settings.max_error
        wanted = settings.finetune_s > 0 and not settings.policies
        if not (wanted and due and trusted and found.prospects):
            return
        self.state = state = state.rested(FINE_TUNING, now + settings.rest_s)
        best = found.prospects[0].policy
        gap = twin.gap(window, best)
        what = f"a look-ahead costs {gap:.0%} less than {best}"
        if gap < LEAST_GAP:
            what += ": nothing to fine-tune for"
        elif not fine_tuning.is_possible():
            what += ", but fine-tuning needs PyTorch (pip install 'tailrace[train]')"
        else:
            what += ": fine-tuning begins"
            self._tuning.begin(twin, window, self._tuned_from(best), now)
        self.state = state.noted(now, what, "fine-tuning", gap=gap, limit=LEAST_GAP)
        _log.info("autopilot: %s", what)

    def _tuned_from(self, best: str) -> str:
        """Return the policy to train further: the best one if it is a trained one."""
        base = registry.split_order(best)[0]
        return base if base in self._tuning.policies() else registry.SHIPPED_NAME

    def _roles(self) -> dict[str, Any]:
        """Return the roles of policies; tell a router that has just started of earlier vetoes."""
        roles: dict[str, Any] = self._admin.get("/routing")
        if self._applied is None and set(self.state.vetoed) - set(roles["vetoed"]):
            roles = self._admin.post("/autopilot/veto", list(self.state.vetoed))
        self.state = replace(self.state, vetoed=tuple(sorted(roles["vetoed"])))
        return roles

    def _fitted(self, window: Window, now: float) -> tuple[Twin, float]:
        """Return the twin and its error; it is fitted anew if it is old, or wrong."""
        twin = self._twin
        if twin is not None and twin.fits(window) and now - self._fitted_at < REFIT_S:
            error = twin.error(window)
            if abs(error) <= self._orders.settings.max_error / 2:
                return twin, error
        urls = [backend["url"] for backend in self._admin.get("/backends")]
        twin = Twin.fit(window, parse(Replica, dict(reported_capacity(urls))))
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
        judged_s = turns.cycle_s * (max(state.cycles or (), default=0) + 1)
        begin_s = max(state.since, judged_s, now - settings.window_s)
        served = ServedCosts.read(self._orders.folder, begin_s)
        found = cycles_of(
            turns, served.arrived_s, served.cost_s,
            (window.arrived_s, twin.predicted_s(window, present)), served.by(state.candidate),
            washout_s=settings.washout_s, begin_s=begin_s, end_s=end_s,
        )  # fmt: skip
        return state.with_cycles(found)

    def _overruled(self, roles: dict[str, Any]) -> str:
        """Return what an operator has done since the last round; empty: nothing."""
        if self.state.settings_policy not in ("", roles["settings_policy"]):
            return "the settings name another policy"
        if roles["given_by"] == "admin":
            return "an operator has given policies other roles; POST /routing with {} ends them"
        if self._applied and roles["given_by"] == "settings":
            return "the settings' policy is in charge again"
        return ""

    def _apply(self, roles: dict[str, Any]) -> None:
        """Tell the router who has which role, unless an operator has said so."""
        wanted = controller.routing(self.state, self._clock(), self._orders.settings)
        if roles["given_by"] == "admin" or (not wanted and roles["given_by"] == "settings"):
            self._applied = {}
        elif wanted != self._applied:
            # Written before the roles change, so that a pilot started after a crash knows of them.
            said = {"says": self.state.steps[-1].what} if self.state.steps else {}
            save(self._orders.file, self.state, self._shown | said)
            self._admin.post("/autopilot/routing", wanted)
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
