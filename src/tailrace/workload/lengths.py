"""Token lengths: lognormal mixtures, alone or jointly for prompt and output.

All parameters are of the natural logarithm. Every drawn quantity has a random stream of its own
(:class:`Streams`), so that one more request, or another arrival rate, changes no length.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace import seeds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Streams:
    """A seed and a path: every name below the path is an independent random stream."""

    seed: int
    path: str

    def rng(self, name: str) -> np.random.Generator:
        """Return a new generator of a stream."""
        return seeds.generator(self.seed, f"{self.path}/{name}")

    def below(self, name: str) -> "Streams":
        """Return the streams below a name."""
        return Streams(self.seed, f"{self.path}/{name}")


@dataclass(frozen=True)
class Clip:
    """Least and greatest number of tokens, both allowed."""

    low: int
    high: int

    def tokens(self, values: Floats) -> Ints:
        """Round values [n] to whole tokens within the bounds."""
        return np.clip(np.rint(values), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Lognormals:
    """Mixture of lognormals: components (weight, mu, sigma), and with some chance a constant.

    ``atom`` = (chance, tokens) of the constant. Weights need not add up to 1.
    """

    components: tuple[tuple[float, float, float], ...]
    clip: Clip
    atom: tuple[float, int] = (0.0, 0)

    def draw(self, count: int, streams: Streams) -> Ints:
        """Draw tokens [count]."""
        weight, mu, sigma = np.array(self.components).T
        which = pick(weight, streams.rng("component").random(count))
        normal = streams.rng("length").standard_normal(count)
        tokens = self.clip.tokens(np.exp(mu[which] + sigma[which] * normal))
        chance, constant = self.atom
        if chance > 0:
            tokens[streams.rng("atom").random(count) < chance] = constant
        return tokens


@dataclass(frozen=True)
class Joint:
    """One component of a joint mixture: log prompt and log output are bivariate normal."""

    weight: float
    mu_prompt: float
    mu_output: float
    sigma_prompt: float
    sigma_output: float
    correlation: float


@dataclass(frozen=True)
class JointMixture:
    """Mixture of joint lognormals; with some chance the prompt lies at the context limit instead.

    In real traffic one correlation cannot describe how output depends on prompt (in Azure's
    conversations the median output rises to 400 tokens and falls to 60 again as prompts grow).
    """

    components: tuple[Joint, ...]
    prompt: Clip
    output: Clip
    cap_chance: float = 0.0
    cap: Clip = Clip(1, 1)

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Longest prompt and answer."""
        return max(self.prompt.high, self.cap.high), self.output.high

    def draw(self, count: int, streams: Streams) -> tuple[Ints, Ints]:
        """Draw prompt tokens [count] and output tokens [count]."""
        which = self.draw_component(count, streams)
        normal = streams.rng("prompt").standard_normal(count)
        prompt = self.prompt_tokens(which, normal)
        output = self.output_tokens(which, normal, streams)
        if self.cap_chance > 0:
            capped = streams.rng("capped").random(count) < self.cap_chance
            at = streams.rng("cap").integers(self.cap.low, self.cap.high + 1, count)
            prompt = np.where(capped, at, prompt)
        return prompt, output

    def draw_component(self, count: int, streams: Streams) -> Ints:
        """Draw component numbers [count]."""
        weight = np.array([c.weight for c in self.components])
        return pick(weight, streams.rng("component").random(count))

    def prompt_tokens(self, which: Ints, normal: Floats) -> Ints:
        """Return prompts [n] of components [n] and normal scores [n]."""
        mu = np.array([c.mu_prompt for c in self.components])
        sigma = np.array([c.sigma_prompt for c in self.components])
        return self.prompt.tokens(np.exp(mu[which] + sigma[which] * normal))

    def output_tokens(self, which: Ints, prompt_normal: Floats, streams: Streams) -> Ints:
        """Draw outputs [n] given components [n] and the normal scores [n] of their prompts."""
        mu = np.array([c.mu_output for c in self.components])
        sigma = np.array([c.sigma_output for c in self.components])
        rho = np.array([c.correlation for c in self.components])[which]
        own = streams.rng("output").standard_normal(which.size)
        score = rho * prompt_normal + np.sqrt(1 - rho**2) * own
        return self.output.tokens(np.exp(mu[which] + sigma[which] * score))


def pick(weights: Floats, uniform: Floats) -> Ints:
    """Turn uniform numbers [n] into indices [n] drawn by weight."""
    bounds = np.cumsum(weights)
    index = np.searchsorted(bounds / bounds[-1], uniform, side="right")
    return np.minimum(index, len(weights) - 1)
