"""What each client uses at present, counted over all workers: rates, tokens, requests at once.

The counts lie in memory that all workers share and change by atomic instructions, so a limit holds
however a client's connections are spread over workers. A worker that is killed leaves nothing
behind: requests at once are counted per worker, and its counts are cleared.

Rates are limited by the generic cell rate algorithm: one number per limit, the time (ns) at which
the client's bucket is full again. A cost moves it into the future; more than a bucket's worth ahead
of now is refused.
"""

# mypy: disallow-untyped-defs=False

import mmap
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.compiled import inner, jit
from tailrace.errors import TailraceError
from tailrace.router.access import atomic
from tailrace.router.settings import ClientSettings

#: Clients in the settings.
MAX_CLIENTS = 4096
#: Rows: as many again, so that a reload finds room before the rows of the old clients are free.
ROWS = 2 * MAX_CLIENTS

#: Columns of a row: hash of the client's name (0: free), when its buckets of requests and of tokens
#: are full again (ns), and from ACTIVE on its requests in progress at each worker.
OWNER, REQUESTS_AT, TOKENS_AT, ACTIVE = range(4)

#: Columns of a client's limits, float64: ns per request, size of the bucket of requests in ns, ns
#: per token, size of the bucket of tokens in ns, requests at once. inf: no limit, 0 ns: no limit.
REQUEST_NS, REQUEST_BUCKET_NS, TOKEN_NS, TOKEN_BUCKET_NS, CONCURRENT = range(5)

#: Why a request is refused.
ADMITTED, TOO_MANY_AT_ONCE, TOO_MANY_REQUESTS, TOO_MANY_TOKENS = range(4)
_MINUTE_NS = 60e9
_SECOND_NS = 1e9


@jit
def begin(row, worker, limits, now_s):
    """Count a request that begins now; return why not, and how long to wait (s).

    ``row``: int64 [width]. Each worker raises its own count before it reads the sum, so two workers
    at once may both refuse the last place, but never both take it.
    """
    own = ACTIVE + worker
    atomic.add(row, own, 1)
    active = 0
    for k in range(ACTIVE, row.size):
        active += row[k]
    if active > limits[CONCURRENT]:
        atomic.add(row, own, -1)
        return TOO_MANY_AT_ONCE, 0.0
    if limits[REQUEST_NS] > 0:
        wait = _charge(
            row, REQUESTS_AT, np.int64(limits[REQUEST_NS]), np.int64(limits[REQUEST_BUCKET_NS]),
            np.int64(now_s * _SECOND_NS),
        )  # fmt: skip
        if wait > 0:
            atomic.add(row, own, -1)
            return TOO_MANY_REQUESTS, wait / _SECOND_NS
    return ADMITTED, 0.0


@jit
def reserve(row, limits, tokens, now_s):
    """Take tokens now; return how long to wait for them (s), 0: they are taken.

    What is more than a whole bucket is let through when the bucket is full.
    """
    if limits[TOKEN_NS] <= 0:
        return 0.0
    cost, bucket = np.int64(tokens * limits[TOKEN_NS]), np.int64(limits[TOKEN_BUCKET_NS])
    return _charge(row, TOKENS_AT, cost, bucket, np.int64(now_s * _SECOND_NS)) / _SECOND_NS


@inner
def _charge(row, place, cost, bucket, now):
    """Move the time at which a bucket is full; return how long to wait instead (ns), if need be."""
    while True:
        before = row[place]
        start = max(before, now)
        wait = start + min(cost, bucket) - now - bucket
        if wait > 0:
            return wait
        if atomic.swap_if(row, place, before, start + cost):
            return 0


@jit
def end(row, worker, limits, tokens):
    """A request is over; ``tokens`` more than were reserved were used, fewer if negative."""
    atomic.add(row, ACTIVE + worker, -1)
    if tokens != 0 and limits[TOKEN_NS] > 0:
        atomic.add(row, TOKENS_AT, np.int64(tokens * limits[TOKEN_NS]))


@jit
def claim(cells, width, owner, listed):
    """Return the row of a client, a new one if need be; -1: there is none.

    ``owner``: hash of its name; ``listed`` int64: hashes of all clients there are now. Workers that
    look for the same client at once agree: each takes the first free row or looks again. A row of a
    client that is gone is used only if no other is left: the change may still be refused, or be
    news to other workers.
    """
    while True:
        free = -1
        rows = cells.size // width
        for row in range(rows):
            found = cells[row * width + OWNER]
            if found == owner:
                return row
            if found == 0 and free < 0:
                free = row
        for row in range(rows):
            if free < 0 and _is_idle(cells, width, row, listed):
                free = row
        if free < 0:
            return -1
        place = free * width + OWNER
        found = cells[place]
        if (found == 0 or not _is_in(listed, found)) and atomic.swap_if(cells, place, found, owner):
            cells[place - OWNER + REQUESTS_AT] = 0
            cells[place - OWNER + TOKENS_AT] = 0
            return free


