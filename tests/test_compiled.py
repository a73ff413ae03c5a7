"""The compile cache."""

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from router.processes import until
from tailrace import compiled
from tailrace.router.proxy import large_bodies
from tailrace.router.proxy.large_bodies import LargeBodies
from tailrace.view import selection
from tailrace.view.records import ROUTER

NOBODY = 65534
#: The same as a command would: prints one function's result, and what was said on standard error.
COMMAND_LINE = """
import contextlib, io, json
from tailrace import compile_events
from tailrace.cli import console
console.PATIENCE_S = 0.0
compile_events.watcher = console.CompileProgress()
with contextlib.redirect_stderr(io.StringIO()) as said:
    from tailrace.view import ledger
    three = ledger.whole_tokens(3.0)
print(json.dumps([int(three), said.getvalue()]))
"""
#: Compiles one function and says where the cache is and what was compiled.
PROGRAM = """
import importlib.util, json, sys
from tailrace import compile_events
names = []
compile_events.watcher = names.append
from tailrace import compiled
from tailrace.view import ledger
three = ledger.whole_tokens(3.0)
print(json.dumps([str(compiled.CACHE), compiled.NO_CACHE_REASON, names, int(three)]))
"""


def run_as_nobody(program: str = PROGRAM, **environment: str) -> list:
    """What a program prints for a user without a home that can be written."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, by setpriv")
    ours = ("TAILRACE_CACHE_DIR", "NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    home = {
        "HOME": "/nonexistent",
        "XDG_CACHE_HOME": "/nonexistent/cache",
        "PYTHONPATH": str(Path(compiled.__file__).parents[1]),
    }
    # Python may be installed where only root may look, so nobody may read everything here.
    read_all = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    user = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *read_all)
    done = subprocess.run(
        ["setpriv", *user, sys.executable, "-c", program], cwd="/",
        env=inherited | home | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list = json.loads(done.stdout)
    return found


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    """A folder like /tmp: anybody may write, and only rename what is theirs."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    return folder


def test_the_cache_is_named_by_every_file_with_compiled_code():
    """Else an edited kernel would go on running as it was."""
    package = Path(compiled.__file__).parent
    named = {path for pattern in compiled._KERNEL_SOURCES for path in package.glob(pattern)}
    users = {
        path
        for path in package.rglob("*.py")
        if "from tailrace.compiled import" in path.read_text(encoding="utf-8")
    }
    assert len(users) > 10
    assert users - named == set()


def test_a_user_without_a_home_gets_a_cache_in_the_temporary_folder(shared_folder):
    cache, _, names, three = run_as_nobody(TMPDIR=str(shared_folder))
    folder = Path(cache)
    assert shared_folder / f"tailrace-{NOBODY}" in folder.parents
    assert folder.stat().st_mode & 0o777 == 0o700
    assert names == ["whole_tokens", None]
    assert three == 3
    # The second time it is only loaded.
    assert run_as_nobody(TMPDIR=str(shared_folder)) == [cache, "", [], 3]


def test_a_user_who_may_write_nowhere_runs_without_a_cache(tmp_path, shared_folder):
    planted = shared_folder / f"tailrace-{NOBODY}"
    planted.mkdir()
    planted.chmod(0o755)  # of another user: root
    cache, why, names, three = run_as_nobody(TMPDIR=str(shared_folder))
    assert cache == "None"
    assert str(planted) in why
    assert names == ["whole_tokens", None]
    assert three == 3


def test_a_cache_that_can_only_be_read_is_used(tmp_path, shared_folder):
    """As in an image with a read-only root, warmed when it was built."""
    first = run_as_nobody(TMPDIR=str(shared_folder))
    root = Path(first[0]).parents[1]
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    warmed = {"TAILRACE_CACHE_DIR": str(root), "TMPDIR": str(shared_folder)}
    assert run_as_nobody(**warmed) == [first[0], "", [], 3]


def test_another_checkout_with_the_same_sources_shares_the_cache(tmp_path, shared_folder):
    first = run_as_nobody(TMPDIR=str(shared_folder))
    copy = tmp_path / "elsewhere"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(compiled.__file__).parent, copy / "tailrace", ignore=ignored)
    where = {"TMPDIR": str(shared_folder), "PYTHONPATH": str(copy)}
    assert run_as_nobody(**where) == [first[0], "", [], 3]
    # Not with other sources.
    kernel = copy / "tailrace" / "view" / "ledger.py"
    kernel.write_text(kernel.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    folder, _, names, _ = run_as_nobody(**where)
    assert folder != first[0]
    assert names == ["whole_tokens", None]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
@pytest.mark.parametrize("which", ["itself", "a folder in it", "a file in it", "its parent"])
def test_a_folder_that_others_may_write_to_is_not_safe(tmp_path, which, mode, monkeypatch):
    monkeypatch.setattr(compiled, "_is_private_group", lambda gid: False)
    folder = tmp_path / "kernels"
    (folder / "sim").mkdir(parents=True)
    (folder / "sim" / "run.nbi").touch()
    places = {"itself": folder, "a folder in it": folder / "sim", "its parent": tmp_path}
    assert compiled.is_safe(folder)
    places.get(which, folder / "sim" / "run.nbi").chmod(mode)
    assert not compiled.is_safe(folder)


def test_a_link_in_the_cache_is_not_safe(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "sim").symlink_to("/tmp")
    assert not compiled.is_safe(folder)


def test_the_folder_that_was_asked_for_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "asked"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    first, _ = compiled.cache_folder()
    assert first is not None
    assert tmp_path / "asked" in first.parents
    # One that cannot be made is passed over.
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "file" / "below"))
    second, _ = compiled.cache_folder()
    assert second is not None
    assert tmp_path / "xdg" in second.parents


