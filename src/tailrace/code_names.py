"""Recognises a function by the names it uses: one of another version uses others."""

from types import CodeType
from typing import Any


def names_used(function: Any) -> set[str]:
    """Return the names a function uses, in its comprehensions and inner functions too.

    Python 3.12 and later count those of comprehensions as the function's own.
    """
    return _of(function.__code__)


def _of(code: CodeType) -> set[str]:
    inner = [_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
