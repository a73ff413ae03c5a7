"""The one decorator of compiled code, and a compile cache that cannot go stale.

Numba's own cache looks only at the file a function stands in, not at the helpers it calls, so the
cache folder is named by a hash of the sources of all packages with compiled code. Import ``jit``
from here.
"""

import hashlib
import os
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numba
import numpy as np

_PACKAGE = Path(__file__).parent
#: Where compiled functions, and the types and constants they use, may stand.
_KERNEL_SOURCES = (
    *(
        "compiled.py",
        "net/chunk_kernel.py",
        "net/framing.py",
        "view/*.py",
        "policy/**/*.py",
        "sim/*.py",
    ),
    *("learn/kernels.py", "learn/improve/fused_kernels.py", "learn/improve/rollout.py"),
    *("router/access/accounts.py", "router/access/atomic.py", "router/state/kernels.py"),
    *("router/intake/fast_body.py", "router/intake/hashing.py", "router/intake/json_scan.py"),
    "router/intake/large_body.py",
    "router/intake/model_field.py",
)


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(path for pattern in _KERNEL_SOURCES for path in _PACKAGE.glob(pattern)):
        digest.update(source.relative_to(_PACKAGE).as_posix().encode())
        digest.update(source.read_bytes())
    # Code compiled with bounds checks must not be mixed with code compiled without.
    digest.update(os.environ.get("NUMBA_BOUNDSCHECK", "").encode())
    base = os.environ.get("TAILRACE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "tailrace" / f"kernels-{digest.hexdigest()[:16]}"


_numba: Any = numba  # its options below are not in its type hints

if _numba.config.DISABLE_JIT:
    # Interpreted, hashes wrap around with a warning that compiled code does not give.
    np.seterr(over="ignore")

if "NUMBA_CACHE_DIR" not in os.environ:
    _numba.config.CACHE_DIR = str(_cache_folder())

#: Compile to machine code on first use and keep it on disk. No fastmath: inf marks "no event".
#: Without Numba's reference counting (_nrt): compiled code works on arrays that Python owns and
#: never allocates, and counting references to them at every slice made the engine ten times
#: slower.
jit: Any = _numba.njit(cache=True, error_model="numpy", _nrt=False)

#: The same for work that takes long: other threads run meanwhile.
unlocked: Any = _numba.njit(cache=True, error_model="numpy", _nrt=False, nogil=True)

#: The same, pasted into its callers: for functions that take the many arrays of a fleet, since
#: handing those over costs more than the function's own work.
inlined: Any = _numba.njit(cache=True, error_model="numpy", _nrt=False, inline="always")

#: For dense arithmetic: sums may be reordered and products fused with them, so that loops use the
#: vector units. Infinities and NaN keep their meaning.
vectorised: Any = _numba.njit(
    cache=True, error_model="numpy", _nrt=False, fastmath={"contract", "reassoc"}
)

#: The same for numbers that are all finite: finding the largest of them vectorises only then.
vectorised_finite: Any = _numba.njit(
    cache=True, error_model="numpy", _nrt=False, fastmath={"contract", "reassoc", "nnan", "nsz"}
)


def positions(names: Iterable[str]) -> Any:
    """Return a named tuple with the position of every name, constants to compiled code.

    For tables whose entries are numbers in compiled code: ``CODE = positions(...)``, ``CODE.name``.
    """
    names = list(names)
    return namedtuple("Positions", names)(*range(len(names)))
