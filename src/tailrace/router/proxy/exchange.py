"""Life of one request through the proxy: send, stream, retry, time limits, client gone.

An :class:`Exchange` is called by the client's connection, by the backend's connection and by a
sweep a few times per second. No task and no timer belongs to it, so a request costs little.
"""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from tailrace.net.client import NO_FILES, UpstreamConnection
from tailrace.net.heads import NO_NAMES, ResponseHead
from tailrace.net.server import HttpRequest
from tailrace.router.access.keyring import Client
from tailrace.router.proxy import errors, response_headers
from tailrace.router.proxy.backends import Backend
from tailrace.router.proxy.context import RequestContext
from tailrace.router.proxy.relay import Relay
from tailrace.router.proxy.response_scan import TAIL_BYTES, find_response_id, find_usage
from tailrace.router.proxy.routed_request import (
    CONNECTING,
    OVER,
    SENT,
    STREAMING,
    WAITING,
    RoutedRequest,
)
from tailrace.router.proxy.tokenize_probe import MAX_PROBE_BYTES
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt

#: A reused connection that fails this soon was being closed by an idle server, in s.
STALE_S = 1.0

#: Methods that change nothing, so that a request of any kind may be sent twice (RFC 9110 9.2.1).
_SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE"))


class Exchange(RoutedRequest):
    """One request in progress."""

    __slots__ = ("_connection", "_heard_at", "_refreshed", "_relay", "_repeatable", "_request",
                 "_sent_at", "_timed_out", "paused")  # fmt: skip

    def __init__(
        self,
        context: RequestContext,
        request: HttpRequest,
        request_id: bytes,
        kind: str,
        arrival: Arrival | None,
        client: Client | None = None,
        reserved: float = 0.0,
        model: str = "",
    ) -> None:
        """Other arguments than ``request`` as for :class:`RoutedRequest`."""
        RoutedRequest.__init__(self, context, request_id, kind, arrival, client, reserved, model)
        self._request = request
        self._connection: UpstreamConnection | None = None
        self._refreshed = False
        self._repeatable = kind != "other" or request.head.method in _SAFE
        """Whether it may be sent again after it was sent."""
        self._timed_out = False
        self._sent_at = self._heard_at = context.now
        self._relay: Relay | None = None
        self.paused = False
        """Whether the backend is not read, because the client does not keep up."""

    def _send(self) -> None:
        self._refreshed = False
        self._connect()

    def _connect(self) -> None:
        """Get a connection; a new one if the request could not be sent again on another."""
        assert self._backend is not None
        self.stage = CONNECTING
        fresh = self._refreshed or not self._repeats
        connection = self._backend.pool.acquire(self, fresh=fresh)
        if connection is not None:
            self.connected(connection)

    # The backend's side.

    def connected(self, connection: UpstreamConnection) -> bool:
        """Send the request; False: it is not wanted any more."""
        if self.stage != CONNECTING:
            return False
        request, backend = self._request, self._backend
        assert backend is not None
        self.stage = SENT
        self._sent_at = self._context.now
        self._connection = connection
        # A client's key is for this router only.
        keys = self._client is None
        body = request.body
        spliced = None
        if self.decision is not None and self.decision.priority is not None:
            spliced = self._with_priority(body, self.decision.priority)
        size = len(body) if spliced is None else spliced.length(body)
        context, lines = self._context, b""
        if context.forwards:
            lines = context.proxies.lines(request.client.host, request.head.headers)
        dropped, trace = NO_NAMES, self.trace
        if trace is not None:
            dropped = trace.dropped
            lines += b"\r\ntraceparent: " + trace.header
        head = backend.pool.request_head(
            request.head, size, self.id, keys=keys, lines=lines, dropped=dropped
        )
        if spliced is None:
            connection.send(self, request.head.method, head, body)
        else:
            rest = memoryview(body)[spliced.rest_at :]
            connection.send(self, request.head.method, head + spliced.start, rest)
        return True

    def failed(self, why: str, *, connecting: bool) -> None:
        """The backend failed before its response was complete."""
        if self.stage == OVER:
            return
        backend, connection = self._backend, self._connection
        assert backend is not None
        self._connection = None
        now = self._context.now
        if why == NO_FILES:
            # No fault of the replica, and no other could be reached either.
            self._context.events.shed("no_files")
            self._failure = why
            self._reply(503, "the router has too many connections", "shed", b"retry-after: 1\r\n")
            return
        if (
            not connecting
            and connection is not None
            and connection.reused
            and not self._refreshed
            and self.stage == SENT
            and now - self._sent_at < STALE_S
            and self._repeats
        ):
            self._refreshed = True
            self._attempts += 1
            self._connect()
            return
        if connecting or self._begun:
            self._context.backends.failed(backend, now, why, died=connecting)
        else:
            self._suspect(why)
        self._failed_over(why, "connect" if connecting else "broken", "backend_failed")

    def head(self, head: ResponseHead) -> None:
        """The response begins: pass it on, or try another backend if it is an error of this one."""
        context, backend = self._context, self._backend
        assert backend is not None
        status = head.status
        if status == 429 or (status >= 500 and status != 501):
            why = f"answered {status}"
            pause_s = _pause_s(head)
            if pause_s or status == 429:
                backend.health.success(context.now)  # it works, but has too much to do
            if pause_s:
                self._suspect(why, min(pause_s, context.settings.retry.max_pause_s))
            elif status != 429:
                self._suspect(why)
            if status in context.settings.retry.statuses and self._may_retry():
                if self._connection is not None:
                    self._connection.abort()
                    self._connection = None
                self._failed_over(why, f"status_{status}", "backend_failed")
                return
        else:
            backend.health.success(context.now)
            if self._suspects is not None:
                self._convict()
        self.stage = STREAMING
        self._heard_at = context.now
        request = self._request
        keep = request.head.keep_alive and not request.client.closing
        kind = self._kind if self.attempt is not None else "other"
        self._relay = Relay(head, request.head, kind, keep, self._extra_headers())

    def body(self, raw: bytes, parts: list[bytes], done: bool) -> None:
        """Pass a piece of the response on, byte for byte."""
        relay, backend, attempt = self._relay, self._backend, self.attempt
        connection = self._connection
        assert relay is not None
        assert backend is not None
        backend.heard_at = self._heard_at = self._context.now
        reader = connection.reader if connection is not None else None
        out, tokens = relay.piece(raw, parts, done, reader)
        if tokens and attempt is not None:
            attempt.tokens(tokens)
        client = self._request.client
        if out:
            client.write(out)
            if self._request.body and relay.started:
                self._drop_body()
        if done:
            self._connection = None
            usage = relay.usage
            if usage is not None and attempt is not None:
                attempt.usage(*usage)
            if relay.response_id:
                self._remember(relay.response_id, backend)
            status = relay.status
            outcome = "done" if status < 400 else "rejected" if status < 500 else "backend_failed"
            self._finish(outcome, status)
            client.end(keep=relay.keep)

    def whole(self, head: ResponseHead, body: bytes) -> None:
        """The complete response at once: the short way through ``head`` and ``body``."""
        status = head.status
        if status >= 400 or head.content_type.startswith(b"text/event-stream"):
            self.head(head.of_length(len(body)))
            if self.stage == STREAMING:
                self.body(body, [body], True)
            return
        context, backend, attempt = self._context, self._backend, self.attempt
        request = self._request
        assert backend is not None
        backend.heard_at = context.now
        backend.health.success(context.now)
        if self._suspects is not None:
            self._convict()
        self._connection = None
        client = request.client
        keep = request.head.keep_alive and not client.closing
        connection = b""
        if not keep:
            connection = b"connection: close\r\n"
        elif request.head.http10:
            connection = b"connection: keep-alive\r\n"
        client.write(
            b"%bcontent-length: %d\r\n%b%b\r\n%b"
            % (head.passed(), len(body), connection, self._extra_headers(), body)
        )
        if attempt is not None:
            usage = find_usage(body if len(body) <= TAIL_BYTES else body[-TAIL_BYTES:])
            if usage is not None:
                attempt.usage(*usage)
            if self._kind == "response":
                self._remember(find_response_id(body), backend)
        self._finish("done", status)
        client.end(keep=keep)

    # The client's side.

    def client_gone(self) -> None:
        """Abort at once, so that the backend stops working on it."""
        if self.stage == OVER:
            return
        self._context.queue.remove(self)
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        relay = self._relay
        if relay is not None and relay.ended:
            # Clients may close at the end mark, before the body's last chunk.
            if relay.usage is not None and self.attempt is not None:
                self.attempt.usage(*relay.usage)
            self._finish("done", relay.status)
        else:
            self._finish("client_gone", 499)

    def client_slow(self) -> None:
        """Stop reading from the backend."""
        self.paused = True
        if self._connection is not None:
            self._connection.pause()

    def client_ready(self) -> None:
        """Go on reading."""
        self.paused = False
        self._heard_at = self._context.now
        if self._connection is not None:
            self._connection.resume()

    def _probe_client(self) -> None:
        """The client has ended its side, perhaps because it has gone: writing to it shows that."""
        relay, client = self._relay, self._request.client
        client.probing = False
        if relay is not None and relay.ended:
            client.give_up()
        elif relay is not None:
            comment = relay.comment()
            if comment:
                client.write(comment)

    def _drop_body(self) -> None:
        """Free the request's body, which will not be sent again; a probe may need a short one."""
        if len(self._request.body) > MAX_PROBE_BYTES:
            self._request.drop_body()

    # Time limits and failures.

    def check(self, now: float) -> None:
        """Enforce the time limits at ``now`` (s)."""
        limits = self._context.settings.limits
        stage = self.stage
        if self._request.client.probing:
            self._probe_client()
            if self.stage == OVER:
                return
        if now - self._started_at > limits.total_s:
            self._expired(f"not complete within {limits.total_s:g} s", final=True)
        elif stage == SENT or (stage == STREAMING and not self._begun):
            if now - self._sent_at > limits.first_byte_s:
                self._expired(f"no answer within {limits.first_byte_s:g} s")
        elif (
            stage == STREAMING
            and not self.paused
            and now - self._heard_at > limits.between_chunks_s
        ):
            self._expired(f"silent for {limits.between_chunks_s:g} s")

    @property
    def _begun(self) -> bool:
        """Whether a byte of a response was passed on."""
        return self._relay is not None and self._relay.started

    def _expired(self, why: str, *, final: bool = False) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._context.queue.remove(self)
        self._timed_out = True
        backend = self._backend
        if final:
            self._attempts = self._context.attempts
        elif backend is not None:
            # A server that answers others meanwhile is busy, not broken.
            if self._begun:
                if backend.heard_at <= self._heard_at:
                    self._context.backends.failed(backend, self._context.now, why)
            elif backend.heard_at < self._sent_at:
                self._suspect(why)
        self._failed_over(why, "timeout", "timeout")

    def _may_retry(self) -> bool:
        """Whether another backend may be tried; if so, the retry budget is charged."""
        context = self._context
        return (
            self._attempts < context.attempts
            and (self._repeatable or self.stage == CONNECTING)
            and context.backends.has_other(
                [*self._tried, self._backend] if self._backend else self._tried, self._excluded()
            )
            and context.retry_budget.spend()
        )

    @property
    def _repeats(self) -> bool:
        """Whether it may be sent once more if the attempt that now begins fails."""
        return self._repeatable and self._attempts < self._context.attempts

    def _failed_over(self, why: str, cause: str, outcome: str) -> None:
        """This attempt has failed: try another backend, or respond with the error."""
        context, backend = self._context, self._backend
        self._failure = why
        if self._begun:
            self._break_off(why, outcome)
            return
        # For an error response, ``head`` has charged the budget already.
        retry = cause.startswith("status_") or self._may_retry()
        if not retry:
            self._give_up(outcome)
            return
        assert backend is not None
        context.events.retried(backend.index, cause)
        response_headers.log_retry(self.id, backend, why)
        self._close_attempt(outcome)
        self._tried.append(backend)
        self.stage = WAITING
        self._relay = None
        if not self.admitted():
            self._wait()
        context.admit_waiting()

    def _give_up(self, outcome: str = "backend_failed") -> None:
        status = 504 if self._timed_out else 502
        backend = self._backend or (self._tried[-1] if self._tried else None)
        self._reply(status, self._blame(backend, "failed", self._failure), outcome)

    def _break_off(self, why: str, outcome: str) -> None:
        """End a response that cannot be completed: an error event in a stream, else a cut."""
        client, relay, backend = self._request.client, self._relay, self._backend
        assert relay is not None
        assert backend is not None
        message = self._blame(backend, "failed while it was answering", why)
        event = relay.error_event(message, outcome)
        self._finish(outcome, relay.status)
        if event is None:
            client.abort()
        else:
            client.write(event)
            client.end(keep=relay.keep)

    def _blame(self, backend: Backend | None, what: str, why: str) -> str:
        """Return an error message; which replica failed, and how, is not for every client."""
        if not self._explained or backend is None:
            return f"the server {what}; the request id is {self.id.decode()}"
        return f"replica {backend.label} {what}: {why}"

    def _reply(self, status: int, why: str, outcome: str, extra: bytes = b"") -> None:
        """Respond to the client with an error of the router."""
        request = self._request
        extra += b"x-request-id: %b\r\n" % self.id
        self._finish(outcome, status)
        body = errors.body(self._kind, status, why, outcome)
        request.client.respond(request.head, status, body, extra=extra)

    def _ended(self, attempt: Attempt | None, backend: Backend | None, done: bool) -> None:
        if done and attempt is not None and backend is not None:
            self._learn_tokens(attempt, backend, self._request.body)
        self._request.drop_body()

    def _extra_headers(self) -> bytes:
        return response_headers.headers(
            self.id, self._backend, self.decision, explained=self._explained
        )


def _pause_s(head: ResponseHead) -> float:
    """Return the pause that a 429 or 503 asks for, as seconds or as a date; 0: none."""
    value = head.lower.get(b"retry-after")
    if value is None or head.status not in (429, 503):
        return 0.0
    text = value.decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
