"""Products of small matrices in vector registers, for the forward pass of a learned policy.

A loop that Numba compiles stores each partial sum to memory and loads it again; here a tile of sums
stays in registers over all inputs. Numba cannot express that, so the tile is written as LLVM code.
On machines with narrower registers than the tile, LLVM splits the instructions.
With plain loops the forward pass takes 2.7 times the CPU time. BLAS takes 2 to 5 times as long for
a product of 12 to 4 rows, and Numba cannot call it without memory of its own
(docs/results/bench_arithmetic.json).
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tailrace.compiled import vectorised

_numba: Any = numba

#: Rows computed together: the number of times each loaded weight is used.
TILE_ROWS = 4
#: Widths of a tile, in outputs (float32). The sums of a wide one fit only into the registers of
#: AVX-512: with others they would go through memory, which takes a third longer.
NARROW = 16
WIDE = 32 if binding.get_host_cpu_features().get("avx512f") else NARROW


def _interpreted(columns: int) -> Callable[..., None]:
    """Return the tile as plain Python, for runs with the compiler disabled."""

    def tile(f, x, x_stride, inputs, w, w_stride, y, y_stride):
        for row in range(TILE_ROWS):
            target = f[y + row * y_stride : y + row * y_stride + columns]
            for k in range(inputs):
                start = w + k * w_stride
                target += f[x + row * x_stride + k] * f[start : start + columns]

    return tile


def _compiled(columns: int) -> Any:
    """Return the tile as a function for compiled code."""
    number, vector = ir.FloatType(), ir.VectorType(ir.FloatType(), columns)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), columns), [0] * columns)

    @intrinsic
    def tile(typing, f, x, x_stride, inputs, w, w_stride, y, y_stride):  # noqa: ARG001
        def generate(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            x, x_stride, inputs, w, w_stride, y, y_stride = args[1:]

            def address(start: Any, step: Any, count: Any, kind: ir.Type) -> Any:
                offset = builder.add(start, builder.mul(step, count))
                return builder.bitcast(builder.gep(data, [offset]), kind.as_pointer())

            rows = [ir.Constant(ir.IntType(64), row) for row in range(TILE_ROWS)]
            sums = [cgutils.alloca_once(builder, vector) for _ in rows]
            for row, total in zip(rows, sums, strict=True):
                builder.store(builder.load(address(y, y_stride, row, vector), align=4), total)
            with cgutils.for_range(builder, inputs) as loop:
                weights = builder.load(address(w, w_stride, loop.index, vector), align=4)
                for row, total in zip(rows, sums, strict=True):
                    start = builder.add(x, loop.index)
                    value = builder.load(address(start, x_stride, row, number), align=4)
                    one = builder.insert_element(
                        ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
                    )
                    every = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)
                    product = builder.fmul(every, weights, flags=("contract",))
                    added = builder.fadd(builder.load(total), product, flags=("contract",))
                    builder.store(added, total)
            for row, total in zip(rows, sums, strict=True):
                builder.store(builder.load(total), address(y, y_stride, row, vector), align=4)
            return context.get_dummy_value()

        size = types.int64
        return types.void(f, size, size, size, size, size, size, size), generate

    return tile


_tile = _interpreted if _numba.config.DISABLE_JIT else _compiled
_wide, _narrow = _tile(WIDE), _tile(NARROW)


@vectorised
def multiply(f, x, x_stride, rows, inputs, w, w_stride, columns, y, y_stride):
    """Add ``x`` [rows, inputs] times ``w`` [inputs, columns] to ``y`` [rows, columns].

    All three lie in the float32 array ``f`` at these offsets, with these distances between rows.
    ``rows`` is a multiple of TILE_ROWS.
    """
    for i in range(0, rows, TILE_ROWS):
        xi, yi = x + i * x_stride, y + i * y_stride
        done = 0
        while columns - done >= WIDE:
            _wide(f, xi, x_stride, inputs, w + done, w_stride, yi + done, y_stride)
            done += WIDE
        if columns - done >= NARROW:
            _narrow(f, xi, x_stride, inputs, w + done, w_stride, yi + done, y_stride)
            done += NARROW
        if done < columns:
            _rest(f, xi, x_stride, inputs, w + done, w_stride, columns - done, yi + done, y_stride)


@vectorised
def _rest(f, x, x_stride, inputs, w, w_stride, columns, y, y_stride):
    """The columns beyond the last tile."""
    for row in range(TILE_ROWS):
        start = y + row * y_stride
        target = f[start : start + columns]
        for k in range(inputs):
            value = f[x + row * x_stride + k]
            weights = f[w + k * w_stride : w + k * w_stride + columns]
            for o in range(columns):
                target[o] += value * weights[o]
