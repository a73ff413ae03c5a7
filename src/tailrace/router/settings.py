"""The settings of the live router's parts; ``serve_settings.py`` puts them together.

Times are in seconds and sizes in bytes unless a name says otherwise. No address comes from
anywhere but here, and no key is ever written here: only the name of the variable that holds it.
"""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tailrace.config import Replica, Settings, Share
from tailrace.errors import TailraceError
from tailrace.net.limits import ConnectionLimits, Seconds
from tailrace.net.origin import Origin
from tailrace.net.tls import TlsFiles

ModelName = Annotated[str, Field(min_length=1, max_length=256)]

#: Longest key of a client, in bytes.
MAX_KEY_BYTES = 1024


class ListenerTls(Settings):
    """TLS of a listener. The files are PEM, and are read again when they change; open connections
    go on."""

    certificate: Path | None = None
    """Certificate of the listener, followed by those that signed it; default: no TLS."""
    key: Path | None = None
    """Key of the certificate, without a password; default: in the same file."""
    client_ca: Path | None = None
    """CA certificates that clients' certificates are verified with; default: clients need no
    certificate."""

    @model_validator(mode="after")
    def _has_a_certificate(self) -> Self:
        if self.certificate is None and (self.key or self.client_ca):
            raise ValueError("key and client_ca need a certificate")
        return self

    @property
    def files(self) -> TlsFiles:
        """The files to read."""
        return TlsFiles(self.certificate, self.key, self.client_ca)


class BackendTls(Settings):
    """TLS to an https server. The files are PEM, and are read again when they change."""

    ca: Path | None = None
    """CA certificates that the server's certificate is verified with; default: the system's."""
    certificate: Path | None = None
    """Client certificate, followed by those that signed it."""
    key: Path | None = None
    """Key of the client certificate, without a password; default: in the same file."""
    server_name: str = Field(default="", max_length=253)
    """Host name that the server's certificate must have; default: the host of the URL."""

    @model_validator(mode="after")
    def _has_a_certificate(self) -> Self:
        if self.certificate is None and self.key:
            raise ValueError("key needs a certificate")
        return self

    @property
    def files(self) -> TlsFiles:
        """The files to read."""
        return TlsFiles(self.certificate, self.key, self.ca)


class BackendDefaults(Settings):
    """What all servers that are found have in common."""

    api_key_env: str | None = None
    """Environment variable with this server's API key; it replaces the client's Authorization."""
    max_in_flight: int | None = Field(default=None, ge=1, le=1_000_000)
    """Maximum concurrent requests; default: `admission.max_in_flight`."""
    models: tuple[ModelName, ...] = ()
    """Models and LoRA adapters it serves; default: read from its /v1/models."""
    tls: BackendTls = BackendTls()
    server: Replica = Replica()
    """Kind of server (device, KV blocks, batch size), as for a scenario's replica."""


