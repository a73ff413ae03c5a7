"""Emulated vLLM servers: they speak its HTTP and take the time the cost model says."""
