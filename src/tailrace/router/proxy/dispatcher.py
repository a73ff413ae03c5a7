"""Begins every client request: reads its body, gives it an id, and starts its exchange."""

import os
import time

from tailrace.net.heads import is_request_id
from tailrace.net.server import HttpRequest, Work
from tailrace.router.access import refusals
from tailrace.router.access.accounts import TOO_MANY_TOKENS
from tailrace.router.access.keyring import Client
from tailrace.router.access.refusals import RefusedRequest
from tailrace.router.intake import model_field
from tailrace.router.intake.fast_body import BodyReader
from tailrace.router.intake.request_body import BadRequest, RequestBody, read_body
from tailrace.router.intake.routes import OTHER
from tailrace.router.observe.decision_log import DecisionLog
from tailrace.router.observe.events import EventSink
from tailrace.router.proxy import errors
from tailrace.router.proxy.admission import Queue, RetryBudget
from tailrace.router.proxy.backends import Backends
from tailrace.router.proxy.catalogue import ModelCatalogue
from tailrace.router.proxy.exchange import OVER, Exchange, ExchangeContext
from tailrace.router.proxy.large_bodies import (
    INLINE_BYTES,
    PARSED_BYTES,
    PAUSE_SHARE,
    SHORT_BYTES,
    LargeBodies,
)
from tailrace.router.proxy.tokenize_probe import TokenizeProbe
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.state.arrival import Arrival

#: Below it are responses that a server has stored: /v1/responses/ID, /v1/responses/ID/cancel.
_STORED = b"/v1/responses/"


