"""Policies that take turns: which one has the present block of time.

Time is cut into blocks, and every ``blocks`` consecutive ones are a cycle. One block of each cycle,
drawn at random, is the candidate's. The draw is a hash of the seed and the cycle's number, counted
from the Unix epoch, so that all workers and whoever reads the decision log agree on it without
being told.
"""

from typing import NamedTuple

import xxhash


class Turns(NamedTuple):
    """A schedule."""

    seed: int
    block_s: float
    """Length of a block."""
    blocks: int
    """Blocks in a cycle, 2 or more; the candidate has one of them."""

    @property
    def cycle_s(self) -> float:
        """Length of a cycle."""
        return self.block_s * self.blocks

    def cycle(self, unix_s: float) -> int:
        """Return the number of the cycle at a time."""
        return int(unix_s // self.cycle_s)

    def candidates_block(self, cycle: int) -> int:
        """Return which block of a cycle is the candidate's, 0 to ``blocks`` - 1."""
        return xxhash.xxh3_64_intdigest(f"{self.seed} {cycle}".encode()) * self.blocks >> 64

    def is_candidates(self, unix_s: float) -> bool:
        """Whether the candidate decides at a time."""
        cycle = self.cycle(unix_s)
        block = int((unix_s - cycle * self.cycle_s) // self.block_s)
        return min(block, self.blocks - 1) == self.candidates_block(cycle)
