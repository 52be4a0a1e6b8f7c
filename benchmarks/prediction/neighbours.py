"""Slowdowns of co-located functions, predicted for cases and for models left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.train_predictor import tenants
from lamina.predict import interference

DRAWN = {"fitted": "predicted", "gpu-let's linear, refitted": "predicted by gpu-let's form"}


def neighbours() -> dict[str, Any]:
    """Leave one case out, and, harder, one model with every case it is in."""
    rows = tenants()
    truth = np.array([slowdown for *_, slowdown in rows])
    found: dict[str, Any] = {"tenants": len(rows), "cases": len({case for case, *_ in rows})}
    for split, column in (("case", 0), ("model", 1)):
        for label, learn in (
            ("fitted", _fitted),
            ("gpu-let's linear, refitted", _linear),
            ("mean", _mean),
            ("nothing", _nothing),
        ):
            predicted = np.zeros(len(rows))
            for out in sorted({str(row[column]) for row in rows}):
                cases = {row[0] for row in rows if row[column] == out}
                predict = learn([row for row in rows if row[0] not in cases])
                for place, row in enumerate(rows):
                    if row[column] == out:
                        predicted[place] = predict(row)
            error = np.abs(predicted / truth - 1)
            median, p90, mean = np.median(error), np.quantile(error, 0.9), error.mean()
            found.setdefault(f"leave one {split} out", {})[label] = {"median": median, "p90": p90, "mean": mean}
            print(f"  leave one {split} out, {label}: median {median:.1%}, 90th percentile {p90:.1%}", flush=True)
            if split == "case" and label in DRAWN:
                found[DRAWN[label]] = [[float(x), float(y)] for x, y in zip(predicted, truth, strict=True)]
    return found


def _fitted(known: list[Any]) -> Callable[[Any], float]:
    line = interference.fit_slowdown((own, others, slowdown) for _, _, own, others, slowdown in known)
    return lambda row: line.slowdown(row[2], row[3])


def _linear(known: list[Any]) -> Callable[[Any], float]:
    """Its form on what this set has: own bandwidth and that of the worst neighbour; L2 use was not measured."""

    def terms(row: Any) -> list[float]:
        return [1.0, row[2].demand, max(other.demand for other in row[3])]

    weights = np.linalg.lstsq(np.array([terms(row) for row in known]), np.array([row[4] for row in known]), rcond=None)[0]
    return lambda row: max(1.0, float(np.dot(terms(row), weights)))


def _mean(known: list[Any]) -> Callable[[Any], float]:
    mean = float(np.mean([row[4] for row in known]))
    return lambda row: mean


def _nothing(known: list[Any]) -> Callable[[Any], float]:
    return lambda row: 1.0
