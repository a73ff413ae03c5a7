"""What a policy is: an object that scores every replica for the current request."""

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError, unknown_name
from tailrace.policy.rules import Rule, score
from tailrace.view.holding import Holding
from tailrace.view.ordering import Order
from tailrace.view.records import View
from tailrace.view.selection import NO_REPLICA, choose


class Policy:
    """Base of all policies. A subclass must define ``scores``; everything else is optional.

    view/selection.py chooses a replica from the scores and breaks ties. Times are in seconds of the
    run.
    """

    name: str = "policy"
    """Name shown in tables and logs."""
    lowest_id_wins: bool = False
    """Break ties by the lowest replica number instead of at random."""
    order: Order | None = None
    """Order in which servers should serve (view/ordering.py); None: as they come. Simulated servers
    that leave it open (``scheduling_policy = "auto"``) then serve by priority."""
    own_order: Order | None = None
    """Order for servers that serve by priority anyway, unless ``order`` is set."""
    holding: Holding | None = None
    """When requests wait at the router (view/holding.py); None: they never do."""

    def reset(self, n_replicas: int, seed: int) -> None:
        """Start a run over ``n_replicas`` replicas; forget the last one."""

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return a score per replica [n], lower is better; inf: only if there is no other."""
        raise NotImplementedError(f"{type(self).__name__} has no scores method")

    def sent(self, replica: int, request_id: int, now: float) -> None:
        """Called when a request has been sent to a replica."""

    def first_token(self, replica: int, request_id: int, now: float) -> None:
        """Called when the first token of a request has come back."""

    def finished(self, replica: int, request_id: int, now: float) -> None:
        """Called when a request is complete."""

    def failed(self, replica: int, request_id: int, now: float) -> None:
        """Called when a request was lost on this replica; it may be sent again."""


class BuiltinPolicy(Policy):
    """A built-in rule as an object. It is stateless: its state is the view's router record."""

    def __init__(self, rule: Rule, params: Mapping[str, float] | None = None) -> None:
        self.rule = rule
        self.name = rule.name
        self.lowest_id_wins = rule.lowest_id_wins
        given = dict(params or {})
        for key, value in given.items():
            if key not in rule.params:
                if not rule.params:
                    raise TailraceError(f"policy {rule.name} has no parameters, got '{key}'")
                raise unknown_name(f"parameter of {rule.name}", key, rule.params)
            if not isinstance(value, Real) or not np.isfinite(value):
                raise TailraceError(f"{rule.name}: {key} must be a finite number, got {value!r}")
        self.params: NDArray[np.float64] = rule.vector(given)
        """[p] in the order of ``rule.params``."""

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return the rule's scores [n]."""
        if self.rule.in_engine:
            raise TailraceError(f"{self.name} runs inside the simulator and cannot be called alone")
        out = np.empty(len(view.replicas))
        score(self.rule.code, view, self.params, out)
        return out


class FunctionPolicy(Policy):
    """A plain function ``scores(view)`` as a policy."""

    def __init__(self, function: Callable[..., Any], name: str, **params: Any) -> None:
        self.function = function
        self.name = name
        self.params = params

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return what the function returns."""
        return self.function(view, **self.params)  # type: ignore[no-any-return]


_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))


def failure(name: str, error: BaseException) -> TailraceError:
    """Return an error that says in one sentence what failed in a user's policy, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((_PACKAGE, "<"))]
    own = [f for f in theirs if not f.filename.startswith(_LIBRARIES)] or theirs
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return TailraceError(f"policy {name} failed: {what}{where}")


@contextmanager
def user_code(name: str, *, ours: bool = False) -> Iterator[None]:
    """Turn any exception of a user's policy, ``SystemExit`` included, into a one-sentence error.

    ``ours``: it is a policy of Tailrace, whose failure is a bug and keeps its traceback.
    """
    try:
        yield
    except TailraceError:
        raise
    except (Exception, SystemExit) as error:
        if ours:
            raise
        raise failure(name, error) from error


def _is_ours(policy: Policy) -> bool:
    """Whether a policy is part of Tailrace."""
    module = type(policy).__module__
    return module.startswith("tailrace.") and not isinstance(policy, FunctionPolicy)


def call_hook(policy: Policy, name: str, *args: Any) -> None:
    """Call a hook of a policy (``reset``, ``sent``, ``first_token``, ``finished``, ``failed``)."""
    with user_code(f"{policy.name} ({name})", ours=_is_ours(policy)):
        getattr(policy, name)(*args)


def checked_scores(policy: Policy, view: View) -> NDArray[np.float64]:
    """Return the policy's scores as float64 [n], or raise if they are not valid scores.

    Single NaNs are allowed, as they never win; NaN for every available replica is an error.
    """
    n = len(view.replicas)
    with user_code(policy.name, ours=_is_ours(policy)):
        returned = policy.scores(view)
    try:
        if returned is None:  # NumPy would turn it into NaN
            raise TypeError
        out = np.asarray(returned, np.float64)
    except (TypeError, ValueError):
        raise TailraceError(
            f"policy {policy.name} must return {n} numbers, got {type(returned).__name__}"
        ) from None
    if out.shape != (n,):
        raise TailraceError(
            f"policy {policy.name} must return one score per replica, shape ({n},), "
            f"got shape {out.shape}"
        )
    available = view.replicas["available"] != 0
    if available.any() and np.isnan(out[available]).all():
        raise TailraceError(f"policy {policy.name} returned NaN for every available replica")
    return out


def asked_order(policy: Policy) -> Order | None:
    """Return the order that was asked for (``+order``); users' policies may lack the field."""
    return getattr(policy, "order", None)


def order_of(policy: Policy) -> Order | None:
    """Return the order of a policy for servers that serve by priority; None: it has none."""
    return asked_order(policy) or getattr(policy, "own_order", None)


def holding_of(policy: Policy) -> Holding | None:
    """Return when a policy lets requests wait; policies written by users may lack the field."""
    return getattr(policy, "holding", None)


def decide(policy: Policy, view: View) -> int:
    """Return the available replica a policy chooses; ties as everywhere (view/selection.py)."""
    scores = checked_scores(policy, view)
    lowest_id_wins = bool(getattr(policy, "lowest_id_wins", False))
    with np.errstate(over="ignore"):  # random numbers overflow by design
        replica = int(choose(scores, view.replicas, view.router, lowest_id_wins))
    if replica == NO_REPLICA:
        raise RuntimeError("asked to route while no replica is available")
    return replica
