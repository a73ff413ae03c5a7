"""The tables of results in README and model card are those of the results."""

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("headline", DOCS / "headline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(script):
    """If not: python docs/headline.py."""
    assert len(script.TARGETS) >= 2
    for target, head in zip(script.TARGETS, script.HEADS, strict=True):
        text = target.read_text(encoding="utf-8")
        assert text.count(script.begin(head)) == 1
        assert script.with_tables(text) == text


def test_the_picture_is_up_to_date(script):
    """If not: python docs/headline.py."""
    measured = json.loads((DOCS / "results" / "routers.json").read_text(encoding="utf-8"))
    svg = script.PICTURE.read_text(encoding="utf-8")
    assert script.picture(measured) == svg
    assert svg.count("<rect class=") == 1 + 6
    by_name = {row["policy"]: row["vs_best_single"]["mean_e2e"] for row in measured["policies"]}
    assert f">{by_name['tailrace'] / by_name['round_robin']:.2f}</text>" in svg
    ElementTree.fromstring(svg)


def test_readme_is_short():
    words = re.sub(r"<!--.*?-->|[|│▲─>└┘`*#-]+", " ", (DOCS.parent / "README.md").read_text())
    assert len(words.split()) < 850


def test_what_the_tables_say(script):
    made = {
        "subject": "mine", "best_single": "a", "best_hand_made": "b", "seeds": [7, 8],
        "requests": {"s": 50, "t": 60},
        "policies": [
            {"policy": name, "role": role, "vs_best_single": against(cost)}
            for name, role, cost in (
                ("mine", "subject", 0.5), ("a", "rule", 1.0), ("b", "tuned", 1.25),
                ("oracle", "look-ahead", 0.4), ("c", "rule", 9.0), ("round_robin", "rule", 2.0),
            )
        ],
        "vs_best_hand_made": against(0.4),
        "vs_best_per_scenario": {
            "share_better": 0.5, "share_surely_better": 0.0, "worst_ratio": 1.02,
            "worst_scenario": "t",
            "scenarios": {
                "s": {"policy": "a"} | against(0.9), "t": {"policy": "b"} | against(1.02),
            },
        },
        "cells": [
            {"scenario": s, "policy": p, "cost_s": c, "ttft_s_p99": c, "e2e_s_mean": c}
            for s, p, c in (
                ("s", "a", 4.0), ("s", "mine", 1.0), ("t", "a", 1.0), ("t", "mine", 3.0),
            )
        ],
    }  # fmt: skip
    rows = script.headline(made).splitlines()
    assert rows[2:] == [
        "| `round_robin` (everyone) | 0.250 | 0.250 | 0.250 | 0.250 |",
        "| `b`, the best rule | 0.400 (0.300-0.500) | 0.400 | 0.400 | 0.400 |",
        "| `a`, the best single opponent | 0.500 (0.400-0.600) | 0.500 | 0.500 | 0.500 |",
        "| `oracle` | 1.250 | 1.250 | 1.250 | 1.250 |",
    ]
    assert "lower in 1 of 2 (0 statistically significant)" in script.summary(made)
    assert "`t`, it is 2.0% higher" in script.summary(made)
    assert "a cost of 0.500, a P99 TTFT of 0.500" in script.hindsight(made)
    assert "| `t` | `b` | 1.020" in script.scenarios(made)


def against(cost):
    figures = dict.fromkeys(("cost", "p99_ttft", "mean_e2e", "throughput"), cost)
    return figures | {"intervals": {"cost": [cost - 0.1, cost + 0.1]}}
