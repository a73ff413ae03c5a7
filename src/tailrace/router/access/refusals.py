"""Requests that are refused because of who asks, or what for."""

import math
from collections.abc import Sequence

from tailrace.net.heads import RefusedError
from tailrace.router.access.accounts import (
    TOO_MANY_AT_ONCE,
    TOO_MANY_REQUESTS,
    TOO_MANY_TOKENS,
)

#: By the number of the reason in accounts.py: cause for metrics, and the message for the client.
_TOO_MUCH = {
    TOO_MANY_AT_ONCE: ("client_concurrent", "this key has as many requests at once as it may have"),
    TOO_MANY_REQUESTS: ("client_requests", "this key has sent as many requests as it may send"),
    TOO_MANY_TOKENS: ("client_tokens", "this key has used as many tokens as it may use"),
}
#: Names of models that an error lists.
MOST_NAMES = 50
#: Causes of rejections by limits of clients.
LIMIT_CAUSES = frozenset(cause for cause, _ in _TOO_MUCH.values())


class RefusedRequest(RefusedError):  # noqa: N818
    """A request that is not served because of who asks, or what for."""

    def __init__(
        self,
        status: int,
        why: str,
        code: str | None = None,
        param: str | None = None,
        *,
        headers: bytes = b"",
        shed_cause: str = "",
    ) -> None:
        """``param``: what it is about; ``shed_cause``: of a rejection by a limit."""
        super().__init__(status, why, code, headers=headers)
        self.param = param
        self.shed_cause = shed_cause


def no_key() -> RefusedRequest:
    """The request shows no valid key."""
    return RefusedRequest(
        401,
        "no valid key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        "invalid_api_key",
        headers=b"www-authenticate: Bearer\r\n",
    )


def no_path(method: str, path: str) -> RefusedRequest:
    """The path is not served."""
    return RefusedRequest(404, f"there is no {method} {path[:80]} here", "unknown_path")


def no_method(path: str, methods: frozenset[bytes]) -> RefusedRequest:
    """The path is served, but not with this method."""
    allowed = b", ".join(sorted(methods))
    return RefusedRequest(
        405, f"{path[:80]} takes {allowed.decode()}", "unknown_method",
        headers=b"allow: %b\r\n" % allowed,
    )  # fmt: skip


def no_model(name: str, known: Sequence[str]) -> RefusedRequest:
    """No server has the model; ``known``: names the client may use."""
    listed = ", ".join(known[:MOST_NAMES]) + (", ..." if len(known) > MOST_NAMES else "")
    message = f"there is no model '{_short(name)}'; there are: {listed or 'none at present'}"
    return RefusedRequest(404, message, "model_not_found", "model")


def no_response() -> RefusedRequest:
    """No server is known to hold the response for this client."""
    return RefusedRequest(404, "there is no such response of this key", "response_not_found")


def forbidden_model(name: str) -> RefusedRequest:
    """The client may not use the model, whether or not there is one."""
    message = f"this key may not use model '{_short(name)}'; see GET /v1/models"
    return RefusedRequest(403, message, "model_not_allowed", "model")


def unnamed_model() -> RefusedRequest:
    """The client may use some models only and names none."""
    return RefusedRequest(400, "this key must name a model", "missing_model", "model")


def unclear_model() -> RefusedRequest:
    """Two readers of the body could find different models."""
    message = "the body must name its model once, as a plain text"
    return RefusedRequest(400, message, "unclear_model", "model")


def unclear_priority() -> RefusedRequest:
    """The priority of the body cannot be replaced, so that a server would go by it."""
    message = "the body must name its priority once, as a plain key"
    return RefusedRequest(400, message, "unclear_priority", "priority")


def _short(name: str) -> str:
    return name[:80].encode(errors="replace").decode()


def too_much(why: int, wait_s: float) -> RefusedRequest:
    """A limit of the client is reached; it may ask again in ``wait_s``."""
    cause, message = _TOO_MUCH[why]
    after = max(1, math.ceil(wait_s))
    return RefusedRequest(
        429, f"{message}; try again in {after} s", "rate_limit_exceeded",
        headers=b"retry-after: %d\r\n" % after, shed_cause=cause,
    )  # fmt: skip
