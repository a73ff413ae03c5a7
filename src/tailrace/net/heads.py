"""Heads of HTTP/1.1 messages: strict reading, hop-by-hop headers, refusals, building.

httptools parses heads. Where a body ends is decided in ``framing.py`` only: the parser gets the
head alone, and the bytes after it are framed there.
"""

import re
from collections.abc import Iterable
from typing import Any

import httptools

from tailrace.net.framing import BrokenMessageError, Framing

Header = tuple[bytes, bytes]

#: Headers of the connection, not of the message (RFC 9110 7.6.1), in lower case.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings")
)  # fmt: skip
#: Headers with the key of a client, in lower case.
KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))
#: Request headers we set ourselves.
_OURS = frozenset((b"host", b"content-length", b"expect", b"x-request-id"))
#: Headers in which proxies say for whom they ask, in lower case. They are passed on only from
#: proxies that the router trusts.
FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-port",
                       b"x-forwarded-proto", b"x-real-ip"))  # fmt: skip
NO_NAMES: frozenset[bytes] = frozenset()
_ROUTER_HEADERS = b"x-tailrace-"
#: A 205 has no content either, but its framing is that of any response (RFC 9112 6.3).
_NO_BODY_STATUSES = frozenset((204, 304))
#: Most header lines of a request: each costs a call of Python.
MAX_HEADERS = 256
#: Printable characters but for the blank.
_PRINTABLE = bytes(range(33, 127))
#: Separators of path segments as servers may read them, and what would lead out of a path.
_SEPARATORS = re.compile(rb"[/\\]|%2f|%5c", re.IGNORECASE)
_PERCENT, _DOT = re.compile(rb"%(?:25)+"), re.compile(rb"%2e", re.IGNORECASE)
_DOT_SEGMENTS = frozenset((b".", b".."))

REASONS = {
    200: b"OK", 202: b"Accepted", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden",
    404: b"Not Found", 405: b"Method Not Allowed", 408: b"Request Timeout",
    413: b"Content Too Large", 417: b"Expectation Failed", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error", 501: b"Not Implemented", 502: b"Bad Gateway",
    503: b"Service Unavailable", 504: b"Gateway Timeout", 505: b"HTTP Version Not Supported",
}  # fmt: skip


class RefusedError(Exception):
    """A request that is not accepted: the status to respond with, and the reason."""

    def __init__(
        self, status: int, why: str, code: str | None = None, *, headers: bytes = b""
    ) -> None:
        """``code``: of the error, by default the status; ``headers``: lines, each ended by CRLF."""
        super().__init__(why)
        self.status = status
        self.why = why
        self.code = code
        self.headers = headers


