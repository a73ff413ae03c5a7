"""Every setting of a training run, in one tree; a preset is a TOML file of these."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailrace import config
from tailrace.config import Positive, Scenario, Settings, Share, VidurSettings, load_toml
from tailrace.env.latency_limit import LatencyLimit
from tailrace.env.reward import RewardSettings
from tailrace.errors import RenamedSettingWarning, TailraceError, unknown_name
from tailrace.learn import other_names
from tailrace.learn.exploration import ExplorationSettings
from tailrace.learn.improve.ppo_settings import (
    RENAMED,
    LearningRate,
    LearningSettings,
    Objective,
    PpoSettings,
)
from tailrace.learn.randomisation import RandomisationSettings
from tailrace.policy import registry, shipped
from tailrace.policy.learned.architecture import NetworkConfig
from tailrace.scenario import merged
from tailrace.seeds import SEEDS_PER_PURPOSE

PRESETS = Path(__file__).parent.parent / "presets"
#: Training seeds from this number on are kept for choosing the best checkpoint.
FIRST_VALIDATION_SEED = 900_000_000
#: Training seeds that one run may use up.
SEEDS_PER_RUN = 1_000_000
MAX_RUNS = FIRST_VALIDATION_SEED // SEEDS_PER_RUN
#: Roll-out tasks per update, whatever the number of processes: the worlds follow from it.
ROLLOUT_TASKS = 2
#: Name of a teacher: the policy the run starts from.
START = "start"

Count = Annotated[int, Field(ge=1, le=10_000_000)]
Weight = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class DemonstrationSettings(Settings):
    """Labels from a teacher, and cloning. From the second round on the student acts (DAgger)."""

    rounds: int = Field(default=3, ge=0, le=10_000)
    """Rounds of collecting labels and fitting to all of them; 0: start from random weights."""
    teachers: dict[str, float] = Field(default={"lookahead": 1.0}, min_length=1)
    """Built-in policies to learn from, and the share of worlds each one labels; `start` is the
    policy the run starts from."""
    best_teacher: bool = False
    """Let the teacher that does best in a world label it, instead of dividing worlds by share."""
    files: tuple[str, ...] = ()
    """Recorded decisions (.npz files as written in Vidur, docs/vidur.md), used in the first round
    in addition to the teachers' labels."""
    worlds: int = Field(default=20, ge=0, le=10_000_000)
    """Worlds per round; every scenario equally often. 0: only `files`."""
    decisions: Count = 1500
    """Labels per world."""
    warmup: Count = 500
    """Maximum decisions before the first label of a world; the minimum is a tenth of it."""
    epsilon: Share = 0.15
    """Share of random choices while the teacher acts."""
    student_epsilon: Share = 0.03
    """Share of random choices while the student acts."""
    unbalanced: Share = 0.1
    """Share of worlds in which most requests before the first label went to one replica."""
    off_nominal: Share = 0.2
    """Share of worlds whose load is far from the scenario's."""
    load_factors: tuple[Positive, Positive] = (0.4, 1.3)
    """Lowest and highest multiple of the load in those worlds."""
    epochs: Count = 6
    """Passes over all labels per round."""
    batch_size: Count = 512
    """Labels per step."""
    learning_rate: LearningRate = 2e-3
    """Learning rate at the start of a round; it falls to 0 within the round."""
    temperature_s: Positive = 0.05
    """Softmax temperature of the imitation target, in seconds of cost."""

    @model_validator(mode="after")
    def _teachers_known(self) -> Self:
        learned = (*shipped.LEARNING, registry.SHIPPED_NAME, START)
        known = [*(rule.name for rule in registry.rules()), *learned]
        for name, weight in self.teachers.items():
            if name not in known:
                raise ValueError(str(unknown_name("teacher", name, known)))
            if not 0 <= weight < float("inf"):
                raise ValueError(f"the share of teacher {name} must not be negative")
        if not sum(self.teachers.values()) > 0:
            raise ValueError("all teachers have share 0")
        if self.best_teacher and len(self.teachers) < 2:
            raise ValueError("best_teacher needs several teachers to choose from")
        if self.load_factors[0] > self.load_factors[1]:
            raise ValueError("load_factors must rise")
        return self

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.files and not self.rounds:
            raise ValueError("files are learnt from in the first round: set rounds to 1")
        if not self.worlds and not (self.files and self.rounds == 1):
            raise ValueError(
                "worlds = 0 leaves only files to learn from: name some, and rounds = 1"
            )
        return self


