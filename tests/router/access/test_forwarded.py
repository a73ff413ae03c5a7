"""For whom a proxy asks."""

import pytest

from tailrace.router.access.forwarded import TrustedProxies

PROXIES = TrustedProxies(("10.0.0.0/8", "2001:db8::/32", "192.0.2.1"))


@pytest.mark.parametrize(
    ("peer", "hops", "client"),
    [
        ("203.0.113.5", "198.51.100.7", "203.0.113.5"),  # not listed: what it says counts nothing
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "1.2.3.4, 198.51.100.7", "198.51.100.7"),  # the first is invented
        ("10.0.0.1", "198.51.100.7, 10.0.0.2, 192.0.2.1", "198.51.100.7"),
        ("10.0.0.1", "10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7, nonsense", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
        ("10.0.0.1", "[2001:db9::7]:4711", "2001:db9::7"),
        ("10.0.0.1", "2001:db9::7, 2001:db8::1", "2001:db9::7"),
        ("::ffff:10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("", "198.51.100.7", ""),
    ],
)
def test_the_last_address_that_is_no_proxys(peer: str, hops: str, client: str) -> None:
    assert PROXIES.client(peer, [(b"X-Forwarded-For", hops.encode())]) == client


def test_several_headers_are_one_list() -> None:
    headers = [(b"x-forwarded-for", b"198.51.100.7"), (b"X-FORWARDED-FOR", b"10.0.0.3")]
    assert PROXIES.client("10.0.0.1", headers) == "198.51.100.7"


def test_what_is_remembered_of_peers_is_bounded() -> None:
    proxies = TrustedProxies(("10.0.0.0/8",))
    for number in range(10_000):
        proxies.trusts(f"10.0.{number // 256}.{number % 256}")
    assert len(proxies._trusted) <= 4096
