"""``tailrace tune``: constants for the rules, and the two simple learned baselines."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, names, options
from tailrace.cli.options import FILE, OUTPUT, option
from tailrace.errors import TailraceError, unknown_name

if TYPE_CHECKING:
    from tailrace.evaluate.measure.cells import Traffic
    from tailrace.evaluate.search.tune import Tuned
    from tailrace.policy.learned.policy import LearnedPolicy


@options.command("tune")
@click.argument("targets", nargs=-1, metavar="[NAME]...")
@option("--suite", default="standard", metavar="NAME", help="Scenarios to tune on.")
@option(
    "--scenario", "scenario_names", metavar="NAME", multiple=True, shell_complete=names.scenarios,
    help="Scenario instead of a suite; may be repeated.",
)  # fmt: skip
@option(
    "--seeds", "seed_count", type=click.IntRange(1, 1000), default=2, metavar="N",
    help="How many seeds; tuning seeds (predict_greedy: training).",
)  # fmt: skip
@option(
    "--requests", type=click.IntRange(10, 1_000_000), default=10_000, metavar="N",
    help="Requests of each run.",
)  # fmt: skip
@option(
    "--budget", type=click.IntRange(2, 100_000), default=64, metavar="N",
    help="Candidates tried for a rule with several constants.",
)  # fmt: skip
@option(
    "--keep-tail", is_flag=True,
    help="Take no constants that raise the P99 of the time to first token.",
)  # fmt: skip
@option(
    "--generations", type=click.IntRange(1, 100_000), default=100, metavar="N",
    help="Generations of candidates for linear_es.",
)  # fmt: skip
@option(
    "--rounds", type=click.IntRange(1, 100), default=3, metavar="N",
    help="Rounds of learning for predict_greedy.",
)  # fmt: skip
@options.jobs
@options.workers
@option(
    "-o", "--out", "--output", "output", type=FILE, section=OUTPUT,
    help="Write there: constants to a .json (rules in it that are not tuned now stay), linear_es "
    "or predict_greedy to a .tailrace. A trained policy with +order may go to a .tailrace: the "
    "policy with its own order.",
)  # fmt: skip
@option(
    "--write-shipped", is_flag=True, hidden=True,
    help="For maintainers: write to the package's own files.",
)  # fmt: skip
@options.json
@options.quiet
def command(
    targets: tuple[str, ...], output: Path | None, write_shipped: bool, **given: Any
) -> None:  # fmt: skip
    """Tune the parameters of baselines on tuning seeds.

    NAME is a rule with constants, a policy with +order (weights of its order) or +queue (limits and
    order of its queue), linear_es (a linear score over the observation, by CMA-ES) or
    predict_greedy (a supervised predictor of cost; needs tailrace[train]). Default: all rules with
    constants.
    """
    from tailrace.evaluate.search.tune import KNOBS, tunable
    from tailrace.files import check_target
    from tailrace.policy import registry, shipped
    from tailrace.policy.learned import checkpoint
    from tailrace.view.ordering import Order

    for name in targets:
        base, suffix = registry.split_order(name)
        if suffix:
            tunable(name)
            registry.get(base)
        elif name not in (*KNOBS, *shipped.LEARNING):
            raise unknown_name("name to tune", name, [*KNOBS, *shipped.LEARNING])
    learning = [name for name in targets if name in shipped.LEARNING]
    if learning and len(targets) > 1:
        raise TailraceError(f"{learning[0]} is tuned by itself; leave the other names out")
    if write_shipped:
        output = shipped.TUNED_FILE
        if learning:
            output = shipped.FOLDER / f"{learning[0]}.tailrace"
    policy = None
    if output is not None and output.suffix == ".tailrace" and not learning:
        policy = _to_be_ordered(targets)
    if output is not None:
        check_target(output, (".tailrace",) if learning or policy else (".json",))
    if learning:
        _tune_learning(learning[0], output, **given)
    else:
        kept = None if policy else output
        found = _tune_rules(targets or tuple(KNOBS), kept, **given)
        if policy is not None and output is not None:
            checkpoint.save_with_order(output, policy, Order.of(found[targets[0]].constants))
        documented = shipped.FOLDER.parents[2] / "docs" / "results" / shipped.TUNED_FILE.name
        if write_shipped and documented.parent.is_dir():
            documented.write_bytes(shipped.TUNED_FILE.read_bytes())


def _to_be_ordered(targets: Sequence[str]) -> "LearnedPolicy":
    """Return the trained policy whose order is tuned, or say that there is none."""
    from tailrace.policy import registry
    from tailrace.policy.learned.policy import LearnedPolicy

    base, suffix = registry.split_order(targets[0]) if len(targets) == 1 else ("", "")
    policy = registry.get(base) if suffix == registry.ORDER_SUFFIX else None
    if not isinstance(policy, LearnedPolicy):
        raise TailraceError(
            "a .tailrace file is for one trained policy with its order: POLICY.tailrace+order; "
            "name a .json for constants"
        )
    return policy


def _traffics(
    suite: str, scenario_names: Sequence[str], requests: int, seeds: Sequence[int]
) -> "list[Traffic]":
    from tailrace.evaluate.judge.suite import load_scenarios, load_suite, shipped_scenarios
    from tailrace.evaluate.measure.cells import Traffic
    from tailrace.saturation import resolve_rate

    found = load_scenarios(scenario_names or shipped_scenarios(load_suite(suite)), requests)
    return [Traffic(s, resolve_rate(s), seed) for s in found for seed in seeds]


def _tune_rules(
    targets: Sequence[str], output: Path | None, *, suite: str,
    scenario_names: Sequence[str], seed_count: int, requests: int, budget: int, jobs: int | None,
    keep_tail: bool, **_: Any,
) -> "dict[str, Tuned]":  # fmt: skip
    from tailrace.evaluate.judge.suite import TUNE_FROM
    from tailrace.evaluate.search.tune import TuningObjective, tune_rule
    from tailrace.evaluate.search.tuned import merge, record_of
    from tailrace.parallel import WorkerPool
    from tailrace.seeds import Purpose, seeds
    from tailrace.terminal.listings import print_listing

    numbers = seeds(Purpose.TUNING, seed_count, TUNE_FROM)
    traffics = _traffics(suite, scenario_names, requests, numbers)
    conditions = {
        "suite": "custom" if scenario_names else suite,
        "scenarios": list(dict.fromkeys(t.scenario.name for t in traffics)),
        "seeds": numbers,
        "requests": requests,
        **({"keep_tail": True} if keep_tail else {}),
    }
    found: dict[str, Tuned] = {}
    with WorkerPool(jobs) as pool, console.progress("tuning", len(targets)) as update:
        objective = TuningObjective(traffics, pool)
        for name in targets:
            found[name] = tune_rule(name, objective, budget, keep_tail=keep_tail)
            update(len(found))
            if output is not None:
                merge(output, {name: record_of(name, found[name], conditions)})
    records = {name: record_of(name, tuned, conditions) for name, tuned in found.items()}
    rows = [
        (name, f"{t.default_score:.3f}", f"{t.score:.3f}", records[name]["spec"])
        for name, t in found.items()
    ]
    headings = ("rule", "score", "tuned", "policy")
    console.show({"rules": records}, lambda screen: print_listing(screen, headings, rows))
    return found


def _tune_learning(
    name: str, output: Path | None, *, suite: str,
    scenario_names: Sequence[str], seed_count: int, requests: int, generations: int, rounds: int,
    jobs: int | None, **_: Any,
) -> None:  # fmt: skip
    from tailrace.evaluate.judge.suite import TUNE_FROM
    from tailrace.evaluate.search.tuned import save_linear, save_predictor
    from tailrace.parallel import WorkerPool
    from tailrace.policy.shipped import LINEAR
    from tailrace.seeds import Purpose, seeds

    if output is None:
        raise TailraceError(f"say with -o FILE.tailrace where to put {name}")
    purpose = Purpose.TUNING if name == LINEAR else Purpose.TRAINING
    traffics = _traffics(suite, scenario_names, requests, seeds(purpose, seed_count, TUNE_FROM))
    total = generations if name == LINEAR else rounds
    with WorkerPool(jobs) as pool, console.progress(f"tuning {name}", total) as update:
        if name == LINEAR:
            metrics = save_linear(output, traffics, pool, generations, update)
        else:
            metrics = save_predictor(output, traffics, pool, rounds, update)
    facts = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
    text = f"{name} written to {output}: {facts}"
    console.show({"name": name, "file": output, **metrics}, lambda _: click.echo(text))
