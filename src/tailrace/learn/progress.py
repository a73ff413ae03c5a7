"""Watchers of a training run."""

from collections.abc import Mapping
from typing import Any, Protocol


class Watcher(Protocol):
    """Is told how a run goes."""

    def phase(self, name: str) -> None:
        """Something else begins."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def tasks(self, done: int, total: int) -> None:
        """So many tasks of the step are done."""

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """A step is over."""


class Silent:
    """Watches nothing."""

    def phase(self, name: str) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def tasks(self, done: int, total: int) -> None:
        """Ignore it."""

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """Ignore it."""
