"""Arrival processes: when requests, or the first turns of conversations, arrive.

Every process turns (rate, count, generator) into ``count`` sorted arrival times in seconds whose
long-run rate is ``rate``. Rates scale and time constants stay: a burst lasts as long at 100
requests a second as at 1, as it does when one cluster takes more of the same users. A longer table
of the same seed begins with the shorter one, and the rate's ups and downs fall at the same instants
whatever the rate.

The processes with a varying rate are drawn in *operational time*, in which the rate is constant,
and then warped through the integral of the relative rate (mean 1).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rng = np.random.Generator

#: Steps of relative rate: durations [k] in s, and their integrals of the relative rate [k] in s.
Block = tuple[Floats, Floats]


class ArrivalProcess(Protocol):
    """A source of arrival times."""

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s, of long-run rate ``rate_rps``."""


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals at a constant rate."""

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s."""
        return np.cumsum(rng.standard_exponential(count)) / rate_rps


@dataclass(frozen=True)
class GammaRenewal:
    """Independent gamma gaps of coefficient of variation ``cv``; cv 1 is Poisson."""

    cv: float

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s."""
        return unit_renewal(self.cv, count, rng) / rate_rps


@dataclass(frozen=True)
class Mmpp2:
    """Two alternating rates with exponential dwell times; gamma gaps of ``cv`` within them.

    The rates are relative to each other: they are scaled so that their mean over time is 1.
    """

    high: float
    low: float
    mean_high_s: float
    mean_low_s: float
    cv: float = 1.0

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s."""
        gap_rng, path_rng = rng.spawn(2)
        return warp(unit_renewal(self.cv, count, gap_rng) / rate_rps, self._blocks(path_rng))

    def _blocks(self, rng: Rng) -> Iterator[Block]:
        cycle_s = self.mean_high_s + self.mean_low_s
        mean = (self.high * self.mean_high_s + self.low * self.mean_low_s) / cycle_s
        rates = np.array([self.high, self.low]) / mean
        dwell_s = np.array([self.mean_high_s, self.mean_low_s])
        if rng.random() * cycle_s >= self.mean_high_s:  # start in the stationary distribution
            rates, dwell_s = rates[::-1], dwell_s[::-1]
        while True:
            duration_s = (rng.standard_exponential((1024, 2)) * dwell_s).ravel()
            yield duration_s, duration_s * np.tile(rates, 1024)


