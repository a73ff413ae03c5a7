"""Measuring, judging, searching and explaining policies; called, it is :func:`tailrace.evaluate`.

``tailrace.evaluate`` names this package and the public function of that name: whichever is asked
for first, both work.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("tailrace.api").evaluate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
