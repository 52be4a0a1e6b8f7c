"""Other learners on the folds and probes of the one used: what the choice of `lamina.predict.learned` rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.prediction.h200 import FOLDS, SEEDS
from benchmarks.train_predictor import records, times
from lamina.predict import learned
from lamina.predict.model_features import FEATURE_VIEWS


def learners() -> dict[str, dict[str, list[float]]]:
    """Others on the same folds (first seed), with the probes that suit ours: mean and median error."""
    static, measured = records(), times()
    names, grid = sorted(measured), sorted(measured[min(measured)])
    logs = np.log([[measured[name][place] for place in grid] for name in names])
    features = np.array([FEATURE_VIEWS["totals"](static[n]) + FEATURE_VIEWS["kinds"](static[n]) for n in names])
    probes = {count: [grid.index(place) for place in learned.shipped_model("h200").probes(count)] for count in (0, 3, 5)}
    folds = [
        np.array([names.index(n) for n in out])
        for out in np.array_split(np.random.default_rng(SEEDS[0]).permutation(names), FOLDS)
    ]
    made: dict[str, dict[str, list[float]]] = {}
    for label, learner in (("nearest function", _nearest), ("ridge per place", _ridge), ("boosted trees", _trees)):
        for count in (0, 3, 5):
            try:
                errors = _by_learner(learner, features, logs, probes[count], grid, folds)
            except ImportError:
                continue
            made.setdefault(label, {})[str(count)] = [float(errors.mean()), float(np.median(errors))]
        shown = {count: f"{mean:.1%}" for count, (mean, _) in made.get(label, {}).items()}
        print(f"  {label}, by number of probes: {shown or 'lightgbm is not installed'}", flush=True)
    return made


Learner = Callable[[Any, Any, Any, list[Any]], Any]


def _by_learner(learner: Learner, features: Any, logs: Any, probes: list[int], grid: list[Any], folds: list[Any]) -> Any:
    inputs = np.column_stack([features, logs[:, probes]])
    predicted = np.zeros_like(logs)
    for out in folds:
        known = np.setdiff1d(np.arange(len(logs)), out)
        center, scale = inputs[known].mean(0), inputs[known].std(0)
        points = np.clip((inputs - center) / np.where(scale < 1e-6, 1, scale), -5, 5)
        predicted[out] = learner(points[known], logs[known], points[out], grid)
    unseen = [place for place in range(logs.shape[1]) if place not in probes]
    return np.abs(np.expm1(predicted - logs))[:, unseen]


def _ridge(points: Any, logs: Any, asked: Any, grid: list[Any]) -> Any:
    mean = logs.mean(0)
    weights = np.linalg.solve(points.T @ points + 3.0 * np.eye(points.shape[1]), points.T @ (logs - mean))
    return asked @ weights + mean


def _nearest(points: Any, logs: Any, asked: Any, grid: list[Any]) -> Any:
    return logs[np.argmin(((asked[:, None] - points[None]) ** 2).sum(-1), axis=1)]


def _trees(points: Any, logs: Any, asked: Any, grid: list[Any]) -> Any:
    import lightgbm

    places = np.log2(np.array(grid, dtype=float))

    def rows(inputs: Any) -> Any:
        return np.column_stack([np.repeat(inputs, len(places), axis=0), np.tile(places, (len(inputs), 1))])

    settings = {
        "objective": "regression", "num_leaves": 15, "learning_rate": 0.08, "min_data_in_leaf": 20,
        "feature_fraction": 0.5, "monotone_constraints": [0] * points.shape[1] + [1, -1], "seed": 0, "verbosity": -1,
        "num_threads": 1,
    }  # fmt: skip
    model = lightgbm.train(settings, lightgbm.Dataset(rows(points), logs.reshape(-1)), 200)
    return np.array(model.predict(rows(asked))).reshape(len(asked), -1)
