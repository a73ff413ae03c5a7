"""A router in front of emulated servers, all in one event loop, and clients with keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.conftest import Answer, Client, Clock, Counts, quiet_settings, serving
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.router.app import Router


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
    async with AsyncExitStack() as stack:
        for emulator in emulators:
            await stack.enter_async_context(emulator)
        settings = quiet_settings(
            [{"url": url} for emulator in emulators for url in emulator.urls],
            **{"admin": {"listen": "off"}, "models": {}, **over},
        )
        counts = Counts()
        router = Router(settings, events=counts, clock=Clock())
        made = Emulated(router, emulators, counts)
        async with serving(router, made.opened):
            yield made
