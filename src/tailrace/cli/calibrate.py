"""``tailrace calibrate``: cost model and capacity of replicas, measured or from logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, options
from tailrace.cli.fit import profile_options
from tailrace.cli.options import FILE, OUTPUT, PLOT, FileType, option, section_options
from tailrace.config import Replica, parse
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.calibrate.result import Calibration

_LIVE = "Measuring live servers"
_PROFILES = "Profiles in Vidur's layout, instead of servers"
_SERVERS = "Servers (what you know of them; the rest is measured, or assumed and said to be)"


@options.command("calibrate")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@option(
    "--log", type=FILE,
    help="Learn from a decision log of `tailrace serve`, or from a recording of one server's times "
    "(JSON lines; docs/calibration.md), a file or a folder, instead of measuring.",
)  # fmt: skip
@option("--same", is_flag=True, help="The replicas are equal: fit one cost model to all of them.")
@option(
    "--budget", type=click.FloatRange(1, 86_400), default=240.0, metavar="S", section=_LIVE,
    help="Most seconds of measuring per replica.",
)  # fmt: skip
@option(
    "--precision", type=click.FloatRange(0, 1), default=0.005, metavar="SHARE", section=_LIVE,
    help="Stop sooner if no coefficient's standard error is larger than this share of it.",
)  # fmt: skip
@option(
    "--together", is_flag=True, section=_LIVE,
    help="Measure all replicas at once, for servers that share a machine.",
)  # fmt: skip
@option(
    "--max-prompt", type=click.IntRange(128, 2**20), default=8192, metavar="N", section=_LIVE,
    help="Longest prompt to measure, tokens.",
)  # fmt: skip
@option(
    "--max-batch", type=click.IntRange(1, 4096), default=256, metavar="N", section=_LIVE,
    help="Most requests to send at once.",
)  # fmt: skip
@option("--model", section=_LIVE, help="Model to ask for; default: the first it has.")
@option(
    "-H", "--header", "header_lines", multiple=True, metavar="NAME:VALUE", section=_LIVE,
    help="Header to send; may be repeated. OPENAI_API_KEY is sent as bearer token if it is set.",
)  # fmt: skip
@profile_options(_PROFILES, required=False)
@section_options(_SERVERS, "replica", Replica, but=("count", "device", "speed"))
@option(
    "-o", "--out", "--output", "out", type=FileType(".toml"), section=OUTPUT,
    help="Write the cluster as a TOML file for --config and --cluster.",
)  # fmt: skip
@option(
    "--plot", type=PLOT, section=OUTPUT,
    help="Draw fitted against measured times; FILE ends in .png, .svg or .pdf.",
)  # fmt: skip
@options.json
@options.quiet
def command(
    urls: tuple[str, ...],
    log: Path | None,
    out: Path | None,
    plot: Path | None,
    **settings: Any,
) -> None:
    """Fit the cost model to live servers, a log or profiles.

    Live servers must be idle otherwise: they are sent prompts of many lengths, alone and in
    batches.

    For example: tailrace calibrate http://127.0.0.1:8001 http://127.0.0.1:8002 -o cluster.toml
    """
    from tailrace.terminal.calibrations import plot_calibration, print_calibration

    profiled = settings["mlp"] is not None
    if bool(urls) + (log is not None) + profiled != 1:
        raise TailraceError(
            "give the addresses of live servers, or --log with a decision log, or --mlp, "
            "--attention and --layers with profiles"
        )
    if plot is not None and profiled:
        raise TailraceError("--plot shows measured times, of which profiles have none")
    given = options.take_flags(settings)
    known = parse(Replica, {field: value for (_, field), value in given.items()})
    if log is not None:
        calibration = _from_log(log, known, same=settings["same"])
    elif profiled:
        calibration = _from_profiles(known, settings)
    else:
        calibration = _from_servers(urls, known, settings)
    if out is not None:
        from tailrace.calibrate.clusterfile import write_cluster

        write_cluster(calibration, out)
    if plot is not None:
        plot_calibration(calibration, plot)
    console.show(calibration, lambda screen: print_calibration(screen, calibration, out))


def _from_log(log: Path, known: Replica, *, same: bool) -> "Calibration":
    from tailrace.calibrate.logs import calibrate_log
    from tailrace.replay.recorded import read

    recorded = read(log)
    with console.progress("fitting", 100) as update:
        return calibrate_log(recorded, known, same=same, progress=update)


def _from_profiles(known: Replica, settings: dict[str, Any]) -> "Calibration":
    from tailrace.calibrate.profiles import calibrate_profiles

    if settings["attention"] is None or settings["layers"] is None:
        raise TailraceError("profiles need --mlp, --attention and --layers")
    names = ("mlp", "attention", "layers", "tensor_parallel", "all_reduce_csv")
    return calibrate_profiles(known, **{name: settings[name] for name in names})


def _from_servers(urls: tuple[str, ...], known: Replica, settings: dict[str, Any]) -> "Calibration":
    console.need("httptools", "orjson", extra="serve", what="tailrace calibrate")
    from tailrace.calibrate.live import CalibrationOptions, calibrate_urls
    from tailrace.cli.bench import headers_of, raise_file_limit

    names = ("precision", "max_prompt", "max_batch", "together", "same", "model")
    chosen = CalibrationOptions(
        seconds=settings["budget"], known=known, **{name: settings[name] for name in names}
    )
    raise_file_limit()
    headers = headers_of(settings["header_lines"])
    with console.progress("measuring", 100) as update:
        return calibrate_urls(urls, chosen, headers=headers, progress=update)
