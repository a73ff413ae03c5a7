"""One request that a backend is picked for: its subset, objective and fallbacks, and its response.

Admission, decision and accounting are those of :class:`RoutedRequest
<tailrace.router.proxy.routed_request.RoutedRequest>`. The proxy sends the request and passes the
response on, so there are no attempts of ours: an endpoint that fails is reported by the status of
the response, or by the endpoint that served instead.
"""

import math
from collections.abc import Sequence, Set
from typing import Protocol

from tailrace.queueing.fair_queue import QueuedItem
from tailrace.router.access.keyring import Client
from tailrace.router.proxy import response_headers
from tailrace.router.proxy.admission import Waiting
from tailrace.router.proxy.backends import Backend
from tailrace.router.proxy.context import RequestContext
from tailrace.router.proxy.response_scan import NoScanner, ReplyScanner, Scanner, StreamScanner
from tailrace.router.proxy.routed_request import OVER, SENT, STREAMING, RoutedRequest
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt

_NO_SCANNER = NoScanner()


class Proxy(Protocol):
    """The proxy's side of a request."""

    body: bytes
    """Of the request, as far as it is held."""

    def replace_body(self, body: bytes) -> None:
        """Pass another body on."""

    def picked(self, backends: Sequence[Backend]) -> None:
        """Name the endpoints: the one that was picked, and fallbacks in order."""

    def refused(self, status: int, why: str, code: str, extra: bytes) -> None:
        """Answer the client with an error; ``extra``: header lines."""

    def drop_body(self) -> None:
        """Free the request's body."""


