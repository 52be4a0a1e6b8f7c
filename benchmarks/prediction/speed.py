"""How long answers take, once a function is known."""

from __future__ import annotations

import timeit
from typing import Any

import numpy as np

from benchmarks.train_predictor import records
from lamina.predict import learned


def speed() -> dict[str, Any]:
    static, model = records()["resnet50"], learned.shipped_model("h200")
    table = learned.predicted_table(model, {"resnet50": (static, {})})
    rng = np.random.default_rng(0)
    batches, units = rng.integers(1, 65, 256), rng.integers(1, 17, 256)
    pairs = list(zip(batches.tolist(), units.tolist(), strict=True))
    made = {
        "256 answers asked one by one, us": min(
            timeit.repeat(lambda: [table.latency_us("resnet50", "h200", b, u) for b, u in pairs], number=100, repeat=7)
        ) * 1e4,
        "static features to grid, us": min(timeit.repeat(lambda: model.predict(static), number=10, repeat=7)) * 1e5,
    }  # fmt: skip
    for what, us in made.items():
        print(f"  {what}: {us:.1f}")
    return made
