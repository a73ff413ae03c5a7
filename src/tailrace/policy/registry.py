"""Finds policies by name.

A name is a built-in rule (``cache_aware``, ``cache_aware:match_rate=0.5,load_gap=32``), the trained
policy of the package (``tailrace``) or one of your own (``my_policy.tailrace``), a rule with its
tuned constants (``cache_aware:tuned``), a learned baseline (``linear_es``, ``predict_greedy``), a
file (``my_rule.py``, ``my_rule.py:MyPolicy``), something importable
(``package.module:attribute``), or an entry point of the group ``tailrace.policies`` of an installed
package.

Behind any of them, ``+order`` has the router attach a priority to each request, for servers that
serve by priority (view/ordering.py): ``linear_es+order:w=10``; without weights, by the policy's own
order if its file has one. ``+queue`` lets requests wait at the
router while no replica has room (view/holding.py): ``linear_es+queue:max_in_flight=8,order=wspt``.
"""

import copy
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from tailrace.errors import TailraceError, unknown_name
from tailrace.policy import shipped
from tailrace.policy.base import BuiltinPolicy, FunctionPolicy, Policy
from tailrace.policy.learned import checkpoint
from tailrace.policy.rules import RULES, Rule
from tailrace.view.holding import Holding
from tailrace.view.ordering import Order

ORDER_SUFFIX, QUEUE_SUFFIX = "+order", "+queue"
ENTRY_POINT_GROUP = "tailrace.policies"
FUNCTION_NAME = "scores"
SHIPPED_NAME = shipped.SHIPPED_NAME


def rules() -> tuple[Rule, ...]:
    """Return all built-in rules in the order of their codes."""
    return RULES


def names() -> list[str]:
    """Return the names of the trained policies, all built-in rules, and installed packages'."""
    builtin = [*shipped.TRAINED, *(rule.name for rule in RULES)]
    return builtin + sorted(name for name in _entry_points() if name not in builtin)


def get(name: str, **params: Any) -> Policy:
    """Return the policy of a name (see the module docstring); parameters override those in it.

    Parameters of a user's policy are passed to its constructor, or to the function with each view.
    """
    base, suffix = split_order(name)
    if suffix:
        policy = get(base, **params)
        if suffix.startswith(ORDER_SUFFIX):
            own = getattr(policy, "own_order", None)
            if suffix == ORDER_SUFFIX and own is not None:
                return with_order(policy, own)
            return with_order(policy, Order.of(_weights(base, ORDER_SUFFIX, suffix)))
        return with_queue(policy, Holding.of(_weights(base, QUEUE_SUFFIX, suffix)))
    head, _, tail = name.partition(":")
    builtin = {rule.name: rule for rule in RULES}
    if head in builtin:
        tuned = name.endswith(shipped.TUNED_SUFFIX)
        constants = shipped.constants_of(head) if tuned else _numbers(head, tail)
        return BuiltinPolicy(builtin[head], constants | params)
    trained = name == SHIPPED_NAME or name in shipped.LEARNING
    if trained or name.endswith(checkpoint.SUFFIX):
        if params:
            raise TailraceError(f"policy {name} is trained and takes no parameters")
        if name == SHIPPED_NAME:
            return checkpoint.shipped()
        return checkpoint.load(shipped.file_of(name) if trained else Path(name))
    if head.endswith(".py"):
        return _from_file(Path(head), tail, params)
    if tail:
        return _as_policy(_attribute(_import(head), tail, head), name, params)
    installed = _entry_points()
    if name in installed:
        return _as_policy(_load(installed[name]), name, params)
    raise unknown_name("policy", name, names())


def split_order(name: str) -> tuple[str, str]:
    """Return a policy's name without its last ``+order`` or ``+queue``, and that; "": none."""
    at = max(name.rfind(ORDER_SUFFIX), name.rfind(QUEUE_SUFFIX))
    if at >= 0 and name[at + len(ORDER_SUFFIX) :][:1] in ("", ":"):
        return name[:at], name[at:]
    return name, ""


