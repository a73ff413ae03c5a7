"""Clients by their keys.

Keys are kept as keyed hashes only. A request's key is hashed with a secret of this process before
it is looked up, so how long the look-up takes says nothing about the keys that are valid.
"""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tailrace.errors import TailraceError
from tailrace.net.heads import KEY_HEADERS
from tailrace.router.access.accounts import Account, ClientAccounts, owners, warm_up
from tailrace.router.settings import MAX_KEY_BYTES, ClientSettings

_SCHEME = b"bearer"


class ShownHead(Protocol):
    """The headers of a request."""

    @property
    def headers(self) -> Iterable[tuple[bytes, bytes]]:
        """All of them, in order."""

    @property
    def lower(self) -> Mapping[bytes, bytes]:
        """By lower-case name; the first of several wins."""


class Client:
    """Somebody with a key, and what it may use."""

    __slots__ = ("_endings", "account", "explain", "models", "name", "priorities", "restricted",
                 "weight")  # fmt: skip

    def __init__(self, settings: ClientSettings, account: Account) -> None:
        self.name = settings.name
        self.weight = settings.weight
        self.explain = settings.explain
        """Whether its answers are explained; None: as the router does."""
        self.priorities = frozenset((0, *settings.priorities))
        self.account = account
        self.restricted = bool(settings.models)
        """Whether it may use some models only."""
        self.models = frozenset(m for m in settings.models if not m.endswith("*"))
        """Models it may use, without those given by the beginning of their names."""
        self._endings = tuple(m[:-1] for m in settings.models if m.endswith("*"))

    def may_use(self, model: str) -> bool:
        """Whether it may use a model, by the name that clients see."""
        return (
            not self.restricted
            or model in self.models
            or any(model.startswith(start) for start in self._endings)
        )


class Keyring:
    """The clients of the settings by their keys."""

    def __init__(
        self,
        clients: Sequence[ClientSettings],
        accounts: ClientAccounts | None = None,
        worker: int = 0,
    ) -> None:
        """Read all keys; raise if one is missing or belongs to two clients."""
        self._secret = os.urandom(32)
        self._clients: dict[bytes, tuple[bytes, Client]] = {}
        self.clients: list[Client] = []
        accounts = accounts or ClientAccounts()
        if clients:
            warm_up()
        listed = owners(clients)
        keys = [client.keys() for client in clients]
        for settings, own in zip(clients, keys, strict=True):
            client = Client(settings, accounts.account(settings, listed, worker))
            self.clients.append(client)
            for key in own:
                digest = self._digest(key)
                known = self._clients.get(digest)
                if known is not None and known[1] is not client:
                    raise TailraceError(
                        f"clients {known[1].name} and {client.name} have the same key"
                    )
                self._clients[digest] = digest, client

    @property
    def is_open(self) -> bool:
        """Whether everybody may use the router, because there are no clients."""
        return not self.clients

    def find(self, head: ShownHead) -> Client | None:
        """Return the client whose key a request shows; None: it shows none that is valid.

        The key is in ``Authorization: Bearer`` or in ``x-api-key``. A request that shows two
        different ones, in whatever headers, shows none.
        """
        key = _key_of(head)
        if key is None:
            return None
        digest = self._digest(key)
        found = self._clients.get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            return None
        return found[1]

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def _key_of(head: ShownHead) -> bytes | None:
    """Return the one key of a request's headers."""
    lower = head.lower
    authorization, own = lower.get(b"authorization"), lower.get(b"x-api-key")
    given = own
    if authorization is not None:
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != _SCHEME:
            return None
        given = given.strip()
        if own is not None and own.strip() != given:
            return None
    if given is None or _is_repeated(head.headers):
        return None
    given = given.strip()
    return given if 0 < len(given) <= MAX_KEY_BYTES else None


def _is_repeated(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a header with a key occurs twice with different values."""
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if len(name) in (9, 13):
            lower = name.lower()
            if lower in KEY_HEADERS and seen.setdefault(lower, value) != value:
                return True
    return False
