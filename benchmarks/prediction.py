"""`python -m benchmarks.prediction [PART ...]`: how good the predictors are, and how fast.

Parts are h200, traced, learners, neighbours, profiling, speed, v100 and v100:SEED; all of them by default. Writes what it found
into results/prediction.json, part by part (those not asked for stay as they are), and plots into docs/img. Functions that
are predicted are never among those learnt from. `lightgbm` is needed for v100 and the comparison of learners, nothing else.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
import random
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import prediction_unseen, prediction_v100
from benchmarks.prediction_plots import plots
from benchmarks.train_predictor import Times, records, tenants, times
from lamina.predict import beside, learned
from lamina.predict.dense import dense
from lamina.predict.devices import preset
from lamina.predict.fit import fit
from lamina.predict.profile import Profile, read_all
from lamina.predict.static import VIEWS
from lamina.predict.table import Table
from lamina.profiler.bench import Run
from lamina.profiler.make import to_points
from lamina.profiler.measure import Measuring

RESULT = Path("results/prediction.json")
SEEDS = (10, 11, 12)
V100_SEEDS = (0, 1, 2, 3)  #: all but the first were looked at once, when the method was settled
COUNTS = (0, 1, 3, 5)
FOLDS = 10
FAMILIES = {
    "resnet": ("resnet", "resnext", "res2net", "repvgg"),
    "densenet": ("densenet",),
    "mobile": ("mobilenet", "mnasnet", "ghostnet"),
    "shufflenet": ("shufflenet",),
    "efficientnet": ("efficientnet",),
    "regnet": ("regnet",),
    "convnext": ("convnext",),
    "inception": ("inception", "googlenet"),
    "vgg": ("vgg", "alexnet"),
    "patches": ("vit_", "deit", "mixer", "xcit"),
    "swin": ("swin", "maxvit"),
    "bert": ("bert", "electra"),
    "decoder": ("gpt2", "t5"),
    "dense layers": ("mlp_", "matmul", "recommender"),
}


def h200() -> dict[str, Any]:
    """Ten folds over the 61 functions, several seeds; and, harder, whole families left out."""
    static, measured = records(), times()
    found: dict[str, Any] = {"functions": len(measured), "folds": FOLDS, "seeds": list(SEEDS), "runs": []}
    for seed in SEEDS:
        folds = np.array_split(np.random.default_rng(seed).permutation(sorted(measured)), FOLDS)
        run, errors = crossed(static, measured, [set(map(str, out)) for out in folds])
        found["runs"].append({"seed": seed} | run)
        found["errors_last_seed"] = errors
        print(seed, {count: [run[str(count)][k] for k in ("mape", "median", "covered")] for count in COUNTS}, flush=True)
    families: dict[str, set[str]] = {}
    for name in measured:
        families.setdefault(family(name), set()).add(name)
    found["families"] = {"number": len(families)} | crossed(static, measured, list(families.values()))[0]
    print("families", {count: [found["families"][str(count)][k] for k in ("mape", "median", "covered")] for count in COUNTS})
    return found


def traced() -> dict[str, Any]:
    """The same with a trace of each new function and nothing else, first seed."""
    static, measured = records(), times()
    folds = np.array_split(np.random.default_rng(SEEDS[0]).permutation(sorted(measured)), FOLDS)
    run, _ = crossed(static, measured, [set(map(str, out)) for out in folds], captured=False)
    print("traced", {count: [run[str(count)][k] for k in ("mape", "median", "covered")] for count in COUNTS})
    return {"seed": SEEDS[0]} | run


def crossed(
    static: Any, measured: Times, folds: list[set[str]], captured: bool = True
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Not `captured`: nobody knows how many kernels the new ones launch, as if there were a trace and no GPU."""
    errors: dict[int, dict[str, float]] = {count: {} for count in COUNTS}
    inside: dict[int, list[float]] = {count: [] for count in COUNTS}
    for out in folds:  # probes are chosen anew in each fold, from the functions it may know
        model = fit("h200", static, {name: points for name, points in measured.items() if name not in out})
        for name in sorted(out):
            record = static[name] if captured else static[name] | {"kernels_b1": 0}
            for count in COUNTS:
                off, hit = _one(model, record, measured[name], count)
                errors[count][name] = _round(off.mean())
                inside[count].append(float(hit.mean()))
    run: dict[str, Any] = {}
    for count in COUNTS:
        library = [error for name, error in errors[count].items() if static[name]["family"] != "own"]
        worst = sorted(errors[count].items(), key=lambda item: -item[1])[:6]
        run[str(count)] = {
            "mape": _round(np.mean(list(errors[count].values()))),
            "median": _round(np.median(list(errors[count].values()))),
            "mape_library_models": _round(np.mean(library)),
            "covered": _round(np.mean(inside[count])),
            "worst": dict(worst),
        }
    return run, {str(count): found for count, found in errors.items()}


def family(name: str) -> str:
    """Who is built alike: `resnet18` and `wide_resnet50_2`, all descendants of BERT, all that are cut into patches."""
    for key, words in FAMILIES.items():
        if any(word in name for word in words):
            return key
    return name


def _one(model: learned.Model, static: Any, points: dict[tuple[int, int], float], count: int) -> tuple[Any, Any]:
    """Errors and hits of the interval at the points that were not probed."""
    probes = model.probes(count)
    grid = model.predict(static, {place: points[place] for place in probes})
    truth = np.array([[points[batch, units] for units in grid.units] for batch in grid.batches])
    unseen = np.array([[(batch, units) not in probes for units in grid.units] for batch in grid.batches])
    return np.abs(grid.mid / truth - 1)[unseen], ((grid.low <= truth) & (truth <= grid.high))[unseen]


