"""The address of a server: where to connect, and what to put before every path."""

from functools import lru_cache
from typing import NamedTuple, Self
from urllib.parse import urlsplit


@lru_cache(maxsize=4096)
def _parts(url: str) -> tuple[str, int, bool, str]:
    """Return the fields of an origin; remembered, as every change of backends reads all of them."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("not an http or https URL")
    parts.hostname.encode("idna")  # a UnicodeError, which is a ValueError: no name of a host
    return parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/")


class Origin(NamedTuple):
    """Scheme, host and port of a server, and the path that its paths begin with."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    """Put before the path of every request; without a slash at its end, usually empty."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read an http or https URL; raise ``ValueError`` if it is not one."""
        return cls(*_parts(url))

    @property
    def authority(self) -> str:
        """Value of the Host header; the scheme's own port is left out, as RFC 9110 4.2.3 asks."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"
