"""The process of a live router that is learnt from: the router itself, and a recorder in it.

Two threads of its own read and write the pipe to the learner, so the event loop never waits for
it. New weights take effect between two decisions.
"""

import asyncio
import contextlib
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.integrations.live_training import messages
from tailrace.learn.improve.recorder import Recorder, Recording, warm_up
from tailrace.learn.improve.rollout import Rollout
from tailrace.router.app import Router
from tailrace.router.decide.chooser import Decision
from tailrace.router.observe import logs, status
from tailrace.router.observe.events import EventSink
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.state.attempt import Attempt
from tailrace.view.records import View

Params = NDArray[np.float64]

#: The policy of this process's router, which finds it by its name (live.POLICY).
RECORDER: "LiveRecorder | None" = None
#: How often the learner is told how far the roll-out is, s.
REPORT_S = 0.5
#: Ends of a request that are not the router's fault.
_NOT_LOST = ("done", "client_gone", "rejected")


class LiveRecorder(Recorder):
    """A recorder that is told how each request ended, which a policy's hooks do not say.

    A request that failed may be sent again. One that is not, within ``patience_s``, is lost.
    """

    def __init__(
        self,
        recording: Recording,
        params: Params,
        done: Callable[[Rollout], None] = lambda _: None,
        patience_s: float = np.inf,
    ) -> None:
        self._failed_at: dict[int, float] = {}
        self._patience_s = patience_s
        super().__init__(recording, params, done)

    def __len__(self) -> int:
        """Requests that have not ended, as far as it knows."""
        return len(self._ledger)

    def reset(self, n_replicas: int, seed: int) -> None:
        """Forget all requests."""
        super().reset(n_replicas, seed)
        self._failed_at.clear()

    def scores(self, view: View) -> NDArray[np.float64]:
        """Return scores [n]; a request that failed before has come back."""
        now = float(view.request["now"])
        self._failed_at.pop(int(view.request["id"]), None)
        for number, at in list(self._failed_at.items()):
            if now - at > self._patience_s:
                del self._failed_at[number]
                self._ledger.ended(number, now, lost=True)
        return super().scores(view)

    def is_learnt_from(self, view: View) -> bool:
        """Whether a request costs a server any time: the router counts /tokenize as one token."""
        return int(view.request["prompt_tokens"]) > 1

    def finished(self, replica: int, request_id: int, now: float) -> None:
        """Wait for :meth:`over`, which knows when the first token of a whole answer was there."""

    def failed(self, replica: int, request_id: int, now: float) -> None:  # noqa: ARG002
        """Wait for :meth:`over`, or for its return."""
        self._failed_at[request_id] = now

    def over(self, attempt: Attempt, outcome: str) -> None:
        """A request has ended for good."""
        number = attempt.arrival.id
        self._failed_at.pop(number, None)
        at = attempt.sent_at if attempt.last_at is None else attempt.last_at
        if attempt.first_at is not None:
            self._ledger.first_token(number, attempt.first_at)
        self._ledger.ended(number, at, lost=outcome not in _NOT_LOST)


class OutcomeSink:
    """Sink that passes all events on, and the ends of requests to a recorder."""

    def __init__(self, events: EventSink, recorder: LiveRecorder) -> None:
        self._events, self._recorder = events, recorder

    def request_done(
        self, attempt: Attempt | None, status: int, outcome: str, path_kind: str, client: str = ""
    ) -> None:
        """A request is over."""
        if attempt is not None:
            self._recorder.over(attempt, outcome)
        self._events.request_done(attempt, status, outcome, path_kind, client)

    def decided(self, decision: Decision) -> None:
        """A replica was chosen."""
        self._events.decided(decision)

    def retried(self, replica: int, cause: str) -> None:
        """A request is tried elsewhere."""
        self._events.retried(replica, cause)

    def shed(self, cause: str) -> None:
        """A request was sent away."""
        self._events.shed(cause)


def serve(
    connection: Connection, settings: ServeSettings, recording: Recording, params: Params
) -> None:
    """Route until the learner says stop or has ended; the body of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's business
    logs.to_stderr("warning" if settings.log.level in ("debug", "info") else settings.log.level)
    import uvloop

    try:
        process = _Process(connection, settings, recording, params)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(process.run())
    except TailraceError as error:
        with contextlib.suppress(OSError):
            connection.send((messages.ERROR, str(error)))


class _Process:
    def __init__(
        self, connection: Connection, settings: ServeSettings, recording: Recording, params: Params
    ) -> None:
        global RECORDER
        self._connection = connection
        self._news: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        warm_up(recording, params)
        patience_s = settings.admission.max_wait_s + 1.0
        self._recorder = RECORDER = LiveRecorder(recording, params, self._recorded, patience_s)
        self._router = Router(settings)
        self._router.events = OutcomeSink(self._router.events, self._recorder)
        self._drain_s = settings.drain_s
        self._stopping = asyncio.Event()
        self._reported = 0

    async def run(self) -> None:
        """Listen, and do what the learner says."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        writer = threading.Thread(target=self._write, daemon=True)
        await self._router.probe()
        try:
            await self._router.start()
            writer.start()
            threading.Thread(target=self._read, args=(loop,), daemon=True).start()
            self._news.put((messages.LISTENING, self._router.listen_at))
            while not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), REPORT_S)
                self._report()
        finally:
            await self._router.stop(self._drain_s)
        self._news.put((messages.STOPPED, self._summary()))
        self._news.put(None)
        await asyncio.to_thread(writer.join)

    def _recorded(self, rollout: Rollout) -> None:
        self._news.put((messages.ROLLOUT, rollout))

    def _report(self) -> None:
        recorded = self._recorder.recorded
        if recorded != self._reported:
            self._reported = recorded
            self._news.put((messages.RECORDED, recorded))

    def _summary(self) -> dict[str, Any]:
        return {
            "router": status.describe(self._router.telemetry, self._router.snapshot()),
            "open": len(self._recorder),
            "hook_errors": self._router.backends.cluster.hook_errors,
            "last_error": self._router.backends.chooser.last_error,
        }

    def _do(self, what: str, *given: Any) -> None:
        """Do what the learner says; in the event loop, so never during a decision."""
        if what == messages.STOP:
            self._stopping.set()
            return
        self._recorder.use(given[0])
        if what == messages.RECORD:
            self._recorder.record(*given[1:])

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    loop.call_soon_threadsafe(self._do, *self._connection.recv())
            except (EOFError, OSError):  # the learner has ended
                loop.call_soon_threadsafe(self._stopping.set)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the learner has ended
            while (news := self._news.get()) is not None:
                self._connection.send(news)
