"""What it costs that several routers know nothing of each other: ``bench_routers.py [--json]``.

1, 2 and 4 routers share the replicas of a scenario. Each has a state of its own and reads the
replicas' metrics every half second, each at moments of its own. With ``--spread request`` every
request meets a router by chance, the worst case; with ``session`` all turns of a conversation meet
the same one, as behind a balancer that hashes by session. With ``--books shared`` the routers are
workers of one (``tailrace serve --processes``) and read each other's state. With ``--books store``
they run on several machines, tell each other what changes every STORE_S, which arrives STORE_LAG_S
later, and read the replicas' KV events, EVENT_LAG_S late; ``store-alone`` is the same without
events. Replicas are emulated and time is virtual, so the figures depend on nothing but the seeds.
Each policy serves identical arrivals; ``loss`` is the mean time to first token over that of one
router with the same policy.
"""

import argparse
import heapq
import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tailrace import scenario as scenarios
from tailrace.bench.prompts import Prompt, PromptWriter, Spoken, spoken
from tailrace.config import Replica, Scenario
from tailrace.emulate import tokenizer
from tailrace.emulate.job import Job
from tailrace.emulate.metrics import Meter
from tailrace.emulate.replica import EmulatedReplica
from tailrace.net.kv_events import Event
from tailrace.router.decide.chooser import Chooser, ChooserSettings
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.settings import BackendSettings
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.exact_caches import ExactCaches
from tailrace.router.state.peers import Peers
from tailrace.router.state.shared_state import new_shared_state
from tailrace.saturation import resolve_rate
from tailrace.view.devices import resolved
from tailrace.workload.library import from_settings
from tailrace.workload.table import RequestTable

POLICIES = ("tailrace", "load_aware", "least_outstanding")
ROUTERS = (1, 2, 4)
SCRAPE_S = 0.5
#: How often routers tell each other what has changed, and how long that and events take, s.
STORE_S, STORE_LAG_S, EVENT_LAG_S = 0.01, 0.002, 0.005
#: How long a response's tokens take to be learned after its end, s.
TOKENIZE_S = 0.01
#: The first part of the requests fills caches and is not counted.
WARM_UP = 0.2


class _Timer:
    def __init__(self, entry: list[Any]) -> None:
        self._entry = entry

    def cancel(self) -> None:
        self._entry[2] = None


class Clock:
    """Virtual time. At one moment: timers in order, then what is soon."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[list[Any]] = []
        self._soon: list[Callable[[], None]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Emulated seconds since the start."""
        return self._now

    def call_at(self, at_s: float, callback: Callable[[], None]) -> _Timer:
        """Call back at ``at_s``."""
        entry = [max(at_s, self._now), next(self._order), callback]
        heapq.heappush(self._timers, entry)
        return _Timer(entry)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back once everything of this moment has happened."""
        self._soon.append(callback)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Let time pass as long as something is to come."""
        while goes_on():
            while self._timers and self._timers[0][0] <= self._now:
                callback = heapq.heappop(self._timers)[2]
                if callback is not None:
                    callback()
            if self._soon:
                soon, self._soon = self._soon, []
                for callback in soon:
                    callback()
            elif self._timers:
                self._now = self._timers[0][0]


