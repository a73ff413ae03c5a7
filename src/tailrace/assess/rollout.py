"""From a recording to a policy in charge: calibrate, replay, fine-tune, prove, shadow, take over.

Every step runs the commands a person would; they are printed as they are run, and what they print
is kept in a folder. ``loop.json`` in it holds the figures of all steps done so far, so that
later steps can be done another time.
"""

import contextlib
import itertools
import json
import math
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace.assess.live import RouterProcess, router, servers
from tailrace.assess.loads import write_load
from tailrace.assess.processes import Json, run, run_json, tell
from tailrace.errors import TailraceError
from tailrace.files import dumps, write_text
from tailrace.workload import decision_log

STEPS = ("record", "calibrate", "replay", "train", "prove", "shadow", "take_over")
#: The rule in charge until the end, and those whose live cost is predicted beside it.
RULE = "load_aware"
RULES = (RULE, "least_outstanding", "round_robin")
#: Seeds of the three loads: what is learnt from, what is predicted, and what is taken over.
RECORD_SEED, HELD_OUT_SEED, TAKE_OVER_SEED = 1, 2, 3
#: The held-out load comes this much faster than the recorded one.
HELD_OUT_RATE = 1.15
CANARY_SHARE = 0.2
#: Rules predicted to differ by more than this have to come out in the same order.
APART = 1.1


@dataclass(frozen=True)
class RolloutPlan:
    """What is to be done, where, and how much of it."""

    folder: Path
    backends: tuple[str, ...]
    """Addresses of servers; none: emulated ones are started."""
    requests: int
    """Requests of each load."""
    rate: float
    """Requests/s of the recorded load."""
    shrink: float
    """How many times shorter prompts and answers are than usual, for small servers."""
    speeds: str
    """Relative speeds of the emulated servers, with commas between them."""
    probe: str
    """How the servers are calibrated: live, together or log."""
    budget_s: float
    """Seconds of measuring per server."""
    known: tuple[str, ...]
    """What is known of the servers, as options of `tailrace calibrate`."""
    updates: int
    seeds: int
    """Seeds of the proof."""
    quick: bool
    salt: Iterator[int] = field(default_factory=lambda: itertools.count(time.time_ns() % 10**9))
    """Numbers that make the texts of each load new to the servers' caches."""

    @property
    def cluster(self) -> Path:
        """The calibrated cluster."""
        return self.folder / "calibrate" / "cluster.toml"

    @property
    def policy(self) -> Path:
        """The fine-tuned policy."""
        return self.folder / "train" / "mine.tailrace"

    def fresh(self, step: str) -> Path:
        """Return the folder of a step, empty."""
        folder = self.folder / step
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def send(plan: RolloutPlan, router: RouterProcess, load: Path, keep: Path) -> Json:
    """Send a load at its own pace; return what the clients saw."""
    found = run_json(
        keep, "bench", "--url", router.url, "--workload", str(load),
        "--requests", str(plan.requests), "--arrivals", "trace", "--api", "chat",
        "--salt", str(next(plan.salt)),
    )  # fmt: skip
    summary: Json = found["summary"]
    if summary["failed"]:
        tell(f"{summary['failed']} requests failed: {summary['failures']}")
    names = (
        "requests", "failed", "cost_s", "ttft_s_mean", "ttft_s_p50", "ttft_s_p99", "e2e_s_mean",
        "e2e_s_p50", "e2e_s_p99", "prefix_hit_rate", "requests_per_s", "lateness_s_p99",
    )  # fmt: skip
    return {name: summary[name] for name in names}


def record(plan: RolloutPlan, urls: Sequence[str], policy: str, load: Path, folder: Path) -> Json:
    """Send a load through a router with a rule, with a decision log in ``folder``/decisions."""
    folder.mkdir(parents=True, exist_ok=True)
    with router(urls, folder / "decisions", "-p", policy) as live:
        seen = send(plan, live, load, folder / "bench.json")
        live.wait_until_idle()
    return seen


def step_record(plan: RolloutPlan, urls: Sequence[str], _done: Json) -> Json:
    """Record a load that a rule routes; the log becomes a table of requests."""
    folder = plan.fresh("record")
    load = write_load(folder / "load.parquet", plan.requests, plan.rate, RECORD_SEED, plan.shrink)
    seen = record(plan, urls, RULE, load, folder)
    imported = run_json(
        folder / "import.json", "workload", "import", str(folder / "decisions"),
        "-o", str(folder / "mine.parquet"),
    )  # fmt: skip
    return {"policy": RULE, "rate_rps": plan.rate, "live": seen, "imported": imported}


