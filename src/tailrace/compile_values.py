"""Makes Numba hand less to LLVM, by three changes to its internals that change no result.

Numba keeps most variables in memory and leaves it to LLVM to find out that they are values. The
engine's arrays come as one tuple with hundreds of numbers, so that copying it was most of what LLVM
read. Each change checks that Numba is what it was written for (0.62 to 0.69), and leaves it alone
otherwise.
"""

from typing import Any

from llvmlite.ir import builder, instructions
from numba.core import analysis, ir, lowering

_ir: Any = ir
_analysis: Any = analysis
_Lower: Any = lowering.Lower
_Builder: Any = builder.IRBuilder
_InsertValue: Any = instructions.InsertValue


# ---- variables ----------------------------------------------------------------------------------

_find_local, _delete = _Lower._find_singly_assigned_variable, _Lower.delvar


def _find_values(lower: Any) -> None:
    """Find the variables that need no memory: assigned once, and on every way to where they are used.

    Numba itself finds those that are used in a single block.
    """
    _find_local(lower)
    lower._tailrace_values = set()
    if lower.context.enable_nrt or lower.func_ir.func_id.is_generator:
        return
    if lower._disable_sroa_like_opt:
        return
    blocks = lower.func_ir.blocks
    assigned: dict[str, int] = {}
    several = set(_analysis.must_use_alloca(blocks))
    used: dict[str, set[int]] = {}  # in which blocks before an assignment there
    for label, block in blocks.items():
        here = set()
        for statement in block.body:
            if type(statement) is _ir.Del:
                continue
            target = None
            if type(statement) is _ir.Assign:
                target = statement.target.name
                value = statement.value
                read = [value] if type(value) is _ir.Var else ()
                if isinstance(value, _ir.Inst):
                    read = value.list_vars()
            else:
                read = statement.list_vars()
            for variable in read:
                if variable.name not in here:
                    used.setdefault(variable.name, set()).add(label)
            if target is not None:
                if target in assigned:
                    several.add(target)
                assigned[target] = label
                here.add(target)
    graph = _analysis.compute_cfg_from_blocks(blocks)
    dominators = graph.dominators()
    for name, label in assigned.items():
        if name in several:
            continue
        if all(
            at != label and label in dominators.get(at, ()) for at in used.get(name, ())
        ):
            lower._tailrace_values.add(name)
    lower._singly_assigned_vars |= lower._tailrace_values


def _lower_body(lower: Any) -> Any:
    """Lower every block after those that assign what it uses."""
    blocks = lower.blocks
    for label in blocks:
        lower.blkmap[label] = lower.function.append_basic_block(f"B{label}")
    lower.pre_lower()
    tail = lower.builder.basic_block
    order = list(_analysis.compute_cfg_from_blocks(blocks).topo_order())
    for label in (*order, *sorted(blocks.keys() - set(order))):
        lower.builder.position_at_end(lower.blkmap[label])
        lower.lower_block(blocks[label])
    lower.post_lower()
    return tail


def _delete_variable(lower: Any, name: str) -> None:
    """Delete a variable: nothing to do for a value without a count of references."""
    if name not in lower._tailrace_values:
        _delete(lower, name)


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


_Builder.extract_value = _extract_known
