"""Errors of the router in the form that the clients of an endpoint understand."""

from tailrace.net.server import error_body

#: Kinds of requests in Anthropic's form.
_ANTHROPIC = ("message", "count_tokens")


def body(
    kind: str, status: int, message: str, code: str | None = None, param: str | None = None
) -> bytes:
    """Return the body of an error: OpenAI's form, which for Anthropic's messages has a type too."""
    text = error_body(status, message, code, param)
    return b'{"type":"error",' + text[1:] if kind in _ANTHROPIC else text


def event(kind: str, status: int, message: str, code: str) -> bytes:
    """Return the event that ends a broken stream."""
    name = b"event: error\n" if kind == "message" else b""
    return b"%bdata: %b\n\n" % (name, body(kind, status, message, code))
