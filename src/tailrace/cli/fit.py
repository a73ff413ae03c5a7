"""``tailrace fit``: a cost model from profiles of a device and model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, options
from tailrace.cli.options import FILE, GENERAL, OUTPUT, F, FileType, option

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.calibrate.iteration_fit import FitResult
    from tailrace.config import CostModel


def profile_options(section: str, *, required: bool) -> Callable[[F], F]:
    """Add the options that name profiles in Vidur's layout, and the model they are of."""
    where: dict[str, Any] = {"type": FILE, "section": section}
    return options.all_of(
        option("--mlp", required=required, help="Vidur's mlp.csv (or .xz).", **where),
        option("--attention", required=required, help="Vidur's attention.csv (or .xz).", **where),
        option(
            "--layers", type=click.IntRange(1, 10_000), required=required, section=section,
            help="Layers of the model.",
        ),
        option(
            "--tensor-parallel", type=click.IntRange(1, 64), default=1, section=section,
            help="Devices the model is split over.",
        ),
        option(
            "--all-reduce", "all_reduce_csv", **where,
            help="Vidur's all_reduce.csv (or .xz); needed if the model is split.",
        ),
    )  # fmt: skip


@options.command("fit")
@profile_options(GENERAL, required=True)
@option(
    "--max-tokens", type=click.IntRange(1, 2**20), default=4096,
    help="Leave out batches of more tokens.",
)  # fmt: skip
@option(
    "--block-size", type=click.IntRange(1, 4096), default=16,
    help="Take the profile of this KV block size.",
)  # fmt: skip
@option(
    "-o", "--out", "--output", "out", type=FileType(".toml"), section=OUTPUT,
    help="Write the cost model as a TOML file for --config.",
)  # fmt: skip
@options.json
def command(out: Path | None, **given: Any) -> None:
    """Fit the cost model to profiling tables in Vidur's layout."""
    from tailrace.calibrate.iteration_fit import fit_profiles
    from tailrace.files import write_text

    fitted = fit_profiles(given.pop("mlp"), given.pop("attention"), **given)
    if out is not None:
        write_text(out, cost_toml(fitted.model))
    console.show(fitted, lambda screen: _print(screen, fitted))


def cost_toml(model: "CostModel") -> str:
    """Return a cluster of one such replica as TOML; change its count, speed and so on to taste."""
    knots = ", ".join(f"[{tokens!r}, {ms!r}]" for tokens, ms in model.knots)
    fields = ("base_ms", "per_token_ms", "per_context_ms", "per_prefill_ms")
    lines = [f"{field} = {getattr(model, field)!r}" for field in fields]
    head = ["[[cluster.replicas]]", "count = 1", "", "[cluster.replicas.cost]"]
    return "\n".join([*head, *lines, f"knots = [{knots}]", ""])


def _print(screen: "Console", fitted: "FitResult") -> None:
    from tailrace.terminal.listings import print_listing

    rows = [
        (regime, str(e.count), f"{100 * e.mean:.1f} %", f"{100 * e.max:.1f} %")
        for regime, e in fitted.errors.items()
    ]
    headings = ("iterations", "count", "mean error", "largest error")
    print_listing(screen, headings, rows)
    if fitted.undetermined:
        click.echo(f"The profiles say nothing about {', '.join(fitted.undetermined)}.")
    click.echo(f"\n{cost_toml(fitted.model)}", nl=False)
