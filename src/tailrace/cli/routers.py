"""What the commands that route live traffic share: their options, and how they run."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import names
from tailrace.cli.options import FILE, OUTPUT, F, all_of, assignment, option
from tailrace.errors import TailraceError
from tailrace.router.settings import address, is_loopback

if TYPE_CHECKING:
    from tailrace.router.core import RouterCore
    from tailrace.router.proxy.backends import Backend
    from tailrace.router.serve_settings import ServeSettings

#: What the extra ``serve`` brings.
MODULES = ("httptools", "orjson", "prometheus_client", "uvloop", "xxhash")


def router_options(who: str, listen: str) -> Callable[[F], F]:
    """Return the options of a router; ``who`` connects to it, by default at ``listen``."""
    return all_of(
        option(
            "-b", "--backend", "backends", multiple=True, metavar="URL",
            help="A server, e.g. http://10.0.0.1:8000; may be repeated. "
            "Takes the place of [[backends]].",
        ),
        option(
            "--config", type=FILE,
            help="Settings from a TOML file; options win over it. SIGHUP reads it again.",
        ),
        option(
            "-p", "--policy", metavar="NAME", shell_complete=names.policies,
            help="Who chooses: a name (see `tailrace policies`), a .tailrace or a .py file. "
            "[default: tailrace]",
        ),
        option(
            "--listen", metavar="HOST:PORT", help=f"Where {who} connect. [default: {listen}]"
        ),
        option(
            "--admin", metavar="HOST:PORT",
            help="Where /metrics, /status, /backends and /reload are; off: nowhere. "
            "[default: 127.0.0.1:8081]",
        ),
        option(
            "--processes", type=click.IntRange(1, 64), metavar="N",
            help="Router processes that share the port, for more requests per second. "
            "[default: 1]",
        ),
        option(
            "--autopilot", type=click.Choice(["off", "suggest", "act"]),
            help="Find the best policy for the present traffic, and say so (suggest) or put it in "
            "charge once it has proven better (act). Needs decisions.folder. [default: off]",
        ),
        option(
            "--cluster", type=FILE,
            help="What kind of servers they are, in the order of --backend "
            "(see `tailrace calibrate`).",
        ),
        option(
            "--max-in-flight", type=click.IntRange(1), metavar="N",
            help="Most requests per replica at once; the others wait, most urgent first. "
            "[default: no limit]",
        ),
        option(
            "--set", "assignments", metavar="KEY=VALUE", multiple=True,
            help="Any setting by its path, e.g. limits.first_byte_s=60; may be repeated.",
        ),
        option(
            "--log-level", type=click.Choice(["debug", "info", "warning", "error"]),
            section=OUTPUT,
            help="What is logged, as lines of JSON on standard error. [default: info]",
        ),
        option("--log-requests", is_flag=True, section=OUTPUT, help="Log every request."),
        option(
            "--check", is_flag=True, section=OUTPUT,
            help="Check the settings and ask the backends, then end: 0 all answer, 1 some do not.",
        ),
    )  # fmt: skip


def run(
    make: "type[RouterCore]", config: Path | None, check: bool, given: dict[str, Any],
    *, listen: str | None = None, scheme: str = "http", path: str = "/v1",
) -> int:  # fmt: skip
    """Run a router with what its options gave; return the exit code.

    ``listen``: where it listens if neither a file nor an option says it; None: as the settings do.
    ``scheme`` and ``path``: of the address that is printed.
    """
    from tailrace.config import load_toml
    from tailrace.router import warmup
    from tailrace.router.observe import logs
    from tailrace.router.serve_settings import load

    assignments = [assignment(text) for text in given["assignments"]]
    overrides = given_settings(given)
    stated = load_toml(config) if config is not None else {}
    if listen is not None and "listen" not in overrides and "listen" not in stated:
        overrides["listen"] = listen

    def read() -> "ServeSettings":
        return load(config, overrides, assignments)

    settings = read()
    # A check only says what it found.
    logs.to_stderr("error" if check else settings.log.level)
    with warmup.helper() as reap:
        reload = read if config is not None else None
        return _serve(make, settings, reload, check, reap, (scheme, path))


def _serve(
    make: "type[RouterCore]",
    settings: "ServeSettings",
    read: "Callable[[], ServeSettings] | None",
    check: bool,
    reap: Callable[[], int | None],
    shown: tuple[str, str],
) -> int:
    """Serve; ``reap`` returns None as long as a helper process runs, and collects it after."""
    import uvloop

    from tailrace.router.autopilot_process import AutopilotProcess

    autopilot = AutopilotProcess(settings)

    def idle() -> None:
        reap()
        autopilot.watch()

    if settings.processes > 1 and not check:
        from tailrace.router.workers.worker import serve_several

        def started_several(at: "ServeSettings") -> None:
            _announce_several(at, shown)
            autopilot.start(None if at.admin.listen == "off" else address(at.admin.listen))

        try:
            return serve_several(settings, read, started_several, _warn, idle, make=make)
        finally:
            autopilot.stop()
    router = make(settings, load=read)

    def started() -> None:
        _announce(router, shown)
        autopilot.start(router.admin_at)

    async def look_after_helpers() -> None:
        while True:
            idle()
            await asyncio.sleep(1.0)

    async def main() -> int:
        looking = asyncio.create_task(look_after_helpers())
        try:
            failing = await router.probe()
            for backend, why in failing:
                _warn(backend.settings.url, why)
            if not check:
                return await router.run(started)
            size = len(router.backends.present)
            click.echo(f"{size - len(failing)} of {size} backends answer")
            await _check_priorities(router, {backend for backend, _ in failing})
            return 1 if failing else 0
        finally:
            looking.cancel()
            autopilot.stop()
            await router.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _check_priorities(router: "RouterCore", failing: "set[Backend]") -> None:
    """Say which backends take priorities, if the policy orders requests.

    A policy's own order concerns only the backends that are said to serve by priority.
    """
    from tailrace.policy.base import asked_order, order_of
    from tailrace.router.proxy.priority_probe import accepts_priorities

    policy = router.backends.chooser.policy
    if order_of(policy) is None:
        return
    for backend in router.backends.present:
        if backend in failing or (asked_order(policy) is None and not backend.takes_priorities):
            continue
        accepted, why = await accepts_priorities(backend)
        name, told = backend.label, backend.takes_priorities
        if told and not accepted:
            text = f"does not accept priorities ({why}); set its scheduling_policy to fcfs"
        elif told:
            text = "accepts priorities and is sent them"
        elif accepted:
            text = (
                "accepts priorities but is sent none: start it with --scheduling-policy priority "
                'and set scheduling_policy = "priority" in its [backends.server]'
            )
        else:
            text = f"accepts no priorities ({why}) and is sent none"
        click.echo(f"backend {name} {text}")


def _warn(url: str, why: str) -> None:
    click.echo(f"warning: backend {url} does not answer: {why}", err=True)


def _announce(router: "RouterCore", shown: tuple[str, str]) -> None:
    policy, size = router.backends.chooser.policy.name, len(router.backends.present)
    _say_where(size, policy, router.listen_at, router.admin_at, shown, router.settings)


def _announce_several(settings: "ServeSettings", shown: tuple[str, str]) -> None:
    admin = settings.admin.listen
    _say_where(
        len(settings.backends),
        f"{settings.routing.policy} in {settings.processes} processes",
        address(settings.listen),
        address(admin) if admin != "off" else None,
        shown,
        settings,
    )


def _say_where(
    size: int, policy: str, listen: tuple[str, int], admin: tuple[str, int] | None,
    shown: tuple[str, str], settings: "ServeSettings",
) -> None:  # fmt: skip
    found = " and those that are found" * settings.discovery.is_used
    click.echo(f"routing to {size} backend{'s' * (size != 1)}{found} with policy {policy}")
    for what, where in (("listening on", listen), ("status page on", admin)):
        if where is not None:
            host, port = where
            host = f"[{host}]" if ":" in host else host
            scheme, path = shown if where is listen else ("http", "/")
            tls = settings.tls if where is listen else settings.admin.tls
            secure = "s" * (tls.certificate is not None)
            click.echo(f"{what} {scheme}{secure}://{host}:{port}{path}")
    if not is_loopback(listen[0]):
        click.echo("note: other machines can reach this router", err=True)
    sys.stdout.flush()


def given_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that options gave."""
    data: dict[str, Any] = {}
    if given["backends"]:
        data["backends"] = [{"url": url} for url in given["backends"]]
    if given["cluster"] is not None:
        _describe(data, given["cluster"])
    if given["policy"]:
        data["routing"] = {"policy": given["policy"]}
    if given["listen"]:
        data["listen"] = given["listen"]
    if given["admin"]:
        data["admin"] = {"listen": given["admin"]}
    if given.get("processes"):
        data["processes"] = given["processes"]
    if given.get("autopilot"):
        data["autopilot"] = {"mode": given["autopilot"]}
    if given["max_in_flight"]:
        data["admission"] = {"max_in_flight": given["max_in_flight"]}
    if given["log_level"]:
        data.setdefault("log", {})["level"] = given["log_level"]
    if given["log_requests"]:
        data.setdefault("log", {})["requests"] = True
    return data


def _describe(data: dict[str, Any], path: Path) -> None:
    """Say what kind of server each backend is, from the cluster of a file."""
    from tailrace import scenario as scenarios

    servers = scenarios.load(path).cluster.expanded()
    backends = data.get("backends", [])
    if len(servers) != len(backends):
        raise TailraceError(
            f"--cluster {path} describes {len(servers)} replicas, but {len(backends)} are given "
            "with --backend; they must be as many, in the same order"
        )
    for backend, server in zip(backends, servers, strict=True):
        backend["server"] = server.model_dump(exclude_unset=True)
