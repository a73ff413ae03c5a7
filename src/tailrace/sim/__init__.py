"""The cluster simulator: a compiled engine, a readable reference engine, and the cost model."""
