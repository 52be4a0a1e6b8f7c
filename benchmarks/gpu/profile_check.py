"""`python -m benchmarks.gpu.profile_check OUT [SECONDS]`: the product's own profiler on green slices, against data/h200.

Three small models of this file are profiled as `lamina profile --device gpu` does it, each for at most SECONDS (20), and each is
predicted from its operators alone and from three and five of the measured points. OUT gets the profiles and `check.json`: the
ratio to the data set place by place, how sure the profiler was, device time spent, and how far predictions were off.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lamina
from benchmarks.gpu import zoo

app = lamina.App("profile-check")
NAMES = ("resnet18", "mobilenet_v3_large", "distilbert")
DATA = Path("data/h200/latency.csv")


class _Zoo(lamina.TorchModel):
    which = ""

    def load(self) -> tuple[Any, Any]:
        model = zoo.build(self.which)
        return model.module, model.make_input(1)


for each in NAMES:
    app.function(name=each, gpu=lamina.GPU(required=True), batch=32)(type(each, (_Zoo,), {"which": each}))


def examples() -> dict[str, list[Any]]:
    """What `pre` gets: one item, as the example shows it."""
    return {name: [_item(name)] for name in NAMES}


def _item(name: str) -> Any:
    import torch

    example = zoo.build(name).make_input(1)
    part = example[0] if isinstance(example, tuple | list) else example
    return torch.as_tensor(part)[0].cpu().numpy()


def check(name: str, out: Path, budget_s: float) -> dict[str, Any]:
    from lamina.predict.learned import shipped_model
    from lamina.predict.profile_table import ProfileTable
    from lamina.profiler import session
    from lamina.profiler.gpu_bench import open_gpu
    from lamina.profiler.model_trace import trace_model

    function = app.functions[name]
    target = session.ProfileTarget(f"{__file__}", function, [{"x": _item(name)}])
    bench = open_gpu(function, target.samples)
    begin_s = time.monotonic()
    try:
        result = session.profile_function(target, bench, session.ProfileOptions(out=out, budget_s=budget_s, fresh=True))
    finally:
        bench.close()
    with DATA.open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == name]
    known = {(int(row["batch"]), int(row["units"])): float(row["p50_us"]) for row in rows}
    table = ProfileTable([result.profile])
    ratios = {
        f"{batch}x{units}": round(table.median_us(name, result.profile.device, batch, units) / us, 4)
        for (batch, units), us in known.items()
        if batch <= function.spec.max_batch
    }
    model, built = shipped_model("h200"), zoo.build(name)
    example = built.make_input(1)
    record = trace_model(name, built.module, tuple(example) if isinstance(example, tuple | list) else (example,))
    predicted = {}
    for count in (0, 3, 5):
        grid = model.predict(record, {place: known[place] for place in model.probes(count)})
        off = [
            abs(float(grid.mid[row, column]) / known[batch, units] - 1)
            for row, batch in enumerate(grid.batches)
            for column, units in enumerate(grid.units)
        ]
        predicted[str(count)] = round(statistics.mean(off), 4)
    return {
        "points": len(result.profile.points),
        "spent_s": round(result.outcome.spent_s, 1),
        "with_load_s": round(time.monotonic() - begin_s, 1),
        "unsure": result.outcome.uncertainty,
        "reached": result.outcome.reached,
        "over_data_median": round(statistics.median(ratios.values()), 4),
        "over_data_mean_error": round(statistics.mean(abs(ratio - 1) for ratio in ratios.values()), 4),
        "over_data": ratios,
        "predicted_mean_error_by_probes": predicted,
        "meta": result.profile.meta,
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    budget_s = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    found: dict[str, Any] = {}
    for name in NAMES:
        try:
            found[name] = check(name, out, budget_s)
        except Exception as error:  # one of three; the others are still worth having
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        print(name, json.dumps(found[name]), flush=True)
        (out / "check.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
