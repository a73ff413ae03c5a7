"""Several router processes on one port: starts them, restarts one that dies, ends them together.

A worker that is stopped or hangs would still be given connections, which nobody answers. So each
reports that it is alive, and one that has not done so for a while is killed.

The supervisor serves nothing and runs no event loop and no thread, so it can fork at any time: a
worker begins with all code loaded and compiled, in milliseconds, and shares that memory.
"""

import contextlib
import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from tailrace.errors import TailraceError
from tailrace.router import listening
from tailrace.router.settings import address

#: A worker that lived for less is restarted after a pause that doubles each time, up to this, s.
SOON_S, LONGEST_PAUSE_S = 10.0, 5.0
_FIRST_PAUSE_S = 0.1
#: Time to end beyond the one for requests, s.
GRACE_S = 5.0
_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD))
#: Longest wait for a signal, s.
_POLL_S = 0.2
#: A worker that has not begun to report after so long hangs, s.
START_S = 120.0

_log = logging.getLogger("tailrace.router")


@dataclass(slots=True)
class SupervisorPipes:
    """File descriptors of the pipes between a worker and its supervisor, which owns them."""

    ready: int
    """The worker writes to it once it serves."""
    parent: int
    """Reaches its end when the supervisor is gone."""

    def report_ready(self) -> None:
        """Report to the supervisor that requests are served."""
        os.write(self.ready, b"1")


@dataclass(slots=True)
class _Worker:
    pid: int = 0  # 0: it does not run
    started_at: float = 0.0
    due_at: float = 0.0  # when it is started again
    failures: int = 0
    beat_at: float = 0.0  # as last reported
    silent_s: float = 0.0  # since then


