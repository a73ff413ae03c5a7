"""``tailrace pick``: the endpoint picker for a proxy such as Envoy."""

from pathlib import Path
from typing import Any

from tailrace.cli import console, options, routers

#: What the extra ``cluster`` brings, beside that of ``serve``.
MODULES = ("envoy", "hpack")
LISTEN = "127.0.0.1:9002"


@options.command("pick")
@routers.router_options("proxies", LISTEN)
def command(config: Path | None, check: bool, **given: Any) -> int:
    """Pick the best of several servers for each request of a proxy.

    Speaks the endpoint picker protocol of the Gateway API Inference Extension: Envoy's external
    processing (ext_proc) over gRPC. The settings are those of `tailrace serve`.
    docs/picker.md explains how to set up Envoy.

    Example: tailrace pick -b http://10.0.0.1:8000 -b http://10.0.0.2:8000 --listen 0.0.0.0:9002
    """
    console.need(*routers.MODULES, *MODULES, extra="cluster", what="pick")
    from tailrace.picker.app import Picker

    return routers.run(Picker, config, check, given, listen=LISTEN, scheme="grpc", path="")