class BranchingSettings(LearningSettings):
    """Several choices tried in identical copies of a cluster (advantage = branching)."""

    SECTION: ClassVar = "branching"
    RENAMED: ClassVar = {
        "shortest_s": "min_horizon_s",
        "longest_s": "max_horizon_s",
        "batch_size": "minibatch",
        "reluctance": "logit_margin",
        "keep": "replay_updates",
        **RENAMED,
    }

    worlds: Count = 20
    """Worlds per update; every scenario equally often."""
    states: Count = 60
    """Decisions per world at which choices are tried; fewer, in proportion, beyond 4 replicas."""
    gap: int = Field(default=32, ge=1, le=10_000)
    """Mean number of decisions between two such decisions."""
    warmup: Count = 400
    """Maximum decisions before the first one; the minimum is a tenth of it."""
    candidates: int = Field(default=3, ge=2, le=64)
    """Number of choices tried: those the policy prefers."""
    horizon: Positive = 1.0
    """How long each copy continues with arrivals, as a multiple of the P90 end-to-end time; then it
    finishes its requests without further arrivals."""
    min_horizon_s: Positive = 1.0
    """Minimum horizon, s; the benefit of cached prefixes shows late."""
    max_horizon_s: Positive = 30.0
    """Maximum horizon, s."""
    return_share: Share = 0.0
    """Share of the pauses within sessions that the horizon covers, up to its maximum: what a cached
    prefix is worth shows when its session returns. 0: pauses do not matter."""
    logit_margin: float = Field(default=2.0, ge=0)
    """Minimum difference of logits at which a later choice in a branch may differ from that of the
    first branch; reduces noise in the comparison."""
    late_share: Positive = 1.0
    """Share of the TTFT target beyond which lateness is charged. Values below 1 also reward staying
    well under the target, and so shorten the tail."""
    tail_weight: Weight = 0.0
    """Weight of the squared time to first token over its target, added to the latency cost: long
    waits count for more. Also used to compare checkpoints and teachers."""
    replay_updates: Count = 6
    """Updates whose samples are kept and learnt from."""
    epochs: Count = 20
    """Passes over the samples per update."""
    minibatch: Count = 256
    """Samples per gradient step."""
    learning_rate: LearningRate = 1e-3
    """Step size of Adam. The KL-limited objective uses a new optimiser in every update."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate goes to `final_learning_rate` over the updates of a run."""
    final_learning_rate: LearningRate = 1e-3
    """Learning rate of the last update, unless the schedule is constant."""
    max_grad_norm: Positive = 1.0
    """Maximum gradient norm."""
    imitation_updates: Count = 10
    """Updates over which the imitation loss fades to 0."""
    imitation_batch_size: Count | None = None
    """Demonstrations per gradient step; none: as many as `minibatch`."""


class Stage(Settings):
    """A stage of the curriculum; omitted settings are as without a curriculum."""

    name: str
    """Name in the log."""
    updates: int | None = Field(default=None, ge=1)
    """Length in updates; the last stage does not end."""
    until_score: Positive | None = None
    """End the stage early when an evaluation reaches this score relative to the best rule."""
    load: Positive = 1.0
    """Multiple of the scenarios' loads."""
    scenarios: tuple[str, ...] = ()
    """Scenarios of the run to play; none: all."""
    late_weight: Weight | None = None
    """Cost of a second past the TTFT target (PPO)."""
    reward: dict[str, float | bool | str] = {}  # noqa: RUF012 (pydantic copies it)
    """Settings of the reward that differ in this stage (PPO)."""
    ramp: int = Field(default=0, ge=0)
    """Updates over which load and numbers of the reward move here from the stage before; 0: they
    change at once."""

    @property
    def reward_changes(self) -> dict[str, float | bool | str]:
        """Settings of the reward that differ in this stage."""
        late = {} if self.late_weight is None else {"late": self.late_weight}
        return {**self.reward, **late}


