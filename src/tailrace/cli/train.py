"""``tailrace train``: from nothing to a policy file."""

import shlex
from pathlib import Path
from typing import Any

import click

from tailrace.cli import console, options
from tailrace.cli.options import FILE, OUTPUT, assignment, option
from tailrace.config import Scenario
from tailrace.errors import TailraceError


@options.command("train")
@option(
    "--preset", metavar="NAME",
    help="Settings to start from: quick (five scenarios, under 5 minutes on 2 cores) or full (the "
    "general policy, under 2 hours) or, with --from, finetune, polish or tail. "
    "[default: quick]",
)  # fmt: skip
@option(
    "--config", type=FILE,
    help="Settings from a TOML file, put over the preset's, or alone without --preset.",
)  # fmt: skip
@option(
    "--scenario", "scenarios", metavar="NAME", multiple=True,
    help="Scenario to train on, by name or file, instead of the preset's; may be repeated.",
)  # fmt: skip
@option(
    "--from", "start", metavar="POLICY",
    help="Fine-tune a trained policy (tailrace, or a .tailrace file) instead of starting from "
    "nothing; the preset is then finetune.",
)  # fmt: skip
@option(
    "--cluster", type=FILE,
    help="Train on the cluster of a TOML file (see `tailrace calibrate`), instead of scenarios.",
)  # fmt: skip
@option(
    "--workload", metavar="NAME",
    help="Train on this workload, by name or a file of requests, instead of scenarios.",
)  # fmt: skip
@option(
    "--env", type=click.Choice(["sim", "vidur", "live"]),
    help="World to improve the policy in by PPO: the simulator, real Vidur, or the requests of a "
    "live router (--serve). [default: sim]",
)  # fmt: skip
@option(
    "--serve", type=FILE,
    help="Settings of that router, as for `tailrace serve --config`; it is run by this command.",
)  # fmt: skip
@option(
    "--seed", type=click.IntRange(0, 899), metavar="N",
    help="Number of the run: weights and traffic follow from it. [default: the preset's, 0]",
)  # fmt: skip
@option(
    "--updates", type=click.IntRange(0), metavar="N",
    help="Updates after cloning, instead of the preset's.",
)  # fmt: skip
@option(
    "--set", "assignments", metavar="KEY=VALUE", multiple=True,
    help="Any setting by its path, e.g. branching.kl_limit=0.01; may be repeated. "
    "docs/training.md lists them.",
)  # fmt: skip
@option(
    "--resume", type=FILE, metavar="RUN",
    help="Go on with the run in this folder, exactly where it stopped.",
)  # fmt: skip
@options.jobs
@options.workers
@option(
    "-o", "--output", type=FILE, metavar="FOLDER", section=OUTPUT,
    help="Folder of the run. [default: runs/PRESET-SEED]",
)  # fmt: skip
@options.json
@options.quiet
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
) -> None:
    """Train a policy: demonstrations, cloning, improvement, evaluation, best checkpoint.

    The run's folder holds best.tailrace, every checkpoint, log.csv and TensorBoard files. Ctrl-C
    leaves all of them usable.
    """
    own = cluster is not None or workload is not None
    if resume is not None and options.given_besides("resume", "jobs", "workers"):
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
    with LiveWatcher(show=not console.is_quiet()) as watcher:
        try:
            trainer = Trainer(folder, chosen, jobs or cores(), watcher, ROLLOUT_SOURCES)
            outcome = trainer.run()
        except KeyboardInterrupt:
            watcher.stop()
            click.echo(stopped(folder), err=True)
            raise
    console.show(outcome, lambda screen: print_outcome(screen, folder, outcome))


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