def step_calibrate(plan: RolloutPlan, urls: Sequence[str], _done: Json) -> Json:
    """Measure the servers, or learn from the log what they are like."""
    folder = plan.fresh("calibrate")
    if plan.probe == "log":
        source = ["--log", str(plan.folder / "record" / "decisions")]
    else:
        source = [*urls, "--budget", f"{plan.budget_s:g}"]
        source += ["--together"] if plan.probe == "together" else []
    source += plan.known
    found = run_json(folder / "calibration.json", "calibrate", *source, "-o", str(plan.cluster))
    return {
        "how": plan.probe,
        "replicas": [
            {
                "name": replica["name"],
                "cost": replica["replica"]["cost"],
                "overhead_ms": replica["overhead_ms"],
                "slowdown_together": replica["interference"],
                "warnings": replica["warnings"],
            }
            for replica in found["replicas"]
        ],
    }


def step_replay(plan: RolloutPlan, urls: Sequence[str], done: Json) -> Json:
    """Compare simulation and record: what was calibrated on, then a load nobody has seen."""
    folder = plan.fresh("replay")
    load = write_load(
        folder / "load.parquet",
        plan.requests,
        HELD_OUT_RATE * plan.rate,
        HELD_OUT_SEED,
        plan.shrink,
    )
    measured = {rule: record(plan, urls, rule, load, folder / rule) for rule in RULES}
    options = as_calibrated(plan, done)
    rules = [text for rule in RULES for text in ("-p", rule)]
    same = run_json(
        folder / "recorded.json", "replay", str(plan.folder / "record" / "decisions"), *options,
        "-p", RULE,
    )  # fmt: skip
    other = run_json(
        folder / "held_out.json", "replay", str(folder / RULE / "decisions"), *options, *rules
    )
    predicted = {outcome["policy"]: outcome["summary"] for outcome in other["outcomes"]}
    table = [
        {
            "policy": rule,
            "predicted_cost_s": predicted[rule]["cost_s"],
            "measured_cost_s": measured[rule]["cost_s"],
            "predicted_e2e_s": predicted[rule]["e2e_s"]["mean"],
            "measured_e2e_s": measured[rule]["e2e_s_mean"],
            "predicted_ttft_s": predicted[rule]["ttft_s"]["mean"],
            "measured_ttft_s": measured[rule]["ttft_s_mean"],
        }
        for rule in RULES
    ]
    return {
        "recorded": errors(same["fidelity"]),
        "held_out": errors(other["fidelity"]),
        "held_out_rate_rps": HELD_OUT_RATE * plan.rate,
        "rules": table,
        "ranks": ranks(
            {row["policy"]: row["predicted_cost_s"] for row in table},
            {row["policy"]: row["measured_cost_s"] for row in table},
        ),
    }


def as_calibrated(plan: RolloutPlan, done: Json) -> list[str]:
    """Return the options of a replay on the calibrated servers."""
    overhead = [f"{replica['overhead_ms']:.3f}" for replica in done["calibrate"]["replicas"]]
    return ["--cluster", str(plan.cluster), "--overhead-ms", ",".join(overhead)]


def errors(fidelity: Json) -> Json:
    """Return recorded and simulated latencies, s, and the errors of the latter as shares."""
    found: Json = {
        "recorded_hit_rate": fidelity["recorded_hit_rate"],
        "simulated_hit_rate": fidelity["simulated_hit_rate"],
    }
    for latency in fidelity["latencies"]:
        found[latency["name"].lower()] = {
            name: latency[name]
            for at in ("mean", "p50", "p99")
            for name in (f"recorded_{at}_s", f"simulated_{at}_s", f"{at}_error")
        }
    return found


