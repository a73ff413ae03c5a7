"""All settings of the live router: one tree of frozen models, filled by a TOML file and by flags.

It stands apart from the parts in ``settings.py`` because those that choose replicas need the parts.
"""

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from tailrace.config import MAX_REPLICAS, Settings, assign, load_toml, parse
from tailrace.errors import TailraceError
from tailrace.net.limits import Seconds
from tailrace.net.tls import client_context, server_context
from tailrace.router.access.accounts import MAX_CLIENTS
from tailrace.router.access.keyring import Keyring
from tailrace.router.decide.chooser import ChooserSettings
from tailrace.router.discovery import found
from tailrace.router.discovery.settings import DiscoverySettings
from tailrace.router.intake.routes import INFERENCE_PATHS, is_listable
from tailrace.router.intake.tokens import TokenSettings
from tailrace.router.observe.decision_log import DecisionLogSettings
from tailrace.router.observe.scrape import ScrapeSettings
from tailrace.router.observe.tracing import TracingSettings
from tailrace.router.settings import (
    AdminSettings,
    AdmissionSettings,
    AutopilotSettings,
    BackendSettings,
    BackendTls,
    ClientSettings,
    EventSettings,
    HealthSettings,
    LimitSettings,
    ListenerTls,
    LogSettings,
    ModelSettings,
    PickSettings,
    RetrySettings,
    StoreSettings,
    address,
    is_loopback,
)
from tailrace.router.state.server_speeds import SpeedSettings
from tailrace.scenario import merged

#: Name of the file that keeps what was learned of the servers' speed.
SPEEDS_FILE = "servers.json"
#: Name of the file that keeps what the autopilot is doing.
AUTOPILOT_FILE = "autopilot.json"


