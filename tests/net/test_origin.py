"""Addresses of servers."""

import pytest

from tailrace.net.origin import Origin


@pytest.mark.parametrize(
    ("url", "origin", "authority"),
    [
        ("http://10.0.0.1:8000", ("10.0.0.1", 8000, False, ""), "10.0.0.1:8000"),
        ("https://h.example/base/", ("h.example", 443, True, "/base"), "h.example"),
        ("http://h.example", ("h.example", 80, False, ""), "h.example"),
        ("https://h.example:80", ("h.example", 80, True, ""), "h.example:80"),
        ("http://[::1]:8000", ("::1", 8000, False, ""), "[::1]:8000"),
        ("http://user:key@h.example:9/", ("h.example", 9, False, ""), "h.example:9"),
    ],
)
def test_an_address(url: str, origin: tuple[object, ...], authority: str) -> None:
    found = Origin.parse(url)
    assert found == origin
    assert found.authority == authority


@pytest.mark.parametrize("url", ["", "h:80", "ftp://h", "http://", "http://h:0", "http://h:99999"])
def test_no_address(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Origin.parse(url)
