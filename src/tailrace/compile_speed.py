"""Makes Numba start and compile faster, by six changes to its internals that change no result.

Each checks that Numba is what it was written for (0.60 to 0.69), and leaves it alone otherwise.
"""

import contextlib
import copy
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from numba.core import errors, inline_closurecall, ir, targetconfig, types, utils
from numba.core.target_extension import get_local_target
from numba.core.types import functions
from numba.np import linalg

from tailrace.code_names import names_used

_ir: Any = ir
_functions: Any = functions
_Worker: Any = inline_closurecall.InlineWorker
_Function: Any = types.BaseFunction
_utils: Any = utils
_Config: Any = targetconfig.TargetConfig
_linalg: Any = linalg


#: Objects made between two searches for garbage while compiling. The compiler makes millions and
#: keeps most: Python's usual 700 cost a tenth of the time.
_COLLECT_AFTER = 50_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector search less often."""
    before = gc.get_threshold()
    if not 0 < before[0] < _COLLECT_AFTER:  # off, or an outer function is being compiled
        yield
        return
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# ---- variables ----------------------------------------------------------------------------------


#: Scopes copied for the function that is being inlined, by their number, with what was copied;
#: None: no function is.
_copied: dict[int, tuple[Any, Any, dict[int, Any]]] | None = None


def _copy_scope(scope: Any, memo: dict[int, Any]) -> Any:
    """Copy the variables of a function, for ``copy.deepcopy``.

    To inline a function, Numba copies each of its blocks, each with all variables of the function.
    Python's general way to copy them took a fifth of the time to compile the simulator. Here all
    blocks share one copy.
    """
    if _copied is not None and id(scope) in _copied:
        _, copied, variables = _copied[id(scope)]
        memo.update(variables)
        return copied
    copied = _ir.Scope(copy.deepcopy(scope.parent, memo), scope.loc)
    variables = {id(scope): copied}
    for variable in scope.localvars._con.values():
        variables[id(variable)] = copied.define(variable.name, variable.loc)
    copied.redefined.update(scope.redefined)
    for name, versions in scope.var_redefinitions.items():
        copied.var_redefinitions[name] = set(versions)
    memo.update(variables)
    if _copied is not None:
        _copied[id(scope)] = scope, copied, variables
    return copied


def _copy_place(place: Any, memo: dict[int, Any]) -> Any:
    """Copy a place in a source file, which never changes."""
    del memo
    return place


def _inline(worker: Any, *args: Any, **named: Any) -> Any:
    """Inline a function."""
    global _copied
    before, _copied = _copied, {}
    try:
        return _inline_ir(worker, *args, **named)
    finally:
        _copied = before


_inline_ir = _Worker.inline_ir

if vars(_ir.Scope(None, _ir.unknown_loc)).keys() == {
    *("parent", "localvars", "loc", "redefined", "var_redefinitions")
}:
    _ir.Scope.__deepcopy__, _ir.Loc.__deepcopy__ = _copy_scope, _copy_place
    _Worker.inline_ir = _inline


# ---- what a statement reads ---------------------------------------------------------------------

_list_variables = _ir.Inst._rec_list_vars
#: By type: the first of the types Numba asks for.
_kinds: dict[type, type | None] = {}


def _kind(kind: type) -> type | None:
    """Return what Numba takes a type for; None: there are no variables in it."""
    known = (_ir.Var, _ir.Inst, list, tuple, dict)
    _kinds[kind] = next((one for one in known if issubclass(kind, one)), None)
    return _kinds[kind]


def _list_fast(statement: Any, value: Any) -> list[Any]:
    """List the variables in a part of a statement; Numba asks for every type in turn."""
    found: list[Any] = []
    kind = type(value)
    for part in value.values() if kind is dict else value if kind in (list, tuple) else (value,):
        kind = type(part)
        known = _kinds[kind] if kind in _kinds else _kind(kind)
        if known is _ir.Var:
            found.append(part)
        elif known is _ir.Inst:
            found += part.list_vars()
        elif known is not None:
            found += _list_fast(statement, part)
    return found


if names_used(_list_variables) == {
    "isinstance", "Var", "Inst", "list_vars", "list", "tuple", "extend", "_rec_list_vars", "dict",
    "values",
}:  # fmt: skip
    _ir.Inst._rec_list_vars = _list_fast


# ---- options ------------------------------------------------------------------------------------

_hashes: dict[type, int] = {}
_hash_config, _same_config = _Config.__hash__, _Config.__eq__


def _config_hash(config: Any) -> int:
    """Hash compiler options: Numba hashes their sorted names, the same for all of a class."""
    kind = type(config)
    if kind not in _hashes:
        _hashes[kind] = _hash_config(config)
    return _hashes[kind]


def _config_equal(config: Any, other: Any) -> Any:
    """Compare compiler options: equal if the same ones are set to the same values."""
    if type(config) is type(other) and config._values == other._values:
        return True
    return _same_config(config, other)


# Its names: hash(tuple(sorted(self.values()))).
if names_used(_hash_config) == {"hash", "tuple", "sorted", "values"}:
    _Config.__hash__, _Config.__eq__ = _config_hash, _config_equal


# ---- operators and built-in functions -----------------------------------------------------------

_resolve = _Function.get_call_type


def _unliteral(args: Any, kws: Any) -> tuple[Any, Any]:
    plain = _functions._unlit_non_poison
    return tuple(map(plain, args)), {name: plain(given) for name, given in kws.items()}


def _resolve_once(function: Any, context: Any, args: Any, kws: Any) -> Any:
    """Find the signature of a call of an operator or a function that Numba implements.

    Numba tries dozens of implementations, for every call anew. This tries the one first that
    accepted these types before.
    """
    accepted = function.__dict__.setdefault("_tailrace_accepted", {})
    key = context, args, tuple(kws.items())
    if key in accepted:
        found = _signature(function, context, accepted[key], args, kws)
        if found is not None:
            return found
    target = get_local_target(context)
    for kind in _utils.order_by_target_specificity(target, function.templates, function.key[0]):
        first = bool(kind(context).prefer_literal)
        for literal in (first, not first):
            found = _signature(function, context, (kind, literal), args, kws)
            if found is not None:
                accepted[key] = kind, literal
                return found
    return _resolve(function, context, args, kws)  # for its error message


def _signature(function: Any, context: Any, accepted: tuple[Any, bool], args: Any, kws: Any) -> Any:
    """Return the signature if an implementation accepts the types, as literals or not; or None."""
    kind, literal = accepted
    template = kind(context)
    try:
        given = (args, kws) if literal else _unliteral(args, kws)
        found = template.apply(*given)
    except errors.NumbaError:
        return None
    if found is not None:
        function._impl_keys[found.args] = template.get_impl_key(found)
    return found


if names_used(_resolve) == {
    "_ResolutionFailures", "_depth", "numba.core.target_extension", "get_local_target", "utils",
    "order_by_target_specificity", "templates", "key", "prefer_literal", "apply", "tuple", "items",
    "Exception", "isinstance", "errors", "NumbaError", "add_error", "get_impl_key", "_impl_keys",
    "args", "getattr", "join", "raise_error", "_unlit_non_poison", "format",
}:  # fmt: skip
    _Function.get_call_type = _resolve_once


# ---- linear algebra -----------------------------------------------------------------------------

_ARRAYMATH = "numba.np.arraymath"


def _import_arraymath() -> None:
    """Import Numba's array functions without scipy's linear algebra.

    Numba imports scipy only to see whether it is there, which takes a tenth of a warm start, and
    does so again before it compiles a matrix product.
    """
    ensure_blas = _linalg.ensure_blas
    _linalg.ensure_blas = lambda: None
    try:
        importlib.import_module(_ARRAYMATH).ensure_blas = ensure_blas  # type: ignore[attr-defined]
    finally:
        _linalg.ensure_blas = ensure_blas


if (
    _ARRAYMATH not in sys.modules
    and hasattr(_linalg, "ensure_blas")
    and importlib.util.find_spec("scipy") is not None
):
    _import_arraymath()
