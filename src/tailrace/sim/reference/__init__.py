"""The readable reference engine: slow, obvious, and complete in its schedulers."""

from tailrace.sim.reference.dispatch import Dispatcher, RecordedDispatcher
from tailrace.sim.reference.engine import ReferenceEngine

__all__ = ["Dispatcher", "RecordedDispatcher", "ReferenceEngine"]
