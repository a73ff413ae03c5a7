"""How long a live decision takes: ``python benchmarks/bench_decide.py [--json]``.

Each policy decides for a stream of requests with 1 KB bodies that share a system prompt, on a busy
cluster. ``decide`` is the decision alone, ``all`` everything the router's state costs per request:
reading the body, arrival, decision, sending, first token and end. With 1 000 requests that wait at
the router by the policy's queue, a decision is made when one ends: who goes next, and where to; an
arrival joins those that wait. The look-ahead cannot run live:
it and the learned policy choose in the same simulated states for comparison. Wall-clock time counts
what else the machine does, ``cpu`` only this thread.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from tailrace import scenario as scenarios
from tailrace.compiled import jit
from tailrace.evaluate.measure.runner import simulation
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.router.app import Router
from tailrace.router.decide.chooser import Chooser, ChooserSettings
from tailrace.router.intake.request_body import read_request
from tailrace.router.process import settle
from tailrace.router.proxy.routed_request import RoutedRequest
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.settings import BackendSettings
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.saturation import resolve_rate
from tailrace.seeds import Purpose, seeds
from tailrace.sim import engine as kernel

POLICIES = ("round_robin", "load_aware", "least_predicted_ttft", "preble", "tailrace")
SIZES = (8, 32, 128)
LOOK_SCENARIOS = ("scale-8", "scale-32")
LOOK_DECISIONS, REPEATS, EVERY, WARMUP = 150, 20, 20, 3000
LOOK_SEED = seeds(Purpose.TUNING, 1)[0]
IN_FLIGHT = 8  # per replica
WAITING = 1000
WAITING_CLIENTS = (1, 1000)
WAITING_POLICIES = ("load_aware", "tailrace")
SYSTEM = "You are a careful assistant who answers in few words. " * 12


class Clock:
    """Wall-clock and thread time of calls, s."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def call(self, work: Callable[[], Any]) -> Any:
        """Run and measure."""
        wall, cpu = time.perf_counter(), time.thread_time()
        result = work()
        self.cpu.append(time.thread_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return result

    def figures(self) -> dict[str, float]:
        """Percentiles in microseconds."""
        return {
            f"{name}_p{q}_us": float(np.percentile(values, q) * 1e6)
            for name, values in (("wall", self.wall), ("cpu", self.cpu))
            for q in (50, 99)
        }


def live(policy: str, replicas: int, decisions: int) -> dict[str, Any]:
    """Measure a policy in front of so many replicas."""
    cluster = ClusterState([BackendSettings(url=f"http://h:{i + 1}") for i in range(replicas)])
    chooser = Chooser(cluster, ChooserSettings(policy=policy))
    attempts: list[Attempt] = []
    decide, everything = Clock(), Clock()

    def one(body: bytes) -> None:
        arrival = cluster.arrive(read_request("/v1/chat/completions", {}, body))
        decision = decide.call(lambda: chooser.choose(arrival))
        attempts.append(Attempt(cluster, arrival, decision.replica, decision))
        if len(attempts) > IN_FLIGHT * replicas:
            attempt = attempts.pop(0)
            attempt.tokens(1)
            attempt.usage(250, 100, None)
            attempt.close("done")

    for i in range(decisions + IN_FLIGHT * replicas):
        if i == IN_FLIGHT * replicas:
            decide, everything = Clock(), Clock()
        body = orjson.dumps(
            {
                "model": "m",
                "stream": True,
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"Question {i}: " + "what is that? " * 22},
                ],
            }
        )
        everything.call(lambda body=body: one(body))  # type: ignore[misc]
    return {
        "policy": policy,
        "replicas": replicas,
        "decide": decide.figures(),
        "all": everything.figures(),
        "fallbacks": {k: v for k, v in chooser.counts.items() if k.startswith("fallback")},
    }


class NoEvents:
    """An event sink that does not count."""

    def decided(self, decision: Any) -> None:
        """Nothing."""

    def request_done(self, *about: Any) -> None:
        """Nothing."""

    retried = shed = request_done


def waiting(
    policy: str, replicas: int, decisions: int, queued: int, clients: int
) -> dict[str, Any]:
    """Measure arrivals and decisions while ``queued`` requests of clients wait for replicas."""
    settings = ServeSettings.model_validate(
        {
            "backends": [{"url": f"http://h:{i + 1}"} for i in range(replicas)],
            "routing": {"policy": f"{policy}+queue:max_in_flight={IN_FLIGHT},w=5"},
            "admission": {"queue": 10 * queued},
            "admin": {"listen": "off"},
        }
    )
    router = Router(settings, events=NoEvents())
    intake, running = router.intake, deque[RoutedRequest]()
    arrive, decide = Clock(), Clock()

    class Counted(RoutedRequest):
        """A request that is sent nowhere."""

        @property
        def flow(self) -> str:
            return f"client {int(self.id) % clients}"

        def _send(self) -> None:
            running.append(self)

    def arrival(i: int) -> None:
        words = "what is that? " * (10 + 37 * i % 400)
        message = {"role": "user", "content": f"Question {i}: {words}"}
        body = orjson.dumps({"model": "m", "stream": True, "messages": [message]})
        made = router.backends.cluster.arrive(read_request("/v1/chat/completions", {}, body))
        request = Counted(intake.context, b"%d" % i, "chat", made)
        arrive.call(request.start)

    def end(request: RoutedRequest) -> None:
        attempt = request.attempt
        assert attempt is not None
        attempt.tokens(1)
        attempt.usage(250, 100, None)
        request._finish("done", 200)  # which sends the next one

    def pumped(*given: Any) -> None:
        """Time the queue's part, if it sends somebody."""
        before, clock = len(running), Clock()
        clock.call(lambda: pump(*given))
        if len(running) > before:
            decide.wall += clock.wall
            decide.cpu += clock.cpu

    pump, intake.queue.pump = intake.queue.pump, pumped  # type: ignore[assignment, method-assign]
    for i in range(queued + IN_FLIGHT * replicas):
        arrival(i)
    assert len(intake.queue) == queued
    settle()  # as in a router
    arrive, decide = Clock(), Clock()
    for i in range(decisions):
        end(running.popleft())
        arrival(10**6 + i)
    assert len(decide.wall) == decisions
    return {
        "policy": policy,
        "replicas": replicas,
        "waiting": len(intake.queue),
        "clients": clients,
        "decide": decide.figures(),
        "arrive": arrive.figures(),
    }


