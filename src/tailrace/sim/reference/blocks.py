"""KV memory of one server: blocks counted, or tracked one by one with a prefix cache."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from tailrace.sim.reference.content import BlockId


class BlockCounter:
    """Counts the blocks each request holds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.held: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks no request holds."""
        return self.total - self.used

    def take(self, request_id: int, count: int) -> None:
        """Give blocks to a request."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks wanted, {self.free} free: scheduler defect")
        self.used += count
        self.held[request_id] = self.held.get(request_id, 0) + count

    def release(self, request_id: int) -> None:
        """Take all blocks of a request back."""
        self.used -= self.held.pop(request_id)


class CacheListener(Protocol):
    """Is told what a prefix cache stores and evicts."""

    def stored(self, request_id: int, first: int, end: int) -> None:
        """Blocks ``first`` to ``end - 1`` of a request are cached."""

    def removed(self, name: BlockId) -> None:
        """A block is evicted."""


class BlockPool:
    """Blocks of a vllm_v1 server, each with its content and the number of requests that use it.

    An unused block keeps its content until it is taken again, least recently freed first.
    """

    def __init__(self, total: int, block_size: int, extra_blocks: int, caching: bool) -> None:
        self.total = total
        self.block_size = block_size
        self.extra_blocks = extra_blocks
        """Extra blocks taken with each new one, as far as any are free."""
        self.caching = caching
        self.held: dict[int, list[int]] = {}
        self.free_list: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self.users = [0] * total
        self._name: list[BlockId | None] = [None] * total
        # Several blocks may hold the same content; the one that was named first is used.
        self._known: dict[BlockId, dict[int, None]] = {}
        self._named_count: dict[int, int] = {}
        self.listener: CacheListener | None = None

    @property
    def free(self) -> int:
        """Blocks no request uses, with or without content."""
        return len(self.free_list)

    @property
    def used(self) -> int:
        """Blocks in use; one that several requests share counts once."""
        return self.total - len(self.free_list)

    def cached_chain(self, names: Sequence[BlockId], limit: int) -> list[int]:
        """Blocks that hold the longest known run of leading names, at most ``limit``."""
        chain: list[int] = []
        if not self.caching:
            return chain
        for name in names[:limit]:
            blocks = self._known.get(name)
            if not blocks:
                break
            chain.append(next(iter(blocks)))
        return chain

    def grow(
        self,
        request_id: int,
        names: Sequence[BlockId],
        processed: int,
        tokens: int,
        hits: Sequence[int] = (),
    ) -> bool:
        """Make a request hold blocks for ``processed + tokens`` tokens; False: not enough are free.

        ``hits`` are blocks found in the cache at admission; their tokens count as processed. What
        this iteration will have filled is findable at once.
        """
        held = self.held.get(request_id, [])
        new_blocks = -(-(processed + tokens) // self.block_size) - len(held) - len(hits)
        # An unused hit is in the free list, but cannot serve as a free block as well.
        idle_hits = sum(1 for block in hits if self.users[block] == 0)
        if new_blocks > len(self.free_list) - idle_hits:
            return False
        for block in hits:
            self.free_list.pop(block, None)
            self.users[block] += 1
        held = [*held, *hits]
        if new_blocks > 0:
            count = min(new_blocks + self.extra_blocks, len(self.free_list))
            held.extend(self._take_oldest() for _ in range(count))
        self.held[request_id] = held
        if self.caching:
            full = (processed + tokens) // self.block_size
            first = self._named_count.get(request_id, len(hits))
            for position in range(first, full):
                self._set_name(held[position], names[position])
            self._named_count[request_id] = full
            if self.listener is not None:
                if hits:
                    self.listener.stored(request_id, 0, len(hits))
                if first < full:
                    self.listener.stored(request_id, first, full)
        return True

    def release(self, request_id: int) -> None:
        """Take all blocks of a request back; with caching its tail is reused first."""
        blocks = self.held.pop(request_id)
        self._named_count.pop(request_id, None)
        for block in reversed(blocks) if self.caching else blocks:
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free_list[block] = None

    def _take_oldest(self) -> int:
        block, _ = self.free_list.popitem(last=False)
        name = self._name[block]
        if name is not None:
            del self._known[name][block]
            if not self._known[name]:
                del self._known[name]
            self._name[block] = None
            if self.listener is not None:
                self.listener.removed(name)
        self.users[block] = 1
        return block

    def _set_name(self, block: int, name: BlockId) -> None:
        self._name[block] = name
        self._known.setdefault(name, {})[block] = None
