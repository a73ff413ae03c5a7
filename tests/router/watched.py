"""A router that only telemetry looks at: its state is set by hand, its clock stands still."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np

from tailrace.router.decide.chooser import ChooserSettings, Decision
from tailrace.router.intake.tokens import TokenCounter, TokenSettings
from tailrace.router.observe.scrape import Snapshot
from tailrace.router.observe.telemetry import Telemetry
from tailrace.router.proxy.health import Health
from tailrace.router.settings import BackendSettings, HealthSettings
from tailrace.view.records import REPLICA_VIEW


class Clock:
    """A clock that is put forward by hand, in s."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class Plane:
    def __init__(self, targets, cluster, chooser):
        self.targets, self.cluster, self.chooser = targets, cluster, chooser

    @property
    def present(self):
        return [t for t in self.targets if not t.health.removed]


class Watched:
    """Stands for ``app.Router``: what telemetry and status read of it."""

    def __init__(self, names=("a", "b"), clock=None, **routing):
        self.clock = clock or Clock()
        n = len(names)
        views = np.zeros(n, REPLICA_VIEW)
        views["metrics_at"], views["speed"], views["available"] = -np.inf, 1.0, 1
        views["capacity_tokens"] = 400_000
        self.views, self.held = views, np.zeros(n, [("held_tokens", "i8")])
        cluster = SimpleNamespace(
            replicas=views, index=SimpleNamespace(totals=self.held), units_per_token=0.5,
            counter=TokenCounter(),
        )  # fmt: skip
        routing = ChooserSettings(policy="tailrace", **routing)
        self.counts = Counter()
        chooser = SimpleNamespace(
            policy=SimpleNamespace(name="tailrace"), settings=routing, counts=self.counts
        )
        self.plane = Plane(
            [self._target(i, name) for i, name in enumerate(names)], cluster, chooser
        )
        self.scraper = SimpleNamespace(snapshots={}, failures={})
        self.settings = SimpleNamespace(tokens=TokenSettings())
        self.forwarder = SimpleNamespace(
            queue=[], decision_log=SimpleNamespace(dropped=0), asker=SimpleNamespace(failed=0)
        )
        self.clients = set()
        self.draining = False
        self.telemetry = Telemetry(self.clock)
        self.telemetry.watch(self)

    @staticmethod
    def _target(i, name):
        health = Health(HealthSettings(), None)
        return SimpleNamespace(
            index=i,
            label=name,
            backend=BackendSettings(url=f"http://10.0.0.{i + 1}:8000"),
            health=health,
            active=0,
            limit=health.max_in_flight,
        )

    def load(self, replica, in_flight, queued=0):
        """Set what is under way at a replica."""
        self.plane.targets[replica].active = in_flight
        self.views["queued"][replica] = queued

    def scrape(self, replica, **said):
        """The replica's metrics were read now."""
        self.scraper.snapshots[replica] = Snapshot(**said)
        self.views["metrics_at"][replica] = self.clock.now

    def breaks(self, replica, why="connection refused"):
        """The replica's circuit breaker opens."""
        health = self.plane.targets[replica].health
        for _ in range(health.settings.failures):
            health.failure(self.clock.now, why, died=True)

    def passes(self, seconds):
        """Time goes by."""
        self.clock.now += seconds
        self.telemetry.advance(self.clock.now)

    def decide(self, replica, runner_up=-1, scores=None, reason="shorter queue", **more):
        """A decision is made."""
        scores = np.arange(len(self.views), dtype=float) if scores is None else np.array(scores)
        more = {"took_s": 3e-5, "policy": "tailrace", **more}
        decision = Decision(
            replica=replica, scores=scores, runner_up=runner_up, reason=reason, **more
        )
        self.telemetry.decided(decision)
        return decision

    def attempt(self, replica=0, ttft_s=0.2, e2e_s=2.2, wait_s=0.0, **more):
        """An attempt that has ended now."""
        arrived_at = self.clock.now - e2e_s
        return SimpleNamespace(
            **{
                "replica": replica,
                "arrival": SimpleNamespace(arrived_at=arrived_at),
                "sent_at": arrived_at + wait_s,
                "first_at": None if math.isnan(ttft_s) else arrived_at + ttft_s,
                "last_at": self.clock.now,
                "estimated": False,
                "cached": 64,
                "reported_cached": None,
                "output_tokens": 101,
                "known_prompt_tokens": (500, "usage"),
                **more,
            }
        )
