"""The measurement plan, on emulated replicas in virtual time."""

import asyncio

import numpy as np
import pytest

from calibrate.virtual_endpoint import VirtualEndpoint
from tailrace.calibrate import probes as p
from tailrace.calibrate.live import CalibrationOptions, calibrated, interference
from tailrace.calibrate.probes import Probe, Reply
from tailrace.calibrate.survey import Limits, survey
from tailrace.config import Replica
from tailrace.errors import TailraceError
from tailrace.view.devices import cost_of

FIELDS = ("base_ms", "per_token_ms", "per_context_ms", "per_prefill_ms")


def measured(config, seconds=60.0, known=None, context=100_000, budget=None, **noise):
    endpoint = VirtualEndpoint(config, **noise)
    limits = Limits(seconds, 8192, 256, context, budget)
    found = asyncio.run(survey(endpoint, limits))
    return endpoint, found, calibrated("it", [found], CalibrationOptions(known=known or Replica()))


@pytest.mark.parametrize(
    ("config", "noise", "tolerance"),
    [
        (Replica(), {}, 1e-6),
        (Replica(), {"overhead_s": 0.0015, "noise_s": 0.0005, "hiccup": 0.05}, 0.02),
        (Replica(device="h100-llama2-7b", chunk_size=2048), {"noise_s": 0.0002}, 0.02),
        (Replica(device="h100-llama2-7b", chunk_size=2048, batch_cap=200, speed=1.3), {}, 1e-6),
    ],
)
def test_coefficients_and_capacity_come_back(config, noise, tolerance):
    _, found, result = measured(config, **noise)
    true, model = cost_of(config), result.replica.cost
    for name in FIELDS:
        wanted = getattr(true, name) / config.speed
        assert getattr(model, name) == pytest.approx(wanted, rel=tolerance), name
    seen = [(k, s / config.speed) for k, s in true.knots if k < config.chunk_size]
    assert [k for k, _ in model.knots] == [k for k, _ in seen]
    for (_, slope), (_, wanted) in zip(model.knots, seen, strict=True):
        assert slope == pytest.approx(wanted, rel=tolerance)
    assert result.replica.chunk_size == config.chunk_size
    assert result.replica.batch_cap == config.batch_cap
    assert result.sources["chunk_size"] == result.sources["batch_cap"] == "measured"
    assert result.overhead_ms == pytest.approx(
        1e3 * (noise.get("overhead_s", 0) + noise.get("noise_s", 0)), abs=0.5
    )
    assert found.seconds <= 60.0
    assert not any("noisy" in text for text in result.warnings)


def test_the_time_is_kept_and_what_is_left_out_is_told():
    _, found, result = measured(Replica(device="a40-llama2-7b"), seconds=5.0)
    assert found.seconds <= 5.0
    assert found.left_out
    assert any("were left out" in text for text in result.warnings)


def test_no_prompt_is_sent_twice():
    endpoint, _, _ = measured(Replica(), seconds=10.0)
    assert endpoint.replica.meter.cached_tokens == 0
    assert len(endpoint.asked) > 60


def test_a_noisy_machine_is_noticed():
    _, _, result = measured(Replica(), noise_s=0.2)
    assert any("the machine was noisy" in text for text in result.warnings)


def test_what_is_given_stays():
    known = Replica(chunk_size=512, batch_cap=64, num_blocks=999, block_size=32)
    _, _, result = measured(Replica(), seconds=20.0, known=known, budget=512)
    assert result.replica.num_blocks == 999
    assert set(result.sources.values()) == {"given"}


def test_a_budget_beyond_all_prompts_is_assumed():
    _, found, result = measured(Replica(chunk_size=16_384), seconds=20.0)
    assert (found.token_budget, found.budget_source) == (8192, "assumed")
    assert result.sources["num_blocks"] == "assumed"


def test_a_server_that_fails_says_why():
    class Failing(VirtualEndpoint):
        async def ask(self, probe):
            return [Reply(0.0, np.zeros(0), 1, 0, "HTTP 400")]

    with pytest.raises(TailraceError, match="HTTP 400"):
        asyncio.run(survey(Failing(Replica()), Limits(5.0, 1000, 8, 10_000)))


def test_probes_that_fail_later_are_left_out():
    class Short(VirtualEndpoint):
        async def ask(self, probe):
            if probe.prompt > 1000:
                return [Reply(0.0, np.zeros(0), 1, 0, "HTTP 400")]
            return await super().ask(probe)

    found = asyncio.run(survey(Short(Replica()), Limits(20.0, 8192, 32, 100_000)))
    assert max(m.probe.prompt for m in found.measurements) <= 1000
    assert any("HTTP 400" in text for text in found.left_out)


def test_interference_is_the_slowdown_under_load():
    class Shared:
        """Twice as slow while the other one works."""

        working = 0

        def now(self):
            return 0.0

        async def ask(self, probe):
            Shared.working += 1
            await asyncio.sleep(0)
            step = 0.01 * Shared.working
            await asyncio.sleep(0)
            Shared.working -= 1
            times = step * np.arange(1, probe.outputs + 1)
            return [Reply(0.0, times, probe.prompt) for _ in range(probe.batch)]

    async def both():
        return await interference([Shared(), Shared()])

    assert asyncio.run(both()) == pytest.approx([2.0, 2.0])


def test_only_the_time_when_all_answer_counts():
    early = Reply(0.0, 0.010 * np.arange(1, 21), 100)
    late = Reply(0.0, 0.100 + 0.010 * np.arange(1, 21), 100)
    both = p.sample(Probe(2, 100, 20), [early, late])
    assert both.ms == pytest.approx(10.0)
    # early gives its tokens 10..19 and late its 0..9 meanwhile: nine iterations after the first
    assert both.context == pytest.approx(200 + np.mean(range(11, 20)) + np.mean(range(1, 10)))
    assert p.sample(Probe(2, 100, 20), [early, Reply(0.0, late.times_s + 1, 100)]) is None


def test_waiting_requests_show_the_batch_cap():
    first = [Reply(0.0, np.array([1.0, 2.0]), 10)] * 3
    assert p.queued(first) is None
    assert p.queued([*first, Reply(0.0, np.array([2.5, 3.0]), 10)]) == 3
