"""What all requests under way share: admission, the retry budget, ids, time limits."""

import os
from typing import TYPE_CHECKING

from tailrace.net.heads import is_request_id
from tailrace.net.server import HttpRequest, error_body
from tailrace.router.intake.fast_body import BodyReader
from tailrace.router.intake.request_body import BadRequest, kind_of, read_body
from tailrace.router.proxy.admission import Queue, RetryBudget
from tailrace.router.proxy.backends import Plane
from tailrace.router.proxy.exchange import OVER, Exchange
from tailrace.router.proxy.tokenize_probe import Asker
from tailrace.router.serve_settings import ServeSettings

if TYPE_CHECKING:
    from tailrace.router.observe.decision_log import DecisionLog
    from tailrace.router.observe.events import Telemetry

#: Paths whose kind is remembered; clients can send any.
_MOST_PATHS = 256


class Forwarder:
    """What all exchanges share."""

    def __init__(
        self,
        settings: ServeSettings,
        plane: Plane,
        telemetry: "Telemetry",
        decision_log: "DecisionLog",
    ) -> None:
        self.settings = settings
        self.plane = plane
        self.telemetry = telemetry
        self.decision_log = decision_log
        self.queue = Queue(settings.admission)
        self.budget = RetryBudget(settings.retry)
        self.asker = Asker(plane.cluster.counter, settings.tokens)
        self.active: set[Exchange] = set()
        self.now = 0.0
        """Coarse clock, s; set by the sweep."""
        self._id_prefix = os.urandom(6).hex().encode()
        self._id_count = 0
        self._kinds: dict[bytes, str] = {}
        # A local tokenizer needs the text as such.
        self._read = read_body if plane.cluster.counter.reads_text else BodyReader().read

    def start(self, request: HttpRequest) -> Exchange | None:
        """Begin with a client's request; None: it is answered already."""
        head = request.head
        kind = "other"
        asked = arrival = None
        if head.method == b"POST":
            kind = self._kinds.get(head.path) or self._kind(head.path)
            if kind != "other":
                try:
                    asked = self._read(kind, head.lower, request.body)
                except BadRequest as error:
                    self.telemetry.request_done(None, 400, "refused", kind)
                    request.client.respond(head, 400, error_body(400, str(error)))
                    return None
                arrival = self.plane.cluster.arrive(asked, keep=True)
        self.budget.request()
        exchange = Exchange(self, request, kind, asked, arrival)
        self.active.add(exchange)
        exchange.start()
        return exchange if exchange.stage != OVER else None

    def _kind(self, path: bytes) -> str:
        if len(self._kinds) >= _MOST_PATHS:
            self._kinds.clear()
        kind = self._kinds[path] = kind_of(path.decode("latin-1"))
        return kind

    def request_id(self, request: HttpRequest) -> bytes:
        """Return the client's request id, or a new one."""
        given = request.head.lower.get(b"x-request-id")
        if given is not None and is_request_id(given):
            return given
        self._id_count += 1
        return b"%b-%x" % (self._id_prefix, self._id_count)

    def sweep(self, now: float) -> None:
        """Enforce time limits; called a few times per second."""
        self.now = now
        for exchange in tuple(self.active):
            exchange.check(now)
        self.queue.sweep(now)
        if len(self.queue):
            self.queue.pump(now)

    def room(self) -> None:
        """A request is over: let the next one in."""
        if len(self.queue):
            self.queue.pump(self.now)
