import json
from pathlib import Path

import numpy as np

from tailrace.config import Scenario
from tailrace.files import dumps, plain


def test_what_is_not_finite_becomes_null():
    value = {"a": float("nan"), "b": [np.inf, np.float64(1.5)], "c": np.array([1.0, -np.inf])}
    assert plain(value) == {"a": None, "b": [None, 1.5], "c": [1.0, None]}


def test_types_of_our_own_become_plain():
    assert json.loads(dumps(Scenario()))["cluster"]["replicas"][0]["count"] == 4
    assert plain({"n": np.int64(3), "ok": np.bool_(True), "p": Path("x"), 1: (1, 2)}) == {
        "n": 3,
        "ok": True,
        "p": "x",
        "1": [1, 2],
    }
    assert plain(True) is True


def test_equal_values_give_equal_bytes():
    assert dumps({"b": 1, "a": 2}) == dumps({"b": 1, "a": 2})
    assert list(json.loads(dumps({"b": 1, "a": 2}))) == ["b", "a"]