class BackendSettings(BackendDefaults):
    """One server behind the router."""

    url: str
    """Its address, e.g. http://10.0.0.1:8000; a path here is prefixed to every request's path."""
    name: str = ""
    """Name in logs, metrics and headers; default: host:port."""
    kv_events: str = Field(default="", pattern=r"^((tcp|ipc)://[!-~]+)?$")
    """Where it publishes its KV events, e.g. tcp://10.0.0.1:5557; default: see `events.port`."""
    kv_replay: str = Field(default="", pattern=r"^((tcp|ipc)://[!-~]+)?$")
    """Where it replays them; default: see `events.replay_port`."""

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

    @model_validator(mode="after")
    def _tls_is_for_https(self) -> Self:
        if self.tls != BackendTls() and not self.origin.tls:
            raise ValueError(f"tls is for https addresses, and this is {self.url}")
        return self

    @property
    def takes_priorities(self) -> bool:
        """Whether it serves by the priority in a request's body."""
        return self.server.scheduling_policy == "priority"

    @property
    def origin(self) -> Origin:
        """Where to connect."""
        return Origin.parse(self.url)

    @property
    def label(self) -> str:
        """Its name, or host:port."""
        host, port, *_ = self.origin
        return self.name or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

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
    """A client with a key, its permissions and limits. Without any client the router needs no
    keys."""

    name: str = Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")
    """Name in logs; limits and fair shares apply to the client, whichever of its keys is used."""
    key_env: tuple[str, ...] = ()
    """Environment variables with one key each; all of them are valid. They are fixed while the
    router runs: to change keys by a reload, use `key_file`."""
    key_file: tuple[Path, ...] = ()
    """Files with one key per line, read again at a reload. Lines that begin with # are comments."""
    models: tuple[ModelName, ...] = ()
    """Models it may use, by the names clients see; a final `*` matches any ending; default: all."""
    priorities: tuple[Annotated[int, Field(ge=-(2**31), lt=2**31)], ...] = ()
    """Priorities it may use besides 0; lower goes first."""
    requests_per_s: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """Average requests per second; bursts of one second's worth are allowed."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    """Average prompt and output tokens per minute; bursts of one minute's worth are allowed."""
    concurrent: int | None = Field(default=None, ge=1, le=1_000_000)
    """Maximum concurrent requests, including those waiting at the router."""
    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Relative share of tokens when requests have to wait."""
    explain: bool | None = None
    """Whether its responses name the replica and the reason; default: the router's `explain`."""

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
    """Which backend serves which models."""

    path: str = Field(default="/v1/models", pattern=r"^(off|/[!-~]*)$")
    """Path that lists the models of backends without `models`; off: assume that they serve any."""
    interval_s: Seconds = 10.0
    """Time between two queries of a backend, s; one that recovers is queried at once."""
    timeout_s: Seconds = 2.0
    """Time-out of a query, s."""
    aliases: dict[ModelName, ModelName] = Field(default={})
    """Aliases: the name clients use = the name servers use."""

    @model_validator(mode="after")
    def _no_chains(self) -> Self:
        chained = sorted(a for a, model in self.aliases.items() if model in self.aliases)
        if chained:
            raise ValueError(f"alias {chained[0]} stands for another alias")
        return self


class LimitSettings(ConnectionLimits):
    """Size and time limits of requests."""

    first_byte_s: Seconds = 600.0
    """From sending a request to the first byte of the response, s."""
    between_chunks_s: Seconds = 120.0
    """Between two parts of a response, s."""
    total_s: Seconds = 3600.0
    """For one request, including all attempts and the whole response, s."""


