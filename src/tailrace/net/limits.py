"""Limits of HTTP connections: sizes in bytes, times in seconds."""

from typing import Annotated

from pydantic import Field

from tailrace.config import Settings

Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class ConnectionLimits(Settings):
    """What one client may cost, and how long each step of a connection may take."""

    header_bytes: int = Field(default=32_768, ge=1024, le=2**24)
    """Largest request head; above: 431."""
    body_bytes: int = Field(default=32 * 2**20, ge=1024, le=2**31)
    """Largest request body; above: 413."""
    bodies_bytes: int = Field(default=256 * 2**20, ge=1024, le=2**50)
    """Request bodies held at once, of all clients together; above: the largest of those still being
    received gets 503."""
    connections: int = Field(default=10_000, ge=1, le=1_000_000)
    """Client connections at once; above: 503."""
    header_s: Seconds = 10.0
    """For a request head, from its first byte; above: 408."""
    body_s: Seconds = 30.0
    """For a whole request body, from the end of its head; above: 408."""
    idle_s: Seconds = 75.0
    """How long a client connection may be without a request."""
    client_stall_s: Seconds = 60.0
    """How long a client may leave its answer unread; above: it counts as gone."""
    connect_s: Seconds = 3.0
    """To connect to a backend."""
