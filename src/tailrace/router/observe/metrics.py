"""Counters and histograms that events are added to: plain numbers, for the event loop's one thread.

The Prometheus library's own lock, and its histograms walk through their bounds. Five histograms
per request cost 1.0 us of CPU here and 7.5 us there, of about 104 us for a whole request (1 KB
body, docs/router-speed.md).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

Labels = tuple[str, ...]
#: Number of all replicas that are gone, in counters.
GONE = -2
_BY_REPLICA: Labels = ("replica",)


class CounterFamily(Counter[Any]):
    """A counter: numbers by the values of its labels; ``family[values] += 1`` counts.

    The key is a tuple of values, or the value itself if there is one label. A replica is given by
    its number, a status as a number.
    """

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        super().__init__()
        self.name = name
        self.text = text
        self.labels = labels
        if not labels:
            self[()] = 0

    def retire(self, replica: int) -> None:
        """Add the numbers of a replica to those of all that are gone."""
        if "replica" not in self.labels:
            return
        at = self.labels.index("replica")
        for key in [k for k in self if (k[at] if isinstance(k, tuple) else k) == replica]:
            gone = (*key[:at], GONE, *key[at + 1 :]) if isinstance(key, tuple) else GONE
            self[gone] += self.pop(key)


class HistogramFamily:
    """A histogram of times in s: one row for the whole router, or a row per replica."""

    __slots__ = ("bounds", "by_replica", "counts", "gone", "name", "sums", "text")

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], *, by_replica: bool = False
    ) -> None:
        self.name = name
        self.text = text
        self.bounds = bounds
        """Upper bounds of the buckets; one more bucket holds what is above the last."""
        self.by_replica = by_replica
        self.counts: list[list[int]] = []
        """[row][bucket]."""
        self.sums: list[float] = []
        """[row], s."""
        self.gone: tuple[list[int], float] | None = None
        """Buckets and sum of replicas that are gone, if any had times."""
        if not by_replica:
            self.grow(1)

    def observe(self, seconds: float, row: int = 0) -> None:
        """Count a time."""
        self.counts[row][bisect_left(self.bounds, seconds)] += 1
        self.sums[row] += seconds

    def observe_all(self, times: Sequence[float]) -> None:
        """Count times of the whole router, s."""
        row, bounds = self.counts[0], self.bounds
        for seconds in times:
            row[bisect_left(bounds, seconds)] += 1
        self.sums[0] += sum(times)

    def retire(self, row: int) -> None:
        """Add the times of a replica to those of all that are gone."""
        if not self.by_replica or row >= len(self.counts) or not any(self.counts[row]):
            return
        counts, total = self.gone or ([0] * (len(self.bounds) + 1), 0.0)
        counts = [a + b for a, b in zip(counts, self.counts[row], strict=True)]
        self.gone = counts, total + self.sums[row]
        self.counts[row], self.sums[row] = [0] * (len(self.bounds) + 1), 0.0

    def grow(self, rows: int) -> None:
        """Have at least this many rows."""
        for _ in range(len(self.counts), rows):
            self.counts.append([0] * (len(self.bounds) + 1))
            self.sums.append(0.0)


class Metrics:
    """All counters and histograms of a router, in the order of their declaration."""

    def __init__(self) -> None:
        self.counters: list[CounterFamily] = []
        self.histograms: list[HistogramFamily] = []
        self.replicas = 0
        """Replicas whose series exist."""

    def counter(self, name: str, text: str, labels: Labels = ()) -> CounterFamily:
        """Declare a counter; it is exported as ``tailrace_NAME_total``."""
        self.counters.append(CounterFamily(name, text, labels))
        return self.counters[-1]

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], *, by_replica: bool = False
    ) -> HistogramFamily:
        """Declare a histogram; it is exported as ``tailrace_NAME_seconds``."""
        self.histograms.append(HistogramFamily(name, text, bounds, by_replica=by_replica))
        return self.histograms[-1]

    def add_replicas(self, count: int) -> None:
        """Begin the series of the first ``count`` replicas at 0."""
        self.replicas = count
        for counter in self.counters:
            if counter.labels == _BY_REPLICA:
                for replica in range(count):
                    counter.setdefault(replica, 0)
        for histogram in self.histograms:
            if histogram.by_replica:
                histogram.grow(count)

    def retire(self, replica: int) -> None:
        """A replica is gone; its number may be given to another one, so its series end.

        What it has counted is kept in one series for all that are gone: sums never fall.
        """
        for counter in self.counters:
            counter.retire(replica)
        for histogram in self.histograms:
            histogram.retire(replica)
        if replica == self.replicas - 1:
            self.replicas = replica
            for histogram in self.histograms:
                if histogram.by_replica:
                    del histogram.counts[replica:], histogram.sums[replica:]
        self.add_replicas(self.replicas)
