"""Response headers and log lines that explain a routing decision."""

import logging

from tailrace.router.decide.chooser import Decision
from tailrace.router.proxy.backends import Backend

_CONTROL = bytes(range(32)) + b"\x7f"
#: Texts as header values, cached: most reasons recur.
_VALUES: dict[str, bytes] = {}
_MOST_VALUES = 4096
_GOOD = frozenset(("done", "client_gone", "rejected"))

_log = logging.getLogger("tailrace.router")


def headers(
    request_id: bytes, backend: Backend | None, decision: Decision | None, *, explained: bool
) -> bytes:
    """Return header lines: the request's id and, if ``explained``, its backend and the reason."""
    if not explained or backend is None:
        return b"x-request-id: %b\r\n" % request_id
    if decision is None:
        return b"x-request-id: %b\r\nx-tailrace-replica: %b\r\n" % (
            request_id, backend.label_bytes,
        )  # fmt: skip
    return (
        b"x-request-id: %b\r\nx-tailrace-replica: %b\r\n"
        b"x-tailrace-policy: %b\r\nx-tailrace-reason: %b\r\n"
    ) % (
        request_id,
        backend.label_bytes,
        _VALUES.get(decision.policy) or _header_value(decision.policy),
        _VALUES.get(decision.reason) or _header_value(decision.reason),
    ) + b"".join(b"%b: %b\r\n" % line for line in _served_in_turn(decision))


def _served_in_turn(decision: Decision) -> list[tuple[bytes, bytes]]:
    """Return headers about the order in which requests are served; mostly none."""
    found = []
    if decision.priority is not None:
        found.append((b"x-tailrace-priority", b"%d" % decision.priority))
    if decision.waited_s is not None:
        why = f", why={decision.overtook_why}" if decision.overtook else ""
        text = f"waited_s={decision.waited_s:.3f}, overtook={decision.overtook}{why}"
        found.append((b"x-tailrace-queue", f"{text}, overtaken={decision.overtaken}".encode()))
    return found


def explanation(backend: Backend, decision: Decision | None) -> list[tuple[bytes, bytes]]:
    """Return the headers that explain a decision, for those who may see them."""
    found = [(b"x-tailrace-replica", backend.label_bytes)]
    if decision is not None:
        policy, reason = decision.policy, decision.reason
        found.append((b"x-tailrace-policy", _VALUES.get(policy) or _header_value(policy)))
        found.append((b"x-tailrace-reason", _VALUES.get(reason) or _header_value(reason)))
        found += _served_in_turn(decision)
    return found


def _header_value(text: str) -> bytes:
    """Make any text safe for a header."""
    value = text.encode("ascii", "replace").translate(None, _CONTROL)[:256]
    if len(_VALUES) >= _MOST_VALUES:
        _VALUES.clear()
    _VALUES[text] = value
    return value


def log(
    request_id: bytes, kind: str, status: int, outcome: str, backend: Backend | None, attempts: int,
    failure: str, client: str,
) -> None:  # fmt: skip
    """Log the end of a request; ``client``: its client's name, if clients have keys."""
    _log.log(
        logging.INFO if outcome in _GOOD else logging.WARNING,
        "request %s", outcome,
        extra={
            "request": request_id.decode(), "client": client or None, "kind": kind,
            "status": status,
            "replica": backend.label if backend is not None else None,
            "attempts": attempts, "why": failure or None,
        },
    )  # fmt: skip


def log_retry(request_id: bytes, backend: Backend, why: str) -> None:
    """Log that another backend is tried because of this one."""
    _log.info(
        "request is tried again",
        extra={"request": request_id.decode(), "replica": backend.label, "why": why},
    )
