"""Breaker, drain and slow start, on a clock that the tests move."""

import pytest

from tailrace.router.proxy.health import CLOSED, HALF_OPEN, NO_LIMIT, OPEN, Breaker, Health
from tailrace.router.settings import HealthSettings

SETTINGS = HealthSettings(failures=3, open_s=5, trials=2, window_requests=10, failure_share=0.5)


def broken(at: float = 100.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failure(at, "refused")
    assert breaker.state == OPEN
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failure(1, "x")
        breaker.failure(1, "x")
        breaker.success(1)
    assert breaker.state == CLOSED
    for _ in range(3):
        breaker.failure(2, "refused", died=True)
    assert (breaker.state, breaker.reason, breaker.opened, breaker.died) == (
        OPEN, "refused", 1, True,
    )  # fmt: skip


def test_a_probe_may_find_out_later_that_it_died() -> None:
    """Its streams broke, which may have been a hiccup; then nobody listens there any more."""
    told = []
    health = Health(SETTINGS, None, lambda: told.append(health.breaker.died))
    for _ in range(3):
        health.failure(1, "broken off")
    health.probed(2, False, "refused", died=True)
    health.probed(3, False, "refused", died=True)
    assert told == [False, True]


def test_a_share_of_failures_opens_it() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(8):
        breaker.failure(1, "x")
        breaker.success(1)
        if breaker.state == OPEN:
            break
    assert breaker.state == OPEN


def test_old_failures_are_forgotten() -> None:
    breaker = Breaker(SETTINGS)
    for second in range(60):
        breaker.failure(second, "x")
        for _ in range(2):
            breaker.success(second)
    assert breaker.state == CLOSED


def test_only_a_good_probe_after_a_while_lets_requests_try() -> None:
    breaker = broken(100)
    breaker.probed(104, True, "")
    assert breaker.state == OPEN
    breaker.probed(105, False, "no")
    assert breaker.state == OPEN
    breaker.probed(105, True, "")
    assert breaker.state == HALF_OPEN
    breaker.success(106)
    assert breaker.state == HALF_OPEN
    breaker.success(106)
    assert breaker.state == CLOSED
    assert breaker.closed_at == 106


def test_a_failed_trial_doubles_the_pause() -> None:
    breaker = broken(100)
    breaker.probed(105, True, "")
    breaker.failure(106, "again")
    assert breaker.state == OPEN
    breaker.probed(115, True, "")
    assert breaker.state == OPEN
    breaker.probed(116, True, "")
    assert breaker.state == HALF_OPEN


def test_the_pause_has_a_limit() -> None:
    breaker = broken(0)
    now = 0.0
    for _ in range(20):
        now = breaker.open_until
        breaker.probed(now, True, "")
        breaker.failure(now, "x")
    assert breaker.open_until - now <= 12 * SETTINGS.open_s


def test_errors_that_may_not_open() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(50):
        breaker.failure(1, "answered 500", may_open=False)
    assert breaker.state == CLOSED


def test_probes_alone_open_and_close_it() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.probed(1, False, "no answer")
    assert breaker.state == OPEN
    for now in (10, 11, 12):
        breaker.probed(now, True, "")
    assert breaker.state == CLOSED


def test_probes_and_requests_are_counted_apart() -> None:
    """A server that answers its health path and nothing else is found out all the same."""
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failure(1, "silent")
        breaker.probed(1, True, "")
    assert breaker.state == OPEN
    breaker = Breaker(SETTINGS)
    for now in range(20):
        breaker.probed(now, now % 3 == 0, "late")
    assert breaker.state == CLOSED


def test_drain_is_told() -> None:
    calls: list[bool] = []
    health = Health(SETTINGS, None, lambda: calls.append(health.available))
    health.drain(True)
    assert health.state == "draining"
    assert health.limit(0, 0) == 0
    health.drain(False)
    assert calls == [False, True]
    assert health.limit(0, 0) == NO_LIMIT


def test_changes_are_told_once() -> None:
    states: list[str] = []
    health = Health(SETTINGS, 7, lambda: states.append(health.state))
    for _ in range(5):
        health.failure(1, "x")
    health.probed(9, True)
    health.success(9)
    health.success(9)
    health.success(9)
    assert states == [OPEN, HALF_OPEN, CLOSED]


def test_limits_on_the_way_back() -> None:
    settings = SETTINGS.model_copy(update={"slow_start_s": 10.0})
    health = Health(settings, 40)
    assert health.limit(0, 0) == 40
    for _ in range(3):
        health.failure(1, "x")
    assert health.limit(1, 30) == 0
    health.probed(9, True)
    assert health.limit(9, 30) == 2
    health.success(10)
    health.success(10)
    assert health.warming(10)
    grows = [health.limit(now, 30) for now in (10, 11, 15, 19.9)]
    assert grows == sorted(grows)
    assert (grows[0], grows[2]) == (2, 15)
    assert health.limit(20, 30) == 40


def test_a_replica_that_comes_back_by_a_reload_starts_anew() -> None:
    health = Health(SETTINGS, None)
    for _ in range(3):
        health.failure(1, "x")
    health.remove(True)
    assert (health.state, health.available) == ("removed", False)
    health.remove(False)
    assert (health.state, health.available) == (CLOSED, True)


@pytest.mark.parametrize("now", [0.0, 0.5, 1e9])
def test_a_new_replica_is_not_warming(now: float) -> None:
    assert not Health(SETTINGS, None).warming(now)
