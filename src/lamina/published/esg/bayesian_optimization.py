"""Constrained Bayesian optimisation over a grid of choices (as Aquatope, ASPLOS 2023, uses it): few, noisy, costly trials.

Two Gaussian processes are fitted to the trials so far, one to the logarithm of the cost, one to that of the latency. The
next trials are those with the largest expected improvement of the cost times the chance to be within the limit. The best
so far is read off the fitted mean, not off a lucky trial. Before each fit, trials far from what all others say (leave one
out, outside 95 %) are set aside: they are noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lamina.planner.configs import Floats

    Points = NDArray[np.int64]

LENGTH_SCALES = (0.3, 0.7, 1.5, 3.0)
"""Length scales weighed, in widths of the whole range; of all dimensions alike, for seventy trials teach no more."""

NOISES = (1e-3, 0.1)
"""Variances of the noise weighed, as parts of that of what is observed."""


class TrialPoint(NamedTuple):
    point: tuple[int, ...]
    cost: float
    latency: float


class OptimizationResult(NamedTuple):
    """The cheapest trial within the limit, else the fastest; and all of them in their order."""

    best: TrialPoint
    met: bool
    trials: tuple[TrialPoint, ...]


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A Gaussian process with a squared-exponential kernel, fitted to values of mean 0 and deviation 1."""

    points: Floats
    length: float
    noise: float
    mean: float
    scale: float
    weights: Floats
    inverse: Floats

    @classmethod
    def fit(
        cls, points: Floats, values: Floats, lengths: Sequence[float] = LENGTH_SCALES, noises: Sequence[float] = NOISES
    ) -> GaussianProcess:
        """With the length scale and the noise under which the values are most likely."""
        import numpy as np

        mean, scale = float(values.mean()), float(values.std()) or 1.0
        flat = (values - mean) / scale
        best: tuple[float, GaussianProcess] | None = None
        for length, noise in product(lengths, noises):
            covariance = kernel(points, points, length) + noise * np.eye(len(points))
            inverse = np.asarray(np.linalg.inv(covariance), np.float64)
            weights = inverse @ flat
            likelihood = -0.5 * float(flat @ weights) - 0.5 * float(np.linalg.slogdet(covariance)[1])
            if best is None or likelihood > best[0]:
                best = likelihood, cls(points, length, noise, mean, scale, weights, inverse)
        assert best is not None
        return best[1]

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Mean and deviation of what is expected there."""
        import numpy as np

        near = kernel(points, self.points, self.length)
        mean = near @ self.weights
        variance = np.maximum(1.0 - ((near @ self.inverse) * near).sum(axis=1), 1e-9)
        return self.mean + self.scale * mean, self.scale * np.sqrt(variance)

    def with_expected(self, point: Floats) -> GaussianProcess:
        """The same, as if it had been tried there and had come out as expected."""
        import numpy as np

        values = self.predict(np.concatenate([self.points, point]))[0]
        return GaussianProcess.fit(np.concatenate([self.points, point]), values, (self.length,), (self.noise,))

    def leave_one_out_errors(self) -> Floats:
        """How far each value is from what the others say of it, in standard deviations."""
        import numpy as np

        return np.abs(self.weights / np.sqrt(np.diag(self.inverse)))


def kernel(a: Floats, b: Floats, length: float) -> Floats:
    import numpy as np

    apart = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * (a @ b.T)  # |a - b|^2, without an array of differences
    return np.asarray(np.exp(-0.5 / length**2 * np.maximum(apart, 0.0)))


def fit_without_outliers(points: Floats, values: Floats) -> GaussianProcess:
    """Without those the others contradict, unless few would be left."""
    first = GaussianProcess.fit(points, values)
    kept = first.leave_one_out_errors() <= 1.96
    few = kept.sum() <= len(points) * 2 // 3
    return first if few or kept.all() else GaussianProcess.fit(points[kept], values[kept])


def expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """How much lower than `best` it is expected to come out, counting nothing for higher."""
    z = (best - mean) / deviation
    return deviation * (z * normal_cdf(z) + _normal_pdf(z))


def normal_cdf(z: Floats) -> Floats:
    """Share of a normal distribution below z."""
    import numpy as np

    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z.tolist()])


def _normal_pdf(z: Floats) -> Floats:
    import numpy as np

    return np.asarray(np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))


def minimise(
    trial: Callable[[tuple[int, ...]], tuple[float, float]],
    levels: Sequence[int],
    limit: float,
    seed: int,
    *,
    starts: int = 10,
    rounds: int = 20,
    each: int = 3,
    candidates: int = 200,
) -> OptimizationResult:
    """Least cost with latency within `limit`. `trial(point)` gives (cost, latency); dimension d has `levels[d]` choices.

    Where there are no more points than trials, each is tried once: nothing is left to guess.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    tops = np.array(levels)
    width = np.maximum(tops - 1, 1)
    trials: list[TrialPoint] = []

    def attempt(point: Points) -> None:
        place = tuple(int(value) for value in point)
        cost, latency = trial(place)
        trials.append(TrialPoint(place, cost, latency))

    few = math.prod(levels) <= starts + rounds * each
    first = np.array(list(product(*map(range, levels)))) if few else rng.integers(0, tops, (starts, len(tops)))
    for point in first:
        attempt(point)
    for _ in range(0 if few else rounds):
        seen = np.array([one.point for one in trials]) / width
        costs = np.log([max(one.cost, 1e-12) for one in trials])
        times = np.log([max(one.latency, 1e-9) for one in trials])
        offered = _candidates(rng, tops, min(trials, key=lambda one: (one.latency > limit, one.cost)).point, candidates)
        for point in _next_trials(seen, costs, times, math.log(max(limit, 1e-9)), offered, width, each):
            attempt(point)
    met = [one for one in trials if one.latency <= limit]
    best = min(met, key=lambda one: one.cost) if met else min(trials, key=lambda one: one.latency)
    return OptimizationResult(best, bool(met), tuple(trials))


def _candidates(rng: np.random.Generator, tops: Points, best: tuple[int, ...], count: int) -> Points:
    """Half anywhere, half a step or two from the best so far."""
    import numpy as np

    anywhere = rng.integers(0, tops, (count, len(tops)))
    around = np.array(best) + rng.integers(-2, 3, (count, len(tops))) * (rng.random((count, len(tops))) < 0.3)
    return np.unique(np.concatenate([anywhere, np.clip(around, 0, tops - 1)]), axis=0)


def _next_trials(
    seen: Floats, costs: Floats, times: Floats, limit: float, offered: Points, width: Points, each: int
) -> list[Points]:
    """The most promising, one after another; each is believed to come out as expected before the next is chosen."""
    import numpy as np

    chosen: list[Points] = []
    spots = offered / width
    cost, time = fit_without_outliers(seen, costs), fit_without_outliers(seen, times)
    for _ in range(min(each, len(offered))):
        mean, deviation = time.predict(spots)
        worth = normal_cdf((limit - mean) / deviation)
        inside = time.predict(seen)[0] <= limit
        if inside.any():
            worth *= expected_improvement(*cost.predict(spots), float(cost.predict(seen)[0][inside].min()))
        at = int(np.argmax(worth))
        chosen.append(offered[at])
        cost, time = cost.with_expected(spots[at : at + 1]), time.with_expected(spots[at : at + 1])
        spots, offered = np.delete(spots, at, axis=0), np.delete(offered, at, axis=0)
    return chosen
