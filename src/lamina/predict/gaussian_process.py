"""Gaussian processes of `learned.py`: the posterior for a new function, given a library of functions with features and grids.

All in logarithms, all closed form. Leaving a member out of a process needs no second fit: the answer for it follows from the
inverse that is there already. So every answer comes with those the library would have given about its own members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]


class KernelSetting(NamedTuple):
    """Kernel parameters of the process over one view, before anything is measured."""

    length: float
    linear: float  #: weight of the straight line: past the last known function its trend goes on
    noise: float
    far: float  #: features further out than this many standard deviations count as that far: a line has its limits


VIEW_SETTINGS = {"totals": KernelSetting(0.8, 12.0, 0.1, 3.0), "kinds": KernelSetting(0.8, 12.0, 0.01, 8.0)}
SHAPE = 2.0  #: how much a probe's distance from the level counts, per unit of its logarithm
LEVEL = 0.05  #: and the level itself
TREND = 0.5  #: weight of the straight line in the features, over the number of probes
PROBED_NOISE = 0.1  #: noise of the process around the level
MAX_DEVIATIONS = 3.0
"""Chosen once, by leaving functions of the H200 set out; all may be halved or doubled without changing much."""


@dataclass(frozen=True, slots=True)
class Posterior:
    mean: Array  #: over the grid
    deviation: float  #: how unsure of it, in units that are those of `unsure`
    leave_one_out: Array  #: the same question about each member, left out
    member_deviation: Array  #: of these


class Similarity(NamedTuple):
    """Similarity of functions by their features alone; the last row and column are the new one's."""

    distance: Array
    inner_product: Array


def posterior(
    library: Mapping[str, Array], features: Mapping[str, Array], logs: Array, places: Sequence[int], measured: Array
) -> Posterior:
    """`library` and `features` by view; `measured` are logarithms at `places`, none or some."""
    if not places:
        return _combine(
            [_posterior_from_features(setting, library[view], features[view], logs) for view, setting in VIEW_SETTINGS.items()]
        )
    return posterior_with_probes(similarity(library, features), logs, places, measured)


def _posterior_from_features(setting: KernelSetting, library: Array, features: Array, logs: Array) -> Posterior:
    import numpy as np

    points = _standardize(library, features, setting.far)
    size = points.shape[1]
    kernel = np.exp(-0.5 * _squared_distances(points) / (setting.length**2 * size)) + setting.linear * points @ points.T / size
    made = _solve(kernel, setting.noise, logs)
    scale = np.median(
        ((logs - made.leave_one_out) ** 2).mean(1) / made.member_deviation**2
    )  # the median: of oddities it knows nothing
    return Posterior(
        made.mean, made.deviation * float(np.sqrt(scale)), made.leave_one_out, made.member_deviation * np.sqrt(scale)
    )


def similarity(library: Mapping[str, Array], features: Mapping[str, Array]) -> Similarity:
    import numpy as np

    points = np.column_stack([_standardize(library[view], features[view], MAX_DEVIATIONS) for view in VIEW_SETTINGS])
    return Similarity(_squared_distances(points) / points.shape[1], points @ points.T / points.shape[1])


def posterior_with_probes(like: Similarity, logs: Array, places: Sequence[int], measured: Array) -> Posterior:
    import numpy as np

    probes = np.vstack([logs[:, places], measured])
    level = probes.mean(1, keepdims=True)
    seen = np.column_stack([SHAPE * (probes - level), LEVEL * level])
    seen = seen - seen[:-1].mean(0)
    kernel = np.exp(-0.5 * (_squared_distances(seen) + like.distance)) + seen @ seen.T + TREND / len(places) * like.inner_product
    made = _solve(kernel, PROBED_NOISE, logs - level[:-1])
    return Posterior(made.mean + level[-1], made.deviation, made.leave_one_out + level[:-1], made.member_deviation)


def _solve(kernel: Array, noise: float, targets: Array) -> Posterior:
    """The last row and column of the kernel are the new function's."""
    import numpy as np

    mean = targets.mean(0)
    inverse = np.linalg.inv(kernel[:-1, :-1] + noise * np.eye(len(targets)))
    dual = inverse @ (targets - mean)
    like = kernel[-1, :-1]
    variance = float(kernel[-1, -1] + noise - like @ inverse @ like)
    believed = 1 / np.diag(inverse)
    left_out = targets - dual * believed[:, None]
    return Posterior(like @ dual + mean, float(np.sqrt(max(variance, noise))), left_out, np.sqrt(believed))


def _combine(views: Sequence[Posterior]) -> Posterior:
    """One answer of several: the square of the usual weights, since views that are off are off by far."""
    import numpy as np

    variances = np.array([[*view.member_deviation, view.deviation] for view in views]) ** 2
    shares = variances**-2.0
    shares = shares / shares.sum(0)
    means = np.array([np.vstack([view.leave_one_out, view.mean]) for view in views])
    mean = (shares[..., None] * means).sum(0)
    unsure = np.sqrt(1 / (1 / variances).sum(0))
    return Posterior(mean[-1], float(unsure[-1]), mean[:-1], unsure[:-1])


def _standardize(library: Array, features: Array, far: float) -> Array:
    """In standard deviations of the library; the last row is the new function's."""
    import numpy as np

    center, scale = library.mean(0), library.std(0)
    scale = np.where(scale < 1e-6, 1.0, scale)  # all alike: it tells nothing, and must not blow up for one that is not
    made: Array = np.clip((np.vstack([library, features]) - center) / scale, -far, far)
    return made


def _squared_distances(points: Array) -> Array:
    squares = (points**2).sum(1)
    made: Array = squares[:, None] + squares[None] - 2 * points @ points.T
    return made.clip(0)