class RequestHead:
    """Head of a request, as the client sent it."""

    __slots__ = ("chunked", "expects_continue", "headers", "http10", "keep_alive", "length",
                 "lower", "memo", "method", "path", "sized", "target")  # fmt: skip

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.headers: list[Header] = []
        """As sent, in order."""
        self.lower: dict[bytes, bytes] = {}
        """By lower-case name; the first of several wins."""
        self.http10 = False
        self.keep_alive = True
        self.length = 0
        """Bytes of the body; no meaning if chunked."""
        self.chunked = False
        self.expects_continue = False
        self.path = b""
        """Target without its query."""
        self.sized = False
        """Whether the client declared a body, by a length or as chunked."""
        self.memo: Any = None
        """What the service has found out about the head, which many requests share."""

    def passed(self, *, keys: bool, dropped: frozenset[bytes] = NO_NAMES) -> bytes:
        """Build the header lines to pass on to a backend, each with CRLF before it.

        ``keys``: the client's keys are passed on too. ``dropped``: lower-case names of headers that
        are not.
        """
        dropped = dropped | HOP_BY_HOP | _OURS | FORWARDED
        if b"connection" in self.lower:
            named = connection_tokens(self.headers)
            # End-to-end headers cannot be removed by naming them in Connection.
            dropped = dropped | (named - {b"authorization", b"content-type", b"accept"})
        if not keys:
            dropped = dropped | KEY_HEADERS
        return b"".join(
            b"\r\n%b: %b" % (name, value)
            for name, value in self.headers
            if name.lower() not in dropped
        )

    # Called by httptools.
    def on_url(self, url: bytes) -> None:
        """Keep the target."""
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; refuse a repeated framing header."""
        lower = name.lower()
        if lower in self.lower:
            if lower in (b"content-length", b"transfer-encoding", b"host"):
                raise RefusedError(400, f"several {name.decode('latin-1')} headers")
        else:
            self.lower[lower] = value
        self.headers.append((name, value))
        if len(self.headers) > MAX_HEADERS:
            raise RefusedError(431, "too many headers")


def parse_request(head: bytes) -> RequestHead:
    """Parse a request head with its empty line; raise ``RefusedError`` if it is not safe."""
    request = RequestHead()
    parser = httptools.HttpRequestParser(request)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # upgrades are ignored; what follows the head is framed by us in any case
    except httptools.HttpParserCallbackError as error:
        if isinstance(error.__context__, RefusedError):
            raise error.__context__ from None
        raise RefusedError(400, "malformed request") from None
    except httptools.HttpParserInvalidMethodError:
        raise RefusedError(501, "unknown method") from None
    except httptools.HttpParserError as error:
        raise RefusedError(400, f"malformed request: {str(error)[:80]}") from None
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise RefusedError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    request.method = parser.get_method()
    request.http10 = version == "1.0"
    lower = request.lower
    _check_target(request)
    connection = lower.get(b"connection")
    if connection is None:
        request.keep_alive = not request.http10
    else:
        tokens = connection_tokens(request.headers)
        request.keep_alive = b"close" not in tokens and (
            not request.http10 or b"keep-alive" in tokens
        )
    encoding = lower.get(b"transfer-encoding")
    length = lower.get(b"content-length")
    if encoding is not None:
        if length is not None:
            raise RefusedError(400, "both Content-Length and Transfer-Encoding")
        if request.http10:
            raise RefusedError(400, "Transfer-Encoding in HTTP/1.0")
        if encoding.strip().lower() != b"chunked":
            raise RefusedError(501, "the only Transfer-Encoding known here is chunked")
        request.chunked = True
    elif length is not None:
        request.length = content_length(length)
    if not request.http10:
        if b"host" not in lower:
            raise RefusedError(400, "no Host header")
        expect = lower.get(b"expect")
        if expect is not None:
            if expect.strip().lower() != b"100-continue":
                raise RefusedError(417, "the only Expect known here is 100-continue")
            request.expects_continue = True
    request.sized = length is not None or request.chunked
    return request


def _check_target(request: RequestHead) -> None:
    """Accept a path, reduce an absolute URL to its path, refuse everything else."""
    target = request.target
    if request.method == b"CONNECT":
        raise RefusedError(405, "this is no tunnel: CONNECT is not served")
    scheme, found, rest = target.partition(b"://")
    if found and scheme.lower() in (b"http", b"https"):
        # The client does not choose where a request goes, so its authority is dropped.
        authority = rest.replace(b"?", b"/").partition(b"/")[0]
        target = rest[len(authority) :]
        request.target = target = target if target[:1] == b"/" else b"/" + target
    elif target[:1] != b"/" and (target != b"*" or request.method != b"OPTIONS"):
        raise RefusedError(400, "the request target must be a path")
    if b"#" in target:
        raise RefusedError(400, "the request target must not have a fragment")
    request.path = path = target.partition(b"?")[0]
    if b"." in path or b"%" in path:
        _check_segments(path)


def _check_segments(path: bytes) -> None:
    """Refuse a path that a backend may take for one above its own prefix (``/a/../b``)."""
    plain = _DOT.sub(b".", _PERCENT.sub(b"%", path))
    for segment in _SEPARATORS.split(plain):
        if segment.partition(b";")[0] in _DOT_SEGMENTS:
            raise RefusedError(400, "the path must not have the segments . and ..")


def content_length(value: bytes) -> int:
    """Read a Content-Length, digits only."""
    if value.isdigit() and len(value) <= 18:
        return int(value)
    digits = value.strip(b" \t")
    if not digits.isdigit() or len(digits) > 18:
        raise RefusedError(400, "Content-Length is no number")
    return int(digits)


def connection_tokens(headers: Iterable[Header]) -> set[bytes]:
    """Return the tokens of all Connection headers, in lower case."""
    tokens: set[bytes] = set()
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            tokens.update(token.strip().lower() for token in value.split(b","))
    tokens.discard(b"")
    return tokens


def is_request_id(value: bytes) -> bool:
    """Whether a client's request id may be passed on and logged: short, printable, no blanks."""
    return 0 < len(value) <= 128 and not value.translate(None, _PRINTABLE)


def upstream_start(
    request: RequestHead,
    backend: bytes,
    prefix: bytes,
    authorization: bytes | None,
    *,
    keys: bool = True,
    dropped: frozenset[bytes] = NO_NAMES,
) -> bytes:
    """Build the head for a backend, up to the request id: its own host, no hop-by-hop headers.

    ``keys``: the client's keys are passed on, unless there is an ``authorization`` of the backend.
    ``dropped``: as for :meth:`RequestHead.passed`.
    The id and our own framing follow, see ``Pool.request_head``.
    """
    passed = request.passed(keys=keys and authorization is None, dropped=dropped)
    start = b"%b %b%b HTTP/1.1\r\nhost: %b%b" % (
        request.method, prefix, request.target, backend, passed,
    )  # fmt: skip
    if authorization is not None:
        start += b"\r\nauthorization: " + authorization
    return start + b"\r\nx-request-id: "