class EvaluationSettings(Settings):
    """Evaluations on fixed traffic during training; they select the best checkpoint."""

    RENAMED: ClassVar = {
        "rules": "baselines",
        "checkpoints": "checkpoint_every",
        "average": "average_checkpoints",
    }

    every: Count = 1
    """Updates between two evaluations."""
    worlds: Count = 4
    """Worlds (different traffic) per scenario."""
    randomised: Count = 40
    """Randomised worlds, if the run has any."""
    requests: Count = 4000
    """Requests per world."""
    baselines: tuple[str, ...] = (
        "least_outstanding", "round_robin", "lmetric", "load_aware", "least_predicted_ttft",
        "least_pending_uncached", "cache_aware", "llm_d", "random",
    )  # fmt: skip
    """Baselines, rules or trained policies of the package; costs are divided by that of the
    first."""
    checkpoint_every: Count = 1
    """Updates between two saved checkpoints."""
    average_checkpoints: int = Field(default=0, ge=0, le=10_000)
    """Number of last checkpoints whose weights are averaged at the end of the run; the average
    becomes the policy of the run if it scores best. 0: none."""

    @model_validator(mode="after")
    def _rules_known(self) -> Self:
        if not self.baselines:
            raise ValueError("evaluation needs at least one rule to compare with")
        known = [
            *(rule.name for rule in registry.rules()),
            *shipped.LEARNING,
            registry.SHIPPED_NAME,
        ]
        for name in self.baselines:
            if name not in known:
                raise ValueError(str(unknown_name("rule", name, known)))
        return self


class StoppingSettings(LatencyLimit):
    """When to stop an unsuccessful run, and what to do about requests that take too long."""

    RENAMED: ClassVar = {"behind": "patience", "dead_deviation": "min_reward_std"}

    patience: int = Field(default=0, ge=0)
    """Stop after this many consecutive evaluations behind the best rule, not counting those during
    cloning; 0: never."""
    rollback_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """An evaluation whose score exceeds that of the best one by this factor puts the best policy
    back and halves the learning rate; none: never."""
    collapse_share: Share = 0.995
    """Stop if one replica gets this share of the requests in every world of an evaluation."""
    min_reward_std: float = Field(default=1e-9, ge=0)
    """Stop if the reward varies by less than this from decision to decision."""

    @property
    def limit(self) -> LatencyLimit:
        """The latency limit alone, as rollouts get it: it is the trainer that warns."""
        found = self.model_dump(include=set(LatencyLimit.model_fields))
        return LatencyLimit(**found | ({"latency_action": "count"} if self.warns else {}))


