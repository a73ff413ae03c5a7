"""When requests wait at the router: what counts as room on a replica, and who goes next.

A request waits only while no replica has room for it. Whatever the limits, these rules hold:

- **Work conservation**: an available replica without requests always has room.
- **Longest wait**: who has waited ``max_wait_s`` is sent, room or not.
- **Priorities**: a more urgent class goes first.
- **Fairness**: within a class, the client that was served least goes first
  (queueing/fair_queue.py).
- **Bounded overtaking**: a client's own requests go by the key of an :class:`Order`, so none is
  overtaken by one that arrived more than ``most`` seconds later; ``d`` honours deadlines.

The limits of the routers in use are special cases: ``max_in_flight`` (plain), ``max_queued`` (only
to replicas without a pending queue, SkyLB), ``max_prefill_s`` (Dynamo's threshold on pending
prefill), ``max_saturation`` (the gate of llm-d's flow control).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tailrace.compiled import jit
from tailrace.errors import TailraceError, unknown_name
from tailrace.view.ordering import ORDER, Order, order_row, priority_of

#: A :class:`Holding` as the compiled code reads it.
HOLDING = np.dtype(
    [
        ("on", "i8"),  # 0: requests never wait at the router
        ("max_in_flight", "f8"),
        ("max_queued", "f8"),
        ("max_prefill_s", "f8"),
        ("max_saturation", "f8"),
        ("max_wait_s", "f8"),
        ("order", ORDER),
    ]
)
#: A replica is saturated with this many waiting requests, or this share of its KV blocks in use
#: (llm-d's defaults).
SATURATED_WAITING, SATURATED_KV = 5.0, 0.8

#: Orders by name. ``wspt``: shortest uncached prompt first, whenever it arrived.
NAMED_ORDERS = {
    "fcfs": Order(w=0),
    "wspt": Order(w=1e6, most=1e6),
    "edf": Order(w=0, d=1),
}


@dataclass(frozen=True)
class Holding:
    """Limits beyond which a replica has no room, and the order of those that wait."""

    max_in_flight: float = math.inf
    """Requests in flight on a replica."""
    max_queued: float = math.inf
    """Requests on a replica without a first token."""
    max_prefill_s: float = math.inf
    """Prefill pending on a replica, s."""
    max_saturation: float = math.inf
    """Mean saturation of the cluster: nobody but idle replicas gets requests from here on."""
    max_wait_s: float = 30.0
    """Longest wait at the router, s."""
    order: Order = NAMED_ORDERS["fcfs"]
    """Who goes first among the requests of one client and class."""

    def __post_init__(self) -> None:
        for name in LIMITS:
            if not getattr(self, name) > 0:
                raise TailraceError(f"queue: {name} must be above 0, got {getattr(self, name)!r}")
        if all(getattr(self, name) == math.inf for name in LIMITS[:-1]):
            raise TailraceError(
                f"queue: without a limit nobody ever waits; give one of {', '.join(LIMITS[:-1])}"
            )

    @classmethod
    def of(cls, given: Mapping[str, float | str]) -> "Holding":
        """Return the queue of some settings by name; weights of an order may be among them."""
        weights = [field.name for field in fields(Order) if field.name != "class_s"]
        known = [*LIMITS, "order", *weights]
        for name in given:
            if name not in known:
                raise unknown_name("setting of a queue", name, known)
        order = NAMED_ORDERS["fcfs"]
        if "order" in given:
            if given["order"] not in NAMED_ORDERS:
                raise unknown_name("order of a queue", str(given["order"]), NAMED_ORDERS)
            order = NAMED_ORDERS[str(given["order"])]
        order = replace(order, **{n: _number(n, given[n]) for n in weights if n in given})
        limits = {n: _number(n, given[n]) for n in LIMITS if n in given}
        return cls(**limits, order=order)

    @property
    def suffix(self) -> str:
        """How it is written behind the name of a policy."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        parts = [f"{f.name}={getattr(self, f.name):g}" for f in changed if f.name != "order"]
        fcfs = NAMED_ORDERS["fcfs"]
        named = [name for name, order in NAMED_ORDERS.items() if order == self.order]
        if named and self.order != fcfs:
            parts.append(f"order={named[0]}")
        elif not named:
            weights = [f.name for f in fields(Order)]
            parts += [
                f"{name}={getattr(self.order, name):g}"
                for name in weights
                if getattr(self.order, name) != getattr(fcfs, name)
            ]
        return "+queue:" + ",".join(parts)

    @property
    def uses_metrics(self) -> bool:
        """Whether it reads the servers' metrics."""
        return self.max_saturation < math.inf


LIMITS = tuple(field.name for field in fields(Holding) if field.name != "order")


def _number(name: str, value: float | str) -> float:
    if isinstance(value, str):
        raise TailraceError(f"queue: {name} must be a number, got '{value}'")
    return value


def holding_row(holding: Holding | None) -> Any:
    """Return a HOLDING."""
    row = np.zeros(1, HOLDING)[0]
    if holding is not None:
        row["on"] = 1
        for name in LIMITS:
            row[name] = getattr(holding, name)
        row["order"] = order_row(holding.order)
    return row


@jit
def is_saturated(holding, replicas):
    """Whether the cluster as a whole takes no more; ``replicas`` [n] REPLICA_VIEW."""
    if holding["max_saturation"] == np.inf:
        return False
    count, total = 0, 0.0
    for i in range(replicas.size):
        if replicas[i]["available"] != 0:
            count += 1
            waiting = replicas[i]["waiting"] / SATURATED_WAITING
            total += max(waiting, replicas[i]["kv_used"] / SATURATED_KV)
    return total >= holding["max_saturation"] * count


@jit
def has_room(holding, replica, saturated):
    """Whether a replica (REPLICA_VIEW) may get another request."""
    if replica["available"] == 0:
        return False
    if replica["in_flight"] == 0:
        return True
    if saturated or replica["in_flight"] >= holding["max_in_flight"]:
        return False
    if replica["queued"] >= holding["max_queued"]:
        return False
    pending_s = replica["queued_uncached"] / max(replica["prefill_tokens_per_s"], 1.0)
    return bool(pending_s < holding["max_prefill_s"])


@jit
def any_room(holding, replicas):
    """Whether some replica of ``replicas`` [n] may get a request."""
    saturated = is_saturated(holding, replicas)
    for i in range(replicas.size):  # noqa: SIM110 (Numba knows no any() of a generator)
        if has_room(holding, replicas[i], saturated):
            return True
    return False


@jit
def waiting_key(holding, arrived, prompt, target_s, replicas):
    """Key of a request that begins to wait, lower first; ``cached_tokens`` must be current.

    Its work is what it would take on the replica where it takes least; ``prompt`` tokens.
    """
    work_s = np.inf
    for i in range(replicas.size):
        uncached = prompt - replicas[i]["cached_tokens"]
        work_s = min(work_s, uncached / max(replicas[i]["prefill_tokens_per_s"], 1.0))
    return priority_of(holding["order"], arrived, work_s, target_s, 0)
