"""The autopilot's whole way in front of emulated servers, under load, with kills and restarts."""

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from router.abuse.case import Case, Target
from router.abuse.stage import Stage
from router.processes import HOST, ask, completion

TOKEN = {"TAILRACE_SOAK_ADMIN": "open sesame"}
RATE_RPS = 30.0
#: A policy of the user's own that is good until somebody says otherwise, and in the autopilot's
#: simulations even then: only live requests show that it has become worse.
FICKLE = '''"""Least work; all to the slowest server once the file beside this one exists."""
import sys
from pathlib import Path
import numpy as np

SPOILED = Path(__file__).with_name("spoiled")
SIMULATED = "tailrace.autopilot.pilot" in sys.modules


def scores(view):
    if SPOILED.exists() and not SIMULATED:
        return -np.arange(len(view.replicas), dtype=float)
    return view.replicas["in_flight"] / np.array([1.5, 1.0, 0.4])[: len(view.replicas)]
'''
#: Rounds, turns and stages of seconds instead of minutes.
SETTINGS: dict[str, Any] = {
    "routing__policy": "round_robin",
    "routing__guard": False,
    "admin__token_env": "TAILRACE_SOAK_ADMIN",
    "autopilot__mode": "act",
    "autopilot__every_s": 1,
    "autopilot__window_s": 40,
    "autopilot__block_s": 2,
    "autopilot__washout_s": 0.5,
    "autopilot__share": 0.5,
    "autopilot__shadow_s": 2,
    "autopilot__trial_s": 200,
    "autopilot__guard_s": 300,
    "autopilot__max_error": 0.5,
}


@dataclass
class Flight:
    """A router with an autopilot, emulated servers of different speed behind it, and clients."""

    stage: Stage
    asked: int = 0
    lost: list[str] = field(default_factory=list)
    steps: dict[tuple[float, str], dict[str, Any]] = field(default_factory=dict)
    """All steps that were seen."""

    def admin(self, path: str, body: Any = None, *, token: bool = True) -> tuple[int, Any]:
        """Ask the admin listener; returns status and body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {TOKEN['TAILRACE_SOAK_ADMIN']}"} if token else {}
        request = urllib.request.Request(f"http://{HOST}:{self.stage.admin}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, None

    def up(self) -> bool:
        """Whether the router runs and all servers are available."""
        with contextlib.suppress(OSError):
            status, found = self.admin("/status")
            return status == 200 and all(r["available"] for r in found["replicas"])
        return False

    def shown(self) -> dict[str, Any]:
        """Return what the autopilot says."""
        try:
            found = self.admin("/status")[1]["autopilot"] or {}
        except (OSError, TypeError):
            return {}
        for step in found.get("steps", []):
            self.steps[step["at"], step["what"]] = step
        return dict(found)

    async def until(self, what: str, holds: Any, limit_s: float = 120.0) -> dict[str, Any]:
        """Wait until it holds of what the autopilot shows."""
        end = time.monotonic() + limit_s
        shown = self.shown()
        while not holds(shown):
            assert time.monotonic() < end, f"in vain: {what}; {self._why(shown)}"
            await asyncio.sleep(0.3)
            shown = self.shown()
        return shown

    def _why(self, shown: dict[str, Any]) -> str:
        """Return what may explain that something did not happen."""
        gone = [name for name, p in self.stage.processes.items() if p.poll() is not None]
        return (
            f"it says {shown.get('says')}; {len(self.lost)} of {self.asked} requests were lost "
            f"{self.lost[:3]}; ended: {gone}"
        )

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Clients, as many per second whatever becomes of them; each must be answered."""
        running: set[asyncio.Task[None]] = set()

        async def one(number: int) -> None:
            request = completion(20, f"conversation {number % 40} " + "words " * 60)
            try:
                outcome = await asyncio.wait_for(ask(self.stage.listen, request), 60)
                if not outcome.answered:
                    self.lost.append(f"status {outcome.status}")
            except (OSError, TimeoutError) as error:
                self.lost.append(repr(error))

        async def arrive() -> None:
            due = time.monotonic()
            while True:
                due += 1 / RATE_RPS
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.asked += 1
                task = asyncio.create_task(one(self.asked))
                running.add(task)
                task.add_done_callback(running.discard)

        arriving = asyncio.create_task(arrive())
        try:
            yield
        finally:
            arriving.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def roles(self) -> dict[str, Any]:
        """Return the roles of policies."""
        return dict(self.admin("/routing")[1])

    async def end(self) -> None:
        """Nothing may have been lost, nor be left over; then the router ends."""
        assert not self.lost, f"{len(self.lost)} requests were lost: {self.lost[:3]}"
        await self.until("all counters are zero", lambda _: self._is_quiet(), 60)
        self.stage.stop_router()

    def _is_quiet(self) -> bool:
        status = self.admin("/status")[1]
        return not any(status[name] for name in ("clients", "waiting", "in_flight"))

    def restart_router(self) -> None:
        """End it as its operator would, and start it again with the same settings."""
        self.stage.stop_router()
        self.stage.run("router", "serve", "--config", str(self.stage.settings_file))