@dataclass(frozen=True)
class CoxLognormal:
    """Poisson arrivals whose rate wanders: exp of an Ornstein-Uhlenbeck process.

    ``relative_sd`` is the rate's standard deviation over its mean, ``tau_s`` its correlation time.
    """

    relative_sd: float
    tau_s: float

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s."""
        gap_rng, path_rng = rng.spawn(2)
        operational_s = np.cumsum(gap_rng.standard_exponential(count)) / rate_rps
        return warp(operational_s, self._blocks(path_rng))

    def _blocks(self, rng: Rng) -> Iterator[Block]:
        step_s = self.tau_s / 64
        duration_s = np.full(8192, step_s)
        rate = wandering_rate(self.relative_sd, step_s / self.tau_s, rng)
        while True:
            yield duration_s, duration_s * rate(duration_s.size)


@dataclass(frozen=True)
class OnOffBatch:
    """Alternating ON and OFF periods; within ON, small batches at a jittering rate.

    Gamma ON lengths, lognormal OFF lengths; the rate of an ON period is lognormal and correlated
    with its length; inside, it jitters quickly; every event is a geometric batch of requests.
    """

    on_shape: float
    on_mean_s: float
    off_mu: float  # of the log of OFF seconds
    off_sigma: float
    rate_sigma: float  # of the log rate between ON periods
    length_rate_correlation: float
    jitter_sd: float  # relative sd of the rate within an ON period
    jitter_tau_s: float
    batch_mean: float  # requests per event
    batch_spread_s: float
    tick_s: float = 0.1

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s."""
        gap_rng, path_rng, size_rng, spread_rng = rng.spawn(4)
        sizes = size_rng.geometric(1.0 / self.batch_mean, count)
        events = int(np.searchsorted(np.cumsum(sizes), count)) + 1
        event_rate = rate_rps / self.batch_mean
        operational_s = np.cumsum(gap_rng.standard_exponential(events)) / event_rate
        event_s = warp(operational_s, self._blocks(path_rng))
        member_s = np.repeat(event_s, sizes[:events])
        member_s += self.batch_spread_s * spread_rng.random(member_s.size)
        member_s.sort()
        return member_s[:count]

    @property
    def off_mean_s(self) -> float:
        """Mean length of an OFF period, s."""
        return math.exp(self.off_mu + self.off_sigma**2 / 2)

    def _mean_on_mass_s(self) -> float:
        """Mean of (rate factor x length) of an ON period, by quadrature over its length."""
        from scipy.special import gammaincinv, ndtri  # takes as long to import as all of Tailrace

        u = (np.arange(20_000) + 0.5) / 20_000
        length_s = self.on_mean_s / self.on_shape * gammaincinv(self.on_shape, u)
        # E[rate | length] of the Gaussian copula; z is the normal score of the length.
        z = ndtri(u)
        rho = self.length_rate_correlation
        log_rate = self.rate_sigma * rho * z + self.rate_sigma**2 * (1 - rho**2) / 2
        return float(np.mean(length_s * np.exp(log_rate)))

    def _blocks(self, rng: Rng) -> Iterator[Block]:
        """Yield ticks of ON periods, each period followed by one silent step."""
        from scipy.special import gammaincinv, ndtr

        periods = 256
        scale = (self.on_mean_s + self.off_mean_s) / self._mean_on_mass_s()
        jitter = wandering_rate(self.jitter_sd, self.tick_s / self.jitter_tau_s, rng)
        rho = self.length_rate_correlation
        # The first cycle is not typical, so start at a random time within the first twenty.
        skip_s = 20 * (self.on_mean_s + self.off_mean_s) * rng.random()
        while True:
            z = rng.standard_normal((3, periods))
            uniform = np.clip(ndtr(z[0]), 1e-12, 1 - 1e-12)
            on_s = self.on_mean_s / self.on_shape * gammaincinv(self.on_shape, uniform)
            rate = scale * np.exp(self.rate_sigma * (rho * z[0] + math.sqrt(1 - rho**2) * z[1]))
            off_s = np.exp(self.off_mu + self.off_sigma * z[2])
            ticks = np.ceil(on_s / self.tick_s).astype(np.int64) + 1  # the last is the silence
            end = np.cumsum(ticks)
            duration_s = np.full(end[-1], self.tick_s)
            duration_s[end - 2] = on_s - (ticks - 2) * self.tick_s
            duration_s[end - 1] = off_s
            mass_s = duration_s * np.repeat(rate, ticks) * jitter(duration_s.size)
            mass_s[end - 1] = 0.0
            first = int(np.searchsorted(np.cumsum(duration_s), skip_s))
            skip_s = 0.0
            yield duration_s[first:], mass_s[first:]


