"""Work done side by side by several processes, ended cleanly when it is interrupted.

The processes are those of this machine, unless :func:`working_on` says otherwise; what is done with
them does not depend on where they are.
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

#: Makes the workers of a crew that does not work on this machine.
Place = Callable[[], Executor]
_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def working_on(place: Place | None) -> Iterator[None]:
    """Let all crews begun herein work at another place, with as many workers as it has."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def cores() -> int:
    """Cores this process may use; where the system cannot say (not Linux), all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew:
    """Processes that stay for several rounds of work; with one job the work is done here.

    ``work`` must be a function at the top of a module, so that a fresh process finds it.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self._jobs = jobs or cores()
        self._place = _place.get()
        self._pool: Executor | None = None
        self._others: set[multiprocessing.process.BaseProcess] = set()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, at_once: bool = False) -> None:
        """Send the processes home; at once, if nobody wants the results they are at."""
        if self._pool is None:
            return
        if at_once:
            for worker in set(multiprocessing.active_children()) - self._others:
                worker.terminate()
        self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Yield tasks with their results as they come."""
        if self._works_here(tasks):
            for task in tasks:
                yield task, work(task)
            return
        pool = self._start()
        try:
            waiting = {pool.submit(work, task): task for task in tasks}
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
        if self._place is not None:
            return False
        return self._jobs <= 1 or (len(tasks) <= 1 and self._pool is None)

    def _start(self) -> Executor:
        if self._pool is None and self._place is not None:
            self._pool = self._place()
        if self._pool is None:
            # spawn: a fork would copy threads and locks of Numba and Arrow in any state.
            context = multiprocessing.get_context("spawn")
            self._others = set(multiprocessing.active_children())
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=_start_worker
            )
        return self._pool


def _worker_died() -> TailraceError:
    return TailraceError("a worker process died, perhaps for lack of memory; try fewer with --jobs")


def _start_worker() -> None:
    """Let Ctrl-C end a worker at once and silently, and the parent's death, however it came.

    What a user's policy prints goes to standard error: the other belongs to results.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stderr
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
