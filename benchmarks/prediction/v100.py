"""How well latencies of the published V100 set are predicted with the inputs of its own predictor, RaPP.

The set: 69 torchvision nets x 4 batch sizes x 20 SM shares x 10 time quotas; a cell is about `max(G, T)`, what the slice needs
and what the host needs to launch under a quota. RaPP's inputs for a model: its graph, six times at batch 1 over the SM share
(5, 10, 30, 60, 80, 100 %) and five at batch 4 on all SMs over the quota (20 .. 100 %). The two questions it reports:
configurations of known models (random cells left out, its own protocol; here), and models it has never seen
(`unseen.py`). `floors` says what could be had at best.
"""

from __future__ import annotations

import csv
import gzip
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.prediction.physics import more_launches, slice_ms
from lamina.predict.model_features import FEATURE_VIEWS

DATA = Path("data/has-gpu/profile_v100.csv.gz")
BATCHES, SHARES, QUOTAS = (1, 2, 4, 8), tuple(range(5, 101, 5)), tuple(range(10, 101, 10))
PROBED_SHARES, PROBED_QUOTAS = (0, 1, 5, 11, 15, 19), (1, 3, 5, 7, 9)
"""Places in `SHARES` at batch 1 and in `QUOTAS` at batch 4."""
FULL, ALL = 9, 19  #: the quota of 100 %, the share of 100 %

TREES = {"objective": "l1", "learning_rate": 0.1, "min_data_in_leaf": 8, "verbosity": -1, "num_threads": 1, "num_leaves": 255,
         "bagging_fraction": 0.7, "bagging_freq": 1, "feature_fraction": 0.6, "max_bin": 127, "deterministic": True}  # fmt: skip


class Set(NamedTuple):
    names: list[str]
    grid: Any  #: logarithms of milliseconds `[model, batch, share, quota]`
    features: Any  #: a row per model
    work: Any  #: a few of them that matter by themselves
    roof: Any  #: logarithms of milliseconds by a roofline `[model, batch, share]`
    more: Any  #: logarithm of how many times more kernels batch 4 takes `[model, batch]`

    @property
    def probes(self) -> Any:
        return np.concatenate([self.grid[:, 0, PROBED_SHARES, FULL], self.grid[:, 2, ALL, :][:, PROBED_QUOTAS]], axis=1)

    @property
    def host(self) -> Any:
        """Launches alone, as far as batch 1 on many SMs shows."""
        return np.median(self.probes[:, 2:6], axis=1)

    @property
    def launches(self) -> Any:
        """Logarithm of how many kernels there are, as far as operators tell."""
        return self.work[:, 3]

    @property
    def nearby(self) -> Any:
        """At batch 1 without a quota, straight between the probed shares."""
        at = np.log(SHARES)
        return np.array([np.interp(at, at[list(PROBED_SHARES)], row) for row in self.probes[:, :6]])


