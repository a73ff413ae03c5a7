"""Length laws: quantiles, clips, atoms, dependence and streams."""

import numpy as np
import pytest

from tailrace.workload import fitted
from tailrace.workload.lengths import Clip, Joint, JointMixture, Lognormals, Streams, pick

STREAMS = Streams(3, "test")


def test_lognormal_quantiles() -> None:
    tokens = Lognormals(((1.0, 6.0, 0.5),), Clip(1, 10**6)).draw(100_000, STREAMS)
    expected = np.exp(6.0 + 0.5 * np.array([-1.2816, 0, 1.2816]))
    assert np.percentile(tokens, [10, 50, 90]) == pytest.approx(expected, rel=0.02)


def test_mixture_weights() -> None:
    law = Lognormals(((2.0, np.log(10), 0.01), (6.0, np.log(1000), 0.01)), Clip(1, 10**6))
    tokens = law.draw(50_000, STREAMS)
    assert (tokens < 100).mean() == pytest.approx(0.25, abs=0.01)


def test_clip_and_atom() -> None:
    law = Lognormals(((1.0, 5.0, 2.0),), Clip(20, 300), atom=(0.3, 7))
    tokens = law.draw(50_000, STREAMS)
    assert (tokens == 7).mean() == pytest.approx(0.3, abs=0.01)
    rest = tokens[tokens != 7]
    assert (rest.min(), rest.max()) == (20, 300)


def test_rounding_is_to_the_nearest() -> None:
    assert Clip(1, 100).tokens(np.array([0.2, 1.4, 1.6, 200.0])).tolist() == [1, 1, 2, 100]


def test_joint_component_has_its_correlation() -> None:
    law = JointMixture((Joint(1.0, 7.0, 6.0, 0.5, 0.4, -0.7),), Clip(1, 10**6), Clip(1, 10**6))
    prompt, output = law.draw(50_000, STREAMS)
    assert np.corrcoef(np.log(prompt), np.log(output))[0, 1] == pytest.approx(-0.7, abs=0.02)
    assert np.log(output).std() == pytest.approx(0.4, rel=0.03)


def test_prompts_at_the_context_limit() -> None:
    prompt, _ = fitted.CODE.draw(50_000, STREAMS)
    # Clipped prompts lie at the upper bound; the rest of the capped are spread over the range.
    capped = (prompt >= 7430) & (prompt < 7437)
    assert capped.mean() == pytest.approx(0.0399 * 7 / 8, abs=0.005)


def test_chat_answers_rise_and_fall_with_the_prompt() -> None:
    # Median output by prompt octile in the trace: 161, 81, 99, 385, 407, 405, 134, 64.
    prompt, output = fitted.CHAT.draw(100_000, STREAMS)
    octile = np.argsort(np.argsort(prompt)) * 8 // len(prompt)
    medians = [np.median(output[octile == k]) for k in range(8)]
    assert medians[3] > 300
    assert medians[4] > 300
    assert medians[1] < 150
    assert medians[7] < 100


def test_drawing_more_changes_nothing_drawn_before() -> None:
    few, many = fitted.CODE.draw(100, STREAMS), fitted.CODE.draw(5000, STREAMS)
    for a, b in zip(few, many, strict=True):
        assert np.array_equal(a, b[:100])


def test_streams_are_independent_and_repeatable() -> None:
    a = STREAMS.rng("a").random(1000)
    assert np.array_equal(a, STREAMS.rng("a").random(1000))
    for other in (STREAMS.rng("b"), Streams(4, "test").rng("a"), STREAMS.below("a").rng("a")):
        assert abs(np.corrcoef(a, other.random(1000))[0, 1]) < 0.15


def test_pick_respects_bounds() -> None:
    weights = np.array([1.0, 0.0, 3.0])
    assert pick(weights, np.array([0.0, 0.2499, 0.25, 0.9999999])).tolist() == [0, 0, 2, 2]
