"""Rounds of the autopilot on a decision log of simulated traffic, without a router."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.logged import write_log
from tailrace.assess.assessment import ServerModel
from tailrace.autopilot import pilot as pilots
from tailrace.autopilot.pilot import Orders, Pilot
from tailrace.autopilot.sizing import changes, fewest, replicas_wanted
from tailrace.autopilot.twin import Window
from tailrace.config import Cluster, Replica, Workload
from tailrace.errors import TailraceError
from tailrace.router.settings import AutopilotSettings
from tailrace.workload.library import from_settings

pytestmark = pytest.mark.compiled
CLUSTER = Cluster(replicas=(Replica(speed=1.4), Replica(), Replica(speed=0.5)))


class Router:
    """The admin listener of a router."""

    def __init__(self) -> None:
        self.roles: dict[str, Any] = {
            "policy": "round_robin", "canary": "", "shadow": "", "vetoed": [],
            "settings_policy": "round_robin", "takes_priorities": False,
        }  # fmt: skip
        self.posted: list[dict[str, Any]] = []

    def get(self, path: str) -> Any:
        return {"/routing": self.roles, "/backends": []}[path]

    def post(self, path: str, value: Any) -> Any:
        if path == "/autopilot/veto":
            self.roles["vetoed"] = list(value)
            return self.roles
        assert path == "/routing"
        self.posted.append(value)
        own = {"policy": self.roles["settings_policy"], "canary": "", "shadow": ""}
        self.roles |= own | {k: v for k, v in value.items() if k in own}
        return self.roles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pilot") / "decisions"
    workload = Workload(name="sessions-hot", requests=900, rate=14.0, load=None)
    write_log(folder, CLUSTER, from_settings(workload, 14.0, 5), policy="round_robin")
    return folder


def flown(folder: Path, file: Path, router: Router, **given: Any) -> Pilot:
    settings = AutopilotSettings(
        policies=("round_robin", "load_aware", "random"), max_error=0.5, **given
    )
    orders = Orders("", None, folder, file, settings)
    return Pilot(orders, router, clock=lambda: time.time() + 100)  # type: ignore[arg-type]


def test_a_round_finds_the_better_policy_and_lets_it_shadow(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilots, "reported_capacity", lambda urls: {})
    router, file = Router(), tmp_path / "autopilot.json"
    pilot = flown(folder, file, router, mode="act")
    pilot.round()
    shown = json.loads(file.read_text())
    assert (pilot.state.stage, pilot.state.candidate) == ("shadow", "load_aware"), shown["says"]
    assert router.posted == [{"shadow": "load_aware"}]
    assert next(p["policy"] for p in shown["prospects"]) == "load_aware"
    assert abs(shown["twin_error"]) < 0.2
    assert (
        1 <= shown["wanted"]["low"] <= shown["wanted"]["replicas"] <= shown["wanted"]["high"] <= 6
    )
    assert shown["requests"] == 900
    # A new process goes on from the file; an operator's veto ends it.
    again = flown(folder, file, router, mode="act")
    assert again.state == pilot.state
    router.roles["vetoed"] = ["load_aware"]
    again.round()
    assert again.state.stage == "watching"
    assert router.posted[-1] == {}
    # Both are started anew: the router is told of the veto.
    router = Router()
    later = flown(folder, file, router, mode="act")
    later.round()
    assert (router.roles["vetoed"], later.state.stage) == (["load_aware"], "watching")
    # Other settings are an operator's word.
    router.roles["settings_policy"] = router.roles["policy"] = "random"
    later.round()
    assert "name another policy" in [s.what for s in later.state.steps][-1]


def test_suggesting_posts_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilots, "reported_capacity", lambda urls: {})
    router, file = Router(), tmp_path / "autopilot.json"
    flown(folder, file, router, mode="suggest").round()
    assert router.posted == []
    assert "suggests load_aware" in json.loads(file.read_text())["says"]


def test_what_goes_wrong_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "autopilot.json"
    pilot = flown(tmp_path / "nothing", file, Router(), mode="act")
    pilot.round()
    assert json.loads(file.read_text())["says"].startswith("waiting: ")

    def gone(path: str) -> Any:
        raise TailraceError("the router does not answer: refused")

    monkeypatch.setattr(pilot._admin, "get", gone)
    pilot.round()
    assert "does not answer" in json.loads(file.read_text())["says"]


def test_lost_requests_cost(folder: Path) -> None:
    window = Window.read(folder, 1.0, 10_000)
    at = window.start_s + 5.0
    worse = Window(window.recorded, window.start_s, np.array([at]), window.shadowed_s)
    assert worse.costs_s()[-1] == 30.0
    assert worse.arrived_s[-1] == at
    assert len(worse.costs_s()) == len(worse.arrived_s) == len(window.costs_s()) + 1


def test_more_traffic_wants_more_replicas() -> None:
    def wanted(rate: float) -> int:
        workload = Workload(name="chat", requests=1500, rate=rate, load=None)
        table = from_settings(workload, rate, 5)
        model = ServerModel(Cluster(replicas=(Replica(count=4),)))
        found = replicas_wanted(table, model, "load_aware", attainment=0.95)
        assert found.low <= found.replicas <= found.high
        return found.replicas

    assert wanted(4.0) < wanted(16.0) <= 8


def test_the_fewest_that_are_enough() -> None:
    for need in range(1, 9):
        assert fewest(lambda n, need=need: n >= need, 8) == need  # type: ignore[misc]
    assert fewest(lambda n: False, 8) == 8


def test_rates_change_as_they_did() -> None:
    steady = np.arange(0, 3600, 0.1)
    assert changes(steady)[:-3] == pytest.approx(np.ones(10), abs=0.01)
    growing = np.sort(np.concatenate([np.arange(0, 3600, 0.1), np.arange(1800, 3600, 0.1)]))
    assert changes(growing).max() == pytest.approx(2.0, abs=0.05)
    assert len(changes(np.array([0.0, 1.0]))) == 3