class Pick(RoutedRequest):
    """A request whose endpoint is picked."""

    __slots__ = ("_flow", "_ineligible", "_may_wait", "_proxy", "_scanner")

    def __init__(
        self,
        context: RequestContext,
        proxy: Proxy,
        request_id: bytes,
        kind: str,
        arrival: Arrival | None,
        client: Client | None,
        reserved: float,
        model: str,
        *,
        ineligible: frozenset[int] = frozenset(),
        fairness_id: str = "",
        may_wait: bool = True,
    ) -> None:
        """``ineligible``: backends outside of the subset. ``may_wait``: False: reject it if full.

        Clients with keys share by key; others by the fairness id that the gateway has set.
        """
        super().__init__(context, request_id, kind, arrival, client, reserved, model)
        self._proxy = proxy
        self._ineligible = ineligible
        self._flow = client.name if client is not None else fairness_id
        self._may_wait = may_wait
        self._scanner: Scanner = _NO_SCANNER

    # Admission.

    @property
    def flow(self) -> str:
        """Whose fair share it is part of."""
        return self._flow

    @property
    def lane(self) -> tuple[object, ...]:
        """Equal for requests that the same backends can take."""
        return (*super().lane, self._ineligible)

    def _excluded(self) -> frozenset[int]:
        excluded, ineligible = super()._excluded(), self._ineligible
        return excluded | ineligible if ineligible else excluded

    def _wait(self) -> None:
        backends = self._context.backends
        if not self._may_wait and backends.has_other(self._tried, self._excluded()):
            self.shed("every replica is busy, and the objective of this request does not wait")
            return
        super()._wait()

    def admitted(self, queued: QueuedItem[Waiting] | None = None, *, overdue: bool = False) -> bool:
        """Pick a backend; False: none has room."""
        if self.arrival is None:
            # Not routed by content: any backend of the subset with the fewest requests.
            backends, out = self._context.backends, self._ineligible
            tried = [b for b in backends.all if b.index in out] if out else []
            backend = self._home or backends.any_backend(tried)
            if backend is None or not backend.health.available or backend.index in out:
                return False
            backend.begin(limited=False)
            self._attempts, self._backend = 1, backend
            if self.trace is not None:
                self.trace.attempt()
            self._send()
            return True
        return super().admitted(queued, overdue=overdue)

    def _send(self) -> None:
        self.stage = SENT
        decision, body = self.decision, self._proxy.body
        if decision is not None and decision.priority is not None:
            spliced = self._with_priority(body, decision.priority)
            if spliced is not None:
                self._proxy.replace_body(spliced.whole(body))
        self._proxy.picked(self._endpoints())

    def _endpoints(self) -> list[Backend]:
        """Return the backend that was picked, then the next best as fallbacks."""
        first = self._backend
        assert first is not None
        context, backends = self._context, self._context.backends
        most = context.settings.pick.fallbacks
        if not most:
            return [first]
        excluded: Set[int] = self._excluded()
        if backends.full:
            excluded = excluded | backends.full
        key, priorities = first.settings.api_key_env, first.takes_priorities
        others = [
            b for b in backends.all
            if b is not first and b.index not in excluded and b.health.available
            and b.takes_priorities == priorities and b.settings.api_key_env == key
        ]  # fmt: skip
        decision = self.decision
        if decision is None:
            others.sort(key=lambda b: b.active)
        elif len(others) > 1:
            scores = decision.scores.tolist()
            scores += [math.inf] * (len(backends.all) - len(scores))
            others.sort(key=lambda b: scores[b.index])
        return [first, *others[:most]]

    # The response.

    @property
    def backend(self) -> Backend | None:
        """The backend that serves it, as far as is known."""
        return self._backend

    def moved(self, backend: Backend) -> None:
        """Another backend than the one picked has served it: the proxy has tried again."""
        first, old, decision = self._backend, self.attempt, self.decision
        if backend is first or first is None or self.stage == OVER:
            return
        context = self._context
        context.events.retried(first.index, "connect")
        context.backends.failed(first, context.now, "the proxy went to a fallback")
        self._close_attempt("backend_failed")
        backend.begin(limited=False)
        self._backend = backend
        self._attempts += 1
        if self.trace is not None:
            self.trace.attempt()
        if old is not None and decision is not None:
            self.attempt = Attempt(context.backends.cluster, old.arrival, backend.index, decision)

    def responded(self, status: int, content_type: bytes, *, by_proxy: bool) -> None:
        """The response has begun; ``by_proxy``: it is none of a backend."""
        context, backend = self._context, self._backend
        if backend is None:
            self.client_gone()  # the proxy no longer waits for an endpoint
        if self.stage == OVER or backend is None:
            return
        self.stage = STREAMING
        backend.heard_at = context.now
        if by_proxy:
            self._failure = f"the proxy answered {status} itself"
        elif status >= 500 and status != 501:
            self._failure = f"answered {status}"
            context.backends.failed(backend, context.now, self._failure)
        else:
            backend.health.success(context.now)
        if self.attempt is not None and status < 400:
            streams = status == 200 and content_type.startswith(b"text/event-stream")
            self._scanner = StreamScanner(self._kind) if streams else ReplyScanner(self._kind)

    def hide(self) -> None:
        """The body of the response will not be seen."""
        if self.attempt is not None:
            self.attempt.hide()

    def body(self, part: bytes) -> None:
        """Read a part of the response."""
        tokens = self._scanner.feed(part)
        if self._backend is not None:
            self._backend.heard_at = self._context.now
        attempt = self.attempt
        if attempt is not None:
            attempt.unseen = False
            if tokens:
                attempt.tokens(tokens)

    @property
    def is_explained(self) -> bool:
        """Whether the client may see why its request went where it went."""
        return self._explained

    def explanation(self) -> list[tuple[bytes, bytes]]:
        """Return headers that explain the decision."""
        backend = self._backend
        return response_headers.explanation(backend, self.decision) if backend else []

    @property
    def ended(self) -> bool:
        """Whether a stream has come to its end mark."""
        return self._scanner.done

    def done(self, status: int) -> None:
        """The response is complete."""
        if self._backend is None:
            self.client_gone()  # the proxy no longer waits for an endpoint
        if self.stage == OVER:
            return
        scanner = self._scanner
        usage = scanner.usage
        if usage is not None and self.attempt is not None:
            self.attempt.usage(*usage)
        if scanner.response_id and self._backend is not None:
            self._remember(scanner.response_id, self._backend)
        outcome = "done" if status < 400 else "rejected" if status < 500 else "backend_failed"
        self._finish(outcome, status)

    def client_gone(self) -> None:
        """The proxy has given the request up, because its client did or because of an error."""
        if self.stage != OVER:
            self._context.queue.remove(self)
            self._finish("client_gone", 499)

    def expired(self, why: str) -> None:
        """It has taken too long: free what it holds, whatever the proxy does with it."""
        if self.stage != OVER:
            self._context.queue.remove(self)
            self._failure = why
            self._finish("timeout", 504)

    # What a routed request does at its end.

    def _reply(self, status: int, why: str, outcome: str, extra: bytes = b"") -> None:
        self._finish(outcome, status)
        self._proxy.refused(status, why, outcome, extra)

    def _give_up(self, outcome: str = "backend_failed") -> None:
        self._reply(503, "no replica is available", outcome)

    def keeps_body(self, size: int) -> bool:
        """Whether the request's body is of use after its end: for the tokens of its prompt."""
        learner, backend, arrival = self._context.prompt_learner, self._backend, self.arrival
        if learner is None or backend is None or arrival is None:
            return False
        wanted = 0 < size <= learner.settings.prompt_bytes
        return wanted and learner.wants(backend, self._kind, arrival, self._context.now)

    def _ended(self, attempt: Attempt | None, backend: Backend | None, done: bool) -> None:
        if done and attempt is not None and backend is not None:
            self._learn_tokens(attempt, backend, self._proxy.body)
        self._proxy.drop_body()
