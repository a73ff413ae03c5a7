"""``tailrace train``: from nothing to a policy file."""

import shlex
from pathlib import Path
from typing import Any

import click

from tailrace.cli import console
from tailrace.cli.options import (
    SectionedCommand,
    SectionOption,
    assignment,
    jobs_option,
    json_option,
    quiet_option,
    workers_option,
)
from tailrace.config import Scenario
from tailrace.errors import TailraceError


@click.command("train", cls=SectionedCommand)
@click.option(
    "--preset", metavar="NAME", cls=SectionOption,
    help="Settings to start from: quick (five scenarios, under 5 minutes on 2 cores) or full (the "
    "general policy, under 2 hours) or, with --from, finetune, polish or tail. "
    "[default: quick]",
)  # fmt: skip
@click.option(
    "--config", metavar="FILE", type=click.Path(path_type=Path), cls=SectionOption,
    help="Settings from a TOML file, put over the preset's, or alone without --preset.",
)  # fmt: skip
@click.option(
    "--scenario", "scenarios", metavar="NAME", multiple=True, cls=SectionOption,
    help="Scenario to train on, by name or file, instead of the preset's; may be repeated.",
)  # fmt: skip
@click.option(
    "--from", "start", metavar="POLICY", cls=SectionOption,
    help="Fine-tune a trained policy (tailrace, or a .tailrace file) instead of starting from "
    "nothing; the preset is then finetune.",
)  # fmt: skip
@click.option(
    "--cluster", metavar="FILE", type=click.Path(path_type=Path), cls=SectionOption,
    help="Train on the cluster of a TOML file (see `tailrace calibrate`), instead of scenarios.",
)  # fmt: skip
@click.option(
    "--workload", metavar="NAME", cls=SectionOption,
    help="Train on this workload, by name or a file of requests, instead of scenarios.",
)  # fmt: skip
@click.option(
    "--env", type=click.Choice(["sim", "vidur", "live"]), cls=SectionOption,
    help="World to improve the policy in by PPO: the simulator, real Vidur, or the requests of a "
    "live router (--serve). [default: sim]",
)  # fmt: skip
@click.option(
    "--serve", metavar="FILE", type=click.Path(path_type=Path), cls=SectionOption,
    help="Settings of that router, as for `tailrace serve --config`; it is run by this command.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0, 899), cls=SectionOption, metavar="N",
    help="Number of the run: weights and traffic follow from it. [default: the preset's, 0]",
)  # fmt: skip
@click.option(
    "--updates", type=click.IntRange(0), cls=SectionOption, metavar="N",
    help="Updates after cloning, instead of the preset's.",
)  # fmt: skip
@click.option(
    "--set", "assignments", metavar="KEY=VALUE", multiple=True, cls=SectionOption,
    help="Any setting by its path, e.g. branching.kl_limit=0.01; may be repeated. "
    "docs/training.md lists them.",
)  # fmt: skip
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="RUN", cls=SectionOption,
    help="Go on with the run in this folder, exactly where it stopped.",
)  # fmt: skip
@jobs_option
@workers_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FOLDER", cls=SectionOption,
    section="Output", help="Folder of the run. [default: runs/PRESET-SEED]",
)  # fmt: skip
@json_option
@quiet_option
def command(
    preset: str | None,
    config: Path | None,
    scenarios: tuple[str, ...],
    start: str | None,
    cluster: Path | None,
    workload: str | None,
    env: str | None,
    serve: Path | None,
    seed: int | None,
    updates: int | None,
    assignments: tuple[str, ...],
    resume: Path | None,
    jobs: int | None,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train a policy: demonstrations, cloning, improvement, evaluation, best checkpoint.

    The run's folder holds best.tailrace, every checkpoint, log.csv and TensorBoard files. Ctrl-C
    leaves all of them usable.
    """
    own = cluster is not None or workload is not None
    taken = (
        preset, config, scenarios or None, start, cluster, workload, env, serve, seed, updates,
        assignments or None, output,
    )  # fmt: skip
    if resume is not None and any(value is not None for value in taken):
        raise TailraceError(
            "--resume goes on with a run as it was begun; it takes no other settings but --jobs"
        )
    if own and scenarios:
        raise TailraceError("--scenario and --cluster or --workload both say what to train on")
    console.need("torch", "tensorboard", "gymnasium", extra="train", what="training")
    from tailrace.integrations.rollout_sources import ROLLOUT_SOURCES
    from tailrace.learn import settings as s
    from tailrace.learn.trainer import Trainer
    from tailrace.parallel import cores
    from tailrace.scenario import merged
    from tailrace.terminal.training import LiveWatcher, print_outcome

    chosen: s.TrainSettings | None = None
    if resume is None:
        over: dict[str, Any] = {}
        if config is not None and preset is not None:
            over = s.read(config)
        data = s.read(preset or config or ("finetune" if start else "quick"))
        if start is not None:
            over["start"] = start
        if own:
            over |= {"scenarios": [_own_scenario(cluster, workload)], "randomise": None}
        if scenarios:
            over |= {"scenarios": list(scenarios), "randomise": None}
        given = (("env", env), ("serve", serve and str(serve.resolve())), ("seed", seed),
                 ("updates", updates))  # fmt: skip
        over |= {k: v for k, v in given if v is not None}
        data = merged(data, over)
        if data.get("env", "sim") != "sim":
            data.setdefault("method", "ppo")  # the only one there
        for text in assignments:
            s.assign(data, *assignment(text))
        chosen = s.build(data)
        output = output or Path("runs") / f"{chosen.name}-{chosen.seed}"
    folder = resume or output
    assert folder is not None
    with LiveWatcher(show=not (quiet or as_json)) as watcher:
        try:
            trainer = Trainer(folder, chosen, jobs or cores(), watcher, ROLLOUT_SOURCES)
            outcome = trainer.run()
        except KeyboardInterrupt:
            watcher.stop()
            click.echo(stopped(folder), err=True)
            raise
    if as_json:
        console.print_json(outcome)
    else:
        print_outcome(console.stdout(), folder, outcome)


def _own_scenario(cluster: Path | None, workload: str | None) -> Scenario:
    """Return the scenario of a file's cluster and a workload."""
    from tailrace import scenario as scenarios
    from tailrace.config import load_toml

    data: dict[str, Any] = {"name": "own"} | (load_toml(cluster) if cluster is not None else {})
    if workload is not None:
        is_file = scenarios.is_request_file(workload)
        name = str(Path(workload).resolve()) if is_file else workload
        data["workload"] = {**data.get("workload", {}), "name": name}
    return scenarios.build(data)


def stopped(folder: Path) -> str:
    """Say what is left of a run that was interrupted."""
    from tailrace.learn.run_folder import RunFolder

    if RunFolder(folder).has_state:
        return f"stopped; go on with: tailrace train --resume {shlex.quote(str(folder))}"
    return "stopped before the first step was done: there is nothing to go on with"
