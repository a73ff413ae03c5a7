"""Workers on a Ray cluster, behind the interface of any pool of processes.

A task is a Ray task: where its worker dies, Ray starts another one and does the task again. Tasks
depend on nothing but what is in them, so the result is the same.
"""

import hashlib
import io
import os
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.integrations.ray import require
from tailrace.parallel import ExecutorFactory, cores

R = TypeVar("R")

#: Arrays from this size on, bytes, are put into Ray's object store, and so many are kept there: all
#: tasks of an update have the same network, which is to travel to each machine once.
LARGE, KEPT = 65_536, 8
#: How often a task is done again whose worker died.
RETRIES = 3
#: Name before the address on the command line.
SCHEME = "ray"
#: Ray's settings, unless the user has set them: it reports to nobody, and has time to start.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "60"}
_PACKAGE = Path(__file__).parents[2]
#: Sources on which the result of a task depends.
_SOURCES = ("*.py", "env", "evaluate", "learn", "policy", "sim", "view", "workload")


def executor_factory(workers: str, jobs: int | None = None) -> ExecutorFactory | None:
    """Return the factory that ``--workers`` names: "local" (None), "ray" or "ray:ADDRESS".

    ``jobs``: most tasks at once; default: one per CPU of the Ray cluster.
    """
    if workers == "local":
        return None
    address = parse_workers(workers, "--workers ray")
    return lambda: RayPool(address, jobs)


def parse_workers(workers: str, what: str) -> str | None:
    """Return the address in "ray:ADDRESS", None for "ray"; raise unless ``what`` can use Ray."""
    scheme, colon, address = workers.partition(":")
    if scheme != SCHEME or (colon and not address):
        raise TailraceError(
            f"--workers must be local, ray (started here) or ray:ADDRESS, got '{workers}'"
        )
    require(what)
    return address or None


def connect(address: str | None, jobs: int | None = None) -> bool:
    """Join the Ray cluster at an address, or start one on this machine; False: it was there.

    One started here has ``jobs`` CPUs (default: this machine's) and is gone with this process.
    """
    import ray

    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"logging_level": "warning", "log_to_driver": True}
    if address is None:
        # On this machine only, as far as Ray lets itself be told: see docs/ray.md.
        options |= {"address": "local", "include_dashboard": False, "num_cpus": jobs or cores()}
        options |= {"_node_ip_address": "127.0.0.1"}
    else:
        options["address"] = address
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray.init(**options)
    except Exception as error:  # some of Ray's own are no more than that
        where = "on this machine" if address is None else f"at {address}"
        raise TailraceError(f"cannot work with Ray {where}: {error}") from None
    return True


class RayPool(ThreadPoolExecutor):
    """A pool whose workers are elsewhere: each of its threads waits for one Ray task at a time."""

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        """Join or start a cluster; ``jobs``: most tasks at once, default: one per CPU of it."""
        import ray

        self._started_ray = connect(address, jobs)
        found = int(ray.cluster_resources().get("CPU", 0))
        super().__init__(max(1, jobs or found), thread_name_prefix="ray")
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(perform)
        self._lock = threading.Lock()
        self._closing = False
        self._under_way: set[Any] = set()
        self._stored: OrderedDict[Any, Any] = OrderedDict()

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Do ``fn`` with these arguments on a worker."""
        return super().submit(self._do, fn, args, kwargs)

    def _do(self, fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        import ray
        from ray.exceptions import RayError, RayTaskError

        # As bytes of our own: Ray would hand out arrays that nobody may write to, which compiled
        # code takes for another type and torch warns of.
        work, arrays = packed((fn, args, kwargs))
        keys = [_content(array) for array in arrays]
        with self._lock:
            if self._closing:
                raise TailraceError("the work was stopped")
            stored = [self._store(*both) for both in zip(keys, arrays, strict=True)]
            ref = self._task.remote(fingerprint(), work, *stored)
            self._under_way.add(ref)
        try:
            found: R = pickle.loads(ray.get(ref))
        except RayTaskError as error:
            raise (error.cause or error) from error
        except RayError as error:
            raise TailraceError(
                f"a task was given up: its workers died {RETRIES + 1} times, perhaps for lack of "
                f"memory, or the cluster is gone ({type(error).__name__})"
            ) from error
        finally:
            with self._lock:
                self._under_way.discard(ref)
        return found

    def _store(self, key: Any, array: NDArray[Any]) -> Any:
        """Return the reference of an array in the object store, by its content."""
        import ray

        if key not in self._stored:
            self._stored[key] = ray.put(array)
            if len(self._stored) > KEPT:
                self._stored.popitem(last=False)
        self._stored.move_to_end(key)
        return self._stored[key]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop what is under way, which nobody can want any more, and leave the cluster."""
        import ray

        with self._lock:
            self._closing = True
            stopped = list(self._under_way)
        if ray.is_initialized():
            for ref in stopped:
                ray.cancel(ref, force=True)
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._started_ray:
            self._started_ray = False
            ray.shutdown()


class _Packer(pickle.Pickler):
    """Pickles all but large arrays, which it puts aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arrays: list[NDArray[Any]] = []

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of an array that is put aside."""
        if type(obj) is not np.ndarray or obj.nbytes < LARGE or obj.dtype.hasobject:
            return None
        self.arrays.append(obj)
        return len(self.arrays) - 1


class _Unpacker(pickle.Unpickler):
    """Puts them back, each a copy that may be written to."""

    def __init__(self, work: bytes, arrays: Sequence[NDArray[Any]]) -> None:
        super().__init__(io.BytesIO(work))
        self._arrays = arrays

    def persistent_load(self, pid: int) -> NDArray[Any]:
        """Return the array of a number."""
        return self._arrays[pid].copy(order="K")


def packed(value: Any) -> tuple[bytes, list[NDArray[Any]]]:
    """Return a value as bytes, and the large arrays that are not in them."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.arrays


def _content(array: NDArray[Any]) -> tuple[Any, ...]:
    """What tells an array from others: not its identity, since it may be changed in place."""
    digest = hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data).digest()
    return array.dtype.str, array.shape, array.flags.f_contiguous, digest


def perform(theirs: str, work: bytes, *arrays: NDArray[Any]) -> bytes:
    """Do a packed task on a worker; ``theirs`` is the fingerprint of who wants it."""
    if theirs != fingerprint():
        raise TailraceError(
            "the workers on Ray run another Tailrace than this machine, or other versions of "
            f"Python, NumPy or Numba ({fingerprint()} instead of {theirs}): install the same "
            "everywhere, or results would depend on where the work is done"
        )
    # What a user's policy prints goes to standard error: the other belongs to results.
    with redirect_stdout(sys.stderr):
        fn, args, kwargs = _Unpacker(work, arrays).load()
        return pickle.dumps(fn(*args, **kwargs), pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Return what results depend on besides a task: a digest of the sources, and versions."""
    digest = hashlib.sha256()
    roots = [root for pattern in _SOURCES for root in _PACKAGE.glob(pattern)]
    for path in sorted(p for r in roots for p in (r.rglob("*.py") if r.is_dir() else [r])):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    python = ".".join(map(str, sys.version_info[:3]))
    versions = " ".join(f"{name} {version(name)}" for name in ("numpy", "numba"))
    return f"sources {digest.hexdigest()[:12]}, Python {python}, {versions}"
