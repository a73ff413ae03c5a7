"""Atomic operations on int64 arrays in memory that several processes share.

Numba has none for the CPU, so these two are written as LLVM instructions. A limit that several
workers check holds only if checking and counting are one step.
"""

# ruff: noqa: ARG001 (the arguments of an intrinsic are types; which they are, its signature says)

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Pointer to element ``arguments[1]`` of the array ``arguments[0]``."""
    array_type = signature.args[0]
    array = make_array(array_type)(context, builder, arguments[0])
    return cgutils.get_item_pointer(context, builder, array_type, array, [arguments[1]])


def _add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments)
        return builder.atomic_rmw("add", place, arguments[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


def _swap_if(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments)
        result = builder.cmpxchg(place, arguments[2], arguments[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(array, types.int64, types.int64, types.int64), generate


#: ``add(array, index, value)``: add to an element int64 and return what it was before.
add: Any = intrinsic(_add)
#: ``swap_if(array, index, expected, value)``: set an element int64 if it is ``expected``; return
#: whether it was.
swap_if: Any = intrinsic(_swap_if)
