"""Life of one request: admit, decide, send, stream, account; retry, time limits, client gone.

An :class:`Exchange` is called by the client's connection, by the backend's connection and by a
sweep a few times per second. No task and no timer belongs to it, so a request costs little. Each
way out of it leads through ``_finish``, which closes the attempt exactly once.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from tailrace.net.client import NO_FILES, UpstreamConnection
from tailrace.net.heads import ResponseHead
from tailrace.net.server import HttpRequest
from tailrace.router.access.keyring import Client
from tailrace.router.decide.chooser import Decision
from tailrace.router.intake import priority_field
from tailrace.router.intake.priority_field import SplicedBody
from tailrace.router.observe.decision_log import DecisionLog
from tailrace.router.observe.events import EventSink
from tailrace.router.proxy import errors, response_headers
from tailrace.router.proxy.admission import Queue, RetryBudget
from tailrace.router.proxy.backends import Backend, Backends
from tailrace.router.proxy.catalogue import ModelCatalogue
from tailrace.router.proxy.relay import Relay
from tailrace.router.proxy.response_scan import TAIL_BYTES, find_response_id, find_usage
from tailrace.router.proxy.tokenize_probe import MAX_PROBE_BYTES, TokenizeProbe
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt

#: A reused connection that fails this soon was being closed by an idle server, in s.
STALE_S = 1.0

#: Methods that change nothing, so that a request of any kind may be sent twice (RFC 9110 9.2.1).
_SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE"))

# Stages of an exchange.
WAITING, CONNECTING, SENT, STREAMING, OVER = range(5)


class Suspect(NamedTuple):
    """A backend that failed a request after it was sent there."""

    backend: Backend
    why: str
    pause_s: float
    """Above 0: it works, but has asked for no requests for this long."""


@dataclass(slots=True, kw_only=True, eq=False)
class ExchangeContext:
    """What all exchanges share."""

    settings: ServeSettings
    backends: Backends
    events: EventSink
    decision_log: DecisionLog
    queue: Queue
    retry_budget: RetryBudget
    tokenize_probe: TokenizeProbe
    models: ModelCatalogue
    explains: bool = False
    """Whether routing decisions are explained to clients without their own setting."""
    attempts: int = 1
    """How often a request is sent at most."""
    logs_requests: bool = False
    """Whether every request is logged."""
    now: float = 0.0
    """Coarse clock, s; set by the sweep."""
    active: "set[Exchange]" = field(default_factory=set)
    """Exchanges that are not over."""

    def set_up(self, settings: ServeSettings) -> None:
        """Go by settings. What every request needs is kept apart: two reads of nested settings
        took 0.4 us."""
        self.settings = settings
        self.explains = settings.explains
        self.attempts = settings.retry.attempts
        self.logs_requests = settings.log.requests

    def admit_waiting(self) -> None:
        """There may be room for a request: admit those that wait, in order."""
        if self.queue.items:
            self.queue.pump(self.now)
            self.report_waiting()

    def report_waiting(self) -> None:
        """Let other workers know whether requests wait here, so that they leave some room."""
        room = self.backends.room
        if room is not None:
            room.wait(len(self.queue) > 0)


class Exchange:
    """One request in progress."""

    __slots__ = ("__weakref__", "_attempts", "_backend", "_charged", "_client", "_connection",
                 "_context", "_explained", "_failure", "_heard_at", "_home", "_kind", "_model",
                 "_queued", "_refreshed", "_relay", "_repeatable", "_request", "_reserved",
                 "_sent_at", "_started_at", "_suspects", "_timed_out", "_tried", "arrival",
                 "attempt", "decision", "id", "paused", "priority", "stage")  # fmt: skip

    def __init__(
        self,
        context: ExchangeContext,
        request: HttpRequest,
        request_id: bytes,
        kind: str,
        arrival: Arrival | None,
        client: Client | None = None,
        reserved: float = 0.0,
        model: str = "",
    ) -> None:
        """``arrival``: the request as the policy sees it; None: it is not routed by content.

        ``client``: whose account has a place and ``reserved`` tokens taken for it. ``model``: as
        servers call it; empty: any backend will do.
        """
        self._context = context
        self._request = request
        self._kind = kind
        self._client = client
        self._reserved = reserved
        self._model = model
        self._charged = 0.0
        self._queued = False
        self._home: Backend | None = None
        if arrival is not None and arrival.asked.previous is not None:
            self._home = self._home_of(arrival.asked.previous)
        explain = client.explain if client is not None else None
        self._explained = context.explains if explain is None else explain
        self.arrival = arrival
        self.id = request_id
        self.priority = arrival.asked.priority if arrival is not None else 0
        self.stage = WAITING
        self.attempt: Attempt | None = None
        self.decision: Decision | None = None
        self._backend: Backend | None = None
        self._connection: UpstreamConnection | None = None
        self._tried: list[Backend] = []
        self._attempts = 0
        self._refreshed = False
        self._repeatable = kind != "other" or request.head.method in _SAFE
        """Whether it may be sent again after it was sent."""
        self._suspects: list[Suspect] | None = None
        """Backends that failed it after it was sent."""
        self._failure = ""
        self._timed_out = False
        self._started_at = self._sent_at = self._heard_at = context.now
        self._relay: Relay | None = None
        self.paused = False
        """Whether the backend is not read, because the client does not keep up."""

    # Admission.

    def start(self) -> None:
        """Send it, queue it, or reject it."""
        context = self._context
        # Requests that wait already for the same backends have their turn first.
        queue = context.queue
        waits = queue.items and self.arrival is not None and queue.is_waiting(self.lane)
        if waits or not self.admitted():
            self._wait()

    @property
    def flow(self) -> str:
        """Whose fair share it is part of."""
        return self._client.name if self._client is not None else ""

    @property
    def weight(self) -> float:
        """The client's share relative to others."""
        return self._client.weight if self._client is not None else 1.0

    @property
    def cost(self) -> float:
        """Tokens of prompt and answer that it is expected to take."""
        arrival = self.arrival
        if arrival is None:
            return 1.0
        asked, output = arrival.asked, arrival.predicted_output
        if asked.max_tokens is not None:
            output = min(output, asked.max_tokens)
        return arrival.prompt_tokens + (output if asked.generates else 0.0)

    @property
    def lane(self) -> tuple[object, ...]:
        """Equal for requests that the same backends can take."""
        place = self._context.models.place(self._model)
        home = self._home
        return (place and place.group, home and home.index, *(b.index for b in self._tried))

    def shed(self, why: str) -> None:
        """Reject it with 429; called by the queue."""
        self._context.events.shed("queue")
        after = self._context.queue.retry_after_s(self._context.now)
        self._reply(429, why, "shed", b"retry-after: %d\r\n" % after)

    def _wait(self) -> None:
        context = self._context
        if self.arrival is not None and context.backends.has_other(self._tried, self._excluded()):
            if not context.queue.push(self, context.now):
                self.shed("every replica is busy and the queue is full")
                return
            self._queued = True
            if not self._attempts:
                context.admit_waiting()
            context.report_waiting()
            return
        if self._attempts:
            self._give_up()
        else:
            context.events.shed("no_replica")
            after = max(1, round(context.settings.health.open_s))
            self._reply(503, "no replica is available", "shed", b"retry-after: %d\r\n" % after)

    def admitted(self) -> bool:
        """Choose a backend and send; False: none has room. Also called by the queue."""
        context, arrival, decision = self._context, self.arrival, None
        backends = context.backends
        if arrival is None:
            backend = self._home or backends.any_backend(self._tried)
            if backend is None or not backend.health.available or backend in self._tried:
                return False
            backend.begin(limited=False)
        else:
            tried, excluded = self._tried, self._excluded()
            while True:
                decision = backends.choose(arrival, tried, excluded)
                if decision is None:
                    return False
                backend = backends.all[decision.replica]
                if backend.begin():
                    break
                tried = [*tried, backend]  # another worker was faster
            self.decision = decision
            if decision.priority is not None and not self._told(backend, arrival):
                decision.priority = None
        client = self._client
        if client is not None and not self._attempts and (self._queued or context.queue.items):
            # While nobody waits there is nothing to share.
            self._charged = self.cost
            context.queue.serve(client.name, client.weight, self._charged)
        self._attempts += 1
        self._refreshed = False
        self._backend = backend
        self._connect()
        # Entered into the records only now: the server can begin meanwhile.
        if arrival is not None and decision is not None:
            self.attempt = Attempt(backends.cluster, arrival, decision.replica, decision)
            context.events.decided(decision)
        return True

    def _excluded(self) -> frozenset[int]:
        """Return the numbers of the backends that do not serve the model, as of now."""
        backends = self._context.backends
        place = self._context.models.place(self._model)
        excluded = place.excluded if place is not None else backends.numbers
        home = self._home
        if home is None:
            return excluded
        if home.health.available and home not in self._tried and home.index not in excluded:
            excluded = backends.numbers - {home.index}
        return excluded

    def _remember(self, response_id: bytes, backend: Backend) -> None:
        """Remember which server may have stored this response: follow-ups must go there."""
        if response_id:
            self._context.backends.cluster.sessions.remember_response(
                self.flow, response_id.decode("latin-1"), backend.index
            )

    def go_home(self, response_id: bytes) -> bool:
        """Send it to the backend that holds a stored response; False: none is known to."""
        self._home = self._home_of(response_id.decode("latin-1"))
        return self._home is not None

    def _home_of(self, previous: str) -> Backend | None:
        """Return the backend that gave a response which this request continues, if known."""
        backends = self._context.backends
        number = backends.cluster.sessions.replica_of_response(self.flow, previous)
        return backends.all[number] if 0 <= number < len(backends.all) else None

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
        head = backend.pool.request_head(request.head, size, self.id, keys=keys)
        if spliced is None:
            connection.send(self, request.head.method, head, body)
        else:
            rest = memoryview(body)[spliced.rest_at :]
            connection.send(self, request.head.method, head + spliced.start, rest)
        return True

    def _told(self, backend: Backend, arrival: Arrival) -> bool:
        """Whether a backend is told the router's priority for a request."""
        if not backend.takes_priorities or self._kind not in priority_field.KINDS:
            return False
        return not arrival.asked.names_priority or self._context.settings.admission.replace_priority

    def _with_priority(self, body: bytes, priority: int) -> SplicedBody | None:
        arrival, decision = self.arrival, self.decision
        assert arrival is not None
        assert decision is not None
        splice = priority_field.spliced
        if arrival.asked.names_priority:
            splice = priority_field.replaced
        spliced = splice(body, priority)
        if spliced is None:
            decision.priority = None
        return spliced

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

    def _suspect(self, why: str, pause_s: float = 0.0) -> None:
        """The backend has failed it, or has asked for a pause: its fault, or the request's."""
        assert self._backend is not None
        if self._suspects is None:
            self._suspects = []
        self._suspects.append(Suspect(self._backend, why, pause_s))

    def _convict(self) -> None:
        """Another backend has answered it, so it is those that failed it that are at fault."""
        suspects, self._suspects = self._suspects, None
        context = self._context
        for backend, why, pause_s in suspects or ():
            if pause_s:
                context.backends.pause(backend, context.now + pause_s)
            else:
                context.backends.failed(backend, context.now, why)

    def _acquit(self) -> None:
        """Nobody has answered it.

        What fails at several backends is the request's fault, or the fault of too many of them. Of
        a single one nothing is known, and a server that fails all its requests must be found out.
        """
        suspects = [suspect for suspect in self._suspects or () if not suspect.pause_s]
        context = self._context
        for backend, why, _ in suspects:
            if len(suspects) == 1:
                context.backends.failed(backend, context.now, why)
            else:
                context.backends.suspect(backend, context.now, why)

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

    # Accounting.

    def _close_attempt(self, outcome: str) -> None:
        """This attempt is over."""
        attempt, self.attempt = self.attempt, None
        backend, self._backend = self._backend, None
        if attempt is not None:
            attempt.close(outcome)
            name = backend.label if backend is not None else ""
            self._context.decision_log.write(attempt, outcome, name)
        if backend is not None:
            backend.end()

    def _finish(self, outcome: str, status: int) -> None:
        """The request is over."""
        if self.stage == OVER:
            return
        self.stage = OVER
        context = self._context
        context.active.discard(self)
        if self._suspects is not None:
            if outcome != "client_gone":
                self._acquit()
            self._suspects = None
        attempt, backend = self.attempt, self._backend
        self._close_attempt(outcome)
        client, name = self._client, ""
        if client is not None:
            name, reserved, charged = client.name, self._reserved, self._charged
            used = self._used_tokens(attempt, outcome) if reserved or charged else 0.0
            client.account.end(used - reserved if reserved else 0.0)
            if charged:
                context.queue.correct(name, client.weight, used - charged)
        context.events.request_done(attempt, status, outcome, self._kind, name)
        done = outcome == "done"
        if done and attempt is not None and attempt.reported_prompt is None:
            self._probe_length(attempt, backend)
        # The queue may hold on to a request whose client has gone, until its turn comes.
        self._request.drop_body()
        self.arrival = None
        failed = not done and status >= 500 and outcome not in ("client_gone", "rejected")
        if failed or context.logs_requests:
            response_headers.log(
                self.id, self._kind, status, outcome, backend, self._attempts, self._failure,
                self.flow,
            )  # fmt: skip
        if context.queue.items:
            context.admit_waiting()

    def _used_tokens(self, attempt: Attempt | None, outcome: str) -> float:
        """Return what a request costs its client, in tokens of prompt and answer.

        Where a server reports nothing, streamed events count. Of an answer in one piece that was
        abandoned, or reports nothing, the tokens are unknown: then what was expected stands.
        """
        if attempt is None or outcome == "rejected":
            return 0.0
        prompt, output = attempt.reported_prompt, attempt.reported_output
        if prompt is None:
            prompt = attempt.prompt_tokens
        if output is None:
            output = attempt.streamed
            if outcome not in ("done", "client_gone") and not output:
                return 0.0
            asked = attempt.arrival.asked
            if not asked.streams and asked.generates:
                return self._reserved or self._charged
        elif not output and outcome not in ("done", "client_gone"):
            return 0.0
        return float(prompt + output)

    def _probe_length(self, attempt: Attempt, backend: Backend | None) -> None:
        """The response did not report the prompt's length: perhaps ask ``/tokenize`` for it."""
        context, arrival = self._context, attempt.arrival
        asked = arrival.asked
        if backend is not None and not asked.has_media:
            context.tokenize_probe.offer(
                backend, self._kind, asked.model, self._request.body, arrival.size, context.now
            )

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
