"""How well latencies of the published V100 set are predicted with the inputs of its own predictor, RaPP.

The set: 69 torchvision nets x 4 batch sizes x 20 SM shares x 10 time quotas. RaPP's inputs for a model: its graph, six times at
batch 1 over the SM share (5, 10, 30, 60, 80, 100 %) and five at batch 4 on all SMs over the quota (20 .. 100 %). The two
questions it reports: configurations of known models (random cells left out, its own protocol), and models it has never seen.
Boosted trees on top of `max(G, T)`, both parts read off the probes; for unseen models G comes from `lamina.predict.learned`.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lamina.predict import fit
from lamina.predict.learned import Model
from lamina.predict.static import VIEWS

BATCHES, SHARES, QUOTAS = (1, 2, 4, 8), tuple(range(5, 101, 5)), tuple(range(10, 101, 10))
PROBED_SHARES, PROBED_QUOTAS = (0, 1, 5, 11, 15, 19), (1, 3, 5, 7, 9)
"""Places in `SHARES` at batch 1 and in `QUOTAS` at batch 4."""

TREES = {"objective": "huber", "alpha": 0.1, "learning_rate": 0.1, "min_child_samples": 15, "verbose": -1, "n_jobs": 2,
         "subsample": 0.7, "subsample_freq": 1, "colsample_bytree": 0.6, "max_bin": 127}  # fmt: skip


def load(folder: Path) -> tuple[list[str], Any]:
    """Names, and logarithms of milliseconds `[model, batch, share, quota]`; models with holes are left out."""
    with gzip.open(folder / "profile_v100.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["model"] for row in rows})
    grid = np.full((len(names), 4, 20, 10), np.nan)
    place = {name: number for number, name in enumerate(names)}
    for row in rows:
        where = BATCHES.index(int(row["batch"])), int(row["sm"]) // 5 - 1, int(row["quota"]) // 10 - 1
        grid[place[row["model"]]][where] = float(row["latency_ms"])
    whole = ~np.isnan(grid).any((1, 2, 3))
    return [name for name, kept in zip(names, whole, strict=True) if kept], np.log(grid[whole])


def record(name: str, operators: list[list[Any]]) -> dict[str, Any]:
    """A static record out of the operators alone, in four bytes an element."""
    total = {k: sum(row[1] * row[i] for row in operators) for i, k in ((2, "flops"), (3, "weights"), (4, "read"), (5, "written"))}
    count = {kind: sum(row[1] for row in operators if row[0] == kind) for kind in ("norm", "matmul", "elementwise")}
    convolutions = sum(row[1] for row in operators if row[0] in ("conv", "pointwise", "depthwise", "grouped"))
    ops = sum(row[1] for row in operators)
    return {
        "model": name, "params": total["weights"], "param_bytes": 4 * total["weights"], "nesting": 1, "layers_conv": convolutions,
        "layers_linear": count["matmul"], "layers_norm": count["norm"], "layers_activation": count["elementwise"],
        "layers_attention": 0, "flops_b1": total["flops"], "flops_b8": 8 * total["flops"],
        "read_bytes_b1": 4 * (total["read"] + total["weights"]), "written_bytes_b1": 4 * total["written"],
        "read_bytes_b8": 4 * (8 * total["read"] + total["weights"]), "written_bytes_b8": 32 * total["written"],
        "ops_b1": ops, "leaf_calls_b1": ops, "kernels_b1": ops, "op_counts_b1": {}, "operators": operators,
    }  # fmt: skip


def probes_of(grid: Any) -> Any:
    return np.concatenate([grid[:, 0, PROBED_SHARES, 9], grid[:, 2, 19, :][:, PROBED_QUOTAS]], axis=1)


def cells(grid: Any, static: Any, full: Any) -> tuple[Any, Any]:
    """A row of features per cell, and the logarithm of `max(G, T)` it starts from. `full`: G by model, batch and share."""
    models = len(grid)
    probes = probes_of(grid)
    idle = np.median(probes[:, 2:6], axis=1)  # launches alone, as far as batch 1 on many SMs shows
    pace = np.array([np.interp(range(10), PROBED_QUOTAS, row) for row in probes[:, 6:]])
    where = np.indices((models, 4, 20, 10)).reshape(4, -1)
    m, b, s, q = where
    nearby = np.array([np.interp(np.log(SHARES), np.log([SHARES[i] for i in PROBED_SHARES]), row) for row in probes[:, :6]])
    throttled = pace[m, q] - pace[m, 9] + idle[m]
    base = np.maximum(full[m, b, s], throttled)
    rows = np.column_stack([
        b, s, q, full[m, b, s], full[m, b, s] - idle[m], throttled - full[m, b, s], idle[m],
        nearby[m, s], pace[m, q], pace[m, q] - pace[m, 9],
        pace[m, 9] - idle[m], probes[m], static[m],
    ])  # fmt: skip
    return rows, base


def read_off(grid: Any) -> Any:
    """G without any learning: batch 1 interpolated over the share, times the growth from batch 1 to 4 on all SMs."""
    probes = probes_of(grid)
    nearby = np.array([np.interp(np.log(SHARES), np.log([SHARES[i] for i in PROBED_SHARES]), row) for row in probes[:, :6]])
    return np.repeat(nearby[:, None], 4, axis=1)


def boosted(rows: Any, targets: Any, trees: int, leaves: int, seed: int) -> Any:
    import lightgbm

    return lightgbm.LGBMRegressor(n_estimators=trees, num_leaves=leaves, random_state=seed, **TREES).fit(rows, targets)


def off(predicted: Any, truth: Any) -> Any:
    return np.abs(np.expm1(predicted - truth))


def unseen_configurations(grid: Any, static: Any, seeds: range, trees: int = 800, leaves: int = 63) -> dict[str, list[float]]:
    """RaPP's protocol: a tenth of all cells left out at random. And harder: a tenth of all (model, batch, share) rows."""
    rows, base = cells(grid, static, read_off(grid))
    rows = np.column_stack([rows, np.indices(grid.shape).reshape(4, -1)[0]])
    truth, found = grid.reshape(-1), {"cells": [], "rows": []}  # type: ignore[var-annotated]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for split, out in (
            ("cells", rng.random(len(truth)) < 0.1),
            ("rows", np.repeat(rng.random(len(truth) // 10) < 0.1, 10)),
        ):
            model = boosted(rows[~out], (truth - base)[~out], trees, leaves, seed)
            found[split].append(float(off(model.predict(rows[out]) + base[out], truth[out]).mean()))
            print(f"  seed {seed}, {split}: {found[split][-1]:.4f}", flush=True)
    return found


def whole_gpu(names: list[str], records: dict[str, Any], grid: Any, known: list[int], asked: list[int]) -> Any:
    """G of the models asked about, learnt from those known: static features and the seven probes without a quota."""
    batches, shares = list(BATCHES), list(SHARES)
    features = {view: np.array([make(records[names[i]]) for i in known]) for view, make in VIEWS.items()}
    logs = grid[known][..., 9].reshape(len(known), -1) + np.log(1e3)
    model = Model(fit._learn("v100", batches, shares, [names[i] for i in known], features, logs))
    made = []
    for i in asked:
        seen = {(1, SHARES[s]): float(np.exp(grid[i, 0, s, 9]) * 1e3) for s in PROBED_SHARES}
        seen[4, 100] = float(np.exp(grid[i, 2, 19, 9]) * 1e3)
        made.append(model.spread(records[names[i]], seen)[0].reshape(4, 20) - np.log(1e3))
    return np.array(made)


def unseen_models(names: list[str], records: dict[str, Any], grid: Any, static: Any, seed: int, folds: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    order, errors, by_name = rng.permutation(len(names)), [], {}
    probed = np.zeros((4, 20, 10), bool)
    probed[0, PROBED_SHARES, 9] = probed[2, 19, PROBED_QUOTAS] = True
    parts = np.array_split(order, folds)
    for fold, out in enumerate(parts):
        known = [int(i) for i in order if i not in out]
        full = np.zeros(grid.shape[:3])
        for inner in np.array_split(np.array(known), 6):  # what the trees are trained on must be as unsure as what they will meet
            full[inner] = whole_gpu(names, records, grid, [i for i in known if i not in inner], [int(i) for i in inner])
        full[out] = whole_gpu(names, records, grid, known, [int(i) for i in out])
        rows, base = cells(grid, static, full)
        of = np.indices(grid.shape).reshape(4, -1)[0]
        train, test = np.isin(of, known), np.isin(of, out) & ~np.tile(probed.reshape(-1), len(names))
        truth = grid.reshape(-1)
        some = np.flatnonzero(train)[seed % 3 :: 3]  # neighbours along the grid tell little new of a model
        model = boosted(rows[some], (truth - base)[some], 300, 15, seed)
        found = off(model.predict(rows[test]) + base[test], truth[test])
        errors.append(float(found.mean()))
        for i in out:
            by_name[names[i]] = float(found[of[test] == i].mean())
        print(
            f"  seed {seed}, fold {fold}: {errors[-1]:.4f} (max(G, T) alone {off(base[test], truth[test]).mean():.4f})",
            flush=True,
        )
    return {
        "mape": float(np.mean(list(by_name.values()))),
        "folds": errors,
        "worst": dict(sorted(by_name.items(), key=lambda x: -x[1])[:5]),
    }


def run(folder: Path, quick: bool = False) -> dict[str, Any]:
    names, grid = load(folder)
    lines = map(json.loads, Path("data/operators.jsonl").read_text().splitlines())
    operators = {line["model"]: line["operators"] for line in lines}
    records = {name: record(name, operators[name]) for name in names}
    static = np.array([VIEWS["kinds"](records[name]) for name in names])
    begin_s = time.monotonic()
    made: dict[str, Any] = {"models": len(names), "cells": int(grid.size)}
    made["unseen_models"] = [
        unseen_models(names, records, grid, static, seed) for seed in range(1 if quick else 2)
    ]  # 6 folds each
    made["unseen_configurations"] = unseen_configurations(
        grid, static, range(1 if quick else 3), *((200, 31) if quick else (800, 63))
    )
    made["seconds"] = round(time.monotonic() - begin_s, 1)
    return made


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), "--quick" in sys.argv), indent=1))
