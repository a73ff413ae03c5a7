"""Conversations: where each one's last request went, by its id or by the content it continues."""

import itertools


class Session:
    """One conversation."""

    __slots__ = ("last_replica", "number", "turns")

    def __init__(self, number: int) -> None:
        self.number = number
        self.last_replica = -1
        self.turns = 0


class Sessions:
    """The latest ``most`` conversations."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = itertools.count()
        self._known: dict[str | int, Session] = {}

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
        known.pop(key, None)
        known[key] = session
        if len(known) > self._most:
            del known[next(iter(known))]
