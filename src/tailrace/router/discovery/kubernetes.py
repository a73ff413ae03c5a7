"""Pods of a Kubernetes cluster as servers: those of a Service, an InferencePool or a selector.

A pod is a server once it is ready. One that is no longer ready, or is being deleted, gets no more
requests; it is forgotten when it is gone.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from tailrace.errors import TailraceError
from tailrace.net.tls import TlsContexts
from tailrace.router.discovery.api_watch import KubernetesApi, Object, ObjectWatch, own_namespace
from tailrace.router.discovery.found import FoundServer, Report, backend_at
from tailrace.router.discovery.settings import DiscoverySettings

_POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
_PODS = "/api/v1/namespaces/{}/pods"
_SERVICE_LABEL = "kubernetes.io/service-name"

_log = logging.getLogger("tailrace.router")


class PodEndpoint(NamedTuple):
    """What matters of a pod, or of an endpoint of a Service."""

    identity: str
    """The pod's uid."""
    name: str
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    """Empty: those of the settings or of the pool."""
    is_ready: bool
    is_ending: bool
    """It is being deleted."""


class PoolTarget(NamedTuple):
    """What an InferencePool selects."""

    selector: str
    ports: tuple[int, ...]


def pod(item: Object) -> tuple[PodEndpoint, ...]:
    """Read a Pod; one that has no address yet, or has ended, is no endpoint."""
    about, status = item.get("metadata") or {}, item.get("status") or {}
    address = status.get("podIP")
    if not address or status.get("phase") != "Running":
        return ()
    conditions = status.get("conditions") or []
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return (
        PodEndpoint(
            str(about.get("uid")), str(about.get("name")), (str(address),), (), ready,
            bool(about.get("deletionTimestamp")),
        ),
    )  # fmt: skip


def endpoint_slice(item: Object, port: int | str) -> tuple[PodEndpoint, ...]:
    """Read an EndpointSlice; ``port``: number or name of the port that counts, empty: the only."""
    if item.get("addressType") not in ("IPv4", "IPv6"):
        return ()  # names are for DNS
    ports = [
        int(found["port"]) for found in item.get("ports") or []
        if found.get("port") and port in ("", found["port"], found.get("name"), str(found["port"]))
    ]  # fmt: skip
    if len(ports) != 1:
        _log.error(
            "the port of a service is not clear: set discovery.kubernetes.port",
            extra={"slice": (item.get("metadata") or {}).get("name"), "ports": ports},
        )
        return ()
    return tuple(_slice_endpoint(found, ports[0]) for found in item.get("endpoints") or [])


def _slice_endpoint(found: Object, port: int) -> PodEndpoint:
    conditions, target = found.get("conditions") or {}, found.get("targetRef") or {}
    addresses = tuple(map(str, found.get("addresses") or ()))[:1]  # more mean the same endpoint
    ready = conditions.get("ready")  # absent means yes
    return PodEndpoint(
        str(target.get("uid") or ",".join(addresses)), str(target.get("name") or ""), addresses,
        (port,), ready is None or bool(ready), bool(conditions.get("terminating")),
    )  # fmt: skip


def pool_target(item: Object) -> PoolTarget:
    """Read an InferencePool."""
    spec = item.get("spec") or {}
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports = tuple(int(port["number"]) for port in spec.get("targetPorts") or [])
    return PoolTarget(",".join(f"{k}={v}" for k, v in sorted(labels.items())), ports)


class KubernetesServers:
    """Reports the servers of a cluster."""

    def __init__(self, settings: DiscoverySettings, tls: TlsContexts | None = None) -> None:
        self._settings = settings
        given = settings.kubernetes
        what = given.service or given.pool or given.selector
        self.name = f"kubernetes {what}"
        self._tls = tls
        self._namespace = given.namespace or own_namespace()
        self._seen: set[str] = set()  # identities of endpoints that were ready once
        self._endpoints: ObjectWatch | None = None
        self._ports: tuple[int, ...] = ()
        self._report: Report = lambda _: None

    async def run(self, report: Report) -> None:
        """Report whenever endpoints have changed."""
        self._report = report
        given = self._settings.kubernetes
        api = KubernetesApi(given, self._tls)
        try:
            if given.service:
                query = {"labelSelector": f"{_SERVICE_LABEL}={given.service}"}
                await self._watch(
                    api, _SLICES, query, lambda item: endpoint_slice(item, given.port)
                )
            elif given.selector:
                self._ports = (int(given.port),)
                await self._watch(api, _PODS, {"labelSelector": given.selector}, pod)
            else:
                await self._watch_pool(api)
        finally:
            api.close()

    async def _watch(self, api: KubernetesApi, path: str, query: dict[str, str], keep: Any) -> None:
        path = path.format(self._namespace)
        self._endpoints = ObjectWatch(api, path, query, keep, self._changed)
        await self._endpoints.run()

    async def _watch_pool(self, api: KubernetesApi) -> None:
        """Watch the pool, and the pods that it selects at the time."""
        name, changed = self._settings.kubernetes.pool, asyncio.Event()
        query = {"fieldSelector": f"metadata.name={name}"}
        path = _POOLS.format(self._namespace)
        pools = ObjectWatch(api, path, query, pool_target, changed.set)
        target: PoolTarget | None = None
        pods: asyncio.Task[None] | None = None
        watching = asyncio.create_task(pools.run())
        try:
            while True:
                await changed.wait()
                changed.clear()
                new = next(iter(pools.objects.values()), None)
                if new == target:
                    continue
                if new is None:
                    _log.error("there is no such InferencePool", extra={"pool": name})
                elif not new.selector or not new.ports:
                    # A selector without labels would mean every pod.
                    _log.error("an InferencePool selects nothing", extra={"pool": name})
                    new = None
                if pods is not None:
                    await _cancel(pods)
                target, pods, self._ports = new, None, new.ports if new is not None else ()
                if new is None:
                    self._report([])
                else:
                    query = {"labelSelector": new.selector}
                    pods = asyncio.create_task(self._watch(api, _PODS, query, pod))
        finally:
            for task in (watching, pods):
                if task is not None:
                    await _cancel(task)

    def _changed(self) -> None:
        assert self._endpoints is not None
        endpoints = [each for kept in self._endpoints.objects.values() for each in kept]
        present = {endpoint.identity for endpoint in endpoints}
        self._seen &= present
        found: dict[str, FoundServer] = {}
        for endpoint in endpoints:
            serves = endpoint.is_ready and not endpoint.is_ending
            if serves:
                self._seen.add(endpoint.identity)
            if endpoint.identity in self._seen:
                for server in self._servers(endpoint, not serves):
                    # An endpoint may be in two slices for a moment.
                    known = found.get(server.backend.url)
                    if known is None or known.leaving:
                        found[server.backend.url] = server
        self._report(list(found.values()))

    def _servers(self, endpoint: PodEndpoint, leaving: bool) -> Iterator[FoundServer]:
        ports = endpoint.ports or self._ports
        scheme = self._settings.kubernetes.scheme
        for address in endpoint.addresses:
            for port in ports:
                name = endpoint.name if len(ports) == 1 or not endpoint.name else (
                    f"{endpoint.name}:{port}"
                )  # fmt: skip
                try:
                    backend = backend_at(self._settings, scheme, address, port, name=name)
                except ValueError as error:
                    _log.error("an endpoint cannot be used", extra={"why": str(error)[:200]})
                    continue
                yield FoundServer(backend, endpoint.identity, leaving)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, TailraceError):
        await task
