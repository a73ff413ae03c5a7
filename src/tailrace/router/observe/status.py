"""/status: what the router is doing now, as JSON, and the page that shows it.

Times are in s, lengths in tokens. There is no text of requests in it and no key; what is unknown is
null, never 0.
"""

import base64
import hashlib
import math
import os
import re
from collections import Counter
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from tailrace import __version__
from tailrace.router.observe.rolling_window import SLOT_S, SLOTS
from tailrace.router.observe.telemetry import FALLBACK_CAUSES
from tailrace.router.proxy.health import NO_LIMIT

if TYPE_CHECKING:
    from tailrace.router.app import Router
    from tailrace.router.decide.chooser import Decision
    from tailrace.router.observe.telemetry import Telemetry
    from tailrace.router.proxy.backends import Target

#: Windows of the percentiles, in s, by their name.
WINDOWS = {"1m": 60.0, "5m": 300.0}
LATENCIES = ("ttft", "e2e")
#: Over which the pace of decisions is measured, in s.
PACE_S = 10.0
#: Scores shown per decision: the chosen replica's, the runner-up's and the next best.
SHOWN_SCORES = 8


class Status:
    """Tells what a watched router is doing."""

    def __init__(self, telemetry: "Telemetry") -> None:
        self._telemetry = telemetry

    def json(self) -> bytes:
        """Return the body of /status."""
        return orjson.dumps(self.describe())

    def part_json(self) -> bytes:
        """Return one worker's part of it, with what is needed to add up latencies."""
        slots = self._telemetry.slots
        part = self.describe() | {
            "pid": os.getpid(),
            "counts": {
                name: {key: slots.counts(name, seconds) for key, seconds in WINDOWS.items()}
                for name in LATENCIES
            },
        }
        return orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)

    def history_json(self) -> bytes:
        """Return the body of /status/history."""
        return orjson.dumps(self.history())

    def describe(self) -> dict[str, Any]:
        """Return what the router is doing now."""
        t = self._telemetry
        now = t.clock()
        t.advance(now)
        router = t.router
        if router is None:
            return {"version": __version__, "state": "starting"}
        chooser, counter = router.plane.chooser, router.plane.cluster.counter
        outcomes: Counter[str] = Counter()
        for (_, _, outcome, _), n in t.requests.items():
            outcomes[outcome] += n
        retries: Counter[str] = Counter()
        for (_, cause), n in t.retries.items():
            retries[cause] += n
        made = t.decisions.total()
        return {
            "version": __version__,
            "state": "draining" if router.draining else "ok",
            "uptime_s": t.uptime_s,
            "policy": _clean(chooser.policy.name),
            "fallback": _clean(chooser.settings.fallback),
            "in_flight": sum(target.active for target in router.plane.targets),
            "waiting": len(router.forwarder.queue),
            "clients": len(router.clients),
            "decisions": {
                "total": made,
                "per_s": t.slots.decisions_per_s(now, PACE_S),
                "per_s_1m": t.slots.decisions_per_s(now, WINDOWS["1m"]),
                "mean_s": t.decision.total / made if made else None,
            },
            "latency": {
                name: {key: t.slots.percentiles(name, seconds) for key, seconds in WINDOWS.items()}
                for name in LATENCIES
            },
            "requests": dict(outcomes),
            "fallbacks": dict(t.fallbacks),
            "retries": dict(retries),
            "shed": dict(t.sheds),
            "event_loop_lag_s": t.slots.worst_lag_s(WINDOWS["1m"]),
            "tokens": {
                "source": router.settings.tokens.source,
                "prompts": dict(counter.used),
                "figures": dict(counter.learned),
                "bytes_per_token": counter.bytes_per_token(),
                "unanswered": router.forwarder.asker.failed,
            },
            "canary": self._canary(router),
            "shadow": self._shadow(router),
            "replicas": self._replicas(router, now),
            "recent": self._recent(router, now, made),
        }

    def history(self) -> dict[str, Any]:
        """Return the queues of the last five minutes, oldest first, one entry per slot.

        ``in_flight`` and ``queued`` are [slot][replica]; a replica's place is its number.
        """
        t = self._telemetry
        now = t.clock()
        t.advance(now)
        since = t.slots.present.number - SLOTS
        slots = [slot for slot in t.slots.past if slot.number >= since]
        return {
            "every_s": SLOT_S,
            "slots": [slot.number for slot in slots],
            "age_s": [now - (slot.number + 1) * SLOT_S for slot in slots],
            "in_flight": [slot.in_flight for slot in slots],
            "queued": [slot.queued for slot in slots],
            "waiting": [slot.waiting for slot in slots],
            "decisions_per_s": [slot.decided.total() / SLOT_S for slot in slots],
        }

    # ---- parts ----------------------------------------------------------------------------------

    def _replicas(self, router: "Router", now: float) -> list[dict[str, Any]]:
        decided = self._telemetry.slots.decided(WINDOWS["1m"])
        total = decided.total()
        views, index = router.plane.cluster.replicas, router.plane.cluster.index
        units_per_token = router.plane.cluster.units_per_token
        found = []
        for target in router.plane.present:
            r, health = target.index, target.health
            snapshot = router.scraper.snapshots.get(r)
            taken_at = float(views["metrics_at"][r])
            found.append(
                {
                    "replica": r,
                    "name": _clean(target.label),
                    "url": plain_url(target.backend.url),
                    "state": health.state,
                    "available": health.available,
                    "why": _clean(health.breaker.reason),
                    "opened": health.breaker.opened,
                    "warming": health.warming(now) and health.available,
                    "in_flight": target.active,
                    "limit": target.limit if 0 < target.limit < NO_LIMIT else None,
                    "queued": int(views["queued"][r]),
                    "waiting": snapshot.waiting if snapshot else None,
                    "running": snapshot.running if snapshot else None,
                    "kv_used": snapshot.kv_used if snapshot else None,
                    "metrics_age_s": now - taken_at if math.isfinite(taken_at) else None,
                    "scrape_failures": router.scraper.failures.get(r, 0),
                    "cached_tokens": int(index.totals["held_tokens"][r] / units_per_token),
                    "capacity_tokens": int(views["capacity_tokens"][r]),
                    "share_1m": decided[r] / total if total else None,
                    "speed": float(views["speed"][r]),
                }
            )
        return found

    def _recent(self, router: "Router", now: float, made: int) -> list[dict[str, Any]]:
        """Return the last decisions, the latest first."""
        targets = router.plane.targets
        return [
            {
                "number": made - back,
                "age_s": max(0.0, now - at),
                "replica": _name(targets, decision.replica),
                "runner_up": _name(targets, decision.runner_up),
                "policy": _clean(decision.policy),
                "reason": _clean(decision.reason),
                "fell_back": _cause(decision.fell_back),
                "shadow": _name(targets, decision.shadow),
                "cached_tokens": decision.cached,
                "predicted_ttft_s": decision.ttft_s,
                "took_s": decision.took_s,
                "scores": [
                    {"replica": _name(targets, r), "score": float(decision.scores[r])}
                    for r in shown_scores(decision)
                ],
            }
            for back, (at, decision) in enumerate(reversed(self._telemetry.recent))
        ]

    def _canary(self, router: "Router") -> dict[str, Any] | None:
        chooser = router.plane.chooser
        if not chooser.settings.canary:
            return None
        made, canary = chooser.counts["decisions"], chooser.counts["canary"]
        return {
            "policy": _clean(chooser.settings.canary),
            "share": chooser.settings.canary_share,
            "decisions": canary,
            "share_of_decisions": canary / made if made else None,
        }

    def _shadow(self, router: "Router") -> dict[str, Any] | None:
        name, t = router.plane.chooser.settings.shadow, self._telemetry
        if not name:
            return None
        return {
            "policy": _clean(name),
            "decisions": t.shadowed,
            "disagreements": t.disagreed,
            "share_of_disagreements": t.disagreed / t.shadowed if t.shadowed else None,
        }


def shown_scores(decision: "Decision") -> list[int]:
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


def _name(targets: "list[Target]", replica: int | None) -> str | None:
    if replica is None or not 0 <= replica < len(targets):
        return None
    return _clean(targets[replica].label)


def _cause(fell_back: str | None) -> str | None:
    return None if fell_back is None else FALLBACK_CAUSES.get(fell_back, "other")


def _clean(text: str) -> str:
    """Make any string one that JSON can hold; names of files need not be."""
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

#: The page. It holds no data: it asks /status for them.
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
