"""``tailrace train``: from nothing to a policy file."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli import console, options
from tailrace.cli.options import FILE, OUTPUT, assignment, option
from tailrace.config import Scenario, VidurSettings
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.workload.table import RequestTable

#: Requests per world, and worlds, of an evaluation in real Vidur, unless set: it plays some
#: hundreds of requests per second.
VIDUR_REQUESTS, VIDUR_WORLDS = 500, 2


@options.command("train")
@option(
    "--preset", metavar="NAME",
    help="Settings to start from: quick (five scenarios, under 5 minutes on 2 cores), full (the "
    "general policy, about 20 minutes), ppo (clone simple rules, then PPO), ppo-scratch, ppo-vidur "
    "or, with --from, finetune, polish or tail. "
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
    help="World to improve the policy in: the simulator, real Vidur, or the requests of a "
    "live router (--serve). [default: sim]",
)  # fmt: skip
@option(
    "--serve", type=FILE,
    help="Settings of that router, as for `tailrace serve --config`; it is run by this command.",
)  # fmt: skip
@options.vidur
@option(
    "--demonstrations", type=FILE, multiple=True,
    help="Decisions to clone, as recorded in Vidur (.npz), besides the preset's teachers; may be "
    "repeated. Alone: --set demonstrations.worlds=0 --set demonstrations.rounds=1.",
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
    "-o", "--out", "--output", "output", type=FILE, metavar="FOLDER", section=OUTPUT,
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
    vidur_args: str | None,
    vidur_imports: tuple[str, ...],
    demonstrations: tuple[Path, ...],
    seed: int | None,
    updates: int | None,
    assignments: tuple[str, ...],
    resume: Path | None,
    jobs: int | None,
    output: Path | None,
) -> None:
    """Train a policy by imitation, then PPO or branching.

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
    vidur = options.take_vidur(vidur_args, vidur_imports)
    if vidur.arguments:
        if own or env not in (None, "vidur"):
            raise TailraceError("--vidur-args say what to train on, with --env vidur")
        env = "vidur"
    console.need("torch", "tensorboard", "gymnasium", extra="train", what="training")
    from tailrace.files import make_folder
    from tailrace.integrations.rollout_sources import ROLLOUT_SOURCES
    from tailrace.learn import settings as s
    from tailrace.learn.trainer import Trainer
    from tailrace.parallel import cores
    from tailrace.scenario import merged
    from tailrace.terminal.training import LiveWatcher, print_outcome
    from tailrace.workload import traces

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
        if demonstrations:
            files = [str(path.resolve()) for path in demonstrations]
            over = merged(over, {"demonstrations": {"files": files}})
        data = merged(data, over)
        if vidur.arguments:
            _evaluate_less(data)
        for text in assignments:
            s.assign(data, *assignment(text))
        if data.get("env", "sim") != "sim" and "method" not in data:
            data.setdefault("advantage", "gae")  # only the simulator can be copied for branching
            data.setdefault("objective", "clipped")
        output = output or Path("runs") / f"{data['name']}-{data.get('seed', 0)}"
        notes: list[str] = []
        if vidur.arguments:
            file = output.with_name(f"{output.name}.requests.csv").resolve()
            table, notes = _for_own_vidur(data, vidur, file)
        chosen = s.build(data)
        if vidur.arguments:
            make_folder(file.parent)
            traces.write(table, file)
        elif chosen.env == "vidur":
            notes = _vidur_notes(chosen.scenarios)
        for note in (*chosen.cautions, *notes):
            click.echo(note, err=True)
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


def _evaluate_less(data: dict[str, Any]) -> None:
    """Lower the size of evaluations to what real Vidur plays in seconds."""
    from tailrace.learn.settings import EvaluationSettings

    usual, found = EvaluationSettings(), data.setdefault("evaluation", {})
    for name, most in (("requests", VIDUR_REQUESTS), ("worlds", VIDUR_WORLDS)):
        found[name] = min(found.get(name, getattr(usual, name)), most)


def _for_own_vidur(
    data: dict[str, Any], own: VidurSettings, file: Path
) -> "tuple[RequestTable, list[str]]":
    """Put Vidur's own settings into those of a run; returns requests for a file, and notes."""
    from tailrace import scenario as scenarios
    from tailrace.integrations.vidur import require
    from tailrace.integrations.vidur.setup import adapted_scenario, setup_of

    require()
    given = data.get("scenarios", [])
    base = scenarios.load(given[0]) if len(given) == 1 and isinstance(given[0], str) else Scenario()
    setup, _ = setup_of(base, own)
    scenario, table, notes = adapted_scenario(setup, file)
    data |= {"scenarios": [scenario], "randomise": None, "vidur": own}
    counts = data["evaluation"]
    notes.append(
        f"evaluation: in Vidur, {counts['worlds']} x {counts['requests']} requests per policy"
    )
    return table, notes


def _vidur_notes(given: Sequence[str | Scenario]) -> list[str]:
    """Say how scenarios are played in real Vidur."""
    from tailrace import scenario as scenarios
    from tailrace.integrations.vidur.limits import nearest

    loaded = [scenarios.load(s) if isinstance(s, str) else s for s in given]
    notes = [f"{s.name}: {note}" for s in loaded for note in nearest(s)[1]]
    return [*notes, "evaluation: in Tailrace's simulator, on the scenarios as Vidur plays them"]


def stopped(folder: Path) -> str:
    """Say what is left of a run that was interrupted."""
    from tailrace.learn.run_folder import RunFolder

    if RunFolder(folder).has_settings:
        return f"stopped; go on with: tailrace train --resume {shlex.quote(str(folder))}"
    return "stopped before anything was done: give the same command again"
