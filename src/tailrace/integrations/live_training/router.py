"""A live router to learn from, in a process of its own: it never waits for the learner.

Over a pipe it gets weights and sends roll-outs. It ends when it is told to, or when this process
does, and lets the requests under way end first.
"""

import multiprocessing
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.integrations.live_training.messages import (
    ERROR,
    LISTENING,
    RECORD,
    RECORDED,
    ROLLOUT,
    STOP,
    STOPPED,
    USE,
)
from tailrace.learn.improve.recorder import Recording
from tailrace.learn.improve.rollout import Rollout

if TYPE_CHECKING:
    from tailrace.router.serve_settings import ServeSettings

Params = NDArray[np.float64]

#: What `tailrace serve` needs besides.
MODULES = ("httptools", "orjson", "prometheus_client", "uvloop", "xxhash")
#: Where the router finds its policy: an object of that module (policy/registry.py).
POLICY = "tailrace.integrations.live_training.process:RECORDER"
#: How much longer than its drain the router may take to end, s.
GRACE_S = 10.0


def read_settings(path: Path) -> "ServeSettings":
    """Return the settings of a router whose policy is the one that learns."""
    for module in MODULES:
        if find_spec(module) is None:
            raise TailraceError(f"a live router needs {module}: pip install 'tailrace[serve]'")
    from tailrace.router.serve_settings import load

    return load(path, {"routing": {"policy": POLICY}})


class LiveRouter:
    """The router's process, as the learner sees it."""

    def __init__(self, serve: Path, recording: Recording, params: Params) -> None:
        """Start it with a packed network [p]; returns when it listens."""
        from tailrace.integrations.live_training.process import serve as body

        self._settings = read_settings(serve)
        self._decisions = recording.decisions
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # A daemon is asked to end (SIGTERM) if this process ends without having closed it.
        self._process = context.Process(
            target=body, args=(theirs, self._settings, recording, params), daemon=True
        )
        self._process.start()
        theirs.close()
        self.last: dict[str, Any] = {}
        """What the router said of itself when it had stopped."""
        try:
            self.address: tuple[str, int] = self._hear(LISTENING)
        except BaseException:
            self._end()
            raise

    def roll_out(
        self,
        params: Params,
        temperature: float,
        epsilon: float,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> Rollout:
        """Let the router decide with this network [p] until a roll-out is complete.

        ``progress`` is told how many decisions it has so far, and how many it will have.
        """
        self._say(RECORD, params, temperature, epsilon)
        rollout: Rollout = self._hear(ROLLOUT, lambda done: progress(done, self._decisions))
        return rollout

    def use(self, params: Params) -> None:
        """Let it go on with other weights [p], without recording and without trying things out."""
        self._say(USE, params)

    def close(self) -> None:
        """End it once the requests under way have ended."""
        if self._connection.closed:
            return
        try:
            self._say(STOP)
            self.last = self._hear(STOPPED)
        except TailraceError:
            pass  # it has ended before
        finally:
            self._end()

    def _end(self) -> None:
        self._connection.close()
        self._process.join(GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _say(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise TailraceError("the live router has ended") from None

    def _hear(self, wanted: str, recorded: Callable[[int], None] = lambda _: None) -> Any:
        """Wait for news of a kind."""
        limit_s = self._settings.drain_s + GRACE_S if wanted == STOPPED else None
        while True:
            try:
                if not self._connection.poll(limit_s):
                    raise TailraceError("the live router does not end")
                what, value = self._connection.recv()
            except (EOFError, OSError):
                raise TailraceError("the live router has died") from None
            if what == wanted:
                return value
            if what == RECORDED:
                recorded(value)
            elif what == ERROR:
                raise TailraceError(value)
            elif what == STOPPED:
                raise TailraceError("the live router was stopped")
