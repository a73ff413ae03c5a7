"""Limits of a client hold over all workers, and outlive one that is killed."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from router.conftest import run_with_process
from router.processes import Cluster, Outcome, ask, cluster, completion, until

CLIENTS = (
    '[{name="places",key_env="KEY_P",concurrent=5},'
    '{name="rate",key_env="KEY_R",requests_per_s=20},'
    '{name="tokens",key_env="KEY_T",tokens_per_minute=2500}]'
)


def keyed(request: bytes, key: str) -> bytes:
    return request.replace(b"host: x\r\n", b"host: x\r\nx-api-key: %b\r\n" % key.encode(), 1)


def statuses(made: Cluster, request: bytes, count: int) -> list[int]:
    """Send requests at once, each on a connection of its own: any worker may get it."""

    async def all_() -> list[Outcome]:
        return await asyncio.gather(*(ask(made.listen, request) for _ in range(count)))

    return [outcome.status for outcome in run_with_process(all_())]


def test_limits_hold_over_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("P", "R", "T"):
        monkeypatch.setenv(f"KEY_{name}", f"secret-{name}")
    with cluster(tmp_path) as made:
        made.start_emulator(2)
        made.start_router(processes=3, clients=CLIENTS)
        until("all workers", lambda: len(made.status()["workers"]) == 3)

        assert set(statuses(made, completion(2), 20)) == {401}
        slow = keyed(completion(300), "secret-P")
        for _ in range(2):
            found = statuses(made, slow, 30)
            assert (found.count(200), found.count(429)) == (5, 25)

        quick = keyed(completion(1, stream=False), "secret-R")
        began = time.monotonic()
        found = [s for _ in range(3) for s in statuses(made, quick, 40)]
        most = 20 + 20 * (time.monotonic() - began) + 1
        assert 20 <= found.count(200) <= most
        assert set(found) == {200, 429}

        # 30 tokens of prompt and 470 of the answer: five of them, and then the minute is used up.
        found = statuses(made, keyed(completion(470), "secret-T"), 30)
        assert found.count(200) == 5
        assert set(found) == {200, 429}

        # A worker that is killed gives back the places of its requests.
        async def killed() -> None:
            asked = [asyncio.ensure_future(ask(made.listen, slow)) for _ in range(30)]
            await asyncio.sleep(0.5)
            for worker in made.status()["workers"]:
                os.kill(worker["pid"], signal.SIGKILL)
            await asyncio.gather(*asked, return_exceptions=True)

        run_with_process(killed())
        until("the workers are back", lambda: len(made.status()["workers"]) == 3)
        until("the places are free", lambda: statuses(made, slow, 6).count(200) == 5, 60)
        made.assert_alive_and_quiet()
