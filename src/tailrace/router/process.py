"""What the router sets for its whole process."""

import contextlib
import ctypes
import gc
import resource
import sys

#: New objects before the collector looks at them; a request leaves no cycles behind.
GC_THRESHOLDS = (20_000, 20, 50)
#: How soon a thread that reads a large body leaves the interpreter to the event loop, s.
SWITCH_S = 0.001
#: Files left for logs, admin clients, probes and the scrape.
SPARE_FILES = 256
#: Bytes of bodies after whose end free memory is returned to the system.
FREED_BYTES = 16 * 2**20

trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def settle() -> None:
    """Keep long pauses away from the event loop, once everything is loaded.

    Looking through all that is loaded takes the collector 0.1 s each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)


def return_memory() -> None:
    """Return free memory to the system, where the C library keeps it for itself (glibc).

    Bodies of which each is smaller than 32 MB leave holes between what is still in use.
    """
    if trim is not None:
        trim(0)


def raise_file_limit() -> None:
    """Allow as many connections as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_clients() -> int:
    """Return how many clients the limit of files allows, each with a connection to a backend."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max(1, (limit - min(SPARE_FILES, limit // 4)) // 2)
