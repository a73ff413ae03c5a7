"""Lets Numba hand less to LLVM, by three changes to its internals that change no result.

Numba keeps most variables and all arrays' structures in memory, and leaves it to LLVM to find out
that they are values. The engine's arrays come as one tuple of hundreds of numbers, and copying it
about was half of what LLVM read. What comes of it is also faster: LLVM does not find out all.

Only for functions without reference counting (``compiled.jit`` and its kin). Each change checks
that Numba is what it was written for (0.62 to 0.69), and leaves it alone otherwise.
"""

from typing import Any

from llvmlite.ir import builder, instructions
from numba.core import analysis, cgutils, ir, lowering, types

from tailrace.code_names import names_used

_ir: Any = ir
_analysis: Any = analysis
_Lower: Any = lowering.Lower
_Builder: Any = builder.IRBuilder
_InsertValue: Any = instructions.InsertValue
_Proxy: Any = cgutils.ValueStructProxy


# ---- variables ----------------------------------------------------------------------------------

_find_local, _delete = _Lower._find_singly_assigned_variable, _Lower.delvar
_lower_sorted = _Lower.lower_function_body


def _find_values(lower: Any) -> None:
    """Find the variables that need no memory: assigned once, on every way to where they are used.

    Numba finds those that are used in one block only.
    """
    _find_local(lower)
    lower._tailrace_values, lower._tailrace_order = set(), ()
    generator = lower.func_ir.func_id.is_generator
    if lower.context.enable_nrt or generator or lower._disable_sroa_like_opt:
        return
    blocks = lower.func_ir.blocks
    assigned, used = _uses(blocks)
    dominators = _analysis.compute_cfg_from_blocks(blocks).dominators()
    for name in assigned.keys() - _analysis.must_use_alloca(blocks):
        label = assigned[name]
        if label is not None and all(
            at != label and label in dominators.get(at, ()) for at in used.get(name, ())
        ):
            lower._tailrace_values.add(name)
    lower._singly_assigned_vars |= lower._tailrace_values
    # A block after those that come before it on every way to it, and what is never reached last.
    lower._tailrace_order = sorted(
        blocks, key=lambda label: (len(dominators.get(label, blocks)), label)
    )


def _uses(blocks: Any) -> tuple[dict[str, int | None], dict[str, set[int]]]:
    """Return the block that assigns each variable, and those that use what others assigned.

    The block is None if the variable is assigned more than once.
    """
    assigned: dict[str, int | None] = {}
    used: dict[str, set[int]] = {}
    for label, block in blocks.items():
        here = set()
        for statement in block.body:
            target, read = None, statement
            if isinstance(statement, _ir.Assign):
                target, read = statement.target.name, statement.value
            if isinstance(read, _ir.Var):
                names = [read.name]
            elif isinstance(read, _ir.Inst):
                names = [variable.name for variable in read.list_vars()]
            else:
                names = []
            for name in names:
                if name not in here:
                    used.setdefault(name, set()).add(label)
            if target is not None:
                assigned[target] = None if target in assigned else label
                here.add(target)
    return assigned, used


def _lower_body(lower: Any) -> Any:
    """Lower every block after those that assign what it uses; Numba goes by their numbers."""
    if not lower._tailrace_order:
        return _lower_sorted(lower)
    for label in lower.blocks:
        lower.blkmap[label] = lower.function.append_basic_block(f"B{label}")
    lower.pre_lower()
    tail = lower.builder.basic_block
    for label in lower._tailrace_order:
        lower.builder.position_at_end(lower.blkmap[label])
        lower.lower_block(lower.blocks[label])
    lower.post_lower()
    return tail


def _delete_variable(lower: Any, name: str) -> None:
    """Delete a variable: nothing to do for a value that nobody counts references to."""
    if name not in lower._tailrace_values:
        _delete(lower, name)


if (
    names_used(_lower_sorted) == {
        "blocks", "function", "append_basic_block", "blkmap", "pre_lower", "builder",
        "basic_block", "debug_print", "format", "fndesc", "unique_name", "sorted", "items",
        "position_at_end", "lower_block", "post_lower",
    }
    and names_used(_Lower.loadvar) == {
        "_blk_local_varmap", "_disable_sroa_like_opt", "getvar", "func_ir", "arg_names",
        "debuginfo", "suspend_emission", "builder", "load",
    }
    and names_used(_delete) >= {"_singly_assigned_vars", "_blk_local_varmap", "decref"}
    and names_used(_Lower.storevar) >= {"_singly_assigned_vars", "_blk_local_varmap", "_alloca_var"}
):  # fmt: skip
    _Lower._find_singly_assigned_variable = _find_values
    _Lower.lower_function_body = _lower_body
    _Lower.delvar = _delete_variable


