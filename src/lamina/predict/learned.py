"""Latency of a function nobody has measured, or measured at a few points only.

A model of 61 other functions' grids (batch sizes by slices) in logarithms, all of it Gaussian, so that every step is a
little linear algebra and every answer has a spread:

1. *Before any measurement*: two Gaussian processes over static features (`static.py`), one per view. Each says how far the
   function is from what it knows, and the surer one counts for more.
2. *How such guesses are wrong*: the guesses for functions left out of the fit, one grid of errors each, in units of how sure
   the guess was. A guess that is too low at one point is too low at its neighbours, and in the ways it was for others: that
   is a covariance.
3. *Probes*: conditioning on the errors seen there corrects the rest of the grid and narrows it.

The spread is scaled so that 90 % of the points of functions left out fall inside (split-conformal, by number of probes). The
result is made monotone: a bigger batch is never faster, a bigger slice never slower. All this happens once per function; it
then is a table like any other, and asking takes a look-up. A model file is JSON, numbers and names only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.predict.profile import Point, Profile
from lamina.predict.static import VIEWS, Record, check
from lamina.predict.table import Table

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

VERSION = 1
SHIPPED = Path(__file__).parent / "models"

SMOOTH = 0.03  #: errors that no other function has shown: this large, and alike within so many octaves
OCTAVES = 2.5
NOISE = 0.015  #: of one measured point


class View(Struct, frozen=True):
    """A Gaussian process over one view of the static features; `weights` are its dual coefficients, one row per function."""

    name: str
    center: list[float]
    scale: list[float]
    points: list[list[float]]
    weights: list[list[float]]
    inverse: list[list[float]]  #: of the kernel between the functions
    length: float
    linear: float
    noise: float
    far: float  #: features further out than this many standard deviations count as that far
    variance: float  #: of an error, over the variance the process itself believes in


class Weights(Struct, frozen=True, kw_only=True):
    """What a model file holds."""

    device: str
    batches: list[int]
    units: list[int]
    functions: list[str]
    mean: list[float]
    views: list[View]
    covariance: list[list[float]]  #: of errors over how large they were expected to be; batch by batch, units inside
    widen: dict[str, float]  #: by number of probes: standard deviations that hold 90 %
    probes: list[tuple[int, int]]  #: (batch, units) worth measuring, most telling first
    version: int = VERSION
    meta: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Grid:
    """Predicted microseconds, `[batch][units]`; 90 of 100 measurements lie between `low` and `high`."""

    batches: list[int]
    units: list[int]
    low: Array
    mid: Array
    high: Array

    def profile(self, function: str, device: str) -> Profile:
        """As if it had been measured: the median, and the upper end as the time to plan with."""
        points = [
            Point(batch=batch, units=units, p50_us=float(self.mid[row, column]), p99_us=float(self.high[row, column]))
            for row, batch in enumerate(self.batches)
            for column, units in enumerate(self.units)
        ]
        return Profile(function=function, device=device, points=points, meta={"source": "predicted"})


@dataclass
class Model:
    weights: Weights

    def predict(self, static: Record, probes: Mapping[tuple[int, int], float] | None = None) -> Grid:
        """`probes`: measured microseconds by (batch, units), any number of the grid's points."""
        import numpy as np

        mean, deviation = self.spread(static, probes or {})
        wide = deviation * self._widen(len(probes or {}))
        shape = (len(self.weights.batches), len(self.weights.units))
        low, mid, high = (monotone(np.exp(x).reshape(shape)) for x in (mean - wide, mean, mean + wide))
        return Grid(self.weights.batches, self.weights.units, np.minimum(low, mid), mid, np.maximum(mid, high))

    def spread(self, static: Record, probes: Mapping[tuple[int, int], float]) -> tuple[Array, Array]:
        """Logarithms over the grid and their standard deviations, before calibration."""
        import numpy as np

        check(static)
        places = [self._place(batch, units) for batch, units in probes]
        measured = np.log(np.array([self._positive(us) for us in probes.values()], dtype=float))
        return self._corrected(*self.guess(static), places, measured)

    def guess(self, static: Record) -> tuple[Array, float]:
        """Logarithms of the grid from static features alone, and how far off it may be."""
        import numpy as np

        means, variances = zip(*(process(view, np.array(VIEWS[view.name](static))) for view in self.weights.views), strict=True)
        mean, unsure = agreed(np.array(means), np.array(variances))
        return mean + np.array(self.weights.mean), float(unsure)

    def _corrected(self, guess: Array, unsure: float, places: Sequence[int], measured: Array) -> tuple[Array, Array]:
        """The guess and its standard deviation, given what was measured at some places of the grid."""
        import numpy as np

        covariance = unsure**2 * self._covariance + self._smooth
        if not places:
            return guess, np.sqrt(np.diag(covariance))
        rows = covariance[places]
        gain = np.linalg.solve(rows[:, places], rows).T
        left = np.diag(covariance) - (gain * rows.T).sum(1)
        return guess + gain @ (measured - guess[places]), np.sqrt(np.maximum(left, NOISE**2))

    def _place(self, batch: int, units: int) -> int:
        if batch not in self.weights.batches or units not in self.weights.units:
            raise BadValue(
                f"a probe at batch {batch} and {units} units is not on the grid of the model",
                hint=f"batches are {self.weights.batches}, units {self.weights.units}",
            )
        return self.weights.batches.index(batch) * len(self.weights.units) + self.weights.units.index(units)

    @staticmethod
    def _positive(us: float) -> float:
        if not us > 0:
            raise BadValue(f"a probe of {us} us", hint="measured times are above zero")
        return us

    def _widen(self, count: int) -> float:
        known = sorted((int(key), value) for key, value in self.weights.widen.items())
        return next((value for key, value in reversed(known) if key <= count), known[0][1])

    @cached_property
    def _covariance(self) -> Array:
        import numpy as np

        return np.array(self.weights.covariance)

    @cached_property
    def _smooth(self) -> Array:
        return smooth(self.weights.batches, self.weights.units)


