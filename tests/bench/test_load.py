"""Loads on emulated servers that run fast."""

import asyncio

import numpy as np
import pyarrow.parquet
import pytest

from tailrace.bench.load import load, run_load
from tailrace.bench.result import write
from tailrace.config import Cluster, Replica
from tailrace.emulate.connection import EmulatedConnection
from tailrace.emulate.emulator import Emulator
from tailrace.emulate.faults import Fault
from tailrace.errors import TailraceError
from tailrace.sim.result import FAILED, FINISHED
from tailrace.workload import library
from tailrace.workload.table import RequestTable

SCALE = 0.01
ONE = Cluster(replicas=(Replica(),))


def on_emulator(function, cluster=ONE, **options):
    async def run():
        async with Emulator(cluster, time_scale=SCALE, **options) as emulator:
            return await function(emulator)

    return asyncio.run(run())


def loaded(table, cluster=ONE, emulated=None, **options):
    """Put a table on one emulated replica; returns the result and the emulator's counts."""

    async def run(emulator):
        result = await load(emulator.urls[0], table, stretch=SCALE, **options)
        replica = emulator.replicas[0]
        return result, replica.meter, (replica.waiting, replica.running, replica.kv_used)

    return on_emulator(run, cluster, **(emulated or {}))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_request_is_served_exactly_once(api):
    table = library.make("sessions-hot", 60, 20.0, 2)
    seen = []
    result, meter, left = loaded(table, api=api, progress=seen.append)
    done, rows = result.requests, table.rows
    assert (done["status"] == FINISHED).all()
    assert left == (0, 0, 0.0)
    assert meter.success["length"] == len(table)
    assert (done["output_tokens"] == rows["output_tokens"]).all()
    if api == "completions":
        assert (done["prompt_tokens"] == rows["prompt_tokens"]).all()
    assert meter.generated_tokens == rows["output_tokens"].sum()
    assert (done["sent_s"] <= done["first_s"]).all()
    assert (done["first_s"] <= done["last_s"]).all()
    assert (done["last_s"] <= done["ended_s"]).all()
    assert done["cached_tokens"].sum() == meter.cached_tokens > 0
    assert result.calibration == "/tokenize"
    assert result.failures == {}
    assert seen[-1] == len(table)
    roots = rows["parent"] < 0
    np.testing.assert_allclose(done["due_s"][roots], rows["arrival_s"][roots] * SCALE)


def test_turns_follow_their_parents_after_the_think_time():
    table = library.make("agents", 120, 20.0, 2)
    result, _, _ = loaded(table)
    done, parent = result.requests, table.rows["parent"]
    turns = np.flatnonzero(parent >= 0)
    assert len(turns) > 10
    waited = done["due_s"][turns] - done["ended_s"][parent[turns]]
    np.testing.assert_allclose(waited, table.rows["think_s"][turns] * SCALE)


def test_summary_has_the_simulators_figures(tmp_path):
    table = library.make("rag", 30, 30.0, 2)
    result, meter, _ = loaded(table)
    figures = result.summary()
    times = result.times()
    assert figures["requests"] == figures["finished"] == 30
    assert figures["failed"] == figures["pending"] == 0
    assert figures["ttft_s_mean"] == pytest.approx(times.ttft_s.mean())
    assert figures["e2e_s_p99"] == pytest.approx(np.percentile(times.e2e_s, 99))
    # What the client measures is what the server did and the way between them.
    assert figures["ttft_s_mean"] >= meter.ttft_s.sum / 30
    assert figures["prefix_hit_rate"] == meter.cached_tokens / meter.queried_tokens > 0.1
    assert figures["cost_s"] >= figures["ttft_s_mean"]
    assert figures["prompt_tokens_ratio"] == 1.0
    assert set(figures) >= {"tpot_s_p50", "slo_attainment", "goodput_rps", "lateness_s_p99"}
    assert result.summary(0.5)["requests"] == 15
    with pytest.raises(TailraceError, match="warm-up"):
        result.summary(1.0)
    path = tmp_path / "requests.parquet"
    write(result, path)
    columns = pyarrow.parquet.read_table(path)
    assert columns["status"].to_pylist() == ["finished"] * 30
    assert columns["failure"].null_count == 30
    np.testing.assert_array_equal(columns["ttft_s"].to_numpy(), times.ttft_s)


def test_a_server_that_dies_fails_requests_of_every_stage_once():
    """One stream is cut, later requests find nobody; a follow-up still comes."""
    table = RequestTable.build(
        np.array([0.0, 0.0, 0.0]), np.array([20, 20, 40]), np.array([100_000, 100_000, 5]),
        parent=np.array([-1, -1, 0]), session=np.array([0, -1, 0]),
    )  # fmt: skip

    async def run(emulator):
        async def kill():
            replica = emulator.replicas[0]
            while replica.running < 2 or replica.meter.generated_tokens < 10:
                await asyncio.sleep(0.001)
            await emulator.fault(0, Fault(kind="die"))

        killing = asyncio.create_task(kill())
        result = await load(emulator.urls[0], table, stretch=SCALE)
        await killing
        return result

    result = on_emulator(run)
    assert result.failures == {"disconnected": 2, "connect": 1}
    assert (result.requests["status"] == FAILED).all()
    figures = result.summary()
    assert (figures["finished"], figures["failed"]) == (0, 3)
    assert figures["e2e_s_mean"] is None
    assert figures["ttft_s_mean"] > 0
    assert figures["cost_s"] > 0


