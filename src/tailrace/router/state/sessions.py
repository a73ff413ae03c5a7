"""Conversations: where each one's last request went, by its id or by the content it continues."""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import xxhash

from tailrace.router.state.shared_state import SESSION_CELLS, SESSIONS


class Session:
    """One conversation."""

    __slots__ = ("last_replica", "number", "turns")

    def __init__(self, number: int) -> None:
        self.number = number
        self.last_replica = -1
        self.turns = 0


class Sessions:
    """The latest ``most`` conversations."""

    shared = False
    """Whether other workers read them, so that changes must be published."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = itertools.count()
        # By use. In a plain dict, finding the oldest entry steps over all that were taken out since
        # the table was last resized: 24 us per request once it was full, now 1.5.
        self._known: OrderedDict[str | int, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def new(self) -> Session:
        """Return a conversation that nothing leads to yet."""
        return Session(next(self._numbers))

    def of(self, session_id: str) -> Session:
        """Return the conversation of an id, a new one if need be."""
        session = self._known.pop(session_id, None) or self.new()
        self.put(session_id, session)
        return session

    def find(self, key: int) -> Session | None:
        """Return the conversation whose latest prompt had this content, if it is remembered."""
        return self._known.get(key)

    def put(self, key: str | int, session: Session) -> None:
        """Make a conversation findable; of too many, the one not used for longest goes."""
        known = self._known
        known[key] = session
        known.move_to_end(key)
        if len(known) > self._most:
            known.popitem(last=False)

    def publish(self, key: str | int, session: Session) -> None:
        """Make a conversation known to other workers: here there are none."""

    def remember_response(self, client: str, response_id: str, replica: int) -> None:
        """A replica may have stored a response for a client."""
        key, session = _response_key(client, response_id), self.new()
        session.last_replica, session.turns = replica, 1
        self.put(key, session)
        if self.shared:
            self.publish(key, session)

    def replica_of_response(self, client: str, response_id: str) -> int:
        """Return the replica that gave a client this response, -1: not known."""
        session = self.find(_response_key(client, response_id))
        return -1 if session is None else session.last_replica


class SharedSessions(Sessions):
    """Conversations whose requests may come to any of several workers.

    The shared table is direct-mapped: a newer conversation may take an older one's place, and then
    only the worker that has seen the older one remembers it.
    """

    shared = True

    def __init__(self, most: int, cells: Any, worker: int, workers: int) -> None:
        """``cells``: the shared table as single numbers, see ``SharedState.sessions``."""
        super().__init__(most)
        self._cells = cells
        self._numbers = itertools.count(worker, workers)
        self.published: Callable[[int, int, int], None] | None = None
        """Called with key, last replica and turns of what is published."""

    def number_from(self, first: int) -> None:
        """Number new conversations from ``first`` on: no other machine uses these numbers."""
        self._numbers = itertools.count(first)

    def of(self, session_id: str) -> Session:
        """Return the conversation of an id as the last worker that had it left it."""
        session = super().of(session_id)
        self._catch_up(_key(session_id), session)
        return session

    def find(self, key: int) -> Session | None:
        """Return the conversation whose latest prompt had this content, if any worker remembers."""
        session = self._known.get(key)
        if session is None:
            found = Session(-1)
            if self._catch_up(key, found):
                return found
        return session

    def publish(self, key: str | int, session: Session) -> None:
        """Make a conversation known to other workers."""
        number = _key(key) if isinstance(key, str) else key
        at = number % SESSIONS * SESSION_CELLS
        cells = self._cells
        cells[at] = 0  # a reader finds nothing until the row is complete
        cells[at + 1], cells[at + 2] = session.number, session.last_replica + 1
        cells[at + 3] = session.turns
        cells[at] = number
        if self.published is not None:
            self.published(number, session.last_replica, session.turns)

    def receive(self, key: int, replica: int, turns: int) -> None:
        """Enter a conversation that a worker on another machine has published."""
        cells, at = self._cells, key % SESSIONS * SESSION_CELLS
        if cells[at] == key and cells[at + 3] >= turns:
            return
        number = cells[at + 1] if cells[at] == key else key >> 1
        cells[at] = 0
        cells[at + 1], cells[at + 2], cells[at + 3] = number, replica + 1, turns
        cells[at] = key

    def _catch_up(self, key: int, session: Session) -> bool:
        """Take over what other workers know, if it is more."""
        cells, at = self._cells, key % SESSIONS * SESSION_CELLS
        if cells[at] != key or cells[at + 3] <= session.turns:
            return False
        session.number, session.last_replica = cells[at + 1], cells[at + 2] - 1
        session.turns = cells[at + 3]
        return True


def _response_key(client: str, response_id: str) -> int:
    return _key(f"response {client} {response_id}")


def _key(session_id: str) -> int:
    return xxhash.xxh3_64_intdigest(session_id.encode(errors="surrogatepass"))
