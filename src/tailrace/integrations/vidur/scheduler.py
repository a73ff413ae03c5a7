"""A global scheduler of Vidur that routes with a policy of Tailrace. Imports Vidur.

Nothing of the installed package is changed: the scheduler and its settings are subclasses, known to
Vidur's registry under a key of their own. Vidur tells a global scheduler nothing but arrivals, so
it listens to its own replica schedulers: each gets wrapped methods that report the start and the
end of an iteration.
"""

from dataclasses import dataclass, field
from typing import Any

from vidur.config.config import BaseGlobalSchedulerConfig
from vidur.scheduler import BaseGlobalScheduler, GlobalSchedulerRegistry
from vidur.types import BaseIntEnum

from tailrace.calibrate.iteration_fit import FitResult
from tailrace.config import Replica, RouterSettings, parse
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.interface import holder, total_blocks
from tailrace.integrations.vidur.limits import SCHEDULERS
from tailrace.integrations.vidur.measure import measured_cost
from tailrace.integrations.vidur.router import PolicyHooks, VidurRouter
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy, Policy, call_hook, decide
from tailrace.view.devices import get
from tailrace.view.records import View


class TailraceType(BaseIntEnum):  # type: ignore[misc]
    """Tailrace's key in the registries of Vidur, far from Vidur's own."""

    TAILRACE = 7461
    TAILRACE_KEPT = 7462


@dataclass
class TailraceGlobalSchedulerConfig(BaseGlobalSchedulerConfig):  # type: ignore[misc]
    """Settings of the scheduler, in Vidur's way: also options of its command line."""

    policy: str = field(
        default="tailrace",
        metadata={"help": "Policy of Tailrace: a rule, a trained policy, a file; empty: none yet."},
    )
    device: str = field(
        default="",
        metadata={"help": "Device preset for the costs a policy sees; empty: ask the predictor."},
    )
    staleness_s: float = field(
        default=0.5,
        metadata={"help": "Seconds between two metrics snapshots of a replica; 0: always fresh."},
    )
    prior_output_tokens: float = field(
        default=256.0,
        metadata={"help": "Predicted output before any request has finished, in tokens."},
    )
    policy_seed: int = field(default=0, metadata={"help": "Seed of the router's random choices."})

    @staticmethod
    def get_type() -> Any:
        """Return the key in the registry."""
        return TailraceType.TAILRACE