@inner
def _is_idle(cells, width, row, listed):
    """Whether a row belongs to a client that is gone and has nothing in progress."""
    if _is_in(listed, cells[row * width + OWNER]):
        return False
    active = 0
    for k in range(row * width + ACTIVE, (row + 1) * width):
        active += cells[k]
    return active == 0


@inner
def _is_in(values, value):
    found = False
    for k in range(values.size):
        found |= values[k] == value
    return found


def warm_up() -> None:
    """Compile what every request of a client needs, so that none waits for it."""
    unlimited = np.zeros(CONCURRENT + 1)
    row = np.zeros(ACTIVE + 1, np.int64)
    begin(row, 0, unlimited, 0.0)
    reserve(row, unlimited, 1.0, 0.0)
    end(row, 0, unlimited, 0.0)


class ClientAccounts:
    """The rows of all clients, in memory that forked workers share."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.width = ACTIVE + workers
        size = ROWS * self.width
        # Pages that are never written take no memory.
        memory = mmap.mmap(-1, 8 * size)
        self.cells: NDArray[np.int64] = np.frombuffer(memory, np.int64, size)
        self._rows = self.cells.reshape(ROWS, self.width)

    def clear(self, worker: int) -> None:
        """Forget the requests in progress at a worker that has died."""
        self._rows[:, ACTIVE + worker] = 0

    def account(self, client: ClientSettings, listed: NDArray[np.int64], worker: int) -> "Account":
        """Return a client's account as one worker sees it; ``listed``: :func:`owners` of all."""
        row = int(claim(self.cells, self.width, owner_of(client.name), listed))
        if row < 0:
            raise TailraceError(
                f"there is no room for client {client.name}: too many requests of former clients "
                "are in progress; try again later"
            )
        return Account(self._rows[row], worker, limits_of(client))


class Account:
    """One client's counts and limits, as one worker sees them."""

    __slots__ = ("_limits", "_row", "_worker", "limits_tokens")

    def __init__(self, row: NDArray[np.int64], worker: int, limits: NDArray[np.float64]) -> None:
        self._row, self._worker, self._limits = row, worker, limits
        self.limits_tokens = bool(limits[TOKEN_NS] > 0)
        """Whether tokens are limited."""

    def begin(self, now: float) -> tuple[int, float]:
        """Count a request at ``now`` (s of a clock that all workers share).

        Returns why it is refused (ADMITTED: it is not) and for how long, in s.
        """
        refused: tuple[int, float] = begin(self._row, self._worker, self._limits, now)
        return refused

    def reserve(self, tokens: float, now: float) -> float:
        """Take tokens at ``now`` (s); return how long to wait for them, in s, 0: they are taken."""
        wait_s: float = reserve(self._row, self._limits, tokens, now)
        return wait_s

    def end(self, tokens: float = 0.0) -> None:
        """A request is over that used this many more tokens than it had reserved."""
        end(self._row, self._worker, self._limits, tokens)

    @property
    def active(self) -> int:
        """Requests in progress, over all workers."""
        return int(self._row[ACTIVE:].sum())


def limits_of(client: ClientSettings) -> NDArray[np.float64]:
    """Return a client's limits float64 [5]."""
    limits = np.zeros(CONCURRENT + 1)
    rate, tokens = client.requests_per_s, client.tokens_per_minute
    if rate is not None:
        limits[REQUEST_NS] = max(1.0, _SECOND_NS / rate)
        limits[REQUEST_BUCKET_NS] = max(_SECOND_NS, limits[REQUEST_NS])
    if tokens is not None:
        limits[TOKEN_NS] = _MINUTE_NS / tokens
        limits[TOKEN_BUCKET_NS] = _MINUTE_NS
    limits[CONCURRENT] = np.inf if client.concurrent is None else client.concurrent
    return limits


def owner_of(name: str) -> int:
    """Return the hash of a client's name, an int64 that is not 0."""
    return (xxhash.xxh3_64_intdigest(name.encode()) >> 1) | 1


def owners(clients: Iterable[ClientSettings]) -> NDArray[np.int64]:
    """Return the hashes of clients' names, int64 [n]."""
    return np.array([owner_of(client.name) for client in clients], np.int64)
