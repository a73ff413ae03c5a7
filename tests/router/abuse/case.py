"""One case of the soak suite: an attack or a fault, and the router that meets it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.abuse.stage import Stage


@dataclass
class Target:
    """The router that is attacked, and what belongs to it."""

    stage: Stage
    size: float = 1.0
    """Share of the full size of an attack: below 1 for a trial."""
    seed: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    """What a case has measured beside the usual."""

    @property
    def port(self) -> int:
        """Where clients connect."""
        return self.stage.listen

    def count(self, full: int, least: int = 1) -> int:
        """Return a number of connections, bytes or repeats."""
        return max(least, round(full * self.size))


#: Runs to its end and returns what became of it, in a few words. It raises AssertionError if that
#: is not what must become of it.
Attack = Callable[[Target], Awaitable[str]]


@dataclass(frozen=True)
class Case:
    """An attack or a fault with a name."""

    name: str
    attack: Attack
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the router, by path with two underscores for a dot."""
    files: int | None = None
    """Limit of the router's open files (RLIMIT_NOFILE)."""
    clients: str = ""
    """TOML of the router's clients, if they need keys."""
    servers: int = 2
    file_bytes: int | None = None
    """Limit of the size of each file that the router writes (RLIMIT_FSIZE), its log included."""
    prefix: str = ""
    """Path of the servers' addresses."""
    separate: bool = False
    """Whether each replica is a process of its own, so that it can be killed."""
    innocents: bool = True
    """Whether innocent clients use the router meanwhile."""
    streams: int = 4
    """Innocent streams at once."""
    every_ms: float = 10.0
    """Time between two events of them."""
    headers: str = ""
    """Headers of innocent requests, each with its line end."""
    may_fail: frozenset[str] = frozenset()
    """Failures of innocent requests that the fault itself explains, see ``innocents.py``."""
    tolerated: bool = False
    """Whether the router may put up with the attack instead of ending it."""
    most_s: float = 240.0
    """Time after which it has failed, s."""
    ends: bool = False
    """Whether the router is stopped by the case."""
