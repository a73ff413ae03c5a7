"""Does PPO beat the rules? Training runs with three seeds each, judged on evaluation seeds.

    python benchmarks/ppo_proof.py train [--only ppo gae ...] [--seeds 3]
    python benchmarks/ppo_proof.py judge                      # in the simulator
    python benchmarks/ppo_proof.py judge --world vidur        # in real Vidur, from its environment
    python benchmarks/ppo_proof.py headroom
    python benchmarks/ppo_proof.py write --plot docs/images/ppo.png --page docs/training.md

Every run and every judged cell is kept in --folder and not repeated: all of it can be interrupted.
A run's *last* policy is judged, its best checkpoint (``/best``) and the clone it started from
(``/clone``). Intervals are paired bootstrap intervals over evaluation seeds (95 %): all policies
route the same requests. The variants named ``quick ...`` are the pairs of estimate and objective:
they start from the same clone and get about the same CPU time.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.env.reward import RewardSettings
from tailrace.evaluate.judge.compare import Comparison, compare, ratio_interval
from tailrace.evaluate.search.headroom import headroom, players
from tailrace.files import atomic_path, write_text
from tailrace.integrations.rollout_sources import ROLLOUT_SOURCES
from tailrace.learn import settings as s
from tailrace.learn.trainer import Trainer
from tailrace.saturation import with_capacity
from tailrace.seeds import Purpose, seeds

CHAT = ("slow-chat", "slow-chat-95", "uniform-chat-30", "uniform-chat-80", "uniform-chat-95")
BASELINES = ("random", "round_robin", "least_outstanding")
RULES = (*BASELINES, "lmetric", "least_predicted_ttft", "load_aware")
#: The reward of the system this one set out to better: throughput, balance and run-long averages
#: instead of the cost of requests, tightly clipped, discounted by 0.95 per decision.
ORIGINAL: dict[str, Any] = {
    "reward": {"e2e": 0.0, "ttft": 0.0, "late": 0.0, "lost": 0.0, "tail": 0.0,
               "throughput": 1.0, "balance": 1.0, "improvement": 1.0, "bound": 0.1},
    "ppo": {"discount_by": "decision", "gamma": 0.95, "gae_lambda": 0.95},
}  # fmt: skip
#: Branches of the same clone. They charge for squared waits by a setting of their own, and near
#: saturation on slow servers what a choice costs takes a minute to show.
BRANCHING: dict[str, Any] = {
    "advantage": "branching",
    "updates": 12,
    "reward": {"tail": 0.0},
    "exploration": {"pulse_factor": 1.0, "pulse_updates": 5, "pulse_decay": 0.7,
                    "pulse_patience": 0, "temperature_end": 1.0, "temperature_updates": 1},
    "branching": {"worlds": 15, "states": 40, "warmup": 2000, "replay_updates": 4, "epochs": 4,
                  "tail_weight": 0.2, "max_horizon_s": 90.0,
                  "learning_rate": 5e-4, "final_learning_rate": 5e-4},
}  # fmt: skip
#: The same recipe where the look-ahead is hard to beat, from a clone of the look-ahead alone.
LOOKAHEAD_SCENARIOS = ("mixed-speed", "hot-sessions")
LOOKAHEAD: dict[str, Any] = {
    "scenarios": list(LOOKAHEAD_SCENARIOS),
    "updates": 24,
    "reward": {"tail": 0.0},
    "ppo": {"unbalanced": 0.0, "imitation_weight": 0.01, "imitation_updates": 5},
    "exploration": {"temperature_updates": 20, "entropy_updates": 12},
    "stopping": {"rollback_ratio": 1.02},
    "evaluation": {"worlds": 2, "average_checkpoints": 0},
    "demonstrations": {"worlds": 12, "decisions": 1000, "unbalanced": 0.1,
                       "teachers": {"round_robin": 0, "least_outstanding": 0, "random": 0}},
}  # fmt: skip
#: A clone that leaves room: 1 200 labels instead of 12 000, in groups of 8 at half the step size.
FEW_LABELS: dict[str, Any] = {
    "demonstrations": {"worlds": 4, "decisions": 300},
    "ppo": {"learning_rate": 5e-4},
}
#: A clone between the two, for branches: enough labels to be sound, too few to be as good as its
#: teacher.
SOME_LABELS: dict[str, Any] = {"updates": 6, "demonstrations": {"worlds": 8, "decisions": 500}}
#: What a cache is good for shows when a session returns, some ten seconds later.
LONG_BRANCHES: dict[str, Any] = {
    "updates": 8,
    "branching": {"worlds": 12, "states": 40, "replay_updates": 8, "epochs": 6,
                  "tail_weight": 0.0, "min_horizon_s": 12.0, "max_horizon_s": 30.0,
                  "final_learning_rate": 2e-4},
}  # fmt: skip


def merged(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put changes over each other, table by table."""
    return reduce(scenarios.merged, changes, {})


