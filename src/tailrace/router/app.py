"""The router as a proxy: its listener, and the endpoints that it answers itself."""

from collections.abc import Callable
from typing import Any

from tailrace.net.chunk_kernel import RequestChunks
from tailrace.net.head_cache import RequestHeadCache
from tailrace.net.heads import RequestHead
from tailrace.net.limits import plain
from tailrace.net.server import ClientConnection, HttpRequest, Work, error_body
from tailrace.router import listening, process
from tailrace.router.access import refusals
from tailrace.router.access.accounts import ADMITTED
from tailrace.router.access.keyring import Client
from tailrace.router.configured import CATCH_UP_S
from tailrace.router.core import OK_BODY, RouterCore
from tailrace.router.intake.routes import LIVE, MODELS, OTHER, READY, Route, RouteTable
from tailrace.router.listening import RouterListener
from tailrace.router.observe.events import EventSink
from tailrace.router.proxy import models
from tailrace.router.proxy.dispatcher import RequestDispatcher
from tailrace.router.proxy.models import ModelsRequest
from tailrace.router.serve_settings import ServeSettings

__all__ = ["CATCH_UP_S", "Router"]


class Router(RouterCore):
    """The live router. Make it, ``await start()``, and at the end ``await stop()``."""

    def __init__(self, settings: ServeSettings, **given: Any) -> None:
        """Arguments as for :class:`RouterCore`."""
        super().__init__(settings, **given)
        settings = self.settings
        self.routes = RouteTable(settings.paths)
        self._own_endpoints: dict[str, Callable[[HttpRequest, Client | None], Work | None]] = {
            LIVE: self._respond_live, READY: self._respond_ready, MODELS: self._respond_models,
        }  # fmt: skip
        # What a listener needs (net.server.Service).
        self.limits = plain(settings.limits)
        self.heads = RequestHeadCache()
        self.clients: set[ClientConnection] = set()
        self._most_clients = process.most_clients()

    def _new_intake(self, events: EventSink) -> RequestDispatcher:
        self.dispatcher = RequestDispatcher(
            self.settings, self.backends, events, self.decision_log, self.models
        )
        return self.dispatcher

    async def _listen(self) -> RouterListener:
        self._most_clients = process.most_clients()
        RequestChunks().feed(b"0\r\n\r\n")  # compile it now
        settings = self.settings
        return await listening.serve(
            settings.listen, lambda: ClientConnection(self), shared=settings.share_port,
            tls=self._server_tls(settings.tls, "http/1.1"), handshake_s=settings.limits.header_s,
        )  # fmt: skip

    @property
    def open_connections(self) -> int:
        """Open connections of clients."""
        return len(self.clients)

    def _shutdown_clients(self) -> None:
        for client in tuple(self.clients):
            client.shutdown()

    def _give_up_clients(self) -> None:
        for client in tuple(self.clients):
            client.give_up()

    def _abort_clients(self) -> None:
        for client in tuple(self.clients):
            client.abort()

    def _check_clients(self, now: float) -> None:
        for client in tuple(self.clients):
            client.check(now)

    def _check_settings(self, settings: ServeSettings) -> None:
        RouteTable(settings.paths)

    def _take_over(self, settings: ServeSettings) -> None:
        self.routes = RouteTable(settings.paths)
        self.limits = plain(settings.limits)

    # Endpoints.

    def _respond_ready(self, request: HttpRequest, client: Client | None) -> None:
        del client
        request.client.respond(request.head, *self.readiness())

    def _respond_live(self, request: HttpRequest, client: Client | None) -> None:
        del client
        request.client.respond(request.head, 200, OK_BODY)

    def _respond_models(self, request: HttpRequest, client: Client | None) -> Work | None:
        available = [b for b in self.backends.all if b.health.available]
        if not available:
            request.client.respond(request.head, 503, error_body(503, "no replica is available"))
        elif client is None and not self.models.is_complete:
            return ModelsRequest(request, available, self.models)  # perhaps with its key they tell
        else:
            models.respond(request, client, self.models.listed())
        return None

    # What a listener needs.

    def opened(self, client: ClientConnection) -> bool:
        """Accept a client unless there are too many."""
        self.clients.add(client)
        return len(self.clients) <= min(self.limits.connections, self._most_clients)

    def closed(self, client: ClientConnection) -> None:
        """Forget a client."""
        self.clients.discard(client)

    def refused(self, status: int, why: str) -> None:
        """Count a request that was not accepted."""
        del why
        self.events.request_done(None, status, "refused", "other")

    def check_head(self, head: RequestHead) -> None:
        """Refuse who has no key and what is not served before the body is read."""
        self._route_and_client(head)

    def _route_and_client(self, head: RequestHead) -> tuple[Route, Client | None]:
        """Return what a request asks for and who asks; the client is None if no key is needed.

        It holds for all requests with this head until the next reload, which makes a new keyring.
        """
        memo = head.memo
        if memo is not None and memo[0] is self.keyring:
            return memo[1], memo[2]
        route, client = self.routes.find(head.path), None
        if not self.keyring.is_open and (route is None or route.needs_key):
            client = self.keyring.find(head)
            if client is None:
                raise refusals.no_key()
        if route is None:
            raise refusals.no_path(head.method.decode(), head.path.decode("latin-1"))
        if head.method not in route.methods:
            raise refusals.no_method(route.path, route.methods)
        head.memo = self.keyring, route, client
        return route, client

    def handle(self, request: HttpRequest) -> Work | None:
        """Begin with a request."""
        kind, client = OTHER, None
        if self.draining:
            request.client.shutdown()  # the last one on this connection: the client turns elsewhere
        try:
            memo = request.head.memo
            if memo is not None and memo[0] is self.keyring:  # as most of the time
                _, route, client = memo
            else:
                route, client = self._route_and_client(request.head)
            kind = route.kind
            if client is not None:
                why, wait_s = client.account.begin(self.clock())
                if why != ADMITTED:
                    raise refusals.too_much(why, wait_s)
        except refusals.RefusedRequest as refused:
            self.dispatcher.refuse(request, kind, refused, client)
            return None
        endpoint = self._own_endpoints.get(kind)
        if endpoint is None:
            return self.dispatcher.start(request, kind, client)
        if client is not None:
            client.account.end()
        return endpoint(request, client)
