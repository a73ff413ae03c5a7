"""In which order requests are served: the priority a router attaches to each of them.

A request's key is when it arrived, in s, plus what it is worth waiting for others:

    key = arrived + min(work * w, most) + target * d - class * class_s

``work`` is the time its uncached prompt tokens take to prefill, ``target`` its target for the time
to first token, ``class`` its client's priority (higher is more urgent). Lower keys go first. A key
never changes, so requests age by themselves, and a server that sorts by it needs no clock: vLLM
with ``--scheduling-policy priority`` does. With ``d = 0`` nobody is overtaken by a request of its
class that arrived more than ``most`` seconds later, and a more urgent class overtakes at most
``class_s`` seconds per step: nobody starves.

The simulators and the live router all compute priorities here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tailrace.compiled import jit
from tailrace.errors import TailraceError, unknown_name

#: An :class:`Order` as the compiled code reads it.
ORDER = np.dtype(
    [
        ("on", "i8"),  # 0: no order of the router's own
        ("w", "f8"),
        ("d", "f8"),
        ("most", "f8"),
        ("class_s", "f8"),
    ]
)
#: Servers compare whole numbers; a key is one in steps of a millisecond.
STEPS_PER_S = 1000.0
#: Classes beyond these count as these.
MOST_CLASS = 1000


@dataclass(frozen=True)
class Order:
    """Weights of a key, see above."""

    w: float = 5.0
    """Seconds a request gives way per second of its own prefill; 0: order of arrival."""
    d: float = 0.0
    """Seconds it gives way per second of its target; with w = 0, 1 is earliest deadline first."""
    most: float = 30.0
    """Most seconds a request gives way because of its prefill."""
    class_s: float = 600.0
    """Seconds by which each step of a client's priority puts a request forward."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 <= value <= 1e6:
                raise TailraceError(
                    f"order: {field.name} must be a number from 0 to 1e6, got {value!r}"
                )

    @classmethod
    def of(cls, given: Mapping[str, float]) -> "Order":
        """Return the order of some weights by name; the others have their defaults."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown_name("weight of an order", name, known)
        return cls(**given)

    @property
    def suffix(self) -> str:
        """How it is written behind the name of a policy."""
        changed = [f for f in fields(self) if f.name == "w" or getattr(self, f.name) != f.default]
        return "+order:" + ",".join(f"{f.name}={getattr(self, f.name):g}" for f in changed)


def order_row(order: Order | None) -> Any:
    """Return an ORDER."""
    row = np.zeros(1, ORDER)[0]
    if order is not None:
        row["on"] = 1
        for field in fields(order):
            row[field.name] = getattr(order, field.name)
    return row


@jit
def priority_of(order, arrived, work_s, target_s, urgency):
    """Priority for a server, lower first, in steps of 1/STEPS_PER_S s.

    ``order`` ORDER, ``arrived`` s, ``work_s`` s of prefill, ``target_s`` s to the first token;
    ``urgency`` as in the records: higher is more urgent. Without an order it alone counts.
    """
    if order["on"] == 0:
        return np.int64(-urgency)
    urgency = min(max(urgency, -MOST_CLASS), MOST_CLASS)
    key = arrived + min(order["w"] * work_s, order["most"])
    key += order["d"] * target_s - order["class_s"] * urgency
    return np.int64(np.floor(key * STEPS_PER_S))


def priority_number(
    order: Order, arrived: float, work_s: float, target_s: float, urgency: int
) -> int:
    """:func:`priority_of` without the compiler, for one request at a time."""
    plain = getattr(priority_of, "py_func", priority_of)
    return int(plain({"on": 1, **vars(order)}, arrived, work_s, target_s, urgency))


@jit
def request_priority(order, request, replica):
    """Priority of the request being routed at a replica; REQUEST_VIEW and REPLICA_VIEW."""
    uncached = request["prompt_tokens"] - replica["cached_tokens"]
    work_s = uncached / max(replica["prefill_tokens_per_s"], 1.0)
    return priority_of(
        order, request["arrived_at"], work_s, request["ttft_slo_s"], request["priority"]
    )