def learners() -> dict[str, dict[str, list[float]]]:
    """Others on the same folds (first seed), with the probes that suit ours: mean and median error."""
    static, measured = records(), times()
    names, grid = sorted(measured), sorted(measured[min(measured)])
    logs = np.log([[measured[name][place] for place in grid] for name in names])
    features = np.array([VIEWS["totals"](static[n]) + VIEWS["kinds"](static[n]) for n in names])
    probes = {count: [grid.index(place) for place in learned.shipped("h200").probes(count)] for count in (0, 3, 5)}
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
            made.setdefault(label, {})[str(count)] = [_round(errors.mean()), _round(np.median(errors))]
        print(label, made.get(label), flush=True)
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
            for out in sorted({row[column] for row in rows}):
                cases = {row[0] for row in rows if row[column] == out}
                predict = learn([row for row in rows if row[0] not in cases])
                for place, row in enumerate(rows):
                    if row[column] == out:
                        predicted[place] = predict(row)
            error = np.abs(predicted / truth - 1)
            found.setdefault(f"leave one {split} out", {})[label] = {
                "median": _round(np.median(error)), "p90": _round(np.quantile(error, 0.9)), "mean": _round(error.mean())
            }  # fmt: skip
            if (split, label) == ("case", "fitted"):
                found["predicted"] = [[_round(x), _round(y)] for x, y in zip(predicted, truth, strict=True)]
    print(json.dumps({key: value for key, value in found.items() if key != "predicted"}, indent=1))
    return found


def _fitted(known: list[Any]) -> Callable[[Any], float]:
    line = beside.fit((own, others, slowdown) for _, _, own, others, slowdown in known)
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


class _Replay:
    """A bench that takes as long as was measured on the H200, give or take 2 %; its clock is the device's."""

    device = preset("h200")

    def __init__(self, table: Table, name: str) -> None:
        self.table, self.name, self.rng, self.now_s = table, name, random.Random(1), 0.0

    def run(self, batch: int, units: int) -> Run:
        us = self.table.typical_us(self.name, "h200", batch, units) * self.rng.gauss(1, 0.02)
        self.now_s += us / 1e6
        return Run(us)


def profiling() -> dict[str, Any]:
    """Device time the profiler needs until it claims 5 %, and how far it is off then, on replayed measurements."""
    found: dict[str, Any] = {}
    for profile in read_all(Path("profiles/h200")):
        bench = _Replay(Table([profile]), profile.function)
        outcome = Measuring(bench, 64, 0.05, 60.0, clock_s=lambda bench=bench: bench.now_s).go()  # type: ignore[arg-type,misc]
        made = Table([Profile(function="f", device="h200", points=to_points(outcome.runs))])
        off = [
            abs(
                made.typical_us("f", "h200", p.batch, p.units)
                / bench.table.typical_us(profile.function, "h200", p.batch, p.units)
                - 1
            )
            for p in profile.points
        ]
        found[profile.function] = {
            "device_s": round(outcome.spent_s, 2), "points": len(outcome.runs), "reached": outcome.reached,
            "mean": _round(np.mean(off)), "p90": _round(np.quantile(off, 0.9)),
        }  # fmt: skip
        print(profile.function, found[profile.function], flush=True)
    return found


def speed() -> dict[str, Any]:
    static, model = records()["resnet50"], learned.shipped("h200")
    table = learned.table(model, {"resnet50": (static, {})})
    quick = dense(table, "resnet50", "h200", 64, 16)
    rng = np.random.default_rng(0)
    batches, units = rng.integers(1, 65, 256), rng.integers(1, 17, 256)
    pairs = list(zip(batches.tolist(), units.tolist(), strict=True))
    made = {
        "256 answers from the dense table, us": min(
            timeit.repeat(lambda: quick.many_us(batches, units), number=1000, repeat=7)
        )
        * 1e3,
        "256 answers asked one by one, us": min(
            timeit.repeat(lambda: [table.latency_us("resnet50", "h200", b, u) for b, u in pairs], number=100, repeat=7)
        ) * 1e4,
        "static features to grid, us": min(timeit.repeat(lambda: model.predict(static), number=10, repeat=7)) * 1e5,
    }  # fmt: skip
    print(made)
    return {key: round(value, 1) for key, value in made.items()}


def _round(value: Any) -> float:
    return round(float(value), 4)


def v100() -> dict[str, Any]:
    return prediction_v100.run()


def unseen(seed: int) -> dict[str, Any]:
    return prediction_unseen.unseen_models(prediction_v100.load(), seed)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "h200": h200, "traced": traced, "learners": learners, "neighbours": neighbours, "profiling": profiling, "speed": speed,
    "v100": v100,
    **{f"v100:{seed}": functools.partial(unseen, seed) for seed in V100_SEEDS},
}  # fmt: skip


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        begin_s = time.monotonic()
        made = PARTS[name]()
        found = json.loads(RESULT.read_text()) if RESULT.exists() else {}  # now: another part may have been made meanwhile
        found[name] = made
        took_s = found.get("made", {}).get("seconds", {}) | {name: round(time.monotonic() - begin_s)}
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        found["made"] = {"date": datetime.date.today().isoformat(), **versions, "seconds": took_s}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    plots(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
