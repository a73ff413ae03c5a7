"""Merges the admin responses of several workers into one."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from tailrace.net.server import error_body
from tailrace.router.admin import JSON
from tailrace.router.observe import prometheus
from tailrace.router.observe.rolling_window import percentiles
from tailrace.router.observe.snapshot import SHOWN_WAITING
from tailrace.router.observe.status import CLIENT_FIGURES
from tailrace.router.observe.telemetry import SHOWN_DECISIONS
from tailrace.router.state.exact_caches import TRUST_LEVELS
from tailrace.router.workers.peer_workers import WorkerResponse

#: States of a replica, the worst first: one worker's trouble with it is worth seeing.
_STATES = ("open", "half_open", "draining", "removed", "closed")
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? (.*)$")


def merge(path: str, responses: list[WorkerResponse]) -> tuple[int, bytes, bytes]:
    """Return status, content type and body of an admin request that all workers have answered."""
    if not responses:
        return 503, JSON, error_body(503, "no worker has answered")
    for response in responses:
        if response.status != 200:
            return response.status, JSON, response.body
    if path == "/metrics":
        texts = [(r.worker, r.body.decode()) for r in responses]
        return 200, prometheus.CONTENT_TYPE, metrics(texts)
    if path in MERGED:
        values = [(r.worker, orjson.loads(r.body)) for r in responses]
        return 200, JSON, orjson.dumps(MERGED[path](values))
    return 200, JSON, responses[0].body


def metrics(texts: list[tuple[int, str]]) -> bytes:
    """Merge the metrics of all workers; each sample gets the label ``worker``."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
                continue
            sample = _SAMPLE.match(line)
            if sample is None:
                continue
            name, labels, value = sample.groups()
            inner = f",{labels[1:-1]}" if labels and labels != "{}" else ""
            samples.setdefault(family, []).append(f'{name}{{worker="{worker}"{inner}}} {value}')
    lines = []
    for family, head in heads.items():
        lines += head + samples.get(family, [])
    return ("\n".join(lines) + "\n").encode()