class ResponseHead:
    """Head of a response."""

    __slots__ = ("_passed", "content_type", "framing", "headers", "http10", "keep_alive", "lower",
                 "reason", "status")  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[Header] = []
        self.lower: dict[bytes, bytes] = {}
        self.keep_alive = True
        self.http10 = False
        self.framing = Framing("none")
        self.content_type = b""
        self._passed: bytes | None = None

    def of_length(self, length: int) -> "ResponseHead":
        """Return the same head with another Content-Length."""
        other = ResponseHead.__new__(ResponseHead)
        other.status, other.reason = self.status, self.reason
        other.headers, other.lower = self.headers, self.lower
        other.keep_alive, other.http10 = self.keep_alive, self.http10
        other.framing = Framing("length", length)
        other.content_type = self.content_type
        other._passed = self.passed()
        return other

    def passed(self) -> bytes:
        """Return the start line and header lines to pass on, without Content-Length."""
        lines = self._passed
        if lines is None:
            lines = self._passed = _passed_start(self)
        return lines

    # Called by httptools.
    def on_status(self, reason: bytes) -> None:
        """Keep the reason."""
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        lower = name.lower()
        if lower in self.lower and lower in (b"content-length", b"transfer-encoding"):
            raise BrokenMessageError(f"several {lower.decode('latin-1')} headers")
        self.lower[lower] = value
        self.headers.append((name, value))


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """Parse the head of a response to ``method``; raise ``BrokenMessageError`` if malformed."""
    response = ResponseHead()
    parser = httptools.HttpResponseParser(response)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BrokenMessageError(f"malformed answer: {str(error)[:80]}") from None
    response.status = status = parser.get_status_code()
    lower = response.lower
    response.http10 = parser.get_http_version() != "1.1"
    tokens = connection_tokens(response.headers) if b"connection" in lower else ()
    response.keep_alive = b"keep-alive" in tokens if response.http10 else b"close" not in tokens
    response.content_type = lower.get(b"content-type", b"")
    if status == 101:
        raise BrokenMessageError("switched protocols, which nobody had asked for")
    encoding = lower.get(b"transfer-encoding")
    length = lower.get(b"content-length")
    if encoding is not None and length is not None:
        raise BrokenMessageError("both Content-Length and Transfer-Encoding")
    if method == b"HEAD" or status in _NO_BODY_STATUSES or status < 200:
        response.framing = Framing("none")
    elif encoding is not None:
        if encoding.strip().lower() != b"chunked":
            raise BrokenMessageError("unknown Transfer-Encoding")
        response.framing = Framing("chunked")
    elif length is not None:
        try:
            response.framing = Framing("length", content_length(length))
        except RefusedError as error:
            raise BrokenMessageError(error.why) from None
    else:
        response.framing = Framing("close")
        response.keep_alive = False
    return response


def client_head(
    response: ResponseHead,
    *,
    chunked: bool,
    keep_alive: bool,
    http10: bool,
    extra: bytes,
) -> bytes:
    """Build the head for the client; ``extra`` are header lines, each ended by CRLF.

    ``chunked``: the body that follows is framed in chunks.
    """
    out = response.passed()
    length = response.lower.get(b"content-length")
    if length is not None and response.status != 204:
        # A 304 or the response to HEAD has no body, but may give the length it would have.
        framing = response.framing
        value = b"%d" % framing.length if framing.kind == "length" else length
        out += b"content-length: %b\r\n" % value
    if chunked:
        out += b"transfer-encoding: chunked\r\n"
    if not keep_alive:
        out += b"connection: close\r\n"
    elif http10:
        out += b"connection: keep-alive\r\n"
    return b"%b%b\r\n" % (out, extra)


def _passed_start(response: ResponseHead) -> bytes:
    status = response.status
    dropped = HOP_BY_HOP | {b"x-request-id", b"content-length"}
    if b"connection" in response.lower:
        dropped = dropped | connection_tokens(response.headers) - {b"content-type"}
    reason = response.reason or REASONS.get(status, b"")
    return b"HTTP/1.1 %d %b\r\n" % (status, reason) + b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in response.headers
        if name.lower() not in dropped and not name.lower().startswith(_ROUTER_HEADERS)
    )


def build_response(
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    keep_alive: bool = True,
    http10: bool = False,
    head_only: bool = False,
    extra: bytes = b"",
) -> bytes:
    """Build a complete response; ``extra`` are header lines, each ended by CRLF."""
    connection = b""
    if not keep_alive:
        connection = b"connection: close\r\n"
    elif http10:
        connection = b"connection: keep-alive\r\n"
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
        status, REASONS.get(status, b""), content_type, len(body), connection, extra,
        b"" if head_only else body,
    )  # fmt: skip
