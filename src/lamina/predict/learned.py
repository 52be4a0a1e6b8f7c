"""Learned latency model for functions that were not measured, or at a few points only.

The model is a library: other functions that were measured everywhere (batch sizes by slices), with what can be said of each
without running it (`model_features.py`). Asked about a new one, a Gaussian process over the library answers in logarithms:

- *Nothing measured*: two processes, one per view of the static features; the surer one counts for more.
- *Some places measured* (probes): the mean of the probes is the level, and what is asked for is the grid around it. Functions
  are alike if their probes lie alike around their levels, and if their features do. Which regime a function is in (bound by
  launches, by arithmetic, by bytes) shows in its probes, and the neighbours it then finds are in the same one: that is why
  this beats correcting a guess with a shape made for the wrong regime.

*How sure is it?* The same question, with the same probes, is put to the library about each of its own members, left out of
it. A Gaussian process knows these answers without a second fit. Their errors, by place and by how sure the process was, are
scaled so that nine in ten of the members' measurements lie inside (conformal); so will the new one's, if it is no stranger
than they were to each other.

The result is made monotone: a bigger batch is never faster, a bigger slice never slower. All this takes milliseconds once per
function; it then is a table like any other, and asking is a look-up. A model file is JSON, numbers and names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.predict import gaussian_process
from lamina.predict.model_features import FEATURE_VIEWS, Record, check_record, estimate_kernels
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

VERSION = 2
SHIPPED_MODELS = Path(__file__).parent / "models"
COVERAGE = 0.9
NOISE = 0.015  #: of one measured point


class ProfileLibrary(Struct, frozen=True, kw_only=True):
    """Contents of a model file: a library of measured functions."""

    device: str
    batches: list[int]
    units: list[int]
    functions: list[str]
    features: dict[str, list[list[float]]]  #: by view, a row per function
    traced: dict[str, list[list[float]]]  #: the same, had only a trace been there: for functions of which there is no more
    logs: list[list[float]]  #: of microseconds, a row per function; batch by batch, units inside
    probes: list[list[tuple[int, int]]] = []  #: (batch, units) worth measuring if it may be one place, two, three ...
    version: int = VERSION
    meta: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PredictedGrid:
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
class LatencyModel:
    library: ProfileLibrary

    def predict(self, static: Record, probes: Mapping[tuple[int, int], float] | None = None) -> PredictedGrid:
        """`probes`: measured microseconds by (batch, units), any number of the grid's points."""
        import numpy as np

        mean, half = self._posterior(static, probes or {})
        shape = (len(self.library.batches), len(self.library.units))
        low, mid, high = (monotone(np.exp(x).reshape(shape)) for x in (mean - half, mean, mean + half))
        return PredictedGrid(self.library.batches, self.library.units, np.minimum(low, mid), mid, np.maximum(mid, high))

    def _posterior(self, static: Record, probes: Mapping[tuple[int, int], float]) -> tuple[Array, Array]:
        """Logarithms over the grid, and how far to both sides nine in ten lie."""
        import numpy as np

        check_record(static)
        library = self._features if static.get("kernels_b1") else self._traced
        record = static if static.get("kernels_b1") else estimate_kernels(static)
        features = {view: np.array(FEATURE_VIEWS[view](record)) for view in library}
        for view, row in features.items():
            if len(row) != library[view].shape[1]:
                raise BadValue(
                    f"view {view!r} of the model has {library[view].shape[1]} features, this version makes {len(row)}",
                    hint="train the model again: python -m benchmarks.train_predictor",
                )
        places = [self._grid_index(batch, units) for batch, units in probes]
        measured = np.log(np.array([_positive(us) for us in probes.values()], dtype=float))
        answer = gaussian_process.posterior(library, features, self._logs, places, measured)
        half = interval_half_width(answer, self._logs, places)
        half[places] = np.minimum(half[places], NOISE * 1.645)
        return answer.mean, half

    def probes(self, count: int) -> list[tuple[int, int]]:
        """Where to measure, if at so many places."""
        if not 0 <= count <= len(self.library.probes):
            raise BadValue(f"{count} probes", hint=f"the model knows where to put up to {len(self.library.probes)}")
        return self.library.probes[count - 1] if count else []

    def _grid_index(self, batch: int, units: int) -> int:
        if batch not in self.library.batches or units not in self.library.units:
            raise BadValue(
                f"a probe at batch {batch} and {units} units is not on the grid of the model",
                hint=f"batches are {self.library.batches}, units {self.library.units}",
            )
        return self.library.batches.index(batch) * len(self.library.units) + self.library.units.index(units)

    @cached_property
    def _features(self) -> dict[str, Array]:
        import numpy as np

        return {view: np.array(rows) for view, rows in self.library.features.items()}

    @cached_property
    def _traced(self) -> dict[str, Array]:
        import numpy as np

        return {view: np.array(rows) for view, rows in self.library.traced.items()}

    @cached_property
    def _logs(self) -> Array:
        import numpy as np

        return np.array(self.library.logs)


