"""What telemetry is told; ``telemetry.py`` counts it."""

from typing import Protocol

from tailrace.router.decide.chooser import Decision
from tailrace.router.state.cluster import Attempt


class Telemetry(Protocol):
    """Who counts what happens. Replicas are given by number."""

    def request_done(
        self, attempt: Attempt | None, status: int, outcome: str, path_kind: str
    ) -> None:
        """A request is over; no attempt: it was not routed, or is over before it was sent."""

    def decided(self, decision: Decision) -> None:
        """A replica was chosen."""

    def retried(self, replica: int, cause: str) -> None:
        """A request is tried elsewhere, because of this replica."""

    def shed(self, cause: str) -> None:
        """A request was sent away."""

    def render(self) -> bytes:
        """Return everything in Prometheus' text form."""


class NoTelemetry:
    """Counts nothing."""

    def request_done(
        self, attempt: Attempt | None, status: int, outcome: str, path_kind: str
    ) -> None:
        """Do nothing."""

    def decided(self, decision: Decision) -> None:
        """Do nothing."""

    def retried(self, replica: int, cause: str) -> None:
        """Do nothing."""

    def shed(self, cause: str) -> None:
        """Do nothing."""

    def render(self) -> bytes:
        """Return nothing."""
        return b""
