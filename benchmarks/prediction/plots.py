"""The pictures of docs/explanation/prediction.md, from what `python -m benchmarks.prediction` found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import use_style
from benchmarks.prediction.fit_model import fit_model
from benchmarks.prediction.own import GOAL, RAPP
from benchmarks.prediction.v100 import SHARES, load
from benchmarks.train_predictor import records, times

PLOTS = Path("docs/img")


def plots(found: dict[str, Any]) -> None:
    use_style()
    PLOTS.mkdir(exist_ok=True)
    if "h200" in found:
        _h200(found["h200"]["errors_last_seed"])
    if "neighbours" in found:
        _neighbours(found["neighbours"]["predicted"])
    unseen, own = ([part for name, part in sorted(found.items()) if name.startswith(kind)] for kind in ("v100:", "own:"))
    if unseen and own:
        _v100(unseen, own)


def _h200(errors_by_count: dict[str, dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for count, errors in errors_by_count.items():
        _share_below(left, errors, f"{count} probes")
    left.set(
        xscale="log", xlabel="mean error of an unseen function, %", ylabel="part of functions", title="H200, unseen functions"
    )
    left.legend()
    static, measured, name = records(), times(), "electra_small"  # neither easy nor hard
    model = fit_model("h200", static, {other: points for other, points in measured.items() if other != name})
    for probes, colour in ((0, "tab:blue"), (3, "tab:green")):
        grid = model.predict(static[name], {p: measured[name][p] for p in model.probes(probes)})
        row = grid.batches.index(8)
        right.fill_between(grid.units, grid.low[row] / 1e3, grid.high[row] / 1e3, alpha=0.25, color=colour)
        right.plot(grid.units, grid.mid[row] / 1e3, color=colour, label=f"{probes} probes, 90 %")
    right.plot(grid.units, [measured[name][8, u] / 1e3 for u in grid.units], "k.", label="measured")
    right.set(xlabel="units of 8 SMs", ylabel="ms", yscale="log", title=f"{name} at batch 8, never seen before")
    right.legend()
    _plain(left.xaxis, (1, 2, 5, 10, 20, 50))
    _plain(right.yaxis, (1, 2, 3, 5, 7, 10))
    _save(figure, "prediction-h200")


def _neighbours(pairs: list[list[float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(4.6, 4))
    predicted, truth = np.array(pairs).T
    axis.plot(truth, predicted, ".", alpha=0.6)
    axis.plot([1, 1.7], [1, 1.7], "k-", lw=0.8)
    axis.set(xlabel="measured slowdown", ylabel="predicted, case left out", title="Co-located on an H200")
    _save(figure, "prediction-neighbours")


def _v100(unseen: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 3.6))
    for run in unseen:
        _share_below(left, run["by model"], f"seed {run['seed']}", lw=1)
    left.axvline(5.29, color="k", lw=0.8, ls=":", label="RaPP, of models not named")
    left.set(xlabel="mean error of an unseen model, %", ylabel="part of models", title="V100, RaPP's eleven probes of each")
    left.legend()
    counts = [label for label in own[0]["probes"] if label.isdigit()]
    for run in own:
        errors = [100 * run["probes"][label]["mape"] for label in counts]
        middle.plot([int(label) for label in counts], errors, ".-", lw=1, label=f"ours, seed {run['seed']}")
    rapp = 100 * float(np.mean([run["mape"] for run in unseen]))
    middle.plot([len(RAPP)], [rapp], "k*", ms=9, label="RaPP's places")
    middle.axhline(100 * GOAL, color="k", lw=0.8, ls=":", label="goal")
    middle.set(xlabel="probes of each model", ylabel="mean error, %", xscale="log", title="V100, probed where we choose")
    middle.set_ylim(bottom=4)
    middle.legend()
    _plain(middle.xaxis, tuple(map(int, counts)))
    data = load()
    for quota in (10, 20, 30, 50, 100):
        row = np.exp(data.grid[data.names.index("resnet18"), 0, :, quota // 10 - 1])
        right.plot(SHARES, row, ".-", label=f"quota {quota} %")
    right.set(xlabel="share of SMs, %", ylabel="ms", yscale="log", ylim=(6, 300))
    right.set_title("resnet18 at batch 1, as published: two sittings")
    right.legend(ncols=3, loc="upper center", fontsize="small")
    _save(figure, "prediction-v100")


def _share_below(axis: Any, errors: dict[str, float], label: str, lw: float = 1.5) -> None:
    values = np.sort(list(errors.values())) * 100
    axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=label, lw=lw)


def _plain(axis: Any, steps: tuple[int, ...]) -> None:
    """Numbers as they are said, not as powers of ten."""
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    axis.set_major_locator(FixedLocator(steps))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(PLOTS / f"{name}.png", dpi=110)
