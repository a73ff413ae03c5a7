"""Checks that a picker keeps to the endpoint picker protocol 1.0.0; it may be any picker.

The checks play the proxy: they send what Envoy sends and look at what comes back. Nothing is sent
to the endpoints. Each check is a coroutine with the requirement as its docstring.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import orjson
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from tailrace.picker.messages import FULL_DUPLEX, REWRITE, SERVICE, STREAMED
from tailrace.picker.proxy_client import ProtocolError, ProxyStream, endpoints_of, expect
from tailrace.picker.tls_relay import without_tls

#: Time limit of a check, s.
LIMIT_S = 30.0
#: Streams at once of the check of many.
STREAMS = 1000
_USAGE = b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}'
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'

PASSED, FAILED, SKIPPED = "pass", "fail", "skip"


class SkippedCheck(Exception):  # noqa: N818
    """A check does not apply to this picker."""


@dataclass
class Picked:
    """A picker under test, and what is known of it."""

    channel: Any
    model: str
    streams: int = STREAMS
    health: Any = None
    """Channel to its health service, if that is elsewhere."""
    endpoints: list[str] = field(default_factory=list)
    """Endpoints that it has named so far."""

    def body(self, **more: Any) -> bytes:
        """Return the body of a short chat completion."""
        messages = [{"role": "user", "content": "Hello"}]
        return orjson.dumps({"model": self.model, "messages": messages, **more})

    def stream(self) -> ProxyStream:
        """Begin a request."""
        return ProxyStream(self.channel)

    async def pick(self, body: bytes | None = None, **given: Any) -> list[str]:
        """Make a request as far as its endpoint; return the endpoints."""
        stream = self.stream()
        named = await stream.pick(self.body() if body is None else body, **given)
        await stream.close()
        self.endpoints += [e for e in named if e not in self.endpoints]
        return named

    async def refusal(self, body: bytes | None = None, **given: Any) -> int:
        """Make a request that has to be refused; return the status."""
        stream = self.stream()
        await stream.headers(**given)
        await stream.body(self.body() if body is None else body)
        reply = await stream.read()
        kind = reply and reply.WhichOneof("response")
        expect(kind == "immediate_response", f"an ImmediateResponse was due, but came {kind}")
        return int(reply.immediate_response.status.code)


async def names_an_endpoint(picker: Picked) -> None:
    """A request gets an endpoint (ip:port) in header and metadata alike, with clear_route_cache"""
    for _ in range(8):
        for endpoint in await picker.pick():
            host, colon, port = endpoint.rpartition(":")
            expect(colon and host and port.isdigit(), f"'{endpoint}' is not ip:port")


async def keeps_the_body(picker: Picked) -> None:
    """Full-duplex bodies come back byte for byte, in parts of at most 62 000 bytes"""
    for size in (0, 61_000, 62_000, 400_000, 2_000_000):
        await picker.pick(picker.body(user="x" * size, n=1))
    odd = b'{ "model" : "%b",\n\t"messages":[{"role":"user","content":"\\u00e9"}], "n": 1.0 }'
    await picker.pick(odd % picker.model.encode())


async def takes_parts(picker: Picked) -> None:
    """A body may come in many parts, the last one empty"""
    body, stream = picker.body(user="y" * 150_000), picker.stream()
    await stream.headers()
    for at in range(0, len(body), 9_999):
        await stream.body(body[at : at + 9_999], end=False)
    await stream.body(b"", end=True)
    endpoints_of(await stream.read())
    expect(await stream.body_back() == body, "the body that came back is another one")
    await stream.close()


async def replies_in_order(picker: Picked) -> None:
    """Replies come in the order headers, body, trailers; then those of the response"""
    stream = picker.stream()
    await stream.headers()
    await stream.body(picker.body(), end=False)
    trailers = pb.ProcessingRequest()
    trailers.request_trailers.SetInParent()
    await stream.send(trailers)
    kinds: list[str] = []
    while not kinds or kinds[-1] != "request_trailers":
        reply = await stream.read()
        expect(reply is not None, f"the stream ended after {kinds}")
        kinds.append(reply.WhichOneof("response"))
    due = ["request_headers", *["request_body"] * (len(kinds) - 2), "request_trailers"]
    expect(kinds == due and len(kinds) > 2, f"the replies were {kinds}")
    await _respond(stream)


async def _respond(stream: ProxyStream, *, streams: bool = False, **given: Any) -> None:
    await stream.response(kind="text/event-stream" if streams else "application/json", **given)
    reply = await stream.read()
    kind = reply and reply.WhichOneof("response")
    expect(kind == "response_headers", f"a reply to the response's headers was due, came {kind}")
    parts = [_EVENT, _EVENT, b"data: [DONE]\n\n"] if streams else [_USAGE]
    for k, part in enumerate(parts):
        await stream.response_body(part, end=k == len(parts) - 1)
        reply = await stream.read()
        kind = reply and reply.WhichOneof("response")
        expect(kind == "response_body", f"a reply to the response's body was due, came {kind}")
    await stream.close()


async def follows_responses(picker: Picked) -> None:
    """Responses are acknowledged part by part, complete ones and streams"""
    for streams in (False, True):
        stream = picker.stream()
        await stream.pick(picker.body(stream=streams), response_mode=STREAMED)
        await _respond(stream, streams=streams)


async def takes_what_fallbacks_answer(picker: Picked) -> None:
    """A response is acknowledged whichever endpoint has served it, and if it is an error"""
    for status, last in ((200, True), (503, False)):
        stream = picker.stream()
        named = await stream.pick(picker.body(), response_mode=STREAMED)
        await _respond(stream, status=status, served=named[-1 if last else 0])
    await picker.pick()


async def passes_responses_on(picker: Picked) -> None:
    """A response sent in full duplex comes back byte for byte"""
    stream = picker.stream()
    await stream.pick(picker.body(stream=True), response_mode=FULL_DUPLEX)
    await stream.response(kind="text/event-stream")
    await stream.read()
    sent, back, ended = b"", b"", False
    for k, part in enumerate((_EVENT, _EVENT * 3, b"data: [DONE]\n\n")):
        await stream.response_body(part, end=k == 2)
        sent += part
        while len(back) < len(sent) or (k == 2 and not ended):
            reply = await stream.read()
            expect(reply is not None, "the stream ended too early")
            piece = reply.response_body.response.body_mutation.streamed_response
            back, ended = back + piece.body, piece.end_of_stream
    expect(back == sent, "the response that came back is another one")
    await stream.close()


async def keeps_to_the_subset(picker: Picked) -> None:
    """Only endpoints of the subset hint are named, given as a list or as comma-separated text"""
    if not picker.endpoints:
        await picker.pick()
    one = picker.endpoints[-1]
    for subset in ([one], one, f"{one},203.0.113.1:1", [one, "203.0.113.1:1"]):
        named = await picker.pick(subset=subset)
        expect(named == [one], f"subset {subset} led to {named}")


async def refuses_an_empty_subset(picker: Picked) -> None:
    """A subset without any known endpoint leads to 503"""
    for subset in (["203.0.113.1:1"], "203.0.113.1:1,203.0.113.2:1"):
        status = await picker.refusal(subset=subset)
        expect(status == 503, f"the status is {status}")


async def orders_fallbacks(picker: Picked) -> None:
    """Fallbacks, if any, are distinct endpoints after the first"""
    named = await picker.pick()
    expect(len(set(named)) == len(named), f"an endpoint is named twice: {named}")
    if len(named) == 1:
        raise SkippedCheck("it names no fallbacks")


async def takes_no_body(picker: Picked) -> None:
    """A request without a body (GET) gets an endpoint, too"""
    stream = picker.stream()
    await stream.headers(method="GET", path="/v1/models", end=True)
    endpoints_of(await stream.read())
    await stream.close()


async def rewrites_the_model(picker: Picked) -> None:
    """x-gateway-model-name-rewrite replaces the model in the body"""
    stream = picker.stream()
    await stream.headers({REWRITE.decode(): picker.model})
    await stream.body(picker.body().replace(picker.model.encode(), b"some-alias"))
    reply = await stream.read()
    if reply is not None and reply.WhichOneof("response") == "immediate_response":
        raise SkippedCheck("it does not take the model from a header")
    endpoints_of(reply)
    model = orjson.loads(await stream.body_back())["model"]
    expect(model == picker.model, f"the model is {model}")
    await stream.close()


async def takes_keys_of_requests(picker: Picked) -> None:
    """Objectives and fairness ids that it does not know do no harm"""
    headers = {
        "x-gateway-inference-objective": "unknown-objective",
        "x-gateway-inference-fairness-id": "tenant-1",
    }
    await picker.pick(headers=headers)


async def refuses_bad_bodies(picker: Picked) -> None:
    """A body that is no JSON gets an answer: an endpoint, or a status of 4xx"""
    stream = picker.stream()
    await stream.headers()
    await stream.body(b'{"model": ')
    reply = await stream.read()
    kind = reply and reply.WhichOneof("response")
    if kind == "immediate_response":
        status = reply.immediate_response.status.code
        expect(400 <= status < 500, f"the status is {status}")
    else:
        endpoints_of(reply)


async def survives_cancels(picker: Picked) -> None:
    """Streams that are cancelled at any step do not disturb others"""
    for steps in range(5):
        for _ in range(20):
            stream = picker.stream()
            if steps >= 1:
                await stream.headers()
            if steps >= 2:
                await stream.body(picker.body()[:9], end=False)
            if steps >= 3:
                await stream.body(picker.body()[9:])
                await stream.read()
            if steps >= 4:
                await stream.response(kind="text/event-stream")
            stream.call.cancel()
        await picker.pick()


async def survives_nonsense(picker: Picked) -> None:
    """Messages that are no ProcessingRequest end their own stream only"""
    method = picker.channel.stream_stream(f"/{SERVICE}/Process")
    for data in (b"\xff" * 50, b"\x00", b"\x12\xff\xff\xff\xff\x0f"):
        call = method()
        await call.write(data)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        call.cancel()
    await picker.pick()


async def takes_many_streams(picker: Picked) -> None:
    """1 000 requests at once each get an endpoint and are followed to their end"""
    open_streams = [picker.stream() for _ in range(picker.streams)]

    async def begin(stream: ProxyStream) -> None:
        named = await stream.pick(picker.body(stream=True), response_mode=STREAMED)
        expect(named, "no endpoint")

    await asyncio.gather(*(begin(stream) for stream in open_streams))
    await asyncio.gather(*(_respond(stream, streams=True) for stream in open_streams))


async def reports_health(picker: Picked) -> None:
    """gRPC health answers SERVING for liveness, readiness and the ext_proc service"""
    check = (picker.health or picker.channel).unary_unary("/grpc.health.v1.Health/Check")
    for service in ("liveness", "readiness", SERVICE):
        name = service.encode()
        try:
            state = await check(bytes((0x0A, len(name))) + name)
        except grpc.aio.AioRpcError as error:
            raise ProtocolError(f"{service}: {error.code().name}") from None
        expect(state == b"\x08\x01", f"{service} is not SERVING")


Check = Callable[[Picked], Awaitable[None]]
CHECKS: tuple[Check, ...] = (
    reports_health, names_an_endpoint, keeps_the_body, takes_parts, replies_in_order,
    follows_responses, takes_what_fallbacks_answer, passes_responses_on, keeps_to_the_subset,
    refuses_an_empty_subset, orders_fallbacks, takes_no_body, rewrites_the_model,
    takes_keys_of_requests, refuses_bad_bodies, survives_cancels, survives_nonsense,
    takes_many_streams,
)  # fmt: skip


@dataclass(frozen=True)
class CheckResult:
    """What a check found."""

    requirement: str
    outcome: str
    """pass, fail or skip."""
    why: str
    took_s: float


async def check_picker(
    address: str, *, model: str, streams: int = STREAMS, limit_s: float = LIMIT_S,
    checks: tuple[Check, ...] = CHECKS, done: Callable[[CheckResult], None] = lambda _: None,
    tls: bool = False, health: str = "",
) -> list[CheckResult]:  # fmt: skip
    """Run all checks against the picker at host:port; ``done`` is called after each.

    ``tls``: it has TLS; its certificate is not checked. ``health``: where its health service is,
    if that is another host:port; without TLS.
    """
    found = []
    options = [("grpc.max_receive_message_length", -1)]
    async with contextlib.AsyncExitStack() as stack:
        if tls:
            address = await stack.enter_async_context(without_tls(address))

        async def channel_to(address: str) -> Any:
            channel = grpc.aio.insecure_channel(address, options=options)
            return await stack.enter_async_context(channel)

        picker = Picked(await channel_to(address), model, streams)
        if health:
            picker.health = await channel_to(health)
        for check in checks:
            result = await _run(check, picker, limit_s)
            found.append(result)
            done(result)
    return found


async def _run(check: Check, picker: Picked, limit_s: float) -> CheckResult:
    began, outcome, why = time.monotonic(), PASSED, ""
    try:
        async with asyncio.timeout(limit_s):
            await check(picker)
    except SkippedCheck as skipped:
        outcome, why = SKIPPED, str(skipped)
    except TimeoutError:
        outcome, why = FAILED, f"no reply within {limit_s:g} s"
    except ProtocolError as error:
        outcome, why = FAILED, str(error)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
        outcome, why = FAILED, f"the stream ended: {code}"
    requirement = (check.__doc__ or "").strip()
    return CheckResult(requirement, outcome, why, time.monotonic() - began)
