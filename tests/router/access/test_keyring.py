"""Keys, where they come from and how they are shown."""

from pathlib import Path

import pytest

from tailrace.errors import TailraceError
from tailrace.net.heads import parse_request
from tailrace.router.access.keyring import Keyring
from tailrace.router.settings import ClientSettings


def shown(keyring: Keyring, *headers: str) -> str | None:
    lines = "".join(f"{line}\r\n" for line in headers)
    head = parse_request(f"GET / HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode("latin-1"))
    client = keyring.find(head)
    return client.name if client is not None else None


@pytest.fixture
def keyring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keyring:
    monkeypatch.setenv("KEY_A", " secret-a ")
    file = tmp_path / "keys"
    file.write_text("# old\nsecret-b1\n\nsecret-b2\n")
    return Keyring(
        [ClientSettings(name="a", key_env="KEY_A"), ClientSettings(name="b", key_file=file)]  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        (["Authorization: Bearer secret-a"], "a"),
        (["authorization: bearer secret-a"], "a"),
        (["AUTHORIZATION: BEARER   secret-a "], "a"),
        (["x-api-key: secret-a"], "a"),
        (["X-Api-Key: secret-b1"], "b"),
        (["X-Api-Key: secret-b2"], "b"),
        (["Authorization: Bearer secret-a", "x-api-key: secret-a"], "a"),
        (["Authorization: Bearer secret-a", "Authorization: Bearer secret-a"], "a"),
        ([], None),
        (["Authorization: Bearer"], None),
        (["Authorization: Bearer "], None),
        (["Authorization: secret-a"], None),
        (["Authorization: Basic secret-a"], None),
        (["Authorization: Basic secret-a", "x-api-key: secret-a"], None),
        (["Authorization: Bearer secret-a2"], None),
        (["Authorization: Bearer secret"], None),
        (["Authorization: Bearer Secret-a"], None),
        (["Authorization: Bearer secret-a,secret-b1"], None),
        (["Authorization: Bearer secret-a", "x-api-key: secret-b1"], None),
        (["Authorization: Bearer secret-a", "authorization: Bearer secret-b1"], None),
        (["x-api-key: secret-a", "X-API-KEY: secret-b1"], None),
        (["x-api-key: # old"], None),
        (["Authorization: Bearer " + "k" * 60_000], None),
        (["Authorization: Bearer sécret-a"], None),
        (["Proxy-Authorization: Bearer secret-a"], None),
        (["Cookie: Authorization=Bearer secret-a"], None),
    ],
)
def test_how_a_key_is_shown(keyring: Keyring, headers: list[str], name: str | None) -> None:
    assert shown(keyring, *headers) == name


def test_no_keys_are_kept(keyring: Keyring) -> None:
    assert b"secret-" not in repr(vars(keyring)).encode()


@pytest.mark.parametrize("key", ["", "  ", "two words", "ümlaut", "k" * 1025, "tab\tin"])
def test_an_unusable_key_is_told_without_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", key)
    with pytest.raises(TailraceError, match="client a: variable KEY") as error:
        Keyring([ClientSettings(name="a", key_env=("KEY",))])
    assert not key.strip() or key not in str(error.value)


def test_files_that_hold_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    client = ClientSettings(name="a", key_file=(file,))
    with pytest.raises(TailraceError, match="cannot read"):
        Keyring([client])
    file.write_text("# none\n")
    with pytest.raises(TailraceError, match="there is no key"):
        Keyring([client])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(TailraceError, match="cannot read"):
        Keyring([client])


def test_a_key_of_two_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "same")
    clients = [ClientSettings(name=name, key_env=("KEY",)) for name in "ab"]
    with pytest.raises(TailraceError, match="a and b have the same key") as error:
        Keyring(clients)
    assert "'same'" not in str(error.value)


def test_models_and_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k")
    (some,) = Keyring(
        [ClientSettings(name="a", key_env=("KEY",), models=("llama", "qwen-*"))]
    ).clients
    assert [m for m in ("llama", "llama2", "qwen-", "qwen-7b", "qwen", "") if some.may_use(m)] == [
        "llama",
        "qwen-",
        "qwen-7b",
    ]
    (all_,) = Keyring([ClientSettings(name="a", key_env=("KEY",))]).clients
    assert all_.may_use("anything")
