"""Limits of HTTP connections: sizes in bytes, times in seconds."""

from types import SimpleNamespace
from typing import Annotated, cast

from pydantic import Field

from tailrace.config import Settings

Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class ConnectionLimits(Settings):
    """Size and time limits of client connections."""

    header_bytes: int = Field(default=32_768, ge=1024, le=2**24)
    """Largest request head; above: 431."""
    body_bytes: int = Field(default=32 * 2**20, ge=1024, le=2**31)
    """Largest request body; above: 413."""
    bodies_bytes: int = Field(default=256 * 2**20, ge=1024, le=2**50)
    """Total size of the request bodies in memory; above: the largest body still being received gets
    503."""
    connections: int = Field(default=10_000, ge=1, le=1_000_000)
    """Client connections at once; above: 503."""
    header_s: Seconds = 10.0
    """To receive a request head, from its first byte, s; above: 408."""
    body_s: Seconds = 30.0
    """To receive a request body, from the end of the head, s; above: 408."""
    idle_s: Seconds = 75.0
    """How long a client connection may be idle, s."""
    client_stall_s: Seconds = 60.0
    """How long a client may leave its response unread, s; then it is disconnected."""
    connect_s: Seconds = 3.0
    """To connect to a backend, s."""


def plain(limits: ConnectionLimits) -> ConnectionLimits:
    """Return the same limits as a plain object.

    Reading a field of a pydantic model takes 0.1 us, a plain attribute a third of that, and every
    request reads four.
    """
    return cast(ConnectionLimits, SimpleNamespace(**dict(limits)))
