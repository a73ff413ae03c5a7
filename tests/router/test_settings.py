"""What may be configured, and how mistakes are told."""

from pathlib import Path

import pytest

from tailrace.errors import TailraceError
from tailrace.router.serve_settings import ServeSettings, load
from tailrace.router.settings import BackendSettings, address, is_loopback

ONE = {"backends": [{"url": "http://h:1"}]}


def test_a_backend_address() -> None:
    backend = BackendSettings(url="https://h.example/base/")
    assert backend.origin == ("h.example", 443, True, "/base")
    assert backend.label == "h.example:443"
    assert BackendSettings(url="http://[::1]:8000").origin.host == "::1"


@pytest.mark.parametrize(
    "url",
    ["h:1", "ftp://h", "http://", "http://h:0", "http://h:x", "http://u:p@h", "http://h/?a=b",
     "http://h/a b", "http://h/\r\nX: y", "http://ü"],
)  # fmt: skip
def test_bad_addresses(url: str) -> None:
    with pytest.raises(TailraceError, match=r"url: "):
        load(None, {"backends": [{"url": url}]})


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K", raising=False)
    data = {"backends": [{"url": "http://h:1", "api_key_env": "K"}]}
    with pytest.raises(TailraceError, match="K holds no usable API key"):
        load(None, data)
    monkeypatch.setenv("K", "a\r\nb")
    with pytest.raises(TailraceError, match="no usable"):
        load(None, data)
    monkeypatch.setenv("K", " key ")
    assert load(None, data).backends[0].api_key() == "key"
    assert "key " not in repr(load(None, data))


def test_the_same_backend_twice() -> None:
    with pytest.raises(TailraceError, match="two backends have the url http://h:1"):
        load(None, {"backends": [{"url": "http://h:1"}, {"url": "http://h:1/"}]})
    with pytest.raises(TailraceError, match="two backends have the name a"):
        load(None, {"backends": [{"url": "http://h:1", "name": "a"},
                                 {"url": "http://h:2", "name": "a"}]})  # fmt: skip


def test_no_backend() -> None:
    with pytest.raises(TailraceError, match="--backend"):
        load(None, {})


def test_an_admin_listener_for_all_needs_a_token() -> None:
    with pytest.raises(TailraceError, match=r"admin\.token_env"):
        load(None, ONE | {"admin": {"listen": "0.0.0.0:1"}})
    load(None, ONE | {"admin": {"listen": "0.0.0.0:1", "token_env": "T"}})
    load(None, ONE | {"admin": {"listen": "off"}})
    with pytest.raises(TailraceError, match="both"):
        load(None, ONE | {"listen": "127.0.0.1:8081"})


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(TailraceError, match=r"limits\.body_bytes"):
        load(None, ONE | {"limits": {"body_byte": 1}})


def test_a_file_and_what_is_put_over_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'listen = "127.0.0.1:9"\n[routing]\npolicy = "random"\n[retry]\nattempts = 2\n'
        '[[backends]]\nurl = "http://h:1"\n[backends.server]\ndevice = "a100-llama3-8b"\n'
    )
    settings = load(
        file,
        {"routing": {"policy": "round_robin"}},
        [("limits.total_s", 5), ("backends.0.name", "x")],
    )
    assert settings.routing.policy == "round_robin"
    assert settings.retry.attempts == 2
    assert settings.limits.total_s == 5
    assert settings.backends[0].label == "x"
    file.write_text("listen = ")
    with pytest.raises(TailraceError, match="not valid TOML"):
        load(file, {})


def test_defaults_are_local() -> None:
    assert is_loopback(address(ServeSettings().listen)[0])
    assert is_loopback(address(ServeSettings().admin.listen)[0])


def test_addresses() -> None:
    assert address("[::1]:80") == ("::1", 80)
    assert address("localhost:0") == ("localhost", 0)
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    for bad in ("80", ":80", "h:", "h:99999", "h:x"):
        with pytest.raises(ValueError, match="host:port"):
            address(bad)