class World:
    """Routers, replicas and the requests of a table."""

    def __init__(
        self, scenario: Scenario, table: RequestTable, policy: str, routers: int, seed: int,
        by_session: bool, books: str, *, told: bool = True, learn: bool = True,
    ) -> None:  # fmt: skip
        """``books``: own, shared, store or store-alone. ``told``: the routers know how fast
        the servers are; ``learn``: if not, they find out."""
        self._clock = Clock()
        servers = resolved(scenario.cluster)
        self._replicas = [
            EmulatedReplica(i, server, self._clock, Meter(1.0)) for i, server in enumerate(servers)
        ]
        backends = [
            BackendSettings(
                url=f"http://h:{i + 1}", server=s if told else Replica(num_blocks=s.num_blocks)
            )
            for i, s in enumerate(servers)
        ]
        settings = ChooserSettings(policy=policy, limit_ms=1e6)
        self._routers = []
        shared = new_shared_state(backends, routers) if books == "shared" else None
        self._peers: list[Peers] = []
        self._caches: list[ExactCaches] = []
        for number in range(routers):
            worker_view = shared.of(number) if shared is not None else None
            if books.startswith("store"):
                worker_view = new_shared_state(backends, peers=routers).of(0)
            cluster = ClusterState(
                backends, self._clock.now, seed=1000 * seed + number, worker_view=worker_view,
                learn_speeds=learn,
            )  # fmt: skip
            self._routers.append((cluster, Chooser(cluster, settings, warm_up=False)))
            self._clock.call_at(number * SCRAPE_S / routers, partial(self._scrape, cluster))
            if books.startswith("store"):
                self._connect(cluster, number, number * STORE_S / routers)
            if books == "store":
                self._read_events(cluster)
        if self._caches:
            for number, replica in enumerate(self._replicas):
                replica.tell(partial(self._tell_events, number))
        self._chance = random.Random(seed)
        self._by_session = by_session
        self._table, self._writer = table, PromptWriter(table)
        self._children: dict[int, list[int]] = {}
        self._so_far: dict[int, Spoken] = {}
        self._left = len(table.rows)
        self.arrived_s = np.zeros(len(table.rows))
        self.ttft_s = np.zeros(len(table.rows))
        self.e2e_s = np.zeros(len(table.rows))
        for row, about in enumerate(table.rows):
            if about["parent"] >= 0:
                self._children.setdefault(int(about["parent"]), []).append(row)
            else:
                self._clock.call_at(float(about["arrival_s"]), partial(self._arrive, row))

    def run(self) -> None:
        """Serve all requests."""
        self._clock.run(lambda: self._left > 0)

    def _connect(self, cluster: ClusterState, number: int, first_s: float) -> None:
        """Let a router tell others what it does."""
        peers = Peers(cluster, number)
        self._peers.append(peers)
        self._clock.call_at(first_s, partial(self._tell_peers, peers))

    def _read_events(self, cluster: ClusterState) -> None:
        """Let a router read the replicas' KV events."""
        caches = ExactCaches(cluster, 1 << 18)
        for replica in range(len(self._replicas)):
            caches.begin(replica)
            caches.restarted(replica)
            caches.current(replica)
        self._caches.append(caches)

    def _tell_peers(self, peers: Peers) -> None:
        now = self._clock.now()
        for message in peers.collect(now):
            for other in self._peers:
                if other is not peers:
                    self._clock.call_at(
                        now + STORE_LAG_S, partial(other.apply, message, now + STORE_LAG_S)
                    )
        peers.cluster.count_members()
        self._clock.call_at(now + STORE_S, partial(self._tell_peers, peers))

    def _tell_events(self, replica: int, events: list[Event]) -> None:
        for caches in self._caches:
            self._clock.call_at(
                self._clock.now() + EVENT_LAG_S, partial(caches.apply, replica, events)
            )

    def _learn_tokens(self, attempt: Attempt, prompt: str) -> None:
        """Learn the tokens of a prompt, as PromptLearner does live."""
        caches = next(c for c in self._caches if c.cluster is attempt.cluster)
        ids = np.frombuffer(tokenizer.text_tokens(prompt), "<u4").astype(np.int64)
        runs, ends = attempt.arrival.runs, np.arange(1, ids.size + 1) / ids.size
        caches.learn(attempt.replica, "", runs.keys[:-1], runs.units[:-1], ids, ends)

    def _scrape(self, cluster: ClusterState) -> None:
        for number, replica in enumerate(self._replicas):
            replica.catch_up()
            cluster.scraped(number, replica.waiting, replica.running, replica.kv_used)
        self._clock.call_at(self._clock.now() + SCRAPE_S, partial(self._scrape, cluster))

    def _arrive(self, row: int) -> None:
        about = self._table.rows[row]
        session = int(about["session"])
        chance = self._chance
        if self._by_session and session >= 0:
            chance = random.Random(session)
        cluster, chooser = chance.choice(self._routers)
        prompt = self._writer.write(row, self._so_far.get(session))
        text = prompt.text().decode()
        name = str(session) if session >= 0 else None
        asked = RequestBody("completion", text=text, streams=True, session=name)
        arrival = cluster.arrive(asked, keep=True)
        decision = chooser.choose(arrival)
        assert decision is not None
        attempt = Attempt(cluster, arrival, decision.replica, decision)
        tokens = int(about["output_tokens"])
        answer = tokenizer.words(row, 0, tokens)
        self._replicas[decision.replica].submit(
            tokenizer.text_tokens(text), answer,
            partial(self._told, row, attempt, prompt, text, self._clock.now()),
        )  # fmt: skip

    def _told(
        self, row: int, attempt: Attempt, prompt: Prompt, text: str, arrived_s: float, job: Job,
        last: bool,
    ) -> None:  # fmt: skip
        attempt.tokens(1)
        if not last:
            return
        now = self._clock.now()
        assert job.first_s is not None
        attempt.usage(job.prompt_tokens, job.output_tokens, job.cached_tokens)
        attempt.close("done")
        if self._caches:
            self._clock.call_at(now + TOKENIZE_S, partial(self._learn_tokens, attempt, text))
        self.arrived_s[row] = arrived_s
        self.ttft_s[row] = job.first_s - arrived_s
        self.e2e_s[row] = now - arrived_s
        session = int(self._table.rows[row]["session"])
        if session >= 0:
            self._so_far[session] = spoken(prompt, job.answer, job.output_tokens)
        for child in self._children.get(row, ()):
            think_s = float(self._table.rows[child]["think_s"])
            self._clock.call_at(now + think_s, partial(self._arrive, child))
        self._left -= 1


