"""Faults of the endpoint picker: killed under load behind a real Envoy (``make test-envoy``).

Twenty clients send short requests without a pause. The picker is killed, is away for a while, and
is started again. While it is away requests fail (fail-close) or go round (fail-open), as
docs/picker.md says; none may hang, and all must be served once the picker is back.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from router.abuse.case import Case, Target
from router.processes import HOST, completion, free_ports

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import envoy_rig

CLIENTS = 20
#: How long the picker is there, then away, s, and the most that a request may take.
THERE_S, AWAY_S, MOST_S = 4.0, 4.0, 15.0
#: Time between two tries of a client that got an error, s.
PAUSE_S = 0.05
#: How long after the kill, and after the return, requests may fail, s: Envoy's health checks.
NOTICE_S, BACK_S = 1.0, 20.0


@dataclass
class Load:
    """What clients have seen: when each request began, how long it took, its status (0: none)."""

    port: int
    seen: list[tuple[float, float, int]] = field(default_factory=list)
    stopped: bool = False
    errors: dict[int, bytes] = field(default_factory=dict)
    """The latest body of each status but 200."""

    async def client(self) -> None:
        """Ask without a pause, on a connection of its own each time."""
        request = completion(2, stream=False)
        while not self.stopped:
            began = time.monotonic()
            status = 0
            try:
                async with asyncio.timeout(MOST_S):
                    status = await self._ask(request)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
                pass
            self.seen.append((began, time.monotonic() - began, status))
            if status != 200:
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, request: bytes) -> int:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            status, body = int(head.split(b" ", 2)[1]), b""
            if b"transfer-encoding: chunked" in head:
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    body = await reader.readexactly(size + 2)
                await reader.readexactly(2)
            elif b"content-length: " in head:
                at = head.index(b"content-length: ") + 16
                body = await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
            if status != 200:
                self.errors[status] = body[:120]
            return status
        finally:
            writer.close()

    def statuses(self, start: float, end: float) -> Counter[int]:
        """Statuses of the requests that began in a time."""
        return Counter(status for at, _, status in self.seen if start <= at < end)


async def killed_picker(target: Target, fail_open: bool, mode: str, served: bool) -> str:
    """The picker is killed under load and returns; ``served``: requests go round meanwhile."""
    stage = target.stage
    (port,) = free_ports(1)
    urls = [f"http://{HOST}:{p}" for p in stage.ports]
    command = ["pick", "--listen", f"{HOST}:{port}", "--admin", "off", "-p", "round_robin",
               *(word for url in urls for word in ("-b", url))]  # fmt: skip
    edits = {"request_body_mode: FULL_DUPLEX_STREAMED": f"request_body_mode: {mode}"}
    servers = [url.removeprefix("http://") for url in urls]
    stage.run("picker", *command)
    rig = envoy_rig.envoy(port, servers, fail_open=fail_open, edits=edits)
    envoy = await asyncio.to_thread(rig.__enter__)
    load = Load(envoy.port)
    clients: list[asyncio.Task[None]] = []
    try:
        await _until_served(load)
        load.seen.clear()
        clients = [asyncio.create_task(load.client()) for _ in range(CLIENTS)]
        began = time.monotonic()
        await asyncio.sleep(THERE_S)
        killed = time.monotonic()
        await asyncio.to_thread(stage.kill, "picker")
        await asyncio.sleep(AWAY_S)
        stage.run("picker", *command)
        restarted = time.monotonic()
        while load.statuses(time.monotonic() - 1.0, time.monotonic())[200] < CLIENTS or set(
            load.statuses(time.monotonic() - 1.0, time.monotonic())
        ) != {200}:
            assert time.monotonic() < restarted + BACK_S + MOST_S, "requests fail after its return"
            await asyncio.sleep(0.1)
        back = max((at for at, _, status in load.seen if status != 200), default=restarted)
        await asyncio.sleep(THERE_S / 2)
    finally:
        load.stopped = True
        await asyncio.gather(*clients)
        rig.__exit__(None, None, None)
        if stage.processes["picker"].poll() is None:
            stage.kill("picker")
    before, away = load.statuses(began, killed - 0.5), load.statuses(killed + NOTICE_S, restarted)
    longest = max(took for _, took, _ in load.seen)
    target.figures |= {
        "requests": len(load.seen), "failed": sum(s != 200 for _, _, s in load.seen),
        "served_while_away": away[200], "failed_while_away": away.total() - away[200],
        "longest_request_s": longest, "back_after_s": max(0.0, back - restarted),
    }  # fmt: skip
    assert set(before) == {200}, f"with the picker: {dict(before)} {load.errors}"
    assert longest < MOST_S, f"a request took {longest:.1f} s"
    if served:
        assert set(away) == {200}, f"without the picker: {dict(away)}"
    else:
        assert 200 not in away, f"without the picker: {dict(away)}"
    what = "went round" if served else "got 5xx"
    return f"{away.total()} requests {what} meanwhile, none hung; served again"


async def _until_served(load: Load) -> None:
    """Wait until Envoy has found the picker."""
    limit = time.monotonic() + 120
    while await load._ask(completion(2, stream=False)) != 200:
        assert time.monotonic() < limit, "Envoy does not find the picker"
        await asyncio.sleep(0.1)


#: Fails open or not, how bodies are sent, whether requests are served without the picker.
KINDS = (
    (False, "FULL_DUPLEX_STREAMED", False),
    (False, "BUFFERED", False),
    (True, "BUFFERED", True),
    (True, "FULL_DUPLEX_STREAMED", False),
)
#: None where there is no Envoy.
CASES = tuple(
    Case(
        f"picker killed under load, fail-{'open' if fail_open else 'close'}, {mode}",
        partial(killed_picker, fail_open=fail_open, mode=mode, served=served),
        innocents=False,
    )
    for fail_open, mode, served in KINDS
    if os.access(envoy_rig.BINARY, os.X_OK)
)
