"""What a Ray Serve handle knows of its replicas, as the records every policy reads.

The state, its ledger, prefix index and guard are those of the live router (router/state/cluster.py,
router/decide/chooser.py). Ray Serve tells when a request is sent and when it has ended, not when
its first token comes: that moment is taken to be the one predicted, as for any answer that does not
stream. Needs no Ray.
"""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from tailrace.config import Replica, Settings, parse
from tailrace.router.decide.chooser import Chooser, ChooserSettings
from tailrace.router.intake.request_body import BadRequest, RequestBody, read_request
from tailrace.router.settings import BackendSettings
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import PRIOR_OUTPUT_TOKENS, ClusterState
from tailrace.view.records import NEVER

#: Where a body of each shape would have been posted.
_PATHS = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("input", "/v1/embeddings"),
)


class RayServeSettings(Settings):
    """The ``request_router_kwargs`` of a deployment."""

    choose: ChooserSettings = ChooserSettings()
    """Policy and guard, as in `tailrace serve`."""
    server: Replica = Replica()
    """What kind of server every replica is, as in a scenario or from `tailrace calibrate`."""
    prior_output_tokens: float = PRIOR_OUTPUT_TOKENS
    """Expected length of answers: Ray Serve does not tell the router how long they were."""

    @classmethod
    def of(cls, policy: str | None = None, **kwargs: Any) -> "RayServeSettings":
        """Make them of plain keyword arguments; ``policy`` is short for ``choose.policy``."""
        if policy is not None:
            kwargs["choose"] = {**kwargs.get("choose", {}), "policy": policy}
        return parse(cls, kwargs)


