"""For whom a proxy asks: X-Forwarded-For, believed only from proxies that the settings list."""

import ipaddress
from collections.abc import Iterable, Sequence

from tailrace.net.heads import FORWARDED

_FOR = b"x-forwarded-for"
#: Addresses of peers whose trust is remembered.
_MOST_PEERS = 4096


class TrustedProxies:
    """The proxies of the settings."""

    def __init__(self, networks: Sequence[str]) -> None:
        """``networks``: addresses, or networks in CIDR notation."""
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]
        self._trusted: dict[str, bool] = {}

    def __bool__(self) -> bool:
        """Whether any proxy is listed."""
        return bool(self._networks)

    def trusts(self, host: str) -> bool:
        """Whether an address is one of a listed proxy."""
        found = self._trusted.get(host)
        if found is None:
            if len(self._trusted) >= _MOST_PEERS:
                self._trusted.clear()
            found = self._trusted[host] = self._find(host)
        return found

    def _find(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def client(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the address of the client that a request comes from, ``peer`` if not known better.

        Listed proxies append the address they were asked from, so the last one that is not a
        proxy's is the client's; what stands before it may be invented.
        """
        if not self._networks or not self.trusts(peer):
            return peer
        for hop in reversed(_hops(headers)):
            try:
                peer = str(ipaddress.ip_address(_without_port(hop)))
            except ValueError:
                break
            if not self.trusts(peer):
                break
        return peer

    def lines(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return header lines that say for whom we ask, each with CRLF before it."""
        if not self._networks or not peer:
            return b""
        if not self.trusts(peer):
            return b"\r\nx-forwarded-for: " + peer.encode()
        hops = ", ".join([*_hops(headers), peer]).encode("latin-1")
        others = b"".join(
            b"\r\n%b: %b" % (name, value)
            for name, value in headers
            if (lower := name.lower()) in FORWARDED and lower != _FOR
        )
        return b"\r\nx-forwarded-for: %b%b" % (hops, others)


def _hops(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the addresses of all X-Forwarded-For headers, in order."""
    values = (value for name, value in headers if name.lower() == _FOR)
    hops = (hop.strip() for value in values for hop in value.decode("latin-1").split(","))
    return [hop for hop in hops if hop]


def _without_port(hop: str) -> str:
    """Return the address of ``ip``, ``ip:port`` or ``[ip]:port``."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
