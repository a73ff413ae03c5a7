"""Passes a response on to a client, byte for byte, and can end it with an error if it breaks."""

from tailrace.net.framing import LAST_CHUNK, BodyReader, ChunkedReader, chunk
from tailrace.net.heads import RequestHead, ResponseHead, client_head
from tailrace.router.proxy import errors
from tailrace.router.proxy.response_scan import (
    NoScanner,
    ReplyScanner,
    Scanner,
    StreamScanner,
    Usage,
)

#: Most of a chunk that is held back until it is complete, in bytes.
HOLD_BYTES = 65_536

# How the body is written to the client: as it came, decoded, or in chunks of ours.
_RAW, _DECODED, _CHUNKS = range(3)
_NO_SCANNER = NoScanner()


class Relay:
    """One response in transit to the client.

    The head of a stream waits for the first event: until then another backend can still take over,
    and a server sends the head long before the first token. An incomplete chunk of a stream is held
    back too: an error event can only follow a complete one.
    """

    __slots__ = ("_end", "_head", "_held", "_kind", "_measured", "_mid_chunk", "_mode", "_scanner",
                 "keep", "sse", "started", "status")  # fmt: skip

    def __init__(
        self, response: ResponseHead, request: RequestHead, kind: str, keep: bool, extra: bytes
    ) -> None:
        """``kind``: of the request, "other" has no tokens; ``extra``: more header lines."""
        self.status = response.status
        self._kind = kind
        self.started = False
        """Whether a byte was passed on."""
        framing = response.framing.kind
        self._measured = framing not in ("chunked", "close")  # its length is known in advance
        self._mode = _RAW
        if not self._measured:
            self._mode = _DECODED if request.http10 else _RAW if framing == "chunked" else _CHUNKS
        self.keep = keep and self._mode != _DECODED
        """Whether the client's connection can be used again."""
        self.sse = response.status == 200 and response.content_type.startswith(b"text/event-stream")
        self._scanner: Scanner = _NO_SCANNER
        if kind != "other" and response.status < 400:
            self._scanner = StreamScanner(kind) if self.sse else ReplyScanner(kind)
        self._head = client_head(
            response,
            chunked=not self._measured and not request.http10,
            keep_alive=self.keep,
            http10=request.http10,
            extra=extra,
        )
        self._held = b""
        self._mid_chunk = False
        self._end = b""  # the last bytes that were passed on

    @property
    def ended(self) -> bool:
        """Whether the stream has ended with its end mark."""
        return self.sse and self._scanner.done

    @property
    def usage(self) -> Usage | None:
        """The usage that the server reported, if it has."""
        return self._scanner.usage

    @property
    def response_id(self) -> bytes:
        """Under which the server may have stored the response; empty if it told none."""
        return self._scanner.response_id

    def piece(
        self, raw: bytes, parts: list[bytes], done: bool, reader: BodyReader | None
    ) -> tuple[bytes, int]:
        """Take a piece of the body; return what to write now, and its number of tokens."""
        tokens = 0
        for part in parts:
            tokens += self._scanner.feed(part)
        if self._mode == _RAW:
            out = raw
            if self.sse and not done and isinstance(reader, ChunkedReader):
                out = self._complete_chunks(raw, reader)
            elif self._held:
                out = self._held + raw
                self._held = b""
        elif self._mode == _DECODED:
            out = b"".join(parts)
        else:
            out = b"".join([chunk(part) for part in parts])
            if done:
                out += LAST_CHUNK
        if self._head:
            if not out and self.sse and not done:
                return b"", tokens
            out = self._head + out
            self._head = b""
            self.started = True
        if out:
            self._end = out[-5:]
        return out, tokens

    def _complete_chunks(self, raw: bytes, reader: ChunkedReader) -> bytes:
        """Return the complete chunks, and hold the rest back unless it is long."""
        data = self._held + raw if self._held else raw
        if reader.between_chunks:
            self._held = b""
            self._mid_chunk = False
            return data
        complete = reader.border + len(data) - len(raw) if reader.border > 0 else 0
        if complete:
            self._mid_chunk = False
        if self._mid_chunk or len(data) - complete > HOLD_BYTES:
            self._held = b""
            self._mid_chunk = True
            return data
        self._held = data[complete:]
        return data[:complete]

    def comment(self) -> bytes:
        """Return an event that means nothing, to be written now; empty: it cannot stand here."""
        if not self.sse or not self.started or self._mid_chunk or self._measured:
            return b""
        sent = self._end if self._mode == _DECODED else self._end.removesuffix(b"\r\n")
        if not sent.endswith((b"\n\n", b"\n\r\n")):
            return b""
        return b":\n\n" if self._mode == _DECODED else chunk(b":\n\n")

    def error_event(self, message: str, code: str) -> bytes | None:
        """Return the bytes that end a broken stream properly; None: it can only be cut off."""
        if not self.sse or self._mid_chunk or self._measured:
            return None
        sent = self._end if self._mode == _DECODED else self._end.removesuffix(b"\r\n")
        event = b"" if sent.endswith((b"\n\n", b"\n\r\n")) else b"\n\n"
        event += errors.event(self._kind, 502, message, code)
        return event if self._mode == _DECODED else chunk(event) + LAST_CHUNK
