"""``tailrace picktest``: does a picker keep to the protocol?"""

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from tailrace.cli import console, options
from tailrace.cli.options import OUTPUT, option
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.picker.conformance import CheckResult


@options.command("picktest")
@click.argument("address", metavar="HOST:PORT")
@option("--model", required=True, help="A model that its endpoints serve.")
@option(
    "--streams", type=click.IntRange(1, 100_000), default=1000,
    help="Requests at once of the check of many.",
)  # fmt: skip
@option("--tls", is_flag=True, help="The picker has TLS; its certificate is not checked.")
@option(
    "--health", metavar="HOST:PORT",
    help="Where its health service is, if elsewhere (without TLS).",
)  # fmt: skip
@option("--timeout", type=click.FloatRange(0.1), default=30.0, help="Time limit of a check, s.")
@option("--json", "as_json", is_flag=True, section=OUTPUT, help="Print the results as JSON.")
def command(
    address: str,
    model: str,
    streams: int,
    tls: bool,
    health: str | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Check that an endpoint picker keeps to the protocol.

    For any picker of the Gateway API Inference Extension (Envoy ext_proc over gRPC), not only
    `tailrace pick`. Plays the proxy and sends nothing to the endpoints. Ends with 1 if a
    check fails.

    Example: tailrace picktest 127.0.0.1:9002 --model llama-3-8b
    """
    console.need("grpc", "envoy", "orjson", extra="cluster", what="picktest")
    from tailrace.picker.conformance import FAILED, check_picker
    from tailrace.router.settings import address as split

    for given in filter(None, (address, health)):
        try:
            split(given)
        except ValueError as error:
            raise TailraceError(str(error)) from None

    def show(result: "CheckResult") -> None:
        if not as_json:
            why = f": {result.why}" if result.why else ""
            click.echo(f"{result.outcome}  {result.requirement}{why}")

    checking = check_picker(
        address,
        model=model,
        streams=streams,
        limit_s=timeout,
        done=show,
        tls=tls,
        health=health or "",
    )
    found = asyncio.run(checking)
    failed = sum(result.outcome == FAILED for result in found)
    if as_json:
        click.echo(json.dumps([asdict(result) for result in found]))
    else:
        click.echo(f"{len(found) - failed} of {len(found)} checks did not fail")
    return 1 if failed else 0
