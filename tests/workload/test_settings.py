"""From configuration to table: built-in names, files, rates and arrivals."""

from pathlib import Path

import numpy as np
import pytest

from tailrace.config import Workload
from tailrace.errors import TailraceError
from tailrace.workload import library, traces
from tailrace.workload.stats import gap_cv


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """200 requests, one every 2 s from 100 s on."""
    lines = [f"{100 + 2 * i},{10 + i},{1 + i % 7}" for i in range(200)]
    path = tmp_path / "recorded.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    return path


def test_built_in_names_take_all_settings() -> None:
    settings = Workload(
        name="rag", requests=500, arrivals="gamma", arrival_cv=3.0, ttft_slo_s=0.4, tpot_slo_s=0.1
    )
    got = library.from_settings(settings, 7.0, 3)
    same = library.make(
        "rag", 500, 7.0, 3, arrivals="gamma", arrival_cv=3.0, ttft_slo_s=0.4, tpot_slo_s=0.1
    )
    assert got.rows.tobytes() == same.rows.tobytes()
    own = library.from_settings(Workload(name="rag", requests=2000), None, 3).rows["arrival_s"]
    assert 2000 / own[-1] == pytest.approx(10, rel=0.1)


def test_a_file_keeps_its_pattern_at_the_asked_rate(recorded: Path) -> None:
    settings = Workload(name=str(recorded), requests=100)
    rows = library.from_settings(settings, 5.0, 1).rows
    assert len(rows) == 100
    assert np.diff(rows["arrival_s"]) == pytest.approx(20 / 99)
    assert rows["prompt_tokens"].tolist() == list(range(10, 110))
    unscaled = library.from_settings(settings, None, 1).rows["arrival_s"]
    assert unscaled == pytest.approx(np.arange(100) * 2.0)


def test_a_trace_is_replayed_as_recorded(recorded: Path) -> None:
    settings = Workload(name=str(recorded), arrivals="trace", time_scale=0.25)
    # The rate that a load came to does not matter: the recording is what counts.
    rows = library.from_settings(settings, 999.0, 1).rows
    assert len(rows) == 200
    assert rows["arrival_s"] == pytest.approx(np.arange(200) * 0.5)
    asked = settings.model_copy(update={"rate": 10.0})
    assert library.from_settings(asked, 10.0, 1).rows["arrival_s"][-1] == pytest.approx(20.0)


def test_a_file_can_be_retimed(recorded: Path) -> None:
    settings = Workload(name=str(recorded), arrivals="poisson")
    rows = library.from_settings(settings, 5.0, 1).rows
    again, other = (library.from_settings(settings, 5.0, seed).rows for seed in (1, 2))
    assert rows["arrival_s"][-1] == pytest.approx(40, rel=0.25)
    assert gap_cv(rows["arrival_s"]) == pytest.approx(1.0, abs=0.25)
    assert rows["prompt_tokens"].tolist() == list(range(10, 210))
    assert rows.tobytes() == again.tobytes()
    assert rows.tobytes() != other.tobytes()
    own_pace = library.from_settings(settings, None, 1).rows["arrival_s"]
    assert own_pace[-1] == pytest.approx(400, rel=0.25)


def test_slos_of_the_file_win_over_the_settings(recorded: Path, tmp_path: Path) -> None:
    settings = Workload(name=str(recorded), ttft_slo_s=0.25, tpot_slo_s=0.125)
    table = library.from_settings(settings, 5.0, 1)
    assert set(table.rows["ttft_slo_s"]) == {0.25}
    path = tmp_path / "with_slos.parquet"
    traces.write(table, path)
    again = library.from_settings(Workload(name=str(path), ttft_slo_s=9.0), 5.0, 1)
    assert set(again.rows["ttft_slo_s"]) == {0.25}
    assert set(again.rows["tpot_slo_s"]) == {0.125}


@pytest.mark.parametrize("arrivals", ["native", "trace", "poisson"])
def test_conversations_in_a_file_keep_their_pauses(arrivals: str, tmp_path: Path) -> None:
    table = library.make("sessions-hot", 3000, 7.0, 1)
    path = tmp_path / "talks.parquet"
    traces.write(table, path)
    settings = Workload.model_validate(
        {"name": str(path), "requests": 2000, "arrivals": arrivals, "time_scale": 0.5}
    )
    rows = library.from_settings(settings, 14.0, 1).rows
    assert len(rows) == 2000
    child = np.flatnonzero(rows["parent"] >= 0)
    parent = rows[rows["parent"][child]]
    gap_s = rows["arrival_s"][child] - parent["arrival_s"]
    assert (gap_s > rows["think_s"][child]).all()
    assert np.array_equal(rows["turn"][child], parent["turn"] + 1)
    assert np.array_equal(rows["session"][child], parent["session"])
    roots = rows["arrival_s"][rows["parent"] < 0]
    original = table.rows[:2000]
    recorded = original["arrival_s"][original["parent"] < 0]
    assert roots[-1] == pytest.approx((recorded[-1] - recorded[0]) / 2, rel=0.2)


def test_lengths_without_times_need_a_process(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n")
    for arrivals in ("native", "trace"):
        settings = Workload.model_validate({"name": str(path), "arrivals": arrivals})
        with pytest.raises(TailraceError, match=r"lengths\.csv has no arrival times"):
            library.from_settings(settings, 5.0, 1)
    settings = Workload(name=str(path), arrivals="poisson")
    assert len(library.from_settings(settings, 5.0, 1)) == 2
    assert len(library.from_settings(settings, None, 1)) == 2


def test_requests_that_all_come_at_once_stay_so(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n3,5,6\n3,7,8\n")
    rows = library.from_settings(Workload(name=str(path)), 5.0, 1).rows
    assert rows["arrival_s"].tolist() == [0, 0]


def test_names_that_are_neither_workload_nor_file() -> None:
    with pytest.raises(TailraceError, match="unknown workload 'reasonin'; did you mean reasoning"):
        library.from_settings(Workload(name="reasonin"), 5.0, 1)
    with pytest.raises(TailraceError, match=r"cannot read missing\.csv: No such file"):
        library.from_settings(Workload(name="missing.csv"), 5.0, 1)
    with pytest.raises(TailraceError, match="cannot read some/where: No such file"):
        library.from_settings(Workload(name="some/where"), 5.0, 1)


def test_bad_rates_for_files_are_refused(recorded: Path) -> None:
    for arrivals in ("native", "poisson"):
        settings = Workload.model_validate({"name": str(recorded), "arrivals": arrivals})
        with pytest.raises(TailraceError, match="rate must be a positive number"):
            library.from_settings(settings, -1.0, 1)
