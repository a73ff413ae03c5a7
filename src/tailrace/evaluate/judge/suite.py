"""Evaluations: policies x scenarios x seeds on identical arrivals, and their comparison.

The best single rule and the best rule of each scenario are selected on reserved tuning seeds. All
policies are then measured on other seeds, by default evaluation seeds, on which nothing was
selected, tuned or trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tailrace import scenario as scenarios
from tailrace.config import Scenario, Settings, load_toml, parse
from tailrace.errors import TailraceError, unknown_name
from tailrace.evaluate.judge.baselines import REFERENCE
from tailrace.evaluate.judge.recorded import TraceCluster
from tailrace.evaluate.judge.statistics import (
    Grid,
    VersusBestOfEach,
    VersusBestSingle,
    best_of_each,
    best_single,
    scores,
    versus_each,
    versus_single,
)
from tailrace.evaluate.measure.cells import (
    Cell,
    CellBatch,
    Measure,
    Player,
    Traffic,
    gather,
    simulator,
)
from tailrace.evaluate.measure.contender import Contender, Role
from tailrace.saturation import resolve_rate, with_capacity
from tailrace.seeds import Purpose, purpose_of, require, seeds

SUITES = Path(__file__).parents[2] / "suites"
#: Tuning seeds come in disjoint blocks: constants are tuned on the first, rules selected on the
#: second, checkpoints ranked on the third.
TUNE_FROM, SELECT_FROM, RANK_FROM = 10_000, 20_000, 30_000


class Suite(Settings):
    """Scenarios that are judged together: shipped ones, or recorded traffic on some clusters."""

    name: str
    """Name of the suite."""
    description: str = ""
    """What it is meant to show."""
    scenarios: tuple[str, ...] = ()
    """Names of shipped scenarios."""
    clusters: tuple[TraceCluster, ...] = ()
    """Clusters on which every trace of a folder is judged, instead of scenarios."""
    requests: int | None = None
    """Requests of a run unless asked otherwise; default: the scenario's."""
    seeds: int = 20
    """How many seeds unless asked otherwise."""
    selection_seeds: int = 5
    """How many tuning seeds choose the best rules unless asked otherwise."""
    warmup: float = 0.1
    """Share of the first requests left out unless asked otherwise."""

    @property
    def is_recorded(self) -> bool:
        """Whether it needs a folder of traces."""
        return bool(self.clusters)


def suite_names() -> list[str]:
    """Return the names of the shipped suites, sorted."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def load_suite(name: str) -> Suite:
    """Return a shipped suite."""
    if name not in suite_names():
        raise unknown_name("suite", name, suite_names())
    return parse(Suite, {"name": name, **load_toml(SUITES / f"{name}.toml")})


def shipped_scenarios(suite: Suite) -> list[str]:
    """Return the names of a suite's scenarios; raises if it needs recorded traffic."""
    if suite.is_recorded:
        raise TailraceError(
            f"the suite '{suite.name}' runs on recorded traffic: "
            f"`tailrace evaluate --suite {suite.name} --traces FOLDER`"
        )
    return list(suite.scenarios)


