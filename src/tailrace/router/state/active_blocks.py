"""Distinct prompt blocks of the requests in flight, for policies that read them."""

from collections import defaultdict

from tailrace.router.intake.prompt_blocks import PromptBlocks


class ActiveBlocks:
    """How often each whole block of the prompts in flight occurs, by replica.

    Blocks are those of intake/prompt_blocks.py. Of several workers each counts what it sent itself.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def begin(self, replica: int, runs: PromptBlocks) -> None:
        """A prompt was sent to a replica."""
        counts = self._counts[replica]
        for key in runs.keys[: runs.whole].tolist():
            counts[key] = counts.get(key, 0) + 1

    def end(self, replica: int, runs: PromptBlocks) -> None:
        """Its request has ended; one that began before blocks were counted changes nothing."""
        counts = self._counts[replica]
        for key in runs.keys[: runs.whole].tolist():
            left = counts.get(key, 0) - 1
            if left > 0:
                counts[key] = left
            else:
                counts.pop(key, None)

    def forget(self, replica: int) -> None:
        """All requests of a replica are gone."""
        self._counts.pop(replica, None)

    def count(self, replica: int, runs: PromptBlocks) -> tuple[int, int]:
        """Return the distinct blocks in flight, and how many whole blocks a prompt would add."""
        counts = self._counts[replica]
        known, new = 0, runs.whole  # blocks before ``known`` are in flight, from ``new`` on not
        while known < new:
            middle = (known + new) // 2
            if int(runs.keys[middle]) in counts:
                known = middle + 1
            else:
                new = middle
        return len(counts), runs.whole - known
