"""``tailrace serve``: the live router in front of servers that speak OpenAI's API."""

from pathlib import Path
from typing import Any

from tailrace.cli import console, options, routers


@options.command("serve")
@routers.router_options("clients", "127.0.0.1:8080")
def command(config: Path | None, check: bool, **given: Any) -> int:
    """Route OpenAI requests to the best of several servers.

    Point clients at http://HOST:PORT/v1. Answers carry X-Tailrace-Replica, -Policy and -Reason.
    SIGTERM lets requests in flight finish, then ends the router; SIGHUP reads --config again.

    Example: tailrace serve -b http://127.0.0.1:8000 -b http://127.0.0.1:8001
    """
    console.need(*routers.MODULES, extra="serve", what="serve")
    from tailrace.router.app import Router

    return routers.run(Router, config, check, given)