@dataclass(frozen=True)
class Diurnal:
    """Poisson arrivals at a rate that follows 24 hourly values, interpolated, day after day.

    ``day_s`` may be shorter than a day, to run through a whole one within a short table.
    """

    hourly: tuple[float, ...]
    day_s: float = 86_400.0
    start_hour: float = 0.0

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s."""
        operational_s = np.cumsum(rng.standard_exponential(count)) / rate_rps
        return warp(operational_s, self._blocks())

    def _blocks(self) -> Iterator[Block]:
        steps = 1440
        hours = len(self.hourly)
        hour = (np.arange(steps) + 0.5) * hours / steps + self.start_hour
        # An hourly value is the mean of its hour, so it stands at the hour's middle.
        profile = np.interp(hour, np.arange(hours) + 0.5, self.hourly, period=hours)
        duration_s = np.full(steps, self.day_s / steps)
        mass_s = duration_s * profile / profile.mean()
        while True:
            yield duration_s, mass_s


@dataclass(frozen=True)
class ClientPool:
    """Many clients of Zipf rates, each a gamma renewal with a CV of its own, superposed.

    The clients' CVs are lognormal; which client is bursty is drawn from the generator.
    """

    clients: int = 60
    zipf: float = 1.5
    cv_median: float = 1.25
    cv_sigma: float = 0.75
    cv_range: tuple[float, float] = (0.5, 10.0)

    def times(self, rate_rps: float, count: int, rng: Rng) -> Floats:
        """Return sorted arrival times [count] in s."""
        share = zipf_weights(self.clients, self.zipf)
        pool_rng, *client_rngs = rng.spawn(self.clients + 1)
        log_cv = self.cv_sigma * pool_rng.standard_normal(self.clients)
        cvs = np.clip(self.cv_median * np.exp(log_cv), *self.cv_range)
        horizon_s = 1.05 * (count + 10) / rate_rps
        pieces = [np.zeros(0) for _ in range(self.clients)]
        while True:
            for i, client_rng in enumerate(client_rngs):
                rate = rate_rps * share[i]
                pieces[i] = _extend(pieces[i], horizon_s, rate, float(cvs[i]), client_rng)
            merged = np.concatenate([p[p <= horizon_s] for p in pieces])
            if merged.size >= count:
                merged.sort()
                return merged[:count]
            horizon_s *= 1.3


def unit_renewal(cv: float, count: int, rng: Rng) -> Floats:
    """Return points [count] of a stationary gamma renewal process of rate 1.

    The first gap is the remainder of one that has already begun (a length-biased gap times a
    uniform number): with a high CV, a process that starts with a full gap starts in a burst.
    """
    shape = 1.0 / cv**2
    first = rng.random() * rng.standard_gamma(shape + 1.0)
    gaps = rng.standard_gamma(shape, count)
    gaps[:1] = first
    return np.cumsum(gaps) / shape


def wandering_rate(relative_sd: float, step: float, rng: Rng) -> Callable[[int], Floats]:
    """Return a function that continues a lognormal rate of mean 1, sampled every ``step`` tau."""
    sigma = math.sqrt(math.log1p(relative_sd**2))
    keep = math.exp(-step)
    last = rng.standard_normal()

    def more(count: int) -> Floats:
        nonlocal last
        noise = math.sqrt(1 - keep**2) * rng.standard_normal(count)
        # scipy.signal.lfilter does the same, but takes two seconds to import.
        points = accumulate(noise.tolist(), lambda y, x: keep * y + x, initial=last)
        path = np.fromiter(points, np.float64, count + 1)[1:]
        last = float(path[-1])
        rate: Floats = np.exp(sigma * path - sigma**2 / 2)
        return rate

    return more


def warp(operational_s: Floats, blocks: Iterable[Block]) -> Floats:
    """Map sorted operational times [n] to real times [n] through blocks of relative rate.

    Blocks come one by one, so a long silent stretch costs time but not memory.
    """
    times_s = np.empty_like(operational_s)
    done = 0
    start_s = mass_start_s = 0.0
    for duration_s, mass_s in blocks:
        edges_s = start_s + np.concatenate([[0.0], np.cumsum(duration_s)])
        mass_edges_s = mass_start_s + np.concatenate([[0.0], np.cumsum(mass_s)])
        start_s, mass_start_s = float(edges_s[-1]), float(mass_edges_s[-1])
        stop = int(np.searchsorted(operational_s, mass_start_s))
        times_s[done:stop] = np.interp(operational_s[done:stop], mass_edges_s, edges_s)
        done = stop
        if done == operational_s.size:
            break
    return times_s


def zipf_weights(count: int, exponent: float) -> Floats:
    """Return shares [count] that fall with rank like rank**-exponent and add up to 1."""
    weights: Floats = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    return weights


def replay(recorded_s: Floats, time_scale: float = 1.0) -> Floats:
    """Return recorded times [n] from 0 on, stretched by ``time_scale`` (0.5: twice as fast)."""
    from_start_s: Floats = recorded_s - recorded_s[0]
    return from_start_s * time_scale


def _extend(times_s: Floats, horizon_s: float, rate_rps: float, cv: float, rng: Rng) -> Floats:
    """Continue one client's renewal until it passes the horizon, always in the same steps."""
    shape = 1.0 / cv**2
    parts = [times_s]
    if times_s.size == 0:
        parts.append(unit_renewal(cv, 1, rng) / rate_rps)
    while parts[-1][-1] <= horizon_s:
        gaps_s = rng.standard_gamma(shape, 1024) / (shape * rate_rps)
        parts.append(parts[-1][-1] + np.cumsum(gaps_s))
    return np.concatenate(parts)
