"""Probes over HTTP: what is asked and understood, not how long it takes."""

import asyncio

import pytest

from tailrace.calibrate.endpoint import LiveEndpoint
from tailrace.calibrate.live import CalibrationOptions, _calibrate
from tailrace.calibrate.probes import Probe
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.errors import TailraceError

SMALL = Cluster(replicas=(Replica(count=2, num_blocks=4000, block_size=8),))


def with_emulator(work, **options):
    async def run():
        async with Emulator(SMALL, time_scale=0.02, **options) as emulator:
            return await work(emulator)

    return asyncio.run(run())


def test_a_server_is_asked_as_planned():
    async def work(emulator):
        endpoint = LiveEndpoint(emulator.urls[0])
        await endpoint.open()
        replies = await endpoint.ask(Probe(3, 100, 5))
        snapshot = await endpoint.metrics()
        await endpoint.close()
        return endpoint, replies, snapshot, emulator.replicas[0].meter

    endpoint, replies, snapshot, meter = with_emulator(work, max_tokens=5000)
    assert endpoint.max_model_len == 5000
    assert [r.failure for r in replies] == [None] * 3
    assert [r.prompt_tokens for r in replies] == [100] * 3
    assert [len(r.times_s) for r in replies] == [5] * 3
    assert all((r.times_s >= r.sent_s).all() for r in replies)
    assert meter.cached_tokens == 0
    assert (snapshot.kv_tokens, snapshot.block_size) == (32_000, 8)


def test_a_failure_is_a_reply():
    async def work(emulator):
        endpoint = LiveEndpoint(emulator.urls[0])
        await endpoint.open()
        (reply,) = await endpoint.ask(Probe(1, 900))
        await endpoint.close()
        return reply

    assert with_emulator(work, max_tokens=800).failure == "HTTP 400"


def test_two_servers_are_calibrated():
    async def work(emulator):
        return await _calibrate(emulator.urls, CalibrationOptions(seconds=1.5), {}, lambda _: None)

    calibration = with_emulator(work)
    assert len(calibration.replicas) == 2
    for found in calibration.replicas:
        assert (found.replica.num_blocks, found.replica.block_size) == (4000, 8)
        assert found.sources["num_blocks"] == "/metrics"
        assert found.interference > 0
        assert found.replica.cost.base_ms > 0
    assert calibration.cluster().size == 2


def test_mistakes():
    with pytest.raises(TailraceError, match="is it running"):
        asyncio.run(_calibrate(["http://127.0.0.1:9"], CalibrationOptions(), {}, lambda _: None))
    with pytest.raises(TailraceError, match="given twice"):
        asyncio.run(
            _calibrate(["http://127.0.0.1:9"] * 2, CalibrationOptions(), {}, lambda _: None)
        )
    with pytest.raises(TailraceError, match="is no address"):
        asyncio.run(_calibrate(["nonsense://x"], CalibrationOptions(), {}, lambda _: None))