def kernel(left: Array, right: Array, length: float, linear: float) -> Array:
    """Alike if close by, and a straight line further out: past the last known function its trend goes on."""
    import numpy as np

    size = left.shape[1]
    apart = ((left[:, None] - right[None]) ** 2).sum(-1)
    made: Array = np.exp(-0.5 * apart / (length**2 * size)) + linear * (left @ right.T) * 4 / size
    return made


def standard(features: Array, center: Array, scale: Array, far: float) -> Array:
    """In standard deviations of the functions known, and no further out than `far` of them: a straight line has its limits."""
    import numpy as np

    made: Array = np.clip((features - center) / scale, -far, far)
    return made


def process(view: View, features: Array) -> tuple[Array, float]:
    """Mean over the grid and variance of one view."""
    import numpy as np

    if len(features) != len(view.center):
        raise BadValue(
            f"view {view.name!r} of the model has {len(view.center)} features, this version computes {len(features)}",
            hint="train the model again: python -m benchmarks.train_predictor",
        )
    here = standard(features, np.array(view.center), np.array(view.scale), view.far)[None]
    like = kernel(here, np.array(view.points), view.length, view.linear)
    own = kernel(here, here, view.length, view.linear)[0, 0] + view.noise
    known = (like @ np.array(view.inverse) @ like.T)[0, 0]
    mean: Array = (like @ np.array(view.weights))[0]
    return mean, view.variance * max(float(own - known), view.noise)


def agreed(means: Array, variances: Array) -> tuple[Array, Array]:
    """One guess out of the views' (first axis): the square of the usual weights, since views that are off are off by far."""
    import numpy as np

    shares = variances**-2.0
    shares = shares / shares.sum(0)
    mean: Array = (shares[..., None] * means).sum(0)
    return mean, np.sqrt(1 / (1 / variances).sum(0))


def smooth(batches: Sequence[int], units: Sequence[int]) -> Array:
    """Covariance of errors nobody has shown yet, and of the noise of one point."""
    import numpy as np

    places = np.array([(np.log2(batch), np.log2(count)) for batch in batches for count in units])
    apart = ((places[:, None] - places[None]) ** 2).sum(-1)
    made: Array = SMOOTH**2 * np.exp(-0.5 * apart / OCTAVES**2) + NOISE**2 * np.eye(len(places))
    return made


def monotone(times: Array) -> Array:
    """Half way between the closest grid above that is monotone and the closest below: noise is not pushed to one side."""
    import numpy as np

    above = np.maximum.accumulate(np.maximum.accumulate(times[:, ::-1], axis=1)[:, ::-1], axis=0)
    below = np.minimum.accumulate(np.minimum.accumulate(times, axis=1)[::-1], axis=0)[::-1]
    made: Array = (above + below) / 2
    return made


def read(path: str | Path) -> Model:
    try:
        weights = msgspec.json.decode(Path(path).read_bytes(), type=Weights)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadValue(f"{path}: {error}", hint="a model is a JSON file as written by benchmarks/train_predictor.py") from error
    if weights.version != VERSION:
        raise BadValue(f"{path}: version {weights.version} of the model format", hint=f"this is version {VERSION}")
    return Model(weights)


def write(model: Model, path: str | Path) -> None:
    Path(path).write_bytes(msgspec.json.encode(model.weights) + b"\n")


def shipped(device: str) -> Model:
    """The model that comes with the package."""
    path = SHIPPED / f"{device}.json"
    if not path.exists():
        there = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json"))) or "none"
        raise BadValue(f"no learned model for device kind {device!r}", hint=f"there are: {there}; profile the function instead")
    return read(path)


def table(model: Model, functions: Mapping[str, tuple[Record, Mapping[tuple[int, int], float]]]) -> Table:
    """A predictor for functions with static features and maybe probes; evaluated here and now, never again."""
    device = model.weights.device
    return Table([model.predict(static, probes).profile(name, device) for name, (static, probes) in functions.items()])
