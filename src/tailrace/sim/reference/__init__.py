"""The readable reference engine: slow, obvious, and with every scheduler."""

from tailrace.sim.reference.dispatch import Dispatcher, Recorded
from tailrace.sim.reference.engine import ReferenceEngine

__all__ = ["Dispatcher", "Recorded", "ReferenceEngine"]