def _weights(base: str, kind: str, suffix: str) -> dict[str, Any]:
    weights = suffix.removeprefix(kind)
    if weights == shipped.TUNED_SUFFIX:
        return shipped.constants_of(base + kind)
    texts = ("order",) if kind == QUEUE_SUFFIX else ()
    return _numbers(base + kind, weights[1:], texts)


def with_order(policy: Policy, order: Order) -> Policy:
    """Return a policy that decides as ``policy`` and orders requests as well."""
    ordered = copy.copy(policy)
    ordered.order = order
    ordered.name = policy.name + order.suffix
    return ordered


def with_queue(policy: Policy, holding: Holding) -> Policy:
    """Return a policy that decides as ``policy`` and lets requests wait at the router."""
    queued = copy.copy(policy)
    queued.holding = holding
    queued.name = policy.name + holding.suffix
    return queued


def _numbers(rule: str, text: str, texts: Collection[str] = ()) -> dict[str, Any]:
    """Read "a=1,b=2.5"; the values of ``texts`` are no numbers."""
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, number = part.partition("=")
        if key.strip() in texts:
            values[key.strip()] = number.strip()
            continue
        try:
            values[key.strip()] = float(number)
        except ValueError:
            what = f"'{number}' is not a number" if equals else "'=' is missing"
            raise TailraceError(
                f"cannot read '{part}' in policy '{rule}:{text}': {what}; "
                f"write {rule}:name=number,name=number"
            ) from None
    return values


def _from_file(path: Path, attribute: str, params: dict[str, Any]) -> Policy:
    module = _load_file(path)
    if attribute:
        return _as_policy(_attribute(module, attribute, str(path)), attribute, params)
    if callable(getattr(module, FUNCTION_NAME, None)):
        return _as_policy(getattr(module, FUNCTION_NAME), path.stem, params)
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Policy)
        and value.__module__ == module.__name__
    ]
    if not found:
        raise TailraceError(
            f"{path} holds no policy: write a function scores(view) or a subclass of Policy"
        )
    if len(found) > 1:
        choices = " or ".join(f"{path}:{cls.__name__}" for cls in found)
        raise TailraceError(f"{path} holds {len(found)} policies; say which: {choices}")
    return _as_policy(found[0], path.stem, params)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TailraceError(f"there is no policy file {path}")
    module_name = f"tailrace_policy_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise TailraceError(
            f"cannot load policy file {path}: {type(error).__name__}: {error}"
        ) from error
    return module


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TailraceError(f"cannot import policy module '{module}': {error}") from error


def _attribute(module: ModuleType, attribute: str, where: str) -> Any:
    if not hasattr(module, attribute):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise unknown_name(f"policy in {where}:", attribute, public)
    return getattr(module, attribute)


def _as_policy(found: Any, name: str, params: dict[str, Any]) -> Policy:
    """Return a policy made from a Policy subclass, an instance, or a function of a view."""
    if isinstance(found, Policy):
        if params:
            raise TailraceError(f"policy {name} is an object already and takes no parameters")
        return found
    if inspect.isclass(found) and issubclass(found, Policy):
        policy = _construct(found, name, params)
        if type(policy).name == Policy.name and policy.name == Policy.name:
            policy.name = name
        return policy
    if inspect.isclass(found) or not callable(found):
        raise TailraceError(f"policy {name} must be a Policy or a function scores(view)")
    return FunctionPolicy(found, name, **params)


def _construct(cls: type[Policy], name: str, params: dict[str, Any]) -> Policy:
    try:
        return cls(**params)
    except TypeError as error:
        raise TailraceError(f"cannot make policy {name}: {error}") from error


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise TailraceError(
            f"cannot load policy {point.name} of {point.value}: {type(error).__name__}: {error}"
        ) from error
