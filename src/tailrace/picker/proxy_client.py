"""The proxy's side of ext_proc, for tests of pickers: any picker, through the gRPC library."""

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Value

from tailrace.picker.messages import (
    DESTINATION,
    FULL_DUPLEX,
    MAX_CHUNK,
    NAMESPACE,
    SERVED,
    SERVICE,
    STREAMED,
    SUBSET,
    SUBSET_NAMESPACE,
    UPSTREAM,
)

CHAT = "/v1/chat/completions"


class ProtocolError(Exception):
    """A picker has not kept to the protocol."""


def expect(condition: object, what: str) -> None:
    """Raise unless a condition holds."""
    if not condition:
        raise ProtocolError(what)


class ProxyStream:
    """One request of a proxy: a stream to a picker."""

    def __init__(self, channel: Any) -> None:
        method = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        self.call = method()

    async def send(self, request: Any) -> None:
        """Send a message."""
        await self.call.write(request)

    async def headers(
        self, headers: Mapping[str, str] | None = None, *, path: str = CHAT,
        end: bool = False, mode: int | None = FULL_DUPLEX, response_mode: int = STREAMED,
        subset: str | list[str] | None = None, method: str = "POST",
    ) -> None:  # fmt: skip
        """Begin a request; ``mode``: how its body is sent, None: the picker is not told."""
        request = pb.ProcessingRequest()
        for name, value in {":method": method, ":path": path, **(headers or {})}.items():
            header = request.request_headers.headers.headers.add()
            header.key, header.raw_value = name, value.encode()
        request.request_headers.end_of_stream = end
        if mode is not None:
            request.protocol_config.request_body_mode = mode
            request.protocol_config.response_body_mode = response_mode
        if subset is not None:
            fields = request.metadata_context.filter_metadata[SUBSET_NAMESPACE].fields
            value = fields[SUBSET]
            if isinstance(subset, str):
                value.string_value = subset
            else:
                value.list_value.values.extend([_text(s) for s in subset])
        await self.send(request)

    async def body(self, data: bytes, *, end: bool = True) -> None:
        """Send a part of the request's body."""
        request = pb.ProcessingRequest()
        request.request_body.body, request.request_body.end_of_stream = data, end
        await self.send(request)

    async def response(
        self, status: int = 200, kind: str = "application/json", *, end: bool = False,
        served: str = "", upstream: str | None = None,
    ) -> None:  # fmt: skip
        """Begin the response; ``served``, ``upstream``: who answered, as metadata and attribute."""
        request = pb.ProcessingRequest()
        for name, value in {":status": str(status), "content-type": kind}.items():
            header = request.response_headers.headers.headers.add()
            header.key, header.raw_value = name, value.encode()
        request.response_headers.end_of_stream = end
        if served:
            fields = request.metadata_context.filter_metadata[NAMESPACE].fields
            fields[SERVED].string_value = served
        if upstream is not None:
            fields = request.attributes["envoy.filters.http.ext_proc"].fields
            if upstream:
                fields[UPSTREAM].string_value = upstream
        await self.send(request)

    async def response_body(self, data: bytes, *, end: bool = False) -> None:
        """Send a part of the response's body."""
        request = pb.ProcessingRequest()
        request.response_body.body, request.response_body.end_of_stream = data, end
        await self.send(request)

    async def read(self) -> Any:
        """The next reply; None: the stream has ended."""
        reply = await self.call.read()
        return None if reply is grpc.aio.EOF else reply

    async def pick(self, body: bytes, **given: Any) -> list[str]:
        """Send a whole request; return its endpoints. The body must come back as it was."""
        await self.headers(**given)
        await self.body(body)
        endpoints = endpoints_of(await self.read())
        back = await self.body_back()
        expect(back == body, "the body that came back is not the one that was sent")
        return endpoints

    async def body_back(self) -> bytes:
        """Return the request's body as the picker passes it on."""
        parts = []
        while True:
            reply = await self.read()
            kind = reply and reply.WhichOneof("response")
            expect(kind == "request_body", f"a part of the body was due, but came {kind}")
            part = reply.request_body.response.body_mutation.streamed_response
            expect(len(part.body) <= MAX_CHUNK, f"a part of the body has {len(part.body)} bytes")
            parts.append(part.body)
            if part.end_of_stream:
                return b"".join(parts)

    async def close(self) -> Any:
        """End the stream as a proxy does; return its status. All replies must have been read."""
        await self.call.done_writing()
        return await self.call.code()


def _text(text: str) -> Any:
    return Value(string_value=text)


def endpoints_of(reply: Any) -> list[str]:
    """Return the endpoints that a reply names; header and metadata must agree."""
    kind = reply and reply.WhichOneof("response")
    expect(
        kind in ("request_headers", "request_body"),
        f"an endpoint was due, but came {kind or 'the end of the stream'}"
        + (f" ({reply.immediate_response.status.code})" if kind == "immediate_response" else ""),
    )
    common = getattr(reply, kind).response
    expect(common.clear_route_cache, "clear_route_cache is not set")
    options = [o for o in common.header_mutation.set_headers if o.header.key == DESTINATION]
    expect(len(options) == 1, f"the header {DESTINATION} is set {len(options)} times")
    header = options[0].header
    named = (header.raw_value or header.value.encode()).decode()
    expect(NAMESPACE in reply.dynamic_metadata.fields, f"there is no metadata in {NAMESPACE}")
    fields = reply.dynamic_metadata.fields[NAMESPACE].struct_value.fields
    expect(DESTINATION in fields, f"metadata {NAMESPACE} has no {DESTINATION}")
    told = fields[DESTINATION].string_value
    expect(told == named, f"metadata ({told}) and header ({named}) differ")
    return [endpoint.strip() for endpoint in named.split(",")]
