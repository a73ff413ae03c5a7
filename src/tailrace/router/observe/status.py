"""``/status``: what the router is doing now, as a dictionary for JSON, and the page that shows it.

Times are in s, lengths in tokens. It contains no text of requests and no key. What is unknown is
null, never 0.
"""

import base64
import dataclasses
import hashlib
import os
import re
from collections import Counter
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from tailrace import __version__
from tailrace.router.decide.chooser import Decision
from tailrace.router.observe.rolling_window import SLOT_S, SLOTS
from tailrace.router.observe.snapshot import BackendSnapshot, RouterSnapshot
from tailrace.router.observe.telemetry import FALLBACK_CAUSES, Telemetry

#: Windows of the percentiles, in s, by their name.
WINDOWS = {"1m": 60.0, "5m": 300.0}
LATENCIES = ("ttft", "e2e")
#: Time over which the rate of decisions is measured, in s.
PACE_S = 10.0
#: What is counted of each client with a key.
CLIENT_FIGURES = ("requests", "rejected", "tokens")
#: Scores shown per decision: the chosen replica's, the runner-up's and the next best.
SHOWN_SCORES = 8


def describe(telemetry: Telemetry, snapshot: RouterSnapshot) -> dict[str, Any]:
    """Return the body of ``/status``."""
    t, s, now = telemetry, snapshot, snapshot.at
    t.advance(snapshot)
    outcomes: Counter[str] = Counter()
    for (_, _, outcome, _), n in t.requests.items():
        outcomes[outcome] += n
    retries: Counter[str] = Counter()
    for (_, cause), n in t.retries.items():
        retries[cause] += n
    made = t.decisions.total()
    return {
        "version": __version__,
        "state": "draining" if s.draining else "ok",
        "uptime_s": now - t.started_at,
        "behind": _clean(s.behind),
        "policy": _clean(s.policy),
        "fallback": _clean(s.fallback),
        "in_flight": sum(b.in_flight for b in s.backends),
        "waiting": s.waiting,
        "queue": {
            "longest_wait_s": s.longest_wait_s,
            "waited": t.waited[()],
            "overtakes": dict(t.overtakes),
            "oldest": [dataclasses.asdict(one) for one in s.oldest],
        },
        "clients": s.clients,
        "decisions": {
            "total": made,
            "per_s": t.window.decisions_per_s(now, PACE_S),
            "per_s_1m": t.window.decisions_per_s(now, WINDOWS["1m"]),
            "mean_s": t.decision_time.sums[0] / made if made else None,
        },
        "latency": {
            name: {key: t.window.percentiles(name, seconds) for key, seconds in WINDOWS.items()}
            for name in LATENCIES
        },
        "requests": dict(outcomes),
        "fallbacks": dict(t.fallbacks),
        "retries": dict(retries),
        "shed": dict(t.sheds),
        "by_client": _clients(telemetry),
        "event_loop_lag_s": t.window.worst_lag_s(WINDOWS["1m"]),
        "tokens": {
            "source": s.token_source,
            "prompts": dict(s.prompts_by_source),
            "figures": dict(s.lengths_by_source),
            "bytes_per_token": s.bytes_per_token,
            "unanswered": s.tokenize_failures,
        },
        "store": None if s.store is None else dataclasses.asdict(s.store),
        "canary": _canary(snapshot),
        "shadow": _shadow(telemetry, snapshot),
        "autopilot": _autopilot(snapshot),
        "replicas": _replicas(telemetry, snapshot),
        "recent": _recent(telemetry, snapshot),
    }


def _clients(telemetry: Telemetry) -> dict[str, dict[str, int]]:
    """Counts of each client with a key that has sent requests."""
    found: dict[str, dict[str, int]] = {}
    for (client, outcome), n in telemetry.client_requests.items():
        tokens = telemetry.client_tokens[client]
        about = found.setdefault(client, dict.fromkeys(CLIENT_FIGURES, 0) | {"tokens": tokens})
        about["requests"] += n
        about["rejected"] += n if outcome in ("shed", "refused") else 0
    return found


def describe_worker(telemetry: Telemetry, snapshot: RouterSnapshot) -> dict[str, Any]:
    """Return one worker's part of ``/status``, with the counts that latencies are merged from."""
    counts = {
        name: {key: telemetry.window.counts(name, seconds) for key, seconds in WINDOWS.items()}
        for name in LATENCIES
    }
    return describe(telemetry, snapshot) | {"pid": os.getpid(), "counts": counts}


def history(telemetry: Telemetry, snapshot: RouterSnapshot) -> dict[str, Any]:
    """Return the body of ``/status/history``: queues of five minutes, oldest slot first.

    ``in_flight`` and ``queued`` are [slot][replica]; a replica's place is its number.
    """
    telemetry.advance(snapshot)
    window = telemetry.window
    since = window.present.number - SLOTS
    slots = [slot for slot in window.past if slot.number >= since]
    return {
        "every_s": SLOT_S,
        "slots": [slot.number for slot in slots],
        "age_s": [snapshot.at - (slot.number + 1) * SLOT_S for slot in slots],
        "in_flight": [slot.in_flight for slot in slots],
        "queued": [slot.queued for slot in slots],
        "waiting": [slot.waiting for slot in slots],
        "decisions_per_s": [slot.decided.total() / SLOT_S for slot in slots],
    }


