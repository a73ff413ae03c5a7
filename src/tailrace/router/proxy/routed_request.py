"""One request on its way to a backend: admission, decision, blame and accounting.

How a request is sent, and what becomes of the response, is up to subclasses: :class:`Exchange
<tailrace.router.proxy.exchange.Exchange>` relays it. Each way out of a request leads through
``_finish``, which closes the attempt exactly once.
"""

from typing import NamedTuple

from tailrace.queueing.fair_queue import QueuedItem
from tailrace.router.access.keyring import Client
from tailrace.router.decide.chooser import Decision
from tailrace.router.intake import priority_field
from tailrace.router.intake.priority_field import SplicedBody
from tailrace.router.observe.tracing import RequestTrace
from tailrace.router.proxy import response_headers
from tailrace.router.proxy.admission import Waiting
from tailrace.router.proxy.backends import Backend
from tailrace.router.proxy.context import RequestContext
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt

# Stages of a request.
WAITING, CONNECTING, SENT, STREAMING, OVER = range(5)


class Suspect(NamedTuple):
    """A backend that failed a request after it was sent there."""

    backend: Backend
    why: str
    pause_s: float
    """Above 0: it works, but has asked for no requests for this long."""


class RoutedRequest:
    """A request in progress, from its arrival to the end of its response."""

    __slots__ = ("__weakref__", "_attempts", "_backend", "_charged", "_client", "_context",
                 "_explained", "_failure", "_home", "_kind", "_model", "_queued", "_reserved",
                 "_started_at", "_suspects", "_tried", "arrival", "attempt", "decision", "id",
                 "priority", "stage", "trace")  # fmt: skip

    def __init__(
        self,
        context: RequestContext,
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
        self.trace: RequestTrace | None = None
        """Its spans, if it is traced."""
        self.attempt: Attempt | None = None
        self.decision: Decision | None = None
        self._backend: Backend | None = None
        self._tried: list[Backend] = []
        self._attempts = 0
        self._suspects: list[Suspect] | None = None
        """Backends that failed it after it was sent."""
        self._failure = ""
        self._started_at = context.now

    # What subclasses do.

    def _send(self) -> None:
        """Send it to its backend."""
        raise NotImplementedError

    def _reply(self, status: int, why: str, outcome: str, extra: bytes = b"") -> None:
        """Finish it, and respond with an error of the router; ``extra``: more header lines."""
        raise NotImplementedError

    def _give_up(self, outcome: str = "backend_failed") -> None:
        """No backend is left to try."""
        raise NotImplementedError

    def _ended(self, attempt: Attempt | None, backend: Backend | None, done: bool) -> None:
        """Free what it holds; ``done``: the response is complete."""

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
    def key(self) -> int:
        """Lower goes first among the requests of one client and priority."""
        if self.arrival is None:
            return 0
        rules = self._context.backends.chooser.waiting_rules
        return 0 if rules.order is None else rules.key(self.arrival, self._excluded())

    @property
    def lane(self) -> tuple[object, ...]:
        """Equal for requests that the same backends can take."""
        place = self._context.models.place(self._model)
        home = self._home
        return (place and place.group, home and home.index, *(b.index for b in self._tried))

    def shed(self, why: str) -> None:
        """Reject it with 429; called by the queue."""
        context = self._context
        context.events.shed("queue")
        if self.arrival is not None and not self._attempts:
            # A request that was sent before has a line of its attempt.
            now, chooser = context.backends.cluster.clock(), context.backends.chooser
            policy = chooser.in_charge(self.arrival, now)
            context.decision_log.rejected(self.arrival, policy, now, 429)
        after = context.queue.retry_after_s(context.now)
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

    def admitted(self, queued: QueuedItem[Waiting] | None = None, *, overdue: bool = False) -> bool:
        """Choose a backend and send; False: none has room. Also called by the queue, see there."""
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
                decision = backends.choose(arrival, tried, excluded, overdue=overdue)
                if decision is None:
                    return False
                backend = backends.all[decision.replica]
                if backend.begin():
                    break
                tried = [*tried, backend]  # another worker was faster
            self.decision = decision
            if queued is not None:
                decision.waited_s = backends.cluster.clock() - arrival.arrived_at
                decision.overtook, decision.overtook_why = queued.overtook, queued.why
                decision.overtaken = queued.overtaken
            if decision.order is not None and self._told(backend, arrival):
                decision.priority = backends.chooser.priority(arrival, decision)
        if not self._attempts and (self._queued or context.queue.items) and self.flow:
            # While nobody waits there is nothing to share.
            self._charged = self.cost
            context.queue.serve(self.flow, self.weight, self._charged)
        self._attempts += 1
        self._backend = backend
        if self.trace is not None:
            self.trace.attempt()
        self._send()
        # Entered into the records only now: the server can begin meanwhile.
        if arrival is not None and decision is not None:
            self.attempt = Attempt(backends.cluster, arrival, decision.replica, decision)
            context.events.decided(decision)
        return True

    def _told(self, backend: Backend, arrival: Arrival) -> bool:
        """Whether a request to a backend carries the router's priority."""
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

    # Blame.

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
            if self.trace is not None:
                first_s = None
                if attempt is not None and attempt.first_at is not None:
                    first_s = attempt.first_at - attempt.sent_at
                self.trace.attempt_ended(backend.label, outcome, self.decision, first_s)

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
        reserved, charged = self._reserved, self._charged
        used = self._used_tokens(attempt, outcome) if reserved or charged else 0.0
        if client is not None:
            name = client.name
            client.account.end(used - reserved if reserved else 0.0)
        if charged:
            context.queue.correct(self.flow, self.weight, used - charged)
        context.events.request_done(attempt, status, outcome, self._kind, name)
        if self.trace is not None:
            self.trace.ended(
                self._kind, status, outcome, self.decision, self._traced(attempt, backend)
            )
        done = outcome == "done"
        # The queue may hold on to a request whose client has gone, until its turn comes.
        self._ended(attempt, backend, done)
        self.arrival = None
        failed = not done and status >= 500 and outcome not in ("client_gone", "rejected")
        if failed or context.logs_requests:
            response_headers.log(
                self.id, self._kind, status, outcome, backend, self._attempts, self._failure,
                self.flow,
            )  # fmt: skip
        if context.queue.items:
            context.admit_waiting()

    def _traced(self, attempt: Attempt | None, backend: Backend | None) -> dict[str, object]:
        """Return what a span tells of it: figures and names, no text of its."""
        found: dict[str, object] = {"tailrace.request_id": self.id.decode("latin-1")}
        if backend is not None:
            found["tailrace.backend"] = backend.label
        if self._model:
            found["gen_ai.request.model"] = self._model
        if self._client is not None:
            found["tailrace.client"] = self._client.name
        if attempt is not None:
            prompt, output = attempt.reported_prompt, attempt.reported_output
            found["gen_ai.usage.input_tokens"] = attempt.prompt_tokens if prompt is None else prompt
            found["gen_ai.usage.output_tokens"] = attempt.streamed if output is None else output
        return found

    def _learn_tokens(self, attempt: Attempt, backend: Backend, body: bytes) -> None:
        """Perhaps ask the server for the tokens of a prompt that it has answered, or their count.

        ``body``: the request's; empty: it is no longer held.
        """
        context, arrival = self._context, attempt.arrival
        asked, learner = arrival.asked, context.prompt_learner
        if learner is not None and learner.offer(backend, self._kind, body, attempt, context.now):
            return
        if attempt.reported_prompt is None and not asked.has_media:
            context.tokenize_probe.offer(
                backend, self._kind, asked.model, body, arrival.size, context.now
            )

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
