"""The whole loop on one cluster: record, calibrate, replay, fine-tune, prove, shadow, take over.

    python examples/loop.py -o build/loop                       # four emulated servers
    python examples/loop.py -o build/loop -b http://127.0.0.1:8000 -b http://127.0.0.1:8001 \
        --shrink 8 --rate 8                                     # two small servers of your own

Every step runs the commands a person would; they are printed as they are run, and what they say is
kept in FOLDER. FOLDER/loop.json holds the figures of all steps done so far, so that `--steps` can
go on later. The load is made up: conversations that return after some seconds, of which each turn
repeats all before. In front of your own servers your clients take its place.

Needs `pip install 'tailrace[serve,train]'`. Whatever is started listens on 127.0.0.1 and is stopped
in the end, also by Ctrl-C. docs/loop.md has the figures of such runs.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.text import Text

from tailrace.files import atomic_path, dumps
from tailrace.terminal.tables import Column, number, print_columns
from tailrace.workload import decision_log, library, request_file
from tailrace.workload.arrivals import Poisson
from tailrace.workload.catalogue import lognormal
from tailrace.workload.compose import Part, WorkloadSpec
from tailrace.workload.content import PromptPool
from tailrace.workload.sessions import Conversations, Think, UniformTurns

Json = dict[str, Any]

STEPS = ("record", "calibrate", "replay", "train", "prove", "shadow", "take_over")
#: The rule in charge until the end, and those whose live cost is predicted beside it.
RULE = "load_aware"
RULES = (RULE, "least_outstanding", "round_robin")
#: Seeds of the three loads: what is learnt from, what is predicted, and what is taken over.
RECORD_SEED, HELD_OUT_SEED, TAKE_OVER_SEED = 1, 2, 3
#: The held-out load comes so much faster than the recorded one.
HELD_OUT_RATE = 1.15
CANARY_SHARE = 0.2
#: Rules predicted to differ by more than this have to come out in the same order.
APART = 1.1
#: Pause between two turns of a conversation, median in s: short, so that a short load has several.
PAUSE_S = 2.0
STOP_S, IDLE_S, READY_S = 20.0, 60.0, 120.0


@dataclass(frozen=True)
class Plan:
    """What is to be done, where, and how much of it."""

    folder: Path
    backends: tuple[str, ...]
    """Addresses of servers; none: emulated ones are started."""
    requests: int
    """Of each load."""
    rate: float
    """Requests/s of the recorded load."""
    shrink: float
    """So many times shorter than usual are prompts and answers, for small servers."""
    speeds: str
    """Of the emulated servers."""
    probe: str
    """How the servers are calibrated: live, together or log."""
    budget_s: float
    """For measuring each server."""
    known: tuple[str, ...]
    """What is known of the servers, as options of `tailrace calibrate`."""
    updates: int
    seeds: int
    """Of the proof."""
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


# ---- commands -----------------------------------------------------------------------------------


BEGUN = time.monotonic()


def tell(text: str) -> None:
    """Say what is going on, and after how many seconds."""
    print(f"[{time.monotonic() - BEGUN:4.0f} s] {text}", file=sys.stderr, flush=True)


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """Start a tailrace command, apart from our terminal: only we may stop it."""
    tell(f"$ tailrace {shlex.join(arguments)}")
    command = [sys.executable, "-m", "tailrace.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def stop(process: subprocess.Popen[str], number_of_signal: int) -> None:
    """Ask a process we started to end, and make it if it does not."""
    if process.poll() is None:
        process.send_signal(number_of_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    # Workers of it, if any are left, are in its group, whose number is its own until we wait.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run(*arguments: str) -> str:
    """Run a tailrace command to its end and return what it printed."""
    process = spawn(*arguments)
    try:
        printed, _ = process.communicate()
    finally:
        stop(process, signal.SIGINT)
    if process.returncode:
        raise SystemExit(f"tailrace {arguments[0]} failed ({process.returncode})")
    return printed


def run_json(keep: Path, *arguments: str) -> Json:
    """Run a command with --json, keep what it printed in a file, and return it."""
    printed = run(*arguments, "--json")
    with atomic_path(keep) as temporary:
        temporary.write_text(printed, encoding="utf-8")
    found: Json = json.loads(printed)
    return found


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a tailrace command meanwhile; it is stopped in the end whatever happens."""
    process = spawn(*arguments)
    try:
        yield process
    finally:
        stop(process, signal.SIGTERM)


