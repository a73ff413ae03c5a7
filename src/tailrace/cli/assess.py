"""``tailrace assess``: what another policy would gain on your servers and your traffic."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, SEED, option, section_options
from tailrace.config import Replica, RouterSettings, parse
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.assess.assessment import ServerModel
    from tailrace.replay.recorded import RecordedTraffic
    from tailrace.workload.table import RequestTable

_LIVE = "Recording in front of live servers"
_SERVERS = "Servers (what you know of them; the rest is learned from the log, or assumed)"
#: Settings of a replica that the log gives, and what a simulated router would take it for.
_NOT_OURS = ("count", "device", "speed", "assumed_speed")
#: The rule of most load balancers in use.
PRESENT = "least_outstanding"


@options.command("assess")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@option(
    "--log", type=FILE, metavar="LOG_OR_TRACE",
    help="A decision log of `tailrace serve`, a file or a folder, or a trace of requests (see "
    "`tailrace workload import`), instead of recording.",
)  # fmt: skip
@option(
    "--since", metavar="DURATION",
    help="Only the requests of the decision log that arrived in the last 24h, 90m, 7d ...",
)  # fmt: skip
@option(
    "--present", metavar="NAME", shell_complete=names.policies,
    help=f"The rule you route with now. [default: the log's; without a log {PRESENT}]",
)  # fmt: skip
@option(
    "-p", "--policy", "policies", multiple=True, shell_complete=names.policies,
    help="Policy to try; may be repeated. [default: tailrace and every rule]",
)  # fmt: skip
@option(
    "--ttft-slo-s", type=click.FloatRange(1e-6), metavar="S",
    help="Target for the time to first token. [default: the requests' own, else 1]",
)  # fmt: skip
@option(
    "--tpot-slo-s", type=click.FloatRange(1e-6), metavar="S",
    help="Target for the time per output token. [default: the requests' own, else 0.05]",
)  # fmt: skip
@option(
    "--cluster", "--config", "config", type=FILE,
    help="The replicas, as `tailrace calibrate` writes them, instead of calibrating on the log. A "
    "trace without latencies needs it.",
)  # fmt: skip
@option("--same", is_flag=True, help="The replicas are equal: fit one cost model to all of them.")
@option(
    "--minutes", type=click.FloatRange(0.05, 1440), default=10.0, metavar="M", section=_LIVE,
    help="How long to record; Ctrl-C ends sooner.",
)  # fmt: skip
@option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", section=_LIVE,
        help="Where your clients connect meanwhile.")  # fmt: skip
@option(
    "--send", metavar="WORKLOAD", shell_complete=names.workloads, section=_LIVE,
    help="Send traffic of this workload or file, at --rate, instead of waiting for clients.",
)  # fmt: skip
@option("--rate", type=click.FloatRange(1e-3, 1e5), metavar="R", section=_LIVE,
        help="Requests/s of --send. [default: the workload's own]")  # fmt: skip
@section_options(_SERVERS, "replica", Replica, but=_NOT_OURS)
@option("--seed", type=SEED, default=0, help="Seed of ties, and of --send.")
@options.jobs
@option(
    "-o", "--out", "--output", "out", type=click.Path(path_type=Path), default=Path("assessment"),
    section=OUTPUT, metavar="FOLDER",
    help="Folder for the page, the figures, the calibrated cluster and the recorded decisions.",
)  # fmt: skip
@options.json
@options.quiet
def command(
    urls: tuple[str, ...],
    log: Path | None,
    since: str | None,
    present: str | None,
    policies: tuple[str, ...],
    config: Path | None,
    seed: int,
    jobs: int | None,
    out: Path,
    **settings: Any,
) -> None:
    """Show what each policy would gain on your servers and traffic.

    Records traffic through a router with your present rule (URL...), or takes a log (--log); fits
    the servers to it; replays it under every policy; then prints a paragraph and a table and writes
    FOLDER/assessment.html.

    For example: tailrace assess http://10.0.0.1:8000 http://10.0.0.2:8000 --minutes 10
    """
    if bool(urls) == (log is not None):
        raise TailraceError(
            "give the addresses of your servers, or --log with a decision log or a trace"
        )
    _check(urls, settings)
    since_s = 0.0
    if since is not None:
        if log is None:
            raise TailraceError("--since chooses from a decision log; give --log")
        since_s = time.time() - options.duration_s("--since", since)
    console.need("jinja2", extra="report", what="the page of an assessment")
    given = options.take_flags(settings)
    known = parse(Replica, {field: value for (_, field), value in given.items()})
    if out.exists() and not out.is_dir():
        raise TailraceError(f"cannot write to {out}: it is no folder")
    given_present = present
    cluster = None
    if config is not None:
        cluster = options.take_scenario({"config": config}).cluster
    from tailrace.assess import assessment as assessments
    from tailrace.evaluate.measure.runner import policy_for
    from tailrace.files import dumps, make_folder, write_text
    from tailrace.replay import recorded as logs
    from tailrace.workload import traces

    base = options.take_scenario({})
    for name in (*policies, *([present] if present else [])):
        policy_for(base, name)
    if urls:
        log = _record(urls, out / "decisions", present or PRESENT, seed, settings)
        known = _with_capacity(known, urls)
    assert log is not None
    traffic: RecordedTraffic | RequestTable
    if logs.is_recorded(log):
        traffic = logs.read(log, since=since_s)
        table = traffic.table
    else:
        if since is not None:
            raise TailraceError(f"--since needs the times of a decision log, and {log} is none")
        trace = traces.read(log)
        traces.check_arrivals(trace, log)
        traffic = table = trace.table
    aimed = assessments.with_targets(table, settings["ttft_slo_s"], settings["tpot_slo_s"])
    if isinstance(traffic, logs.RecordedTraffic):
        traffic = replace(traffic, table=aimed)
    else:
        traffic = aimed
        present = present or PRESENT
        if cluster is None:
            raise TailraceError(
                f"{log} has requests but no latencies, so it says nothing about your servers: "
                "describe them with --cluster FILE (`tailrace calibrate` writes one)"
            )
    make_folder(out)
    cluster_file = config
    if cluster is not None:
        model = assessments.ServerModel(cluster)
    else:
        assert isinstance(traffic, logs.RecordedTraffic)
        cluster_file = out / "cluster.toml"
        model = _fit(traffic, known, settings["same"], cluster_file)
    chosen = list(policies) or assessments.candidates(model.cluster)
    with console.progress("replaying", len(chosen)) as update:
        found = assessments.assess(
            traffic, model, chosen, present=present, router=RouterSettings(), seed=seed, jobs=jobs,
            progress=update,
        )  # fmt: skip
    backends = urls
    if not backends and isinstance(traffic, logs.RecordedTraffic):
        backends = tuple(f"http://{name}" for name in traffic.backends if name)
    line = shlex.join(assessments.switch_command(found, backends, cluster_file))
    from tailrace.report.assessment import render_assessment
    from tailrace.terminal.assessments import as_json, print_assessment

    page = out / "assessment.html"
    data = as_json(found, line, page)
    write_text(out / "assessment.json", dumps(data) + "\n")
    again = _again(log, since, given_present, policies, config, known, seed, out, settings)
    write_text(page, render_assessment(found, line, shlex.join(again)))
    console.show(data, lambda screen: print_assessment(screen, found, line, page))


def _again(
    log: Path,
    since: str | None,
    present: str | None,
    policies: tuple[str, ...],
    cluster: Path | None,
    known: Replica,
    seed: int,
    out: Path,
    settings: dict[str, Any],
) -> list[str]:
    """Return the words of the command that assesses the same log in the same way."""
    words = ["tailrace", "assess", "--log", str(log)]
    for flag, value in (
        ("--since", since),
        ("--present", present),
        *(("-p", policy) for policy in policies),
        ("--ttft-slo-s", settings["ttft_slo_s"]),
        ("--tpot-slo-s", settings["tpot_slo_s"]),
        ("--cluster", cluster),
    ):
        if value is not None:
            words += [flag, str(value)]
    words += ["--same"] * settings["same"] + (["--seed", str(seed)] if seed else [])
    for name, value in known.model_dump(exclude_unset=True).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return [*words, "-o", str(out)]


def _check(urls: tuple[str, ...], settings: dict[str, Any]) -> None:
    """Refuse what does not go together, before anything is started."""
    if settings["rate"] is not None and settings["send"] is None:
        raise TailraceError("--rate is the pace of --send; without it your clients set the pace")
    if not urls and settings["send"] is not None:
        raise TailraceError("--send needs the addresses of servers")
    if len(set(urls)) != len(urls):
        raise TailraceError("an address is given twice; name each server once")
    if not urls:
        return
    from tailrace.router.settings import BackendSettings, address

    for url in urls:
        parse(BackendSettings, {"url": url})
    try:
        address(settings["listen"])
    except ValueError as error:
        raise TailraceError(f"--listen {error}") from None


def _fit(
    traffic: "RecordedTraffic", known: Replica, same: bool, cluster_file: Path
) -> "ServerModel":
    """Fit the servers to a log and write them to a file."""
    from tailrace.assess.assessment import calibrate
    from tailrace.calibrate.clusterfile import write_cluster

    with console.progress("calibrating", 100) as update:
        calibration, model = calibrate(traffic, known, same=same, progress=update)
    write_cluster(calibration, cluster_file)
    return model


def _with_capacity(known: Replica, urls: tuple[str, ...]) -> Replica:
    """Add the size of the KV cache that the servers report, unless it is given."""
    from tailrace.calibrate.live import reported_capacity

    reported = reported_capacity(urls)
    missing = {n: v for n, v in reported.items() if n not in known.model_fields_set}
    return parse(Replica, known.model_dump(exclude_unset=True) | missing)


def _record(
    urls: tuple[str, ...], folder: Path, present: str, seed: int, settings: dict[str, Any]
) -> Path:
    """Route with the present rule for a while; returns the folder of its decision log."""
    from tailrace.cli.routers import MODULES
    from tailrace.workload import decision_log

    console.need(*MODULES, extra="serve", what="tailrace assess URL")
    if decision_log.files(folder):
        raise TailraceError(
            f"{folder} has a recording already: assess it with --log {folder}, or name another "
            "folder with -o"
        )
    from tailrace.assess.live import is_reachable, router

    table = _table_of(settings, seed)
    if not any(map(is_reachable, urls)):
        raise TailraceError(
            "none of the servers can be reached; start them, or correct their addresses"
        )
    with router(urls, folder, "-p", present, listen=settings["listen"], say=lambda _: None) as live:
        if table is not None:
            from tailrace.bench.load import run_load
            from tailrace.cli.bench import headers_of, raise_file_limit

            raise_file_limit()
            with console.progress("sending", len(table)) as update:
                run_load(
                    live.url, table, api="chat", salt=time.time_ns() % 10**9,
                    headers=headers_of(()), progress=update,
                )  # fmt: skip
        else:
            _wait(60 * settings["minutes"], live.url)
        live.wait_until_idle()
    if not decision_log.files(folder):
        raise TailraceError(
            "no request came through the router; point your clients at it, or let Tailrace send "
            "some: --send chat --rate 2"
        )
    return folder


def _wait(seconds: float, url: str) -> None:
    """Wait while clients use the router."""
    if not console.is_quiet():
        click.echo(
            f"Point your clients at {url}/v1 for the next {seconds / 60:g} minutes; Ctrl-C ends "
            "sooner and goes on with what was recorded.",
            err=True,
        )
    end = time.monotonic() + seconds
    try:
        with console.progress("recording (s)", round(seconds)) as update:
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(1.0, left))
                update(round(seconds - max(0.0, end - time.monotonic())))
    except KeyboardInterrupt:
        click.echo("stopped recording", err=True)


def _table_of(settings: dict[str, Any], seed: int) -> "RequestTable | None":
    """Return the requests of --send: as many as come in --minutes."""
    name = settings["send"]
    if name is None:
        return None
    from tailrace.scenario import is_request_file
    from tailrace.workload import library

    rate = settings["rate"]
    if rate is None and not is_request_file(name):
        rate = library.describe(name).default_rate_rps
    seconds = 60 * settings["minutes"]
    wanted: dict[str, Any] = {"name": name, "load": None, "rate": rate}
    if rate is not None:
        wanted["requests"] = max(1, round(seconds * rate))
    return library.from_settings(options.take_workload(name, {
        f"workload__{key}": value for key, value in wanted.items() if key != "name"
    }), rate, seed)  # fmt: skip
