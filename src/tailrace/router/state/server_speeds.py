"""What the router knows of its servers' speed: in words for people, and kept over restarts."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.config import Settings
from tailrace.errors import TailraceError
from tailrace.files import write_text
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.server_model import N_FACTORS, OWN_SD, SERVER_MODEL, answer_ms

#: Where the speed of a server is known from.
GIVEN, ASSUMED, LEARNED = "given", "assumed", "learned"
#: Standard error of the time per token, as a share of it, below which it counts as learned.
CERTAIN = 0.1
#: A server whose times are predicted worse than this, on average, is not understood.
UNEXPLAINED = 0.4
#: Equations before either is said.
ENOUGH = 20
#: Load at which the time per output token is reported: answers at once, tokens of context each.
TYPICAL_ANSWERS, TYPICAL_CONTEXT = 8, 1000
#: After a restart a server may be another one: variance that is added to what was known.
DOUBT = 0.1**2
#: Time between two writes, s.
SAVE_EVERY_S = 60.0
_VERSION = 1

_log = logging.getLogger(__name__)


class SpeedSettings(Settings):
    """Learning how fast the servers are."""

    learn: bool = True
    """Learn from answers how fast servers are. One with `device`, `cost` or `speed` in its settings
    keeps what they say."""
    file: Path | None = None
    """File that keeps it over restarts; default: servers.json in `decisions.folder`, if that is
    set."""


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """How fast a server is, as far as the router knows."""

    source: str
    """given (by its settings), assumed (the default device) or learned."""
    tpot_s: float
    """Time per output token with TYPICAL_ANSWERS answers at once, s."""
    prefill_tokens_per_s: float
    uncertainty: float | None
    """Standard error of ``tpot_s`` as a share of it; None: its settings say it."""
    error: float | None
    """Moving mean of the relative error of predicted times; None: nothing was predicted."""
    unexplained: bool
    """Whether its times do not follow the cost model."""


def speed_of(cluster: ClusterState, replica: int) -> ServerSpeed:
    """Describe how fast a replica is."""
    model, cost, view = (
        rows[replica] for rows in (cluster.models, cluster.costs, cluster.replicas)
    )
    tpot_ms = answer_ms(cost, TYPICAL_ANSWERS, TYPICAL_CONTEXT)
    seen = int(model["equations"])
    uncertainty = None
    source = GIVEN
    if model["learns"]:
        prior = model["prior"]
        tokens_ms = answer_ms(prior, TYPICAL_ANSWERS, 0) - prior["base_ms"]
        context_ms = prior["per_context_ms"] * TYPICAL_ANSWERS * TYPICAL_CONTEXT
        parts = np.array([prior["base_ms"], tokens_ms, context_ms, 0.0, 0.0])
        variance = float(parts @ model["covariance"] @ parts)
        uncertainty = float(np.sqrt(max(variance, 0.0)) / tpot_ms)
        source = LEARNED if seen >= ENOUGH and uncertainty < CERTAIN else ASSUMED
    return ServerSpeed(
        source=source,
        tpot_s=float(tpot_ms / view["speed"] * 1e-3),
        prefill_tokens_per_s=float(view["prefill_tokens_per_s"]),
        uncertainty=uncertainty,
        error=float(model["error"]) if seen else None,
        unexplained=seen >= ENOUGH and bool(model["error"] > UNEXPLAINED),
    )


def save(cluster: ClusterState, path: Path) -> None:
    """Write what was learned; the file appears whole or not at all."""
    learned = {}
    for backend, model in zip(cluster.backends, cluster.models, strict=True):
        if model["learns"] and model["equations"] >= ENOUGH:
            learned[backend.url] = {
                "factors": model["factors"].tolist(),
                "covariance": model["covariance"].tolist(),
                "equations": int(model["equations"]),
                "error": float(model["error"]),
                "scatter": float(model["scatter"]),
            }
    write_text(path, json.dumps({"version": _VERSION, "servers": learned}, indent=1) + "\n")


def restore(cluster: ClusterState, path: Path) -> int:
    """Take over what an earlier router has learned; return of how many servers.

    A file that cannot be used is reported and left out: everything in it can be learned again.
    """
    try:
        known = _read(path)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("not used", extra={"file": str(path), "why": str(error) or repr(error)})
        return 0
    count = 0
    for replica, (backend, model) in enumerate(zip(cluster.backends, cluster.models, strict=True)):
        found = known.get(backend.url)
        if found is not None and model["learns"]:
            for name in ("factors", "covariance", "equations", "error", "scatter"):
                model[name] = found[name]
            model["covariance"] += DOUBT * (np.ones((N_FACTORS, N_FACTORS)) + np.eye(N_FACTORS))
            model["updated_at"] = cluster.clock()
            cluster.follow_model(replica)
            count += 1
    return count


def _read(path: Path) -> dict[str, Any]:
    """Return what the file says of each server, by its address, checked."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["version"] != _VERSION:
        raise ValueError(f"version {data['version']} is not {_VERSION}")
    servers: dict[str, Any] = {}
    for url, found in data["servers"].items():
        row = np.zeros((), SERVER_MODEL)
        for name in ("factors", "covariance"):
            row[name] = np.asarray(found[name], np.float64)
            if np.shape(found[name]) != row[name].shape or not np.isfinite(row[name]).all():
                raise ValueError(f"{name} of {url[:80]} are damaged")
        row["equations"] = int(found["equations"])
        for name in ("error", "scatter"):
            row[name] = float(found[name])
            if not 0.0 <= row[name] < np.inf:
                raise ValueError(f"{name} of {url[:80]} is damaged")
        eigenvalues = np.linalg.eigvalsh(row["covariance"])
        if (row["factors"] <= 0).any() or eigenvalues.min() < -OWN_SD or row["equations"] < 0:
            raise ValueError(f"factors of {url[:80]} are damaged")
        servers[url] = row
    return servers


def save_or_log(cluster: ClusterState, path: Path) -> None:
    """Write what was learned; a disk that is full costs this, and no request."""
    try:
        save(cluster, path)
    except TailraceError as error:
        _log.warning("servers' speeds not saved", extra={"why": str(error)})
