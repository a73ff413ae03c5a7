"""Carries the messages of ``state/peers.py`` between routers, over Redis or Valkey.

All routers of a cluster publish on one channel and read it. The store keeps nothing but the secret
from which content hashes are made, so that equal prompts have equal hashes everywhere. No request
waits for the store: without it each router goes on with what it knows itself.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

from tailrace.errors import TailraceError
from tailrace.router.settings import StoreSettings
from tailrace.router.state.peers import Peers

#: Time-out of connecting and of a command, and the pause before the next attempt, s.
TIMEOUT_S, RETRY_S = 2.0, 0.5
#: Bytes of the common secret.
SECRET_BYTES = 16
#: Messages read without a pause for requests.
_SLICE = 16

_log = logging.getLogger("tailrace.router")


class SharedStore:
    """A router's connection to the others."""

    def __init__(self, peers: Peers, settings: StoreSettings, clock: Callable[[], float]) -> None:
        try:
            import msgpack  # noqa: F401
            import redis.asyncio
        except ImportError:
            raise TailraceError(
                "a shared store needs the packages redis and msgpack: pip install "
                "'tailrace[cluster]'"
            ) from None
        self.peers = peers
        self.settings = settings
        self.connected = False
        self.lost = 0
        """Times the connection was lost."""
        self.sent = 0
        """Messages published."""
        self._clock = clock
        self._redis: Any = redis
        self._password = settings.password()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._stopped = False

    async def run(self) -> None:
        """Tell and be told, until stopped; connect again whenever the store was away."""
        while not self._stopped:
            client = self._redis.asyncio.from_url(
                self.settings.url, password=self._password, socket_connect_timeout=TIMEOUT_S,
                socket_timeout=TIMEOUT_S, health_check_interval=0,
            )  # fmt: skip
            why = "closed"
            try:
                await self._talk(client)
            except* (OSError, TimeoutError, self._redis.RedisError) as errors:
                why = repr(errors.exceptions[0])[:200]
            finally:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(client.aclose(), TIMEOUT_S)
            if self.connected:
                self.connected = False
                self.lost += 1
                _log.warning("the shared store is away", extra={"why": why})
            self.peers.sweep(self._clock())
            await asyncio.sleep(RETRY_S)

    def stop(self) -> None:
        """End :meth:`run` within a second or two."""
        self._stopped = True

    async def _talk(self, client: Any) -> None:
        """Serve one connection until it fails."""
        secret_name, channel = (f"{self.settings.name}:{part}" for part in ("secret", "state"))
        # A store that was started again gets the secret that the routers have already.
        await client.set(secret_name, self._secret, nx=True)
        self._secret = bytes(await client.get(secret_name))
        self.peers.cluster.set_content_secret(self._secret)
        async with client.pubsub() as subscription:
            await subscription.subscribe(channel)
            self.peers.reconnected()
            self.connected = True
            _log.info("the shared store is there")
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tell(client, channel))
                group.create_task(self._listen(subscription))

    async def _tell(self, client: Any, channel: str) -> None:
        while not self._stopped:
            await asyncio.sleep(self.settings.interval_s)
            now = self._clock()
            self.peers.sweep(now)
            for message in self.peers.collect(now):
                await client.publish(channel, message)
                self.sent += 1

    async def _listen(self, subscription: Any) -> None:
        count = 0
        while not self._stopped:  # the client library may swallow a cancellation
            message = await subscription.get_message(
                ignore_subscribe_messages=True, timeout=TIMEOUT_S / 2
            )
            if message is not None and message["type"] == "message":
                self.peers.apply(message["data"], self._clock())
                count += 1
                if count % _SLICE == 0:
                    await asyncio.sleep(0)


def router_number() -> int:
    """Return a number for this router that no other has."""
    return int.from_bytes(os.urandom(4), "big") >> 1
