"""The address of a server: where to connect, and what to put before every path."""

from typing import NamedTuple, Self
from urllib.parse import urlsplit


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
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("not an http or https URL")
        parts.hostname.encode("idna")  # a UnicodeError, which is a ValueError: no name of a host
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Value of the Host header; the scheme's own port is left out, as RFC 9110 4.2.3 asks."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"
