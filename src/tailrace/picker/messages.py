"""Messages of Envoy's external processing (ext_proc v3), read and made.

Names of headers and metadata are those of the Gateway API Inference Extension's endpoint picker
protocol, version 1.0.0.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

METHOD = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
#: Where requests go: header, and metadata in the namespace below.
DESTINATION = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
#: Which endpoint has served, in metadata of the response.
SERVED = "x-gateway-destination-endpoint-served"
#: The endpoints to choose from, in metadata of the request.
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
#: What a request may say in headers.
FAIRNESS_ID = b"x-gateway-inference-fairness-id"
OBJECTIVE = b"x-gateway-inference-objective"
REWRITE = b"x-gateway-model-name-rewrite"
#: Attribute by which a stock Envoy tells the endpoint that has served.
UPSTREAM = "upstream.address"
#: Largest part of a body in one message to the proxy, in bytes.
MAX_CHUNK = 62_000

# How bodies are sent (envoy.extensions.filters.http.ext_proc.v3.ProcessingMode).
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)
_SEND = 1  # of headers and trailers
_OVERWRITE = 2  # of a header that is there already

#: Most endpoints of a subset that are looked at.
_MOST_ENDPOINTS = 10_000

Message = Any  # the classes of protobuf are made at run time
HeaderPairs = Sequence[tuple[str, bytes]]


class ShownHeaders(NamedTuple):
    """Headers of a request or response."""

    headers: list[tuple[bytes, bytes]]
    lower: dict[bytes, bytes]
    """By lower-case name; the first of several wins."""


def read(data: bytes) -> Message | None:
    """Parse a message of the proxy; None: it is none."""
    try:
        return pb.ProcessingRequest.FromString(data)
    except (DecodeError, RecursionError):
        return None


@lru_cache(maxsize=1024)
def _name(key: str) -> bytes:
    """Return a header's name in lower case; most requests have the same ones."""
    return key.encode().lower()


def head_of(headers: Message) -> ShownHeaders:
    """Return the headers of an HttpHeaders message."""
    found: list[tuple[bytes, bytes]] = []
    lower: dict[bytes, bytes] = {}
    for header in headers.headers.headers:
        name, value = _name(header.key), header.raw_value or header.value.encode()
        found.append((name, value))
        if name not in lower:
            lower[name] = value
    return ShownHeaders(found, lower)


def response_of(headers: Message) -> tuple[bytes, bytes]:
    """Return ``:status`` and the content type of an HttpHeaders message; empty: there is none."""
    status = content_type = b""
    for header in headers.headers.headers:
        key = header.key
        if key == ":status":
            status = status or header.raw_value or header.value.encode()
        elif len(key) == 12 and _name(key) == b"content-type":
            content_type = content_type or header.raw_value or header.value.encode()
    return status, content_type


def subset_of(request: Message) -> frozenset[str] | None:
    """Return the endpoints that a request may go to; None: any."""
    if not request.HasField("metadata_context"):
        return None
    metadata = request.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata:
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts = [v.string_value for v in value.list_value.values[:_MOST_ENDPOINTS]]
    else:
        texts = value.string_value.split(",", _MOST_ENDPOINTS)
    return frozenset(text.strip() for text in texts if text.strip())


def served_by(request: Message) -> str | None:
    """Return the endpoint that has served; empty: the proxy itself; None: it is not told."""
    if request.HasField("metadata_context"):
        metadata = request.metadata_context.filter_metadata
        if NAMESPACE in metadata:
            fields = metadata[NAMESPACE].fields
            if SERVED in fields:
                return str(fields[SERVED].string_value)
    told = None
    for attributes in request.attributes.values():
        told = ""
        if UPSTREAM in attributes.fields:
            return str(attributes.fields[UPSTREAM].string_value)
    return told


# Replies.


def _set(mutation: Message, headers: HeaderPairs) -> None:
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value = name, value
        option.append_action = _OVERWRITE


@lru_cache(maxsize=4096)
def routed(
    endpoints: str, headers: tuple[tuple[str, bytes], ...], removed: tuple[str, ...]
) -> bytes:
    """Reply to a request's headers: where it goes, other headers to set and to remove.

    Most requests have one of a few replies, so these are kept.
    """
    reply = pb.ProcessingResponse()
    _route(reply, reply.request_headers.response, endpoints, headers, removed)
    return bytes(reply.SerializeToString())


def routed_with_body(
    endpoints: str, headers: HeaderPairs, removed: Sequence[str], body: bytes | None
) -> bytes:
    """Reply to a buffered body: the same, and the body if it is another one."""
    reply = pb.ProcessingResponse()
    common = reply.request_body.response
    _route(reply, common, endpoints, headers, removed)
    if body is not None:
        common.body_mutation.body = body
    return bytes(reply.SerializeToString())


def _route(
    reply: Message, common: Message, endpoints: str, headers: HeaderPairs, removed: Sequence[str]
) -> None:
    common.clear_route_cache = True
    _set(common.header_mutation, [(DESTINATION, endpoints.encode()), *headers])
    common.header_mutation.remove_headers.extend(removed)
    fields = reply.dynamic_metadata.fields[NAMESPACE].struct_value.fields
    fields[DESTINATION].string_value = endpoints


def chunks(body: bytes, *, end: bool, of_response: bool = False) -> Iterator[bytes]:
    """Replies that pass a body on in parts; ``end``: nothing follows, no trailers either."""
    last = max(0, len(body) - 1) // MAX_CHUNK
    for k in range(last + 1):
        reply = pb.ProcessingResponse()
        message = reply.response_body if of_response else reply.request_body
        part = message.response.body_mutation.streamed_response
        part.body = body[k * MAX_CHUNK : (k + 1) * MAX_CHUNK] if last else body
        part.end_of_stream = end and k == last
        yield bytes(reply.SerializeToString())


def _constant(kind: str) -> bytes:
    reply = pb.ProcessingResponse()
    getattr(reply, kind).SetInParent()
    return bytes(reply.SerializeToString())


#: Replies that change nothing, by the kind of message they answer.
UNCHANGED: Mapping[str, bytes] = {
    kind: _constant(kind)
    for kind in (
        *("request_headers", "request_body", "request_trailers"),
        *("response_headers", "response_body", "response_trailers"),
    )
}


def response_started(headers: HeaderPairs, body_mode: int | None) -> bytes:
    """Reply to a response's headers; ``body_mode``: how its body is to be sent, None: as set."""
    if body_mode is None and not headers:
        return UNCHANGED["response_headers"]
    return _response_started(tuple(headers), body_mode)


@lru_cache(maxsize=4096)
def _response_started(headers: tuple[tuple[str, bytes], ...], body_mode: int | None) -> bytes:
    reply = pb.ProcessingResponse()
    reply.response_headers.SetInParent()
    if headers:
        _set(reply.response_headers.response.header_mutation, headers)
    if body_mode is not None:
        mode = reply.mode_override
        mode.request_header_mode = mode.response_header_mode = _SEND
        mode.response_body_mode = body_mode
        # With trailers the stream lasts as long as the response.
        mode.response_trailer_mode = _SEND
    return bytes(reply.SerializeToString())


def immediate(status: int, body: bytes, headers: HeaderPairs) -> bytes:
    """Reply that answers the client instead of an endpoint."""
    reply = pb.ProcessingResponse()
    response = reply.immediate_response
    response.status.code = status
    response.body = body
    response.details = "tailrace"
    _set(response.headers, headers)
    return bytes(reply.SerializeToString())
