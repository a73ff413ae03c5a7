"""Tailrace: a learned request router for clusters of LLM servers, and the simulator behind it.

``import tailrace as tr`` gives ``tr.simulate``, ``tr.compare``, ``tr.evaluate``, ``tr.train``,
``tr.load_policy`` and ``tr.explain`` (docs/python.md). They are imported when they are first used.
"""

from importlib import import_module
from typing import Any

from tailrace import moved

__version__ = "0.2.0"

#: Public names and the modules they are in; ``__init__.pyi`` says the same to type checkers.
_PUBLIC = {
    "Scenario": "tailrace.config",
    "TailraceError": "tailrace.errors",
    "compare": "tailrace.api",
    "evaluate": "tailrace.api",
    "explain": "tailrace.api",
    "load_policy": "tailrace.api",
    "load_scenario": "tailrace.api",
    "recorded": "tailrace.api",
    "simulate": "tailrace.api",
    "train": "tailrace.api",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'tailrace' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


moved.install()
