"""Natural logarithm of float32 numbers that LLVM vectorises in a loop; the library's does not.

With the library's, a whole environment step takes 1.18 times the CPU time
(docs/results/bench_arithmetic.json).
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tailrace.compiled import vectorised

_numba: Any = numba

f32, i32 = np.float32, np.int32
ONE, HALF, SQRT_2 = f32(1.0), f32(0.5), f32(np.sqrt(2))
EXPONENT, BIAS = i32(23), i32(127)
MANTISSA, UNIT = i32(0x007FFFFF), i32(0x3F800000)
#: log(1 + x) = x - x^2/2 + x^3 * P(x) on [sqrt(1/2) - 1, sqrt(2) - 1] (Cephes): within 1e-7.
P8, P7, P6 = f32(7.0376836292e-2), f32(-1.1514610310e-1), f32(1.1676998740e-1)
P5, P4, P3 = f32(-1.2420140846e-1), f32(1.4249322787e-1), f32(-1.6668057665e-1)
P2, P1, P0 = f32(2.0000714765e-1), f32(-2.4999993993e-1), f32(3.3333331174e-1)
#: Logarithm of 2 as a sum; the first part times an exponent is exact.
LN2_HIGH, LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)


def _reinterpreted(source: Any, target: Any, kind: ir.Type) -> Any:
    """Return a function for compiled code that reinterprets the bits of one type as another."""

    @intrinsic
    def cast(typing, value):  # noqa: ARG001
        def generate(context, builder, signature, args):  # noqa: ARG001
            return builder.bitcast(args[0], kind)

        return target(source), generate

    return cast


if _numba.config.DISABLE_JIT:

    def _bits(value: np.float32) -> np.int32:
        return f32(value).view(np.int32)

    def _number(bits: np.int32) -> np.float32:
        return i32(bits).view(np.float32)
else:
    _bits = _reinterpreted(types.float32, types.int32, ir.IntType(32))
    _number = _reinterpreted(types.int32, types.float32, ir.FloatType())


@vectorised
def log(x):
    """Natural logarithm of a float32 that is positive, normal and finite; else a finite number."""
    bits = _bits(x)
    exponent = f32((bits >> EXPONENT) - BIAS)
    m = _number((bits & MANTISSA) | UNIT)
    large = m > SQRT_2
    m = m * HALF if large else m
    exponent = exponent + ONE if large else exponent
    m = m - ONE
    p = P8 * m + P7
    p = p * m + P6
    p = p * m + P5
    p = p * m + P4
    p = p * m + P3
    p = p * m + P2
    p = p * m + P1
    p = p * m + P0
    square = m * m
    rest = p * m * square + exponent * LN2_LOW - HALF * square
    return m + rest + exponent * LN2_HIGH
