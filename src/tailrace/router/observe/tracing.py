"""Spans of requests for OpenTelemetry: how each was decided, sent and answered.

A request is one span, each attempt at a backend a child of it. The context of W3C Trace Context
(``traceparent``) is continued from the client to the backend, or started here. Spans go to a
collector as OTLP over HTTP in its JSON encoding, in batches; those that it does not take in time
are dropped and counted. No prompt and no key is part of a span.
"""

import asyncio
import logging
import os
import random
import re
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import Field, field_validator

from tailrace.config import Settings, Share
from tailrace.errors import TailraceError
from tailrace.net.client import FetchError, Pool
from tailrace.net.limits import Seconds
from tailrace.net.origin import Origin
from tailrace.net.tls import TlsContexts
from tailrace.router.settings import BackendTls
from tailrace.router.state.arrival import Decision

PATH = "/v1/traces"
#: Spans of one message to the collector.
BATCH = 512
#: Time for a message, s; at the end of the router less.
TIMEOUT_S, LAST_S = 10.0, 2.0
#: Pause after the collector has failed, s.
AGAIN_S = 5.0
_SERVER, _CLIENT = 2, 3
_ERROR = 2
#: Flags of a span (OTLP's SpanFlags): it is sampled, it says where its parent is, and that is
#: another process.
_SAMPLED, _KNOWN_WHERE, _REMOTE = 0x1, 0x100, 0x200
_GOOD = frozenset(("done", "client_gone", "rejected"))
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_CONTINUED = frozenset((b"traceparent",))
_STARTED = frozenset((b"traceparent", b"tracestate"))

_log = logging.getLogger("tailrace.router")


class TracingSettings(Settings):
    """Spans for OpenTelemetry; they contain no prompts and no keys."""

    endpoint: str = ""
    """Collector that takes OTLP over HTTP, e.g. http://127.0.0.1:4318; default: no tracing."""
    sample: Share = 1.0
    """Share of the requests without a `traceparent` that are traced; with one, it decides."""
    service_name: str = Field(default="tailrace", min_length=1, max_length=256)
    """Name of the service in spans."""
    headers_env: str | None = None
    """Environment variable with headers for the collector: name=value, separated by commas."""
    interval_s: Seconds = 1.0
    """Interval between two messages to the collector, s."""
    most: int = Field(default=8192, ge=1, le=1_000_000)
    """Maximum number of spans that wait for the collector; beyond it the oldest are dropped."""
    tls: BackendTls = BackendTls()

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value:
            try:
                Origin.parse(value)
            except ValueError:
                raise ValueError("must be like http://127.0.0.1:4318") from None
        return value.rstrip("/").removesuffix(PATH)

    def headers(self) -> dict[str, str]:
        """Return the headers for the collector; raise if the variable is named but not set."""
        if self.headers_env is None:
            return {}
        pairs = [pair.partition("=") for pair in os.environ.get(self.headers_env, "").split(",")]
        found = {name.strip(): value.strip() for name, equals, value in pairs if equals}
        if not found or not all(n and (n + v).isascii() and (n + v).isprintable()
                                for n, v in found.items()):  # fmt: skip
            raise TailraceError(
                f"tracing.headers_env: {self.headers_env} must hold headers like name=value"
            )
        return found


