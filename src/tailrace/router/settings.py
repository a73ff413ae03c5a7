"""The settings of the live router's parts; ``serve_settings.py`` puts them together.

Times are in seconds and sizes in bytes unless a name says otherwise. No address comes from
anywhere but here, and no key is ever written here: only the name of the variable that holds it.
"""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tailrace.config import Replica, Settings
from tailrace.errors import TailraceError
from tailrace.net.limits import ConnectionLimits, Seconds
from tailrace.net.origin import Origin

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]

#: Longest key of a client, in bytes.
MAX_KEY_BYTES = 1024


class BackendSettings(Settings):
    """One server behind the router."""

    url: str
    """Where it listens, e.g. http://10.0.0.1:8000; a path is put before every request's path."""
    name: str = ""
    """Name in logs, metrics and headers; default: host:port."""
    api_key_env: str | None = None
    """Environment variable with this server's API key; it replaces the client's Authorization."""
    max_in_flight: int | None = Field(default=None, ge=1, le=1_000_000)
    """Most requests it gets at once; default: `admission.max_in_flight`."""
    models: tuple[ModelName, ...] = ()
    """Models and LoRA adapters it serves; default: its own /v1/models is asked."""
    server: Replica = Replica()
    """What kind of server it is (device, KV blocks, batch size), as in a scenario's replica."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        try:
            Origin.parse(value)
        except ValueError:
            raise ValueError("is no address; write it like http://10.0.0.1:8000") from None
        parts = urlsplit(value)
        if parts.query or parts.fragment or parts.username or parts.password:
            raise ValueError("must be scheme, host, port and path only; keys go to api_key_env")
        if any(c <= " " or c == "\x7f" for c in value) or not value.isascii():
            raise ValueError("must not contain blanks or characters outside of ASCII")
        return value.rstrip("/")

    @property
    def origin(self) -> Origin:
        """Where to connect."""
        return Origin.parse(self.url)

    @property
    def label(self) -> str:
        """Its name, or host:port."""
        host, port, *_ = self.origin
        return self.name or f"{host}:{port}"

    def api_key(self) -> str | None:
        """Return the key from the environment; raise if the variable is named but not set."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise TailraceError(
                f"backend {self.label}: environment variable {self.api_key_env} holds no usable "
                "API key; set it, or remove api_key_env"
            )
        return key