class TrainSettings(Settings):
    """One training run."""

    RENAMED: ClassVar = {"safety": "stopping"}

    name: str = "custom"
    """Name of the preset or of the run."""
    seed: int = Field(default=0, ge=0, lt=MAX_RUNS)
    """Seed of weights, traffic and random choices."""
    start: str = ""
    """Trained policy to start from, by name or file, with its network shape; empty: random
    weights."""
    scenarios: tuple[str | Scenario, ...] = ()
    """Scenarios to train on: names, files or inline tables."""
    randomise: RandomisationSettings | None = None
    """Train on randomised worlds, in addition to the scenarios or instead of them."""
    network: NetworkConfig = NetworkConfig()
    demonstrations: DemonstrationSettings = DemonstrationSettings()
    advantage: Literal["gae", "grouped", "branching"] = "branching"
    """How advantages are estimated: from rollouts by generalised advantage estimation (gae), the
    same compared with other rollouts of the same requests (grouped), or by trying several choices
    in copies of the cluster (branching)."""
    objective: Objective = "kl_limited"
    """What an update maximises: the clipped surrogate of PPO, or a target policy at a limited KL
    divergence."""
    env: Literal["sim", "vidur", "live"] = "sim"
    """World that PPO plays in: the simulator, real Vidur, or a live router's requests. Cloning
    always uses the simulator, and so does evaluation unless `vidur` has arguments."""
    serve: str = ""
    """TOML file with the live router's settings, as for `tailrace serve` (env = live)."""
    vidur: VidurSettings = VidurSettings()
    updates: int = Field(default=10, ge=0, le=10_000_000)
    """Number of improvement updates."""
    branching: BranchingSettings = BranchingSettings()
    ppo: PpoSettings = PpoSettings()
    reward: RewardSettings = RewardSettings()
    exploration: ExplorationSettings = ExplorationSettings()
    curriculum: tuple[Stage, ...] = ()
    evaluation: EvaluationSettings = EvaluationSettings()
    stopping: StoppingSettings = StoppingSettings()

    @property
    def scenario_names(self) -> tuple[str, ...]:
        """Scenarios as stages of the curriculum call them."""
        return tuple(s if isinstance(s, str) else s.name for s in self.scenarios)

    @property
    def steps(self) -> int:
        """Steps of a run: rounds of cloning, then updates."""
        return self.demonstrations.rounds + self.updates

    @property
    def seeds_needed(self) -> int:
        """Maximum number of training seeds the run uses; each is played once."""
        per_update = self.branching.worlds
        if self.advantage != "branching":
            per_update = self.ppo.clusters // self.group + ROLLOUT_TASKS
        cloning = self.demonstrations.rounds * self.demonstrations.worlds
        return cloning + self.updates * per_update

    @property
    def learning(self) -> BranchingSettings | PpoSettings:
        """Settings of the learner: each kind of experience has its own."""
        return self.branching if self.advantage == "branching" else self.ppo

    @property
    def group(self) -> int:
        """Clusters of rollouts that play the same requests."""
        return self.ppo.group_size if self.advantage == "grouped" else 1

    def reward_of(self, stage: Stage | None) -> RewardSettings:
        """Return the reward in a stage of the curriculum."""
        if stage is None or not stage.reward_changes:
            return self.reward
        return config.parse(RewardSettings, self.reward.model_dump() | stage.reward_changes)

    @model_validator(mode="before")
    @classmethod
    def _without_method(cls, data: Any) -> Any:
        """Translate the former setting ``method``, which combined advantage and objective."""
        if not isinstance(data, Mapping) or "method" not in data:
            return data
        rest = {name: value for name, value in data.items() if name != "method"}
        if "advantage" in rest or "objective" in rest:
            raise ValueError("method is now `advantage` and `objective`: leave method out")
        if data["method"] not in ("branching", "ppo"):
            raise ValueError("method is now `advantage` (gae, grouped or branching)")
        text = "setting method is now advantage and objective; the old name still works"
        warnings.warn(text, RenamedSettingWarning, stacklevel=1)
        if data["method"] == "branching":
            return rest | {"advantage": "branching", "objective": "kl_limited"}
        ppo = rest.get("ppo", {})
        group = 1
        if isinstance(ppo, Mapping):
            group = ppo.get("group_size", ppo.get("group", 1))
            rest["ppo"] = {name: value for name, value in ppo.items() if name != "group"}
            rest["ppo"]["group_size"] = group
        return rest | {"advantage": "grouped" if group != 1 else "gae", "objective": "clipped"}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        share = 0.0 if self.randomise is None else self.randomise.share
        taught_by_start = self.demonstrations.teachers.get(START, 0) > 0
        if taught_by_start and not self.start:
            raise ValueError("a teacher is the policy to start from, but start names none")
        if self.start and self.demonstrations.rounds and not taught_by_start:
            raise ValueError(
                "cloning would make a started policy forget what it knows: make `start` one of the "
                "teachers, or set demonstrations.rounds=0"
            )
        if not self.scenarios and self.randomise is None:
            raise ValueError("there is nothing to train on: give scenarios, or randomise, or both")
        if self.scenarios and share == 1:
            raise ValueError("scenarios are given, but randomise.share = 1 leaves none of them")
        if not self.scenarios and share < 1:
            raise ValueError("randomise.share is below 1, but no scenarios are given for the rest")
        if self.steps == 0:
            raise ValueError("there is nothing to do: both demonstrations.rounds and updates are 0")
        if self.seeds_needed > SEEDS_PER_RUN:
            raise ValueError(
                f"the run would play {self.seeds_needed} worlds, but has traffic for "
                f"{SEEDS_PER_RUN}; set fewer worlds, clusters or updates"
            )
        if self.learning.imitation_weight > 0 and self.demonstrations.rounds == 0:
            raise ValueError(
                f"{self.learning.SECTION}.imitation_weight mixes demonstrations in, but "
                "demonstrations.rounds = 0 makes none"
            )
        if self.advantage == "grouped" and self.group < 2:
            raise ValueError(
                "advantage = 'grouped' compares clusters: set ppo.group_size to 2 or more"
            )
        if self.ppo.clusters % self.group:
            raise ValueError(
                f"ppo.group_size = {self.group} does not divide ppo.clusters = {self.ppo.clusters}"
            )
        if self.advantage == "branching":
            self._check_branching()
        self._check_env()
        if self.branching.min_horizon_s > self.branching.max_horizon_s:
            raise ValueError("branching.min_horizon_s is above branching.max_horizon_s")
        for stage in self.curriculum:
            for name in stage.scenarios:
                if name not in self.scenario_names:
                    raise ValueError(
                        f"stage {stage.name} names '{name}', which the run does not have"
                    )
        for stage in self.curriculum[:-1]:
            if stage.updates is None and stage.until_score is None:
                raise ValueError(f"stage {stage.name} never ends, but others follow it")
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        for number, stage in enumerate(self.curriculum):
            try:
                self.reward_of(stage)
            except TailraceError as error:
                raise ValueError(f"reward of stage {stage.name}: {error}") from None
            if stage.ramp and not number:
                raise ValueError(f"stage {stage.name} is the first: there is nothing to ramp from")
            if stage.ramp and stage.updates is not None and stage.ramp > stage.updates:
                raise ValueError(
                    f"stage {stage.name} ends after {stage.updates} updates, before its ramp of "
                    f"{stage.ramp} has"
                )
        return self

    @property
    def cautions(self) -> list[str]:
        """Warnings about valid settings that are probably not intended."""
        if self.demonstrations.rounds or self.start or self.ppo.norm_updates:
            return []
        caution = (
            "nothing teaches the normaliser of observations, so the network sees features at their "
            "own scales: clone first (demonstrations.rounds), start from a policy (--from), or set "
            "ppo.norm_updates"
        )
        return [caution]

    def _check_branching(self) -> None:
        """Raise if something is set that only rollouts have."""
        if self.reward != RewardSettings():
            raise ValueError(
                "branching counts the latency cost itself: a reward of another kind needs "
                "advantage = 'gae' or 'grouped'"
            )
        drawn = {"temperature_", "pulse_", "epsilon_"}
        if any(
            getattr(self.exploration, name) != field.default
            for name, field in ExplorationSettings.model_fields.items()
            if any(name.startswith(part) for part in drawn)
        ):
            raise ValueError(
                "branching tries all candidates anyway: exploration by temperature, pulses or "
                "epsilon needs advantage = 'gae' or 'grouped'"
            )
        if any(s.reward_changes for s in self.curriculum):
            raise ValueError("stages that change the reward need advantage = 'gae' or 'grouped'")

    def _check_env(self) -> None:
        """Raise if the world cannot be played in like this."""
        if self.serve and self.env != "live":
            raise ValueError(f"serve names the settings of a live router, but env = '{self.env}'")
        if self.vidur.arguments and (self.env != "vidur" or len(self.scenarios) != 1):
            raise ValueError(
                "vidur.arguments describe one cluster of real Vidur: they need env = 'vidur', and "
                "one scenario that they amount to (`tailrace train --vidur-args` makes it)"
            )
        if self.env == "sim":
            return
        where = f"env = '{self.env}'"
        if self.advantage == "branching":
            raise ValueError(
                f"{where} needs advantage = 'gae' or 'grouped': only the simulator can be copied, "
                "and branching tries choices in copies"
            )
        if self.stopping.ends_episodes:
            raise ValueError(
                f"stopping.latency_action = 'end' needs env = 'sim'; with {where} alarms are only "
                "counted or shown"
            )
        if self.reward.rule is not None:
            raise ValueError(
                f"reward.reference = '{self.reward.rule}' routes the same requests a second time, "
                f"which only the simulator can do: {where} needs reference = 'past'"
            )
        if self.env == "vidur" and self.randomise is not None:
            raise ValueError(f"{where} plays scenarios: give some instead of randomise")
        if self.env != "live":
            return
        if not self.serve:
            raise ValueError(f"{where} needs serve: the settings of the router, a TOML file")
        if self.advantage == "grouped":
            raise ValueError(
                f"{where} has one cluster, and requests come once: it needs advantage = 'gae'"
            )
        if self.curriculum:
            raise ValueError(f"{where} takes requests as they come: there is no curriculum")


