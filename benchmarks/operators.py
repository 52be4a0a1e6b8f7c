"""`python -m benchmarks.operators --out data/operators.jsonl`: what each model's operators do, without running one.

Every model is traced once at batch 1 on torch's `meta` device: shapes flow, numbers do not, no GPU and no weights are needed.
One line per model: its operators in the order of their time of first use, those alike counted together, as
`[kind, count, flops, weights, read, written]` (per operator and item; elements, not bytes, so that any precision can be
asked for; `weights` do not grow with the batch). Resumable: models that are in the file already are skipped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu import zoo
from lamina.profiler.model_trace import trace_model

V100 = Path("data/has-gpu/profile_models.csv")
"""The models of the published V100 measurements, all of torchvision."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/operators.jsonl"))
    options = parser.parse_args()
    known = {json.loads(line)["model"] for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    published = [line.split(",")[0] for line in V100.read_text().splitlines()[1:]] if V100.exists() else []
    zoo.TORCHVISION += [name for name in published if name not in zoo.TORCHVISION]
    for name in [*zoo.ALL, *(name for name in published if name not in zoo.ALL)]:
        if name in known:
            continue
        try:
            row = {"model": name, "operators": traced(name)}
        except Exception as error:  # one model of many; the rest is still worth having
            print(f"- {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        with options.out.open("a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        print(f"+ {name}: {len(row['operators'])} kinds of operators", flush=True)


def traced(name: str) -> list[list[Any]]:
    # a regnet computes its widths with tensors while it is built, and `meta` tensors hold no numbers
    zoo.DEVICE = "cpu" if name.startswith("regnet") else "meta"
    model = zoo.build(name)
    zoo.DEVICE = "meta"
    operators: list[list[Any]] = trace_model(name, model.module, (model.make_input(1),))["operators"]
    return operators


if __name__ == "__main__":
    main()
