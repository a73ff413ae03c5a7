"""What every request goes through before it is begun: reading its body, permissions, its model.

:class:`RequestIntake` also enforces the time limits of all requests in progress.
"""

import os
import time
from collections.abc import Mapping

from tailrace import compiled
from tailrace.net.heads import is_request_id
from tailrace.router.access import refusals
from tailrace.router.access.accounts import TOO_MANY_TOKENS
from tailrace.router.access.keyring import Client
from tailrace.router.access.refusals import RefusedRequest
from tailrace.router.intake import fast_body, model_field, priority_field
from tailrace.router.intake.request_body import RequestBody, read_body
from tailrace.router.intake.routes import OTHER
from tailrace.router.observe.decision_log import DecisionLog
from tailrace.router.observe.events import EventSink
from tailrace.router.proxy.admission import Queue, RetryBudget
from tailrace.router.proxy.backends import Backends
from tailrace.router.proxy.catalogue import ModelCatalogue
from tailrace.router.proxy.context import InProgress, RequestContext
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


class RequestIntake:
    """Reads and checks requests, and looks after those in progress."""

    def __init__(
        self,
        settings: ServeSettings,
        backends: Backends,
        events: EventSink,
        decision_log: DecisionLog,
        models: ModelCatalogue,
    ) -> None:
        self.context = RequestContext(
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
        backends.room_made = self.context.admit_waiting
        self._id_prefix = os.urandom(6).hex().encode()
        self._id_count = 0
        self._mean_output = backends.cluster.mean_output  # tokens, as of the last sweep
        compiled.wait_for(fast_body.__name__)
        self._reader = fast_body.BodyReader()
        self._parses_from = 0.0  # when the event loop has time for parsing again, s
        self.large_bodies = LargeBodies()

    @property
    def active(self) -> set[InProgress]:
        """Requests in progress."""
        return self.context.active

    @property
    def queue(self) -> Queue:
        """Requests that wait for room."""
        return self.context.queue

    def read(self, kind: str, headers: Mapping[bytes, bytes], data: bytes) -> RequestBody | None:
        """Read a body; None: that would hold up other clients. May raise BadRequest.

        ``headers`` have lower-case names.
        """
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

    def check(self, client: Client, body: RequestBody, data: bytes) -> None:
        """Refuse what a client may not ask for; ``data``: the body as it is passed on."""
        # What the compiled reader has read names no key twice.
        if client.restricted and (body.data is None or body.model not in client.models):
            _check_model(client, body, data)
        self.check_priority(client, body.priority)
        replaces = self.context.settings.admission.replace_priority
        if replaces and body.names_priority and not priority_field.is_clear(data):
            raise refusals.unclear_priority()
        if body.session is not None:
            # Two clients that use the same id do not share a conversation.
            body.session = f"{client.name}/{body.session}"

    @staticmethod
    def check_priority(client: Client, priority: int) -> None:
        """Refuse a priority that a client may not ask for."""
        if priority not in client.priorities:
            allowed = ", ".join(map(str, sorted(client.priorities)))
            raise RefusedRequest(
                403, f"this key may not ask for priority {priority}, only for: {allowed}",
                "priority_not_allowed", "priority",
            )  # fmt: skip

    def find_model(
        self, body: RequestBody, data: bytes, client: Client | None
    ) -> tuple[str, bytes]:
        """Return the model as servers know it, and the body's bytes with that name in them."""
        name = body.model
        place = self.context.models.place(name)
        if place is None:
            known = [n for n in self.context.models.names() if client is None or client.may_use(n)]
            raise refusals.no_model(name, known)
        model = place.model
        if model != name:
            data = self.renamed(data, model)
            body.model = model
        return model, data

    @staticmethod
    def renamed(data: bytes, model: str) -> bytes:
        """Return the bytes of a body with another model, and all else as it was."""
        changed = model_field.replaced(data, model)
        if changed is None:
            raise refusals.unclear_model()
        return changed

    def reserve(self, client: Client, arrival: Arrival) -> float:
        """Take the tokens of a request from a client's account; return how many."""
        asked, tokens = arrival.asked, float(arrival.prompt_tokens)
        if asked.generates:
            tokens += self._mean_output if asked.max_tokens is None else asked.max_tokens
        wait_s = client.account.reserve(tokens, arrival.arrived_at)
        if wait_s > 0:
            raise refusals.too_much(TOO_MANY_TOKENS, wait_s)
        return tokens

    def request_id(self, given: bytes | None) -> bytes:
        """Return the client's request id, or a new one."""
        if given is not None and is_request_id(given):
            return given
        self._id_count += 1
        return b"%b-%x" % (self._id_prefix, self._id_count)

    def close(self) -> None:
        """End background work."""
        self.large_bodies.close()
        self.context.tokenize_probe.close()
        if self.context.prompt_learner is not None:
            self.context.prompt_learner.close()

    def sweep(self, now: float) -> None:
        """Enforce time limits at ``now`` (s); called a few times per second."""
        context = self.context
        context.now = now
        self._mean_output = context.backends.cluster.mean_output
        for request in tuple(context.active):
            request.check(now)
        context.admit_waiting()  # those that have waited too long for the policy's limits, too
        context.queue.sweep(now)
        context.report_waiting()

    def reload(self, settings: ServeSettings) -> None:
        """Go by other settings from now on."""
        context = self.context
        context.set_up(settings)
        context.queue.settings = settings.admission
        context.retry_budget.set_up(settings.retry)
        context.tokenize_probe.settings = settings.tokens
        if context.prompt_learner is not None:
            context.prompt_learner.settings = settings.events


def _check_model(client: Client, body: RequestBody, data: bytes) -> None:
    """Refuse a model that a client may not use, and a body that may mean another one."""
    name = body.model
    if body.data is None and data[:1] == b"{" and not model_field.is_clear(data):
        raise refusals.unclear_model()
    if not name and body.kind != OTHER:
        raise refusals.unnamed_model()
    if not client.may_use(name):
        raise refusals.forbidden_model(name)
