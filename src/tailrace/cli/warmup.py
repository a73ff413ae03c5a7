"""``tailrace warmup``: compile now what would be compiled at first use."""

import time
from importlib.util import find_spec

import click

from tailrace import compile_events
from tailrace.cli import console, options
from tailrace.cli.routers import MODULES
from tailrace.errors import TailraceError

PARTS = ("simulate", "serve")


@click.command("warmup")
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@options.json
@options.quiet
def command(parts: tuple[str, ...]) -> None:
    """Compile in advance what the first start would compile.

    Compiles what `simulate` and `serve` need, or only one of them. Compiled code is cached in the
    first writable of TAILRACE_CACHE_DIR, XDG_CACHE_HOME, ~/.cache and a folder of yours in the
    temporary folder. Run it once per machine, or when
    an image is built.
    """
    can_serve = all(find_spec(module) is not None for module in MODULES)
    if "serve" in parts and not can_serve:
        console.need(*MODULES, extra="serve", what="warmup serve")
    from tailrace import compiled

    if compiled.CACHE is None:
        raise TailraceError(f"compiled code can be kept nowhere: {compiled.NO_CACHE_REASON}")
    names: list[str] = []
    show = compile_events.watcher

    def watch(name: str | None) -> None:
        if name is not None:
            names.append(name)
        if show is not None:
            show(name)

    compile_events.watcher = watch
    started = time.monotonic()
    try:
        if "simulate" in parts or not parts:
            _simulate()
        if "serve" in parts or (not parts and can_serve):
            from tailrace.router import warmup

            with warmup.helper():
                warmup.compile_beside_helper()
    finally:
        compile_events.watcher = show
    took = time.monotonic() - started
    about = {"compiled": len(names), "took_s": round(took, 1), "folder": compiled.CACHE}
    line = f"{len(names)} functions compiled in {took:.0f} s"
    line = f"{line if names else 'everything was compiled already'}; kept in {compiled.CACHE}"
    console.show(about, lambda _: click.echo(line))


def _simulate() -> None:
    """Run every kind of policy for a moment."""
    from tailrace.config import Scenario
    from tailrace.evaluate.measure.runner import run
    from tailrace.policy.registry import SHIPPED_NAME
    from tailrace.sim.warmup import helper

    scenario = Scenario().with_workload(requests=20)
    with helper():
        for policy in ("least_outstanding", SHIPPED_NAME, "lookahead"):
            run(scenario, policy, 1.0, 0, progress=lambda _: None)
