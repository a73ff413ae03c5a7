"""``tailrace fit``: a cost model from profiles of a device and model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tailrace.cli import console
from tailrace.cli.options import OUTPUT, SectionedCommand, SectionOption, json_option

if TYPE_CHECKING:
    from tailrace.calibrate.iteration_fit import FitResult
    from tailrace.config import CostModel

_FILE = click.Path(path_type=Path)


@click.command("fit", cls=SectionedCommand)
@click.option("--mlp", type=_FILE, required=True, metavar="FILE", help="Vidur's mlp.csv (or .xz).")
@click.option(
    "--attention", type=_FILE, required=True, metavar="FILE", help="Vidur's attention.csv (or .xz)."
)
@click.option(
    "--layers", type=click.IntRange(1, 10_000), required=True, help="Layers of the model."
)
@click.option(
    "--tensor-parallel", type=click.IntRange(1, 64), default=1, show_default=True,
    help="Devices the model is split over.",
)  # fmt: skip
@click.option(
    "--all-reduce", type=_FILE, metavar="FILE",
    help="Vidur's all_reduce.csv (or .xz); needed if the model is split.",
)  # fmt: skip
@click.option(
    "--max-tokens", type=click.IntRange(1, 2**20), default=4096, show_default=True,
    help="Leave out batches of more tokens.",
)  # fmt: skip
@click.option(
    "--block-size", type=click.IntRange(1, 4096), default=16, show_default=True,
    help="Take the profile of this KV block size.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=_FILE, metavar="FILE", cls=SectionOption, section=OUTPUT,
    help="Write the cost model as a TOML file for --config.",
)  # fmt: skip
@json_option
def command(
    mlp: Path,
    attention: Path,
    layers: int,
    tensor_parallel: int,
    all_reduce: Path | None,
    max_tokens: int,
    block_size: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Fit the cost model to profiling tables in Vidur's layout, and print its error."""
    from tailrace.calibrate.iteration_fit import fit_profiles
    from tailrace.files import atomic_path, check_target

    if out is not None:
        check_target(out, (".toml",))
    fitted = fit_profiles(
        mlp,
        attention,
        layers=layers,
        tensor_parallel=tensor_parallel,
        all_reduce_csv=all_reduce,
        max_tokens=max_tokens,
        block_size=block_size,
    )
    if out is not None:
        with atomic_path(out) as temporary:
            temporary.write_text(cost_toml(fitted.model), encoding="utf-8")
    if as_json:
        console.print_json(fitted)
        return
    _print_errors(fitted)
    click.echo(cost_toml(fitted.model), nl=False)


def cost_toml(model: "CostModel") -> str:
    """Return a cluster of one such replica as TOML; change its count, speed and so on to taste."""
    knots = ", ".join(f"[{tokens!r}, {ms!r}]" for tokens, ms in model.knots)
    fields = ("base_ms", "per_token_ms", "per_context_ms", "per_prefill_ms")
    lines = [f"{field} = {getattr(model, field)!r}" for field in fields]
    head = ["[[cluster.replicas]]", "count = 1", "", "[cluster.replicas.cost]"]
    return "\n".join([*head, *lines, f"knots = [{knots}]", ""])


def _print_errors(fitted: "FitResult") -> None:
    from tailrace.terminal.listings import print_listing

    rows = [
        (regime, str(e.count), f"{100 * e.mean:.1f} %", f"{100 * e.max:.1f} %")
        for regime, e in fitted.errors.items()
    ]
    headings = ("iterations", "count", "mean error", "largest error")
    print_listing(console.stdout(), headings, rows)
    if fitted.undetermined:
        click.echo(f"The profiles say nothing about {', '.join(fitted.undetermined)}.")
    click.echo()
