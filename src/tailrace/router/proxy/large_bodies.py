"""Reads large request bodies in a thread, before their requests are begun.

Reading 32 MB of short values takes a second, in which other clients must be served. One thread
reads one body at a time, so that large bodies take no more than one core.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tailrace.net.server import HttpRequest, Work
from tailrace.router.intake.large_body import read_large
from tailrace.router.intake.request_body import BadRequest, RequestBody

#: Bodies up to this size are read at once if they have an ordinary shape, in bytes.
INLINE_BYTES = 192 * 1024
#: Bodies up to this size are parsed at once, whatever their shape, in bytes ...
PARSED_BYTES = 64 * 1024
#: ... unless parsing them has just taken long: those above this size then wait for the thread, so
#: that at most a quarter of the event loop's time goes into parsing.
SHORT_BYTES = 4 * 1024
PAUSE_SHARE = 3.0

#: Begins with a request whose body has been read, or cannot be read.
Begin = Callable[[RequestBody | BadRequest], Work | None]


class LargeBodies:
    """Reads bodies, one at a time."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        read_large("chat", {}, b'{"messages":[]}')  # compile it now

    def read(
        self, request: HttpRequest, kind: str, begin: Begin, give_up: Callable[[], None]
    ) -> "BodyReading":
        """Read a request's body, then begin with the request.

        ``give_up`` is called instead if its client goes before.
        """
        return BodyReading(self.threads, request, kind, begin, give_up)

    def close(self) -> None:
        """Read no more."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class BodyReading:
    """A request whose body is being read, and what follows: its connection's work in progress."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        request: HttpRequest,
        kind: str,
        begin: Begin,
        give_up: Callable[[], None],
    ) -> None:
        self._request = request
        self._kind = kind
        self._begin = begin
        self._give_up = give_up
        self._work: Work | None = None
        self._future = asyncio.get_running_loop().run_in_executor(threads, self._read)
        self._future.add_done_callback(self._done)

    def _read(self) -> RequestBody | BadRequest:
        # The body is the request's, not the queue's: a client that goes takes it along.
        request = self._request
        try:
            return read_large(self._kind, request.head.lower, request.body)
        except BadRequest as error:
            return BadRequest(str(error))  # without the frames, which hold the body in a cycle

    def _done(self, future: "asyncio.Future[RequestBody | BadRequest]") -> None:
        if future.cancelled():
            return
        request = self._request
        try:
            self._work = self._begin(future.result())
        except Exception:
            request.client.failed(request.head)

    def client_gone(self) -> None:
        """Stop; a body that was not read yet is freed."""
        if self._work is not None:
            self._work.client_gone()
        else:
            self._future.cancel()
            self._request.drop_body()
            self._give_up()

    def client_slow(self) -> None:
        """Stop writing until ``client_ready``."""
        if self._work is not None:
            self._work.client_slow()

    def client_ready(self) -> None:
        """Resume writing."""
        if self._work is not None:
            self._work.client_ready()
