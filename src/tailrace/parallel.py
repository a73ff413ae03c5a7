"""A pool of worker processes that ends cleanly when it is interrupted.

The processes run on this machine, unless :func:`running_on` names another executor. No result
depends on where the work is done.
"""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from contextvars import ContextVar
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from tailrace.errors import TailraceError

T = TypeVar("T")
R = TypeVar("R")

#: Makes the executor of a pool whose workers are not processes of this machine.
ExecutorFactory = Callable[[], Executor]
_factory: ContextVar[ExecutorFactory | None] = ContextVar("executor_factory", default=None)


@contextlib.contextmanager
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
        self._idle: list[_Worker] = []
        self._busy: dict[Any, _Worker] = {}

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, without waiting for tasks whose results nobody takes any more."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
        self._end(self._busy.values())
        self._busy.clear()
        for worker in self._idle:
            worker.connection.close()
        for worker in self._idle:
            worker.process.join()
        self._idle.clear()

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Yield (task, result) pairs as the tasks complete."""
        for number, result in self._results(work, tasks):
            yield tasks[number], result

    def map(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
        """Yield the results in the order of the tasks."""
        early: dict[int, R] = {}
        due = 0
        for number, result in self._results(work, tasks):
            early[number] = result
            while due in early:
                yield early.pop(due)
                due += 1

    def _results(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Yield the number of each task and its result as the tasks complete."""
        if self._factory is not None:
            return self._from_executor(self._factory, work, tasks)
        if self._jobs <= 1 or (len(tasks) <= 1 and not self._idle):
            return enumerate(map(work, tasks))
        return self._from_processes(work, tasks)

    def _from_executor(
        self, factory: ExecutorFactory, work: Callable[[T], R], tasks: Sequence[T]
    ) -> Iterator[tuple[int, R]]:
        if self._executor is None:
            self._executor = factory()
        waiting = {self._executor.submit(work, task): n for n, task in enumerate(tasks)}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()

    def _from_processes(
        self, work: Callable[[T], R], tasks: Sequence[T]
    ) -> Iterator[tuple[int, R]]:
        at_work: dict[Any, int] = {}
        left = iter(range(len(tasks)))
        try:
            for number in itertools.islice(left, self._jobs):
                at_work[self._give(work, tasks[number])] = number
            while at_work:
                for connection in wait_for(list(at_work)):
                    done, result = at_work.pop(connection), self._take(connection)
                    for number in itertools.islice(left, 1):
                        at_work[self._give(work, tasks[number])] = number
                    yield done, result
        finally:
            self._end([self._busy.pop(c) for c in at_work if c in self._busy])

    def _give(self, work: Callable[[Any], Any], task: object) -> Any:
        """Let a process do a task; returns where its result will come from."""
        message = ForkingPickler.dumps((work, task))
        worker = self._idle.pop() if self._idle else _Worker()
        self._busy[worker.connection] = worker
        try:
            worker.connection.send_bytes(message)
        except OSError:
            raise self._lost(worker) from None
        return worker.connection

    def _take(self, connection: Any) -> Any:
        """Return the result that a process sent, or raise what its task raised."""
        worker = self._busy[connection]
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            raise self._lost(worker) from None
        self._idle.append(self._busy.pop(connection))
        succeeded, result = pickle.loads(message)
        if not succeeded:
            raise result
        return result

    def _lost(self, worker: "_Worker") -> TailraceError:
        del self._busy[worker.connection]
        self._end([worker])
        return TailraceError(
            "a worker process died, perhaps for lack of memory; try fewer with --jobs"
        )

    @staticmethod
    def _end(workers: "Collection[_Worker]") -> None:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.connection.close()


class _Worker:
    """A process that does one task at a time and has a pipe of its own.

    ``concurrent.futures`` has one pipe for the results of all processes, and its parent waits
    forever for the rest of a result whose process was killed while writing it.
    """

    def __init__(self) -> None:
        # spawn: a fork would copy threads and locks of Numba and Arrow in any state.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        with theirs:
            self.process = context.Process(target=_do_tasks, args=(theirs,), daemon=True)
            self.process.start()


def _do_tasks(connection: Connection) -> None:
    """Do tasks until the parent closes the pipe or dies, or Ctrl-C ends this process silently.

    What a user's policy prints goes to standard error: standard output is for results.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stderr
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = connection.recv_bytes()
            connection.send_bytes(_answer(message))


def _answer(message: bytes) -> "bytes | memoryview":
    """Do one task; returns whether it succeeded, and its result or error."""
    try:
        work, task = pickle.loads(message)
        return ForkingPickler.dumps((True, work(task)))
    except BaseException as error:
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        try:
            answer = ForkingPickler.dumps((False, error))
            pickle.loads(answer)  # an error may be one that cannot be made again
        except Exception:
            return ForkingPickler.dumps((False, RuntimeError("".join(error.__notes__))))
        return answer


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