# ---- functions without a wrapper for Python -----------------------------------------------------

ROOT = Path(compiled.__file__).parents[2]
DECORATORS = {"jit", "inner", "unlocked", "inlined", "vectorised", "vectorised_finite"}


def decorators(node: ast.AST) -> set[str]:
    found = getattr(node, "decorator_list", [])
    return {d.id for d in found if isinstance(d, ast.Name)} & DECORATORS


def imported(tree: ast.Module) -> dict[str, str]:
    """Full names of what a file imports from Tailrace, by its name there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tailrace"):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name: a.name for a in node.names}
    return found


def used_by_python(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """Full names of what the interpreted code of a file uses."""
    if decorators(node):
        return
    if isinstance(node, ast.Name) and node.id in names:
        yield names[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield f"{names.get(node.value.id, '')}.{node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from used_by_python(child, names)


#: Large functions that Python calls only where a policy is asked for its scores: to explain them,
#: or because another part of the decision is in Python. Starts take less time without a wrapper.
SELDOM_CALLED = {
    "tailrace.policy.learned.observation.observe",
    "tailrace.policy.learned.policy.learned_scores",
    "tailrace.policy.learned.policy.prior_scores",
    "tailrace.policy.rules.score",
    "tailrace.router.state.kernels.show",
}


def test_the_package_calls_few_functions_without_a_wrapper_from_python():
    """That works, but compiles the function a second time."""
    inner, used = set(), set()
    folder = ROOT / "src"
    for path in folder.rglob("*.py"):
        if path.name == "warmup.py":  # compiles them, without a call
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = imported(tree)
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        names |= {f.name: f"{module}.{f.name}" for f in functions}
        inner |= {names[f.name] for f in functions if "inner" in decorators(f)}
        used |= set(used_by_python(tree, names))
    assert len(inner) > 100
    assert inner & used == SELDOM_CALLED


def test_python_may_call_a_function_without_a_wrapper():
    """Numba would jump to address 0."""
    router = np.zeros(1, ROUTER)[0]
    drawn = [selection.random_below(router, 5) for _ in range(50)]
    assert set(drawn) == set(range(5))
    assert 0 <= selection.random_below(router, n=5) < 5


# ---- messages, and the helper process -----------------------------------------------------------


def test_a_cold_start_says_so_and_where_the_code_is_kept(shared_folder):
    where = {"TMPDIR": str(shared_folder), "program": COMMAND_LINE}
    first, said = run_as_nobody(**where)
    assert said.startswith("compiling, once: 1 function,")
    assert f"(kept in {shared_folder}/tailrace-{NOBODY}/" in said
    # Nothing is compiled the second time.
    assert run_as_nobody(**where) == [first, ""]


def test_a_start_without_a_cache_says_why(shared_folder):
    planted = shared_folder / f"tailrace-{NOBODY}"
    planted.mkdir(mode=0o755)
    _, said = run_as_nobody(TMPDIR=str(shared_folder), program=COMMAND_LINE)
    assert "compiling, once" in said
    assert "(not kept: " in said
    assert str(planted) in said


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_helper_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "CACHE", tmp_path)
    before = children(os.getpid())
    with compiled.helper("this") as poll:
        (pid,) = children(os.getpid()) - before
        until("the helper ends", lambda: poll() is not None)
        assert pid not in children(os.getpid())
    with compiled.helper("http.server"):
        assert len(children(os.getpid()) - before) == 1
    assert children(os.getpid()) == before
    compiled.mark("this")
    with compiled.helper("this") as poll:
        assert poll() == 0
        assert children(os.getpid()) == before


def test_what_a_helper_compiles_is_waited_for_until_it_is_marked_or_the_helper_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(compiled, "CACHE", tmp_path)
    assert not compiled.helps_with("part")  # there is no helper
    with compiled.helper("http.server"):
        assert compiled.helps_with("part")
        waiting = threading.Thread(target=compiled.wait_for, args=["part"])
        waiting.start()
        compiled.mark("part")
        waiting.join(10)
        assert not waiting.is_alive()
        assert not compiled.helps_with("part")
    with compiled.helper("this") as poll:
        until("the helper ends", lambda: poll() is not None)
        compiled.wait_for("another")


def test_a_router_listens_before_the_reader_of_large_bodies_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "CACHE", tmp_path)
    with compiled.helper("http.server"):
        bodies = LargeBodies()
        later = bodies.threads.submit(lambda: None)
        assert not later.done()
        compiled.mark(large_bodies.__name__)
        later.result(60)
        bodies.close()