def awaited(process: subprocess.Popen[str], pattern: str) -> str:
    """Return what a pattern finds in the next lines a process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(pattern, line)
        if found:
            return found[1]
    raise SystemExit(f"{process.args!r} ended with {process.wait()} before it was ready")


@contextmanager
def servers(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Give the addresses of the servers; without any of one's own, emulated ones run meanwhile."""
    if plan.backends:
        yield plan.backends
        return
    with started("emulate", "--speeds", plan.speeds, "--port", "0", "--json") as emulator:
        yield tuple(json.loads(awaited(emulator, r"(\{.*\})"))["urls"])


class Router(NamedTuple):
    """A running router."""

    url: str
    admin: str
    log: Path
    """Folder of its decisions."""

    def get(self, path: str) -> Any:
        """Ask the admin listener."""
        with urllib.request.urlopen(self.admin + path, timeout=10) as answer:
            return json.load(answer)

    def reload(self) -> None:
        """Let it read its settings again."""
        tell(f"$ curl -X POST {self.admin}/reload")
        request = urllib.request.Request(self.admin + "/reload", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def left_over(self) -> Json:
        """Return what is under way by every count there is; all 0 once the router is idle."""
        status, backends = self.get("/status"), self.get("/backends")
        return {
            "in_flight": status["in_flight"],
            "waiting": status["waiting"],
            "at_replicas": sum(backend["in_flight"] for backend in backends),
            "in_ledger": sum(backend["ledger_in_flight"] for backend in backends),
        }

    def wait_until_idle(self) -> Json:
        """Wait for the last requests; return what is left over, if anything."""
        end = time.monotonic() + IDLE_S
        while any((left := self.left_over()).values()) and time.monotonic() < end:
            time.sleep(0.2)
        return left


@contextmanager
def router(urls: Sequence[str], log: Path, *options: str) -> Iterator[Router]:
    """Run the router with a decision log in front of some servers."""
    backends = [text for url in urls for text in ("-b", url)]
    with started(
        "serve", *backends, *options, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
        "--set", f"decisions.folder={log}", "--log-level", "error",
    ) as process:  # fmt: skip
        url = awaited(process, r"listening on (http://[^/]+)")
        admin = awaited(process, r"status page on (http://[^/]+)")
        yield Router(url, admin, log)


# ---- loads --------------------------------------------------------------------------------------


def conversations(shrink: float) -> WorkloadSpec:
    """Hot conversations, as `sessions-hot` but with shorter pauses, and shrunk."""

    def tokens(median: float, sigma: float, low: float, high: float) -> Any:
        least = max(2, round(low / shrink))
        return lognormal(median / shrink, sigma, least, max(least + 1, round(high / shrink)))

    content = Conversations(
        pool=PromptPool(16, tokens(500, 0.4, 200, 1200), zipf=1.0),
        first=tokens(450, 0.7, 30, 2500),
        user=tokens(90, 1.0, 5, 1500),
        output=tokens(150, 0.6, 8, 800),
        prompt_cap=round(8192 / shrink),
        turns=UniformTurns(6, 14),
        mean_turns=10.0,
        think=Think(mu=math.log(PAUSE_S), sigma=0.8),
        warmup_s=120.0,
    )
    part = Part("conversations", Poisson(), content)
    about = "Conversations with 2 s between turns."
    return WorkloadSpec("conversations", about, "a design choice", 7.0, (part,))


def write_load(plan: Plan, path: Path, seed: int, rate: float) -> Path:
    """Write the requests of one load; ``rate`` in requests/s."""
    table = library.make(conversations(plan.shrink), plan.requests, rate, seed)
    request_file.write(table, path)
    return path


def send(plan: Plan, router: Router, load: Path, keep: Path) -> Json:
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


def record(plan: Plan, urls: Sequence[str], policy: str, load: Path, folder: Path) -> Json:
    """Send a load through a router with a rule, with a decision log in ``folder``/decisions."""
    folder.mkdir(parents=True, exist_ok=True)
    with router(urls, folder / "decisions", "-p", policy) as live:
        seen = send(plan, live, load, folder / "bench.json")
        live.wait_until_idle()
    return seen


# ---- the steps ----------------------------------------------------------------------------------


def step_record(plan: Plan, urls: Sequence[str], _done: Json) -> Json:
    """Record a load that a rule routes; the log becomes a table of requests."""
    folder = plan.fresh("record")
    load = write_load(plan, folder / "load.parquet", RECORD_SEED, plan.rate)
    seen = record(plan, urls, RULE, load, folder)
    imported = run_json(
        folder / "import.json", "workload", "import", str(folder / "decisions"),
        "-o", str(folder / "mine.parquet"),
    )  # fmt: skip
    return {"policy": RULE, "rate_rps": plan.rate, "live": seen, "imported": imported}


def step_calibrate(plan: Plan, urls: Sequence[str], _done: Json) -> Json:
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


def step_replay(plan: Plan, urls: Sequence[str], done: Json) -> Json:
    """Compare simulation and record: what was calibrated on, then a load nobody has seen."""
    folder = plan.fresh("replay")
    load = write_load(plan, folder / "load.parquet", HELD_OUT_SEED, HELD_OUT_RATE * plan.rate)
    measured = {rule: record(plan, urls, rule, load, folder / rule) for rule in RULES}
    overhead = ",".join(
        f"{replica['overhead_ms']:.3f}" for replica in done["calibrate"]["replicas"]
    )
    options = ["--cluster", str(plan.cluster), "--overhead-ms", overhead]
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


def as_calibrated(plan: Plan, done: Json) -> list[str]:
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


def write_scenario(plan: Plan, path: Path, table: Path, rate: float) -> Path:
    """Write a scenario: the calibrated cluster and recorded requests, with new arrival times."""
    text = (
        f"[workload]\nname = {json.dumps(str(table))}\nrequests = {plan.requests}\n"
        f'arrivals = "poisson"  # of conversations; their turns follow as they were recorded\n'
        f"rate = {rate:g}\n\n"
    )
    with atomic_path(path) as temporary:
        temporary.write_text(text + plan.cluster.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def step_train(plan: Plan, _urls: Sequence[str], _done: Json) -> Json:
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


def step_prove(plan: Plan, _urls: Sequence[str], _done: Json) -> Json:
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
    with atomic_path(path) as temporary:
        temporary.write_text("\n".join(["[routing]", *lines, ""]), encoding="utf-8")


def step_shadow(plan: Plan, urls: Sequence[str], done: Json) -> Json:
    """Let the rule decide and ask the fine-tuned policy too, without following it."""
    folder = plan.fresh("shadow")
    load = write_load(plan, folder / "load.parquet", TAKE_OVER_SEED, plan.rate)
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
    """Return the lines of a decision log."""
    return [data for _, _, data in decision_log.records(folder)]


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


def step_take_over(plan: Plan, urls: Sequence[str], _done: Json) -> Json:
    """Give the fine-tuned policy a share of the sessions, then all, while the router runs."""
    folder = plan.fresh("take_over")
    load = write_load(plan, folder / "load.parquet", TAKE_OVER_SEED, plan.rate)
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


# ---- what came out ------------------------------------------------------------------------------


def show(found: Json) -> None:
    """Print the figures of the steps that were done."""
    console = Console()
    if "replay" in found:
        show_replay(console, found["replay"])
    if "prove" in found:
        show_proof(console, found["prove"])
    if "shadow" in found:
        show_shadow(console, found["shadow"])
    if "take_over" in found:
        show_take_over(console, found["take_over"])


def show_replay(console: Console, replay: Json) -> None:
    """Print how far the simulation is off, and whether it ranks rules as the servers do."""
    rows = [
        (load, name.upper(), replay[load][name])
        for load in ("recorded", "held_out")
        for name in ("ttft", "e2e")
        if name in replay[load]
    ]
    columns = [
        Column(("", "load"), [load.replace("_", "-") for load, _, _ in rows], left=True),
        Column(("", "latency"), [name for _, name, _ in rows], left=True),
    ]
    for at in ("mean", "p50", "p99"):
        columns += [
            Column((at, "rec. s"), [number(r[f"recorded_{at}_s"]) for _, _, r in rows]),
            Column(("", "sim. s"), [number(r[f"simulated_{at}_s"]) for _, _, r in rows]),
            Column(("", "error"), [signed(r[f"{at}_error"]) for _, _, r in rows]),
        ]
    headed(console, "Replay: simulated against recorded")
    print_columns(console, columns)
    rules = replay["rules"]
    headed(console, "Rules on the held-out load: predicted from one log, then measured")
    print_columns(
        console,
        [
            Column(("", "rule"), [row["policy"] for row in rules], left=True),
            *(
                Column((name, what), [number(row[f"{what}_{key}"]) for row in rules])
                for name, key in (("cost s", "cost_s"), ("E2E s", "e2e_s"), ("TTFT s", "ttft_s"))
                for what in ("predicted", "measured")
            ),
        ],
    )
    order = replay["ranks"]
    console.print(
        Text(
            f"Pairs predicted to differ by more than {100 * (APART - 1):.0f} %: {order['apart']}, "
            f"in the same order when measured: {order['same_order']}"
        )
    )


def show_proof(console: Console, proof: Json) -> None:
    """Print the costs on requests nobody was trained on."""
    headed(console, f"Proof: cost on unseen requests, {proof['seeds']} seeds")
    shown = proof["policies"][:8]
    print_columns(
        console,
        [
            Column(("", "policy"), [row["policy"] for row in shown], left=True),
            Column(("cost, of", proof["best_rule"]), [f"{row['cost_ratio']:.3f}" for row in shown]),
            Column(
                ("95 %", "interval"),
                ["{:.3f}-{:.3f}".format(*row["interval"]) for row in shown],
            ),
        ],
    )


def show_shadow(console: Console, shadow: Json) -> None:
    """Print what the shadow policy would have done."""
    headed(console, "Shadow")
    change_s = shadow["predicted_ttft_change_s"] or 0.0
    when = "sooner" if change_s < 0 else "later"
    console.print(
        Text(
            f"asked {shadow['asked']} times, would have chosen another replica "
            f"{shadow['differing']} times ({100 * (shadow['share'] or 0):.0f} %), with a predicted "
            f"first token {number(abs(change_s))} s {when} on average; replayed cost under it "
            f"{signed(shadow['replayed_cost_s']['change'])}"
        )
    )


def show_take_over(console: Console, taken: Json) -> None:
    """Print the same arrivals before, during and after."""
    headed(console, "Take over: the same arrivals, live")
    phases = taken["phases"]
    names = (("cost s", "cost_s"), ("TTFT s", "ttft_s_mean"), ("P99 s", "ttft_s_p99"),
             ("E2E s", "e2e_s_mean"), ("P99 s", "e2e_s_p99"))  # fmt: skip
    print_columns(
        console,
        [
            Column(("", "phase"), list(phases), left=True),
            *(
                Column(("", title), [number(phase["live"][key]) for phase in phases.values()])
                for title, key in names
            ),
            Column(
                ("decided", "by"),
                [
                    ", ".join(f"{who} {count}" for who, count in phase["decided_by"].items())
                    for phase in phases.values()
                ],
                left=True,
            ),
            Column(
                ("fell", "back"),
                [str(sum(phase["fell_back"].values())) for phase in phases.values()],
            ),
        ],
    )
    left = "nothing" if not any(taken["left_over"].values()) else str(taken["left_over"])
    console.print(
        Text(f"Cost after against before: {signed(taken['cost_change'])}. Left under way: {left}")
    )


def headed(console: Console, title: str) -> None:
    """Print a heading."""
    console.print(Text(f"\n{title}", style="bold"))


def signed(share: float) -> str:
    """Return a change as a percentage with its sign."""
    return f"{100 * share:+.1f}%"


# ---- the whole ----------------------------------------------------------------------------------

DO: Mapping[str, Callable[[Plan, Sequence[str], Json], Json]] = {
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


def loop(plan: Plan, steps: Sequence[str]) -> Json:
    """Do some steps, one after the other; return the figures of all that were ever done."""
    results = plan.folder / "loop.json"
    plan.folder.mkdir(parents=True, exist_ok=True)
    found: Json = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    missing = [s for s in STEPS[: STEPS.index(steps[0])] if s not in found]
    if missing:
        raise SystemExit(f"step {steps[0]} needs what {missing[0]} makes; do that first")
    live = any(step not in OFFLINE for step in steps)
    with servers(plan) if live else contextlib.nullcontext(()) as urls:
        for step in steps:
            tell(f"== {step.replace('_', ' ')}")
            found[step] = DO[step](plan, urls, found)
            found["plan"] = described(plan, urls) if urls else found["plan"]
            with atomic_path(results) as temporary:
                temporary.write_text(dumps(found) + "\n", encoding="utf-8")
    return found


def described(plan: Plan, urls: Sequence[str]) -> Json:
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


def asked() -> tuple[Plan, tuple[str, ...], bool]:
    """Read the arguments: what to do, which steps, and whether to print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-b", "--backend", action="append", default=[], metavar="URL",
        help="a server; may be repeated (default: emulated ones)")  # fmt: skip
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for everything made")
    add("--requests", type=int, help="of each load (default: 900, quick: 120)")
    add("--rate", type=float, help="requests/s of the recorded load (default: 32, quick: 12)")
    add("--shrink", type=float, default=1.0, help="make prompts and answers so many times shorter")
    add("--speeds", help="of the emulated servers (default: 1.5,1,1,0.6, quick: 1.3,0.7)")
    add("--calibrate", choices=("live", "together", "log"), default="live",
        help="measure one server after the other, all at once, or learn from the log")  # fmt: skip
    add("--budget", type=float, help="seconds of measuring per server (default: 20, quick: 10)")
    add("--known", default="", metavar="OPTIONS",
        help="what you know of the servers: options of `tailrace calibrate`, e.g. "
        "'--batch-cap 8 --chunk-size 2048'")  # fmt: skip
    add("--updates", type=int, help="of the fine-tuning (default: 10, quick: 1)")
    add("--seeds", type=int, help="of the proof (default: 10, quick: 2)")
    add("--steps", default=",".join(STEPS), help=f"of these, in this order: {','.join(STEPS)}")
    add("--quick", action="store_true", help="the shortest run that does everything")
    add("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    steps = tuple(given.steps.split(","))
    if not set(steps) <= set(STEPS) or list(steps) != sorted(steps, key=STEPS.index):
        parser.error(f"--steps must be some of {','.join(STEPS)}, in this order")
    quick = given.quick
    plan = Plan(
        folder=given.output,
        backends=tuple(given.backend),
        requests=given.requests or (120 if quick else 900),
        rate=given.rate or (12.0 if quick else 32.0),
        shrink=given.shrink,
        speeds=given.speeds or ("1.3,0.7" if quick else "1.5,1,1,0.6"),
        probe=given.calibrate,
        budget_s=given.budget or (10.0 if quick else 20.0),
        known=tuple(shlex.split(given.known)),
        updates=given.updates if given.updates is not None else (1 if quick else 10),
        seeds=given.seeds or (2 if quick else 10),
        quick=quick,
    )
    return plan, steps, given.json


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


def main() -> None:
    """Do what is asked and print what came out."""
    plan, steps, as_json = asked()
    signal.signal(signal.SIGTERM, _leave)  # so that everything started is stopped
    found = loop(plan, steps)
    if as_json:
        print(dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
