"""Scenarios of recorded traffic: clusters by length, halves, what is left out, capacities."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tailrace.cli import cli
from tailrace.config import Replica
from tailrace.errors import TailraceError
from tailrace.evaluate.judge import recorded
from tailrace.evaluate.judge.recorded import TraceCluster, scenarios_of
from tailrace.evaluate.judge.results import read
from tailrace.evaluate.judge.suite import load_suite, shipped_scenarios
from tailrace.workload import traces
from tailrace.workload.library import from_settings
from tailrace.workload.recorded.conversations import Half

SMALL = TraceCluster(name="small", loads=(0.5, 0.9), replicas=(Replica(count=2),))
TINY = TraceCluster(name="tiny", loads=(0.5,), replicas=(Replica(count=2, num_blocks=10),))
LONG = TraceCluster(name="long", loads=(0.5,), prompts=(1000, 10**6), replicas=(Replica(),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Traffic of 60 sessions of 3 turns each; one in ten turns has a large prompt."""
    path = tmp_path / "recorded" / "chat.csv"
    path.parent.mkdir()
    lines = ["arrival_s,prompt_tokens,output_tokens,session,turn,parent,think_s"]
    rng = np.random.default_rng(0)
    for k in range(180):
        session, turn = k // 3, k % 3
        parent = k - 1 if turn else -1
        prompt = 400 if k % 10 == 4 else int(rng.integers(50, 120))
        lines.append(f"{k},{prompt},8,{session},{turn},{parent},{1.0 if turn else 0.0}")
    path.write_text("\n".join(lines) + "\n")
    return path.parent


@pytest.fixture(autouse=True)
def _capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "saturation_rps", lambda _: 12.5)


def test_every_trace_meets_the_clusters_for_its_lengths(folder: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    found = scenarios_of(folder, [SMALL, LONG], Half.JUDGE, into, requests=300, jobs=1)
    assert [s.name for s in found.scenarios] == ["chat-small-50", "chat-small-90"]
    assert [s.name for s in found.others] == [s.name for s in found.scenarios]
    assert {s.capacity_rps for s in found.scenarios} == {12.5}
    assert found.notes == ("Recorded conversations of the half 'judge'.",)
    mine, other = (set(_lengths(of[0].workload.name)) for of in (found.scenarios, found.others))
    assert mine.isdisjoint(other)
    table = from_settings(found.scenarios[0].workload, 5.0, 1)
    assert len(table) == 300


def _lengths(path: str) -> list[tuple[int, ...]]:
    """The sessions of a file, each as its lengths; here no two are alike."""
    rows = traces.read(path).table.rows
    return [
        tuple(rows["prompt_tokens"][rows["session"] == s].tolist())
        for s in range(int(rows["session"].max()) + 1)
    ]


def test_prompts_that_no_server_holds_are_counted_with_what_follows(
    folder: Path, tmp_path: Path
) -> None:
    found = scenarios_of(folder, [TINY], Half.JUDGE, tmp_path / "into", requests=100, jobs=1)
    (_, note) = found.notes
    assert "18 requests that exceed the KV memory" in note
    assert "follow them" in note
    rows = traces.read(found.scenarios[0].workload.name).table.rows
    assert (rows["prompt_tokens"] + rows["output_tokens"]).max() <= 160


def test_capacities_are_measured_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(scenario: recorded.Scenario) -> float:
        measured.append(scenario.name)
        return 3.0

    monkeypatch.setattr(recorded, "saturation_rps", measure)
    into = tmp_path / "into"
    for half in Half:
        scenarios_of(folder, [SMALL], half, into, requests=100, jobs=1)
    assert len(measured) == 1  # for both loads and both halves
    monkeypatch.setattr(recorded, "source_digest", lambda: "other")
    scenarios_of(folder, [SMALL], half, into, requests=100, keep_capacities=True, jobs=1)
    assert len(measured) == 1
    scenarios_of(folder, [SMALL], half, into, requests=100, jobs=1)
    assert len(measured) == 2


def test_memory_for_prefixes_is_judged_with_traces_that_share_some(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "alike.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,runs\n"
        + "".join(f"{k},64,8,{k % 100}:64\n" for k in range(200))
    )
    large = SMALL.model_copy(update={"name": "large", "shared_prefixes": True})
    found = scenarios_of(
        folder, [SMALL, large], Half.JUDGE, tmp_path / "into", requests=100, jobs=1
    )
    names = {s.name.rpartition("-")[0] for s in found.scenarios}
    assert names == {"chat-small", "alike-small", "alike-large"}


def test_a_trace_that_cannot_be_read_or_is_too_short_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "bad.csv").write_text("prompt_tokens,output_tokens\n5,x\n")
    (folder / "short.csv").write_text("prompt_tokens,output_tokens\n5,6\n")
    found = scenarios_of(folder, [SMALL], Half.JUDGE, tmp_path / "into", requests=100, jobs=1)
    assert len(found.scenarios) == 2
    notes = " ".join(found.notes)
    assert "bad was left out" in notes
    assert "line 2" in notes
    assert "short on small was left out" in notes


def test_a_folder_without_traffic_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(TailraceError, match=r"no recorded traffic.*notes.md"):
        scenarios_of(tmp_path, [SMALL], Half.JUDGE, tmp_path / "into", requests=100)


def test_the_suite_real_needs_traces() -> None:
    with pytest.raises(TailraceError, match="--traces FOLDER"):
        shipped_scenarios(load_suite("real"))
    said = CliRunner().invoke(cli, ["evaluate", "--suite", "real"])
    assert said.exit_code != 0
    assert "--traces" in said.output


def test_the_command_judges_recorded_traffic_and_goes_on(folder: Path, tmp_path: Path) -> None:
    (folder / "notes.md").write_text("nothing")
    command = [
        *("evaluate", "--suite", "real", "--traces", str(folder), "-p", "lmetric"),
        *("--against", "round_robin", "--requests", "60", "--seeds", "2", "-j", "1"),
        *("--selection-seeds", "1", "-o", str(tmp_path / "out")),
    ]
    said = CliRunner().invoke(cli, command)
    assert said.exit_code == 0, said.output
    assert "notes.md was left out" in said.output
    data = read(tmp_path / "out" / "results.json")
    assert data.suite == "real"
    assert data.warmup_fraction == 0.2
    assert "notes.md" in data.notes[1]
    assert all(name.startswith("chat-") for name in data.best_of_each)
    again = CliRunner().invoke(cli, command)
    assert again.exit_code == 0, again.output
    assert "cells are in" in again.output
