"""One stream of the proxy: the protocol of one request, message by message.

The order of the replies is that of the messages: headers, body, trailers. How the proxy sends the
request's body (``ProtocolConfiguration``) decides when the endpoint is picked:

* full duplex: when the body is complete; then the headers are answered, and the body is sent back
  in parts, unchanged but for the model's name;
* buffered: the same, with the body in one message that follows the answer to the headers;
* streamed or none: at the headers, because the request leaves with the answer to them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tailrace.net.byte_budget import ByteBudget
from tailrace.net.grpc import INVALID_ARGUMENT, GrpcCall
from tailrace.picker import messages
from tailrace.picker.messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX,
    NONE,
    STREAMED,
    UNCHANGED,
    Message,
    ShownHeaders,
)
from tailrace.picker.pick import Pick
from tailrace.router.access import refusals
from tailrace.router.access.accounts import ADMITTED
from tailrace.router.access.keyring import Client, Keyring
from tailrace.router.access.refusals import RefusedRequest
from tailrace.router.intake.request_body import BadRequest, RequestBody, comparable, read_headers
from tailrace.router.intake.routes import OTHER, kind_of
from tailrace.router.proxy import errors
from tailrace.router.proxy.backends import Backend
from tailrace.router.proxy.large_bodies import BodyReading
from tailrace.router.proxy.request_intake import RequestIntake
from tailrace.router.proxy.routed_request import OVER
from tailrace.router.serve_settings import ServeSettings

_log = logging.getLogger("tailrace.router")

#: What the first message may have beside the request's headers, for instance a subset, in bytes.
_MOST_BESIDE = 2**20
#: Headers with a client's key, which endpoints do not get.
_KEYS = ("authorization", "x-api-key")
_NO_HEAD = ShownHeaders([], {})
_LONG_HEADERS = "the request's headers are too long"


class PickerState(Protocol):
    """What a stream needs of its picker."""

    settings: ServeSettings
    intake: RequestIntake
    keyring: Keyring
    held: ByteBudget
    now: float
    """Coarse clock, s."""
    clock: Callable[[], float]

    def endpoint(self, backend: Backend) -> str:
        """Return a backend as ip:port."""

    def backend_at(self, endpoint: str) -> Backend | None:
        """Return the backend at ip:port, if there is one."""

    def outside(self, subset: frozenset[str]) -> frozenset[int]:
        """Return the numbers of the backends that are not in a subset."""

    def key_of(self, backend: Backend) -> bytes | None:
        """Return the key that a backend needs, if any."""

    def reads_response(self, streams: bool) -> bool:
        """Whether to read the body of a response that begins now."""

    def read_part(self) -> None:
        """Count a part of a response that was read."""


class PickStream:
    """Handles the messages of a stream (``grpc.MessageHandler``)."""

    __slots__ = ("__weakref__", "_call", "_client", "_complete", "_has_trailers", "_head",
                 "_hidden", "_ineligible", "_kind", "_mode", "_partial", "_parts", "_pick",
                 "_picker", "_read", "_renamed", "_response_mode", "_seen", "_since", "_size",
                 "_status", "_taken", "body", "held")  # fmt: skip

    def __init__(self, picker: PickerState, call: GrpcCall) -> None:
        self._picker = picker
        self._call = call
        self._head = _NO_HEAD
        self._kind = OTHER
        self._mode, self._response_mode = FULL_DUPLEX, NONE
        self._seen = False  # the request's headers
        self._complete = False  # the request's body
        self._has_trailers = False
        self._renamed = False  # its model
        self._parts: list[bytes] = []
        self._partial = False  # the next message has begun
        self._size = 0
        self._client: Client | None = None
        self._taken = False  # a place of the client's account
        self._ineligible: frozenset[int] = frozenset()
        self._pick: Pick | None = None
        self._read: BodyReading | None = None
        self._status = 0  # of the response
        self._hidden = False  # the response's body: only its end is seen
        self._since = picker.now
        self.body = b""
        self.held = 0
        """Bytes of the body that count in the budget of all requests."""
        picker.intake.active.add(self)  # its time limits count from the beginning

    # Messages.

    def incomplete(self, size: int) -> bool:
        """Count ``size`` bytes of a message that is not complete; too many: refuse the request."""
        held, limits = self._picker.held, self._picker.settings.limits
        self._partial = True
        if not self._seen and size > limits.header_bytes + _MOST_BESIDE:
            self._refuse(RefusedRequest(431, _LONG_HEADERS))
            return True
        if not self._complete:
            held.receiving.add(self)
        if not held.hold(self, self._body_bytes + size, limits.bodies_bytes):
            if self._complete:
                return False
            self._refuse(RefusedRequest(503, "too many request bodies at once"))
        return True

    @property
    def _body_bytes(self) -> int:
        """Bytes of the request's body that are held."""
        return self._size if self._parts else len(self.body)

    def message(self, data: bytes) -> None:
        """Handle a message of the proxy; a bug of ours ends this stream only."""
        if self._partial:
            self._partial = False
            self._picker.held.release(self, self._body_bytes)
        request = messages.read(data)
        kind = request.WhichOneof("request") if request is not None else None
        if request is None or kind is None:
            self._end(INVALID_ARGUMENT, "not a ProcessingRequest")
            return
        try:
            if not self._seen:
                most = self._picker.settings.limits.header_bytes
                if len(data) > most and request.request_headers.ByteSize() > most:
                    raise RefusedRequest(431, _LONG_HEADERS)
                self._begin(kind, request)
            elif kind == "response_body":
                self._response_body(request.response_body)
            elif kind == "request_body":
                self._request_body(request.request_body)
            elif kind == "response_headers":
                self._response_headers(request)
            elif kind == "request_trailers":
                self._request_trailers()
            elif kind == "response_trailers":
                self._call.write(UNCHANGED[kind])
                self._done()
            else:
                self._end(INVALID_ARGUMENT, "a second request on one stream")
        except RefusedRequest as refused:
            self._refuse(refused)
        except Exception:
            _log.exception("a request has failed")
            self.failed()

    def half_closed(self) -> None:
        """The proxy needs the picker no more for this request."""
        pick = self._pick
        if pick is not None and self._status and (self._hidden or pick.ended):
            self._done()
        self._release()
        self._call.end()

    def gone(self) -> None:
        """The proxy has reset the stream, or its connection is lost."""
        pick = self._pick
        if pick is not None and self._status and pick.ended:
            self._done()
        self._release()

    def check(self, now: float) -> None:
        """Enforce the time limits at ``now`` (s)."""
        limits = self._picker.settings.limits
        if not self._complete and now - self._since > limits.body_s:
            self._refuse(RefusedRequest(408, "the body did not come in time", "request_timeout"))
        elif now - self._since > limits.total_s:
            if self._pick is not None:
                self._pick.expired(f"not complete within {limits.total_s:g} s")
            self._picker.intake.active.discard(self)

    # The request.

    def _begin(self, kind: str, request: Message) -> None:
        if kind != "request_headers":
            self._end(INVALID_ARGUMENT, "the first message must be the request's headers")
            return
        if request.observability_mode:
            self._end(INVALID_ARGUMENT, "an endpoint cannot be picked in observability mode")
            return
        picker = self._picker
        self._seen = True
        self._since = picker.now
        if request.HasField("protocol_config"):
            self._mode = request.protocol_config.request_body_mode
            self._response_mode = request.protocol_config.response_body_mode
        headers = request.request_headers
        self._head = head = messages.head_of(headers)
        if head.lower.get(b":method") == b"POST":
            self._kind = kind_of(head.lower.get(b":path", b"").decode("latin-1"))
        subset = messages.subset_of(request)
        if subset is not None:
            self._ineligible = picker.outside(subset)
        self._admit_client()
        if headers.end_of_stream:
            self._mode = NONE
        if self._mode in (BUFFERED, BUFFERED_PARTIAL):
            self._call.write(UNCHANGED["request_headers"])
        elif self._mode != FULL_DUPLEX:
            self._complete = True
            self._start(None if self._kind == OTHER else self._without_body())

    def _admit_client(self) -> None:
        """Find whose request it is, if clients have keys; raise if it may not be made."""
        keyring = self._picker.keyring
        if keyring.is_open:
            return
        client = keyring.find(self._head)
        if client is None:
            raise refusals.no_key()
        self._client = client
        why, wait_s = client.account.begin(self._picker.clock())
        if why != ADMITTED:
            raise refusals.too_much(why, wait_s)
        self._taken = True

    def _without_body(self) -> RequestBody:
        """Return what is known of a request whose body does not come here."""
        body = RequestBody(self._kind)
        read_headers(body, self._head.lower)
        return body

    def _request_body(self, message: Message) -> None:
        if self._complete:
            # Streamed, and on its way already.
            if self._mode != FULL_DUPLEX:
                self._call.write(UNCHANGED["request_body"])
            return
        part, picker = message.body, self._picker
        if part:
            self._parts.append(part)
            self._size += len(part)
            limits = picker.settings.limits
            if self._size > limits.body_bytes:
                raise RefusedRequest(413, f"the body is longer than {limits.body_bytes} bytes")
            picker.held.receiving.add(self)
            if not picker.held.hold(self, self._size, limits.bodies_bytes):
                raise RefusedRequest(503, "too many request bodies at once")
        if message.end_of_stream or self._mode == BUFFERED:
            self._body_complete()
        elif self._mode == BUFFERED_PARTIAL:
            # The rest does not come here, so there is nothing to read.
            self._complete = True
            self.drop_body()
            self._start(None if self._kind == OTHER else self._without_body())

    def _request_trailers(self) -> None:
        if not self._complete:
            self._has_trailers = True  # answered after the body
            self._body_complete()
        else:
            self._call.write(UNCHANGED["request_trailers"])

    def _body_complete(self) -> None:
        self._complete = True
        picker = self._picker
        picker.held.receiving.discard(self)
        self.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if self._kind == OTHER and self._client is None:
            self._start(None)
            return
        try:
            found = picker.intake.read(self._kind, self._head.lower, self.body)
        except BadRequest as error:
            raise RefusedRequest(400, str(error)) from None
        if found is not None:
            self._start(found)
            return
        whose = self._client.name if self._client is not None else self._fairness_id
        self._read = picker.intake.large_bodies.read(
            self, self._kind, whose, self._body_read, self._nothing
        )

    def _body_read(self, found: RequestBody | BadRequest) -> None:
        """A large body has been read in its thread."""
        self._read = None
        try:
            if isinstance(found, BadRequest):
                raise RefusedRequest(400, str(found))
            self._start(found)
        except RefusedRequest as refused:
            self._refuse(refused)

    def _nothing(self) -> None:
        """The place of the client's account is freed with the stream."""

    @property
    def lower(self) -> dict[bytes, bytes]:
        """Headers of the request, with names in lower case."""
        return self._head.lower

    @property
    def _fairness_id(self) -> str:
        value = self._head.lower.get(messages.FAIRNESS_ID)
        return comparable(value.decode("latin-1")) if value else ""

    def _start(self, body: RequestBody | None) -> None:
        """Pick an endpoint for a request that is complete, or let it wait."""
        picker, client, lower = self._picker, self._client, self._head.lower
        intake, context = picker.intake, picker.intake.context
        arrival, reserved, model, may_wait = None, 0.0, "", True
        if body is not None:
            rewrite = lower.get(messages.REWRITE)
            if rewrite and self.body and self._kind != OTHER:
                name = rewrite.decode("latin-1")
                self.replace_body(intake.renamed(self.body, name))
                body.model = comparable(name)
            if client is not None:
                intake.check(client, body, self.body)
            objective = lower.get(messages.OBJECTIVE)
            if objective is not None:
                known = context.settings.pick.objectives.get(objective.decode("latin-1"))
                if known is not None:
                    if client is not None and known > 0:  # clients can send the header themselves
                        intake.check_priority(client, -known)
                    body.priority, may_wait = -known, known >= 0
        if body is not None and self._kind != OTHER:
            model, data = intake.find_model(body, self.body, client)
            if data is not self.body:
                self.replace_body(data)
            arrival = context.backends.cluster.arrive(body, keep=True)
            if client is not None and client.account.limits_tokens:
                reserved = intake.reserve(client, arrival)
        self._pick = pick = Pick(
            context, self, intake.request_id(lower.get(b"x-request-id")), self._kind, arrival,
            client, reserved, model, ineligible=self._ineligible, fairness_id=self._fairness_id,
            may_wait=may_wait,
        )  # fmt: skip
        self._taken = False  # the pick frees it
        if context.tracer is not None:
            pick.trace = context.tracer.begin(lower)
        pick.start()

    # What a pick calls.

    def replace_body(self, body: bytes) -> None:
        """Pass another body on."""
        self.body, self._renamed = body, True

    def picked(self, backends: Sequence[Backend]) -> None:
        """Name the endpoints, and pass the body on."""
        endpoints = ",".join([self._picker.endpoint(b) for b in backends])
        headers: tuple[tuple[str, bytes], ...] = ()
        removed: tuple[str, ...] = ()
        key = self._picker.key_of(backends[0])
        if key is not None:
            headers, removed = (("authorization", b"Bearer " + key),), ("x-api-key",)
        elif self._client is not None:
            removed = _KEYS
        pick = self._pick
        if pick is not None and pick.trace is not None:
            headers = (*headers, ("traceparent", pick.trace.header))
        write = self._call.write
        if self._mode in (BUFFERED, BUFFERED_PARTIAL):
            body = self.body if self._renamed else None
            write(messages.routed_with_body(endpoints, headers, removed, body))
        else:
            if self._renamed:
                headers = (*headers, ("content-length", str(len(self.body)).encode()))
            write(messages.routed(endpoints, headers, removed))
            if self._mode == FULL_DUPLEX:
                for part in messages.chunks(self.body, end=not self._has_trailers):
                    write(part)
        if self._has_trailers:
            write(UNCHANGED["request_trailers"])
        if pick is not None and pick.keeps_body(len(self.body)):
            self._picker.held.spare[self] = None
        else:
            self.drop_body()

    def refused(self, status: int, why: str, code: str, extra: bytes) -> None:
        """Answer the client with an error, and end the stream."""
        self._picker.intake.active.discard(self)
        body = errors.body(self._kind, status, why, code)
        self._respond(status, body, extra)

    def drop_body(self) -> None:
        """Free the request's body."""
        self.body, self._parts = b"", []
        held = self._picker.held
        held.receiving.discard(self)
        held.spare.pop(self, None)
        held.release(self)

    def evict(self) -> None:
        """There is no room for all bodies.

        One that has been passed on is kept only for its prompt's tokens, and dropped. Else this is
        the largest unfinished one, and its request is refused.
        """
        if self._complete:
            size, self.body = len(self.body), b""
            self._picker.held.release(self, max(0, self.held - size))
        else:
            self._refuse(RefusedRequest(503, "too many request bodies at once"))

    def failed(self) -> None:
        """It cannot be begun because of a bug of ours, or for lack of memory."""
        self._refuse(RefusedRequest(500, "the picker has failed"))

    # The response.

    def _response_headers(self, request: Message) -> None:
        status, content_type = messages.response_of(request.response_headers)
        self._status = int(status) if status.isdigit() and len(status) == 3 else 502
        pick = self._pick
        if pick is None or pick.stage == OVER:
            self._call.write(UNCHANGED["response_headers"])
            return
        served = messages.served_by(request)
        picker, picked = self._picker, pick.backend
        if served and (picked is None or picker.endpoint(picked) != served):
            backend = picker.backend_at(served)
            if backend is not None:
                pick.moved(backend)
        pick.responded(self._status, content_type, by_proxy=served == "")
        ends = request.response_headers.end_of_stream
        headers: list[tuple[str, bytes]] = []
        if pick.is_explained:
            headers = [(name.decode(), value) for name, value in pick.explanation()]
        mode = None if ends else self._wanted_mode(content_type.startswith(b"text/event-stream"))
        self._call.write(messages.response_started(headers, mode))
        if ends:
            self._done()

    def _wanted_mode(self, streams: bool) -> int | None:
        """Return how the body of the response should be sent; None: as it is set already.

        Envoy takes no other mode for a response whose request is sent in full duplex. Whether it
        does otherwise is a setting of its own, so what comes is read in any case.
        """
        mode, pick = self._response_mode, self._pick
        assert pick is not None
        changes = self._mode != FULL_DUPLEX
        wanted = pick.attempt is not None and self._picker.reads_response(streams)
        if mode == NONE or (changes and not wanted):
            self._hidden = True
            pick.hide()
        if not changes or wanted == (mode != NONE):
            return None
        return STREAMED if wanted else NONE

    def _response_body(self, message: Message) -> None:
        part = message.body
        pick = self._pick
        if self._response_mode == FULL_DUPLEX:
            for reply in messages.chunks(part, end=message.end_of_stream, of_response=True):
                self._call.write(reply)
        else:
            self._call.write(UNCHANGED["response_body"])
        self._hidden = False
        if pick is not None and pick.stage != OVER:
            if part:
                pick.body(part)
                self._picker.read_part()
            if message.end_of_stream:
                self._done()

    def _done(self) -> None:
        """The response is complete."""
        if self._pick is not None:
            self._pick.done(self._status)
        self._picker.intake.active.discard(self)

    # The end.

    def _refuse(self, refused: RefusedRequest) -> None:
        """Answer a request that is not begun."""
        picker = self._picker
        events = picker.intake.context.events
        if refused.shed_cause:
            events.shed(refused.shed_cause)
        outcome = "shed" if refused.shed_cause else "refused"
        name = self._client.name if self._client is not None else ""
        events.request_done(None, refused.status, outcome, self._kind, name)
        body = errors.body(self._kind, refused.status, refused.why, refused.code, refused.param)
        self._respond(refused.status, body, refused.headers)

    def _respond(self, status: int, body: bytes, lines: bytes) -> None:
        headers = [("content-type", b"application/json")]
        for line in lines.split(b"\r\n"):
            name, colon, value = line.partition(b": ")
            if colon:
                headers.append((name.decode("latin-1"), value))
        self._call.write(messages.immediate(status, body, headers))
        self._end()

    def _end(self, status: int = 0, why: str = "") -> None:
        self._release()
        self._call.end(status, why)

    def _release(self) -> None:
        """Free everything, however the stream has ended."""
        read, self._read = self._read, None
        if read is not None:
            read.client_gone()
        pick, self._pick = self._pick, None  # they refer to each other
        if pick is not None:
            pick.client_gone()
        if self._taken and self._client is not None:
            self._taken = False
            self._client.account.end()
        self.drop_body()
        self._picker.intake.active.discard(self)