def interval_half_width(answer: gaussian_process.Posterior, logs: Array, places: list[int]) -> Array:
    """Half the width of the interval, by place, from what the library's members were off when left out."""
    import numpy as np

    off = np.abs(logs - answer.leave_one_out) / answer.member_deviation[:, None]
    typical = np.maximum(np.sqrt((np.minimum(off, 4 * np.median(off, axis=0)) ** 2).mean(0)), 1e-9)
    unseen = [place for place in range(logs.shape[1]) if place not in places]
    share = min(1.0, COVERAGE * (1 + 1 / len(logs)))  # the new one is one more
    wide = float(np.quantile((off / typical)[:, unseen], share)) if unseen else 1.0
    made: Array = np.maximum(wide * typical * answer.deviation, 1.645 * NOISE)
    return made


def monotone(times: Array) -> Array:
    """Half way between the closest grid above that is monotone and the closest below: noise is not pushed to one side."""
    import numpy as np

    above = np.maximum.accumulate(np.maximum.accumulate(times[:, ::-1], axis=1)[:, ::-1], axis=0)
    below = np.minimum.accumulate(np.minimum.accumulate(times, axis=1)[::-1], axis=0)[::-1]
    made: Array = (above + below) / 2
    return made


def _positive(us: float) -> float:
    if not us > 0:
        raise BadValue(f"a probe of {us} us", hint="measured times are above zero")
    return us


def read_model(path: str | Path) -> LatencyModel:
    try:
        raw = Path(path).read_bytes()
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("version")
        if version != VERSION:
            raise BadValue(f"{path}: version {version} of the model format", hint=f"this is version {VERSION}")
        return LatencyModel(msgspec.json.decode(raw, type=ProfileLibrary))
    except (OSError, msgspec.MsgspecError) as error:
        raise BadValue(f"{path}: {error}", hint="a model is a JSON file as written by benchmarks/train_predictor.py") from error


def write_model(model: LatencyModel, path: str | Path) -> None:
    Path(path).write_bytes(msgspec.json.encode(model.library) + b"\n")


def shipped_model(device: str) -> LatencyModel:
    """The model that comes with the package."""
    path = SHIPPED_MODELS / f"{device}.json"
    if not path.exists():
        there = ", ".join(sorted(file.stem for file in SHIPPED_MODELS.glob("*.json"))) or "none"
        raise BadValue(f"no learned model for device kind {device!r}", hint=f"there are: {there}; profile the function instead")
    return read_model(path)


def predicted_table(model: LatencyModel, functions: Mapping[str, tuple[Record, Mapping[tuple[int, int], float]]]) -> ProfileTable:
    """A predictor for functions with static features and maybe probes; evaluated here and now, never again."""
    device = model.library.device
    return ProfileTable([model.predict(static, probes).profile(name, device) for name, (static, probes) in functions.items()])
