"""The one decorator of compiled code, and a compile cache that cannot go stale.

Numba's own cache looks only at the file a function stands in, not at the helpers it calls, so the
cache folder is named by a hash of the sources of all packages with compiled code. Import ``jit``
from here.
"""

import contextlib
import grp
import hashlib
import os
import pwd
import stat
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
from numba.core import caching
from numba.core.registry import CPUDispatcher

from tailrace import (
    bitcode,
    compile_events,
    compile_values,  # noqa: F401  # it changes Numba
)

_numba: Any = numba  # its options are not in its type hints
_caching: Any = caching
_CPUDispatcher: Any = CPUDispatcher
_FolderLocator: Any = getattr(_caching, "UserProvidedCacheLocator", None) or (
    _caching._UserProvidedCacheLocator  # its name before Numba 0.62
)

_PACKAGE = Path(__file__).parent
#: Where compiled functions, and the types and constants they use, may stand.
_KERNEL_SOURCES = (
    *(
        "bitcode.py",
        "compile_speed.py",
        "compile_values.py",
        "compiled.py",
        "net/chunk_kernel.py",
        "net/framing.py",
        "view/*.py",
        "policy/**/*.py",
        "sim/*.py",
    ),
    *("learn/kernels.py", "learn/improve/fused_kernels.py", "learn/improve/rollout.py"),
    *("router/access/accounts.py", "router/access/atomic.py", "router/state/kernels.py"),
    "router/state/server_model.py",
    *("router/intake/fast_body.py", "router/intake/hashing.py", "router/intake/json_scan.py"),
    "router/intake/large_body.py",
    "router/intake/member_scan.py",
    "workload/formats/scan.py",
)


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for source in sorted(path for pattern in _KERNEL_SOURCES for path in _PACKAGE.glob(pattern)):
        digest.update(source.relative_to(_PACKAGE).as_posix().encode())
        digest.update(source.read_bytes())
    # Code compiled with bounds checks must not be mixed with code compiled without.
    digest.update(os.environ.get("NUMBA_BOUNDSCHECK", "").encode())
    return digest.hexdigest()[:16]


# ---- where compiled code is kept ----------------------------------------------------------------


def cache_folder() -> tuple[Path | None, str]:
    """Return the folder of compiled code; or None, and why there is none.

    The first of ``TAILRACE_CACHE_DIR``, ``XDG_CACHE_HOME``, ``~/.cache`` and a folder of this user
    in the temporary folder that can be written, or that holds compiled code already (an image with
    a read-only root). Numba unpickles and runs what it finds there, so no folder is used that
    another user may write to.
    """
    name = f"kernels-{_sources_hash()}"
    refused = []
    for root, trusted in _roots():
        folder = root / "tailrace" / name
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if not folder.is_dir():
                refused.append(f"{root}: {error.strerror}")
                continue
        if not is_safe(folder, parents=not trusted):
            refused.append(f"{root}: other users may write to it")
        elif os.access(folder, os.W_OK) or any(folder.iterdir()):
            return folder, ""
        else:
            refused.append(f"{root}: not writable")
    return None, "; ".join(refused)


