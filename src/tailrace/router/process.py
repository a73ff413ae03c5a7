"""What the router sets for its whole process."""

import contextlib
import gc
import resource

#: New objects before the collector looks at them; a request leaves no cycles behind.
GC_THRESHOLDS = (20_000, 20, 50)


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
