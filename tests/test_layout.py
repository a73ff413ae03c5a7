"""The shape of the package: folders, test folders, names of classes, sizes of kernels.

Beside test_layers.py, which holds the direction of imports.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tailrace

PACKAGE = Path(tailrace.__file__).parent
TESTS = Path(__file__).parent

MOST_MODULES = 20
#: A module per command, each found by the command's name.
LARGE_FOLDERS = frozenset({"cli"})
#: Folders of tests that belong to no package: fixtures, and tests of real vLLM servers.
OTHER_TEST_FOLDERS = frozenset({"data", "vllm"})

#: Limit of a compiled function's arguments. Each costs time at every call from Python, and in a
#: longer list two arguments of the same type are easily swapped.
MOST_ARGUMENTS = 14
#: The decorators of compiled.py.
COMPILING = frozenset({"jit", "unlocked", "inlined", "vectorised", "vectorised_finite"})


@cache
def trees() -> dict[str, ast.Module]:
    """The source of every module, by its path below the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def packages() -> set[str]:
    """Folders with code, by their path below the package; the package itself is ``.``."""
    return {Path(name).parent.as_posix() for name in trees()}


def public_classes() -> dict[str, list[str]]:
    """Modules that define a class of a name, for each public name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


def kernels() -> Iterator[tuple[str, int]]:
    """Every compiled function, as "module: name", with the number of its arguments."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and COMPILING & set(
                map(decorator, node.decorator_list)
            ):
                arguments = node.args
                assert arguments.vararg is None, f"{name}: {node.name} takes any number"
                count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
                yield f"{name}: {node.name}", count


def decorator(node: ast.expr) -> str:
    """The last part of a decorator's name: ``jit`` of ``compiled.jit`` and of ``jit(...)``."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_every_package_has_a_folder_of_tests():
    missing = {name for name in packages() if not list((TESTS / name).glob("test_*.py"))}
    # A package that only holds others has nothing to test by itself.
    missing -= {name for name in missing if f"{name}/__init__.py" in trees() and is_empty(name)}
    assert missing == set()


def is_empty(package: str) -> bool:
    """Whether a package consists of sub-packages and a docstring."""
    modules = list((PACKAGE / package).glob("*.py"))
    return len(modules) == 1 and len(trees()[f"{package}/__init__.py"].body) <= 1


def test_every_folder_of_tests_has_a_package():
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    strangers = {name for name in folders if name.split("/")[0] not in OTHER_TEST_FOLDERS}
    assert strangers - packages() == set()


def test_no_folder_holds_more_modules_than_one_can_survey():
    counts = {
        name: len([path for path in (PACKAGE / name).glob("*.py") if path.name != "__init__.py"])
        for name in packages() - LARGE_FOLDERS
    }
    assert {name: count for name, count in counts.items() if count > MOST_MODULES} == {}


def test_a_public_class_name_stands_for_one_thing():
    assert {name: where for name, where in public_classes().items() if len(where) > 1} == {}


def test_no_kernel_has_too_many_arguments():
    assert {name: count for name, count in kernels() if count > MOST_ARGUMENTS} == {}


def test_kernels_are_found_at_all():
    assert len(list(kernels())) > 100