class Supervisor:
    """Runs ``work(number, pipes)`` in each of ``count`` processes; it returns an exit code."""

    def __init__(
        self,
        count: int,
        work: Callable[[int, SupervisorPipes], int],
        *,
        drain_s: float | Callable[[], float],
        lost: Callable[[int], None] = lambda _: None,
        grace_s: float = GRACE_S,
        beat_at: Callable[[int], float] | None = None,
        watchdog_s: Callable[[], float] = lambda: math.inf,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        """``lost`` is called with the number of a worker that died, before it is restarted.

        ``drain_s``: how long workers may take to end; they are killed after ``grace_s`` more.
        ``beat_at``: returns when a worker has last reported that it is alive, 0: not yet. A worker
        that has been silent for ``watchdog_s`` is killed. ``idle`` is called between looking after
        the workers, at least every 0.2 s.
        """
        self._work = work
        self._drain_s = drain_s if callable(drain_s) else lambda: drain_s
        self._grace_s = grace_s
        self._lost = lost
        self._beat_at = beat_at
        self._watchdog_s = watchdog_s
        self._idle = idle
        self._watched_at = 0.0
        self._workers = [_Worker() for _ in range(count)]
        self._ready_in, self._ready_out = os.pipe()
        self._parent_in, self._parent_out = os.pipe()

    def run(self, started: Callable[[], None] = lambda: None) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP goes to a worker, which tells the others.

        Return the exit code.
        """
        gc.collect()
        gc.freeze()  # pages that no collection touches stay shared
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for number in range(len(self._workers)):
                self._start(number, before)
            code = self._until_ready()
            if code is not None:
                self._end(signal.SIGTERM)
                return code
            started()
            return self._watch(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # ---- workers --------------------------------------------------------------------------------

    def _start(self, number: int, mask: set[int | signal.Signals]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(number, mask)
        worker = self._workers[number]
        worker.pid, worker.started_at, worker.due_at = pid, time.monotonic(), 0.0
        worker.beat_at = worker.silent_s = 0.0

    def _become(self, number: int, mask: set[int | signal.Signals]) -> NoReturn:
        """Run a worker in the new process; the supervisor's code must not run here after."""
        code = 1
        try:
            os.close(self._ready_in)
            os.close(self._parent_out)
            # Ctrl-C reaches all processes of a terminal; only the supervisor acts on it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = self._work(number, SupervisorPipes(self._ready_out, self._parent_in))
        except TailraceError as error:
            print(f"error: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _until_ready(self) -> int | None:
        """Wait until all serve; return an exit code if one ends before."""
        ready = 0
        while ready < len(self._workers):
            found, _, _ = select.select([self._ready_in], [], [], _POLL_S)
            if found:
                ready += len(os.read(self._ready_in, 64))
            elif self._reap():
                return 1
            # SIGHUP stays pending until all can take it.
            received = signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, 0)
            if received is not None:
                return 130 if received.si_signo == signal.SIGINT else 0
        return None

    def _reap(self) -> list[int]:
        """Collect workers that have ended; return their numbers."""
        ended = []
        for number, worker in enumerate(self._workers):
            if worker.pid and os.waitpid(worker.pid, os.WNOHANG)[0]:
                worker.pid = 0
                ended.append(number)
        return ended

    def _watch(self, mask: set[int | signal.Signals]) -> int:
        while True:
            received = signal.sigtimedwait(_SIGNALS, _POLL_S)
            what = received.si_signo if received is not None else 0
            if what in (signal.SIGTERM, signal.SIGINT):
                self._end(signal.SIGTERM)
                return 130 if what == signal.SIGINT else 0
            if what == signal.SIGHUP:
                self._signal_one(signal.SIGHUP)
            self._idle()
            self._kill_silent()
            now = time.monotonic()
            for number in self._reap():
                self._died(number, now)
            for number, worker in enumerate(self._workers):
                if not worker.pid and worker.due_at <= now:
                    self._start(number, mask)
            while select.select([self._ready_in], [], [], 0)[0]:
                os.read(self._ready_in, 64)

    def _died(self, number: int, now: float) -> None:
        worker = self._workers[number]
        worker.failures = worker.failures + 1 if now - worker.started_at < SOON_S else 0
        pause_s = 0.0
        if worker.failures:
            pause_s = min(_FIRST_PAUSE_S * 2**worker.failures, LONGEST_PAUSE_S)
        worker.due_at = now + pause_s
        self._lost(number)
        _log.error("a worker has ended and is started again", extra={"worker": number})

    def _kill_silent(self) -> None:
        """Kill workers that have been silent for too long."""
        now = time.monotonic()
        # If this process was stopped itself, they may have been too.
        passed_s = min(now - self._watched_at, 2 * _POLL_S)
        self._watched_at = now
        if self._beat_at is None:
            return
        for number, worker in enumerate(self._workers):
            beat_at = self._beat_at(number)
            if beat_at != worker.beat_at:
                worker.beat_at, worker.silent_s = beat_at, 0.0
                continue
            worker.silent_s += passed_s
            limit_s = self._watchdog_s() if beat_at else max(START_S, self._watchdog_s())
            if worker.pid and worker.silent_s > limit_s:
                _log.error(
                    "a worker does nothing and is killed",
                    extra={"worker": number, "silent_s": worker.silent_s},
                )
                worker.silent_s = 0.0
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    def _signal_one(self, what: signal.Signals) -> None:
        """Send a signal to the worker that was heard of last."""
        running = [worker for worker in self._workers if worker.pid]
        if running:
            worker = min(running, key=lambda worker: worker.silent_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, what)

    def _signal_all(self, what: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, what)

    def _end(self, what: signal.Signals) -> None:
        """Let all workers finish; a second signal makes them abort."""
        self._signal_all(what)
        limit = time.monotonic() + self._drain_s() + self._grace_s
        while any(worker.pid for worker in self._workers):
            if time.monotonic() > limit:
                self._signal_all(signal.SIGKILL)
            self._kill_silent()
            received = signal.sigtimedwait(_SIGNALS, _POLL_S)
            if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
                self._signal_all(what)
            self._reap()


@dataclass(frozen=True, slots=True)
class ReservedPort:
    """A port that is kept for workers to share, on all addresses of a host."""

    sockets: list[socket.socket]

    def listen(self) -> None:
        """Begin to accept connections, as a worker would."""
        for each in self.sockets:
            each.listen()

    def close(self) -> None:
        """Give it up."""
        listening.close(self.sockets)


def reserve(where: str) -> tuple[str, ReservedPort]:
    """Keep a port for workers to share; return host:port, the port chosen if it was 0.

    Raise if something listens there: a port that may be shared would be taken silently. Nothing
    listens on what is returned, so it gets no connections.
    """
    alone = listening.listen(where)
    host, port = address(where)[0], alone[0].getsockname()[1]
    listening.close(alone)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return where, ReservedPort(listening.bind(where, reuse_port=True))