class TailraceGlobalScheduler(BaseGlobalScheduler):  # type: ignore[misc]
    """Decides for one request after the other; each decision sees the one before.

    ``look`` and ``assign`` are the two halves of a decision. ``schedule``, which Vidur calls, asks
    the policy for whatever nobody has assigned before.
    """

    def __init__(self, config: Any, replicas: Any) -> None:
        """Vidur calls this."""
        super().__init__(config, replicas)
        settings = config.cluster_config.global_scheduler_config
        self._ids = list(self._replica_schedulers)
        self._servers = list(self._replica_schedulers.values())
        for number, server in enumerate(self._servers):
            self._listen(number, server)
        self._assigned: list[tuple[Any, Any]] = []
        self._now = 0.0
        self.policy: Policy | None = None
        router = parse(
            RouterSettings,
            {
                "staleness_s": settings.staleness_s,
                "prior_output_tokens": settings.prior_output_tokens,
            },
        )
        alike = [self._replica(config, settings.device)] * len(self._servers)
        self.replicas = alike
        """[n] the replicas in Tailrace's terms."""
        self.router = VidurRouter(self._servers, alike, router, settings.policy_seed)
        if settings.policy:
            self.use(registry.get(settings.policy), settings.policy_seed)

    # ---- setting up -----------------------------------------------------------------------------

    @property
    def servers(self) -> list[Any]:
        """Vidur's replica schedulers, in the order of the replicas."""
        return self._servers

    def start(self, router: VidurRouter) -> None:
        """Begin with another router; to be called before the run."""
        self.router = router

    def use(self, policy: Policy, seed: int = 0) -> None:
        """Route with this policy; to be called before the run."""
        if isinstance(policy, BuiltinPolicy) and policy.rule.in_engine:
            raise TailraceError(f"{policy.name} runs inside Tailrace's simulator, not in Vidur")
        self.policy = policy
        self.router.watchers.append(PolicyHooks(policy))
        call_hook(policy, "reset", len(self._servers), seed)

    def _replica(self, config: Any, device: str) -> Replica:
        """Return what Vidur's settings amount to in Tailrace's terms."""
        cluster = config.cluster_config
        settings = cluster.replica_scheduler_config
        name = str(settings.get_type())
        if name not in SCHEDULERS:
            raise TailraceError(
                f"Tailrace's policies run over the replica schedulers {', '.join(SCHEDULERS)} of "
                f"Vidur, not over {name}"
            )
        chunk = getattr(settings, "chunk_size", Replica().chunk_size)
        blocks = {
            name: getattr(holder(cluster, name), name)
            for name in ("block_size", "watermark_blocks_fraction")
        }
        return Replica(
            cost=get(device).cost if device else self.fitted_cost(chunk).model,
            scheduler=name,
            num_blocks=total_blocks(self._servers[0]),
            block_size=blocks["block_size"],
            watermark=blocks["watermark_blocks_fraction"],
            batch_cap=settings.batch_size_cap,
            chunk_size=chunk,
            max_batch_tokens=getattr(settings, "max_tokens_in_batch", Replica().max_batch_tokens),
            max_request_tokens=config.request_generator_config.max_tokens,
        )

    def fitted_cost(self, chunk_size: int) -> FitResult:
        """Fit the cost model to what Vidur's predictor says."""
        return measured_cost(self._predictor, chunk_size, self._ids[0])

    @property
    def _predictor(self) -> Any:
        return self._servers[0]._execution_time_predictor

    def _listen(self, number: int, server: Any) -> None:
        """Wrap what Vidur calls at the start and at the end of an iteration of one server."""
        form, end = server.on_schedule, server.on_batch_end

        def on_schedule(*time: float) -> Any:
            # Vidur's main branch tells no time; iterations form when something has just happened.
            self.router.snapshots_by(time[0] if time else self._now)
            return form(*time)

        def on_batch_end(batch: Any) -> None:
            now = self._now = batch.completed_at
            self.router.snapshots_by(now, before=True)
            end(batch)
            self.router.ended(number, batch.requests, now)

        server.on_schedule, server.on_batch_end = on_schedule, on_batch_end

    # ---- decisions ------------------------------------------------------------------------------

    @property
    def has_request(self) -> bool:
        """Whether a request waits to be assigned."""
        return bool(self._request_queue)

    def look(self) -> View:
        """Return what the router sees for the first request that waits."""
        self.sort_requests()
        request = self._request_queue[0]
        self._now = request.arrived_at
        return self.router.look(request, request.arrived_at)

    def assign(self, replica: int) -> None:
        """Send the request looked at to a replica."""
        request = self._request_queue.pop(0)
        self.router.assign(replica)
        self._assigned.append((self._ids[replica], request))

    def schedule(self) -> list[tuple[Any, Any]]:
        """Return Vidur's pairs (replica id, request) for all requests that wait."""
        while self._request_queue:
            if self.policy is None:
                raise TailraceError("no policy was given to Tailrace's scheduler in Vidur")
            self.assign(decide(self.policy, self.look()))
        assigned, self._assigned = self._assigned, []
        self.router.posted()
        return assigned


def register() -> type[TailraceGlobalSchedulerConfig]:
    """Make the scheduler known to Vidur; returns the class of its settings."""
    GlobalSchedulerRegistry.register(TailraceType.TAILRACE, TailraceGlobalScheduler)
    return TailraceGlobalSchedulerConfig