class RetrySettings(Settings):
    """When a request is retried at another replica; never after a byte of a response was
    relayed."""

    attempts: int = Field(default=3, ge=1, le=16)
    """Maximum times a request is sent, including the first and a second try at the same replica
    after a stale connection. Requests of unknown kinds are sent once, unless they are GET or
    HEAD."""
    statuses: tuple[Annotated[int, Field(ge=429, le=599)], ...] = (429, 502, 503, 504)
    """Status codes of a backend that are retried elsewhere: 429, and 500 to 599."""
    max_pause_s: Seconds = 60.0
    """Maximum pause after a 429 or 503 with Retry-After, s: the replica gets no requests meanwhile,
    provided that another one has answered the same request."""
    budget: Share = 0.2
    """Long-run average of retries per request; prevents retry storms."""
    burst: int = Field(default=100, ge=0, le=1_000_000)
    """Retries allowed at once, for a replica that dies with many requests."""

    @field_validator("statuses")
    @classmethod
    def _are_failures(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(429 < status < 500 for status in value):
            raise ValueError("must be 429 or 500 to 599: other 4xx answers are the client's fault")
        return value


class HealthSettings(Settings):
    """Circuit breakers: when a replica is ejected, and how it comes back."""

    path: str = Field(default="/health", pattern=r"^/[!-~]*$")
    """Path of the health probe; any status below 500 is healthy."""
    interval_s: Seconds = 2.0
    """Time between two probes of a replica, s."""
    timeout_s: Seconds = 2.0
    """Time-out of a probe, s."""
    failures: int = Field(default=3, ge=1, le=1000)
    """Consecutive failures, of requests or probes, that eject a replica."""
    max_ejected: Share = 0.5
    """Maximum share of a model's replicas ejected for failed requests and late probes, rounded
    down. A health path that refuses connections or responds with 5xx ejects beyond it."""
    failure_share: Share = 0.5
    """Share of failed requests in `window_s` that ejects a replica."""
    window_s: Seconds = 10.0
    """Window of `failure_share`, s."""
    window_requests: int = Field(default=20, ge=1, le=1_000_000)
    """Minimum requests in the window for `failure_share` to apply."""
    open_s: Seconds = 5.0
    """How long an ejected replica gets no requests, s; doubles with each failed trial, up to
    12-fold."""
    trials: int = Field(default=3, ge=1, le=1000)
    """Trial requests at once; as many successes close the breaker."""
    slow_start_s: float = Field(default=10.0, ge=0, le=3600, allow_inf_nan=False)
    """Time over which a recovered replica's share rises to its full share, s."""


class AdmissionSettings(Settings):
    """Admission control and the queue when all replicas are full."""

    max_in_flight: int | None = Field(default=None, ge=1, le=1_000_000)
    """Maximum concurrent requests per replica; default: no limit."""
    queue: int = Field(default=1000, ge=0, le=1_000_000)
    """Maximum requests waiting at the router; beyond it the least urgent is rejected (429)."""
    max_wait_s: Seconds = 30.0
    """Maximum wait, s; then the request is rejected (429)."""
    replace_priority: bool = False
    """Replace a `priority` in a client's body by the router's own when the policy orders; otherwise
    the server gets the client's, and such a request goes before all others there."""


class AutopilotSettings(Settings):
    """The autopilot: finds the best policy for the present traffic, and puts it in charge once live
    requests have shown that it is better. It needs the decision log and the admin listener."""

    mode: Literal["off", "suggest", "act"] = "off"
    """off; suggest: only says on /status what it would do; act: also does it."""
    policies: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Policies that may be put in charge; default: `tailrace`, every rule, the best of them with
    order and with a queue, and fine-tuned ones."""
    every_s: float = Field(default=300.0, ge=1, le=86_400, allow_inf_nan=False)
    """Pause between two rounds, s; longer if a round takes long, so that it uses a fifth of a core
    at most."""
    window_s: float = Field(default=3600.0, ge=10, le=86_400, allow_inf_nan=False)
    """Traffic that is simulated in each round, s."""
    requests: int = Field(default=80_000, ge=100, le=1_000_000)
    """Maximum requests of that, the latest; bounds time and memory."""
    least_gain: Share = 0.03
    """A policy becomes a candidate if its simulated cost is lower by this share or more."""
    max_error: Share = 0.25
    """Nothing is changed while the simulated mean end-to-end time under the recorded decisions is
    off by more than this share."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5, allow_inf_nan=False)
    """Probability at most of putting a candidate in charge that is not better."""
    margin: float = Field(default=0.0, ge=-0.5, le=1, allow_inf_nan=False)
    """A candidate may cost this share more than the present policy and still take over."""
    share: float = Field(default=0.2, gt=0, le=0.5, allow_inf_nan=False)
    """Share of the time that a candidate gets until it takes over or is dismissed."""
    block_s: float = Field(default=60.0, ge=1, le=3600, allow_inf_nan=False)
    """Length of one of its turns, s."""
    washout_s: float = Field(default=15.0, ge=0, le=1800, allow_inf_nan=False)
    """Requests of the first seconds of each turn do not count, s."""
    shadow_s: float = Field(default=300.0, ge=0, le=86_400, allow_inf_nan=False)
    """How long a candidate only says what it would do, s."""
    trial_s: float = Field(default=4 * 3600.0, ge=60, le=1e6, allow_inf_nan=False)
    """A candidate that is neither better nor worse after so long is dismissed, s."""
    guard_s: float = Field(default=4 * 3600.0, ge=0, le=1e6, allow_inf_nan=False)
    """How long the former policy keeps turns, half as many, to take over again, s."""
    rest_s: float = Field(default=6 * 3600.0, ge=0, le=1e7, allow_inf_nan=False)
    """A candidate that was dismissed is not tried again for so long, s."""
    finetune_s: int = Field(default=1800, ge=0, le=86_400)
    """CPU time of a fine-tuning at most, s, once per `rest_s`; 0: none. It needs PyTorch, runs at
    the lowest priority, and begins only if a look-ahead shows that there is something to gain."""
    attainment: Share = 0.99
    """Share of requests within their targets for which `tailrace_replicas_wanted` is sized."""
    certificate: Path | None = None
    """Certificate that it shows the admin listener, PEM; needed if `admin.tls.client_ca` is set."""
    key: Path | None = None
    """Key of this certificate, without a password; default: it stands in the same file."""

    @model_validator(mode="after")
    def _washes_out(self) -> Self:
        if self.washout_s > 0.5 * self.block_s:
            raise ValueError("washout_s may be half of block_s at most")
        return self


class PickSettings(Settings):
    """The endpoint picker (`tailrace pick`); without effect for `tailrace serve`."""

    fallbacks: int = Field(default=2, ge=0, le=16)
    """Endpoints named after the first, best first, for the proxy's retries."""
    responses: str = Field(default="auto", pattern=r"^(auto|all|none)$")
    """Responses whose body the picker reads for tokens and usage. all: every one. none: no one;
    only the end is seen, and lengths are estimated. auto: complete ones, and streams while
    `stream_messages_per_s` is not used up. The proxy must allow mode overrides (picker.md)."""
    stream_messages_per_s: float = Field(default=500.0, ge=0, le=1e6, allow_inf_nan=False)
    """Parts of streamed responses per second, on average, that `responses = "auto"` reads."""
    objectives: dict[Annotated[str, Field(min_length=1, max_length=253)], int] = Field(default={})
    """Priority of each InferenceObjective, by name: higher is more urgent, 0 is the default.
    Requests below 0 are rejected (429) instead of waiting when all replicas are full."""


class EventSettings(Settings):
    """KV events of the servers: exact knowledge of their prefix caches (several-routers.md)."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port where every backend publishes its KV events, at the host of its `url`; 0: only those
    with `kv_events`."""
    replay_port: int = Field(default=0, ge=0, le=65535)
    """Port where every backend replays them; 0: only those with `kv_replay`."""
    topic: str = Field(default="", max_length=256)
    """Read only topics that begin with this; empty: all."""
    max_lag_s: Seconds = 2.0
    """Maximum delay of events, s; beyond it a replica's cache is `stale` and is estimated again."""
    prompts: int = Field(default=8, ge=1, le=1024)
    """Maximum number of /tokenize requests in progress (each follows a response). The caches of
    prompts beyond it stay estimated."""
    prompt_bytes: int = Field(default=262_144, ge=0, le=2**24)
    """Longest request body whose tokens are asked for, bytes."""
    blocks: int = Field(default=262_144, ge=1024, le=2**24)
    """KV blocks remembered per server; each takes about 300 bytes in every worker process."""

    def endpoints(self, backend: BackendSettings) -> tuple[str, str]:
        """Return where a backend publishes and replays its events; empty: nowhere."""
        host = backend.origin[0]
        host = f"[{host}]" if ":" in host else host
        events = backend.kv_events or (f"tcp://{host}:{self.port}" if self.port else "")
        replay = f"tcp://{host}:{self.replay_port}" if self.replay_port else ""
        return events, backend.kv_replay or replay


class StoreSettings(Settings):
    """State shared with routers on other machines, over Redis or Valkey (several-routers.md)."""

    url: str = Field(default="", pattern=r"^(rediss?://[!-~]+|unix://[!-~]+)?$")
    """Address of the store, e.g. redis://10.0.0.9:6379/0; empty: none."""
    password_env: str | None = None
    """Environment variable with the store's password."""
    name: str = Field(default="tailrace", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Routers with the same name share their state."""
    interval_s: float = Field(default=0.01, ge=0.001, le=10, allow_inf_nan=False)
    """Interval between two messages to the other routers, s."""
    gone_s: Seconds = 2.0
    """A router that is silent for this long is forgotten, s."""
    members: int = Field(default=16, ge=1, le=256)
    """Maximum number of worker processes on other machines whose state is kept."""

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, value: str) -> str:
        if urlsplit(value).password:
            raise ValueError("must not contain a password; that goes to password_env")
        return value

    def password(self) -> str | None:
        """Return the password from the environment; raise if the variable is named but not set."""
        if self.password_env is None:
            return None
        password = os.environ.get(self.password_env, "")
        if not password:
            raise TailraceError(f"store.password_env: {self.password_env} is not set")
        return password


class LogSettings(Settings):
    """The log on standard error, one JSON object per line; never contains keys or request text."""

    level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")
    """debug, info, warning or error."""
    requests: bool = False
    """Log every request; otherwise only failures and changes."""


class AdminSettings(Settings):
    """The second listener: metrics, status, drain and reload."""

    listen: str = "127.0.0.1:8081"
    """host:port; off: no admin listener."""
    token_env: str | None = None
    """Environment variable with a token that every admin request must carry."""
    tls: ListenerTls = ListenerTls()

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
