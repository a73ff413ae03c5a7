"""Tailrace: a learned request router for clusters of LLM servers, and the simulator behind it."""

from tailrace import moved

__version__ = "0.1.0"

moved.install()
