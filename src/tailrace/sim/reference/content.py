"""Content identity of KV blocks: which blocks of two requests hold the same tokens.

Block ``i`` of a request covers tokens ``i*size`` to ``(i+1)*size - 1`` of its prompt followed by
its output. It is named by the run that its last token lies in, everything before that run, and
``i``.
"""

from tailrace.workload.table import RequestTable

#: Number of a content path (all runs before, and the segment of this one) and position in blocks.
BlockId = tuple[int, int]


class BlockNames:
    """Names of the KV blocks of a table's requests, computed on first use."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._paths: dict[tuple[int, int, int], int] = {}
        self._block_ids: dict[tuple[int, int], list[BlockId]] = {}

    def block_ids(self, request_id: int, block_size: int) -> list[BlockId]:
        """Names of the full blocks of prompt and output."""
        key = (request_id, block_size)
        if key not in self._block_ids:
            self._block_ids[key] = self._name_blocks(request_id, block_size)
        return self._block_ids[key]

    def forget(self, request_id: int, block_size: int) -> None:
        """Drop the names of a request that has left its server."""
        self._block_ids.pop((request_id, block_size), None)

    def _name_blocks(self, request_id: int, block_size: int) -> list[BlockId]:
        row = self._table.rows[request_id]
        total = int(row["prompt_tokens"]) + int(row["output_tokens"])
        run_ends = self._run_ends(request_id)
        names: list[BlockId] = []
        run = 0
        for block in range(total // block_size):
            last_token = (block + 1) * block_size - 1
            # The output continues the last run's stream, so the last run has no end.
            while run < len(run_ends) - 1 and last_token >= run_ends[run][1]:
                run += 1
            names.append((run_ends[run][0], block))
        return names

    def _run_ends(self, request_id: int) -> list[tuple[int, int]]:
        """Content path and end position, in tokens, of each run of the prompt."""
        row = self._table.rows[request_id]
        start, count = int(row["run_start"]), int(row["run_count"])
        if count == 0:
            return [(-1 - request_id, int(row["prompt_tokens"]))]  # private: a path of its own
        ends: list[tuple[int, int]] = []
        before, tokens_before, end = 0, 0, 0
        for segment, tokens, _ in self._table.runs[start : start + count].tolist():
            step = (before, tokens_before, segment)
            path = self._paths.setdefault(step, len(self._paths) + 1)
            end += tokens
            ends.append((path, end))
            if tokens > 0:  # an empty run is no content: it must not change what follows
                before, tokens_before = path, tokens
        return ends
