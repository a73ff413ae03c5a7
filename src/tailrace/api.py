"""The functions behind ``import tailrace as tr``; use them from there.

Small and stable: tests/test_api.py holds the names and signatures. Everything takes a scenario by
name, as a file or as an object, and a policy by name or file (docs/policies.md). Results are frozen
objects with a table: ``to_arrow()``, or ``to_frame()`` where pandas is installed.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace import scenario as scenarios
from tailrace.config import Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.explain.explain_state import StateExplanation, explain_state
from tailrace.evaluate.explain.inspect import learned
from tailrace.evaluate.explain.state_file import State
from tailrace.evaluate.explain.state_file import read as read_state
from tailrace.evaluate.judge import baselines, results, suite
from tailrace.evaluate.judge import compare as comparisons
from tailrace.evaluate.judge.recorded import scenarios_of
from tailrace.evaluate.measure.cells import Measure
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.request_results import request_columns
from tailrace.evaluate.measure.runner import default_policies, run
from tailrace.parallel import cores
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.seeds import Purpose, seeds
from tailrace.sim.result import SimResult
from tailrace.workload.recorded.conversations import Half

AnyScenario = str | Path | Scenario
DEFAULT_POLICY = registry.SHIPPED_NAME


def _named(policy: str | Path) -> str:
    """Return the name of a policy, which worker processes and results know it by."""
    if not isinstance(policy, str | Path):
        raise TailraceError(
            "a policy is given by its name or file, with parameters like cache_aware:match_rate=0.5"
            f", not as a {type(policy).__name__}"
        )
    return str(policy)


def _several(names: "str | Path | Sequence[str | Path]") -> list[str]:
    """Return names as a list; one name stands for itself."""
    return [_named(name) for name in ([names] if isinstance(names, str | Path) else names)]


class ResultTable:
    """A result that is also a table."""

    def to_arrow(self) -> pa.Table:
        """Return the rows as a pyarrow table."""
        raise NotImplementedError

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame; needs pandas."""
        if find_spec("pandas") is None:
            raise TailraceError("to_frame() needs pandas; to_arrow() does not")
        return self.to_arrow().to_pandas()


@dataclass(frozen=True)
class Simulated(ResultTable):
    """One run: its figures, and one row per request."""

    scenario: Scenario
    policy: str
    seed: int
    rate_rps: float | None  #: offered; None: the traffic's own pace
    summary: Summary
    result: SimResult

    def to_arrow(self) -> pa.Table:
        """Return one row per request: lengths, times (s), latencies (s), cost (s), replica."""
        return request_columns(self.result)


@dataclass(frozen=True)
class Compared(ResultTable):
    """Policies on identical requests, the cheapest first."""

    comparison: comparisons.Comparison

    @property
    def best(self) -> str:
        """The policy of lowest mean cost."""
        return self.comparison.entries[0].policy

    def to_arrow(self) -> pa.Table:
        """Return one row per policy and seed: every figure of its summary."""
        found = self.comparison
        return pa.Table.from_pylist(
            [
                {"policy": entry.policy, "seed": seed, **_flat(run_)}
                for entry in found.entries
                for seed, run_ in zip(found.seeds, entry.runs, strict=True)
            ]
        )


@dataclass(frozen=True)
class Evaluated(ResultTable):
    """Policies against baselines on held-out traffic."""

    evaluation: suite.Evaluation

    @property
    def results(self) -> results.ResultsFile:
        """What ``tailrace evaluate`` writes to results.json."""
        return results.results_of(self.evaluation)

    def to_arrow(self) -> pa.Table:
        """Return one row per scenario, policy and seed."""
        return results.table(self.evaluation)


@dataclass(frozen=True)
class Trained(ResultTable):
    """A training run."""

    folder: Path
    best: Path  #: the best policy, a .tailrace file
    score: float  #: its cost relative to that of ``reference``, on validation traffic
    best_rule: tuple[str, float]  #: the best rule there, and its relative cost
    reference: str

    def to_arrow(self) -> pa.Table:
        """Return the log of the run: one row per step."""
        import pyarrow.csv

        return pyarrow.csv.read_csv(self.folder / "log.csv")


def load_scenario(scenario: AnyScenario = "") -> Scenario:
    """Return a scenario: a shipped one by name, one of a .toml file, or the default (empty)."""
    if isinstance(scenario, Scenario):
        return scenario
    return scenarios.load(scenario) if str(scenario) else Scenario()


def load_policy(policy: str | Path = DEFAULT_POLICY, **params: float) -> Policy:
    """Return a policy: a name (see ``tailrace policies``), a .tailrace file or a .py file.

    ``params`` are constants of a rule: ``load_policy("cache_aware", match_rate=0.5)``. A policy has
    ``scores(view)``, lower is better.
    """
    return registry.get(str(policy), **params)


def simulate(
    scenario: AnyScenario = "",
    policy: str | Path = DEFAULT_POLICY,
    *,
    seed: int = 0,
    requests: int | None = None,
    warmup: float = 0.0,
) -> Simulated:
    """Run one policy on a scenario.

    ``requests``: how many, instead of the scenario's. ``warmup``: share of the first requests that
    the summary leaves out.
    """
    name, world = _named(policy), _sized(scenario, requests)
    rate = resolve_rate(world)
    result = run(world, name, rate, seed)
    return Simulated(world, name, seed, rate, summarise(result, warmup), result)


