"""A server learnt from recorded times alone: synthetic recordings with known coefficients."""

import numpy as np
import pytest

from calibrate.recordings import conversations, record
from tailrace.calibrate.iteration_fit import predicted_ms
from tailrace.calibrate.logs import calibrate_log
from tailrace.calibrate.recorded_capacity import Occupancy, kv_tokens, stated, token_budgets
from tailrace.calibrate.run_fit import simulated
from tailrace.config import CostModel, Replica
from tailrace.errors import TailraceError
from tailrace.replay import recorded

pytestmark = pytest.mark.compiled

DENSE = CostModel(base_ms=13.0, per_token_ms=0.033, per_context_ms=8e-5, per_prefill_ms=8e-6)
EXPERTS = CostModel(
    base_ms=16.0, per_token_ms=0.17, knots=((32, -0.10), (256, -0.045)),
    per_context_ms=3e-5, per_prefill_ms=6e-6,
)  # fmt: skip
SETTINGS = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
#: Iterations as they occur: decodes of 1 to 32, with little and much context, and prefills.
SHAPES = ([1, 8, 32, 32, 500, 1500], [600, 5e3, 2e4, 4e4, 1e4, 2e4], [0, 0, 0, 0, 1.2e5, 1e6])


def server(cost, **changes):
    values = {"cost": cost, "batch_cap": 32, "chunk_size": 2048, "num_blocks": 30_000}
    return Replica(**{**values, **changes})


def learn(folder, half=True):
    recording = recorded.read(folder)
    used = np.arange(len(recording.table)) < len(recording.table) // (2 if half else 1)
    (found,) = calibrate_log(recording, Replica(), only=used).replicas
    first, last = simulated(recording.table, found.replica, found.overhead_ms)
    was = recording.outcomes
    rows = ~used if half else used
    off = [
        now[rows].mean() / (was[name] - was["sent_s"])[rows].mean() - 1
        for now, name in ((first, "first_s"), (last, "last_s"))
    ]
    return found, off


@pytest.mark.parametrize(
    ("cost", "rate", "noise"), [(DENSE, 5.0, 0.0), (DENSE, 5.0, 0.02), (EXPERTS, 4.0, 0.0)]
)
def test_a_server_comes_back_from_half_its_times(tmp_path, cost, rate, noise):
    table = conversations(240 if cost is EXPERTS else 140, rate, 11)
    folder = record(tmp_path / "r", server(cost), table, overhead_ms=6, noise=noise, **SETTINGS)
    found, (ttft, e2e) = learn(folder)
    assert abs(ttft) < 0.04
    assert abs(e2e) < 0.01
    assert found.sources["batch_cap"] == found.sources["chunk_size"] == "recording"
    true, ours = (predicted_ms(m, *SHAPES) for m in (cost, found.replica.cost))
    assert ours == pytest.approx(true, rel=0.15)
    if not noise and cost is DENSE:
        assert found.replica.cost.base_ms == pytest.approx(13.0, rel=0.03)
        assert found.replica.cost.per_token_ms == pytest.approx(0.033, rel=0.05)


def test_without_settings_and_scheduling_times(tmp_path):
    table = conversations(200, 5.0, 12)
    leave_out = ("scheduled_ts", "request_id")
    folder = record(tmp_path / "r", server(DENSE, chunk_size=512), table, leave_out=leave_out)
    found, (_, e2e) = learn(folder, half=False)
    assert abs(e2e) < 0.02
    assert found.replica.chunk_size == 512
    assert found.sources["chunk_size"] == "measured"
    assert found.sources["num_blocks"] == "assumed"


def test_more_ran_at_once_than_the_settings_say(tmp_path):
    """Two engines of 16 sequences each: the settings are of one of them."""
    settings = {"max_num_seqs": 16, "data_parallel_size": 2, "max_num_batched_tokens": 1024}
    table = conversations(160, 5.0, 13)
    found, _ = learn(record(tmp_path / "r", server(DENSE), table, **settings), half=False)
    assert (found.replica.batch_cap, found.replica.chunk_size) == (32, 2048)
    del settings["data_parallel_size"]
    found, _ = learn(record(tmp_path / "r", server(DENSE), table, **settings), half=False)
    assert found.replica.batch_cap > 16
    assert found.sources["batch_cap"] == "measured"


def test_full_memory_is_seen(tmp_path):
    """KV memory for some 15 requests keeps others waiting although 128 may run."""
    small = server(DENSE, batch_cap=128, num_blocks=1000)
    settings = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
    found, (ttft, e2e) = learn(
        record(tmp_path / "r", small, conversations(240, 4.0, 14), **settings)
    )
    assert found.sources["num_blocks"] == "measured"
    assert found.replica.num_blocks == pytest.approx(1000, rel=0.15)
    assert abs(ttft) < 0.10
    assert abs(e2e) < 0.05


def test_too_little_to_learn_from(tmp_path):
    folder = record(tmp_path / "r", server(DENSE), conversations(60, 5.0, 15), **SETTINGS)
    with pytest.raises(TailraceError, match="answered requests"):
        learn(folder)


def test_large_recordings_and_settings_are_bounded():
    """Each moment is compared with all requests, so only some moments are."""
    count = 30_000
    table = conversations(count, 50.0, 16)
    sent = table.rows["arrival_s"]
    part = Occupancy(table, sent + 5.0, sent + 6.0, sent + 9.0, is_exact=True)
    tokens, is_full = kv_tokens([part], batch_cap=10_000)
    assert is_full
    held = np.median((table.rows["prompt_tokens"] + table.rows["output_tokens"] / 2).cumsum())
    assert 0 < tokens < held
    huge = {"max_num_seqs": 65_536, "data_parallel_size": 1024, "max_num_batched_tokens": 2**24}
    assert stated(huge)["batch_cap"] == (4096, "recording")
    assert token_budgets(huge) == (2**20,)
