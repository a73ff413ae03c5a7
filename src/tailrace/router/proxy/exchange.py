"""Life of one request: admit, decide, send, stream, account; retry, time limits, client gone.

An :class:`Exchange` is called by the client's connection, by the backend's connection and by a
sweep a few times per second. No task and no timer belongs to it, so a request costs little. Each
way out of it leads through ``_finish``, which closes the attempt exactly once.
"""

from typing import TYPE_CHECKING

from tailrace.net.client import UpstreamConnection
from tailrace.net.heads import ResponseHead
from tailrace.net.server import HttpRequest, error_body
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.proxy import response_headers
from tailrace.router.proxy.backends import Target
from tailrace.router.proxy.relay import Relay
from tailrace.router.proxy.response_scan import TAIL_BYTES, find_usage

if TYPE_CHECKING:
    from tailrace.router.decide.chooser import Decision
    from tailrace.router.proxy.dispatcher import Forwarder
    from tailrace.router.state.cluster import Arrival, Attempt

#: A reused connection that fails this soon was being closed by an idle server, in s.
STALE_S = 1.0

# Where an exchange stands.
WAITING, CONNECTING, SENT, STREAMING, OVER = range(5)


class Exchange:
    """One request on its way."""

    __slots__ = ("__weakref__", "_attempts", "_connection", "_f", "_failure", "_heard_at", "_kind",
                 "_paused", "_refreshed", "_relay", "_request", "_sent_at", "_started_at",
                 "_target", "_timed_out", "_tried", "arrival", "asked", "attempt", "decision", "id",
                 "priority", "stage")  # fmt: skip

    def __init__(
        self,
        forwarder: "Forwarder",
        request: HttpRequest,
        kind: str,
        asked: RequestBody | None,
        arrival: "Arrival | None",
    ) -> None:
        self._f = forwarder
        self._request = request
        self._kind = kind
        self.asked = asked
        self.arrival = arrival
        self.id = forwarder.request_id(request)
        self.priority = asked.priority if asked is not None else 0
        self.stage = WAITING
        self.attempt: Attempt | None = None
        self.decision: Decision | None = None
        self._target: Target | None = None
        self._connection: UpstreamConnection | None = None
        self._tried: list[Target] = []
        self._attempts = 0
        self._refreshed = False
        self._failure = ""
        self._timed_out = False
        self._started_at = self._sent_at = self._heard_at = forwarder.now
        self._relay: Relay | None = None
        self._paused = False

    # Admission.

    def start(self) -> None:
        """Send it, or let it wait, or send it away."""
        f = self._f
        # Those that wait already go first, unless this one is more urgent.
        if (len(f.queue) and self.arrival is not None) or not self.admitted():
            self._wait()

    def shed(self, why: str) -> None:
        """Send it away; called by the queue."""
        self._f.telemetry.shed("queue")
        after = self._f.queue.retry_after_s(self._f.now)
        self._reply(429, why, "shed", b"retry-after: %d\r\n" % after)

    def _wait(self) -> None:
        f = self._f
        if self.arrival is not None and f.plane.has_other(self._tried):
            if not f.queue.push(self, f.now):
                self.shed("every replica is busy and the queue is full")
            elif not self._attempts:
                f.room()
            return
        if self._attempts:
            self._give_up()
        else:
            f.telemetry.shed("no_replica")
            after = max(1, round(f.settings.health.open_s))
            self._reply(503, "no replica is available", "shed", b"retry-after: %d\r\n" % after)

    def admitted(self) -> bool:
        """Choose a replica and send; False: there is none with room. Also called by the queue."""
        f, arrival, decision = self._f, self.arrival, None
        plane = f.plane
        if arrival is None:
            target = plane.any_target(self._tried)
            if target is None:
                return False
        else:
            decision = plane.choose(arrival, self._tried)
            if decision is None:
                return False
            target = plane.targets[decision.replica]
            self.decision = decision
        self._attempts += 1
        self._refreshed = False
        self._target = target
        target.begin()
        self._connect(fresh=False)
        # Entered into the ledger only now: the server can begin meanwhile.
        if arrival is not None and decision is not None:
            self.attempt = plane.cluster.open(arrival, decision.replica, decision)
            f.telemetry.decided(decision)
        return True

    def _connect(self, *, fresh: bool) -> None:
        assert self._target is not None
        self.stage = CONNECTING
        connection = self._target.pool.acquire(self, fresh=fresh)
        if connection is not None:
            self.connected(connection)

    # The backend's side.

    def connected(self, connection: UpstreamConnection) -> bool:
        """Send the request; False: it is not wanted any more."""
        if self.stage != CONNECTING:
            return False
        request, target = self._request, self._target
        assert target is not None
        self.stage = SENT
        self._sent_at = self._f.now
        self._connection = connection
        head = target.pool.request_head(request.head, len(request.body), self.id)
        connection.send(self, request.head.method, head, request.body)
        return True

    def failed(self, why: str, *, connecting: bool) -> None:
        """The backend did not answer, or not to the end."""
        if self.stage == OVER:
            return
        target, connection = self._target, self._connection
        assert target is not None
        self._connection = None
        now = self._f.now
        if (
            not connecting
            and connection is not None
            and connection.reused
            and not self._refreshed
            and self.stage == SENT
            and now - self._sent_at < STALE_S
        ):
            self._refreshed = True
            self._connect(fresh=True)
            return
        target.health.failure(now, why, died=connecting)
        self._failed_over(why, "connect" if connecting else "broken", "backend_failed")

    def head(self, head: ResponseHead) -> None:
        """The answer begins: pass it on, or try another replica if it is an error of this one."""
        f, target = self._f, self._target
        assert target is not None
        status = head.status
        if status >= 500 and status != 501:
            why = f"answered {status}"
            target.health.failure(f.now, why, may_open=f.plane.may_eject())
            if status in f.settings.retry.statuses and self._may_retry():
                if self._connection is not None:
                    self._connection.abort()
                    self._connection = None
                self._failed_over(why, f"status_{status}", "backend_failed")
                return
        else:
            target.health.success(f.now)
        self.stage = STREAMING
        self._heard_at = f.now
        request = self._request
        keep = request.head.keep_alive and not request.client.closing
        kind = self._kind if self.attempt is not None else "other"
        self._relay = Relay(head, request.head, kind, keep, self._extra_headers())

    def body(self, raw: bytes, parts: list[bytes], done: bool) -> None:
        """Pass a piece of the answer on, byte for byte."""
        relay, target, attempt = self._relay, self._target, self.attempt
        connection = self._connection
        assert relay is not None
        assert target is not None
        target.heard = True
        self._heard_at = self._f.now
        reader = connection.reader if connection is not None else None
        out, tokens = relay.piece(raw, parts, done, reader)
        if tokens and attempt is not None:
            attempt.tokens(tokens)
        client = self._request.client
        if out:
            client.write(out)
        if done:
            self._connection = None
            usage = relay.usage
            if usage is not None and attempt is not None:
                attempt.usage(*usage)
            status = relay.status
            outcome = "done" if status < 400 else "rejected" if status < 500 else "backend_failed"
            self._finish(outcome, status)
            client.end(keep=relay.keep)

    def whole(self, head: ResponseHead, body: bytes) -> None:
        """The whole answer at once: the short way through ``head`` and ``body``."""
        status = head.status
        if status >= 400 or head.content_type.startswith(b"text/event-stream"):
            self.head(head.of_length(len(body)))
            if self.stage == STREAMING:
                self.body(body, [body], True)
            return
        f, target, attempt, request = self._f, self._target, self.attempt, self._request
        assert target is not None
        target.heard = True
        target.health.success(f.now)
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
        self._finish("done", status)
        client.end(keep=keep)

    # The client's side.

    def client_gone(self) -> None:
        """Break off at once: the backend shall not work for nobody."""
        if self.stage == OVER:
            return
        self._f.queue.remove(self)
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        relay = self._relay
        if relay is not None and relay.said_done:
            # Clients may close at the end mark, before the body's last chunk.
            if relay.usage is not None and self.attempt is not None:
                self.attempt.usage(*relay.usage)
            self._finish("done", relay.status)
        else:
            self._finish("client_gone", 499)

    def client_slow(self) -> None:
        """Stop reading from the backend."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def client_ready(self) -> None:
        """Go on reading."""
        self._paused = False
        self._heard_at = self._f.now
        if self._connection is not None:
            self._connection.resume()

    # Time limits and failures.

    def check(self, now: float) -> None:
        """Enforce the time limits at ``now`` (s)."""
        limits = self._f.settings.limits
        stage = self.stage
        if now - self._started_at > limits.total_s:
            self._expired(f"not complete within {limits.total_s:g} s", final=True)
        elif stage == SENT or (stage == STREAMING and not self._begun):
            if now - self._sent_at > limits.first_byte_s:
                self._expired(f"no answer within {limits.first_byte_s:g} s")
        elif (
            stage == STREAMING
            and not self._paused
            and now - self._heard_at > limits.between_chunks_s
        ):
            self._expired(f"silent for {limits.between_chunks_s:g} s")

    @property
    def _begun(self) -> bool:
        """Whether a byte of an answer was passed on."""
        return self._relay is not None and self._relay.started

    def _expired(self, why: str, *, final: bool = False) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._f.queue.remove(self)
        self._timed_out = True
        if self._target is not None and not final:
            self._target.health.failure(self._f.now, why)
        if final:
            self._attempts = self._f.settings.retry.attempts
        self._failed_over(why, "timeout", "timeout")

    def _may_retry(self) -> bool:
        """Whether another replica may be tried; it is, if so: the budget is charged."""
        f = self._f
        return (
            self._attempts < f.settings.retry.attempts
            and f.plane.has_other([*self._tried, self._target] if self._target else self._tried)
            and f.budget.spend()
        )

    def _failed_over(self, why: str, cause: str, outcome: str) -> None:
        """This attempt has failed: try another replica, or tell the client."""
        f, target = self._f, self._target
        self._failure = why
        if self._begun:
            self._break_off(why, outcome)
            return
        # An answer that made us look elsewhere has charged the budget already.
        retry = cause.startswith("status_") or self._may_retry()
        if not retry:
            self._give_up(outcome)
            return
        assert target is not None
        f.telemetry.retried(target.index, cause)
        response_headers.log_retry(self.id, target, why)
        self._close_attempt(outcome)
        self._tried.append(target)
        self.stage = WAITING
        self._relay = None
        if not self.admitted():
            self._wait()
        f.room()

    def _give_up(self, outcome: str = "backend_failed") -> None:
        status = 504 if self._timed_out else 502
        where = self._target.label if self._target is not None else ""
        if not where and self._tried:
            where = self._tried[-1].label
        self._reply(status, f"replica {where} failed: {self._failure}", outcome)

    def _break_off(self, why: str, outcome: str) -> None:
        """The answer has begun and cannot be completed: say so in a stream, else cut it off."""
        client, relay, target = self._request.client, self._relay, self._target
        assert relay is not None
        assert target is not None
        message = f"replica {target.label} failed while it was answering: {why}"
        event = relay.error_event(message, outcome)
        self._finish(outcome, relay.status)
        if event is None:
            client.abort()
        else:
            client.write(event)
            client.end(keep=relay.keep)

    def _reply(self, status: int, why: str, outcome: str, extra: bytes = b"") -> None:
        """Answer the client ourselves."""
        request = self._request
        extra += b"x-request-id: %b\r\n" % self.id
        self._finish(outcome, status)
        request.client.respond(request.head, status, error_body(status, why, outcome), extra=extra)

    # Accounts.

    def _close_attempt(self, outcome: str) -> None:
        """This attempt is over."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close(outcome)
            self._f.decision_log.write(attempt, outcome)
        target, self._target = self._target, None
        if target is not None:
            target.end()

    def _finish(self, outcome: str, status: int) -> None:
        """The request is over."""
        if self.stage == OVER:
            return
        self.stage = OVER
        f = self._f
        f.active.discard(self)
        attempt, target = self.attempt, self._target
        self._close_attempt(outcome)
        f.telemetry.request_done(attempt, status, outcome, self._kind)
        if outcome == "done" and attempt is not None and attempt.reported_prompt is None:
            self._ask_length(attempt, target)
        failed = outcome not in ("done", "client_gone", "rejected")
        if f.settings.log.requests or (failed and status != 429 and status >= 500):
            response_headers.log(
                self.id, self._kind, status, outcome, target, self._attempts, self._failure
            )
        if len(f.queue):
            f.room()

    def _ask_length(self, attempt: "Attempt", target: Target | None) -> None:
        """Nobody has said how long the prompt was: the server may be asked, now that it is over."""
        f, arrival = self._f, attempt.arrival
        asked = arrival.asked
        if target is not None and not asked.has_media:
            f.asker.offer(target, self._kind, asked.model, self._request.body, arrival.size, f.now)

    def _extra_headers(self) -> bytes:
        explain = self._f.settings.explain
        return response_headers.headers(self.id, self._target, self.decision, explained=explain)
