"""A router in front of emulated servers, all in one event loop, and clients with keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.conftest import Answer, Client, Clock, Counts
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.router.app import Router
from tailrace.router.serve_settings import ServeSettings

HOST = "127.0.0.1"


@dataclass
class Emulated:
    """A router and the emulated servers behind it."""

    router: Router
    emulators: list[Emulator]
    counts: Counts
    opened: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection(*self.router.listen_at))
        self.opened.append(client)
        return client

    async def ask(
        self, path: str, body: dict[str, Any], key: str = "", client: Client | None = None
    ) -> Answer:
        """Send one request, on a connection of its own unless there is one."""
        client = client or await self.client()
        data = orjson.dumps(body)
        line = f"authorization: Bearer {key}\r\n" if key else ""
        client.send(
            f"POST {path} HTTP/1.1\r\nhost: x\r\n{line}content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return await client.answer()

    async def quiet(self) -> None:
        """Wait until nothing is in progress, by any count."""
        router = self.router
        while router.dispatcher.active:
            await asyncio.sleep(0.005)
        assert len(router.dispatcher.queue) == 0
        assert not router.backends.cluster.replicas["in_flight"].any()
        assert all(b.active == 0 for b in router.backends.all)
        assert all(c.account.active == 0 for c in router.keyring.clients)


@asynccontextmanager
async def emulated(
    *models: tuple[str, ...], replicas: int = 1, time_scale: float = 0.02, **over: Any
) -> AsyncIterator[Emulated]:
    """A router before ``replicas`` servers of each of ``models``: a model and its adapters."""
    emulators = [
        Emulator(
            Cluster(replicas=(Replica(count=replicas),)), time_scale=time_scale, model=model,
            adapters=adapters,
        )
        for model, *adapters in models or (("emulated",),)
    ]  # fmt: skip
    for emulator in emulators:
        await emulator.__aenter__()
    settings = {
        "backends": [{"url": url} for emulator in emulators for url in emulator.urls],
        "listen": f"{HOST}:0",
        "admin": {"listen": "off"},
        "routing": {"policy": "round_robin", "limit_ms": 10_000},
        "metrics": {"path": "off"},
        "tokens": {"source": "estimate"},
        "health": {"interval_s": 1000},
        **over,
    }
    counts = Counts()
    router = Router(ServeSettings.model_validate(settings), events=counts, clock=Clock())
    await router.start()
    made = Emulated(router, emulators, counts)
    try:
        yield made
    finally:
        for client in made.opened:
            client.writer.close()
        await router.stop()
        for emulator in emulators:
            await emulator.__aexit__(None, None, None)