class ClientSettings(Settings):
    """A client with a key, and what it may use; without any, whoever reaches the router may."""

    name: str = Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")
    """Name in logs; limits and fair shares belong to it, whatever its keys."""
    key_env: tuple[str, ...] = ()
    """Environment variables that hold its keys, one each; all of them are valid."""
    key_file: tuple[Path, ...] = ()
    """Files that hold its keys, one per line; a reload reads them again. Lines with # are notes."""
    models: tuple[ModelName, ...] = ()
    """Models it may use, by the names clients see; `*` at the end stands for any ending; default:
    all."""
    priorities: tuple[Annotated[int, Field(ge=-(2**31), lt=2**31)], ...] = ()
    """Priorities it may ask for beside 0; lower goes first."""
    requests_per_s: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """Requests per second on average; as many as one second has may come at once."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    """Tokens of prompts and answers per minute on average; as many may come at once."""
    concurrent: int | None = Field(default=None, ge=1, le=1_000_000)
    """Requests at once, those that wait at the router included."""
    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Share of the tokens it gets when requests have to wait, relative to other clients."""
    explain: bool | None = None
    """Whether its answers tell the replica and the reason; default: the router's `explain`."""

    @field_validator("key_env", "key_file", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _has_a_key(self) -> Self:
        if not self.key_env and not self.key_file:
            raise ValueError(f"client {self.name} has no key: give key_env or key_file")
        return self

    def keys(self) -> list[bytes]:
        """Read its keys; raise if one is missing or unusable. No message holds a key."""
        found = [
            self._usable(os.environ.get(variable, ""), f"variable {variable}")
            for variable in self.key_env
        ]
        for path in self.key_file:
            try:
                lines = path.read_text(encoding="ascii").splitlines()
            except (OSError, UnicodeDecodeError):
                raise TailraceError(f"client {self.name}: cannot read keys from {path}") from None
            keys = [line for line in lines if line.strip() and not line.startswith("#")]
            if not keys:
                raise TailraceError(f"client {self.name}: there is no key in {path}")
            found += [self._usable(key, f"a line of {path}") for key in keys]
        return found

    def _usable(self, key: str, where: str) -> bytes:
        key = key.strip()
        plain = key.isascii() and key.isprintable() and " " not in key
        if not key or not plain or len(key) > MAX_KEY_BYTES:
            raise TailraceError(
                f"client {self.name}: {where} holds no usable key; it must be printable ASCII "
                f"without blanks, at most {MAX_KEY_BYTES} characters"
            )
        return key.encode()


class ModelSettings(Settings):
    """Which models there are, and where."""

    path: str = Field(default="/v1/models", pattern=r"^(off|/[!-~]*)$")
    """What backends without `models` are asked; off: they are not, and any model may be there."""
    interval_s: Seconds = 10.0
    """Between two questions to a backend; one that comes back is asked at once."""
    timeout_s: Seconds = 2.0
    """For one answer."""
    aliases: dict[ModelName, ModelName] = Field(default={})
    """Further names of models: what clients call it = what servers call it."""

    @model_validator(mode="after")
    def _no_chains(self) -> Self:
        chained = sorted(a for a, model in self.aliases.items() if model in self.aliases)
        if chained:
            raise ValueError(f"alias {chained[0]} stands for another alias")
        return self


class LimitSettings(ConnectionLimits):
    """What one client may cost, and how long anything may take."""

    first_byte_s: Seconds = 600.0
    """From sending a request to the first byte of the answer."""
    between_chunks_s: Seconds = 120.0
    """Between two pieces of an answer."""
    total_s: Seconds = 3600.0
    """For one request, all attempts and the whole answer."""


class RetrySettings(Settings):
    """When a request is sent to another replica; never after a byte of an answer was passed on."""

    attempts: int = Field(default=3, ge=1, le=16)
    """Times a request is sent, the first included; a second connection to the same replica, where
    the first one was stale, counts. Unknown requests other than GET and HEAD are sent once."""
    statuses: tuple[Annotated[int, Field(ge=429, le=599)], ...] = (429, 502, 503, 504)
    """Answers of a backend that are tried again elsewhere: 429, and 500 to 599."""
    max_pause_s: Seconds = 60.0
    """Longest Retry-After of a 429 or 503 that is honoured: the replica gets no requests so long,
    if another one has answered the same request."""
    budget: Share = 0.2
    """Retries per request that may be spent over time, so that they cannot become a storm."""
    burst: int = Field(default=100, ge=0, le=1_000_000)
    """Retries that may be spent at once when a replica dies with many requests."""

    @field_validator("statuses")
    @classmethod
    def _are_failures(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(429 < status < 500 for status in value):
            raise ValueError("must be 429 or 500 to 599: other 4xx answers are the client's fault")
        return value


class HealthSettings(Settings):
    """When a replica counts as broken, and how it comes back."""

    path: str = Field(default="/health", pattern=r"^/[!-~]*$")
    """What is asked; any answer below 500 is good."""
    interval_s: Seconds = 2.0
    """Between two probes of a replica."""
    timeout_s: Seconds = 2.0
    """For one probe."""
    failures: int = Field(default=3, ge=1, le=1000)
    """Failures in a row, of requests or probes, after which it gets no more requests."""
    max_ejected: Share = 0.5
    """Share of a model's replicas that failed requests and late probes may take out together,
    rounded down; only a health path that refuses connections or answers 5xx takes out more."""
    failure_share: Share = 0.5
    """Share of failed requests in `window_s` that does the same."""
    window_s: Seconds = 10.0
    """Window of `failure_share`."""
    window_requests: int = Field(default=20, ge=1, le=1_000_000)
    """Fewest requests in the window for `failure_share` to count."""
    open_s: Seconds = 5.0
    """How long a broken replica is left alone; doubles with each failed trial, up to 12 times."""
    trials: int = Field(default=3, ge=1, le=1000)
    """Good answers after which it counts as healthy again; so many are tried at once."""
    slow_start_s: float = Field(default=10.0, ge=0, le=3600, allow_inf_nan=False)
    """Time over which a returned replica is given its full share."""


class AdmissionSettings(Settings):
    """What happens when every replica has as much as it may have."""

    max_in_flight: int | None = Field(default=None, ge=1, le=1_000_000)
    """Most requests per replica at once; default: no limit."""
    queue: int = Field(default=1000, ge=0, le=1_000_000)
    """Requests that may wait at the router; above: the least urgent gets 429."""
    max_wait_s: Seconds = 30.0
    """How long one may wait; above: 429."""


class LogSettings(Settings):
    """What is written to standard error, as lines of JSON; never keys, never text of requests."""

    level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")
    """debug, info, warning or error."""
    requests: bool = False
    """A line per request; otherwise only failures and changes."""


class AdminSettings(Settings):
    """The second listener: metrics, status, drain and reload."""

    listen: str = "127.0.0.1:8081"
    """host:port; off: no admin listener."""
    token_env: str | None = None
    """Environment variable with a token that every admin request must bear."""

    def token(self) -> str | None:
        """Return the token from the environment; raise if the variable is named but not set."""
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "").strip()
        if not token:
            raise TailraceError(f"admin.token_env: {self.token_env} is not set")
        return token


def address(text: str) -> tuple[str, int]:
    """Split host:port or [v6]:port."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"'{text}' must be host:port, e.g. 127.0.0.1:8080")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
