"""Functions of the H200 set that nobody has seen, with 0 to 5 probes: ten folds over functions, and whole families left out."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.prediction.fit_model import fit_model
from benchmarks.train_predictor import Times, records, times
from lamina.predict import learned

SEEDS = (10, 11, 12)
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
        _say(f"seed {seed}", run)
    families: dict[str, set[str]] = {}
    for name in measured:
        families.setdefault(family(name), set()).add(name)
    found["families"] = {"number": len(families)} | crossed(static, measured, list(families.values()))[0]
    _say("families", found["families"])
    return found


def traced() -> dict[str, Any]:
    """The same with a trace of each new function and nothing else, first seed."""
    static, measured = records(), times()
    folds = np.array_split(np.random.default_rng(SEEDS[0]).permutation(sorted(measured)), FOLDS)
    run, _ = crossed(static, measured, [set(map(str, out)) for out in folds], captured=False)
    _say("traced", run)
    return {"seed": SEEDS[0]} | run


def crossed(
    static: Any, measured: Times, folds: list[set[str]], captured: bool = True
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Not `captured`: nobody knows how many kernels the new ones launch, as if there were a trace and no GPU."""
    errors: dict[int, dict[str, float]] = {count: {} for count in COUNTS}
    inside: dict[int, list[float]] = {count: [] for count in COUNTS}
    for out in folds:  # probes are chosen anew in each fold, from the functions it may know
        model = fit_model("h200", static, {name: points for name, points in measured.items() if name not in out})
        for name in sorted(out):
            record = static[name] if captured else static[name] | {"kernels_b1": 0}
            for count in COUNTS:
                off, hit = _one(model, record, measured[name], count)
                errors[count][name] = float(off.mean())
                inside[count].append(float(hit.mean()))
    run: dict[str, Any] = {}
    for count in COUNTS:
        library = [error for name, error in errors[count].items() if static[name]["family"] != "own"]
        worst = sorted(errors[count].items(), key=lambda item: -item[1])[:6]
        run[str(count)] = {
            "mape": float(np.mean(list(errors[count].values()))),
            "median": float(np.median(list(errors[count].values()))),
            "mape_library_models": float(np.mean(library)),
            "covered": float(np.mean(inside[count])),
            "worst": dict(worst),
        }
    return run, {str(count): found for count, found in errors.items()}


def _say(what: str, run: dict[str, Any]) -> None:
    for count in COUNTS:
        one = run[str(count)]
        print(
            f"  {what}, {count} probes: {one['mape']:.1%}, median {one['median']:.1%}, covered {one['covered']:.1%}", flush=True
        )


def family(name: str) -> str:
    """Who is built alike: `resnet18` and `wide_resnet50_2`, all descendants of BERT, all that are cut into patches."""
    for key, words in FAMILIES.items():
        if any(word in name for word in words):
            return key
    return name


def _one(model: learned.LatencyModel, static: Any, points: dict[tuple[int, int], float], count: int) -> tuple[Any, Any]:
    """Errors and hits of the interval at the points that were not probed."""
    probes = model.probes(count)
    grid = model.predict(static, {place: points[place] for place in probes})
    truth = np.array([[points[batch, units] for units in grid.units] for batch in grid.batches])
    unseen = np.array([[(batch, units) not in probes for units in grid.units] for batch in grid.batches])
    return np.abs(grid.mid / truth - 1)[unseen], ((grid.low <= truth) & (truth <= grid.high))[unseen]
