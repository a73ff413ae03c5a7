"""A way to a picker with TLS for clients without it, whatever certificate it shows.

Pickers in clusters often show a certificate that they have signed themselves, for no name. The gRPC
library does not connect to such a one.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from tailrace.router.settings import address as split

_READ = 256 * 1024


@contextlib.asynccontextmanager
async def without_tls(address: str) -> AsyncIterator[str]:
    """Yield an address on this machine that leads to ``address`` (host:port), which has TLS."""
    host, port = split(address)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    tasks: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            there, back = await asyncio.open_connection(host, port, ssl=context)
            with contextlib.closing(back):
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(reader, back))
                    group.create_task(_copy(there, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side closes; then the connection is of no more use."""
    with contextlib.suppress(OSError):
        while data := await source.read(_READ):
            target.write(data)
            await target.drain()
    target.close()
