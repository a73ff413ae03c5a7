"""Histograms in Prometheus' text format, which the library writes ten times as slowly."""

from collections.abc import Iterator, Sequence


def histogram_lines(
    name: str, labels: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Iterator[str]:
    """Yield the samples of a histogram as lines without line ends.

    ``labels``: like ``a="1",b="2"``, or empty. ``counts``: values in the bucket of each bound, and
    those above the last. ``total``: the sum of all values.
    """
    seen = 0
    comma = "," if labels else ""
    for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
        seen += count
        yield f'{name}_bucket{{{labels}{comma}le="{bound}"}} {seen}'
    braced = f"{{{labels}}}" if labels else ""
    yield f"{name}_sum{braced} {total}"
    yield f"{name}_count{braced} {seen}"
