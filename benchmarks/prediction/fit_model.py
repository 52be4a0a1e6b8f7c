"""Training of a latency model (`learned.py`) from functions that were measured everywhere. No epochs, no seed.

There is nothing to train: the model is the measurements themselves. What is worked out here is where a new function should be
probed: at the places after which the library's members, left out, are predicted best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lamina.errors import BadValue
from lamina.predict import gaussian_process
from lamina.predict.learned import LatencyModel, ProfileLibrary
from lamina.predict.model_features import FEATURE_VIEWS, Record, check_record, estimate_kernels

if TYPE_CHECKING:
    from lamina.predict.learned import Array

PROBES = 5  #: places worked out; more are seldom worth their time
MIN_GAIN = 0.003  #: part of the error that moving a probe must save


def fit_model(
    device: str,
    records: Mapping[str, Record],
    times: Mapping[str, Mapping[tuple[int, int], float]],
    meta: Mapping[str, Any] | None = None,
) -> LatencyModel:
    """`times`: microseconds by function and (batch, units); every function on the same grid."""
    import numpy as np

    names = sorted(times)
    if len(names) < 8:
        raise BadValue(f"{len(names)} functions are too few to learn from", hint="at least 8; 40 and more are of use")
    for name in names:
        check_record(records[name])
    grid = sorted(times[names[0]])
    batches, units = sorted({batch for batch, _ in grid}), sorted({count for _, count in grid})
    for name in names:
        if sorted(times[name]) != grid or len(grid) != len(batches) * len(units):
            raise BadValue(
                f"{name!r} is not measured on the whole grid", hint="every function at every batch size on every slice"
            )
    logs = np.log(np.array([[times[name][place] for place in grid] for name in names]))
    features = {view: np.array([make(records[name]) for name in names]) for view, make in FEATURE_VIEWS.items()}
    return LatencyModel(
        ProfileLibrary(
            device=device,
            batches=batches,
            units=units,
            functions=names,
            features={view: [_six_digits(row) for row in rows] for view, rows in features.items()},
            traced={
                view: [_six_digits(make(estimate_kernels(records[name]))) for name in names]
                for view, make in FEATURE_VIEWS.items()
            },
            logs=[_six_digits(row) for row in logs],
            probes=[[grid[place] for place in places] for places in choose_probes(features, logs, PROBES)],
            meta=dict(meta or {}),
        )
    )


def choose_probes(features: Mapping[str, Array], logs: Array, most: int) -> list[list[int]]:
    """Places of the grid to measure if it may be one, two, ... `most` of them: the best set found by adding one to the set
    before, then moving one after another as long as that helps."""
    anybody = {view: rows[0] for view, rows in features.items()}  # of a new function nothing is asked here
    like = gaussian_process.similarity(features, anybody)
    found: list[list[int]] = []
    chosen: list[int] = []
    for _ in range(min(most, logs.shape[1] - 1)):
        least, chosen = _best_addition(like, logs, chosen)
        moved = True
        while moved:
            moved = False
            for turn in range(len(chosen)):
                rest = chosen[:turn] + chosen[turn + 1 :]
                off, best = _best_addition(like, logs, rest)
                if off < least * (1 - MIN_GAIN):
                    chosen, least, moved = best, off, True
        found.append(chosen)
    return found


def _best_addition(like: gaussian_process.Similarity, logs: Array, places: list[int]) -> tuple[float, list[int]]:
    """With the one more place that helps most; and the error then."""
    return min(
        (_leave_one_out_error(like, logs, [*places, more]), [*places, more])
        for more in range(logs.shape[1])
        if more not in places
    )


def _leave_one_out_error(like: gaussian_process.Similarity, logs: Array, places: list[int]) -> float:
    """Mean error of the members left out, at the places not probed."""
    import numpy as np

    answer = gaussian_process.posterior_with_probes(like, logs, places, logs[0, places])
    unseen = [place for place in range(logs.shape[1]) if place not in places]
    return float(np.abs(answer.leave_one_out - logs)[:, unseen].mean())


def _six_digits(values: Array | Sequence[float]) -> list[float]:
    """Six digits are plenty, and halve the file."""
    return [float(f"{value:.6g}") for value in values]
