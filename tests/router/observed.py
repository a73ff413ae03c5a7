"""Telemetry of a router that does not run: its state is a snapshot that the test sets."""

import math
from dataclasses import dataclass, replace

import numpy as np

from tailrace.router.decide.chooser import Decision
from tailrace.router.observe.snapshot import OPEN, BackendSnapshot, RouterSnapshot
from tailrace.router.observe.telemetry import Telemetry


class Clock:
    """A clock that is put forward by hand, in s."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


@dataclass
class FinishedAttempt:
    """What telemetry reads of an attempt."""

    replica: int
    arrived_at: float
    sent_at: float
    first_at: float | None
    last_at: float | None
    estimated: bool = False
    cached: int = 64
    reported_cached: int | None = None
    output_tokens: int = 101
    known_prompt_tokens: tuple[int, str] = (500, "usage")

    @property
    def arrival(self):
        return self


class Observed:
    """Events are counted as in a router; ``snapshot`` is the state the test has set."""

    def __init__(self, names=("a", "b"), **state):
        self.clock = Clock()
        self.telemetry = Telemetry(self.clock)
        self.state = {"policy": "tailrace", "fallback": "load_aware", "bytes_per_token": 4.0}
        self.state |= state
        self.backends = [
            BackendSnapshot(
                index=i, name=name, url=f"http://10.0.0.{i + 1}:8000", capacity_tokens=400_000
            )
            for i, name in enumerate(names)
        ]

    def snapshot(self):
        return RouterSnapshot(at=self.clock.now, backends=tuple(self.backends), **self.state)

    def set(self, replica, **fields):
        """Change the state of a backend."""
        self.backends[replica] = replace(self.backends[replica], **fields)

    def breaks(self, replica, why="connection refused"):
        """The backend's circuit breaker opens."""
        opened = self.backends[replica].opened + 1
        self.set(replica, state=OPEN, breaker=OPEN, available=False, why=why, opened=opened)

    def removed(self, replica):
        """A reload removes the backend."""
        self.set(replica, state="removed", available=False, removed=True)

    def passes(self, seconds):
        """Time goes by."""
        self.clock.now += seconds
        self.telemetry.advance(self.snapshot())

    def decide(self, replica, runner_up=-1, scores=None, reason="shorter queue", **more):
        """A decision is made."""
        scores = np.arange(len(self.backends), dtype=float) if scores is None else np.array(scores)
        more = {"took_s": 3e-5, "policy": "tailrace", **more}
        decision = Decision(
            replica=replica, scores=scores, runner_up=runner_up, reason=reason, **more
        )
        self.telemetry.decided(decision)
        return decision

    def attempt(self, replica=0, ttft_s=0.2, e2e_s=2.2, wait_s=0.0, **more):
        """An attempt that has ended now."""
        arrived_at = self.clock.now - e2e_s
        first_at = None if math.isnan(ttft_s) else arrived_at + ttft_s
        return FinishedAttempt(
            replica, arrived_at, arrived_at + wait_s, first_at, self.clock.now, **more
        )