def preset_names() -> list[str]:
    """Return the presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read(preset_or_file: str | Path) -> dict[str, Any]:
    """Return the settings of a preset, or of a TOML file, as plain data with current names.

    A name without the suffix .toml is a preset's; a path is always a file.
    """
    path = Path(preset_or_file)
    if isinstance(preset_or_file, str) and path.suffix != ".toml":
        if preset_or_file not in preset_names():
            raise unknown_name("preset", preset_or_file, preset_names())
        path = PRESETS / f"{preset_or_file}.toml"
    data = _with_our_names(load_toml(path))
    data.setdefault("name", path.stem)
    return data


def build(data: dict[str, Any], over: dict[str, Any] | None = None) -> TrainSettings:
    """Validate plain data, with other settings put over it, into settings."""
    below, above = (_with_our_names(part) for part in (data, over or {}))
    return config.parse(TrainSettings, merged(below, above))


def assign(data: dict[str, Any], key: str, value: Any) -> None:
    """Set one value by its dotted path, a former name or another scheduler's included."""
    key = config.current_key(TrainSettings, key)
    other = None if config.is_setting(TrainSettings, key) else other_names.find(key)
    if other is None:
        config.assign(data, key, value)
        return
    if not other.targets:
        raise TailraceError(f"there is no setting {key} here; instead: {other.note}")
    text = f"setting {key} is called {' and '.join(other.targets)} here"
    warnings.warn(text, RenamedSettingWarning, stacklevel=1)
    for target in other.targets:
        config.assign(data, target, value)


def _with_our_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with our names for former ones and for those of other schedulers."""
    current = config.with_current_names(TrainSettings, data)
    found: dict[str, Any] = {}
    others: list[tuple[str, Any]] = []
    for name, value in current.items():
        found[name] = value
        inner = value if isinstance(value, Mapping) else {name: value}
        prefix = f"{name}." if isinstance(value, Mapping) else ""
        strange = {
            key: part
            for key, part in inner.items()
            if not config.is_setting(TrainSettings, prefix + key) and other_names.find(key)
        }
        if strange and prefix:
            found[name] = {key: part for key, part in inner.items() if key not in strange}
        elif strange:
            del found[name]
        others += [(prefix + key, part) for key, part in strange.items()]
    for key, value in others:
        assign(found, key, value)
    return found


def training_seed(run: int, number: int) -> int:
    """Return the ``number``-th index among training seeds of a run; validation has its own."""
    if number >= SEEDS_PER_RUN:
        raise TailraceError(f"a run may use {SEEDS_PER_RUN} worlds; set fewer worlds or updates")
    return run * SEEDS_PER_RUN + number


assert MAX_RUNS * SEEDS_PER_RUN <= SEEDS_PER_PURPOSE