class RequestTrace:
    """The spans of one request."""

    __slots__ = ("_attempt_at", "_attempt_id", "_attempts", "_began", "_first_at", "_parent",
                 "_sampled", "_span", "_trace", "_tracer", "dropped")  # fmt: skip

    def __init__(
        self, tracer: "Tracer", trace: str, parent: str, sampled: bool, dropped: frozenset[bytes]
    ) -> None:
        self._tracer = tracer
        self._trace, self._parent, self._sampled = trace, parent, sampled
        self._span = _id(64)
        self._began = time.time_ns()
        self._first_at = 0  # when it was first sent
        self._attempts = 0
        self._attempt_id = ""
        self._attempt_at = 0
        self.dropped = dropped
        """Lower-case names of the client's headers that ``header`` replaces."""

    def attempt(self) -> None:
        """An attempt begins."""
        self._attempt_at = time.time_ns()
        self._first_at = self._first_at or self._attempt_at
        self._attempt_id = _id(64)
        self._attempts += 1

    @property
    def header(self) -> bytes:
        """Value of ``traceparent`` for the backend of the attempt."""
        flags = "01" if self._sampled else "00"
        return f"00-{self._trace}-{self._attempt_id or self._span}-{flags}".encode()

    def attempt_ended(
        self, backend: str, outcome: str, decision: Decision | None, first_token_s: float | None
    ) -> None:
        """The attempt is over; ``first_token_s``: from sending to its first token."""
        if not self._sampled or not self._attempt_id:
            return
        about: dict[str, Any] = {
            "tailrace.backend": backend, "tailrace.attempt": self._attempts,
            "tailrace.outcome": outcome,
        }  # fmt: skip
        if decision is not None:
            about["tailrace.cached_tokens_expected"] = decision.cached
            about["tailrace.first_token_predicted_s"] = decision.ttft_s
        if first_token_s is not None:
            about["tailrace.first_token_s"] = first_token_s
        span = self._attempt_id
        self._attempt_id = ""
        self._add("attempt", span, self._span, _CLIENT, self._attempt_at, outcome, about)

    def ended(
        self, kind: str, status: int, outcome: str, decision: Decision | None,
        about: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """The request is over; ``about``: what else is known of it."""
        if not self._sampled:
            return
        now = time.time_ns()
        found: dict[str, Any] = {
            "tailrace.kind": kind, "tailrace.outcome": outcome,
            "http.response.status_code": status,
            "tailrace.queue_s": ((self._first_at or now) - self._began) / 1e9,
            "tailrace.retries": max(0, self._attempts - 1), **about,
        }  # fmt: skip
        if decision is not None:
            found["tailrace.policy"] = decision.policy
            found["tailrace.reason"] = decision.reason
            if decision.fell_back is not None:
                found["tailrace.fell_back"] = decision.fell_back
        self._add(f"route {kind}", self._span, self._parent, _SERVER, self._began, outcome, found)

    def _add(
        self, name: str, span: str, parent: str, kind: int, began: int, outcome: str,
        about: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._tracer.add({
            "traceId": self._trace, "spanId": span, **({"parentSpanId": parent} if parent else {}),
            "name": name, "kind": kind, "flags": _flags(kind, parent),
            "startTimeUnixNano": str(began), "endTimeUnixNano": str(time.time_ns()),
            "attributes": [{"key": key, "value": _value(value)} for key, value in about.items()],
            "status": {} if outcome in _GOOD else {"code": _ERROR, "message": outcome},
        })  # fmt: skip


class Tracer:
    """Begins traces, and sends their spans to the collector."""

    def __init__(self, settings: TracingSettings, tls: TlsContexts) -> None:
        self._settings = settings
        self._spans: deque[dict[str, Any]] = deque(maxlen=settings.most)
        origin = Origin.parse(settings.endpoint)
        self._pool = Pool(
            origin, connect_s=3.0, headers=settings.headers(),
            tls=tls.client(settings.tls.files) if origin.tls else None,
            server_name=settings.tls.server_name,
        )  # fmt: skip
        self._resource = {
            "attributes": [
                {"key": key, "value": {"stringValue": value}}
                for key, value in (
                    ("service.name", settings.service_name),
                    ("service.instance.id", f"{socket.gethostname()}-{os.getpid()}"),
                )
            ]
        }
        self.sent = 0
        """Spans that the collector has taken."""
        self.lost = 0
        """Spans that were dropped."""
        self._failing = False

    def begin(self, headers: Mapping[bytes, bytes]) -> RequestTrace:
        """Continue the trace of a request's headers, or start one."""
        given = headers.get(b"traceparent")
        found = _PARENT.fullmatch(given.strip()) if given is not None else None
        if found is not None:
            version, trace, parent, flags = (part.decode() for part in found.groups()[:4])
            extended = found[5] is not None
            # Later versions may be longer; this one may not, and ff is none (W3C 3.2.2).
            if version != "ff" and not (extended and version == "00") and any(
                c != "0" for c in trace
            ) and any(c != "0" for c in parent):  # fmt: skip
                return RequestTrace(self, trace, parent, bool(int(flags, 16) & 1), _CONTINUED)
        sampled = random.random() < self._settings.sample
        return RequestTrace(self, _id(128), "", sampled, _STARTED)

    def add(self, span: dict[str, Any]) -> None:
        """Take a span that is over."""
        if len(self._spans) == self._spans.maxlen:
            self.lost += 1
        self._spans.append(span)

    async def run(self) -> None:
        """Send spans until cancelled."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            while self._spans:
                if not await self._send(TIMEOUT_S):
                    await asyncio.sleep(AGAIN_S)
                elif len(self._spans) < BATCH:
                    break

    async def stop(self) -> None:
        """Send what is left, as far as the collector takes it soon, and close."""
        try:
            async with asyncio.timeout(LAST_S):
                while self._spans and await self._send(LAST_S):
                    pass
        except TimeoutError:
            pass
        self._pool.abort()

    async def _send(self, timeout_s: float) -> bool:
        """Send a batch; False: the collector cannot take it now."""
        batch = [self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))]
        scope = {"scope": {"name": "tailrace"}, "spans": batch}
        message = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        headers = {"content-type": "application/json"}
        why = ""
        status = 0
        try:
            response = await self._pool.fetch(
                "POST", PATH, headers, orjson.dumps(message), timeout_s
            )
            status = response.status
            if status >= 300:
                why = f"answers {status}"
        except FetchError as error:
            why = str(error)
        except asyncio.CancelledError:
            self._spans.extendleft(reversed(batch))  # stop() sends them
            raise
        if not why:
            self.sent += len(batch)
            self._failing = False
            return True
        if not self._failing:
            _log.warning("the collector of spans fails", extra={"why": why})
        self._failing = True
        if 400 <= status < 500 and status != 429:
            self.lost += len(batch)  # it will not take them later either
            return True
        room = (self._spans.maxlen or 0) - len(self._spans)
        self.lost += max(0, len(batch) - room)
        self._spans.extendleft(reversed(batch[max(0, len(batch) - room) :]))
        return False


def _flags(kind: int, parent: str) -> int:
    """Return a span's flags: sampled, and whether its parent is of another process."""
    if not parent:
        return _SAMPLED
    return _SAMPLED | _KNOWN_WHERE | (_REMOTE if kind == _SERVER else 0)


def _id(bits: int) -> str:
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, float):
        return {"doubleValue": value if abs(value) < 1e300 else 0.0}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"stringValue": str(value)[:256]}
