"""Functions that only compiled code calls stay bitcode, and run as they would otherwise."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import errors, targetconfig, types
from numba.core.compiler import Flags

from tailrace import bitcode, compile_speed, compiled

#: Three levels of calls; the innermost one is called from two of them.
MODULE = """
import json, sys
import numba, numpy as np
{before}
from tailrace import compile_events
from tailrace.compiled import inner, jit, vectorised

@inner
def leaf(x):
    return x * 3 + 1

@inner
def middle(x):
    return leaf(x) + leaf(x + 1)

@vectorised
def total(numbers):
    found = 0.0
    for number in numbers:
        found += number * middle(2.0)
    return found

@jit
def top(x, numbers):
    return middle(x) - leaf(x), total(numbers)

@numba.njit
def stranger(x):
    return middle(x)

if __name__ == "__main__":
    names = []
    compile_events.watcher = names.append
    found = top(5, np.linspace(0.0, 1.0, 1001))
    kinds = [type(kernel.overloads[key].library).__name__
             for kernel in (leaf, middle, total) for key in kernel.overloads]
    called = [leaf(5), middle(5), stranger(5), total(np.ones(4))]
    print(json.dumps([[name for name in names if name], found, kinds, called]))
"""
CHANGED = "from tailrace import bitcode; bitcode._is_known = lambda: False"
EXPECTED = [16, 16 + 19, 16 + 19, 4 * 17.0]


def run(folder: Path, before: str = "") -> list:
    """Run the module with a compile cache in a folder: compiled, found, kinds, called."""
    module = folder / "kernels.py"
    if not module.exists():
        module.write_text(MODULE.format(before=before), encoding="utf-8")
    source = str(Path(compiled.__file__).parents[1])
    environment = {"TAILRACE_CACHE_DIR": str(folder), "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, module], env=os.environ | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list = json.loads(done.stdout)
    return found


def test_bitcode_gives_what_machine_code_of_every_function_gives(tmp_path):
    (tmp_path / "changed").mkdir()
    names, found, kinds, called = run(tmp_path)
    assert bitcode._is_known(), "Numba has changed: compiling takes twice as long"
    assert set(kinds) == {"Bitcode", "DenseBitcode"}
    assert called == EXPECTED
    other_names, other_found, other_kinds, other_called = run(tmp_path / "changed", CHANGED)
    assert set(other_kinds) == {"JITCodeLibrary"}
    assert (other_names, other_found, other_called) == (names, found, called)


def test_a_later_process_loads_the_bitcode(tmp_path):
    names, found, _, called = run(tmp_path)
    assert {"leaf", "middle", "total", "top"} <= set(names)
    again = run(tmp_path)
    assert (again[0], again[1], again[3]) == ([], found, called)
    # A new caller links the parts of the earlier process.
    for cached in tmp_path.rglob("*top*.nb?"):
        cached.unlink()
    assert run(tmp_path)[:2] == [["top"], found]


def test_numba_is_what_its_faster_ways_were_written_for():
    """Else they are left out: compiling takes longer."""
    assert types.BaseFunction.get_call_type is compile_speed._resolve_once
    assert targetconfig.TargetConfig.__eq__ is compile_speed._config_equal


def test_options_are_compared_as_numba_compares_them():
    plain, fast = Flags(), Flags()
    fast.fastmath = True
    for one in (plain, fast):
        assert hash(one) == compile_speed._hash_config(one)
        for other in (plain, fast, one.copy()):
            assert (one == other) is compile_speed._same_config(one, other)
    explicit = Flags()
    explicit.fastmath = plain.fastmath  # the same, but set
    assert explicit == plain


def test_every_operator_has_the_signature_that_numba_finds():
    context = numba.core.registry.cpu_target.typing_context
    context.refresh()
    kinds = (types.int64, types.float64, types.boolean, types.IntegerLiteral(3), types.int32)
    for operator in (np.add, max, min, abs, len):
        function = context.resolve_value_type(operator)
        for args in [(one, other) for one in kinds for other in kinds]:
            given = args[:1] if operator in (abs, len) else args
            for _ in range(2):  # the second time it is remembered
                assert _signature(function.get_call_type, context, given) == _signature(
                    lambda *a, function=function: compile_speed._resolve(function, *a),
                    context, given,
                )  # fmt: skip


def _signature(resolve, context, args):
    try:
        return resolve(context, args, {})
    except errors.TypingError:
        return None


def test_the_collector_is_as_before_after_compiling():
    import gc

    before = gc.get_threshold()
    with compile_speed.rare_collections():
        assert gc.get_threshold()[0] > before[0]
        with compile_speed.rare_collections():
            assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), compile_speed.rare_collections():
        raise KeyError
    assert gc.get_threshold() == before


def test_copied_variables_are_new_and_have_their_names():
    scope = numba.core.ir.Scope(None, numba.core.ir.unknown_loc)
    variable = scope.define("x", numba.core.ir.unknown_loc)
    copied, other = copy.deepcopy((scope, variable))
    assert copied.get("x") is other
    assert other is not variable
    assert other.scope is copied


PRODUCT = """
import sys
import numba, numpy as np
from tailrace.view import selection
assert "numba.np.arraymath" in sys.modules and "scipy.linalg" not in sys.modules
print(numba.njit(lambda a, b: a @ b)(np.eye(3), np.ones((3, 3))).sum())
assert "scipy.linalg.cython_blas" in sys.modules
"""


def test_linear_algebra_is_imported_where_it_is_used():
    done = subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "9.0\n"), done.stderr
