"""``tailrace emulate``: local servers that behave like vLLM and take the time of the cost model."""

import asyncio
import gc
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, SEED, option, section_options
from tailrace.config import Cluster, Replica
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.emulate.emulator import Emulator

_PORT = click.IntRange(0, 65_535)


@options.command("emulate")
@option(
    "--scenario", metavar="NAME", shell_complete=names.scenarios,
    help="The cluster of a shipped scenario (see `tailrace scenarios`).",
)  # fmt: skip
@option(
    "--cluster", "--config", "config", type=FILE,
    help="A cluster from a TOML file ([[cluster.replicas]]).",
)  # fmt: skip
@option(
    "--speeds", metavar="A,B,...",
    help="One replica for each of these relative speeds, e.g. 1.5,1,1,0.6.",
)  # fmt: skip
@section_options("Replicas (of every kind; --speeds for different ones)", "replica", Replica)
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option(
    "--port", type=_PORT, default=8001,
    help="Port of the first replica, the others follow; 0: any free ports.",
)  # fmt: skip
@option(
    "--time-scale", type=click.FloatRange(1e-3, 1e3), default=1.0,
    help="Real seconds per emulated second: 0.1 is ten times as fast.",
)  # fmt: skip
@option("--model", default="emulated", help="Name of the model that is served.")
@option(
    "--adapter", "adapters", multiple=True, metavar="NAME",
    help="A LoRA adapter that is served beside it; may be repeated.",
)  # fmt: skip
@option(
    "--max-model-len", "max_tokens", type=click.IntRange(2),
    help="Most tokens of prompt and answer; default: what the KV cache holds.",
)  # fmt: skip
@option("--seed", type=SEED, default=0, help="Seed of texts and of unset output lengths.")
@option(
    "--faults", is_flag=True, help="Open an admin port through which replicas can be made to fail."
)
@option("--admin-port", type=_PORT, default=0, help="Port of --faults; 0: any free port.")
@option(
    "--old-metric-names", is_flag=True,
    help="Call the KV gauge vllm:gpu_cache_usage_perc, as old servers do.",
)  # fmt: skip
@option(
    "--tokens-per-event", type=click.IntRange(1, 1000), default=1,
    help="Tokens in one event of a stream, after its first, as of a busy vLLM.",
)  # fmt: skip
@option(
    "--kv-events-port", type=_PORT,
    help="Publish KV events: the first replica here and its replays at the next port, the others "
         "behind; 0: any free ports.",
)  # fmt: skip
@option(
    "--duration", type=click.FloatRange(0), metavar="S",
    help="Stop after this many seconds; default: on Ctrl-C.",
)  # fmt: skip
@option(
    "--json", "as_json", is_flag=True, section=OUTPUT,
    help="Print the addresses as one line of JSON.",
)  # fmt: skip
def command(
    speeds: str | None, port: int, duration: float | None, as_json: bool, **given: Any
) -> None:
    """Run emulated vLLM servers until Ctrl-C."""
    console.need("httptools", "orjson", "uvloop", "xxhash", extra="serve", what="tailrace emulate")
    if given["kv_events_port"] is not None:
        console.need("zmq", "msgpack", extra="cluster", what="tailrace emulate --kv-events-port")
    cluster = options.take_scenario(given).cluster
    if speeds is not None:
        cluster = _with_speeds(cluster, speeds)
    from tailrace.emulate.emulator import Emulator
    from tailrace.emulate.metrics import LAG_S

    if port and port + cluster.size - 1 > 65_535:
        raise TailraceError(f"{cluster.size} replicas need ports up to {port + cluster.size - 1}")
    emulator = Emulator(cluster, port=port, **given)  # the other options, by the same names
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(emulator, duration, as_json))
    meters = [replica.meter for replica in emulator.replicas]
    if any(meter.is_lagging for meter in meters):
        worst_s = max(meter.worst_lag_s for meter in meters)
        click.echo(
            "note: this machine was too busy for the emulated servers: of some, one iteration in a "
            f"hundred ended more than {LAG_S * 1e3:g} ms late, and the worst {worst_s:.3f} s",
            err=True,
        )


async def _serve(emulator: "Emulator", duration_s: float | None, as_json: bool) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    async with emulator:
        gc.collect()
        gc.freeze()  # a collection of all that was imported would hold up iterations
        _announce(emulator, as_json)
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), duration_s)


def _announce(emulator: "Emulator", as_json: bool) -> None:
    """Say where the replicas are."""
    if as_json:
        import orjson

        about: dict[str, Any] = {"urls": emulator.urls, "admin_url": emulator.admin_url}
        if emulator.publishers:
            about["kv_events"] = [p.endpoint for p in emulator.publishers]
            about["kv_replay"] = [p.replay for p in emulator.publishers]
        click.echo(orjson.dumps(about).decode())
    else:
        for replica, url in zip(emulator.replicas, emulator.urls, strict=True):
            config = replica.config
            click.echo(f"replica {replica.number}  {url}  {config.device}, speed {config.speed:g}")
        if emulator.admin_url is not None:
            click.echo(f"faults     {emulator.admin_url}")
        click.echo("Ctrl-C stops them.", err=True)
    sys.stdout.flush()


def _with_speeds(cluster: Cluster, text: str) -> Cluster:
    """Return a cluster with one replica, of its first kind, for each of the speeds."""
    kind = cluster.replicas[0].model_dump(exclude={"count", "speed"})
    speeds: list[float] = []
    for part in text.split(","):
        try:
            speeds.append(float(part))
        except ValueError:
            raise TailraceError(
                f"--speeds takes numbers with commas between them, got '{text}'"
            ) from None
    from tailrace.config import parse

    return parse(Cluster, {"replicas": [{**kind, "speed": speed} for speed in speeds]})
