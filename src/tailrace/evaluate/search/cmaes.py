"""A small CMA-ES: minimise a function of some dozens of numbers by sampling.

After N. Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv 1604.00772), with its default
constants. Written out because it is a page of arithmetic; the usual package is twenty times that.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class CmaEs:
    """Sample candidates, learn from their values: ``tell(candidates, f(candidates))``."""

    def __init__(
        self, start: Array, sigma: float, rng: np.random.Generator, population: int | None = None
    ) -> None:
        """Begin around ``start`` [d] with deviation ``sigma`` in every direction."""
        d = len(start)
        self.mean: Array = np.array(start, np.float64)
        self.sigma = sigma
        self.population = population or 4 + int(3 * np.log(d))
        self._rng = rng
        parents = self.population // 2
        weights = np.log(parents + 0.5) - np.log(np.arange(1, parents + 1))
        self._weights: Array = weights / weights.sum()
        self._effective = 1 / float((self._weights**2).sum())
        mu = self._effective
        self._c_sigma = (mu + 2) / (d + mu + 5)
        self._damping = 1 + 2 * max(0.0, np.sqrt((mu - 1) / (d + 1)) - 1) + self._c_sigma
        self._c_path = (4 + mu / d) / (d + 4 + 2 * mu / d)
        self._c_one = 2 / ((d + 1.3) ** 2 + mu)
        self._c_mu = min(1 - self._c_one, 2 * (mu - 2 + 1 / mu) / ((d + 2) ** 2 + mu))
        self._expected = np.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d * d))
        self._path_sigma: Array = np.zeros(d)
        self._path: Array = np.zeros(d)
        self._covariance: Array = np.eye(d)
        self._generation = 0
        self._factorise()

    def _factorise(self) -> None:
        values, self._axes = np.linalg.eigh(self._covariance)
        self._lengths: Array = np.sqrt(np.maximum(values, 1e-20))

    def ask(self) -> Array:
        """Return candidates [population, d]."""
        normal = self._rng.standard_normal((self.population, len(self.mean)))
        return np.asarray(self.mean + self.sigma * (normal * self._lengths) @ self._axes.T)

    def tell(self, candidates: Array, values: Array) -> None:
        """Move towards the candidates [population, d] of the lowest ``values`` [population]."""
        order = np.argsort(values, kind="stable")[: len(self._weights)]
        steps = (candidates[order] - self.mean) / self.sigma
        step = self._weights @ steps
        self.mean = self.mean + self.sigma * step
        self._generation += 1
        whitened = self._axes @ ((self._axes.T @ step) / self._lengths)
        c, mu = self._c_sigma, self._effective
        self._path_sigma = (1 - c) * self._path_sigma + np.sqrt(c * (2 - c) * mu) * whitened
        length = float(np.linalg.norm(self._path_sigma))
        settled = np.sqrt(1 - (1 - c) ** (2 * self._generation))
        stalled = length / settled >= (1.4 + 2 / (len(step) + 1)) * self._expected
        c = self._c_path
        moved = 0.0 if stalled else np.sqrt(c * (2 - c) * mu)
        self._path = (1 - c) * self._path + moved * step
        lost = c * (2 - c) if stalled else 0.0
        self._covariance = (
            (1 - self._c_one - self._c_mu + self._c_one * lost) * self._covariance
            + self._c_one * np.outer(self._path, self._path)
            + self._c_mu * (steps.T * self._weights) @ steps
        )
        self.sigma *= float(np.exp(self._c_sigma / self._damping * (length / self._expected - 1)))
        self._factorise()
