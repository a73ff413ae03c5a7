"""What the router sets for its whole process."""

import contextlib
import gc
import resource

#: New objects before the collector looks at them; a request leaves no cycles behind.
GC_THRESHOLDS = (20_000, 20, 50)
#: Files left for logs, admin clients, probes and the scrape.
SPARE_FILES = 256


def settle_memory() -> None:
    """Keep the collector away from all that is loaded: looking through it takes 0.1 s each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


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
