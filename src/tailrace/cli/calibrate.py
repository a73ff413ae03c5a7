"""``tailrace calibrate``: cost model and capacity of replicas, measured or from logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console
from tailrace.cli.options import (
    OUTPUT,
    SectionedCommand,
    SectionOption,
    json_option,
    quiet_option,
    section_options,
)
from tailrace.config import Replica, parse
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.calibrate.result import Calibration

_FILE = click.Path(path_type=Path)
_LIVE = "Measuring live servers"
_PROFILES = "Profiles in Vidur's layout, instead of servers"
_SERVERS = "Servers (what you know of them; the rest is measured, or assumed and said to be)"


def _server_options(function: Any) -> Any:
    return section_options(function, _SERVERS, "replica", Replica, but=("count", "device", "speed"))


@click.command("calibrate", cls=SectionedCommand)
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "--log", type=_FILE, metavar="FILE", cls=SectionOption,
    help="Learn from a decision log of `tailrace serve`, a file or a folder, instead of measuring.",
)  # fmt: skip
@click.option(
    "--same", is_flag=True, cls=SectionOption,
    help="The replicas are equal: fit one cost model to all of them.",
)  # fmt: skip
@click.option(
    "--budget", type=click.FloatRange(1, 86_400), default=240.0, show_default=True, metavar="S",
    cls=SectionOption, section=_LIVE, help="Most seconds of measuring per replica.",
)  # fmt: skip
@click.option(
    "--precision", type=click.FloatRange(0, 1), default=0.005, show_default=True, metavar="SHARE",
    cls=SectionOption, section=_LIVE,
    help="Stop sooner if no coefficient's standard error is larger than this share of it.",
)  # fmt: skip
@click.option(
    "--together", is_flag=True, cls=SectionOption, section=_LIVE,
    help="Measure all replicas at once, for servers that share a machine.",
)  # fmt: skip
@click.option(
    "--max-prompt", type=click.IntRange(128, 2**20), default=8192, show_default=True,
    metavar="N", cls=SectionOption, section=_LIVE, help="Longest prompt to measure, tokens.",
)  # fmt: skip
@click.option(
    "--max-batch", type=click.IntRange(1, 4096), default=256, show_default=True, metavar="N",
    cls=SectionOption, section=_LIVE, help="Most requests to send at once.",
)  # fmt: skip
@click.option(
    "--model", cls=SectionOption, section=_LIVE,
    help="Model to ask for; default: the first it has.",
)  # fmt: skip
@click.option(
    "-H", "--header", "header_lines", multiple=True, metavar="NAME:VALUE", cls=SectionOption,
    section=_LIVE,
    help="Header to send; may be repeated. OPENAI_API_KEY is sent as bearer token if it is set.",
)  # fmt: skip
@click.option(
    "--mlp", type=_FILE, metavar="FILE", cls=SectionOption, section=_PROFILES,
    help="Vidur's mlp.csv (or .xz).",
)  # fmt: skip
@click.option(
    "--attention", type=_FILE, metavar="FILE", cls=SectionOption, section=_PROFILES,
    help="Vidur's attention.csv (or .xz).",
)  # fmt: skip
@click.option(
    "--layers", type=click.IntRange(1, 10_000), cls=SectionOption, section=_PROFILES,
    help="Layers of the model.",
)  # fmt: skip
@click.option(
    "--tensor-parallel", type=click.IntRange(1, 64), default=1, show_default=True,
    cls=SectionOption, section=_PROFILES, help="Devices the model is split over.",
)  # fmt: skip
@click.option(
    "--all-reduce", type=_FILE, metavar="FILE", cls=SectionOption, section=_PROFILES,
    help="Vidur's all_reduce.csv (or .xz); needed if the model is split.",
)  # fmt: skip
@_server_options
@click.option(
    "-o", "--out", type=_FILE, metavar="FILE", cls=SectionOption, section=OUTPUT,
    help="Write the cluster as a TOML file for --config and --cluster.",
)  # fmt: skip
@click.option(
    "--plot", type=_FILE, metavar="FILE", cls=SectionOption, section=OUTPUT,
    help="Draw fitted against measured times; FILE ends in .png, .svg or .pdf.",
)  # fmt: skip
@json_option
@quiet_option
def command(
    urls: tuple[str, ...],
    log: Path | None,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Fit cost model and capacity of replicas to live servers, a decision log or profiles.

    Live servers must be idle otherwise: they are sent prompts of many lengths, alone and in
    batches.

    For example: tailrace calibrate http://127.0.0.1:8001 http://127.0.0.1:8002 -o cluster.toml
    """
    from tailrace.files import check_target
    from tailrace.terminal.plots import PLOT_SUFFIXES

    profiled = settings["mlp"] is not None
    if bool(urls) + (log is not None) + profiled != 1:
        raise TailraceError(
            "give the addresses of live servers, or --log with a decision log, or --mlp, "
            "--attention and --layers with profiles"
        )
    if out is not None:
        check_target(out, (".toml",))
    if plot is not None:
        check_target(plot, PLOT_SUFFIXES)
        if profiled:
            raise TailraceError("--plot shows measured times, of which profiles have none")
    given = {name.removeprefix("replica__"): value for name, value in settings.items()
             if name.startswith("replica__") and value is not None}  # fmt: skip
    known = parse(Replica, given)
    show = not (as_json or quiet)
    if log is not None:
        calibration = _from_log(log, known, same=settings["same"], show=show)
    elif profiled:
        calibration = _from_profiles(known, settings)
    else:
        calibration = _from_servers(urls, known, settings, show=show)
    if out is not None:
        from tailrace.calibrate.clusterfile import write_cluster

        write_cluster(calibration, out)
    if plot is not None:
        from tailrace.terminal.calibrations import plot_calibration

        plot_calibration(calibration, plot)
    if as_json:
        console.print_json(calibration)
        return
    from tailrace.terminal.calibrations import print_calibration

    print_calibration(console.stdout(), calibration)
    if out is not None:
        click.echo(f"written to {out}")


def _from_log(log: Path, known: Replica, *, same: bool, show: bool) -> "Calibration":
    from tailrace.calibrate.logs import calibrate_log
    from tailrace.replay.recorded import read

    recorded = read(log)
    with console.progress("fitting", 100, enabled=show) as update:
        return calibrate_log(recorded, known, same=same, progress=update)


def _from_profiles(known: Replica, settings: dict[str, Any]) -> "Calibration":
    from tailrace.calibrate.profiles import Profiles, calibrate_profiles

    if settings["attention"] is None or settings["layers"] is None:
        raise TailraceError("profiles need --mlp, --attention and --layers")
    names = ("mlp", "attention", "layers", "tensor_parallel", "all_reduce")
    return calibrate_profiles(Profiles(**{name: settings[name] for name in names}), known)


def _from_servers(
    urls: tuple[str, ...], known: Replica, settings: dict[str, Any], *, show: bool
) -> "Calibration":
    console.need("httptools", "orjson", extra="serve", what="tailrace calibrate")
    from tailrace.calibrate.live import CalibrationOptions, calibrate_urls
    from tailrace.cli.bench import headers_of, raise_file_limit

    options = CalibrationOptions(
        seconds=settings["budget"],
        precision=settings["precision"],
        max_prompt=settings["max_prompt"],
        max_batch=settings["max_batch"],
        known=known,
        together=settings["together"],
        same=settings["same"],
        model=settings["model"],
    )
    raise_file_limit()
    headers = headers_of(settings["header_lines"])
    with console.progress("measuring", 100, enabled=show) as update:
        return calibrate_urls(urls, options, headers=headers, progress=update)
