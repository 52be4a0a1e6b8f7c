"""Makes a learned model (`learned.py`) from functions that were measured everywhere. Closed form: no epochs, no seed.

Leaving one function out of a Gaussian process needs no second fit: the guess for it follows from the inverse that is there
already. So the errors the model learns from are those of guesses that had not seen the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from lamina.errors import BadValue
from lamina.predict.learned import Model, View, Weights, agreed, kernel, smooth, standard
from lamina.predict.static import VIEWS, Record, check

if TYPE_CHECKING:
    from lamina.predict.learned import Array


class Setting(NamedTuple):
    """Of one view's process."""

    length: float
    linear: float  #: weight of the straight line
    noise: float
    far: float  #: features further out than this many standard deviations count as that far


SETTINGS = {"totals": Setting(0.8, 3.0, 0.1, 3.0), "kinds": Setting(0.8, 3.0, 0.01, 8.0)}
"""Chosen once, by ten-fold cross-validation over the functions of the H200 set; per fit they would follow its oddities."""

FARTHEST = (
    3.0  #: an error beyond that many times the expected one counts as this: one oddity must not shape the covariance of all
)
TYPICAL = 0.15  #: error of a guess, for the choice of probes
COUNTS = (0, 1, 2, 3, 4, 5, 6, 8)  #: of probes for which the spread is calibrated
COVER = 0.9


def fit(
    device: str,
    records: Mapping[str, Record],
    times: Mapping[str, Mapping[tuple[int, int], float]],
    probes: Sequence[tuple[int, int]] = (),
    meta: Mapping[str, Any] | None = None,
) -> Model:
    """`times`: microseconds by function and (batch, units); every function on the same grid. No `probes`: they are chosen."""
    import numpy as np

    names = sorted(times)
    if len(names) < 8:
        raise BadValue(f"{len(names)} functions are too few to learn from", hint="at least 8; 40 and more are of use")
    for name in names:
        check(records[name])
    grid = sorted(times[names[0]])
    batches, units = sorted({batch for batch, _ in grid}), sorted({count for _, count in grid})
    for name in names:
        if sorted(times[name]) != grid or len(grid) != len(batches) * len(units):
            raise BadValue(
                f"{name!r} is not measured on the whole grid", hint="every function at every batch size on every slice"
            )
    logs = np.log(np.array([[times[name][place] for place in grid] for name in names]))
    mean = logs.mean(0)
    features = {name: np.array([view(records[n]) for n in names]) for name, view in VIEWS.items()}
    unfinished = _learn(device, batches, units, names, features, logs)
    covariance = np.array(unfinished.covariance)
    chosen = list(probes) or [grid[place] for place in telling(TYPICAL**2 * covariance + smooth(batches, units), max(COUNTS))]
    scores: dict[int, list[Array]] = {count: [] for count in COUNTS}
    for row, name in enumerate(names):  # the calibration knows nothing of the function it is made with
        others = np.arange(len(names)) != row
        left_out = {view: matrix[others] for view, matrix in features.items()}
        model = Model(_learn(device, batches, units, [n for n in names if n != name], left_out, logs[others]))
        for count in COUNTS:
            mean, deviation = model.spread(records[name], {place: times[name][place] for place in chosen[:count]})
            unseen = [place not in chosen[:count] for place in grid]
            scores[count].append((np.abs(logs[row] - mean) / deviation)[unseen])
    widen = {str(count): round(float(np.quantile(np.concatenate(found), COVER)), 4) for count, found in scores.items()}
    return Model(msgspec.structs.replace(unfinished, widen=widen, probes=chosen, meta=dict(meta or {})))


def _learn(
    device: str, batches: list[int], units: list[int], names: list[str], features: Mapping[str, Array], logs: Array
) -> Weights:
    """All but the calibration."""
    import numpy as np

    mean = logs.mean(0)
    made = [_process(name, features[name], logs - mean, setting) for name, setting in SETTINGS.items()]
    guesses, unsure = agreed(np.array([m.left_out for m in made]), np.array([m.variances for m in made]))
    errors = np.clip((logs - mean - guesses) / unsure[:, None], -FARTHEST, FARTHEST)
    return Weights(
        device=device,
        batches=batches,
        units=units,
        functions=names,
        mean=_short(mean),
        views=[m.view() for m in made],
        covariance=[_short(row) for row in errors.T @ errors / len(errors)],
        widen={"0": 1.0},
        probes=[],
    )


def telling(covariance: Array, count: int) -> list[int]:
    """Places of the grid to measure, one after another: each leaves the rest with the least spread."""
    import numpy as np

    places: list[int] = []
    for _ in range(count):
        spreads = np.sqrt(np.maximum(np.diag(covariance), 0))
        left = {
            place: np.sqrt(np.maximum(np.diag(covariance) - covariance[place] ** 2 / covariance[place, place], 0)).sum()
            for place in range(len(spreads))
            if place not in places
        }
        best = min(left, key=lambda place: left[place])
        covariance = covariance - np.outer(covariance[best], covariance[best]) / covariance[best, best]
        places.append(best)
    return places


@dataclass(frozen=True, slots=True)
class _Process:
    """One view under one setting, and what it says of each function from all others."""

    name: str
    features: Array
    inverse: Array
    dual: Array
    setting: Setting
    left_out: Array
    variances: Array
    factor: float

    def view(self) -> View:
        center, scale, points = _standard(self.features, self.setting.far)
        rows = [[_short(row) for row in matrix] for matrix in (points, self.dual, self.inverse)]
        length, linear, noise, far = self.setting
        return View(self.name, _short(center), _short(scale), rows[0], rows[1], rows[2], length, linear, noise, far, self.factor)


def _standard(features: Array, far: float) -> tuple[Array, Array, Array]:
    import numpy as np

    center, scale = features.mean(0), features.std(0)
    scale = np.where(scale < 1e-6, 1.0, scale)  # all alike: it tells nothing, and must not blow up for one that is not
    return center, scale, standard(features, center, scale, far)


def _process(name: str, features: Array, targets: Array, setting: Setting) -> _Process:
    import numpy as np

    length, linear, noise, far = setting
    points = _standard(features, far)[2]
    inverse: Array = np.linalg.inv(kernel(points, points, length, linear) + noise * np.eye(len(points))).astype(np.float64)
    dual = inverse @ targets
    believed = 1 / np.diag(inverse)
    left_out = targets - dual * believed[:, None]
    factor = float(np.median(((left_out - targets) ** 2).mean(1) / believed))  # the median: of oddities it knows nothing
    return _Process(name, features, inverse, dual, setting, left_out, factor * believed, factor)


def _short(values: Array) -> list[float]:
    """Six digits are plenty, and halve the file."""
    return [float(f"{value:.6g}") for value in values]
