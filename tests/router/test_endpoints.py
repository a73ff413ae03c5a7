"""The tables of endpoints: each one answers, is merged over workers, and is documented."""

import asyncio
from pathlib import Path

from router.conftest import Answer, Client, World, post, reply, run, world
from tailrace.router.admin import JSON, OWN_PATHS
from tailrace.router.intake.routes import INFERENCE, OWN
from tailrace.router.workers import aggregate

DOCS = Path(__file__).parents[2] / "docs"


async def ask_admin(w: World, path: str) -> Answer:
    assert w.router.admin_at is not None
    client = Client(*await asyncio.open_connection(*w.router.admin_at))
    w.opened.append(client)
    client.send(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    return await client.answer()


def test_the_router_answers_its_own_endpoints_and_no_backend_does() -> None:
    async def test() -> None:
        async with world(1) as w:
            w.backends[0].default = reply(b'{"object":"list","data":[]}')
            for route in OWN:
                for method in route.methods:
                    path = route.path.replace("/*", "").encode()
                    answer = await w.ask(method + b" " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert answer.status == 200, path
                    assert bool(answer.body) == (method != b"HEAD"), path
            assert not [s for s in w.backends[0].seen if s.line.startswith("GET /health")]
            w.backends[0].default = reply(b"{}")
            assert (await w.ask(post())).status == 200

    run(test(), limit_s=300)  # it may have to compile


def test_every_admin_page_answers_and_is_merged_over_workers() -> None:
    async def test() -> None:
        async with world(1) as w:
            for method, path in w.router.admin.routes:
                if method != "GET":
                    continue
                answer = await ask_admin(w, path)
                assert answer.status == 200, path
                # Without an entry in MERGED, several workers would show only one of them.
                if answer.headers["content-type"] == JSON.decode() and path not in OWN_PATHS:
                    assert path in aggregate.MERGED, path
            assert set(aggregate.MERGED) <= {path for _, path in w.router.admin.routes}

    run(test(), limit_s=300)  # it may have to compile


def test_every_endpoint_is_documented() -> None:
    async def test() -> None:
        async with world(1) as w:
            text = (DOCS / "router.md").read_text()
            for route in (*OWN, *INFERENCE):
                assert f"`{route.path}`" in text, route.path
            text = (DOCS / "observability.md").read_text()
            for method, path in w.router.admin.routes:
                assert f"`{path}`" in text or f"`{method} {path}`" in text, path

    run(test(), limit_s=300)  # it may have to compile
