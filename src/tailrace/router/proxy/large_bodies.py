"""Reads large request bodies in a thread, before their requests are begun.

Reading 32 MB of short values takes a second, in which other clients must be served. One thread
reads one body at a time, so that large bodies take no more than one core. When a router is started
for the first time, the first of them waits some seconds until a helper has compiled the reader.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tailrace import compiled
from tailrace.net.server import Work
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


class BodyHolder(Protocol):
    """A request that holds its body until that is read or dropped."""

    body: bytes

    @property
    def lower(self) -> Mapping[bytes, bytes]:
        """Its headers, with names in lower case."""

    def drop_body(self) -> None:
        """Free the body."""

    def failed(self) -> None:
        """It cannot be begun: respond with an error of the router."""


#: Begins with a request whose body has been read, or cannot be read.
Begin = Callable[[RequestBody | BadRequest], Work | None]


class LargeBodies:
    """Reads bodies, one at a time; clients take turns, so that one with many delays no other."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._waiting: OrderedDict[str, OrderedDict[BodyReading, None]] = OrderedDict()
        """By whose they are; whose turn it is comes first."""
        self._busy = False
        reader = self.threads.submit(_load_reader)
        if not compiled.helps_with(__name__):
            reader.result()  # compile it now: later it would hold up all requests

    def read(
        self, request: BodyHolder, kind: str, whose: str, begin: Begin, give_up: Callable[[], None]
    ) -> "BodyReading":
        """Read a request's body when it is its turn, then begin with the request.

        ``whose``: the client, or where it comes from. ``give_up`` is called instead of ``begin`` if
        it goes before.
        """
        reading = BodyReading(self, request, kind, whose, begin, give_up)
        self._waiting.setdefault(whose, OrderedDict())[reading] = None
        self._next()
        return reading

    def forget(self, reading: "BodyReading") -> None:
        """Do not read a body whose client has gone; one that is being read is read to its end."""
        own = self._waiting.get(reading.whose)
        if own is not None and reading in own:
            del own[reading]
            if not own:
                del self._waiting[reading.whose]

    def close(self) -> None:
        """Read no more."""
        self._waiting.clear()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        whose, own = self._waiting.popitem(last=False)
        reading, _ = own.popitem(last=False)
        if own:
            self._waiting[whose] = own  # behind all others
        self._busy = True
        future = asyncio.get_running_loop().run_in_executor(self.threads, reading.read)
        future.add_done_callback(lambda future: self._done(reading, future))

    def _done(
        self, reading: "BodyReading", future: "asyncio.Future[RequestBody | BadRequest]"
    ) -> None:
        self._busy = False
        if not future.cancelled():
            self._next()  # the thread goes on while the request is begun
            reading.done(future)


def _load_reader() -> None:
    """Load the compiled reader once a helper has left it in the cache, or compile it."""
    compiled.wait_for(__name__)
    read_large("chat", {}, b'{"messages":[]}')


class BodyReading:
    """A request whose body is being read, and what follows: its connection's work in progress."""

    def __init__(
        self,
        bodies: LargeBodies,
        request: BodyHolder,
        kind: str,
        whose: str,
        begin: Begin,
        give_up: Callable[[], None],
    ) -> None:
        self.whose = whose
        self._bodies = bodies
        self._request = request
        self._kind = kind
        self._begin = begin
        self._give_up = give_up
        self._gone = False
        self._work: Work | None = None

    def read(self) -> RequestBody | BadRequest:
        """Read the body; called in the thread."""
        # The body is the request's, not the queue's: a client that goes takes it along.
        request = self._request
        try:
            return read_large(self._kind, request.lower, request.body)
        except BadRequest as error:
            return BadRequest(str(error))  # without the frames, which hold the body in a cycle

    def done(self, future: "asyncio.Future[RequestBody | BadRequest]") -> None:
        """Begin with the request, unless its client has gone."""
        if self._gone:
            future.exception()  # of no interest
            return
        request = self._request
        try:
            body = future.result()
        except Exception:  # no memory, for instance
            request.drop_body()
            self._give_up()
            request.failed()
            return
        try:
            self._work = self._begin(body)
        except Exception:
            request.failed()

    def client_gone(self) -> None:
        """Stop; a body that was not read yet is freed."""
        if self._work is not None:
            self._work.client_gone()
        else:
            self._gone = True
            self._bodies.forget(self)
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