async def _begin(target: Target) -> tuple[Flight, str]:
    """Start servers and router; return them, and the candidate."""
    stage, flown = target.stage, Flight(target.stage)
    fickle = stage.folder / "fickle.py"
    fickle.write_text(FICKLE, encoding="utf-8")
    os.environ.update(TOKEN)
    stage.stop_router()
    stage.start_emulator_with("--speeds", "1.5,1,0.4", "--time-scale", "0.2", "--duration", "900")
    own = {
        "decisions__folder": str(stage.folder / "flight"),
        "autopilot__policies": ["round_robin", str(fickle)],
    }
    stage.write_settings(**SETTINGS, **own)
    stage.run("router", "serve", "--config", str(stage.settings_file))
    await flown.until("the router", lambda _: flown.up(), 120)
    return flown, str(fickle)


async def flight(target: Target) -> str:
    """A candidate shadows, has turns, takes over; then is bad, and hands back. All under load.

    The autopilot is killed while the candidate has turns and again while it is in charge, and the
    router is started anew in between.
    """
    flown, fickle = await _begin(target)
    began = time.monotonic()
    async with flown.load():
        await flown.until("a shadow", lambda a: a.get("stage") == "shadow")
        await flown.until("turns", lambda a: a.get("stage") == "canary")
        # The state is written before the router changes roles, so a crash in between is harmless.
        await flown.until("its turns", lambda _: flown.roles()["canary"] == fickle, 10)
        await _killed(flown)
        assert flown.shown()["stage"] in ("canary", "guard"), "the state is lost"
    flown.restart_router()
    await flown.until("the router again", lambda _: flown.up(), 120)
    async with flown.load():
        shown = await flown.until("a take-over", lambda a: a.get("stage") == "guard", 200)
        assert shown["present"] == fickle, f"{shown['present']} has taken over"
        target.figures["took_over_after_s"] = time.monotonic() - began
        await flown.until("its role", lambda _: flown.roles()["policy"] == fickle)
        await _killed(flown)
        assert flown.shown()["present"] == fickle, "the take-over is lost"
        spoiled = time.monotonic()
        (target.stage.folder / "spoiled").touch()
        shown = await flown.until("it is back", lambda a: a.get("stage") == "watching", 200)
        assert shown["present"] == "", f"{shown['present']} is in charge"
        target.figures["handed_back_after_s"] = time.monotonic() - spoiled
        await flown.until("the role is back", lambda _: flown.roles()["policy"] == "round_robin")
    steps = [what for _, what in sorted(flown.steps)]
    for part in ("it shadows", "has its first turns", "has proven better", "has become worse"):
        assert any(part in what for what in steps), f"no step says: {part}"
    await flown.end()
    took = "{took_over_after_s:.0f} s, handed back {handed_back_after_s:.0f} s after it was spoiled"
    return f"took over after {took.format(**target.figures)}; {flown.asked} requests"


async def vetoed(target: Target) -> str:
    """An operator vetoes a candidate; it has no role again until he says so, or the router ends."""
    flown, fickle = await _begin(target)
    async with flown.load():
        await flown.until("turns", lambda a: a.get("stage") == "canary")
        await flown.until("its turns", lambda _: flown.roles()["canary"] == fickle, 10)
        for path in ("/autopilot/veto", "/autopilot/resume", "/autopilot/routing"):
            assert flown.admin(path, [], token=False)[0] == 401, f"{path} needs no token"
        roles = flown.admin("/autopilot/veto", [])[1]
        assert (roles["canary"], roles["vetoed"]) == ("", [fickle]), f"after a veto: {roles}"
        await flown.until("it stops", lambda a: a.get("stage") == "watching")
        await flown.until("no role", lambda _: flown.roles()["given_by"] == "settings", 10)
    flown.restart_router()
    await flown.until("the router again", lambda _: flown.up(), 120)
    async with flown.load():
        await flown.until("the veto is known", lambda _: flown.roles()["vetoed"] == [fickle])
        await flown.until("some rounds", lambda a: "best policy" in a.get("says", ""))
        assert flown.admin("/autopilot/resume", {})[1]["vetoed"] == [], "the veto stays"
        await flown.until("a shadow again", lambda a: a.get("stage") == "shadow")
    await flown.end()
    return f"vetoed, also over a restart; {flown.asked} requests"


async def _killed(flown: Flight) -> None:
    """Kill the autopilot; wait until another one has done a round."""
    pid = flown.stage.autopilot()
    assert pid is not None, "the autopilot does not run"
    before = flown.shown()["at"]
    os.kill(pid, signal.SIGKILL)
    await flown.until("another autopilot", lambda a: a.get("at", 0) > before, 90)
    assert flown.stage.autopilot() not in (None, pid), "no other autopilot runs"


CASES = (
    # They start a router of their own, whose memory does not compare with that of the suite's.
    Case("autopilot's flight", flight, innocents=False, ends=True, most_s=480.0),
    Case("autopilot vetoed", vetoed, innocents=False, ends=True),
)
