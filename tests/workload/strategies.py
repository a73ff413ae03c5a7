"""Random request tables."""

import numpy as np
from hypothesis import strategies as st

from tailrace.workload.table import RequestTable

seconds = st.floats(0, 1e6, allow_nan=False)


@st.composite
def tables(draw: st.DrawFn, max_rows: int = 12, max_tokens: int = 9) -> RequestTable:
    """Tables with content that overlaps a lot, chains of turns, and odd numbers everywhere."""
    count = draw(st.integers(1, max_rows))
    run = st.tuples(st.integers(0, 3), st.integers(0, max_tokens))
    runs = [draw(st.lists(run, max_size=4)) for _ in range(count)]
    runs = [r if sum(t for _, t in r) > 0 else [] for r in runs]
    prompt = [sum(t for _, t in r) or draw(st.integers(1, 2**24)) for r in runs]
    free = list(range(count))
    parents = [-1] * count
    for row in range(1, count):
        candidates = [p for p in free if p < row]
        if candidates and draw(st.booleans()):
            parents[row] = draw(st.sampled_from(candidates))
            free.remove(parents[row])

    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array([draw(values) for _ in range(count)])

    return RequestTable.build(
        np.sort(column(seconds)),
        np.array(prompt),
        column(st.integers(1, max_tokens)),
        runs,
        think_s=column(seconds),
        ttft_slo_s=column(seconds),
        tpot_slo_s=column(seconds),
        session=column(st.integers(-1, 5)),
        turn=column(st.integers(0, 9)),
        parent=np.array(parents),
        priority=column(st.integers(-(2**31), 2**31 - 1)),
    )
