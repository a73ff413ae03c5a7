"""Spans as a collector gets them: what they tell, how they hang together, what is never told."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from picker.pickers import CHAT, picking
from router.conftest import (
    Backend,
    Client,
    post,
    quiet_settings,
    raw,
    reply,
    run,
    running_backends,
    serving,
)
from tailrace.errors import TailraceError
from tailrace.net.tls import TlsContexts
from tailrace.picker.proxy_client import ProxyStream
from tailrace.router.app import Router
from tailrace.router.observe import tracing
from tailrace.router.observe.tracing import Tracer, TracingSettings
from tailrace.router.serve_settings import load

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "what-only-the-client-may-know"


def spans_of(body: bytes) -> list[dict[str, Any]]:
    """Read a message with the definitions of OpenTelemetry, strictly.

    Those at hand are older: there scopes are called libraries, and spans have no flags.
    """
    data = orjson.loads(body)
    for resource in data["resourceSpans"]:
        resource["instrumentationLibrarySpans"] = resource.pop("scopeSpans")
        for scope in resource["instrumentationLibrarySpans"]:
            scope["instrumentationLibrary"] = scope.pop("scope")
            for span in scope["spans"]:
                remote = 0x200 if span["kind"] == tracing._SERVER else 0
                assert span.pop("flags") == (0x101 | remote if "parentSpanId" in span else 1)
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:  # hexadecimal in OTLP, base64 in protobuf's JSON
                        span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    message = trace_service_pb2.ExportTraceServiceRequest()
    json_format.ParseDict(data, message)
    found = []
    for resource in message.resource_spans:
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        assert names["service.name"] == "tailrace"
        for scope in resource.instrumentation_library_spans:
            for span in scope.spans:
                values = {
                    a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes
                }
                found.append({
                    "trace": span.trace_id.hex(), "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(), "name": span.name, "kind": span.kind,
                    "s": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    "error": span.status.code == 2, **values,
                })  # fmt: skip
    return found


class Collector(Backend):
    """Takes spans."""

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [span for seen in self.seen for span in spans_of(seen.body)]

    async def wait(self, count: int) -> list[dict[str, Any]]:
        while len(self.spans) < count:
            await asyncio.sleep(0.01)
        return self.spans


@asynccontextmanager
async def traced(n: int = 2, **over: Any) -> AsyncIterator[tuple[Router, list[Backend], Collector]]:
    async with AsyncExitStack() as stack:
        collector = Collector()
        await collector.start()
        stack.push_async_callback(collector.kill)
        backends = await stack.enter_async_context(running_backends(n))
        settings = quiet_settings(
            [{"url": b.url, "name": f"b{i}"} for i, b in enumerate(backends)],
            tracing={"endpoint": collector.url, "interval_s": 0.01, **over.pop("tracing", {})},
            **over,
        )
        async with serving(router := Router(settings), []):
            yield router, backends, collector


async def ask(router: Router, *headers: str, body: bytes = b"") -> int:
    client = Client(*await asyncio.open_connection(*router.listen_at))
    body = body or b'{"prompt":"%b"}' % SECRET.encode()
    client.send(post("/v1/completions", body, "Authorization: Bearer " + SECRET, *headers))
    answer = await client.answer()
    client.writer.close()
    return answer.status


def test_a_trace_is_continued_to_the_backend_and_explained() -> None:
    async def scenario() -> None:
        async with traced() as (router, backends, collector):
            for backend in backends:
                backend.default = reply(b'{"usage":{"prompt_tokens":7,"completion_tokens":3}}')
            given = f"traceparent: 00-{TRACE}-{PARENT}-01", "tracestate: vendor=1"
            assert await ask(router, *given) == 200
            attempt, request = await collector.wait(2)
            assert {attempt["trace"], request["trace"]} == {TRACE}
            assert (request["parent"], attempt["parent"]) == (PARENT, request["id"])
            assert (request["kind"], attempt["kind"]) == (2, 3)
            (seen,) = [seen for backend in backends for seen in backend.seen]
            assert seen.headers["traceparent"] == f"00-{TRACE}-{attempt['id']}-01"
            assert seen.headers["tracestate"] == "vendor=1"
            assert seen.names.count("traceparent") == 1
            assert request["name"] == "route completion"
            assert request["tailrace.policy"] == "round_robin"
            assert request["tailrace.backend"] == attempt["tailrace.backend"]
            assert request["tailrace.reason"]
            assert request["tailrace.outcome"] == "done"
            assert request["tailrace.retries"] == 0
            assert request["http.response.status_code"] == 200
            assert 0 <= request["tailrace.queue_s"] <= request["s"]
            assert request["gen_ai.usage.input_tokens"] == 7
            assert request["gen_ai.usage.output_tokens"] == 3
            assert not request["error"]
            assert not any(SECRET.encode() in seen.body for seen in collector.seen)

    run(scenario())


def test_a_trace_is_started_where_there_is_none() -> None:
    async def scenario() -> None:
        async with traced(1) as (router, (backend,), collector):
            for header in (
                "x: y", "traceparent: nonsense", f"traceparent: ff-{TRACE}-{PARENT}-01",
                f"traceparent: 00-{'0' * 32}-{PARENT}-01", f"traceparent: 00-{TRACE}-{PARENT}-01-x",
                f"traceparent: 00-{TRACE}-{'0' * 16}-01", f"traceparent: 00-{TRACE.upper()}-1-01",
            ):  # fmt: skip
                assert await ask(router, header, "tracestate: vendor=1") == 200
                shown = backend.seen[-1].headers
                assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", shown["traceparent"])
                assert TRACE not in shown["traceparent"]
                assert "tracestate" not in shown  # it belongs to another trace
            assert await ask(router, f"traceparent: 01-{TRACE}-{PARENT}-01-more") == 200
            assert TRACE in backend.seen[-1].headers["traceparent"]
            spans = await collector.wait(16)
            assert len({span["trace"] for span in spans}) == 8

    run(scenario())


def test_what_is_not_sampled_is_passed_on_and_not_sent() -> None:
    async def scenario() -> None:
        async with traced(1, tracing={"sample": 0.0}) as (router, (backend,), collector):
            assert await ask(router) == 200
            assert backend.seen[-1].headers["traceparent"].endswith("-00")
            assert await ask(router, f"traceparent: 00-{TRACE}-{PARENT}-00") == 200
            assert re.fullmatch(
                f"00-{TRACE}-[0-9a-f]{{16}}-00", backend.seen[-1].headers["traceparent"]
            )
            # The client has decided that it is traced.
            assert await ask(router, f"traceparent: 00-{TRACE}-{PARENT}-01") == 200
            assert len(await collector.wait(2)) == 2

    run(scenario())


def test_retries_and_failures_are_spans_too() -> None:
    async def scenario() -> None:
        async with traced(2) as (router, backends, collector):
            for backend in backends:
                backend.scripts.append(raw(b"", abort=True))
            assert await ask(router) in (200, 502)
            while not collector.spans:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            *attempts, request = collector.spans
            assert len(attempts) == request["tailrace.retries"] + 1 >= 2
            assert [a["tailrace.attempt"] for a in attempts] == list(range(1, len(attempts) + 1))
            assert attempts[0]["error"]
            assert attempts[0]["tailrace.outcome"] == "backend_failed"
            assert {a["tailrace.backend"] for a in attempts} == {"b0", "b1"}
            headers = {s.headers["traceparent"] for b in backends for s in b.seen}
            assert {f"00-{a['trace']}-{a['id']}-01" for a in attempts} <= headers

    run(scenario())


def test_without_tracing_nothing_is_changed() -> None:
    async def scenario() -> None:
        async with running_backends(1) as (backend,):
            router = Router(quiet_settings([{"url": backend.url}]))
            async with serving(router, []):
                given = f"00-{TRACE}-{PARENT}-01"
                assert await ask(router, f"TraceParent: {given}") == 200
                assert backend.seen[0].headers["traceparent"] == given
                assert await ask(router) == 200
                assert "traceparent" not in backend.seen[1].headers

    run(scenario())


def test_a_collector_that_fails_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "AGAIN_S", 0.02)

    async def scenario() -> None:
        async with traced(1, tracing={"most": 6}) as (router, _, collector):
            tracer = router.tracer
            assert tracer is not None
            port = collector.port
            await collector.kill()
            for _ in range(5):
                assert await ask(router) == 200
            while not tracer.lost:
                await asyncio.sleep(0.01)
            assert len(tracer._spans) <= 6
            collector.scripts = [reply(b"", "503 Busy"), reply(b"", "400 Bad")]
            await collector.start(port)
            while len(collector.seen) < 2:
                await asyncio.sleep(0.01)
            lost = tracer.lost
            assert await ask(router) == 200
            while not tracer.sent:
                await asyncio.sleep(0.01)
            assert tracer.lost == lost >= 10 - 6  # what was refused is not sent again

    run(scenario())
    assert "the collector of spans fails" in caplog.text


def test_the_last_spans_are_sent_at_the_end() -> None:
    async def scenario() -> None:
        async with traced(1, tracing={"interval_s": 1000}) as (router, _, collector):
            assert await ask(router) == 200
            assert not collector.seen
            await router.stop()
            assert len(collector.spans) == 2

    run(scenario())


def test_the_picker_continues_traces() -> None:
    async def scenario() -> None:
        collector = Collector()
        await collector.start()
        tracing = {"endpoint": collector.url, "interval_s": 0.01}
        async with picking(tracing=tracing) as (_, channel, _):
            stream = ProxyStream(channel)
            await stream.headers({"traceparent": f"00-{TRACE}-{PARENT}-01"})
            await stream.body(CHAT, end=True)
            first = await stream.read()
            changed = first.request_headers.response.header_mutation.set_headers
            shown = {h.header.key: h.header.raw_value.decode() for h in changed}
            stream.call.cancel()
            attempt, request = await collector.wait(2)
            assert shown["traceparent"] == f"00-{TRACE}-{attempt['id']}-01"
            assert request["parent"] == PARENT
            assert request["tailrace.policy"] == "round_robin"
        await collector.kill()

    run(scenario(), factory=asyncio.new_event_loop)


def test_faulty_settings_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"backends": [{"url": "http://h:1"}]}
    with pytest.raises(TailraceError, match=r"tracing\.endpoint: must be like"):
        load(None, backends | {"tracing": {"endpoint": "collector:4318"}})
    monkeypatch.delenv("OTLP", raising=False)
    with pytest.raises(TailraceError, match="OTLP must hold headers like name=value"):
        load(None, backends | {"tracing": {"headers_env": "OTLP"}})
    monkeypatch.setenv("OTLP", "x-key=a=b, x-other = c")
    settings = TracingSettings(endpoint="http://h:1/v1/traces", headers_env="OTLP")
    assert settings.headers() == {"x-key": "a=b", "x-other": "c"}
    assert settings.endpoint == "http://h:1"
    Tracer(settings, TlsContexts())
