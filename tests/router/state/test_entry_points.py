"""Entry points of compiled functions."""

import numpy as np
import pytest

from tailrace.compiled import jit
from tailrace.router.intake.prompt_blocks import array_blocks, private_block, token_blocks
from tailrace.router.state.entry_points import entry_of

RECORD = np.dtype([("count", "i8"), ("share", "f8")])


@jit
def _add(records, number):  # type: ignore[no-untyped-def]
    records[0]["count"] += number
    return records.size, records[0]["share"]


def test_an_entry_does_what_the_function_does() -> None:
    records = np.zeros(2, RECORD)
    records["share"] = 0.5
    entry = entry_of(_add, np.zeros(1, RECORD), 1)
    assert entry(records, 3) == _add(records, 4) == (2, 0.5)
    assert records[0]["count"] == 7


def test_with_bounds_checks_types_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    assert entry_of(_add, np.zeros(1, RECORD), 1) is _add


def test_the_runs_of_all_prompts_have_the_same_types() -> None:
    """Entry points of the ledger and of decisions are made for those of a private block."""
    expected = private_block(0, 1)
    large = np.zeros(5 * 2**20, np.uint8)
    for runs in (
        array_blocks(np.zeros(1000, np.uint8), 1), array_blocks(large, 1, (1, 900)),
        array_blocks(np.frombuffer(b"x" * 300, np.uint8), 1), token_blocks([1, 2, 3], 1),
    ):  # fmt: skip
        for found, wanted in ((runs.keys, expected.keys), (runs.units, expected.units)):
            assert found.dtype == wanted.dtype
            assert found.ndim == wanted.ndim
            assert found.flags.c_contiguous
            assert found.flags.behaved
