import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.report.svg import Panel, Scale, around, tick_text, whisker


def test_places_on_scales():
    assert Scale(0, 4).share(1) == 0.25
    assert Scale(1, 100, log=True).share(10) == pytest.approx(0.5)
    # What lies outside stays at the edge, what has no logarithm at the low one.
    assert Scale(0, 4).share(9) == 1
    assert Scale(1, 100, log=True).share(-3) == 0
    assert Scale(2, 2).share(2) == 0.5


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 10), [0, 2, 4, 6, 8, 10]),
        (Scale(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(0, 55), [0, 20, 40]),
        (Scale(1, 1000, log=True), [1, 10, 100, 1000]),
        (Scale(0.1, 1, log=True), [0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1]),
        (Scale(0.85, 1.05, log=True), [0.85, 0.9, 0.95, 1, 1.05]),
    ],
)
def test_ticks(scale, ticks):
    assert scale.ticks(7 if len(ticks) == 7 else 6) == pytest.approx(ticks)


@given(
    low=st.floats(1e-6, 1e6),
    factor=st.floats(1.001, 1e6),
    log=st.booleans(),
    most=st.integers(3, 9),
)
def test_ticks_are_few_and_within(low, factor, log, most):
    scale = Scale(low, low * factor, log)
    ticks = scale.ticks(most)
    assert len(ticks) <= most
    slack = 1e-6 * (scale.high - scale.low)
    assert all(scale.low - slack <= t <= scale.high + slack for t in ticks)
    assert ticks == sorted(ticks)


def test_a_scale_around_values_passes_over_what_is_no_number():
    scale = around([1, None, math.nan, math.inf, 100], log=True)
    assert 0.5 < scale.low < 1
    assert 100 < scale.high < 200
    assert around([], log=True).ticks()
    assert around([3.0]).low == 0


def test_tick_texts():
    assert [tick_text(t) for t in (0.3, 1.0, 250.0, 20_000.0)] == ["0.3", "1", "250", "20k"]


def test_a_panel_is_whole_and_escapes_names():
    panel = Panel(Scale(0, 1), Scale(0, 1), 'a "<b>" & c')
    panel.axes("x <y>", "t & u")
    panel.line([(0, 0), (0.5, None), (1, 1), (1, math.nan)], "subject", "<script>alert(1)</script>")
    panel.dot(0.5, 0.5, "single", "a<b")
    panel.area([0, 1], [0, 0], [1, 1], "replica-0", "&")
    panel.names([(0.5, 0.5, "<i>")], [(0.5, 0.5)])
    text = str(panel.svg())
    assert "<script" not in text
    root = ET.fromstring(text)
    assert root.get("aria-label") == 'a "<b>" & c'
    (line,) = [p for p in root.iter("path") if p.get("class") == "line subject"]
    assert line.get("d").count("M") == 2
    assert "nan" not in text


def test_names_do_not_cover_each_other():
    panel = Panel(Scale(0, 1), Scale(0, 1), "crowd")
    labels = [(0.5, 0.5, f"policy-{k}") for k in range(5)]
    panel.names(labels, [(0.5, 0.5)])
    words = list(ET.fromstring(str(panel.svg())).iter("text"))
    assert len(words) == 5
    places = {(t.get("text-anchor"), t.get("y")) for t in words}
    assert len(places) == 5


def test_a_whisker_is_hollow_unless_its_interval_leaves_one_out():
    scale = Scale(0.5, 2, log=True)
    assert "hollow" in whisker(scale, 0.9, 0.8, 1.0, "subject", "a")
    assert "hollow" in whisker(scale, 0.9, None, None, "subject", "a")
    assert "hollow" not in whisker(scale, 0.9, 0.8, 0.99, "subject", "a")
    assert "hollow" not in whisker(scale, 1.2, 1.1, 1.3, "subject", "a")
    assert "&lt;b&gt;" in whisker(scale, 1, None, None, "subject", "<b>")
