"""A deployment for the tests; its replicas import it by name."""

import asyncio
import os

from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=8)
class Echo:
    """Answers with its own name."""

    def __init__(self):
        self.go = asyncio.Event()

    async def __call__(self, body):
        return self.name()

    async def hold(self, body):
        """Answer when somebody calls release."""
        await self.go.wait()
        return self.name()

    async def release(self):
        self.go.set()

    async def pid(self):
        return os.getpid()

    def name(self):
        return serve.get_replica_context().replica_id.unique_id
