"""The router's side of the reference engine: views, ledger, prefix index, metrics snapshots."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Replica, RouterSettings
from tailrace.policy.base import Policy, call_hook, checked_scores
from tailrace.sim.reference.dispatch import Dispatcher
from tailrace.sim.reference.request import Request
from tailrace.sim.reference.server import Server
from tailrace.view import ledger, prefix_index
from tailrace.view.cost_model import cost_rows, prefill_tokens_per_s
from tailrace.view.devices import cost_of, num_blocks_of
from tailrace.view.records import NEVER, REPLICA_VIEW, REQUEST_VIEW, ROUTER, View
from tailrace.view.selection import NO_REPLICA, choose, mix
from tailrace.workload.predict import predicted_output
from tailrace.workload.prefix import content_keys, prefix_hash
from tailrace.workload.table import RequestTable


class PolicyDispatcher(Dispatcher):
    """Routes with a policy, which sees nothing but what a live router can know."""

    def __init__(
        self,
        policy: Policy,
        table: RequestTable,
        replicas: Sequence[Replica],
        router: RouterSettings,
        seed: int,
    ) -> None:
        self.policy = policy
        self.table = table
        self.settings = router
        self.seed = seed
        self.predicted = predicted_output(table, router.predictor, router.predictor_sigma, seed)
        self.views = replica_views(replicas)
        self.request_view: Any = np.zeros(1, REQUEST_VIEW)[0]
        self.router: Any = np.zeros(1, ROUTER)[0]
        with np.errstate(over="ignore"):
            self.router["rng"] = mix(np.uint64(seed))
        self.view = View(
            self.request_view,
            self.views,
            cost_rows([cost_of(replica) for replica in replicas]),
            self.router,
        )
        self.caching = [r.scheduler == "vllm_v1" and r.prefix_caching for r in replicas]
        self.index = prefix_index.new_index(len(replicas), router.index_entries)
        self.run_keys = content_keys(table).run_key
        self.prefix_hash = prefix_hash(table)
        self.last_replica: dict[int, int] = {}
        self.sent_s: dict[int, float] = {}
        self.predicted_then: dict[int, int] = {}
        self.waiting: list[dict[int, float]] = [{} for _ in replicas]
        self.believed: dict[int, int] = {}
        self.answering: list[dict[int, Request]] = [{} for _ in replicas]
        self.snapshots = 0

    def start(self, servers: Sequence[Server]) -> None:
        """Reset the policy."""
        super().start(servers)
        if hasattr(self.policy, "reset"):
            call_hook(self.policy, "reset", len(servers), self.seed)

    def expected_cached(self, request_id: int) -> int:
        """What the index said when the request was sent."""
        return self.believed[request_id]

    # ---- decisions ------------------------------------------------------------------------------

    def route(self, now: float, requests: Sequence[Request]) -> Iterator[int]:
        """Decide one request after the other; each decision sees the one before."""
        for request in requests:
            if self.settings.staleness_s == 0:
                self._take_snapshot(now)
            yield self._decide(request, now)

    def _decide(self, request: Request, now: float) -> int:
        self._show_request(request, now)
        self._show_replicas(request)
        scores = checked_scores(self.policy, self.view)
        lowest_id_wins = bool(getattr(self.policy, "lowest_id_wins", False))
        with np.errstate(over="ignore"):  # random numbers wrap around
            replica = int(choose(scores, self.views, self.router, lowest_id_wins))
        if replica == NO_REPLICA:
            raise RuntimeError("asked to route while no replica is available")
        cached = int(self.views["cached_tokens"][replica])
        self.router["decisions"] += 1
        predicted = ledger.whole_tokens(self.request_view["predicted_output"])
        self.predicted_then[request.id] = predicted
        ledger.sent(self.views[replica], request.prompt, cached, predicted, now)
        self.waiting[replica][request.id] = now
        self._index_content(replica, request.id, 0, now)
        self.sent_s[request.id] = now
        self.believed[request.id] = cached
        session = int(self.table.rows["session"][request.id])
        if session >= 0:
            self.last_replica[session] = replica
        self._tell("sent", replica, request, now)
        return replica

    def _show_request(self, request: Request, now: float) -> None:
        row = self.table.rows[request.id]
        view = self.request_view
        view["now"] = now
        view["id"] = request.id
        view["arrived_at"] = request.arrived_s
        view["prompt_tokens"] = request.prompt
        if self.predicted is None:
            prior = self.settings.prior_output_tokens
            view["predicted_output"] = ledger.mean_output(self.router, prior)
        else:
            view["predicted_output"] = self.predicted[request.id]
        view["session"] = row["session"]
        view["turn"] = row["turn"]
        view["last_replica"] = self.last_replica.get(int(row["session"]), -1)
        view["prefix_hash"] = self.prefix_hash[request.id]
        for field in ("priority", "ttft_slo_s", "tpot_slo_s"):
            view[field] = row[field]

    def _show_replicas(self, request: Request) -> None:
        keys, tokens = self._runs(request.id)
        prompts = self.table.rows["prompt_tokens"]
        for number, view in enumerate(self.views):
            view["available"] = self.servers[number].available
            view["context_tokens"] = sum(
                int(prompts[r.id]) + r.generated for r in self.answering[number].values()
            )
            view["cached_tokens"] = 0
            if self.caching[number]:
                size = int(view["block_size"])
                match = int(prefix_index.match_tokens(self.index, number, keys, tokens))
                # The last token of a prompt is always computed, so its block never counts.
                view["cached_tokens"] = min(match, request.prompt - 1) // size * size
                view["index_tokens"] = prefix_index.held_tokens(self.index, number)
            if self.waiting[number]:
                view["oldest_sent"] = min(self.waiting[number].values())
        ledger.look(self.views, self.router, float(self.request_view["now"]))

    # ---- what comes back ------------------------------------------------------------------------

    def first_token(self, server: Server, request: Request, now: float) -> None:
        """The request counts as answering."""
        prompt = int(self.table.rows["prompt_tokens"][request.id])
        view = self.views[server.number]
        ledger.answering(view, prompt, self.believed[request.id], self.sent_s[request.id])
        del self.waiting[server.number][request.id]
        self.answering[server.number][request.id] = request
        self._tell("first_token", server.number, request, now)

    def finished(self, server: Server, request: Request, now: float) -> None:
        """The replica has the prompt and the whole answer in its cache."""
        row = self.table.rows[request.id]
        prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
        view = self.views[server.number]
        ledger.finished(view, self.router, prompt, self.predicted_then[request.id], output)
        del self.answering[server.number][request.id]
        self._index_content(server.number, request.id, output, now)
        self._tell("finished", server.number, request, now)

    def lost(self, server: Server, requests: Sequence[Request], now: float) -> None:
        """Nothing is left of what the router knew about the replica."""
        ledger.lost(self.views[server.number])
        self.waiting[server.number].clear()
        self.answering[server.number].clear()
        prefix_index.forget(self.index, server.number)
        for request in requests:
            self._tell("failed", server.number, request, now)

    def _tell(self, hook: str, replica: int, request: Request, now: float) -> None:
        if hasattr(self.policy, hook):
            call_hook(self.policy, hook, replica, request.id, now)

    # ---- prefix index ---------------------------------------------------------------------------

    def _runs(self, request_id: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        row = self.table.rows[request_id]
        if row["run_count"] == 0:  # takes room in the cache, though nobody will ask for it
            private = np.array([-1 - request_id], np.int64).view(np.uint64)
            return private, np.array([row["prompt_tokens"]], np.int32)
        runs = slice(int(row["run_start"]), int(row["run_start"]) + int(row["run_count"]))
        return self.run_keys[runs], self.table.runs["tokens"][runs].copy()

    def _index_content(self, replica: int, request_id: int, output: int, now: float) -> None:
        keys, tokens = self._runs(request_id)
        if self.caching[replica]:
            tokens[-1] += output  # the answer continues the stream of the last run
            capacity = self.views["capacity_tokens"][replica]
            prefix_index.insert(self.index, replica, keys, tokens, capacity, now)

    # ---- metrics --------------------------------------------------------------------------------

    def before(self, now: float) -> None:
        """Take the last snapshot that was due before ``now``: nothing has changed since."""
        interval = self.settings.staleness_s
        if interval == 0:
            return
        count = math.ceil(now / interval) + 1
        while count > 0 and (count - 1) * interval >= now:
            count -= 1
        if count > self.snapshots:
            self.snapshots = count
            self._take_snapshot((count - 1) * interval)

    def ended(self, now: float) -> None:
        """Take the snapshot that is due right now."""
        interval = self.settings.staleness_s
        if interval > 0 and self.snapshots * interval == now:
            self.snapshots += 1
            self._take_snapshot(now)

    def _take_snapshot(self, now: float) -> None:
        for view, server in zip(self.views, self.servers, strict=True):
            scheduler = server.scheduler
            kv_used = scheduler.memory.used / scheduler.memory.total
            ledger.scraped(view, len(scheduler.waiting), scheduler.resident_count, kv_used, now)


def replica_views(replicas: Sequence[Replica]) -> NDArray[np.void]:
    """Return the views [n] of a cluster at rest."""
    views = np.zeros(len(replicas), REPLICA_VIEW)
    costs = cost_rows([cost_of(replica) for replica in replicas])
    views["available"] = 1
    views["metrics_at"] = NEVER
    for view, cost, replica in zip(views, costs, replicas, strict=True):
        chunked = replica.scheduler in ("sarathi", "vllm_v1")
        budget = replica.chunk_size if chunked else replica.max_batch_tokens
        view["speed"] = replica.speed
        view["capacity_tokens"] = num_blocks_of(replica) * replica.block_size
        view["block_size"] = replica.block_size
        view["token_budget"] = budget
        view["batch_cap"] = replica.batch_cap
        view["prefill_tokens_per_s"] = prefill_tokens_per_s(cost, budget, replica.speed)
    return views