def load_scenarios(names: Sequence[str], requests: int | None = None) -> list[Scenario]:
    """Return scenarios by name or file, with their capacity; ``requests``: their number in each."""
    found = [scenarios.load(name) for name in names]
    taken = [s.name for s in found]
    for name in taken:
        if taken.count(name) > 1:
            raise TailraceError(f"two scenarios are called '{name}'; each can take part once")
    if requests is not None:
        found = [s.with_workload(requests=requests) for s in found]
    return [with_capacity(s) for s in found]


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation runs."""

    suite: str  #: its name, or "custom"
    scenarios: tuple[Scenario, ...]
    contenders: tuple[Contender, ...]
    subject: str | None  #: label of the policy the headline is about
    seeds: tuple[int, ...]
    selection_seeds: tuple[int, ...]  #: the best rules are chosen on these
    measure: Measure = field(default_factory=Measure)
    #: Scenarios of the same names on which the best rules are chosen; empty: the same ones.
    selection_scenarios: tuple[Scenario, ...] = ()
    notes: tuple[str, ...] = ()  #: sentences on what was left out of recorded traffic
    keep_baselines: bool = False  #: reuse cells of baselines measured with earlier sources

    def __post_init__(self) -> None:
        for seed in self.selection_seeds:
            require(seed, Purpose.TUNING)
        names = [s.name for s in self.scenarios]
        if self.selection_scenarios and [s.name for s in self.selection_scenarios] != names:
            raise TailraceError("rules must be chosen on scenarios of the same names")
        if not self.seeds or not self.selection_seeds:
            raise TailraceError("an evaluation needs seeds to measure on and seeds to select on")
        both = sorted(set(self.seeds) & set(self.selection_seeds))
        if both:
            raise TailraceError(
                f"seed {both[0]} would choose the best rules and judge them; take other seeds"
            )
        purposes = {purpose_of(seed) for seed in self.seeds}
        if len(purposes) > 1 or Purpose.TRAINING in purposes:
            raise TailraceError("an evaluation runs on seeds of one purpose, never on training's")

    @property
    def batches(self) -> tuple[CellBatch, ...]:
        """All cells: every policy on the seeds, selectable rules on the selection seeds."""
        candidates = tuple(c for c in self.contenders if c.is_candidate)
        chosen_on = self.selection_scenarios or self.scenarios
        return (
            CellBatch(self.traffics(self.seeds), self.contenders),
            CellBatch(self.traffics(self.selection_seeds, chosen_on), candidates),
        )

    def traffics(
        self, seeds: Sequence[int], of: Sequence[Scenario] | None = None
    ) -> tuple[Traffic, ...]:
        """Return the traffic of all scenarios (or those of ``of``) on some seeds."""
        pairs = [(s, resolve_rate(s)) for s in (self.scenarios if of is None else of)]
        return tuple(Traffic(s, rate, seed) for s, rate in pairs for seed in seeds)


def evaluation_seeds(count: int, first: int = 0) -> tuple[int, ...]:
    """Return evaluation seeds, starting with the ``first``-th."""
    return tuple(seeds(Purpose.EVALUATION, count, first))


def selection_seeds(count: int) -> tuple[int, ...]:
    """Return the tuning seeds on which the best rules are chosen."""
    return tuple(seeds(Purpose.TUNING, count, SELECT_FROM))


def ranking_seeds(count: int, first: int = 0) -> tuple[int, ...]:
    """Return the tuning seeds on which checkpoints are ranked, from the ``first``-th on."""
    return tuple(seeds(Purpose.TUNING, count, RANK_FROM + first))


@dataclass(frozen=True)
class Standing:
    """One policy over all scenarios."""

    contender: Contender
    score: float  #: geometric mean of cost / cost of the reference rule
    versus: VersusBestSingle  #: the best single rule


@dataclass(frozen=True)
class Evaluation:
    """The outcome of an evaluation."""

    plan: EvaluationPlan
    grid: Grid  #: on its seeds
    selection: tuple[Cell, ...]  #: on the seeds of the selection
    best_single: str
    best_hand_made: str  #: the same without the learned baselines
    best_of_each: tuple[str, ...]  #: [S]
    standings: tuple[Standing, ...]  #: lowest score first
    versus_hand_made: VersusBestSingle | None  #: the subject against the best hand-made rule
    versus_each: VersusBestOfEach | None  #: the subject against the best of each scenario

    @property
    def subject(self) -> Standing | None:
        """The policy the headline is about."""
        found = [s for s in self.standings if s.contender.label == self.plan.subject]
        return found[0] if found else None


def evaluate(
    plan: EvaluationPlan,
    folder: Path,
    *,
    jobs: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
    player: Player = simulator,
) -> Evaluation:
    """Run an evaluation; finished cells are stored in ``folder`` and reused.

    ``progress`` gets the number of finished cells, and how many of them were reused.
    """
    names = [s.name for s in plan.scenarios]
    cells = gather(
        plan.batches, plan.measure, folder, jobs=jobs, progress=progress, player=player,
        keep_baselines=plan.keep_baselines,
    )  # fmt: skip
    candidates = [c.label for c in plan.contenders if c.is_candidate]
    chosen_on = Grid.of(cells, names, candidates, plan.selection_seeds)
    single = best_single(chosen_on, candidates, REFERENCE)
    learned = {c.label for c in plan.contenders if c.role is Role.LEARNED}
    hand_made = best_single(chosen_on, [c for c in candidates if c not in learned], REFERENCE)
    of_each = best_of_each(chosen_on, candidates)
    grid = Grid.of(cells, names, [c.label for c in plan.contenders], plan.seeds)
    standings = [
        Standing(contender, float(score), versus_single(grid, contender.label, single))
        for contender, score in zip(plan.contenders, scores(grid, REFERENCE), strict=True)
    ]
    standings.sort(key=lambda s: s.score)
    picked = set(plan.selection_seeds)
    return Evaluation(
        plan,
        grid,
        tuple(c for c in cells if c.seed in picked),
        single,
        hand_made,
        tuple(of_each),
        tuple(standings),
        None if plan.subject is None else versus_single(grid, plan.subject, hand_made),
        None if plan.subject is None else versus_each(grid, plan.subject, of_each),
    )


def without_what_cannot_run(
    contenders: Sequence[Contender], all_scenarios: Sequence[Scenario]
) -> tuple[list[Contender], list[str]]:
    """Separate look-aheads if a scenario needs the reference engine, which lacks them."""
    from tailrace.sim.simulator import uses_reference

    if not any(uses_reference(s.cluster, s.engine) for s in all_scenarios):
        return list(contenders), []
    left_out = [c.label for c in contenders if c.role is Role.ORACLE]
    return [c for c in contenders if c.role is not Role.ORACLE], left_out