class RequestDispatcher:
    """Starts exchanges and enforces their time limits."""

    def __init__(
        self,
        settings: ServeSettings,
        backends: Backends,
        events: EventSink,
        decision_log: DecisionLog,
        models: ModelCatalogue,
    ) -> None:
        self.context = ExchangeContext(
            settings=settings,
            backends=backends,
            events=events,
            decision_log=decision_log,
            queue=Queue(settings.admission),
            retry_budget=RetryBudget(settings.retry),
            tokenize_probe=TokenizeProbe(backends.cluster.counter, settings.tokens),
            models=models,
        )
        self.context.set_up(settings)
        self._id_prefix = os.urandom(6).hex().encode()
        self._id_count = 0
        self._mean_output = backends.cluster.mean_output  # tokens, as of the last sweep
        self._reader = BodyReader()
        self._parses_from = 0.0  # when the event loop has time for parsing again, s
        self.large_bodies = LargeBodies()

    @property
    def active(self) -> set[Exchange]:
        """Requests in progress."""
        return self.context.active

    @property
    def queue(self) -> Queue:
        """Requests that wait for room."""
        return self.context.queue

    def start(self, request: HttpRequest, kind: str, client: Client | None) -> Work | None:
        """Begin with a request of a kind; None: it has its response already.

        ``client``: whose key it shows, if keys are needed; a place of its account is taken.
        """
        body: RequestBody | BadRequest | None = None
        if kind != OTHER or client is not None:
            try:
                body = self._read(request, kind)
            except BadRequest as error:
                body = BadRequest(str(error))  # without the frames, which hold the body in a cycle
            if body is None:
                return self.large_bodies.read(
                    request,
                    kind,
                    client.name if client is not None else request.client.host,
                    lambda found: self._begin(request, kind, client, found),
                    client.account.end if client is not None else _nothing,
                )
        return self._begin(request, kind, client, body)

    def _read(self, request: HttpRequest, kind: str) -> RequestBody | None:
        """Read a body; None: that would hold up other clients. May raise BadRequest."""
        headers, data = request.head.lower, request.body
        size = len(data)
        # A local tokenizer needs the text as such.
        reads_text = self.context.backends.cluster.counter.reads_text and size <= PARSED_BYTES
        if size <= INLINE_BYTES and not reads_text:
            found = self._reader.read(kind, headers, data)
            if found is not None:
                return found
        began = time.perf_counter()
        is_json = kind != OTHER or data[:1] == b"{"
        if is_json and size > (SHORT_BYTES if began < self._parses_from else PARSED_BYTES):
            return None
        try:
            return read_body(kind, headers, data)
        finally:
            ended = time.perf_counter()
            self._parses_from = ended + PAUSE_SHARE * (ended - began)

    def _begin(
        self,
        request: HttpRequest,
        kind: str,
        client: Client | None,
        body: RequestBody | BadRequest | None,
    ) -> Exchange | None:
        """Begin with a request whose body has been read, cannot be read, or is not (None)."""
        try:
            if isinstance(body, BadRequest):
                raise RefusedRequest(400, str(body))
            exchange = self._exchange(request, kind, client, body)
        except RefusedRequest as refused:
            if client is not None:
                client.account.end()
            self.refuse(request, kind, refused, client)
            return None
        except BaseException:
            if client is not None:
                client.account.end()
            raise
        self.context.active.add(exchange)
        exchange.start()
        return exchange if exchange.stage != OVER else None

    def _exchange(
        self, request: HttpRequest, kind: str, client: Client | None, body: RequestBody | None
    ) -> Exchange:
        context = self.context
        arrival, reserved, model = None, 0.0, ""
        if body is not None and client is not None:
            self._check(client, body, request.body)
        if body is not None and kind != OTHER:
            model = self._find_model(request, body, client)
            arrival = context.backends.cluster.arrive(body, keep=True)
            if client is not None and client.account.limits_tokens:
                reserved = self._reserve(client, arrival)
        context.retry_budget.request()
        request_id = self._request_id(request)
        exchange = Exchange(context, request, request_id, kind, arrival, client, reserved, model)
        path = request.head.path
        if arrival is None and path.startswith(_STORED):
            known = exchange.go_home(path[len(_STORED) :].partition(b"/")[0])
            if not known and client is not None:
                raise refusals.no_response()  # it may be another client's
        return exchange

    def _check(self, client: Client, body: RequestBody, data: bytes) -> None:
        """Refuse what a client may not ask for; ``data``: the body as it is passed on."""
        # What the compiled reader has read names no key twice.
        if client.restricted and (body.data is None or body.model not in client.models):
            _check_model(client, body, data)
        if body.priority not in client.priorities:
            allowed = ", ".join(map(str, sorted(client.priorities)))
            raise RefusedRequest(
                403, f"this key may not ask for priority {body.priority}, only for: {allowed}",
                "priority_not_allowed", "priority",
            )  # fmt: skip
        if body.session is not None:
            # Two clients that use the same id do not share a conversation.
            body.session = f"{client.name}/{body.session}"

    def _find_model(self, request: HttpRequest, body: RequestBody, client: Client | None) -> str:
        """Return the model as servers know it, after writing it into the body if need be."""
        name = body.model
        place = self.context.models.place(name)
        if place is None:
            known = [n for n in self.context.models.names() if client is None or client.may_use(n)]
            raise refusals.no_model(name, known)
        model = place.model
        if model != name:
            data = model_field.replaced(request.body, model)
            if data is None:
                raise refusals.unclear_model()
            request.body = data
            body.model = model
        return model

    def _reserve(self, client: Client, arrival: Arrival) -> float:
        """Take the tokens of a request from a client's account; return how many."""
        asked, tokens = arrival.asked, float(arrival.prompt_tokens)
        if asked.generates:
            tokens += self._mean_output if asked.max_tokens is None else asked.max_tokens
        wait_s = client.account.reserve(tokens, arrival.arrived_at)
        if wait_s > 0:
            raise refusals.too_much(TOO_MANY_TOKENS, wait_s)
        return tokens

    def refuse(
        self, request: HttpRequest, kind: str, refused: RefusedRequest, client: Client | None
    ) -> None:
        """Respond to a request that is not served, and count it."""
        events = self.context.events
        if refused.shed_cause:
            events.shed(refused.shed_cause)
        outcome = "shed" if refused.shed_cause else "refused"
        name = client.name if client is not None else ""
        events.request_done(None, refused.status, outcome, kind, name)
        head = request.head
        body = errors.body(kind, refused.status, refused.why, refused.code, refused.param)
        request.client.respond(head, refused.status, body, extra=refused.headers)

    def _request_id(self, request: HttpRequest) -> bytes:
        """Return the client's request id, or a new one."""
        given = request.head.lower.get(b"x-request-id")
        if given is not None and is_request_id(given):
            return given
        self._id_count += 1
        return b"%b-%x" % (self._id_prefix, self._id_count)

    def close(self) -> None:
        """End background work."""
        self.large_bodies.close()
        self.context.tokenize_probe.close()

    def sweep(self, now: float) -> None:
        """Enforce time limits at ``now`` (s); called a few times per second."""
        context = self.context
        context.now = now
        self._mean_output = context.backends.cluster.mean_output
        for exchange in tuple(context.active):
            exchange.check(now)
        context.queue.sweep(now)
        context.admit_waiting()
        context.report_waiting()

    def reload(self, settings: ServeSettings) -> None:
        """Go by other settings from now on."""
        context = self.context
        context.set_up(settings)
        context.queue.settings = settings.admission
        context.retry_budget.set_up(settings.retry)
        context.tokenize_probe.settings = settings.tokens


def _nothing() -> None:
    """There is no account."""


def _check_model(client: Client, body: RequestBody, data: bytes) -> None:
    """Refuse a model that a client may not use, and a body that may mean another one."""
    name = body.model
    if body.data is None and data[:1] == b"{" and not model_field.is_clear(data):
        raise refusals.unclear_model()
    if not name and body.kind != OTHER:
        raise refusals.unnamed_model()
    if not client.may_use(name):
        raise refusals.forbidden_model(name)