def compare(
    scenario: AnyScenario = "",
    policies: str | Path | Sequence[str | Path] = (),
    *,
    seeds: int = 5,
    requests: int | None = None,
    reference: str = "least_outstanding",
    warmup: float = 0.0,
    jobs: int | None = None,
) -> Compared:
    """Run policies (none given: ``tailrace`` and every rule) on the same requests, and rank them.

    ``seeds``: how many tuning seeds. ``jobs``: processes, one per core by default; with more than
    one, call it below ``if __name__ == "__main__"`` in a script.
    """
    given, world = _several(policies), with_capacity(_sized(scenario, requests))
    names = given or default_policies(world)[0]
    numbers = _tuning_seeds(seeds)
    found = comparisons.compare(
        world, names, numbers, jobs, reference=reference, warmup_fraction=warmup
    )
    return Compared(found)


def evaluate(
    scenario: AnyScenario | Sequence[AnyScenario] = "standard",
    policies: str | Path | Sequence[str | Path] = (DEFAULT_POLICY,),
    *,
    against: str | Sequence[str] = ("rules",),
    seeds: int = 20,
    selection_seeds: int = 5,
    requests: int | None = None,
    warmup: float = 0.1,
    folder: Path | str | None = None,
    jobs: int | None = None,
) -> Evaluated:
    """Measure policies against baselines on evaluation seeds, which nothing was chosen on.

    ``scenario`` is a scenario, several (also those of :func:`recorded`), or the name of a suite
    (``standard``, ``holdout``, ``classes``); ``against`` names policies or groups (all, rules,
    tuned, learned, look-ahead, ordered, none). The best rules are chosen on ``selection_seeds``
    tuning seeds. ``folder`` keeps finished cells, to go on from.
    """
    names, opponents = _several(policies), _several(against)
    label, worlds = "custom", _worlds(scenario)
    if isinstance(scenario, str) and scenario in suite.suite_names():
        label = scenario
    if requests is not None:
        worlds = [world.with_workload(requests=requests) for world in worlds]
    worlds = [with_capacity(world) for world in worlds]
    tested = baselines.subjects(names, worlds[0])
    everybody = baselines.gathered(tested, baselines.baselines_of(opponents, worlds[0]))
    everybody, _ = suite.without_what_cannot_run(everybody, worlds)
    plan = suite.EvaluationPlan(
        label,
        tuple(worlds),
        tuple(everybody),
        tested[0].label,
        suite.evaluation_seeds(seeds),
        suite.selection_seeds(selection_seeds),
        Measure(warmup),
    )
    with tempfile.TemporaryDirectory(prefix="tailrace-") as own:
        return Evaluated(suite.evaluate(plan, Path(folder or own) / "cells", jobs=jobs))


def recorded(
    traces: Path | str,
    folder: Path | str,
    *,
    half: str = "judge",
    suite_name: str = "real",
    requests: int | None = None,
    jobs: int | None = None,
) -> list[Scenario]:
    """Return scenarios of recorded traffic: every trace in ``traces`` on the clusters of a suite.

    Conversations are those of one half, "judge" or "train", by a hash of their ids; every seed
    draws others of them (docs/evaluation.md). Imported files are kept in ``folder``, which the
    scenarios refer to. The scenarios also serve :class:`~tailrace.learn.worlds.World` in training.
    """
    of = suite.load_suite(suite_name)
    found = scenarios_of(
        Path(traces),
        of.clusters,
        Half(half),
        Path(folder),
        requests=requests or of.requests or Workload().requests,
        jobs=jobs,
    )
    return list(found.scenarios)


def train(
    preset: str | Path = "quick",
    *,
    folder: Path | str | None = None,
    seed: int | None = None,
    scenarios: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    jobs: int | None = None,
) -> Trained:
    """Train a policy by a preset or a settings file (docs/training.md); needs ``tailrace[train]``.

    ``settings`` go over the preset's, e.g. ``{"updates": 10}``. The run's folder is
    ``runs/NAME-SEED`` by default and must not hold another run.
    """
    from tailrace.learn import settings as train_settings
    from tailrace.learn.trainer import Trainer
    from tailrace.scenario import merged

    over: dict[str, Any] = dict(settings or {})
    if seed is not None:
        over["seed"] = seed
    if scenarios:
        over |= {"scenarios": list(scenarios), "randomise": None}
    data = merged(train_settings.read(preset), over)
    where = Path(folder) if folder else Path("runs") / f"{data['name']}-{data.get('seed', 0)}"
    outcome = Trainer(where, train_settings.build(data), jobs or cores()).run()
    return Trained(where, outcome.best, outcome.best_score, outcome.best_rule, outcome.reference)


def explain(state: State | str | Path, policy: str | Path = DEFAULT_POLICY) -> StateExplanation:
    """Say what a trained policy does in a state (a .toml file, see examples/states), and why."""
    given = state if isinstance(state, State) else read_state(Path(state))
    name = "state" if isinstance(state, State) else Path(state).stem
    return explain_state(learned(str(policy)), given, name)


def _sized(scenario: AnyScenario, requests: int | None) -> Scenario:
    world = load_scenario(scenario)
    return world if requests is None else world.with_workload(requests=requests)


def _worlds(scenario: AnyScenario | Sequence[AnyScenario]) -> list[Scenario]:
    if isinstance(scenario, str) and scenario in suite.suite_names():
        return [
            scenarios.load(name) for name in suite.shipped_scenarios(suite.load_suite(scenario))
        ]
    if isinstance(scenario, str | Path | Scenario):
        return [load_scenario(scenario)]
    return [load_scenario(one) for one in scenario]


def _tuning_seeds(count: int) -> list[int]:
    return seeds(Purpose.TUNING, count)


def _flat(summary: Summary) -> dict[str, Any]:
    """A summary as one row; latencies become ``ttft_s_mean`` and so on."""
    row: dict[str, Any] = {}
    for field in dataclasses.fields(summary):
        value = getattr(summary, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            row |= {f"{field.name}_{k}": v for k, v in dataclasses.asdict(value).items()}
        elif not isinstance(value, tuple):
            row[field.name] = value
    return row
