"""Imports flow one way: from the end of LAYERS to its beginning, and never back."""

import ast
from functools import cache
from pathlib import Path

import tailrace

PACKAGE = Path(tailrace.__file__).parent

#: From the lowest to the highest. An entry is a module or a package with all below it; the longest
#: entry that fits a module counts. Entries on one line do not know each other.
LAYERS = (
    ("moved",),
    ("__init__",),
    ("errors", "code_names", "compile_events"),
    ("compile_speed", "compile_values"),
    ("bitcode",),
    ("compiled", "config", "files", "parallel", "seeds"),
    ("scenario",),
    ("workload", "net", "queueing"),
    ("view",),
    ("policy.rules",),
    ("policy.base",),
    ("policy.learned",),
    ("policy",),
    ("sim",),
    ("saturation",),
    ("env",),
    ("evaluate.measure",),
    ("evaluate.explain",),
    ("evaluate.judge",),
    ("evaluate.search",),
    ("replay",),
    ("learn.improve.ppo_settings", "learn.exploration", "learn.other_names"),
    ("learn.randomisation",),
    ("learn.settings",),
    ("learn.kernels", "learn.samples", "learn.cost_ledger"),
    ("learn.worlds",),
    ("learn.imitate",),
    ("learn.world_schedule",),
    ("learn.improve",),
    ("learn",),
    ("emulate",),
    ("bench",),
    ("calibrate",),
    ("router.settings",),
    ("router.discovery",),
    ("router.intake",),
    ("router.access",),
    ("router.state",),
    ("router.decide",),
    ("router.observe",),
    ("router.serve_settings",),
    ("router.configuration",),
    ("router.proxy",),
    ("router",),
    ("picker",),
    ("router.workers",),
    ("assess",),
    ("autopilot",),
    ("integrations",),
    ("terminal",),
    ("report",),
    ("api",),
    ("cli",),
)

#: Direct imports that the order of LAYERS would permit, and that are wrong all the same: a report
#: renders what it is given, and the live router neither simulates nor trains.
FORBIDDEN = (
    *(("report", other) for other in ("sim", "saturation", "env", "policy", "learn", "router")),
    ("report", "evaluate.measure.runner"),
    *(
        (front, other)
        for front in ("router", "picker")
        for other in ("sim", "saturation", "env", "evaluate", "learn")
    ),
)

RANK = {entry: rank for rank, layer in enumerate(LAYERS) for entry in layer}


@cache
def modules() -> dict[str, Path]:
    """Every module by its name without ``tailrace.``; the package itself is ``__init__``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """What each module imports of this package, at any depth and for any reason."""
    return {name: frozenset(imported(path)) - {name} for name, path in modules().items()}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {module_of(t) for t in targets if t.split(".")[0] == "tailrace"}
    return found


def module_of(target: str) -> str:
    """The module that holds ``target``, a module or a name in one."""
    name = target.removeprefix("tailrace").removeprefix(".")
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or "__init__"


def entry_of(name: str) -> str:
    """The longest entry of LAYERS that fits a module."""
    entry = name
    while entry and entry not in RANK:
        entry = entry.rpartition(".")[0]
    assert entry, f"{name} is in no layer: add it to LAYERS"
    return entry


def upward() -> set[str]:
    found = set()
    for name, targets in imports().items():
        for target in targets:
            own, other = entry_of(name), entry_of(target)
            if own != other and RANK[own] <= RANK[other]:
                found.add(f"{name} -> {target}")
    return found


def forbidden() -> set[str]:
    return {
        f"{name} -> {target}"
        for name, targets in imports().items()
        for target in targets
        for own, other in FORBIDDEN
        if is_in(name, own) and is_in(target, other)
    }


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_every_entry_names_something_that_exists():
    named = {*RANK, *(entry for pair in FORBIDDEN for entry in pair)}
    assert {entry for entry in named if entry not in modules()} == set()


def test_imports_flow_one_way():
    assert upward() == set()


def test_packages_that_must_not_know_each_other_do_not():
    assert forbidden() == set()


def test_no_modules_import_each_other_in_a_circle():
    """A circle inside one package is as hard to take apart as one between packages."""
    assert [sorted(knot) for knot in knots()] == []


def knots() -> list[set[str]]:
    """The strongly connected components of two or more modules (Tarjan's algorithm)."""
    graph = imports()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            knot = set()
            while not knot or name not in knot:
                knot.add(stack.pop())
            if len(knot) > 1:
                found.append(knot)

    for name in graph:
        if name not in index:
            visit(name)
    return found