@jit  # type: ignore[untyped-decorator]
def _repeated(fleet: Any, tables: Any, code: int, params: Any, times: int) -> int:
    """Choose again and again in one state: the call from Python would cost more than a choice."""
    chosen = 0
    for _ in range(times):
        chosen = kernel.choice(fleet, tables, 0, code, params, False)
    return chosen


def against_lookahead(scenario: str, decisions: int) -> dict[str, Any]:
    """Time a choice of the learned policy and of the look-ahead in the same simulated states."""
    given = scenarios.load(scenario)
    requests = WARMUP + decisions * EVERY
    workload = given.workload.model_copy(update={"requests": requests})
    given = given.model_copy(update={"workload": workload})
    run = simulation(given, resolve_rate(given), LOOK_SEED, lookahead=True)
    fleet, tables = run.arrays
    policies = {name: _compiled(name) for name in ("tailrace", "lookahead")}
    taken: dict[str, list[float]] = {name: [] for name in policies}
    number = 0
    while run.next_decision() is not None:
        code, params = policies["tailrace"]
        if number >= WARMUP and number % EVERY == 0:
            for name, (other, others) in policies.items():
                started = time.thread_time()
                _repeated(fleet, tables, other, others, REPEATS)
                taken[name].append((time.thread_time() - started) / REPEATS)
        run.assign(_repeated(fleet, tables, code, params, 1))
        number += 1
    us = {f"{name}_cpu_p50_us": float(np.median(values) * 1e6) for name, values in taken.items()}
    ratio = us["tailrace_cpu_p50_us"] / us["lookahead_cpu_p50_us"]
    return {"scenario": scenario, "replicas": given.cluster.size, **us, "ratio": ratio}


def _compiled(name: str) -> tuple[int, Any]:
    policy = registry.get(name)
    assert isinstance(policy, BuiltinPolicy)
    return policy.rule.code, policy.params


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--decisions", type=int, default=3000, help="measured per policy and size")
    parser.add_argument("--replicas", type=int, nargs="*", default=SIZES)
    parser.add_argument("--waiting", action="store_true", help="only with requests that wait")
    options = parser.parse_args()
    queues = [
        waiting(p, n, options.decisions, WAITING, clients)
        for n in options.replicas
        for p in WAITING_POLICIES
        for clients in WAITING_CLIENTS
    ]
    results, ratios = [], []
    if not options.waiting:
        results = [live(p, n, options.decisions) for n in options.replicas for p in POLICIES]
        ratios = [against_lookahead(name, LOOK_DECISIONS) for name in LOOK_SCENARIOS]
    if options.json:
        found = {"live": results, "waiting": queues, "against_lookahead": ratios}
        print(json.dumps({part: rows for part, rows in found.items() if rows}, indent=1))
        return
    for r in queues:
        d, a = r["decide"], r["arrive"]
        print(f"{r['policy']}, {r['replicas']} replicas, {r['waiting']} of {r['clients']} clients "
              "waiting: "
              f"the next one P50 {d['wall_p50_us']:.0f} us, P99 {d['wall_p99_us']:.0f} us (CPU "
              f"{d['cpu_p99_us']:.0f}); an arrival {a['wall_p50_us']:.0f}, "
              f"{a['wall_p99_us']:.0f} us (CPU {a['cpu_p99_us']:.0f})")  # fmt: skip
    print(f"{'policy':24}{'replicas':>9}{'decide, us: wall p50':>22}{'p99':>8}{'cpu p50':>9}"
          f"{'p99':>8}{'all p50':>9}{'p99':>8}")  # fmt: skip
    for r in results:
        d, a = r["decide"], r.get("all")
        line = (
            f"{r['policy']:24}{r['replicas']:>9}{d['wall_p50_us']:>22.1f}{d['wall_p99_us']:>8.1f}"
        )
        line += f"{d['cpu_p50_us']:>9.1f}{d['cpu_p99_us']:>8.1f}"
        if a is not None:
            line += f"{a['cpu_p50_us']:>9.1f}{a['cpu_p99_us']:>8.1f}"
        print(line)
    for r in ratios:
        print(
            f"{r['scenario']}, {r['replicas']} replicas, one choice in the same simulated states: "
            f"tailrace {r['tailrace_cpu_p50_us']:.1f} us, "
            f"look-ahead {r['lookahead_cpu_p50_us']:.1f} us, ratio {r['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