class HandleState:
    """Replicas and requests of one Ray Serve handle. Safe to use from several threads.

    A replica has any key; the row it has in the cluster is free for another one once it is gone.
    """

    def __init__(
        self, settings: RayServeSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load the policy and compile everything."""
        self._settings = settings
        self._lock = threading.RLock()
        # One row to begin with, so that the chooser can be warmed up.
        self.cluster = ClusterState(
            [self._backend()], clock, prior_output_tokens=settings.prior_output_tokens
        )
        self.cluster.set_available(0, False)
        self.chooser = Chooser(self.cluster, settings.choose)
        self._rows: dict[Hashable, int] = {}
        self._free = [0]
        self._arrivals: dict[str, Arrival] = {}
        self._attempts: dict[str, Attempt] = {}
        self._routed: set[str] = set()
        self._ended_early: dict[str, Hashable] = {}
        self._told_of_routing = False

    def _backend(self) -> BackendSettings:
        return BackendSettings(url="http://ray-serve", server=self._settings.server)

    @property
    def in_flight(self) -> dict[Hashable, int]:
        """Requests at each replica that this handle sent and that have not ended."""
        with self._lock:
            return {k: int(self.cluster.replicas[r]["in_flight"]) for k, r in self._rows.items()}

    # ---- replicas -------------------------------------------------------------------------------

    def set_replicas(self, keys: Iterable[Hashable]) -> None:
        """Take note of all replicas there are now."""
        with self._lock:
            wanted = list(dict.fromkeys(keys))
            for gone in self._rows.keys() - set(wanted):
                self.lost(gone)
            for key in wanted:
                if key not in self._rows:
                    self._rows[key] = self._row()

    def _row(self) -> int:
        if not self._free:
            return self.cluster.add(self._backend())
        row = self._free.pop(0)
        self.cluster.replicas[row]["metrics_at"] = NEVER
        return row

    def lost(self, key: Hashable) -> None:
        """A replica is gone, with all that it held."""
        with self._lock:
            row = self._rows.pop(key, None)
            if row is None:
                return
            self.cluster.set_available(row, False)
            self.cluster.forget(row)
            self._free.append(row)

    def ongoing(self, key: Hashable, requests: int) -> None:
        """A replica has told how many requests it has, from this handle and others."""
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                running = min(requests, self._settings.server.batch_cap)
                self.cluster.scraped(row, requests - running, running, None)

    def stats(self, key: Hashable, stats: Mapping[str, Any]) -> None:
        """A replica has told ``waiting`` and ``running`` (requests) and ``kv_used`` (0 to 1)."""
        found = [_number(stats.get(name)) for name in ("waiting", "running", "kv_used")]
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                self.cluster.scraped(row, *found)

    # ---- requests -------------------------------------------------------------------------------

    def choose(
        self, request: str, asked: Callable[[], RequestBody], full: Collection[Hashable] = ()
    ) -> list[Hashable]:
        """Return all replicas, best first, and enter that the request goes to the first one.

        ``asked`` is called when a request comes for the first time. ``full`` ones take no more
        requests now and come last.
        """
        with self._lock:
            self._close(request, "backend_failed")
            if request not in self._arrivals:
                self._arrivals[request] = self.cluster.arrive(asked())
            arrival = self._arrivals[request]
            for key, row in self._rows.items():
                self.cluster.set_available(row, key not in full)
            decision = self.chooser.choose(arrival)
            if decision is None:
                return list(self._rows)
            keys = {row: key for key, row in self._rows.items()}
            scores = np.where(np.isnan(decision.scores), np.inf, decision.scores)
            rows = sorted(
                keys,
                key=lambda r: (r != decision.replica, not self.cluster.available(r), scores[r], r),
            )
            self._attempts[request] = Attempt(self.cluster, arrival, decision.replica, decision)
            return [keys[row] for row in rows]

    def routed(self, request: str, key: Hashable) -> None:
        """A replica has accepted a request, perhaps not the one it was meant for."""
        with self._lock:
            self._told_of_routing = True
            attempt, row = self._attempts.get(request), self._rows.get(key)
            if attempt is None or row is None:
                return
            self._routed.add(request)
            if attempt.replica != row:
                attempt.close("backend_failed")
                moved = Attempt(self.cluster, attempt.arrival, row, attempt.decision)
                self._attempts[request] = moved
            if self._ended_early.get(request) == key:
                self.ended(request, key)

    def ended(self, request: str, key: Hashable) -> None:
        """A request has ended at a replica, or has been turned away by it."""
        with self._lock:
            attempt = self._attempts.get(request)
            if attempt is None:
                return
            if self._told_of_routing and request not in self._routed:
                # Turned away, and chosen for again; or so quick that this comes before the news
                # that it was accepted.
                self._ended_early[request] = key
                return
            if self._rows.get(key, attempt.replica) != attempt.replica:
                return
            # How long the answer was is not known: as long as expected.
            attempt.usage(None, round(attempt.predicted), None)
            self._close(request, "done")
            self._forget(request)

    def dropped(self, request: str) -> None:
        """Nobody wants a request any more that no replica has accepted."""
        with self._lock:
            if request not in self._routed:
                self._close(request, "client_gone")
                self._forget(request)

    def _close(self, request: str, outcome: str) -> None:
        attempt = self._attempts.pop(request, None)
        if attempt is not None:
            attempt.close(outcome)
        self._routed.discard(request)
        self._ended_early.pop(request, None)

    def _forget(self, request: str) -> None:
        self._arrivals.pop(request, None)


def request_body_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], session: str, model: str
) -> RequestBody:
    """Read what a call of a deployment asks for; of shapes it does not know, only the session.

    It looks for the first argument that is a body as of OpenAI's API (a dict or a pydantic model),
    a prompt (text), or token ids.
    """
    headers = {b"x-session-id": session.encode("latin-1", "replace")} if session else {}
    asked = RequestBody("other", session=session or None)
    for value in (*args, *kwargs.values()):
        body = _body(value)
        if body is None:
            continue
        path = next(path for field, path in _PATHS if field in body)
        try:
            asked = read_request(path, headers, orjson.dumps(body, default=str))
        except (BadRequest, TypeError):
            continue
        break
    asked.model = asked.model or model
    asked.streams = False  # its tokens do not come this way
    return asked


def _body(value: Any) -> dict[str, Any] | None:
    """Return a request's body if a value is one, or can be seen as one."""
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        return {"prompt": value}
    if callable(getattr(value, "model_dump", None)):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict) and any(field in value for field, _ in _PATHS):
        return value
    return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None
