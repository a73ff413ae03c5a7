"""The autopilot at the admin listener of a router: tokens, TLS, and no proxies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from router.conftest import Backend, Client, quiet_settings, run, serving
from tailrace.autopilot.admin_client import AdminAccess, AdminClient
from tailrace.errors import TailraceError
from tailrace.net.tls import TlsFiles
from tailrace.router.app import Router


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def router_with(**admin: Any) -> AsyncIterator[str]:
    """A router; returns host and port of its admin listener."""
    backend, opened = Backend(), list[Client]()
    await backend.start()
    settings = quiet_settings(
        [{"url": backend.url}], admin={"listen": "127.0.0.1:0", **admin}, routing={}
    )
    router = Router(settings)
    try:
        async with serving(router, opened):
            assert router.admin_at is not None
            yield "{}:{}".format(*router.admin_at)
    finally:
        await backend.kill()


def test_with_a_token_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_TOKEN", "sesame")
    # A proxy would see the token. There is none at this address, so it must not be asked.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def scenario() -> None:
        async with router_with(token_env="ADMIN_TOKEN") as at:
            knows = AdminClient(AdminAccess(f"http://{at}", "ADMIN_TOKEN"))
            roles = await asyncio.to_thread(knows.get, "/routing")
            assert roles["given_by"] == "settings"
            given = {"canary": "random", "canary_share": 0.2}
            roles = await asyncio.to_thread(knows.post, "/autopilot/routing", given)
            assert (roles["canary"], roles["given_by"]) == ("random", "autopilot")
            roles = await asyncio.to_thread(knows.post, "/routing", given)
            assert roles["given_by"] == "admin"
            stranger = AdminClient(AdminAccess(f"http://{at}"))
            for path in ("/autopilot/veto", "/autopilot/resume", "/autopilot/routing"):
                with pytest.raises(TailraceError, match=f"refuses {path}"):
                    await asyncio.to_thread(stranger.post, path, {})
            assert (await asyncio.to_thread(knows.get, "/routing"))["canary"] == "random"

    run(scenario())


@pytest.mark.parametrize("asks", [False, True])
def test_with_tls(authority: Authority, asks: bool) -> None:
    # A certificate for the name of a service, not for the address that the autopilot uses.
    pair = authority.sign("service", names="DNS:router.example")
    own = authority.sign("autopilot")
    other = authority.sign("other", names="DNS:router.example")
    tls: dict[str, Any] = {"certificate": pair.certificate, "key": pair.key}
    if asks:
        tls["client_ca"] = authority.ca

    async def scenario() -> None:
        async with router_with(tls=tls) as at:
            shown = (own.certificate, own.key) if asks else (None, None)
            client = AdminClient(
                AdminAccess(f"https://{at}", tls=TlsFiles(*shown, pair.certificate))
            )
            roles = await asyncio.to_thread(client.get, "/routing")
            assert roles["given_by"] == "settings"
            # Another certificate of the same authority is not the router's.
            wrong = AdminAccess(f"https://{at}", tls=TlsFiles(*shown, other.certificate))
            with pytest.raises(TailraceError, match="certificate is not accepted"):
                await asyncio.to_thread(AdminClient(wrong).get, "/routing")
            if asks:
                plain = AdminAccess(f"https://{at}", tls=TlsFiles(None, None, pair.certificate))
                with pytest.raises(TailraceError, match="does not answer"):
                    await asyncio.to_thread(AdminClient(plain).get, "/routing")

    run(scenario())


def test_a_router_that_is_gone_is_said() -> None:
    with pytest.raises(TailraceError, match="the router does not answer"):
        AdminClient(AdminAccess("http://127.0.0.1:9")).get("/routing")


def test_unreadable_certificates_are_said(tmp_path: Path) -> None:
    access = AdminAccess("https://127.0.0.1:9", tls=TlsFiles(ca=tmp_path / "gone.pem"))
    with pytest.raises(TailraceError, match="cannot read the authorities"):
        AdminClient(access).get("/routing")
