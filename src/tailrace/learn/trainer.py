"""A training run: demonstrations and cloning, then updates; judged and saved as it goes.

A step is a round of cloning or an update. Everything a step does follows from the settings, the
number of the step and the state before it, so a resumed run equals an uninterrupted one.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tailrace import scenario as scenarios
from tailrace.errors import TailraceError
from tailrace.learn import starting, stopping
from tailrace.learn.curriculum import Curriculum
from tailrace.learn.exploration import Exploration
from tailrace.learn.imitate import fit, sketch
from tailrace.learn.improve.improvement import Improvement
from tailrace.learn.improve.rollout_source import (
    RolloutSource,
    RolloutSourceFactory,
    SimulatorRollouts,
    run_tasks,
)
from tailrace.learn.progress import Silent, Watcher
from tailrace.learn.run_folder import RunFolder
from tailrace.learn.samples import Samples, by_cluster_size, read_samples
from tailrace.learn.settings import TrainSettings
from tailrace.learn.validation import OwnValidation, Validation, ValidationResult
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.learn.worlds import CompiledPolicy, label
from tailrace.parallel import WorkerPool
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.architecture import SKETCH, pack
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.seeds import generator
from tailrace.sim.engine import LEARNED_CODE

__all__ = ["Outcome", "RunState", "Silent", "Trainer", "Watcher"]

#: Threads of torch: fixed, because sums in another order give other bits; and one, because two
#: wait for each other if anything else runs on the machine.
TORCH_THREADS = 1


#: Replicas of a scenario whose share of the requests is logged one by one.
SHARES_SHOWN = 16
#: Entropy of a clone, as a share of that of a uniform choice, from which on it prefers nothing, and
#: the multiple of the best rule's cost that is then explained.
NEAR_UNIFORM, WORTH_EXPLAINING = 0.9, 1.5
#: Demonstrations that a clone's entropy is measured on, of each cluster size.
ENTROPY_ROWS = 4096


@dataclass
class RunState:
    """Where a run stands."""

    step: int = 0
    best_score: float | None = None
    best_step: int = -1
    behind: int = 0
    seconds: float = 0.0
    exploration: dict[str, float] = field(default_factory=dict)
    curriculum: dict[str, int] = field(default_factory=dict)
    rule_costs: dict[str, list[float]] = field(default_factory=dict)
    rule_figures: dict[str, dict[str, float]] = field(default_factory=dict)
    capacities: list[tuple[str, float]] = field(default_factory=list)
    scenarios: list[str] = field(default_factory=list)  #: digests


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    best: Path
    best_score: float
    best_rule: tuple[str, float]
    reference: str  #: rule that costs are divided by
    health: list[stopping.Check]


class Trainer:
    """A run in its folder."""

    def __init__(
        self,
        folder: Path,
        settings: TrainSettings | None,
        jobs: int,
        watcher: Watcher | None = None,
        rollout_sources: Mapping[str, RolloutSourceFactory] = MappingProxyType({}),
    ) -> None:
        """Begin a run with settings, or resume the one in the folder without.

        ``rollout_sources`` are worlds that PPO can play in besides the simulator, by the setting
        ``env`` (integrations/rollout_sources.py has those of this package).
        """
        self.folder = RunFolder(folder)
        self.watcher = watcher or Silent()
        arrays: dict[str, Any] = {}
        self.state = RunState()
        if settings is None:
            settings = self.folder.settings()
            if self.folder.has_steps:
                arrays, numbers = self.folder.load_state(settings)
                self.state = self._run_state(numbers)
        else:
            self.folder.check_free()
        start = starting.policy_of(settings) if settings.start and not arrays else None
        if start is not None:
            settings = settings.model_copy(update={"network": starting.network_of(start, settings)})
        self.settings = settings
        self._fresh = not arrays
        torch.set_num_threads(TORCH_THREADS)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(self._seed("weights"))
        self.network = Network(settings.network, len(REPLICA_FEATURES), len(REQUEST_FEATURES))
        if start is not None:
            self.network.load_tensors(starting.tensors_of(start, settings))
        self.watcher.phase("preparing")
        self.schedule = WorldSchedule(settings, self.state.capacities)
        self.state.capacities = list(self.schedule.capacities)
        self._check_scenarios()
        self._from_files()  # before any work is done: they may be wrong
        self._first_update_seed = settings.demonstrations.rounds * settings.demonstrations.worlds
        self._source = self._rollout_source(rollout_sources)
        self.validation = self._make_validation()
        self.validation.rule_costs = {
            rule: tuple(costs) for rule, costs in self.state.rule_costs.items()
        }
        self.validation.rule_figures = self.state.rule_figures
        self.exploration = Exploration(settings.exploration)
        self.curriculum = Curriculum(settings.curriculum, settings.reward)
        self.behind = stopping.EvaluationsBehind(settings.stopping, self.state.behind)
        if self._fresh:
            self.folder.create(settings)
        self.workers = WorkerPool(jobs)
        self._demonstrations: list[Samples] = []
        self._imitation_data: list[fit.ImitationDataset] = []
        self._improvement: Improvement | None = None
        self._validation_result: ValidationResult | None = None
        self._clone_entropy = 0.0  # of the latest clone, as a share of a uniform choice's
        self._rows: list[dict[str, float]] = []
        if arrays:
            self._restore(arrays)

    # ---- the run --------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Do all steps that are left."""
        started = time.monotonic() - self.state.seconds
        self._rows = self.folder.open_logs(self.state.step)
        try:
            if not self.validation.rule_costs:
                self.watcher.phase("judging rules")
                self.validation.evaluate_rules(self.workers)
                self.state.rule_costs = {
                    rule: list(costs) for rule, costs in self.validation.rule_costs.items()
                }
                self.state.rule_figures = self.validation.rule_figures
                self.folder.write_json("baselines.json", self.validation.rule_figures)
            if self.settings.start and self.state.best_score is None:
                self._evaluate(-1)  # what it starts from may be the best there is
            while self.state.step < self.settings.steps:
                self._step(started)
            return self._finish()
        finally:
            if self._improvement is not None:
                self._improvement.close()
            self.folder.close()
            self.workers.close()

    def _step(self, started: float) -> None:
        step, rounds = self.state.step, self.settings.demonstrations.rounds
        began = time.monotonic()
        stage_before, number = self.curriculum.stage, self.curriculum.number
        if step < rounds:
            metrics: dict[str, Any] = {"phase": "clone", **self._clone(step)}
        else:
            metrics = {"phase": self.settings.learning.SECTION, **self._update(step - rounds)}
            self._rows.append({k: v for k, v in metrics.items() if isinstance(v, float)})
        if stage_before is not None:
            metrics |= {"stage": stage_before.name, "curriculum/stage": number}
            metrics["curriculum/load"] = stage_before.load
        took = max(time.monotonic() - began, 1e-9)
        metrics["steps_per_s"] = metrics["samples"] / took
        last = step + 1 == self.settings.steps
        if step < rounds or last or (step - rounds + 1) % self.settings.evaluation.every == 0:
            metrics |= self._evaluate(step)
        if step >= rounds:
            self.curriculum.after_update(metrics.get("score_vs_best_rule"))
        stage = self.curriculum.stage
        if stage is not None and self.curriculum.number != number:
            self.watcher.phase(f"curriculum: {stage.name}")
        self.state.step = step + 1
        self.state.seconds = metrics["seconds"] = time.monotonic() - started
        # First the log: what it says of a step whose state was not saved is forgotten on resuming.
        self.folder.log(step, metrics)
        if "score" in metrics:
            self.folder.log_rules(step, self.validation.rule_figures)
        self._save(last)
        self.watcher.step(step + 1, self.settings.steps, metrics)

    def _update(self, number: int) -> dict[str, float]:
        self.watcher.phase(self.settings.learning.SECTION)
        if self._improvement is None:
            self._improvement = self._start_improvement()
        rng = torch.Generator().manual_seed(self._seed("updates", number))
        if self._uses_demonstrations(number) and not self._imitation_data:
            self._collect_again(self.settings.demonstrations.rounds)
        metrics = self._improvement.update(
            number, self.curriculum.stage, rng, self._imitation_data, self.watcher.tasks
        )
        return {"loss": metrics["policy_loss"], **metrics, **self._alarms(number, metrics)}

    def _alarms(self, number: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count the requests of an update that exceeded the latency limit, and say so if wanted."""
        limit, share = self.settings.stopping, metrics.get("terms/over_limit")
        if limit.latency_limit_s is None or share is None:
            return {}
        alarms = float(round(share * metrics["samples"]))
        if alarms and limit.warns:
            self.watcher.note(
                f"update {number + 1}: requests that took longer than {limit.latency_limit_s:g} s: "
                f"{alarms:.0f}"
            )
        return {"alarms": alarms}

    def _start_improvement(self) -> Improvement:
        return Improvement(
            self.network,
            self.schedule,
            self._source,
            self.workers,
            self.exploration,
            self._first_update_seed,
        )

    def _rollout_source(self, others: Mapping[str, RolloutSourceFactory]) -> RolloutSource:
        """Return where PPO plays; raises if it cannot play there."""
        sources: dict[str, RolloutSourceFactory] = {"sim": SimulatorRollouts, **others}
        if self.settings.env not in sources:
            raise TailraceError(
                f"env = '{self.settings.env}' is played by a rollout source that this trainer was "
                "not given; see Trainer(rollout_sources=...)"
            )
        return sources[self.settings.env](self.network, self.schedule, self._first_update_seed)

    def _make_validation(self) -> Validation:
        """Return the worlds that policies are judged on: those PPO plays in, if they differ."""
        worlds, rules = self.schedule.validation(), self.settings.evaluation.baselines
        if not isinstance(self._source, OwnValidation):
            return Validation(worlds, rules)
        worlds, play = self._source.validation(worlds)
        return Validation(worlds, rules, play)

    # ---- cloning --------------------------------------------------------------------------------

    def _clone(self, round_: int) -> dict[str, float]:
        """Collect one more round of demonstrations and fit to all of them."""
        d = self.settings.demonstrations
        if round_ and not self._demonstrations:
            self._collect_again(round_)
        new = self._collect(round_)
        if round_ == 0:
            self._learn_norms(by_cluster_size(new))
        self._demonstrations = by_cluster_size([*self._demonstrations, *new])
        self.watcher.phase("cloning")
        loss = fit.imitate(
            self.network,
            self._demonstrations,
            epochs=d.epochs,
            batch_size=d.batch_size,
            learning_rate=d.learning_rate,
            temperature_s=d.temperature_s,
            rng=torch.Generator().manual_seed(self._seed("cloning", round_)),
        )
        self._clone_entropy = entropy_fraction(self.network, self._demonstrations)
        if round_ + 1 == d.rounds:
            self._keep_demonstrations()
        return {
            "loss": loss,
            "imitation_loss": loss,
            "samples": float(sum(map(len, new))),
            "clone_entropy_fraction": self._clone_entropy,
        }

    def _learn_norms(self, groups: Sequence[Samples]) -> None:
        """Learn the normaliser from the first demonstrations; a started policy keeps its own.

        It learns only that of features which its training did not have or never saw vary.
        """
        seen = [fit.ObservationBatch.of(samples) for samples in groups]
        if not self.settings.start:
            for one in seen:
                self.network.update_norms(one.replica_obs, one.request_obs, one.mask)
            return
        rows = torch.cat([one.replica_obs[one.mask] for one in seen])
        self.network.learn_new_norms(rows, torch.cat([one.request_obs for one in seen]))

    def _collect(self, round_: int, behaviour: Network | None = None) -> list[Samples]:
        """Collect the demonstrations of a round; the teacher drives until there is a student."""
        self.watcher.phase("demonstrations")
        network = behaviour or self.network
        packed = pack(network.config, network.tensors())
        student_acts = round_ > 0 or bool(self.settings.start)
        tasks = self.schedule.label_tasks(round_, packed, student_acts, self.curriculum.first)
        parts: list[Samples] = run_tasks(self.workers, label, tasks, self.watcher.tasks)
        return parts if round_ else [*parts, *self._from_files()]

    def _from_files(self) -> list[Samples]:
        """Return the demonstrations of the run's files."""
        memory = self.network.config.memory
        return [read_samples(Path(file), memory) for file in self.settings.demonstrations.files]

    def _collect_again(self, rounds: int) -> None:
        """Make the demonstrations of earlier rounds anew, each with the policy of that time."""
        parts: list[Samples] = []
        for round_ in range(rounds):
            past = Network(self.network.config, self.network.features, self.network.globals_)
            if not round_ and self.settings.start:
                start = starting.policy_of(self.settings)
                past.load_tensors(starting.tensors_of(start, self.settings))
            elif round_:
                path = self.folder.checkpoint_of(round_ - 1)
                past.load_tensors(checkpoint.read(path)[1])
            parts += self._collect(round_, past)
        self._demonstrations = by_cluster_size(parts)
        if rounds == self.settings.demonstrations.rounds:
            self._keep_demonstrations()

    def _keep_demonstrations(self) -> None:
        """After cloning, keep demonstrations only if they are mixed into updates."""
        if self._uses_demonstrations(0):
            temperature_s = self.settings.demonstrations.temperature_s
            self._imitation_data = [
                fit.ImitationDataset.of(samples, temperature_s) for samples in self._demonstrations
            ]
        self._demonstrations = []

    def _uses_demonstrations(self, number: int) -> bool:
        s = self.settings
        weights = s.learning
        wanted = weights.imitation_weight > 0 and number < weights.imitation_updates
        return wanted and s.demonstrations.rounds > 0

    # ---- judging --------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> dict[str, Any]:
        self.watcher.phase("evaluating")
        result = self.validation.evaluate(_compiled_policy(self.network), self.workers)
        self._validation_result = result
        best_rule = self.validation.best_rule
        is_best = self._keep_if_best(self.network, result, step)
        update = step - self.settings.demonstrations.rounds
        flag = uniform = False
        if update >= 0:
            flag = self.behind.update(result.score, best_rule)
            self.exploration.after_evaluation(update, result.score)
            if flag:
                self.exploration.red_flag(update)
        elif self._is_near_uniform(result):
            self.watcher.note(
                "the clone hardly prefers one replica to another (entropy "
                f"{self._clone_entropy:.0%} of a uniform choice), and an evaluation always takes "
                f"the best: one replica gets {max(result.largest_shares):.0%} of the requests. "
                f"Hence the cost of {result.score / best_rule[1]:.1f} times the best rule's; "
                "training draws its choices"
            )
            uniform = True
        rolled_back = update >= 0 and self._roll_back(result.score)
        if not uniform and not rolled_back:
            stopping.check_collapse(result, self.settings.stopping)
        return {
            "score": result.score,
            "score_vs_best_rule": result.score / best_rule[1],
            **result.figures,
            **{f"evaluation/{name}": value for name, value in result.figures.items()},
            "evaluation/score": result.score,
            **{
                f"share/{name}/replica_{k}": share
                for name, shares in result.scenario_shares.items()
                for k, share in enumerate(shares[:SHARES_SHOWN])
            },
            "largest_share": max(result.largest_shares),
            "replica_share": result.relative_shares,
            "best": int(is_best),
            "red_flag": int(flag),
            "rolled_back": int(rolled_back),
        }

    def _is_near_uniform(self, result: ValidationResult) -> bool:
        """Whether a clone does badly only because the best of nearly equal choices is taken."""
        return (
            self._clone_entropy >= NEAR_UNIFORM
            and result.score >= WORTH_EXPLAINING * self.validation.best_rule[1]
        )

    def _keep_if_best(self, network: Network, result: ValidationResult, step: int) -> bool:
        """Make a policy the best one of the run if it is; returns whether it is."""
        best = self.state.best_score
        if best is not None and result.score >= best:
            return False
        rule, rule_score = self.validation.best_rule
        scores = {
            "score": result.score,
            "best_rule": rule,
            "best_rule_score": rule_score,
            "costs_s": list(result.costs),
            "ttft_p99_s": result.ttft_p99_s,
            "e2e_mean_s": result.e2e_mean_s,
        }
        self.state.best_score, self.state.best_step = result.score, step
        self.folder.save_policy(self.folder.best, network, self.settings, step, scores)
        return True

    def _roll_back(self, score: float) -> bool:
        """Go back to the best policy if this one is far behind it; returns whether it was."""
        ratio, best = self.settings.stopping.rollback_ratio, self.state.best_score
        if ratio is None or best is None or score <= ratio * best:
            return False
        self.network.load_tensors(checkpoint.read(self.folder.best)[1])
        self._validation_result = None
        if self._improvement is not None:
            self._improvement.rolled_back()
        return True

    def _evaluate_average(self) -> None:
        """Judge the mean of the last checkpoints: what chance did to each of them cancels out."""
        paths = [self.folder.checkpoint_of(step) for step in range(self.settings.steps)]
        kept = [path for path in paths if path.exists()][
            -self.settings.evaluation.average_checkpoints :
        ]
        self.watcher.phase("averaging")
        tensors = [checkpoint.read(path)[1] for path in kept]
        average = Network(self.network.config, self.network.features, self.network.globals_)
        average.load_tensors(
            {
                name: np.stack([each[name] for each in tensors]).mean(axis=0, dtype=np.float64)
                for name in tensors[0]
            }
        )
        result = self.validation.evaluate(_compiled_policy(average), self.workers)
        self._keep_if_best(average, result, self.settings.steps - 1)

    def _finish(self) -> Outcome:
        if self._validation_result is None:
            self._validation_result = self.validation.evaluate(
                _compiled_policy(self.network), self.workers
            )
        equal = [
            (world.scenario.cluster.size, share)
            for world, share in zip(
                self.validation.worlds, self._validation_result.largest_shares, strict=True
            )
            if len({r.model_copy(update={"count": 1}) for r in world.scenario.cluster.replicas})
            == 1
            and not world.scenario.events
        ]
        if self.settings.evaluation.average_checkpoints > 1:
            self._evaluate_average()
        best_score = self.state.best_score
        if best_score is None:
            raise TailraceError("the run ended without an evaluation")
        self.sketch(self.folder.best)
        checks = stopping.health(self._rows, best_score, self.validation.best_rule, equal)
        self.folder.write_json("health.json", [asdict(check) for check in checks])
        return Outcome(
            self.folder.best,
            best_score,
            self.validation.best_rule,
            self.validation.rules[0],
            checks,
        )

    def sketch(self, path: Path) -> None:
        """Give a policy file of this run the means to make a shortlist of a large cluster."""
        self.watcher.phase("sketching")
        about, tensors = checkpoint.read(path)
        policy = Network(self.network.config, self.network.features, self.network.globals_)
        policy.load_tensors(tensors)
        tasks = self.schedule.sketch_tasks(pack(policy.config, policy.tensors()))
        seen = by_cluster_size(run_tasks(self.workers, label, tasks, self.watcher.tasks))
        if not seen:
            return  # traffic too short to see anything: it looks at all replicas
        notes = {name: about[name] for name in ("training", "seeds", "scores")}
        sketched = policy.tensors() | {SKETCH: sketch.fit(policy, seen)}
        checkpoint.save(path, policy.config, sketched, **notes)

    # ---- state ----------------------------------------------------------------------------------

    def _save(self, last: bool) -> None:
        step, rounds = self.state.step - 1, self.settings.demonstrations.rounds
        path = self.folder.checkpoint_of(step)
        if (
            step < rounds
            or last
            or (step - rounds + 1) % self.settings.evaluation.checkpoint_every == 0
        ):
            self.folder.save_policy(path, self.network, self.settings, step, {})
        self.folder.save_policy(self.folder.last, self.network, self.settings, step, {})
        self.state.behind = self.behind.count
        self.state.exploration = self.exploration.state()
        self.state.curriculum = self.curriculum.state()
        arrays = {f"network.{name}": array for name, array in self.network.tensors().items()}
        if self._improvement is not None:
            arrays |= self._improvement.state()
        self.folder.save_state(arrays, asdict(self.state), self.settings)

    def _check_scenarios(self) -> None:
        """Refuse to go on with scenarios or files that have changed since the run began."""
        files = [Path(file) for file in self.settings.demonstrations.files]
        names = [*(f"scenario {name}" for name in self.settings.scenario_names), *map(str, files)]
        now = [scenarios.digest(scenario) for scenario in self.schedule.scenarios]
        now += [_digest(file) for file in files]
        began_with = self.state.scenarios or now
        for name, digest, before in zip(names, now, began_with, strict=True):
            if digest != before:
                raise TailraceError(
                    f"{name} has changed since the run began, and a run goes on as it was begun: "
                    "put it back, or begin a new run"
                )
        self.state.scenarios = now

    def _run_state(self, numbers: dict[str, Any]) -> RunState:
        names = {part.name for part in fields(RunState)}
        # Version 0.1 kept no figures of rules.
        if not isinstance(numbers, dict) or {*numbers, "rule_figures"} != names:
            raise TailraceError(
                f"the state of {self.folder.path} was saved by another version of Tailrace; go on "
                "with that one, or begin a new run"
            )
        return RunState(**numbers)

    def _restore(self, arrays: dict[str, Any]) -> None:
        prefix = "network."
        if len(arrays[f"{prefix}replica_norm.mean"]) != len(REPLICA_FEATURES):
            raise TailraceError(
                f"{self.folder.path} was trained by a version of Tailrace with other features; go "
                "on with that one, or begin a new run with --from and its best.tailrace"
            )
        self.network.load_tensors(
            {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
        )
        if self.state.exploration:
            self.exploration.restore(self.state.exploration)
        self.curriculum.restore(self.state.curriculum)
        if self.state.step > self.settings.demonstrations.rounds:
            self._improvement = self._start_improvement()
            self._improvement.restore(arrays)

    def _seed(self, stream: str, number: int = 0) -> int:
        rng = generator(self.settings.seed, f"{stream}-{number}")
        return int(rng.integers(2**62))


def _compiled_policy(network: Network) -> CompiledPolicy:
    return CompiledPolicy(LEARNED_CODE, pack(network.config, network.tensors()))


@torch.no_grad()
def entropy_fraction(network: Network, demonstrations: Sequence[Samples]) -> float:
    """Return the mean entropy of a policy's choices, as a share of that of a uniform choice."""
    total = most = 0.0
    for samples in demonstrations:
        rows = samples.head(ENTROPY_ROWS)
        mask = torch.from_numpy(rows.mask)
        logits, _, _ = network.step(
            torch.from_numpy(rows.replica_obs),
            torch.from_numpy(rows.request_obs),
            mask,
            torch.from_numpy(rows.memory),
            torch.from_numpy(rows.prior).float(),
        )
        log_policy = torch.log_softmax(logits, -1).masked_fill(~mask, 0.0)
        total -= float((log_policy.exp() * log_policy * mask).sum())
        most += float(mask.sum(-1).double().log().sum())
    return total / max(most, 1e-9)


def _digest(file: Path) -> str:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise TailraceError(f"cannot read {file}: {error.strerror or error}") from None