# ---- members of aggregates ----------------------------------------------------------------------

_extract = _Builder.extract_value


def _extract_known(builder: Any, whole: Any, index: Any, name: str = "") -> Any:
    """Return a member of an aggregate: what was inserted there, if that is known."""
    wanted = list(index) if isinstance(index, (tuple, list)) else [index]
    while isinstance(whole, _InsertValue):
        there = list(whole.indices)
        if there == wanted:
            return whole.operands[1]
        if all(a == b for a, b in zip(there, wanted, strict=False)):
            break
        whole = whole.aggregate
    return _extract(builder, whole, wanted, name=name)


if names_used(_InsertValue.__init__) >= {"aggregate", "indices"}:
    _Builder.extract_value = _extract_known


# ---- arrays -------------------------------------------------------------------------------------

_begin = _Proxy.__init__
_member, _get, _set = _Proxy.__getattr__, _Proxy.__getitem__, _Proxy.__setitem__
_whole = _Proxy._getvalue


def _begin_known(
    proxy: Any, context: Any, builder: Any, value: Any = None, ref: Any = None
) -> None:
    """Begin to read or to make the structure of an array: as a value, as long as that will do."""
    if ref is not None or context.enable_nrt or type(proxy._fe_type) is not types.Array:
        _begin(proxy, context, builder, value, ref)
        return
    proxy._context, proxy._builder = context, builder
    proxy._datamodel = context.data_model_manager[proxy._fe_type]
    proxy._be_type = proxy._get_be_type(proxy._datamodel)
    proxy._known = proxy._be_type(None) if value is None else value
    proxy._made_in = builder.block
    # Numba's property reads the shape from memory, to tell LLVM that it is positive.
    if "shape" in vars(type(proxy)):
        del type(proxy).shape


def _spill(proxy: Any) -> None:
    """Put a structure into memory after all."""
    builder = proxy._builder
    pointer = cgutils.alloca_once(builder, proxy._be_type)
    with builder.goto_block(proxy._made_in):
        builder.store(proxy._known, pointer)
    proxy._known, proxy._value, proxy._outer_ref = None, pointer, pointer


def _member_known(proxy: Any, name: str) -> Any:
    """Return what a structure lacks: a member, or its place in memory."""
    if name == "_known":
        return None
    if name in ("_value", "_outer_ref") and proxy._known is not None:
        _spill(proxy)
        return proxy._value
    return _member(proxy, name)


def _get_known(proxy: Any, index: int) -> Any:
    """Read a member."""
    if proxy._known is None:
        return _get(proxy, index)
    return proxy._builder.extract_value(proxy._known, index)


def _set_known(proxy: Any, index: int, value: Any) -> None:
    """Write a member. Elsewhere than where the structure was made, only memory will do."""
    if proxy._known is not None:
        fits = value.type == proxy._be_type.elements[index]
        if fits and proxy._builder.block is proxy._made_in:
            proxy._known = proxy._builder.insert_value(proxy._known, value, index)
            return
        _spill(proxy)
    _set(proxy, index, value)


def _whole_known(proxy: Any) -> Any:
    """Return the whole structure."""
    return _whole(proxy) if proxy._known is None else proxy._known


if names_used(_begin) == {
    "_context", "data_model_manager", "_fe_type", "_datamodel", "isinstance", "numba", "core",
    "datamodel", "StructModel", "TypeError", "format", "_builder", "_get_be_type", "_be_type",
    "is_pointer", "_make_refs", "type", "pointee", "AssertionError", "as_pointer", "store",
    "_value", "_outer_ref",
} and names_used(_whole) == {"_builder", "load", "_outer_ref"}:  # fmt: skip
    _Proxy.__init__, _Proxy.__getattr__ = _begin_known, _member_known
    _Proxy.__getitem__, _Proxy.__setitem__ = _get_known, _set_known
    _Proxy._getvalue = _whole_known
