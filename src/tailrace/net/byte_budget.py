"""One limit for the bytes that all clients of a service make it hold."""

from typing import Protocol


class Holder(Protocol):
    """A connection that holds bytes of a request."""

    held: int
    """Bytes it has claimed."""

    def evict(self) -> None:
        """Free its bytes: those that are spare, else refuse the request that is being received."""


class ByteBudget:
    """Counts the bytes of requests that are held: being received, waiting, or at a backend.

    When there are too many, spare ones go first, then the largest request that is still being
    received is refused. A client with a small request is thus not turned away because others send
    large ones.
    """

    __slots__ = ("most", "receiving", "spare", "used")

    def __init__(self) -> None:
        self.used = 0
        """Bytes held now."""
        self.most = 0
        """Most bytes held since the last look (:meth:`freed`)."""
        self.receiving: set[Holder] = set()
        """Holders whose request is not complete."""
        self.spare: dict[Holder, None] = {}
        """Holders whose bytes nobody waits for, oldest first."""

    def hold(self, holder: Holder, size: int, limit: int) -> bool:
        """Let a holder hold ``size`` bytes from now on; False: there is no room within ``limit``.

        Without room it is counted all the same; the caller refuses the request and holds 0.
        """
        self.used += size - holder.held
        holder.held = size
        if self.used > self.most:
            self.most = self.used
        return self.used <= limit or self._make_room(holder, limit)

    def release(self, holder: Holder, size: int = 0) -> None:
        """Let a holder hold only ``size`` bytes from now on, no more than before."""
        self.used += size - holder.held
        holder.held = size

    def freed(self, least: int) -> bool:
        """Whether usage has dropped by ``least`` bytes from its peak since it was last True.

        When none is held any more, an eighth of that is enough.
        """
        freed = self.most - self.used
        if freed < (least if self.used else least / 8):
            return False
        self.most = self.used
        return freed > 0

    def _make_room(self, holder: Holder, limit: int) -> bool:
        while self.used > limit:
            if self.spare:
                oldest = next(iter(self.spare))
                del self.spare[oldest]
                oldest.evict()
                continue
            largest = max(self.receiving, key=lambda h: h.held, default=holder)
            if largest.held <= holder.held:
                return False
            largest.evict()
        return True