class ServeSettings(Settings):
    """The live router."""

    backends: tuple[BackendSettings, ...] = Field(default=(), max_length=MAX_REPLICAS)
    """The servers."""
    discovery: DiscoverySettings = DiscoverySettings()
    listen: str = "127.0.0.1:8080"
    """host:port for clients."""
    processes: int = Field(default=1, ge=1, le=64)
    """Router processes that share the port, one per core; see 'Several routers'."""
    share_port: bool = False
    """Let several routers listen there (SO_REUSEPORT); the kernel spreads connections over them."""
    tls: ListenerTls = ListenerTls()
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks (CIDR) of proxies whose X-Forwarded-For is trusted; from other clients
    it and similar headers are removed. Servers then get the client's address in X-Forwarded-For."""
    clients: tuple[ClientSettings, ...] = Field(default=(), max_length=MAX_CLIENTS)
    """Clients with keys; none: anyone who can reach the router may use it."""
    paths: tuple[str, ...] = INFERENCE_PATHS
    """Paths that are passed on to backends, compared exactly; a final `/*` matches everything
    below."""
    models: ModelSettings = ModelSettings()
    routing: ChooserSettings = ChooserSettings()
    metrics: ScrapeSettings = ScrapeSettings()
    events: EventSettings = EventSettings()
    store: StoreSettings = StoreSettings()
    decisions: DecisionLogSettings = DecisionLogSettings()
    speeds: SpeedSettings = SpeedSettings()
    tokenizer: Path | None = None
    """A tokenizer.json to count prompt tokens with; default: estimated from bytes, and corrected by
    the servers' own counts."""
    tokens: TokenSettings = TokenSettings()
    admin: AdminSettings = AdminSettings()
    limits: LimitSettings = LimitSettings()
    retry: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    admission: AdmissionSettings = AdmissionSettings()
    pick: PickSettings = PickSettings()
    autopilot: AutopilotSettings = AutopilotSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    lame_duck_s: float = Field(default=5.0, ge=0, le=3600, allow_inf_nan=False)
    """How long connections and requests are still accepted after SIGTERM while /ready fails, s."""
    watchdog_s: Seconds = 10.0
    """A worker process that makes no progress for this long is killed and restarted, s."""
    drain_s: Seconds = 30.0
    """How long requests in progress may then take to finish, s."""
    explain: bool | None = None
    """Explain routing decisions to clients: X-Tailrace-Replica, -Policy and -Reason, and the
    replica in errors; default: only if the router listens on loopback and there are no
    `clients`."""

    @field_validator("paths")
    @classmethod
    def _are_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not is_listable(path):
                raise ValueError(
                    f"'{path[:80]}' is no path; write it like /v1/embeddings or /v1/audio/*"
                )
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError:
                raise ValueError(
                    f"'{network[:80]}' is no address or network; write it like 10.0.0.0/8"
                ) from None
        return value

    @model_validator(mode="after")
    def _clients(self) -> Self:
        names = [client.name for client in self.clients]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(
                f"two clients are called {double[0]}; one client may have several keys"
            )
        return self

    @model_validator(mode="after")
    def _has_events(self) -> Self:
        silent = [b.label for b in self.backends if not self.events.endpoints(b)[0]]
        if self.routing.prefix_learns == "events" and silent:
            raise ValueError(
                f"routing.prefix_learns is events, but {silent[0]} publishes none: set events.port "
                "or kv_events of the backend"
            )
        return self

    @property
    def speeds_file(self) -> Path | None:
        """File that keeps what was learned of the servers' speed; None: nothing is kept."""
        folder = self.decisions.folder
        return self.speeds.file or (None if folder is None else folder / SPEEDS_FILE)

    @property
    def autopilot_file(self) -> Path | None:
        """File that keeps what the autopilot is doing; None: it is off."""
        folder = self.decisions.folder
        return None if self.autopilot.mode == "off" or folder is None else folder / AUTOPILOT_FILE

    @model_validator(mode="after")
    def _autopilot(self) -> Self:
        if self.autopilot.mode != "off":
            if self.decisions.folder is None:
                raise ValueError("the autopilot learns from the decision log: set decisions.folder")
            if self.admin.listen == "off":
                raise ValueError("the autopilot uses the admin listener: admin.listen is off")
            if self.admin.tls.client_ca is not None and self.autopilot.certificate is None:
                raise ValueError(
                    "admin.tls.client_ca asks every client for a certificate: set "
                    "autopilot.certificate"
                )
        return self

    @property
    def explains(self) -> bool:
        """Whether routing decisions are explained to clients without their own setting."""
        if self.explain is None:
            return is_loopback(address(self.listen)[0]) and not self.clients
        return self.explain

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        listen = address(self.listen)
        if self.admin.listen != "off":
            admin = address(self.admin.listen)
            if admin == listen and listen[1] != 0:
                raise ValueError(f"listen and admin.listen are both {self.listen}")
            if not is_loopback(admin[0]) and self.admin.token_env is None:
                raise ValueError(
                    f"admin.listen {self.admin.listen} can be reached from other machines: set "
                    "admin.token_env, or listen on 127.0.0.1"
                )
        urls = [b.url for b in self.backends]
        labels = [b.label for b in self.backends]
        for what, values in (("url", urls), ("name", labels)):
            double = sorted({v for v in values if values.count(v) > 1})
            if double:
                raise ValueError(f"two backends have the {what} {double[0]}")
        return self


def load(
    path: Path | None, overrides: dict[str, Any], assignments: Sequence[tuple[str, Any]] = ()
) -> ServeSettings:
    """Read settings from a file, if any; put overrides and then single values by path over it."""
    data = merged(load_toml(path) if path is not None else {}, overrides)
    for key, value in assignments:
        assign(data, key, value)
    settings = parse(ServeSettings, data)
    if not settings.backends and not settings.discovery.is_used:
        raise TailraceError(
            "there is no backend: give --backend http://host:port, or [[backends]] or [discovery] "
            "in --config"
        )
    for backend in (*settings.backends, found.example(settings.discovery)):
        backend.api_key()  # a key that is missing is said at once
    Keyring(settings.clients)
    settings.tracing.headers()
    if settings.tracing.tls != BackendTls():
        client_context(settings.tracing.tls.files)
    for tls in (settings.tls, settings.admin.tls):
        if tls.certificate is not None:
            server_context(tls.files)
    for files in {b.tls.files for b in settings.backends if b.origin.tls}:
        client_context(files)
    if settings.discovery.backend.tls != BackendTls():
        client_context(settings.discovery.backend.tls.files)
    return settings
