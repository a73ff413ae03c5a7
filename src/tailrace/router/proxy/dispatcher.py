"""Begins every client request of the proxy: reads its body and starts its exchange."""

from tailrace.net.server import HttpRequest, Work
from tailrace.router.access import refusals
from tailrace.router.access.keyring import Client
from tailrace.router.access.refusals import RefusedRequest
from tailrace.router.intake.request_body import BadRequest, RequestBody
from tailrace.router.intake.routes import OTHER
from tailrace.router.proxy import errors
from tailrace.router.proxy.exchange import Exchange
from tailrace.router.proxy.request_intake import RequestIntake
from tailrace.router.proxy.routed_request import OVER

#: Below it are responses that a server has stored: /v1/responses/ID, /v1/responses/ID/cancel.
_STORED = b"/v1/responses/"


class RequestDispatcher(RequestIntake):
    """Starts exchanges."""

    def start(self, request: HttpRequest, kind: str, client: Client | None) -> Work | None:
        """Begin with a request of a kind; None: it has its response already.

        ``client``: whose key it shows, if keys are needed; a place of its account is taken.
        """
        body: RequestBody | BadRequest | None = None
        if kind != OTHER or client is not None:
            try:
                body = self.read(kind, request.head.lower, request.body)
            except BadRequest as error:
                body = BadRequest(str(error))  # without the frames, which hold the body in a cycle
            if body is None:
                return self.large_bodies.read(
                    request,
                    kind,
                    client.name if client is not None else self._address(request),
                    lambda found: self._begin(request, kind, client, found),
                    client.account.end if client is not None else _nothing,
                )
        return self._begin(request, kind, client, body)

    def _address(self, request: HttpRequest) -> str:
        return self.context.proxies.client(request.client.host, request.head.headers)

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
            self.check(client, body, request.body)
        if body is not None and kind != OTHER:
            model, request.body = self.find_model(body, request.body, client)
            arrival = context.backends.cluster.arrive(body, keep=True)
            if client is not None and client.account.limits_tokens:
                reserved = self.reserve(client, arrival)
        context.retry_budget.request()
        request_id = self.request_id(request.head.lower.get(b"x-request-id"))
        exchange = Exchange(context, request, request_id, kind, arrival, client, reserved, model)
        if context.tracer is not None:
            exchange.trace = context.tracer.begin(request.head.lower)
        path = request.head.path
        if arrival is None and path.startswith(_STORED):
            known = exchange.go_home(path[len(_STORED) :].partition(b"/")[0])
            if not known and client is not None:
                raise refusals.no_response()  # it may be another client's
        return exchange

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


def _nothing() -> None:
    """There is no account."""
