"""Begins every client request: reads its body, gives it an id, and starts its exchange."""

import os

from tailrace.net.heads import is_request_id
from tailrace.net.server import HttpRequest, error_body
from tailrace.router.intake.fast_body import BodyReader
from tailrace.router.intake.request_body import BadRequest, kind_of, read_body
from tailrace.router.observe.decision_log import DecisionLog
from tailrace.router.observe.events import EventSink
from tailrace.router.proxy.admission import Queue, RetryBudget
from tailrace.router.proxy.backends import Backends
from tailrace.router.proxy.exchange import OVER, Exchange, ExchangeContext
from tailrace.router.proxy.tokenize_probe import TokenizeProbe
from tailrace.router.serve_settings import ServeSettings

#: Paths whose kind is remembered; clients can send any.
_MOST_PATHS = 256


class RequestDispatcher:
    """Starts exchanges and enforces their time limits."""

    def __init__(
        self,
        settings: ServeSettings,
        backends: Backends,
        events: EventSink,
        decision_log: DecisionLog,
    ) -> None:
        self.context = ExchangeContext(
            settings=settings,
            backends=backends,
            events=events,
            decision_log=decision_log,
            queue=Queue(settings.admission),
            retry_budget=RetryBudget(settings.retry),
            tokenize_probe=TokenizeProbe(backends.cluster.counter, settings.tokens),
        )
        self._id_prefix = os.urandom(6).hex().encode()
        self._id_count = 0
        self._kinds: dict[bytes, str] = {}
        # A local tokenizer needs the text as such.
        self._read = read_body if backends.cluster.counter.reads_text else BodyReader().read

    @property
    def active(self) -> set[Exchange]:
        """Requests in progress."""
        return self.context.active

    @property
    def queue(self) -> Queue:
        """Requests that wait for room."""
        return self.context.queue

    def start(self, request: HttpRequest) -> Exchange | None:
        """Begin with a client's request; None: it has its response already."""
        context, head = self.context, request.head
        kind = "other"
        body = arrival = None
        if head.method == b"POST":
            kind = self._kinds.get(head.path) or self._kind(head.path)
            if kind != "other":
                try:
                    body = self._read(kind, head.lower, request.body)
                except BadRequest as error:
                    context.events.request_done(None, 400, "refused", kind)
                    request.client.respond(head, 400, error_body(400, str(error)))
                    return None
                arrival = context.backends.cluster.arrive(body, keep=True)
        context.retry_budget.request()
        exchange = Exchange(context, request, self._request_id(request), kind, arrival)
        context.active.add(exchange)
        exchange.start()
        return exchange if exchange.stage != OVER else None

    def _kind(self, path: bytes) -> str:
        if len(self._kinds) >= _MOST_PATHS:
            self._kinds.clear()
        kind = self._kinds[path] = kind_of(path.decode("latin-1"))
        return kind

    def _request_id(self, request: HttpRequest) -> bytes:
        """Return the client's request id, or a new one."""
        given = request.head.lower.get(b"x-request-id")
        if given is not None and is_request_id(given):
            return given
        self._id_count += 1
        return b"%b-%x" % (self._id_prefix, self._id_count)

    def sweep(self, now: float) -> None:
        """Enforce time limits at ``now`` (s); called a few times per second."""
        context = self.context
        context.now = now
        for exchange in tuple(context.active):
            exchange.check(now)
        context.queue.sweep(now)
        context.admit_waiting()
        context.report_waiting()

    def reload(self, settings: ServeSettings) -> None:
        """Go by other settings from now on."""
        context = self.context
        context.settings = settings
        context.queue.settings = settings.admission
        context.retry_budget.settings = settings.retry
        context.tokenize_probe.settings = settings.tokens