def status(values: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Merge ``/status``; ``workers`` lists what each of them has."""
    parts = [value for _, value in values]
    first = parts[0]
    decided = sum(p["decisions"]["total"] for p in parts)
    spent_s = sum((p["decisions"]["mean_s"] or 0.0) * p["decisions"]["total"] for p in parts)
    merged = {
        **first,
        "state": "ok" if any(p["state"] == "ok" for p in parts) else first["state"],
        "uptime_s": max(p["uptime_s"] for p in parts),
        "behind": next((p["behind"] for p in parts if p["behind"]), ""),
        **{key: sum(p[key] for p in parts) for key in ("in_flight", "waiting", "clients")},
        "queue": _queue([p["queue"] for p in parts]),
        "decisions": {
            "total": decided,
            "per_s": sum(p["decisions"]["per_s"] for p in parts),
            "per_s_1m": sum(p["decisions"]["per_s_1m"] for p in parts),
            "mean_s": spent_s / decided if decided else None,
        },
        "latency": {
            name: {
                window: percentiles(
                    np.sum([p["counts"][name][window] for p in parts], axis=0, dtype=np.int64)
                )
                for window in windows
            }
            for name, windows in first["latency"].items()
        },
        **{
            key: dict(sum((Counter(p[key]) for p in parts), Counter()))
            for key in ("requests", "fallbacks", "retries", "shed")
        },
        "by_client": _clients([p["by_client"] for p in parts]),
        "event_loop_lag_s": max(p["event_loop_lag_s"] for p in parts),
        "tokens": _tokens([p["tokens"] for p in parts]),
        "canary": _shares(parts, "canary", "decisions", "share_of_decisions", decided),
        "shadow": _shares(parts, "shadow", "disagreements", "share_of_disagreements", None),
        "replicas": _replicas(parts),
        "store": _store([p["store"] for p in parts if p["store"] is not None]),
        "recent": _recent(parts, decided),
        "workers": [
            {
                "worker": worker,
                "pid": p["pid"],
                "uptime_s": p["uptime_s"],
                "behind": p["behind"],
                "clients": p["clients"],
                "in_flight": p["in_flight"],
                "decisions": p["decisions"]["total"],
                "event_loop_lag_s": p["event_loop_lag_s"],
            }
            for worker, p in values
        ],
    }
    del merged["counts"], merged["pid"]
    return merged


def _queue(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge what waits at the workers."""
    oldest = sorted((one for p in parts for one in p["oldest"]), key=lambda one: -one["waited_s"])
    return {
        "longest_wait_s": max(p["longest_wait_s"] for p in parts),
        "waited": sum(p["waited"] for p in parts),
        "overtakes": dict(sum((Counter(p["overtakes"]) for p in parts), Counter())),
        "oldest": oldest[:SHOWN_WAITING],
    }


def _clients(parts: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up the counts of each client."""
    names = dict.fromkeys(name for part in parts for name in part)
    totals = {
        name: sum((Counter(part.get(name, {})) for part in parts), Counter()) for name in names
    }
    return {name: {**dict.fromkeys(CLIENT_FIGURES, 0), **totals[name]} for name in names}


def _tokens(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge how lengths were known; bytes per token are the mean over all known lengths."""
    weights = [sum(p["figures"].values()) for p in parts]
    total = sum(weights)
    mean = sum(w * p["bytes_per_token"] for w, p in zip(weights, parts, strict=True))
    return {
        **parts[0],
        **{
            key: dict(sum((Counter(p[key]) for p in parts), Counter()))
            for key in ("prompts", "figures")
        },
        "bytes_per_token": mean / total if total else parts[0]["bytes_per_token"],
        "unanswered": sum(p["unanswered"] for p in parts),
    }


def _shares(
    parts: list[dict[str, Any]], key: str, count: str, share: str, total: int | None
) -> dict[str, Any] | None:
    """Add up the decisions of the canary or the shadow."""
    found = [p[key] for p in parts if p[key] is not None]
    if not found:
        return None
    counted = sum(f[count] for f in found)
    made = sum(f["decisions"] for f in found)
    out_of = made if total is None else total
    return {
        **found[0],
        "decisions": made,
        count: counted,
        share: counted / out_of if out_of else None,
    }


def _store(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Merge the connections to the shared store; one worker knows the members for all."""
    if not parts:
        return None
    return {
        "connected": all(p["connected"] for p in parts),
        "members": max(p["members"] for p in parts),
        **{key: sum(p[key] for p in parts) for key in ("lost", "missed", "refused")},
    }


def _replicas(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the replicas; those that some workers do not know yet come last."""
    made: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for part in parts:
        for replica in part["replicas"]:
            made.setdefault(replica["url"], []).append((part["decisions"]["per_s_1m"], replica))
    return [_replica(seen) for seen in made.values()]


def _replica(seen: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    views = [view for _, view in seen]
    worst = min(views, key=lambda v: _STATES.index(v["state"]) if v["state"] in _STATES else 9)
    known = [v for v in views if v["metrics_age_s"] is not None]
    freshest = min(known, key=lambda v: v["metrics_age_s"]) if known else views[0]
    limits = [v["limit"] for v in views]
    shared = [(pace, v["share_1m"]) for pace, v in seen if v["share_1m"] is not None]
    pace = sum(p for p, _ in shared)
    lags = [v["event_lag_s"] for v in views if v["event_lag_s"] is not None]
    summed = ("in_flight", "queued", "scrape_failures", "cached_tokens")
    return {
        **worst,
        **{key: sum(v[key] for v in views) for key in summed},
        **{key: freshest[key] for key in ("waiting", "running", "kv_used", "metrics_age_s")},
        "available": any(v["available"] for v in views),
        "opened": max(v["opened"] for v in views),
        "warming": any(v["warming"] for v in views),
        "caches": max((v["caches"] for v in views), key=TRUST_LEVELS.index),
        "event_lag_s": max(lags, default=None),
        "limit": None if None in limits else max(limits),
        "share_1m": sum(p * s for p, s in shared) / pace if pace else None,
    }


def _recent(parts: list[dict[str, Any]], decided: int) -> list[dict[str, Any]]:
    found = sorted((entry for p in parts for entry in p["recent"]), key=lambda e: e["age_s"])
    return [
        {**entry, "number": decided - back} for back, entry in enumerate(found[:SHOWN_DECISIONS])
    ]


def history(values: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Add up the queues of all workers slot by slot; all have the same clock."""
    parts = [value for _, value in values]
    slots: dict[int, dict[str, Any]] = {}
    for part in parts:
        for k, number in enumerate(part["slots"]):
            slot = slots.setdefault(
                number, {"age_s": part["age_s"][k], "in_flight": [], "queued": [],
                         "waiting": 0, "decisions_per_s": 0.0}
            )  # fmt: skip
            for key in ("in_flight", "queued"):
                slot[key] = _added(slot[key], part[key][k])
            for key in ("waiting", "decisions_per_s"):
                slot[key] += part[key][k]
    numbers = sorted(slots)
    keys = ("age_s", "in_flight", "queued", "waiting", "decisions_per_s")
    return {
        "every_s": parts[0]["every_s"],
        "slots": numbers,
        **{key: [slots[number][key] for number in numbers] for key in keys},
    }


def _added(a: list[int], b: list[int]) -> list[int]:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [x + y for x, y in zip(longer, shorter + [0] * len(longer), strict=False)]


def backends(values: list[tuple[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Merge ``/backends``."""
    made: dict[str, list[dict[str, Any]]] = {}
    for _, part in values:
        for entry in part:
            made.setdefault(entry["url"], []).append(entry)
    summed = ("in_flight", "ledger_in_flight", "connections")
    return [
        {
            **min(seen, key=lambda e: _STATES.index(e["state"]) if e["state"] in _STATES else 9),
            **{key: sum(e[key] for e in seen) for key in summed},
            "available": any(e["available"] for e in seen),
            "opened": max(e["opened"] for e in seen),
        }
        for seen in made.values()
    ]


#: How JSON is merged, by path; each function is given (worker, value) of every worker.
MERGED: dict[str, Callable[[list[tuple[int, Any]]], Any]] = {
    "/status": status,
    "/status/history": history,
    "/backends": backends,
    "/routing": lambda values: values[0][1],  # all go by the same configuration
}
