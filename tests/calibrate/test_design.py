"""Which probes are run again."""

import asyncio

import numpy as np
import pytest

from calibrate.virtual_endpoint import VirtualEndpoint
from tailrace.calibrate import probes as p
from tailrace.calibrate.design import most_telling
from tailrace.calibrate.live import CalibrationOptions, calibrated
from tailrace.calibrate.probes import Measurement, Probe, Sample
from tailrace.calibrate.survey import Limits, survey, token_budget
from tailrace.config import Replica
from tailrace.view.devices import cost_of


def measured(probe, ms, runs, context=0.0):
    rng = np.random.default_rng(probe.prompt + probe.batch)
    noise = rng.normal(0.0, 0.2, runs)
    prompt = float(probe.prompt)
    return Measurement(probe, tuple(Sample(ms + e, prompt, 0.0, context) for e in noise))


def few_measurements(runs=3):
    """What a server with 5 ms + 0.01 ms/token + 0.001 ms/token of context would show."""
    decodes = [(Probe(b, n, 32), b, float(b * n)) for b in (1, 8, 32) for n in (24, 960)]
    found = [measured(Probe(1, n), 5 + 0.01 * n, runs) for n in (24, 88, 200, 480, 960, 1920)]
    return found + [measured(o, 5 + 0.01 * b + 1e-3 * k, runs, k) for o, b, k in decodes]


def telling(measurements, took_s, budget, seconds):
    return most_telling(measurements, p.fitted(measurements, budget), took_s, budget, seconds)


def test_the_time_is_filled_with_what_fits():
    found = few_measurements()
    took_s = {m.probe: 0.1 for m in found}
    assert len(telling(found, took_s, 512, 2.05)) == 20
    assert telling(found, took_s, 512, 0.05) == []


def test_what_tells_as_much_in_less_time_is_run():
    found = few_measurements()
    slow = telling(found, {m.probe: 1.0 for m in found}, 512, 1.0)[0]
    took_s = {m.probe: 20.0 if m.probe == slow else 1.0 for m in found}
    assert slow not in telling(found, took_s, 512, 20.0)


def test_what_was_run_often_is_left_alone():
    found = few_measurements()
    took_s = {m.probe: 1.0 for m in found}
    first = telling(found, took_s, 512, 1.0)[0]
    often = [measured(m.probe, m.ms, 400, m.samples[0].context) if m.probe == first else m
             for m in found]  # fmt: skip
    assert telling(often, took_s, 512, 1.0)[0] != first


@pytest.mark.parametrize(("chunk_size", "seed"), [(512, 0), (512, 1), (2048, 2)])
def test_tokens_per_iteration_are_found_in_noise(chunk_size, seed):
    config = Replica(device="h100-llama2-7b", chunk_size=chunk_size)
    endpoint = VirtualEndpoint(config, noise_s=0.0005, seed=seed)
    found = asyncio.run(survey(endpoint, Limits(40.0, 8192, 256, 100_000)))
    assert token_budget(found.measurements) == (chunk_size, "measured")


@pytest.mark.parametrize("seed", range(2))
def test_every_coefficient_within_two_percent(seed):
    endpoint = VirtualEndpoint(Replica(), overhead_s=0.0015, noise_s=0.0005, seed=seed, hiccup=0.05)
    found = asyncio.run(survey(endpoint, Limits(60.0, 8192, 256, 100_000)))
    model, true = calibrated("it", [found], CalibrationOptions()).replica.cost, cost_of(Replica())
    for name in ("base_ms", "per_token_ms", "per_context_ms", "per_prefill_ms"):
        assert getattr(model, name) == pytest.approx(getattr(true, name), rel=0.02), name
    assert model.knots[0] == pytest.approx(true.knots[0], rel=0.02)


def test_the_place_of_a_knot_is_found_in_noise():
    """Its neighbours explain the times almost as well: probes have to tell them apart."""
    config = Replica(device="h100-llama2-7b", chunk_size=2048)
    endpoint = VirtualEndpoint(config, overhead_s=0.0015, noise_s=0.0005, seed=3, hiccup=0.05)
    found = asyncio.run(survey(endpoint, Limits(120.0, 8192, 256, 100_000)))
    model, true = calibrated("it", [found], CalibrationOptions()).replica.cost, cost_of(config)
    assert [knot for knot, _ in model.knots] == [knot for knot, _ in true.knots]
    assert model.knots[0] == pytest.approx(true.knots[0], rel=0.02)


def test_it_ends_as_soon_as_it_is_precise():
    def surveyed(precision):
        endpoint = VirtualEndpoint(Replica(), noise_s=0.001)
        found = asyncio.run(survey(endpoint, Limits(200.0, 8192, 64, 30_000, 512, precision)))
        return found, p.fitted(found.measurements, 512)

    rough, rough_fit = surveyed(0.02)
    fine, fine_fit = surveyed(0.01)
    assert rough.seconds < fine.seconds < 190.0
    assert 0.01 < rough_fit.worst_error <= 0.02
    assert fine_fit.worst_error <= 0.01
    assert rough.fewest >= 3


def test_servers_with_little_memory_get_small_contexts():
    large = p.decode_probes(256, 8192, 100_000, 512)
    small = p.decode_probes(8, 2048, 2048, 2048)
    assert not {(o.batch, o.prompt) for o in large} & set(p.SMALL_CONTEXTS)
    assert (4, 400) in {(o.batch, o.prompt) for o in small}
    assert all(o.batch * (o.prompt + o.outputs) <= 2048 for o in small)


def test_scatter_does_not_depend_on_the_number_of_runs():
    rng = np.random.default_rng(0)
    for runs in (3, 30):
        found = [Measurement(Probe(1, 24 + k), tuple(Sample(10 + e, 24, 0, 0)
                 for e in rng.normal(0, 1, runs))) for k in range(200)]  # fmt: skip
        sure_ms = np.sqrt(runs) * p.noise_ms(found)
        assert sure_ms == pytest.approx(np.hypot(p.MEDIAN, p.TIMER_MS), rel=0.1)
