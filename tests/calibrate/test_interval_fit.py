"""Cost models from sums of iterations."""

import numpy as np
import pytest

from tailrace.calibrate.interval_fit import Stretches, fit, summed
from tailrace.calibrate.iteration_fit import predicted_ms
from tailrace.config import CostModel
from tailrace.errors import TailraceError

TRUE = CostModel(
    base_ms=8.0, per_token_ms=0.03, knots=((256, 0.05),), per_context_ms=1e-4, per_prefill_ms=5e-6
)


def explained_ms(stretches, model, overhead_ms):
    """What a model predicts for each stretch, whether fitted to them or not."""
    each = predicted_ms(model, stretches.tokens, stretches.context, stretches.work)
    return stretches.summed(each) + overhead_ms * stretches.requests


def sums_of_iterations(rng, overhead_ms=0.0):
    """Prompts in pieces of 512 tokens, and single decode iterations; ms as TRUE has it."""
    rows = []
    for row, prompt in enumerate((20, 90, 200, 300, 450, 700, 1500, 3000, 5000)):
        for before in range(0, prompt, 512):
            size = min(512, prompt - before)
            rows.append((row, size, 0.0, size * (before + size / 2)))
    decodes = [(b, k) for b in (1, 8, 40, 120) for k in (100.0, 20_000.0)]
    rows += [(9 + row, batch, context, 0.0) for row, (batch, context) in enumerate(decodes)]
    row, tokens, context, work = np.array(rows, float).T
    count = 9 + len(decodes)
    requests = (np.arange(count) < 9) * 1.0
    made = Stretches(row.astype(np.int64), tokens, context, work, np.ones(count), requests)
    ms = explained_ms(made, TRUE, overhead_ms)
    return Stretches(row.astype(np.int64), tokens, context, work, ms, requests)


def assert_close(model, tolerance):
    for name in ("base_ms", "per_token_ms", "per_context_ms", "per_prefill_ms"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=tolerance), name
    ((knot, slope),) = model.knots
    assert (knot, slope) == (256, pytest.approx(0.05, rel=tolerance))


def test_sums_give_back_the_model_and_the_overhead():
    found = fit(summed(sums_of_iterations(np.random.default_rng(0), overhead_ms=2.5)))
    assert_close(found.model, 1e-6)
    assert found.overhead_ms == pytest.approx(2.5, rel=1e-6)
    assert found.undetermined == ()


def test_one_hiccup_does_not_spoil_the_fit():
    stretches = sums_of_iterations(np.random.default_rng(0), overhead_ms=1.0)
    stretches.ms[6] *= 3
    assert_close(fit(summed(stretches)).model, 0.02)


def test_noise_makes_no_knots_and_its_size_is_told():
    rng = np.random.default_rng(1)
    stretches = sums_of_iterations(rng)
    plain = TRUE.model_copy(update={"knots": ()})
    ms = explained_ms(stretches, plain, 0.0) * rng.normal(1.0, 0.01, len(stretches.ms))
    found = fit(summed(Stretches(**{**vars(stretches), "ms": ms})))
    assert found.model.knots == ()
    assert 0.001 < found.uncertainty["base_ms"] < 0.03


def test_what_was_not_measured_is_named():
    stretches = sums_of_iterations(np.random.default_rng(0))
    none = np.zeros_like(stretches.work)
    found = fit(summed(Stretches(**{**vars(stretches), "work": none})))
    assert found.undetermined == ("per_prefill_ms",)


def test_too_little_is_refused():
    few = Stretches(*(np.zeros(1, np.int64), *[np.ones(1)] * 5))
    with pytest.raises(TailraceError, match="at least 5 measured times"):
        fit(summed(few))
