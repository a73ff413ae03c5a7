"""What happens to requests, as events; ``telemetry.py`` counts them."""

from typing import Protocol

from tailrace.router.decide.chooser import Decision
from tailrace.router.state.attempt import Attempt


class EventSink(Protocol):
    """Sink for routing events. Replicas are given by number."""

    def request_done(
        self, attempt: Attempt | None, status: int, outcome: str, path_kind: str, client: str = ""
    ) -> None:
        """A client's request is over.

        ``attempt``: the last one, closed; None: the request was not routed, or not sent.
        ``client``: the name of a client with a key, as in the settings.
        """

    def decided(self, decision: Decision) -> None:
        """A replica was chosen."""

    def retried(self, replica: int, cause: str) -> None:
        """A request is tried at another replica because of this one."""

    def shed(self, cause: str) -> None:
        """A request was rejected for lack of room."""
