"""Limits of clients, over all workers."""

import os
from typing import Any

import pytest

from tailrace.errors import TailraceError
from tailrace.router.access import accounts as accounts_module
from tailrace.router.access.accounts import (
    ADMITTED,
    TOO_MANY_AT_ONCE,
    TOO_MANY_REQUESTS,
    Account,
    ClientAccounts,
    owners,
)
from tailrace.router.settings import ClientSettings

NOW = 1000.0  # s


def client(name: str = "a", **limits: Any) -> ClientSettings:
    return ClientSettings(name=name, key_env=("KEY",), **limits)


def of(shared: ClientAccounts, settings: ClientSettings, worker: int = 0) -> Account:
    return shared.account(settings, owners([settings]), worker)


def test_requests_at_once() -> None:
    shared, limited = ClientAccounts(2), client(concurrent=3)
    first, second = of(shared, limited, 0), of(shared, limited, 1)
    assert [first.begin(NOW)[0] for _ in range(2)] == [ADMITTED] * 2
    assert [second.begin(NOW)[0] for _ in range(2)] == [ADMITTED, TOO_MANY_AT_ONCE]
    assert first.active == second.active == 3
    first.end()
    assert second.begin(NOW)[0] == ADMITTED
    shared.clear(1)  # the second worker has died
    assert first.active == 1


@pytest.mark.parametrize(("rate", "at_once"), [(10.0, 10), (1.0, 1), (0.1, 1), (2.5, 2), (1e6, 99)])
def test_requests_per_second(rate: float, at_once: int) -> None:
    shared, limited = ClientAccounts(2), client(requests_per_s=rate)
    workers = [of(shared, limited, w) for w in (0, 1)]
    taken = [workers[k % 2].begin(NOW)[0] for k in range(99)].count(ADMITTED)
    assert taken == at_once
    if taken == 99:
        return
    why, wait_s = workers[0].begin(NOW)
    assert why == TOO_MANY_REQUESTS
    assert 0 < wait_s <= 1 / rate
    assert workers[1].begin(NOW + wait_s + 2e-9)[0] == ADMITTED
    # In the long run it is the rate that counts, however eager the client is.
    later = NOW + 100
    taken = sum(workers[k % 2].begin(later + k / 50)[0] == ADMITTED for k in range(5000))
    assert 100 * min(rate, 50) - 1 <= taken <= 100 * rate + at_once + 1


def test_tokens_per_minute() -> None:
    account = of(ClientAccounts(), client(tokens_per_minute=6000))
    assert account.reserve(4000, NOW) == 0
    assert account.reserve(4000, NOW) == pytest.approx(20)
    assert account.reserve(2000, NOW) == 0
    account.begin(NOW)
    account.end(-3000)  # the answers were shorter than thought
    assert account.reserve(3000, NOW) == 0
    account.end(600)  # and one was longer
    assert account.reserve(1, NOW) == pytest.approx(6.01)


def test_more_than_a_minutes_tokens_need_a_full_bucket() -> None:
    account = of(ClientAccounts(), client(tokens_per_minute=600))
    assert account.reserve(6000, NOW) == 0
    assert account.reserve(1, NOW) == pytest.approx(540.1)
    assert account.reserve(6000, NOW + 599) == pytest.approx(1)


def test_a_refused_request_takes_nothing() -> None:
    shared = ClientAccounts()
    account = of(shared, client(requests_per_s=1, concurrent=5))
    account.begin(NOW)
    for _ in range(20):
        assert account.begin(NOW)[0] == TOO_MANY_REQUESTS
    assert account.active == 1
    assert account.begin(NOW + 1)[0] == ADMITTED


def test_processes_share_a_limit() -> None:
    """Four processes ask for a place as fast as they can; no more than the limit get one."""
    shared, limited = ClientAccounts(4), client(concurrent=1000)
    of(shared, limited).begin(NOW)  # compile before the fork
    children = []
    for worker in range(4):
        pid = os.fork()
        if pid == 0:
            account = of(shared, limited, worker)
            for _ in range(2000):
                account.begin(NOW)
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert of(shared, limited).active == 1000


def test_rows_of_clients_that_are_gone_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "ROWS", 4)
    shared = ClientAccounts()
    for k in range(50):
        of(shared, client(f"client-{k}", concurrent=1))
    busy = [client(f"busy-{k}") for k in range(4)]
    for each in busy:
        shared.account(each, owners(busy), 0).begin(NOW)
    with pytest.raises(TailraceError, match="no room for client new"):
        of(shared, client("new"))


def test_a_change_that_is_refused_in_the_end_takes_nothing_from_a_client() -> None:
    shared, old = ClientAccounts(), client("old", requests_per_s=1)
    account = of(shared, old)
    assert account.begin(NOW)[0] == ADMITTED
    account.end()
    of(shared, client("new"))  # of settings without the old client, which are refused then
    assert account.begin(NOW)[0] == of(shared, old).begin(NOW)[0] == TOO_MANY_REQUESTS


def test_workers_agree_on_rows() -> None:
    shared = ClientAccounts(2)
    clients = [client(name, concurrent=1) for name in "abc"]
    for settings in clients:
        assert shared.account(settings, owners(clients), 0).begin(NOW)[0] == ADMITTED
    for settings in reversed(clients):
        assert shared.account(settings, owners(clients), 1).begin(NOW)[0] == TOO_MANY_AT_ONCE
