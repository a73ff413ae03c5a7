"""Rounds of the autopilot on a decision log of simulated traffic, without a router."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flights import Router, flown
from tailrace.assess.assessment import ServerModel
from tailrace.autopilot import pilot as pilots
from tailrace.autopilot import twin as twins
from tailrace.autopilot.served_costs import ServedCosts
from tailrace.autopilot.sizing import changes, fewest, replicas_wanted
from tailrace.autopilot.twin import Window
from tailrace.config import Cluster, Replica, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import composite_cost_s
from tailrace.workload.library import from_settings
from tailrace.workload.table import DEFAULT_TTFT_SLO_S

pytestmark = pytest.mark.compiled


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
    again._twin, again._fitted_at = pilot._twin, pilot._fitted_at  # fitting takes long
    assert again.state == pilot.state
    router.roles["vetoed"] = ["load_aware"]
    again.round()
    assert again.state.stage == "watching"
    assert router.posted[-1] == {}
    # Both are started anew: the router is told of the veto.
    router = Router()
    later = flown(folder, file, router, mode="act")
    later._twin, later._fitted_at = pilot._twin, pilot._fitted_at
    later.round()
    assert (router.roles["vetoed"], later.state.stage) == (["load_aware"], "watching")
    # Other settings are an operator's word.
    router.roles["settings_policy"] = router.roles["policy"] = "random"
    later.round()
    assert "name another policy" in [s.what for s in later.state.steps][-1]


@pytest.mark.usefixtures("known")
def test_an_operators_own_roles_are_left_alone(folder: Path, tmp_path: Path) -> None:
    router, file = Router(), tmp_path / "autopilot.json"
    router.give({"canary": "random"}, "admin")
    pilot = flown(folder, file, router, mode="act")
    pilot.round()
    assert (pilot.state.stage, router.posted) == ("watching", [])
    router.give({}, "admin")
    pilot.round()
    assert router.posted == [{"shadow": "load_aware"}]
    # The operator takes over meanwhile: what the autopilot does next must not end his roles.
    router.give({"policy": "random"}, "admin")
    for _ in range(2):
        pilot.round()
        assert (pilot.state.stage, pilot.state.candidate) == ("watching", "")
    assert len(router.posted) == 1
    assert router.roles["policy"] == "random"
    router.give({}, "admin")
    pilot.round()
    assert router.posted[1:] == [{"shadow": "load_aware"}]


def test_a_veto_is_kept_although_the_round_fails(tmp_path: Path) -> None:
    router, file = Router(), tmp_path / "autopilot.json"
    router.roles["vetoed"] = ["random"]
    flown(tmp_path / "nothing", file, router, mode="act").round()
    restarted = Router()
    flown(tmp_path / "nothing", file, restarted, mode="act").round()
    assert restarted.roles["vetoed"] == ["random"]


def test_a_log_that_vanishes_meanwhile_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*args: Any) -> Any:
        raise FileNotFoundError(2, "No such file")  # it was compressed just now

    monkeypatch.setattr(Window, "read", gone)
    pilot = flown(tmp_path, tmp_path / "autopilot.json", Router(), mode="act")
    pilot.round()
    assert "No such file" in pilot.state.steps[-1].what


@pytest.mark.usefixtures("known")
def test_suggesting_posts_nothing(folder: Path, tmp_path: Path) -> None:
    router, file = Router(), tmp_path / "autopilot.json"
    assert flown(folder, file, router, mode="suggest").round()
    assert router.posted == []
    assert "suggests load_aware" in json.loads(file.read_text())["says"]


def test_what_goes_wrong_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "autopilot.json"
    pilot = flown(tmp_path / "nothing", file, Router(), mode="act")
    assert not pilot.round()
    assert json.loads(file.read_text())["says"].startswith("waiting: ")

    def gone(path: str) -> Any:
        raise TailraceError("the router does not answer: refused")

    monkeypatch.setattr(pilot._admin, "get", gone)
    pilot.round()
    assert "does not answer" in json.loads(file.read_text())["says"]


def test_servers_are_fitted_to_the_latest_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "FITTED_REQUESTS", 100)
    window = Window.read(folder, 1.0, 10_000)
    latest, table = window.latest, window.recorded.table
    assert len(latest.table) == 300
    latest.table.validate()
    assert latest.outcomes.tobytes() == window.recorded.outcomes[600:].tobytes()
    children = latest.table.rows["parent"] >= 0
    assert children.any()
    assert np.array_equal(
        latest.table.rows["parent"][children], table.rows["parent"][600:][children] - 600
    )
    monkeypatch.setattr(twins, "FITTED_REQUESTS", 1000)
    assert len(Window.read(folder, 1.0, 10_000).latest.table) == 900


def test_a_server_with_few_requests_is_fitted_to_older_ones_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow server gets few of them; it must not keep the others from being simulated."""
    monkeypatch.setattr(twins, "FITTED_REQUESTS", 100)
    window = Window.read(folder, 1.0, 10_000)
    outcomes = window.recorded.outcomes
    rare = np.flatnonzero(outcomes["replica"] == 2)
    outcomes["replica"][rare[np.arange(len(rare)) % 2 == 0]] = 0
    latest = window.latest
    latest.table.validate()
    assert np.bincount(latest.outcomes["replica"]).tolist() == [100, 100, 100]
    for number in range(3):
        own = outcomes[outcomes["replica"] == number][-100:]
        kept = latest.outcomes[latest.outcomes["replica"] == number]
        assert kept.tobytes() == own.tobytes()


def test_what_requests_cost(folder: Path) -> None:
    served, window = ServedCosts.read(folder, 1.0), Window.read(folder, 1.0, 10_000)
    order = np.argsort(served.arrived_s)
    assert served.arrived_s[order] == pytest.approx(window.arrived_s, abs=1e-5)
    costs = composite_cost_s(window.recorded.result())
    assert served.cost_s[order] == pytest.approx(costs, abs=1e-5)
    assert served.by("round_robin").all()
    assert not served.by("random").any()
    for file in folder.glob("decisions-*"):  # the clock of these requests is ahead
        os.utime(file, (2 * window.start_s, 2 * window.start_s))
    late = ServedCosts.read(folder, float(window.arrived_s[500]))
    assert len(late.arrived_s) == 400


def test_lost_requests_cost_and_those_that_were_tried_again_do_not(tmp_path: Path) -> None:
    usual = {"policy": "random", "arrived": 100.0, "first": None, "last": None}
    lines = [
        {"tailrace": "decisions", "format": 1},
        {**usual, "id": "a", "outcome": "backend_failed"},
        {**usual, "id": "a", "outcome": "done", "first": 100.5, "last": 103.0},
        {**usual, "id": "b", "outcome": "timeout", "last": 110.0},
        {**usual, "id": "c", "outcome": "client_gone", "first": 101.0, "last": 102.0},
        {**usual, "id": "d", "outcome": "done", "first": 102.0, "last": 102.0, "ttft_slo_s": 0.5},
    ]
    file = tmp_path / "decisions-1.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ServedCosts.read(tmp_path, 1.0)
    late_s = 10 - DEFAULT_TTFT_SLO_S
    assert sorted(found.cost_s) == pytest.approx(
        [0.2 * 3 + 0.5, 0.2 * 2 + 2 + 2 * 1.5, 0.2 * 10 + 10 + 2 * late_s + 30]
    )


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