def load(path: Path = DATA) -> Set:
    """Models with holes are left out."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["model"] for row in rows})
    grid = np.full((len(names), 4, 20, 10), np.nan)
    place = {name: number for number, name in enumerate(names)}
    for row in rows:
        where = BATCHES.index(int(row["batch"])), int(row["sm"]) // 5 - 1, int(row["quota"]) // 10 - 1
        grid[place[row["model"]]][where] = float(row["latency_ms"])
    whole = ~np.isnan(grid).any((1, 2, 3))
    kept = [name for name, complete in zip(names, whole, strict=True) if complete]
    operators = {
        line["model"]: line["operators"] for line in map(json.loads, Path("data/operators.jsonl").read_text().splitlines())
    }
    records = [record(name, operators[name]) for name in kept]
    views = [np.array([make(row) for row in records]) for make in FEATURE_VIEWS.values()]
    roof = np.log([slice_ms(operators[name], BATCHES, SHARES) for name in kept])
    more = np.array([more_launches(operators[name]) for name in kept])
    return Set(kept, np.log(grid[whole]), np.column_stack(views), views[1][:, :10], roof, more)


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


def off(predicted: Any, truth: Any) -> Any:
    return np.abs(np.expm1(predicted - truth))


def probed() -> Any:
    made = np.zeros((4, 20, 10), bool)
    made[0, PROBED_SHARES, FULL] = made[2, ALL, PROBED_QUOTAS] = True
    return made


def windowed(values: Any) -> Any:
    """Medians of three neighbouring shares (axis 2): less of the noise of single cells."""
    padded = np.concatenate([values[:, :, :1], values, values[:, :, -1:]], axis=2)
    return np.median(np.stack([padded[:, :, :-2], values, padded[:, :, 2:]]), axis=0)


def parts(grid: Any) -> tuple[Any, Any, Any]:
    """G `[model, batch, share]`; T by batch and quota, from cells that launches bind; and T by share too.

    T depends on the batch: a library may launch more kernels for a larger one. And on the share: shares were measured in
    sittings, and between two of them the pace of the host, or the quota's manager, may have changed."""
    full = grid[..., FULL]
    slices = windowed(full)
    steady = full - full[:, :, 8:].min(2, keepdims=True) < 0.15
    steady[:, :, 12:] = True
    typical = np.nanmedian(np.where(steady[..., None], grid, np.nan), axis=2)
    bound = slices[..., None] < typical[:, :, None] - 0.08
    bound[..., FULL] = full < np.median(full[:, :, 12:], axis=2, keepdims=True) + 0.1
    return slices, typical, windowed(np.where(bound, grid, typical[:, :, None]))


def unseen_configurations(data: Set, seed: int, trees: int = 600) -> dict[str, Any]:
    """RaPP's protocol: a tenth of all cells left out at random. And harder: a tenth of all (model, batch, share) rows."""
    import lightgbm

    of, batch, share, quota = np.indices(data.grid.shape).reshape(4, -1)
    truth, probes, host, nearby = data.grid.reshape(-1), data.probes, data.host, data.nearby
    pace = np.array([np.interp(range(10), PROBED_QUOTAS, row) for row in probes[:, 6:]])
    base = np.maximum(nearby[of, share], pace[of, quota] - pace[of, 9] + host[of])
    rows = np.column_stack([
        batch, share, quota, of, nearby[of, share], nearby[of, share] - host[of], host[of], pace[of, quota],
        pace[of, quota] - pace[of, 9], pace[of, 9] - host[of], probes[of], data.work[of],
    ])  # fmt: skip
    found: dict[str, float] = {"seed": seed}
    rng = np.random.default_rng(seed)
    for split, out in (("cells", rng.random(len(truth)) < 0.1), ("rows", np.repeat(rng.random(len(truth) // 10) < 0.1, 10))):
        model = lightgbm.train(TREES | {"seed": seed}, lightgbm.Dataset(rows[~out], (truth - base)[~out]), trees)
        found[split] = float(off(model.predict(rows[out]) + base[out], truth[out]).mean())
        print(f"  unseen configurations, seed {seed}, {split}: {found[split]:.4f}", flush=True)
    return found


def floors(data: Set) -> dict[str, float]:
    """What is left when more of a model is known than RaPP's points: how much of the error is the data's own noise."""
    grid = data.grid
    _, typical, _ = parts(grid)
    known = {
        "max(G, T), both measured: 89 points of the model": np.maximum(grid[..., FULL:], grid[:, :1, ALL:, :]),
        "max(G, T), G measured, T the median of all its cells of that batch": np.maximum(grid[..., FULL:], typical[:, :, None]),
    }
    return {label: float(off(made, grid).mean()) for label, made in known.items()}


def run() -> dict[str, Any]:
    data = load()
    made: dict[str, Any] = {"models": len(data.names), "cells": int(data.grid.size), "floors": floors(data)}
    for label, error in made["floors"].items():
        print(f"  {label}: {error:.1%}")
    with ProcessPoolExecutor() as pool:
        made["unseen_configurations"] = list(pool.map(partial(unseen_configurations, data), range(2)))
    return made