def measure(
    scenario: Scenario, policy: str, spread: str, books: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Serve the same requests by 1, 2 and 4 routers."""
    found: dict[str, Any] = {}
    rate = resolve_rate(scenario)
    workload = scenario.workload.model_copy(update={"requests": options.requests})
    for routers in options.routers:
        ttft, e2e = [], []
        for seed in range(options.seeds):
            table = from_settings(workload, rate, options.seed + seed)
            world = World(scenario, table, policy, routers, seed, spread == "session", books)
            world.run()
            counted = slice(int(WARM_UP * len(table.rows)), None)
            ttft.append(world.ttft_s[counted])
            e2e.append(world.e2e_s[counted])
        times = np.concatenate(ttft)
        found[str(routers)] = {
            "ttft_mean_s": float(times.mean()),
            "ttft_p99_s": float(np.percentile(times, 99)),
            "e2e_mean_s": float(np.concatenate(e2e).mean()),
            "ttft_mean_by_seed_s": [float(part.mean()) for part in ttft],
        }
    first = found[str(options.routers[0])]
    for figures in found.values():
        figures["loss"] = figures["ttft_mean_s"] / first["ttft_mean_s"] - 1
        figures["e2e_loss"] = figures["e2e_mean_s"] / first["e2e_mean_s"] - 1
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return earlier results with those of another run in the place of what they measure again."""
    runs = {(r["scenario"], r["spread"], r["books"]): dict(r["policies"]) for r in old["runs"]}
    for run in new["runs"]:
        key = run["scenario"], run["spread"], run["books"]
        runs[key] = {**runs.get(key, {}), **run["policies"]}
    about = {name: value for name, value in new.items() if name != "runs"}
    if about != {name: value for name, value in old.items() if name != "runs"}:
        raise SystemExit("the earlier results are of other requests or seeds; measure all again")
    names = ("scenario", "spread", "books")
    found = [{**dict(zip(names, key, strict=True)), "policies": p} for key, p in runs.items()]
    return {**about, "runs": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--update", type=Path, help="results of an earlier run; print both")
    parser.add_argument("--scenario", nargs="*", default=["demo", "agents"])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--routers", type=int, nargs="*", default=ROUTERS)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument(
        "--spread", choices=["request", "session"], nargs="*", default=["request", "session"]
    )
    parser.add_argument(
        "--books", choices=["own", "shared", "store", "store-alone"], nargs="*",
        default=["own", "shared"],
        help="whether routers read each other's, in memory or through a store",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    if not options.json:
        print(f"{'scenario':10}{'spread':9}{'books':8}{'policy':18}{'routers':>8}"
              f"{'mean TTFT, s':>14}{'P99, s':>9}{'mean E2E, s':>13}{'loss':>8}")  # fmt: skip
    runs = []
    for name, spread, books in itertools.product(options.scenario, options.spread, options.books):
        scenario = scenarios.load(name)
        policies = {
            policy: measure(scenario, policy, spread, books, options) for policy in options.policies
        }
        runs.append({"scenario": name, "spread": spread, "books": books, "policies": policies})
        if options.json:
            continue
        for policy, found in policies.items():
            for routers, f in found.items():
                print(
                    f"{name:10}{spread:9}{books:8}{policy:18}{routers:>8}{f['ttft_mean_s']:>14.3f}"
                    f"{f['ttft_p99_s']:>9.2f}{f['e2e_mean_s']:>13.2f}{f['loss']:>8.1%}",
                    flush=True,
                )
    if options.json:
        about = {"requests": options.requests, "seeds": options.seeds, "first_seed": options.seed}
        results = {**about, "runs": runs}
        if options.update is not None:
            results = merged(json.loads(options.update.read_text()), results)
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
