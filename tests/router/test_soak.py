"""What the soak suite (``make test-soak``) lets pass, and what not."""

import random

import pytest

from router.abuse.malformed import malformed
from router.abuse.soak import CASES, Row


def judged(**figures: float) -> list[str]:
    row = Row("case", **{"alone_lag_s": 0.01, "before_mb": 100.0, **figures})  # type: ignore[arg-type]
    row.judge()
    return row.problems


@pytest.mark.parametrize(
    "figures",
    [
        {"lag_s": 0.1},
        {"lag_s": 0.39, "alone_lag_s": 0.2},
        {"after_mb": 120.0},
        {"autopilot_mb": 1024.0},
        {"asked": 9, "excused": 9},
    ],
)
def test_within_the_limits(figures: dict[str, float]) -> None:
    assert judged(**figures) == []


@pytest.mark.parametrize(
    "figures",
    [
        {"lag_s": 0.11},
        {"lag_s": 0.41, "alone_lag_s": 0.2},
        {"after_mb": 121.0},
        {"autopilot_mb": 1025.0},
        {"asked": 9, "lost": 1},
    ],
)
def test_beyond_a_limit(figures: dict[str, float]) -> None:
    assert len(judged(**figures)) == 1


def test_names_of_cases_are_distinct() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_malformed_requests_repeat_with_their_seed() -> None:
    one, other = random.Random(7), random.Random(7)
    assert [malformed(one) for _ in range(50)] == [malformed(other) for _ in range(50)]