#: Preset, changes, and the scenarios a variant is judged on. The original's reward is not that of
#: requests, so branches, which count the cost of requests, cannot be judged by it.
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "ppo": ("ppo", {}, CHAT),
    "gae": ("ppo", {"advantage": "gae"}, CHAT),
    "branching": ("ppo", BRANCHING, CHAT),
    "original reward": ("ppo", ORIGINAL, CHAT),
    "original reward gae": ("ppo", merged(ORIGINAL, {"advantage": "gae"}), CHAT),
    "small lookahead": ("ppo", merged(LOOKAHEAD, FEW_LABELS), LOOKAHEAD_SCENARIOS),
    "small lookahead gae": (
        "ppo", merged(LOOKAHEAD, FEW_LABELS, {"advantage": "gae"}), LOOKAHEAD_SCENARIOS
    ),
    "small lookahead original": (
        "ppo", merged(LOOKAHEAD, FEW_LABELS, ORIGINAL), LOOKAHEAD_SCENARIOS
    ),
    "lookahead branching": (
        "ppo", merged(LOOKAHEAD, BRANCHING, LONG_BRANCHES), LOOKAHEAD_SCENARIOS
    ),
    "modest lookahead": (
        "ppo", merged(LOOKAHEAD, BRANCHING, LONG_BRANCHES, SOME_LABELS), LOOKAHEAD_SCENARIOS
    ),
    "scratch": ("ppo-scratch", {}, ("uniform-chat-80", "mixed-speed")),
    "vidur": ("ppo-vidur", {}, ("uniform-chat-80",)),  # train it from Vidur's environment
}  # fmt: skip
#: Whose clone a variant starts from, judged once. The rest of ``ppo`` does not change its clone.
CLONE_OF = {
    **dict.fromkeys(("ppo", "gae", "branching", "original reward", "original reward gae"), "ppo"),
    **dict.fromkeys(("small lookahead gae", "small lookahead original"), "small lookahead"),
    **{
        name: name
        for name in ("small lookahead", "modest lookahead", "lookahead branching", "vidur")
    },
}
#: Scenarios of the preset quick, whose clone is the look-ahead's.
QUICK = ("uniform-chat-80", "mixed-speed", "hot-sessions", "hot-sessions-mixed-speed",
         "hot-sessions-overload")  # fmt: skip
#: Updates of each pair of estimate and objective that take about the same CPU time.
PAIRS = {
    ("gae", "clipped"): 36,
    ("gae", "kl_limited"): 36,
    ("grouped", "clipped"): 36,
    ("grouped", "kl_limited"): 36,
    ("branching", "clipped"): 5,
    ("branching", "kl_limited"): 5,
}
CLONE = "quick clone"
#: Nothing is chosen by evaluations: the last policy is judged.
RARELY: dict[str, Any] = {"every": 100, "worlds": 1, "baselines": ["least_outstanding"]}
VARIANTS[CLONE] = ("quick", {"updates": 0, "evaluation": RARELY}, QUICK)
for (_advantage, _objective), _updates in PAIRS.items():
    VARIANTS[f"quick {_advantage} {_objective}"] = (
        "quick",
        {"advantage": _advantage, "objective": _objective, "updates": _updates,
         "demonstrations": {"rounds": 0}, "evaluation": RARELY,
         "ppo": {"clusters": 32, "group_size": 8, "decisions": 512, "warmup": 512,
                 "greedy_warmup": True, "learning_rate": 3e-4, "learning_rate_schedule": "linear",
                 "advantage_normalisation": "group", "discount_by": "decision", "gamma": 0.998,
                 "gae_lambda": 0.99}},
        QUICK,
    )  # fmt: skip
