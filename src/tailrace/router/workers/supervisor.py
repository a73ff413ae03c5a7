"""Several router processes on one port: starts them, restarts one that dies, ends them together.

The supervisor serves nothing and runs no event loop and no thread, so it can fork at any time: a
worker begins with all code loaded and compiled, in milliseconds, and shares that memory.
"""

import contextlib
import gc
import logging
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
from tailrace.router.settings import address

#: A worker that lived for less is restarted after a pause that doubles each time, up to this, s.
SOON_S, LONGEST_PAUSE_S = 10.0, 5.0
_FIRST_PAUSE_S = 0.1
#: Beyond the time that requests have to end in, s.
_GRACE_S = 5.0
_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD))
#: How often it is looked whether anything is due, s.
_LOOK_S = 0.2

_log = logging.getLogger("tailrace.router")


@dataclass(slots=True)
class Lines:
    """What ties a worker to its supervisor: file descriptors, to be closed by nobody else."""

    ready: int
    """Written to once it serves."""
    parent: int
    """At its end as soon as the supervisor is gone."""

    def say_ready(self) -> None:
        """Tell the supervisor that requests are served."""
        os.write(self.ready, b"1")


@dataclass(slots=True)
class _Worker:
    pid: int = 0  # 0: it does not run
    started_at: float = 0.0
    due_at: float = 0.0  # when it is started again
    failures: int = 0


class Supervisor:
    """Runs ``work(number, lines)`` in each of ``count`` processes; it returns an exit code."""

    def __init__(
        self,
        count: int,
        work: Callable[[int, Lines], int],
        *,
        drain_s: float,
        lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``lost`` is told the number of a worker that has died, before it is started again."""
        self._work = work
        self._drain_s = drain_s
        self._lost = lost
        self._workers = [_Worker() for _ in range(count)]
        self._ready_in, self._ready_out = os.pipe()
        self._parent_in, self._parent_out = os.pipe()

    def run(self, started: Callable[[], None] = lambda: None) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP goes to all workers. Return the exit code."""
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

    def _become(self, number: int, mask: set[int | signal.Signals]) -> NoReturn:
        """Be a worker, in the new process; nothing of the supervisor's may run here afterwards."""
        code = 1
        try:
            os.close(self._ready_in)
            os.close(self._parent_out)
            # Ctrl-C reaches all processes of a terminal; what it means is the supervisor's to say.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = self._work(number, Lines(self._ready_out, self._parent_in))
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
        """Wait until all serve; return an exit code if one does not come so far."""
        ready = 0
        while ready < len(self._workers):
            found, _, _ = select.select([self._ready_in], [], [], _LOOK_S)
            if found:
                ready += len(os.read(self._ready_in, 64))
            elif self._reap():
                return 1
            received = signal.sigtimedwait(_SIGNALS - {signal.SIGCHLD}, 0)
            if received is not None and received.si_signo != signal.SIGHUP:
                return 130 if received.si_signo == signal.SIGINT else 0
        return None

    def _reap(self) -> list[int]:
        """Take note of workers that have ended; return their numbers."""
        ended = []
        for number, worker in enumerate(self._workers):
            if worker.pid and os.waitpid(worker.pid, os.WNOHANG)[0]:
                worker.pid = 0
                ended.append(number)
        return ended

    def _watch(self, mask: set[int | signal.Signals]) -> int:
        while True:
            received = signal.sigtimedwait(_SIGNALS, _LOOK_S)
            what = received.si_signo if received is not None else 0
            if what in (signal.SIGTERM, signal.SIGINT):
                self._end(signal.SIGTERM)
                return 130 if what == signal.SIGINT else 0
            if what == signal.SIGHUP:
                self._tell(signal.SIGHUP)
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

    def _tell(self, what: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, what)

    def _end(self, what: signal.Signals) -> None:
        """Let all workers finish; being asked again makes them hurry."""
        self._tell(what)
        limit = time.monotonic() + self._drain_s + _GRACE_S
        while any(worker.pid for worker in self._workers):
            if time.monotonic() > limit:
                self._tell(signal.SIGKILL)
            received = signal.sigtimedwait(_SIGNALS, _LOOK_S)
            if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
                self._tell(what)
            self._reap()


def reserve(where: str) -> tuple[str, socket.socket]:
    """Keep a port for workers to share; return host:port, the port chosen if it was 0.

    Raise if something listens there: a port that may be shared would be taken silently.
    """
    host, port = address(where)
    family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind, proto) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(target)
            alone.listen(1)
            target = alone.getsockname()
        kept = socket.socket(family, kind, proto)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(target)
    except OSError as error:
        why = error.strerror or str(error)
        raise TailraceError(f"cannot listen on {where}: {why}; choose another port") from None
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{target[1]}", kept
