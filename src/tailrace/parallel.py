"""A pool of worker processes that ends cleanly when it is interrupted.

The processes run on this machine, unless :func:`running_on` names another executor. No result
depends on where the work is done.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import wait as wait_for
from typing import TypeVar

from tailrace.errors import TailraceError

T = TypeVar("T")
R = TypeVar("R")

#: Makes the executor of a pool whose workers are not processes of this machine.
ExecutorFactory = Callable[[], Executor]
_factory: ContextVar[ExecutorFactory | None] = ContextVar("executor_factory", default=None)


@contextmanager
def running_on(factory: ExecutorFactory | None) -> Iterator[None]:
    """Run every worker pool created in this block on another executor; None: this machine.

    The executor decides how many workers there are, not the ``jobs`` of the pool.
    """
    token = _factory.set(factory)
    try:
        yield
    finally:
        _factory.reset(token)


def cores() -> int:
    """Number of cores this process may use; all cores where the system has no affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerPool:
    """Worker processes that are kept for several batches of tasks.

    The processes start with the first batch. With ``jobs=1``, or for a single task before they have
    started, the work is done in the calling process. ``work`` must be a function at the top level
    of a module, so that a new process can import it.
    """

    def __init__(self, jobs: int | None = None) -> None:
        """Prepare for ``jobs`` processes; default: one per core."""
        self._jobs = jobs or cores()
        self._factory = _factory.get()
        self._executor: Executor | None = None
        self._others: set[multiprocessing.process.BaseProcess] = set()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, at_once: bool = False) -> None:
        """End the processes after their current tasks, or without waiting for those."""
        if self._executor is None:
            return
        if at_once:
            for worker in set(multiprocessing.active_children()) - self._others:
                worker.terminate()
        self._executor.shutdown(cancel_futures=True)
        self._executor = None

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Yield (task, result) pairs as the tasks complete."""
        if self._works_here(tasks):
            for task in tasks:
                yield task, work(task)
            return
        executor = self._start()
        try:
            waiting = {executor.submit(work, task): task for task in tasks}
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise _worker_died() from None

    def map(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
        """Yield the results in the order of the tasks."""
        if self._works_here(tasks):
            yield from map(work, tasks)
            return
        try:
            yield from self._start().map(work, tasks)
        except BrokenProcessPool:
            raise _worker_died() from None

    def _works_here(self, tasks: Sequence[T]) -> bool:
        if self._factory is not None:
            return False
        return self._jobs <= 1 or (len(tasks) <= 1 and self._executor is None)

    def _start(self) -> Executor:
        if self._executor is None and self._factory is not None:
            self._executor = self._factory()
        if self._executor is None:
            # spawn: a fork would copy threads and locks of Numba and Arrow in any state.
            context = multiprocessing.get_context("spawn")
            self._others = set(multiprocessing.active_children())
            self._executor = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=_start_worker
            )
        return self._executor


def _worker_died() -> TailraceError:
    return TailraceError("a worker process died, perhaps for lack of memory; try fewer with --jobs")


def _start_worker() -> None:
    """Make a worker end silently on Ctrl-C, and when its parent dies for whatever reason.

    What a user's policy prints goes to standard error: standard output is for results.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stderr
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