REQUESTS, WARMUP = {"sim": 4000, "vidur": 600}, 0.05
#: What has to be known beside the figures.
NOTES = (
    (
        "The presets were chosen by validation scores and tuning seeds of one to four training "
        "seeds. Evaluation seeds below 800 were used to judge earlier versions of them; those from "
        "800 on were used once before, for the same presets with other rounding of matrix products."
    ),
    "CPU time of a resumed run is that of its last part.",
    "CPU times are of a machine that other jobs used as well.",
    "Vidur plays fewer requests and seeds, and of the scenarios only those that are listed.",
)
#: The evaluation seeds before this one were used to judge earlier versions of the presets.
FIRST_SEED = 800
IN_SIMULATOR = tuple(dict.fromkeys((*CHAT, *QUICK)))
#: Scenarios that Vidur 0.0.26 can play as they are: it has no prefix cache.
IN_VIDUR = (*CHAT, "mixed-speed")


def run_of(folder: Path, variant: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / f"{variant.replace(' ', '-')}-{seed}"


def train(folder: Path, variant: str, seed: int, jobs: int) -> None:
    """Train unless it was done before; CPU time is noted beside the run."""
    run = run_of(folder, variant, seed)
    if (run / "cpu.json").exists():
        return
    preset, over, _ = VARIANTS[variant]
    resume = (run / "state.safetensors").exists()
    settings = None if resume else s.build(s.read(preset), {**over, "seed": seed})
    if settings is not None and variant.startswith("quick") and variant != CLONE:
        train(folder, CLONE, seed, jobs)
        start = str(run_of(folder, CLONE, seed) / "last.tailrace")
        settings = settings.model_copy(update={"start": start})
    began, cpu = time.monotonic(), time.process_time()
    trainer = Trainer(run, settings, jobs=jobs, rollout_sources=ROLLOUT_SOURCES)
    trainer.run()
    rules = trainer.validation.rule_costs
    scores = {rule: round(trainer.validation.score(costs), 4) for rule, costs in rules.items()}
    (run / "rule_scores.json").write_text(json.dumps(scores) + "\n")
    told = {"wall_s": round(time.monotonic() - began, 1),
            "cpu_s": round(time.process_time() - cpu, 1)}  # fmt: skip
    (run / "cpu.json").write_text(json.dumps(told | {"resumed": resume, "jobs": jobs}) + "\n")
    print(f"{variant}, seed {seed}: {told['cpu_s']:.0f} s CPU", flush=True)


def policies_of(
    folder: Path, scenario: str, count: int, world: str, only: Sequence[str]
) -> dict[str, str]:
    """Return the trained policies to judge on a scenario: label -> file.

    Vidur is slow: of each run it gets the clone and the best checkpoint (that is what a user
    gets).
    """
    found = {}
    for variant in only:
        preset, over, judged = VARIANTS[variant]
        clone = s.build(s.read(preset), over).demonstrations.rounds - 1
        for seed in range(count):
            run = run_of(folder, variant, seed)
            if scenario not in judged or not (run / "cpu.json").exists():
                continue
            if world == "sim":
                found[f"{variant}/{seed}"] = str(run / "last.tailrace")
            if not variant.startswith("quick"):
                found[f"{variant}/{seed}/best"] = str(run / "best.tailrace")
            if CLONE_OF.get(variant) == variant:
                found[f"{variant}/{seed}/clone"] = str(
                    run / "checkpoints" / f"{clone:06d}.tailrace"
                )
    return found


def judge(
    folder: Path, world: str, name: str, count: int, traffic: int, jobs: int, only: Sequence[str]
) -> None:
    """Play all rules and policies in a scenario; cells that are there are not repeated."""
    play: Callable[..., Comparison] = compare
    if world == "vidur":
        from tailrace.integrations.vidur import compare as in_vidur

        play = in_vidur.compare
    numbers = seeds(Purpose.EVALUATION, FIRST_SEED + traffic)[FIRST_SEED:]
    scenario = loaded(name, world)
    trained = policies_of(folder, name, count, world, only)
    rules = [*RULES, "lookahead", "tailrace"] if world == "sim" else [*BASELINES, "lmetric"]
    for label, policy in {**{rule: rule for rule in rules}, **trained}.items():
        cell = folder / "cells" / world / name / f"{label.replace('/', '-')}.json"
        if cell.exists():
            continue
        found = play(scenario, [policy], numbers, jobs, reference=policy, warmup_fraction=WARMUP)
        (entry,) = found.entries
        cell.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(cell) as temporary:
            temporary.write_text(json.dumps([asdict(run) for run in entry.runs]))
        print(f"{world} {name} {label}: cost {entry.mean.cost_s:.4f} s", flush=True)


def loaded(name: str, world: str) -> Scenario:
    """Return a scenario as it is judged."""
    scenario = with_capacity(scenarios.load(name))
    if world == "vidur":
        from tailrace.integrations.vidur.limits import nearest

        scenario = with_capacity(nearest(scenario)[0])
    workload = scenario.workload.model_copy(update={"requests": REQUESTS[world]})
    return scenario.model_copy(update={"workload": workload})


def metrics(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of one run that are reported."""
    told = {"cost_s": run["cost_s"], "e2e_mean_s": run["e2e_s"]["mean"]}
    for kind in ("ttft", "tpot"):
        told |= {f"{kind}_{p}_s": run[f"{kind}_s"][p] for p in ("p50", "p90", "p99")}
    return told | {name: run[name] for name in ("requests_per_s", "imbalance")}


COMPARED = ("cost_s", "e2e_mean_s", "ttft_p90_s", "ttft_p99_s")


def results(folder: Path, count: int) -> dict[str, Any]:
    """Put all cells together: means, and ratios to each baseline with paired intervals."""
    told: dict[str, Any] = {
        "judged_on": f"evaluation seeds, from number {FIRST_SEED} on",
        "notes": NOTES,
        "requests": REQUESTS,
        "worlds": {},
    }
    for world in ("sim", "vidur"):
        for place in sorted((folder / "cells" / world).glob("*")):
            runs = {
                cell.stem: json.loads(cell.read_text()) for cell in sorted(place.glob("*.json"))
            }
            if any(rule not in runs for rule in BASELINES):
                continue
            values = {}
            for label, found in runs.items():
                told_by_run = [metrics(run) for run in found]
                values[label] = {
                    m: np.array([one[m] for one in told_by_run]) for m in told_by_run[0]
                }
            best_rule = min(set(RULES) & set(values), key=lambda r: values[r]["cost_s"].mean())
            entries = {}
            for label, measured in values.items():
                entry: dict[str, Any] = {m: round(float(v.mean()), 4) for m, v in measured.items()}
                variant, _, seed = label.removesuffix("-best").rpartition("-")
                clone = f"{CLONE_OF.get(variant)}-{seed}-clone"
                if label.startswith("quick"):
                    clone = f"{CLONE}-{label.rpartition('-')[2]}"
                entry["against"] = {
                    other: {m: _rounded(measured[m], values[other][m]) for m in COMPARED}
                    for other in dict.fromkeys((*BASELINES, best_rule, clone))
                    if label not in RULES and other in values
                }
                entries[label] = entry
            told["worlds"].setdefault(world, {})[place.name] = {
                "evaluation_seeds": len(next(iter(runs.values()))),
                "best_rule": best_rule,
                "policies": entries,
            }  # fmt: skip
    told["curves"] = {}
    for variant in VARIANTS:
        done = [k for k in range(count) if (run_of(folder, variant, k) / "cpu.json").exists()]
        if done:
            curves = {f"seed {k}": curve(run_of(folder, variant, k)) for k in done}
            told["curves"][variant] = curves
    told["cpu"] = {
        str(path.parent.name): json.loads(path.read_text())
        for path in sorted(folder.glob("*/cpu.json"))
    }
    told["pairs"] = pairs(told)
    found = folder / "headroom.json"
    told["headroom"] = json.loads(found.read_text()) if found.exists() else {}
    return told


def onto(earlier: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Put results over those of an earlier run, whose policies are no longer in the folder.

    A place that was judged on another number of evaluation seeds is replaced as a whole, because
    its policies have not routed the same requests.
    """
    for world, places in told["worlds"].items():
        kept = earlier["worlds"].setdefault(world, {})
        for name, place in places.items():
            before = kept.get(name)
            if before is not None and before["evaluation_seeds"] == place["evaluation_seeds"]:
                place["policies"] = before["policies"] | place["policies"]
            kept[name] = place
    for variant, curves in told["curves"].items():
        earlier["curves"][variant] = earlier["curves"].get(variant, {}) | curves
    for part in ("cpu", "pairs", "headroom"):
        earlier[part] |= told[part]
    return earlier | {name: told[name] for name in ("judged_on", "notes", "requests")}


def pairs(told: Mapping[str, Any]) -> dict[str, Any]:
    """Cost of each pair of estimate and objective on the quick scenarios, by seed.

    Geometric mean over the scenarios of the cost against least-outstanding's, and CPU seconds.
    """
    places = [told["worlds"].get("sim", {}).get(name, {}).get("policies", {}) for name in QUICK]
    table = {}
    for variant in [CLONE, *(f"quick {a} {o}" for a, o in PAIRS)]:
        scores, spent = [], []
        for seed in range(3):
            label = f"{variant}-{seed}"
            if all(label in place for place in places):
                ratios = [p[label]["cost_s"] / p["least_outstanding"]["cost_s"] for p in places]
                scores.append(round(float(np.exp(np.mean(np.log(ratios)))), 4))
                spent.append(told["cpu"][label.replace(" ", "-")]["cpu_s"])
        if scores:
            table[variant] = {
                "score": scores,
                "mean": round(float(np.mean(scores)), 4),
                "cpu_s": spent,
            }
    return table


def measure_headroom(folder: Path) -> None:
    """Note what the look-ahead wins over the best rule in each chat scenario (training seeds)."""
    found = {}
    for name in CHAT:
        room = headroom(
            scenarios.load(name), RewardSettings(), players(), seeds(Purpose.TRAINING, 3),
            decisions=2000,
        )  # fmt: skip
        found[name] = {"best_rule": room.best_rule, "teacher": room.teacher.policy,
                       "share": round(room.teacher.share or 0.0, 4)}  # fmt: skip
        print(name, found[name], flush=True)
    (folder / "headroom.json").write_text(json.dumps(found) + "\n")


def _rounded(found: np.ndarray, rule: np.ndarray) -> list[float | None]:
    """Ratio, and the bounds of its interval."""
    interval = ratio_interval(found, rule)
    return [None if v is None else round(float(v), 4) for v in asdict(interval).values()]


def curve(run: Path) -> dict[str, Any]:
    """Scores of a run on its validation traffic, and those of the rules."""
    with (run / "log.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("score")]
    return {
        "step": [int(row["step"]) for row in rows],
        "score": [round(float(row["score"]), 4) for row in rows],
        "baselines": json.loads((run / "rule_scores.json").read_text()),
    }


#: What pages call scenarios and variants.
SHOWN_SCENARIOS = {
    "slow-chat-95": "slow servers, 3 requests/s, 95 %",
    "uniform-chat-80": "chat, 80 %",
    "uniform-chat-95": "chat, 95 %",
    "slow-chat": "slow servers, 3 requests/s, latency 9.4 s",
    "uniform-chat-30": "chat, 30 %",
    "mixed-speed": "mixed speeds",
    "hot-sessions": "hot sessions",
}
SHOWN_VARIANTS = {
    "ppo": "`ppo`",
    "gae": "`ppo`, advantage `gae`",
    "branching": "`ppo`, advantage `branching`",
    "original reward": "`ppo`, the original's reward",
    "original reward gae": "`ppo`, the original's reward, advantage `gae`",
    "modest lookahead": "branches from 4 000 labels of the look-ahead",
    "small lookahead": "groups from 1 200 labels of the look-ahead",
    "small lookahead gae": "the same, advantage `gae`",
    "small lookahead original": "the same, the original's reward",
    "lookahead branching": "branches from 12 000 labels of the look-ahead",
    "scratch": "`ppo-scratch`",
    "vidur": "`ppo-vidur`",
}
#: At these loads hardly anything can be won (``headroom``).
LIGHT = ("slow-chat", "uniform-chat-30")
KINDS = {"-clone": "clone", "-best": "best checkpoint", "": "last policy"}


def table(told: Mapping[str, Any], world: str, count: int) -> str:
    """Markdown: cost, mean E2E, P90 and P99 TTFT in seconds, trained policies seed by seed."""
    lines = ["| scenario | policy | cost, s | mean E2E, s | P90 TTFT, s | P99 TTFT, s |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    places = told["worlds"].get(world, {})
    for name, title in SHOWN_SCENARIOS.items():
        if name not in places:
            continue
        entries, best = places[name]["policies"], places[name]["best_rule"]
        shown = {rule.replace("_", "-"): [rule] for rule in BASELINES}
        shown[f"best rule (`{best}`)"] = [best]
        for variant, said in SHOWN_VARIANTS.items():
            for end, kind in KINDS.items():
                labels = [f"{variant}-{seed}{end}" for seed in range(count)]
                if found := [label for label in labels if label in entries]:
                    shown[f"{said}: {kind}"] = found
        for row, (policy, labels) in enumerate(shown.items()):
            cells = [" / ".join(f"{entries[one][m]:.3g}" for one in labels) for m in COMPARED]
            lines.append(f"| {'' if row else title} | {policy} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def against_clones(told: Mapping[str, Any], count: int) -> str:
    """Markdown: what PPO makes of clones, cost as a ratio with its interval, seed by seed."""
    lines = ["| scenario | variant | seed | best checkpoint to its clone | to least-outstanding |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, title in SHOWN_SCENARIOS.items():
        if name in LIGHT:
            continue
        entries = told["worlds"]["sim"].get(name, {"policies": {}})["policies"]
        for variant in ("ppo", "branching", "modest lookahead"):
            clone = CLONE_OF[variant]
            for seed in range(count):
                found = entries.get(f"{variant}-{seed}-best", {"against": {}})["against"]
                if f"{clone}-{seed}-clone" in found:
                    ratios = [found[f"{clone}-{seed}-clone"], found["least_outstanding"]]
                    cells = ["{:.4f} ({:.4f}-{:.4f})".format(*r["cost_s"]) for r in ratios]
                    lines.append(
                        f"| {title} | {SHOWN_VARIANTS[variant]} | {seed} | {' | '.join(cells)} |"
                    )
    return "\n".join(lines) + "\n"


def pairs_table(told: Mapping[str, Any]) -> str:
    """Markdown: cost of each pair relative to least-outstanding's and, in brackets, its clone's.

    Geometric means over the training seeds, whose own scores stand in the third column.
    """
    lines = ["| advantage | objective | geometric mean, by seed | " + " | ".join(QUICK) +
             " | CPU, s |", "|---" * (len(QUICK) + 4) + "|"]  # fmt: skip
    places = told["worlds"]["sim"]
    for variant, row in told["pairs"].items():
        seeds_of = range(len(row["score"]))

        def ratio(place: str, variant: str = variant, seeds_of: range = seeds_of) -> float:
            entries = places[place]["policies"]
            found = [entries[f"{variant}-{k}"]["cost_s"] for k in seeds_of]
            mean = float(np.exp(np.mean(np.log(found))))
            return mean / float(entries["least_outstanding"]["cost_s"])

        named = variant.removeprefix("quick ").split()
        scores = " / ".join(f"{score:.4f}" for score in row["score"])
        ratios = [ratio(place) for place in QUICK]
        cells = [f"{r:.3f}" for r in ratios]
        spent = ""
        if variant != CLONE:
            of_clones = [ratio(place, CLONE) for place in QUICK]
            cells = [f"{r:.3f} ({r / c:.3f})" for r, c in zip(ratios, of_clones, strict=True)]
            whole = float(np.exp(np.mean(np.log(np.divide(ratios, of_clones)))))
            scores += f" ({whole:.3f})"
            named = [f"`{name}`" for name in named]
            spent = " / ".join(f"{s:.0f}" for s in row["cpu_s"])
        advantage, objective = (*named, "")[:2]
        lines.append(f"| {advantage} | {objective} | {scores} | {' | '.join(cells)} | {spent} |")
    return "\n".join(lines) + "\n"


def write_page(page: Path, tables: Mapping[str, str]) -> None:
    """Put tables into a page, between ``<!-- NAME -->`` and ``<!-- end -->``."""
    text = page.read_text(encoding="utf-8")
    for name, made in tables.items():
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        if not found:
            raise SystemExit(f"{page} has no line <!-- {name} -->")
        text = f"{before}{found}\n{made}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    write_text(page, text)


def plot(told: Mapping[str, Any], path: Path) -> None:
    """Draw the learning curves of all seeds, with the baselines as lines. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = [name for name in ("ppo", "scratch") if name in told["curves"]]
    figure, axes = pyplot.subplots(1, len(variants), figsize=(4.4 * len(variants), 3.4))
    for axis, variant in zip(np.atleast_1d(axes), variants, strict=True):
        curves = told["curves"][variant]
        for seed, found in curves.items():
            axis.plot(found["step"], found["score"], marker=".", label=seed)
        baselines = next(iter(curves.values()))["baselines"]
        for rule, style in zip(BASELINES, (":", "--", "-"), strict=True):
            axis.axhline(
                baselines[rule], color="grey", linestyle=style, label=rule.replace("_", "-")
            )
        axis.set(title=VARIANTS[variant][0], xlabel="update", ylabel="cost / least-outstanding")
        # Logarithmic: on mixed speeds random and round-robin cost many times as much.
        highest = 1.15 * max(1.3, *(baselines[rule] for rule in BASELINES))
        axis.set_yscale("log")
        axis.set_ylim(0.75, highest)
        ticks = [t for t in (0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0) if t < highest]
        axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
    np.atleast_1d(axes)[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Do one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["train", "judge", "headroom", "write"])
    parser.add_argument("--folder", type=Path, default=Path("runs/ppo-proof"))
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="some of the variants")
    parser.add_argument("--seeds", type=int, default=3, help="training seeds per variant")
    parser.add_argument("--traffic", type=int, default=8, help="evaluation seeds per scenario")
    parser.add_argument("--scenarios", nargs="*", default=[], help="judge on these alone")
    parser.add_argument("--world", choices=["sim", "vidur"], default="sim")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/results/ppo.json"))
    parser.add_argument("--onto", type=Path, help="write over these results of an earlier run")
    parser.add_argument("--plot", type=Path, help="draw the learning curves")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--tables", nargs="*", help='only these, such as "ppo pairs"')
    options = parser.parse_args()
    if options.step == "train":
        for seed in range(options.seeds):
            for variant in options.only:
                train(options.folder, variant, seed, options.jobs)
    elif options.step == "judge":
        for name in options.scenarios or (IN_VIDUR if options.world == "vidur" else IN_SIMULATOR):
            judge(
                options.folder, options.world, name, options.seeds, options.traffic,
                options.jobs, options.only,
            )  # fmt: skip
    elif options.step == "headroom":
        measure_headroom(options.folder)
    else:
        told = results(options.folder, options.seeds)
        if options.onto:
            told = onto(json.loads(options.onto.read_text()), told)
        with atomic_path(options.output) as temporary:
            temporary.write_text(json.dumps(told, indent=1) + "\n")
        tables = {f"ppo {world}": table(told, world, options.seeds) for world in told["worlds"]}
        tables["ppo clones"] = against_clones(told, options.seeds)
        if told["pairs"]:
            tables["ppo pairs"] = pairs_table(told)
        tables = {name: tables[name] for name in options.tables or tables}
        print("\n".join(tables.values()))
        if options.page:
            write_page(options.page, tables)
        if options.plot:
            plot(told, options.plot)


if __name__ == "__main__":
    main()
