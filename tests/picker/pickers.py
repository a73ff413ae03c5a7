"""Pickers before emulated servers, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from router.conftest import quiet_settings
from tailrace.config import Cluster, Replica
from tailrace.emulate.emulator import Emulator
from tailrace.picker.app import Picker

CHAT = b'{"model": "emulated", "messages": [{"role": "user", "content": "Hello"}]}'


@asynccontextmanager
async def picking(replicas: int = 3, **over: Any) -> AsyncIterator[tuple[Picker, Any, list[str]]]:
    """A picker before emulated servers: the picker, a channel to it, and their endpoints."""
    async with Emulator(Cluster(replicas=(Replica(count=replicas),)), time_scale=0.02) as emulator:
        given = {"admin": {"listen": "off"}, "models": {}, "routing": {"policy": "round_robin"}}
        settings = quiet_settings([{"url": url} for url in emulator.urls], **{**given, **over})
        picker = Picker(settings)
        await picker.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.listen_at[1]}") as channel:
                yield picker, channel, [url.removeprefix("http://") for url in emulator.urls]
        finally:
            await picker.stop()


def is_idle(picker: Picker) -> bool:
    """Whether nothing is in progress, by any count."""
    return (
        not picker.intake.active
        and not len(picker.intake.queue)
        and not picker.held.used
        and not picker.backends.cluster.replicas["in_flight"].any()
        and all(b.active == 0 for b in picker.backends.all)
        and all(c.account.active == 0 for c in picker.keyring.clients)
    )
