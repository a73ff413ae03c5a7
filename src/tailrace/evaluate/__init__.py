"""Running scenarios and judging them: metrics, comparisons, capacity."""
