"""Decisions as they were seen and made, in the form that training learns from."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.integrations.vidur.router import RouterWatcher
from tailrace.learn.kernels import NOT_CHOSEN
from tailrace.learn.samples import Samples, read_samples, write_samples
from tailrace.policy.learned import architecture
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES, observe
from tailrace.policy.learned.policy import LearnedPolicy, learned_scores, prior_scores
from tailrace.view.records import View

load = read_samples


class Demonstrations(RouterWatcher):
    """Keeps what was seen at each decision of a run, and what was chosen.

    With a ``student``, its prior's scores and its memory belong to what is seen.
    """

    def __init__(self, student: LearnedPolicy | None = None) -> None:
        self._student = student.copy() if student else None
        self._rows: list[tuple[NDArray[np.generic], ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def decided(self, view: View, replica: int) -> None:
        """Keep one decision."""
        n = len(view.replicas)
        replica_obs = np.zeros((n, N_REPLICA_FEATURES), np.float32)
        request_obs = np.zeros(N_REQUEST_FEATURES, np.float32)
        observe(view, replica_obs, request_obs)
        mask = view.replicas["available"] != 0
        prior, memory = np.zeros(n), np.zeros(0, np.float32)
        if self._student is not None:
            params = self._student.params
            prior_scores(view, params, prior)
            start = int(params[architecture.M])
            floats = params.view(np.float32)
            memory = floats[start : start + self._student.config.memory].copy()
            learned_scores(view, params, np.empty(n))  # moves the memory on
        costs = np.where(np.arange(n) == replica, 0.0, NOT_CHOSEN)
        self._rows.append((replica_obs, request_obs, mask, prior, memory, costs))

    def samples(self, world: int = 0) -> Samples:
        """Return all decisions; ``world`` says which traffic they come from."""
        if not self._rows:
            raise TailraceError("no decision has been made yet")
        replica_obs, request_obs, mask, prior, memory, costs = (
            np.stack(column) for column in zip(*self._rows, strict=True)
        )
        number = np.full(len(self), world, np.int32)
        return Samples(replica_obs, request_obs, mask, prior, memory, mask.copy(), costs, number)

    def save(self, path: Path, world: int = 0) -> None:
        """Write the decisions to a NumPy file; ``tailrace train --demonstrations`` reads it."""
        write_samples(self.samples(world), path)