def backend(b: BackendSnapshot) -> dict[str, Any]:
    """Return an entry of ``/backends``."""
    return {
        "replica": b.index,
        "name": b.name,
        "url": b.url,
        "state": b.state,
        "available": b.available,
        "why": b.why,
        "opened": b.opened,
        "in_flight": b.in_flight,
        "ledger_in_flight": b.ledger_in_flight,
        "connections": b.connections,
    }


def _replicas(telemetry: Telemetry, snapshot: RouterSnapshot) -> list[dict[str, Any]]:
    decided = telemetry.window.decided(WINDOWS["1m"])
    total = decided.total()
    return [
        {
            "replica": b.index,
            "name": _clean(b.name),
            "url": plain_url(b.url),
            "state": b.state,
            "available": b.available,
            "why": _clean(b.why),
            "opened": b.opened,
            "warming": b.warming,
            "in_flight": b.in_flight,
            "limit": b.limit,
            "takes_priorities": b.takes_priorities,
            "queued": b.queued,
            "waiting": b.waiting,
            "running": b.running,
            "kv_used": b.kv_used,
            "metrics_age_s": b.metrics_age_s,
            "scrape_failures": b.scrape_failures,
            "cached_tokens": b.cached_tokens,
            "caches": b.caches,
            "event_lag_s": b.event_lag_s,
            "capacity_tokens": b.capacity_tokens,
            "share_1m": decided[b.index] / total if total else None,
            "speed": b.speed,
            "known": None if b.known is None else dataclasses.asdict(b.known),
        }
        for b in snapshot.present
    ]


def _recent(telemetry: Telemetry, snapshot: RouterSnapshot) -> list[dict[str, Any]]:
    """Return the last decisions, the latest first."""
    names, made = [_clean(b.name) for b in snapshot.backends], telemetry.decisions.total()
    return [
        {
            "number": made - back,
            "age_s": max(0.0, snapshot.at - at),
            "replica": _name(names, decision.replica),
            "runner_up": _name(names, decision.runner_up),
            "policy": _clean(decision.policy),
            "reason": _clean(decision.reason),
            "fell_back": _cause(decision.fell_back),
            "shadow": _name(names, decision.shadow),
            "cached_tokens": decision.cached,
            "predicted_ttft_s": decision.ttft_s,
            "priority": decision.priority,
            "waited_s": decision.waited_s,
            "overtook": decision.overtook,
            "overtook_why": decision.overtook_why,
            "overtaken": decision.overtaken,
            "took_s": decision.took_s,
            "scores": [
                {"replica": _name(names, r), "score": float(decision.scores[r])}
                for r in shown_scores(decision)
            ],
        }
        for back, (at, decision) in enumerate(reversed(telemetry.recent))
    ]


def _canary(snapshot: RouterSnapshot) -> dict[str, Any] | None:
    s = snapshot
    if not s.canary:
        return None
    return {
        "policy": _clean(s.canary),
        "share": s.canary_share,
        "block_s": s.canary_block_s,
        "decisions": s.canary_decisions,
        "share_of_decisions": s.canary_decisions / s.decisions if s.decisions else None,
    }


def _shadow(telemetry: Telemetry, snapshot: RouterSnapshot) -> dict[str, Any] | None:
    if not snapshot.shadow:
        return None
    made, differ = telemetry.shadow_decisions[()], telemetry.shadow_disagreements[()]
    return {
        "policy": _clean(snapshot.shadow),
        "decisions": made,
        "disagreements": differ,
        "share_of_disagreements": differ / made if made else None,
    }


def _autopilot(snapshot: RouterSnapshot) -> dict[str, Any] | None:
    if snapshot.autopilot is None:
        return None
    return {**snapshot.autopilot, "vetoed": [_clean(name) for name in snapshot.vetoed]}


def shown_scores(decision: Decision) -> list[int]:
    """Return the replicas whose scores are shown: the chosen one, the runner-up, the next best.

    A better score than the chosen one's belongs to a replica that could not be chosen.
    """
    scores = decision.scores
    first = [r for r in (decision.replica, decision.runner_up) if 0 <= r < len(scores)]
    if not first:
        return []
    best = scores[first[0]]
    others = [r for r in scores.argsort().tolist() if scores[r] >= best and r not in first]
    return (first + others)[:SHOWN_SCORES]


def plain_url(url: str) -> str:
    """Return scheme, host, port and path of an address, and nothing secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _name(names: list[str], replica: int | None) -> str | None:
    return names[replica] if replica is not None and 0 <= replica < len(names) else None


def _cause(fell_back: str | None) -> str | None:
    return None if fell_back is None else FALLBACK_CAUSES.get(fell_back, "other")


def _clean(text: str) -> str:
    """Replace what JSON cannot hold; file names may contain anything."""
    return text.encode(errors="replace").decode()


def _policy_of(html: str) -> str:
    """Return a content security policy that allows the page its own script and style only."""

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (hashlib.sha256(part.encode()).digest() for part in parts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


_HTML = files("tailrace.router.observe").joinpath("status.html").read_text(encoding="utf-8")
_CSP = _policy_of(_HTML)

#: The page. It holds no data: it fetches /status.
PAGE = _HTML.replace(
    "<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{_CSP}">', 1
).encode()
PAGE_TYPE = b"text/html; charset=utf-8"
#: To be sent with the page.
PAGE_HEADERS = (
    f"content-security-policy: {_CSP}; frame-ancestors 'none'\r\n"
    "x-content-type-options: nosniff\r\n"
    "referrer-policy: no-referrer\r\n"
    "cache-control: no-store\r\n"
).encode()
