"""Import paths that documentation once named and that have moved: they go on working.

Importing one warns and gives the module at its new place, the very same object.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Old name to new; what lies below a package moves with it.
MOVED = {
    "tailrace.distributed": "tailrace.integrations.ray",
    "tailrace.policy.choose": "tailrace.view.selection",
    "tailrace.policy.explain": "tailrace.policy.learned.explain",
    "tailrace.policy.observation": "tailrace.policy.learned.observation",
    "tailrace.policy.view": "tailrace.view.records",
    "tailrace.sim.fit": "tailrace.calibrate.iteration_fit",
    "tailrace.vidur": "tailrace.integrations.vidur",
}


def new_name(name: str) -> str | None:
    """Return where a module is now; None: it has not moved."""
    head, tail = name, ""
    while head:
        if head in MOVED:
            return MOVED[head] + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return None


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        return None if new_name(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = new_name(spec.name)
        assert name is not None
        warnings.warn(f"{spec.name} has moved: import {name}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just labelled the module with its old name.
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def install() -> None:
    """Make the old names work. Before all other finders, which would load a second copy."""
    sys.meta_path.insert(0, _Moved())