@pytest.mark.parametrize(
    ("fault", "timeout_s", "kind"),
    [(Fault(kind="error", status=503), 60.0, "HTTP 503"),
     (Fault(kind="garbage"), 60.0, "malformed"), (Fault(kind="hang"), 0.2, "timeout")],
)  # fmt: skip
def test_failures_are_counted_by_kind(fault, timeout_s, kind, tmp_path):
    table = library.make("chat-oneshot", 8, 100.0, 2)

    async def run(emulator):
        await emulator.fault(0, fault)
        return await load(
            emulator.urls[0], table, stretch=SCALE, model="emulated", chars_per_token=4.0,
            timeout_s=timeout_s,
        )  # fmt: skip

    result = on_emulator(run)
    assert result.failures == {kind: 8}
    assert result.calibration == "chars_per_token"
    write(result, tmp_path / "r.parquet")
    columns = pyarrow.parquet.read_table(tmp_path / "r.parquet")
    assert columns["failure"].to_pylist() == [kind] * 8
    assert columns["ttft_s"].null_count == 8


def test_requests_that_are_too_long_fail_and_the_rest_goes_on():
    table = RequestTable.build(np.zeros(3), np.array([50, 500, 50]), np.array([5, 5, 5]))
    result, meter, _ = loaded(table, emulated={"max_tokens": 100})
    assert result.failures == {"HTTP 400": 1}
    assert result.requests["status"].tolist() == [FINISHED, FAILED, FINISHED]
    assert meter.success["length"] == 2


def test_connections_are_kept():
    table = RequestTable.build(
        np.zeros(20), np.full(20, 30), np.full(20, 3), parent=np.arange(-1, 19),
        session=np.zeros(20, int),
    )  # fmt: skip
    result, _, _ = loaded(table)
    assert (result.requests["status"] == FINISHED).all()
    assert result.connections <= 2


def test_a_connection_the_server_has_closed_in_the_meantime_is_no_failure():
    """Between two turns the server drops its idle connections."""
    table = RequestTable.build(
        np.zeros(2), np.full(2, 30), np.full(2, 3), parent=np.array([-1, 0]),
        think_s=np.array([0.0, 0.0]), session=np.zeros(2, int),
    )  # fmt: skip

    async def run(emulator):
        service = emulator.services[0]
        opened = service.opened

        def finish_then_close(connection):
            end = connection.end

            def ended(*, keep):
                end(keep=keep and service.replica.meter.success["length"] != 1)

            connection.end = ended
            return opened(connection)

        service.opened = finish_then_close
        return await load(emulator.urls[0], table, stretch=SCALE)

    result = on_emulator(run)
    assert result.failures == {}


def test_equal_loads_send_equal_bytes_and_another_salt_others():
    table = library.make("rag", 10, 50.0, 2)

    async def run(emulator):
        cached = []
        for salt in (1, 1, 2):
            result = await load(emulator.urls[0], table, stretch=SCALE, salt=salt)
            cached.append(int(result.requests["cached_tokens"].sum()))
        return cached

    first, again, other = on_emulator(run)
    assert again > first
    assert other == first


def test_what_the_router_is_told_and_tells():
    table = RequestTable.build(
        np.zeros(2), np.full(2, 30), np.full(2, 3), session=np.array([7, -1]),
        priority=np.array([2, 0]), ttft_slo_s=np.array([0.5, 2.0]),
    )  # fmt: skip
    seen = []

    async def run(emulator):
        service = emulator.services[0]
        handle, write = service.handle, EmulatedConnection.write

        def handle_and_look(request):
            connection = request.client
            if request.path == b"/v1/completions":
                seen.append(request.head.lower)
                label = b"http://" + b"ab"[len(seen) % 2 :][:1]
                connection.write = lambda data: write(
                    connection,
                    data.replace(b"server:", b"X-Tailrace-Replica: %b\r\nserver:" % label),
                )
            return handle(request)

        service.handle = handle_and_look
        return await load(emulator.urls[0], table, stretch=SCALE, salt=3)

    result = on_emulator(run)
    told = [[h.get(k) for k in (b"x-session-id", b"x-priority", b"x-slo-ttft-ms")] for h in seen]
    assert sorted(told, key=str) == [[None, None, b"2000"], [b"3-7", b"-2", b"500"]]
    assert result.summary()["replica_share"] == {"http://a": 0.5, "http://b": 0.5}


def test_nobody_there():
    table = library.make("chat", 2, 5.0, 2)
    with pytest.raises(TailraceError, match="is it running"):
        run_load("http://127.0.0.1:9", table)
    with pytest.raises(TailraceError, match="no address"):
        run_load("ftp://x", table)
    with pytest.raises(TailraceError, match="no address"):
        run_load("http://x:99999999", table)
    with pytest.raises(TailraceError, match="line break"):
        run_load("http://127.0.0.1:9", table, headers={"a": "b\r\nc"})