def _roots() -> Iterator[tuple[Path, bool]]:
    """Where the cache may be, best first, and whether the way to it is the operator's choice."""
    for variable in ("TAILRACE_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        if chosen := os.environ.get(variable):
            yield Path(chosen).absolute(), variable != "XDG_CACHE_HOME"
    with contextlib.suppress(RuntimeError):  # there is no home
        yield Path.home() / ".cache", False
    with contextlib.suppress(OSError):  # there is no temporary folder
        yield Path(tempfile.gettempdir()) / f"tailrace-{os.getuid()}", False


def is_safe(folder: Path, *, parents: bool = True) -> bool:
    """Whether nobody but this user and root can have put anything into a folder.

    ``parents``: nor can they replace it, or any folder on the way to it.
    """
    try:
        real = folder.resolve(strict=True)
        inside = (Path(at, name) for at, *found in os.walk(real) for name in chain(*found))
        if not _only_ours(real.parent) or not _only_ours(real) or not all(map(_only_ours, inside)):
            return False
        # In a sticky folder (/tmp) others cannot rename what is ours.
        return not parents or all(
            parent.stat().st_mode & stat.S_ISVTX or _only_ours(parent) for parent in real.parents
        )
    except OSError:
        return False


def _only_ours(path: Path) -> bool:
    """Whether only this user and root may write to a file or folder."""
    about = path.lstat()
    if about.st_uid not in (0, os.getuid()) or stat.S_ISLNK(about.st_mode):
        return False
    if about.st_mode & stat.S_IWOTH:
        return False
    return not about.st_mode & stat.S_IWGRP or _is_private_group(about.st_gid)


def _is_private_group(gid: int) -> bool:
    """Whether a group has no member but this user, who may then share folders with it."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    own = gid == user.pw_gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


class _Locator(_FolderLocator):  # type: ignore[misc]
    """Numba's folder for the functions of one file.

    Numba names it by the file's full path and marks its content with the file's time. The cache is
    named by the sources' hash, so neither is needed for our own files: every checkout and virtual
    environment with the same sources shares what is compiled. Also accepts a folder that can only
    be read, which Numba does not.
    """

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._ours = Path(py_file).is_relative_to(_PACKAGE)
        if self._ours:
            module = Path(py_file).relative_to(_PACKAGE).with_suffix("")
            self._cache_path = str(Path(_numba.config.CACHE_DIR, ".".join(module.parts)))

    def get_source_stamp(self) -> Any:
        return None if self._ours else super().get_source_stamp()

    def ensure_cache_path(self) -> None:
        with contextlib.suppress(OSError):
            super().ensure_cache_path()


class _Files(_caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar = [_Locator]

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        if payload[0][1] == bitcode.KIND:
            target_context = bitcode.Loading(target_context)
        return super().rebuild(target_context, payload)


class _TwinFiles(_Files):
    """Files of the twin that Python calls: the name of a cached file does not show the wrapper."""

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"{super().get_filename_base(fullname, abiflags)}.python"


class _Cache(_caching.FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, which tells what is compiled."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            compile_events.tell(self._py_func.__name__)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        compile_events.tell(None)
        with contextlib.suppress(OSError):  # read-only or full: it is compiled next time
            super().save_overload(sig, data)


class _TwinCache(_Cache):
    _impl_class = _TwinFiles


class _NoCache(_caching.NullCache):  # type: ignore[misc]
    """In place of a cache if there is none."""

    def __init__(self, function: Any) -> None:
        self._name = function.__name__

    def load_overload(self, sig: Any, target_context: Any) -> None:
        del sig, target_context
        compile_events.tell(self._name)

    def save_overload(self, sig: Any, cres: Any) -> None:
        del sig, cres
        compile_events.tell(None)


# ---- decorators ---------------------------------------------------------------------------------

if _numba.config.DISABLE_JIT:
    # Interpreted, hashes wrap around with a warning that compiled code does not give.
    np.seterr(over="ignore")
    CACHE, NO_CACHE_REASON = None, "the compiler is off"
else:
    CACHE, NO_CACHE_REASON = cache_folder()
if CACHE is not None:
    _numba.config.CACHE_DIR = str(CACHE)


def _compiler(cache: Any = _Cache, **options: Any) -> Any:
    """Return a decorator: compile on first use, and keep it on disk if there is a place for it.

    No fastmath unless asked for: inf marks "no event". Without Numba's reference counting (_nrt):
    compiled code works on arrays that Python owns and never allocates, and counting references to
    them at every slice made the engine ten times slower. Without the C wrapper that Numba makes of
    every function and nobody calls.
    """
    decorate = _numba.njit(error_model="numpy", _nrt=False, no_cfunc_wrapper=True, **options)

    def compiled(function: Any) -> Any:
        dispatcher = decorate(function)
        if not _numba.config.DISABLE_JIT:
            dispatcher._cache = _NoCache(function) if CACHE is None else cache(function)
        return dispatcher

    return compiled


#: For functions that Python calls.
jit: Any = _compiler(**bitcode.options(bitcode.MachineCode))

#: The same for work that takes long: other threads run meanwhile.
unlocked: Any = _compiler(nogil=True, **bitcode.options(bitcode.MachineCode))

#: The same, pasted into its callers: for functions that take the many arrays of a fleet, since
#: handing those over costs more than the function's own work.
inlined: Any = _compiler(inline="always", **bitcode.options(bitcode.MachineCode))


class _Inner(_CPUDispatcher):  # type: ignore[misc]
    """A compiled function without machine code and without what a call from Python would jump to.

    Python calls a twin instead, compiled at the first such call.
    """

    def __call__(self, *args: Any, **named: Any) -> Any:
        if "twin" not in self.__dict__:
            self.twin = self.make_twin(self.py_func)
        return self.twin(*args, **named)


def _inner(part: Any, whole: Any, **options: Any) -> Any:
    """Return a decorator for functions that as a rule only compiled code calls.

    ``part``: what compiled code links; ``whole``: what Python calls (see ``bitcode``).
    """
    decorate = _compiler(no_cpython_wrapper=True, **options, **bitcode.options(part))
    twin = _compiler(_TwinCache, **options, **bitcode.options(whole))

    def compiled(function: Any) -> Any:
        dispatcher = decorate(function)
        if not _numba.config.DISABLE_JIT:
            dispatcher.__class__ = _Inner
            dispatcher.make_twin = twin
        return dispatcher

    return compiled


#: For functions that as a rule only compiled code calls: without machine code and the wrapper for
#: calls from Python they take half the time to compile. Python may call them all the same, and
#: then compiles them a second time.
inner: Any = _inner(bitcode.Bitcode, bitcode.MachineCode)

#: The same for dense arithmetic: sums may be reordered and products fused with them, so that loops
#: use the vector units. Infinities and NaN keep their meaning.
vectorised: Any = _inner(
    bitcode.DenseBitcode, bitcode.DenseMachineCode, fastmath={"contract", "reassoc"}
)

#: The same for numbers that are all finite: finding the largest of them vectorises only then.
vectorised_finite: Any = _inner(
    bitcode.DenseBitcode, bitcode.DenseMachineCode, fastmath={"contract", "reassoc", "nnan", "nsz"}
)


# ---- compiling in two processes -----------------------------------------------------------------


@contextlib.contextmanager
def helper(module: str) -> Iterator[Callable[[], int | None]]:
    """Let a helper process, ``python -m module``, fill the compile cache beside this process.

    Not if the module has called :func:`mark` already, or if there is no cache to fill. The helper
    may end long before this context does: call what this yields now and then, so that it does not
    stay as a zombie. That returns None as long as the helper runs. It is ended with the context.
    """
    if CACHE is None or (CACHE / module).exists() or not os.access(CACHE, os.W_OK):
        yield lambda: 0
        return
    process = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    _helpers.append(process)
    try:
        yield process.poll
    finally:
        _helpers.remove(process)
        process.terminate()
        process.wait()


#: Helpers of this process that run, or have ended lately.
_helpers: list[subprocess.Popen[bytes]] = []


def helps_with(module: str) -> bool:
    """Whether a helper is compiling something that has not been marked yet."""
    return (
        CACHE is not None
        and not (CACHE / module).exists()
        and any(process.poll() is None for process in _helpers)
    )


def wait_for(module: str) -> None:
    """Wait until a helper has marked something, or has ended."""
    while helps_with(module):
        time.sleep(0.05)


def mark(module: str) -> None:
    """Note in the cache that everything a helper compiles for a module is there."""
    if CACHE is not None:
        with contextlib.suppress(OSError):
            (CACHE / module).touch(mode=0o600)


# ---- constants ----------------------------------------------------------------------------------


def positions(names: Iterable[str]) -> Any:
    """Return a named tuple with the position of every name, constants to compiled code.

    For tables whose entries are numbers in compiled code: ``CODE = positions(...)``, ``CODE.name``.
    """
    names = list(names)
    return namedtuple("Positions", names)(*range(len(names)))
