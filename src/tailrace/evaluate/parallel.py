"""Work done side by side by several processes, ended cleanly when it is interrupted."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from tailrace.errors import TailraceError

T = TypeVar("T")
R = TypeVar("R")


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
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[multiprocessing.process.BaseProcess] = set()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:
            # Leaving the pool waits for its workers, so end them: nobody wants their results.
            for worker in set(multiprocessing.active_children()) - self._others:
                worker.terminate()
        self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Yield tasks with their results as they come."""
        if self._jobs <= 1 or (len(tasks) <= 1 and self._pool is None):
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
            raise TailraceError(
                "a worker process died, perhaps for lack of memory; try fewer with --jobs"
            ) from None

    def map(self, work: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        """Return the results in the order of the tasks."""
        found = {id(task): result for task, result in self.run(work, tasks)}
        return [found[id(task)] for task in tasks]

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # spawn: a fork would copy threads and locks of Numba and Arrow in any state.
            context = multiprocessing.get_context("spawn")
            self._others = set(multiprocessing.active_children())
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=_start_worker
            )
        return self._pool


def _start_worker() -> None:
    """Let Ctrl-C end a worker at once and silently; the parent does the talking.

    What a user's policy prints goes to standard error: the other belongs to results.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stderr
