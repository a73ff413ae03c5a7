"""Where servers are found."""

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tailrace.config import MAX_REPLICAS, Settings
from tailrace.net.limits import Seconds
from tailrace.net.origin import Origin
from tailrace.router.settings import BackendDefaults

#: Files that Kubernetes puts into every container with a service account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Name of an object or a namespace.
ObjectName = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]


class KubernetesSettings(Settings):
    """Pods of a Kubernetes cluster as servers: give `service`, `pool` or `selector`."""

    service: ObjectName = ""
    """A Service: the servers are the endpoints in its EndpointSlices."""
    pool: ObjectName = ""
    """An InferencePool (v1): its selector and targetPorts name the servers."""
    selector: str = Field(default="", max_length=1024, pattern=r"^[!-~ ]*$")
    """Label selector of pods, e.g. app=vllm."""
    port: int | str = ""
    """Port of the servers: with `selector` its number, with `service` the number or name of one of
    its ports (default: the only one)."""
    scheme: str = Field(default="http", pattern=r"^https?$")
    """http or https."""
    namespace: ObjectName = ""
    """Namespace of the service, pool or pods; default: that of the router's own pod."""
    api_server: str = ""
    """URL of the Kubernetes API; default: that of the cluster in which the router runs."""
    token_file: Path | None = ACCOUNT / "token"
    """File with the token for the API, read again for each request."""
    ca: Path | None = ACCOUNT / "ca.crt"
    """CA certificates that the API's certificate is verified with."""

    @property
    def is_used(self) -> bool:
        """Whether pods are watched."""
        return bool(self.service or self.pool or self.selector)

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        if sum(map(bool, (self.service, self.pool, self.selector))) > 1:
            raise ValueError("give only one of service, pool and selector")
        if self.selector and not (isinstance(self.port, int) and 0 < self.port < 65536):
            raise ValueError("selector needs port, the number of the servers' port")
        if self.pool and self.port:
            raise ValueError("the ports of a pool are its targetPorts; leave port out")
        if self.api_server:
            try:
                Origin.parse(self.api_server)
            except ValueError:
                raise ValueError("api_server must be like https://10.0.0.1:6443") from None
        return self


class DiscoverySettings(Settings):
    """Servers that come and go, beside those in `backends`."""

    file: Path | None = None
    """A TOML file with [[backends]] as in the settings, read again whenever it changes."""
    dns: tuple[str, ...] = ()
    """URLs such as http://vllm.example:8000: every address of the name is a server. Names are
    resolved again every `interval_s`."""
    interval_s: Seconds = 5.0
    """Interval between two checks of the file and of DNS names, s."""
    most: int = Field(default=256, ge=1, le=MAX_REPLICAS)
    """Maximum number of servers with several `processes`; a single process has no limit."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    backend: BackendDefaults = BackendDefaults()

    @property
    def is_used(self) -> bool:
        """Whether servers are looked for."""
        return bool(self.file or self.dns or self.kubernetes.is_used)

    @field_validator("dns")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            try:
                Origin.parse(url)
                parts = urlsplit(url)
                if parts.query or parts.fragment or parts.username or not url.isascii():
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"'{url[:80]}' is no address; write it like http://vllm.example:8000"
                ) from None
        return value
