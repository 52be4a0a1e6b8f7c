"""The pictures of docs/prediction.md, from what `python -m benchmarks.prediction` found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prediction.v100 import SHARES, load
from benchmarks.train_predictor import records, times
from lamina.predict.fit import fit

PLOTS = Path("docs/img")


def plots(found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    PLOTS.mkdir(exist_ok=True)
    if "h200" in found:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
        for count, errors in found["h200"]["errors_last_seed"].items():
            values = np.sort(list(errors.values())) * 100
            left.plot(values, np.arange(1, len(values) + 1) / len(values), label=f"{count} probes")
        left.set(
            xscale="log", xlabel="mean error of an unseen function, %", ylabel="part of functions", title="H200, unseen functions"
        )
        left.legend()
        static, measured, name = records(), times(), "electra_small"  # neither easy nor hard
        model = fit("h200", static, {other: points for other, points in measured.items() if other != name})
        for count, colour in ((0, "tab:blue"), (3, "tab:green")):
            grid = model.predict(static[name], {p: measured[name][p] for p in model.probes(count)})
            row = grid.batches.index(8)
            right.fill_between(grid.units, grid.low[row] / 1e3, grid.high[row] / 1e3, alpha=0.25, color=colour)
            right.plot(grid.units, grid.mid[row] / 1e3, color=colour, label=f"{count} probes, 90 %")
        right.plot(grid.units, [measured[name][8, u] / 1e3 for u in grid.units], "k.", label="measured")
        right.set(xlabel="units of 8 SMs", ylabel="ms", yscale="log", title=f"{name} at batch 8, never seen before")
        right.legend()
        for axis, steps in ((left.xaxis, (1, 2, 5, 10, 20, 50)), (right.yaxis, (1, 2, 3, 5, 7, 10))):
            axis.set_major_locator(FixedLocator(steps))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        figure.tight_layout()
        figure.savefig(PLOTS / "prediction-h200.png", dpi=110)
    if "neighbours" in found:
        figure, axis = plt.subplots(figsize=(4.6, 4))
        predicted, truth = np.array(found["neighbours"]["predicted"]).T
        axis.plot(truth, predicted, ".", alpha=0.6)
        axis.plot([1, 1.7], [1, 1.7], "k-", lw=0.8)
        axis.set(xlabel="measured slowdown", ylabel="predicted, case left out", title="Co-located on an H200")
        figure.tight_layout()
        figure.savefig(PLOTS / "prediction-neighbours.png", dpi=110)

    unseen = [part for name, part in sorted(found.items()) if name.startswith("v100:")]
    if unseen:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
        for run in unseen:
            values = np.sort(list(run["by model"].values())) * 100
            left.plot(values, np.arange(1, len(values) + 1) / len(values), label=f"seed {run['seed']}", lw=1)
        left.axvline(5.29, color="k", lw=0.8, ls=":", label="RaPP, of models not named")
        left.set(xlabel="mean error of an unseen model, %", ylabel="part of models", title="V100, eleven probes of each")
        left.legend()
        data = load()
        for quota in (10, 20, 30, 50, 100):
            row = np.exp(data.grid[data.names.index("resnet18"), 0, :, quota // 10 - 1])
            right.plot(SHARES, row, ".-", label=f"quota {quota} %")
        right.set(xlabel="share of SMs, %", ylabel="ms", yscale="log", ylim=(6, 300))
        right.set_title("resnet18 at batch 1, as published: two sittings")
        right.legend(ncols=3, loc="upper center", fontsize="small")
        figure.tight_layout()
        figure.savefig(PLOTS / "prediction-v100.png", dpi=110)
