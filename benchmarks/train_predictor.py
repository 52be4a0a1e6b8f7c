"""`python -m benchmarks.train_predictor`: the models that come with the package, from the measurements in data/h200.

Writes `src/lamina/predict/models/h200.json` (latency), `models/neighbours/h200.json` (co-location) and
`profiles/h200`. Takes seconds, has no seed: nothing is drawn. Needs numpy and nothing else.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.prediction.fit_model import fit_model
from lamina.predict import interference, learned
from lamina.predict.profile import Point, Profile, write

DATA = Path("data/h200")
OPERATORS = Path("data/operators.jsonl")

PROFILES = Path("profiles/h200")
PROFILED = (
    "resnet50", "resnet18", "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny", "vgg16", "densenet121", "inception_v3",
    "vit_b_16", "swin_t", "bert_base", "distilbert", "gpt2", "t5_small_encoder", "fcn_resnet50", "mlp_4096x8",
)  # fmt: skip

Times = dict[str, dict[tuple[int, int], float]]


def records() -> dict[str, dict[str, Any]]:
    """Static features by model."""
    operators = {row["model"]: row["operators"] for row in map(json.loads, OPERATORS.read_text().splitlines())}
    rows = map(json.loads, (DATA / "models.jsonl").read_text().splitlines())
    return {row["model"]: row | {"operators": operators[row["model"]]} for row in rows}


def times() -> Times:
    """Median microseconds by model and (batch, units)."""
    found: Times = {}
    with (DATA / "latency.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault(row["model"], {})[int(row["batch"]), int(row["units"])] = float(row["p50_us"])
    return found


def tenants() -> list[tuple[str, str, interference.ColocatedTenant, Sequence[interference.ColocatedTenant], float]]:
    """Case, model, what it asks for, what its neighbours ask for, how many times longer it took."""
    known = records()
    with (DATA / "colocation.csv").open() as file:
        rows = list(csv.DictReader(file))
    peak = interference.PEAK_GB_PER_S["h200"]
    sides = [
        interference.ColocatedTenant(
            float(known[row["model"]]["param_bytes"]), float(row["demand_gb_s"]) / peak, int(row["units"]) / 15
        )
        for row in rows
    ]
    return [
        (
            row["case"],
            row["model"],
            sides[place],
            [side for side, other in zip(sides, rows, strict=True) if other["case"] == row["case"] and side is not sides[place]],
            float(row["slowdown"]),
        )
        for place, row in enumerate(rows)
    ]


def profiles() -> list[Profile]:
    """Some of the models as profiles a scenario can use."""
    made = []
    for name in PROFILED:
        row = records()[name]
        with (DATA / "latency.csv").open() as file:
            cells = [cell for cell in csv.DictReader(file) if cell["model"] == name]
        points = [
            Point(
                batch=int(cell["batch"]),
                units=int(cell["units"]),
                p50_us=float(cell["p50_us"]),
                p99_us=float(cell["p99_us"]),
            )
            for cell in cells
        ]
        traits = interference.traits_from_record(row)
        made.append(
            Profile(
                function=name,
                device="h200",
                points=sorted(points, key=lambda point: (point.units, point.batch)),
                memory_mib=row["peak_mib"]["64"],
                bandwidth=round(interference.bandwidth_demand(traits, "h200", points), 4),
                traits=traits,
                meta={"source": "data/h200", "machine": "NVIDIA H200", "date": "2026-11-15"},
            )
        )
    return made


def main() -> None:
    PROFILES.mkdir(exist_ok=True)
    for profile in profiles():
        write(profile, PROFILES / f"{profile.function}.json")
    meta = {"source": "data/h200", "trained_by": "benchmarks/train_predictor.py", "functions": len(times())}
    model = fit_model("h200", records(), times(), meta=meta)
    learned.SHIPPED_MODELS.mkdir(exist_ok=True)
    learned.write_model(model, learned.SHIPPED_MODELS / "h200.json")
    line = interference.fit_slowdown((own, others, slowdown) for _, _, own, others, slowdown in tenants())
    interference.SHIPPED_REGRESSIONS.mkdir(exist_ok=True)
    (interference.SHIPPED_REGRESSIONS / "h200.json").write_bytes(msgspec.json.encode(line) + b"\n")
    print("probes:", *model.library.probes, sep="\n  ")
    print(
        f"log slowdown = {line.base:.3f} + {[round(slope, 4) for slope in line.slopes]} . (log parameter bytes, neighbours, ...)"
    )


if __name__ == "__main__":
    main()
