"""The picker behind TLS, with and without certificates of its proxies."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from certificates import Authority, Pair
from picker.pickers import picking
from router.conftest import run

SERVING = b"\x08\x01"


async def serving_status(channel: grpc.aio.Channel) -> bytes:
    """The answer to a health check, as bytes of its message."""
    return bytes(await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10))


def credentials(authority: Authority, own: Pair | None = None) -> grpc.ChannelCredentials:
    pair = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
    return grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)


@pytest.mark.parametrize("asks", [False, True])
def test_the_picker_speaks_tls(tmp_path: Path, asks: bool) -> None:
    authority = Authority(tmp_path)
    pair, own = authority.sign("picker"), authority.sign("proxy")
    tls = {"certificate": pair.certificate, "key": pair.key}
    if asks:
        tls["client_ca"] = authority.ca

    async def scenario() -> None:
        async with picking(tls=tls) as (picker, _, _):
            at = f"localhost:{picker.listen_at[1]}"
            async with grpc.aio.secure_channel(at, credentials(authority, own)) as channel:
                assert await serving_status(channel) == SERVING
            if asks:
                async with grpc.aio.secure_channel(at, credentials(authority)) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as failure:
                        await serving_status(channel)
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            while picker.connections:
                await asyncio.sleep(0.01)

    run(scenario(), factory=asyncio.new_event_loop)