def ranks(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Json:
    """Count the pairs of policies predicted to be clearly apart, and those that came out so.

    Costs in s by policy.
    """
    pairs: list[Json] = []
    for better, worse in itertools.permutations(predicted, 2):
        if predicted[worse] > APART * predicted[better]:
            pairs.append(
                {
                    "better": better,
                    "worse": worse,
                    "predicted_ratio": predicted[worse] / predicted[better],
                    "measured_ratio": measured[worse] / measured[better],
                }
            )
    same = sum(pair["measured_ratio"] > 1 for pair in pairs)
    return {"apart": len(pairs), "same_order": same, "pairs": pairs}


def write_scenario(plan: RolloutPlan, path: Path, table: Path, rate: float) -> Path:
    """Write a scenario: the calibrated cluster and recorded requests, with new arrival times."""
    text = (
        f"[workload]\nname = {json.dumps(str(table))}\nrequests = {plan.requests}\n"
        f'arrivals = "poisson"  # of conversations; their turns follow as they were recorded\n'
        f"rate = {rate:g}\n\n"
    )
    write_text(path, text + plan.cluster.read_text(encoding="utf-8"))
    return path


def step_train(plan: RolloutPlan, _urls: Sequence[str], _done: Json) -> Json:
    """Fine-tune the shipped policy on the calibrated cluster with the recorded requests."""
    folder = plan.fresh("train")
    table = plan.folder / "record" / "mine.parquet"
    scenarios = []
    for name, factor in (("past", 1.0), ("past-busy", 1.3)):
        path = write_scenario(plan, folder / f"{name}.toml", table, factor * plan.rate)
        scenarios += ["--scenario", str(path)]
    # The log is short: decisions have to be looked at before it is over.
    sets = {"branching.warmup": plan.requests // 3, "branching.min_horizon_s": 4}
    if plan.quick:
        sets |= {"branching.worlds": 4, "branching.states": 12, "evaluation.worlds": 2}
    options = [text for name, value in sets.items() for text in ("--set", f"{name}={value}")]
    started_at = time.monotonic()
    outcome = run_json(
        folder / "outcome.json", "train", "--from", "tailrace", *scenarios,
        "--updates", str(plan.updates), *options, "-o", str(folder / "run"),
    )  # fmt: skip
    shutil.copyfile(folder / "run" / "best.tailrace", plan.policy)
    return {
        "updates": plan.updates,
        "took_s": time.monotonic() - started_at,
        "score": outcome["best_score"],
        "best_rule": outcome["best_rule"],
    }


def step_prove(plan: RolloutPlan, _urls: Sequence[str], _done: Json) -> Json:
    """Judge the fine-tuned policy, the shipped one and rules on requests none of them has seen."""
    folder = plan.fresh("prove")
    run(
        "workload", "import", str(plan.folder / "replay" / RULE / "decisions"),
        "-o", str(folder / "unseen.parquet"),
    )  # fmt: skip
    scenario = write_scenario(
        plan, folder / "unseen.toml", folder / "unseen.parquet", HELD_OUT_RATE * plan.rate
    )
    opponents = RULES if plan.quick else ("rules",)
    found = run_json(
        folder / "evaluation.json", "evaluate", "--scenario", str(scenario),
        "-p", str(plan.policy), "-p", "tailrace",
        *(text for name in opponents for text in ("--against", name)),
        "--seeds", str(plan.seeds), "--requests", str(plan.requests),
    )  # fmt: skip
    return {
        "best_rule": found["best_single"],
        "seeds": len(found["seeds"]),
        "policies": [
            {
                "policy": policy["policy"],
                "cost_ratio": policy["vs_best_single"]["cost"],
                "interval": policy["vs_best_single"]["intervals"]["cost"],
            }
            for policy in found["policies"]
        ],
    }


def write_routing(path: Path, **routing: Any) -> None:
    """Write the router's settings: who decides, who else, and for whom."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in routing.items()]
    tell(f"# {path}: [routing] {', '.join(lines)}")
    write_text(path, "\n".join(["[routing]", *lines, ""]))


def step_shadow(plan: RolloutPlan, urls: Sequence[str], done: Json) -> Json:
    """Let the rule decide and ask the fine-tuned policy too, without following it."""
    folder = plan.fresh("shadow")
    load = write_load(
        folder / "load.parquet", plan.requests, plan.rate, TAKE_OVER_SEED, plan.shrink
    )
    settings = folder / "router.toml"
    write_routing(settings, policy=RULE, shadow=str(plan.policy))
    options = ("--config", str(settings), "--cluster", str(plan.cluster))
    with router(urls, folder / "decisions", *options) as live:
        seen = send(plan, live, load, folder / "bench.json")
        live.wait_until_idle()
        counted = live.get("/status")["shadow"]
    found = run_json(
        folder / "replay.json", "replay", str(folder / "decisions"), *as_calibrated(plan, done),
        "-p", RULE, "-p", str(plan.policy),
    )  # fmt: skip
    cost_s = {outcome["policy"]: outcome["summary"]["cost_s"] for outcome in found["outcomes"]}
    rule_s, mine_s = cost_s[RULE], cost_s[str(plan.policy)]
    return {
        "live": seen,
        "counted": counted,
        **disagreement(folder / "decisions"),
        "replayed_cost_s": {"rule": rule_s, "mine": mine_s, "change": mine_s / rule_s - 1},
    }


def decisions(folder: Path) -> list[Json]:
    """Return the lines of a decision log, but for those of counting tokens, as the load does."""
    lines = (data for _, _, data in decision_log.records(folder))
    return [data for data in lines if data.get("kind") != "tokenize"]


def disagreement(folder: Path) -> Json:
    """Return how often the shadow policy would have chosen another replica, and with what hope."""
    asked = [line for line in decisions(folder) if line["shadow"] is not None]
    differing = [line for line in asked if line["shadow"] != line["replica"]]
    sooner = [line["shadow_ttft_s"] for line in differing]
    return {
        "asked": len(asked),
        "differing": len(differing),
        "share": len(differing) / len(asked) if asked else None,
        "predicted_ttft_change_s": sum(sooner) / len(sooner) if sooner else None,
    }


def step_take_over(plan: RolloutPlan, urls: Sequence[str], _done: Json) -> Json:
    """Give the fine-tuned policy a share of the sessions, then all, while the router runs."""
    folder = plan.fresh("take_over")
    load = write_load(
        folder / "load.parquet", plan.requests, plan.rate, TAKE_OVER_SEED, plan.shrink
    )
    settings, mine = folder / "router.toml", str(plan.policy)
    phases: dict[str, Json] = {
        "before": {"policy": RULE},
        "canary": {"policy": RULE, "canary": mine, "canary_share": CANARY_SHARE},
        "after": {"policy": mine},
    }
    found: Json = {}
    write_routing(settings, **phases["before"])
    options = ("--config", str(settings), "--cluster", str(plan.cluster))
    with router(urls, folder / "decisions", *options) as live:
        begun: list[float] = []
        for name, routing in phases.items():
            if begun:
                write_routing(settings, **routing)
                live.reload()
            begun.append(time.time())
            found[name] = {"live": send(plan, live, load, folder / f"{name}.json")}
            left = live.wait_until_idle()
    lines = decisions(folder / "decisions")
    for name, since, until in zip(phases, begun, [*begun[1:], math.inf], strict=True):
        found[name] |= deciders(line for line in lines if since <= line["arrived"] < until)
    change = found["after"]["live"]["cost_s"] / found["before"]["live"]["cost_s"] - 1
    return {"phases": found, "cost_change": change, "left_over": left}


def deciders(lines: Iterator[Json]) -> Json:
    """Return who decided, and how often the fallback rule did instead, by cause."""
    asked: Counter[str] = Counter()
    fell_back: Counter[str] = Counter()
    for line in lines:
        asked[Path(line["policy"]).stem] += 1
        if line["fell_back"]:
            fell_back[line["fell_back"]] += 1
    return {"decided_by": dict(asked), "fell_back": dict(fell_back)}


DO: Mapping[str, Callable[[RolloutPlan, Sequence[str], Json], Json]] = {
    "record": step_record,
    "calibrate": step_calibrate,
    "replay": step_replay,
    "train": step_train,
    "prove": step_prove,
    "shadow": step_shadow,
    "take_over": step_take_over,
}
#: Steps that need no servers.
OFFLINE = ("train", "prove")


def roll_out(plan: RolloutPlan, steps: Sequence[str]) -> Json:
    """Do some steps, one after the other; return the figures of all that were ever done."""
    results = plan.folder / "loop.json"
    plan.folder.mkdir(parents=True, exist_ok=True)
    found: Json = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    missing = [s for s in STEPS[: STEPS.index(steps[0])] if s not in found]
    if missing:
        raise TailraceError(f"step {steps[0]} needs what {missing[0]} makes; do that first")
    live = any(step not in OFFLINE for step in steps)
    with servers(plan.backends, plan.speeds) if live else contextlib.nullcontext(()) as urls:
        for step in steps:
            tell(f"== {step.replace('_', ' ')}")
            found[step] = DO[step](plan, urls, found)
            found["plan"] = described(plan, urls) if urls else found["plan"]
            write_text(results, dumps(found) + "\n")
    return found


def described(plan: RolloutPlan, urls: Sequence[str]) -> Json:
    """Return what was run, and on what machine."""
    return {
        "servers": "given" if plan.backends else f"emulated, speeds {plan.speeds}",
        "count": len(urls),
        "requests": plan.requests,
        "rate_rps": plan.rate,
        "shrink": plan.shrink,
        "calibrated": plan.probe,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }
