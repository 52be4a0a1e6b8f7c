"""The pictures of docs/explanation/prediction.md, from what `python -m benchmarks.prediction` found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import COLOURS, INK, RIVAL, use_style
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
        _neighbours(found["neighbours"])
    unseen, own = ([part for name, part in sorted(found.items()) if name.startswith(kind)] for kind in ("v100:", "own:"))
    if unseen and own:
        _v100(unseen, own)


def _h200(errors_by_count: dict[str, dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for (count, errors), colour in zip(errors_by_count.items(), COLOURS, strict=False):
        _share_below(left, errors, f"{count} probes", colour)
    left.set(
        xscale="log", xlabel="mean error of an unseen function, %", ylabel="share of functions", title="H200, unseen functions"
    )
    left.legend()
    static, measured, name = records(), times(), "electra_small"  # neither easy nor hard
    model = fit_model("h200", static, {other: points for other, points in measured.items() if other != name})
    for probes, colour in ((0, COLOURS[0]), (3, COLOURS[2])):
        grid = model.predict(static[name], {p: measured[name][p] for p in model.probes(probes)})
        row = grid.batches.index(8)
        right.fill_between(grid.units, grid.low[row] / 1e3, grid.high[row] / 1e3, alpha=0.25, color=colour)
        right.plot(grid.units, grid.mid[row] / 1e3, color=colour, label=f"{probes} probes, 90 %")
    right.plot(grid.units, [measured[name][8, u] / 1e3 for u in grid.units], ".", color=INK, label="measured")
    right.set(xlabel="units of 8 SMs", ylabel="ms", yscale="log", title=f"{name} at batch 8, never seen before")
    right.legend()
    _plain(left.xaxis, (1, 2, 5, 10, 20, 50))
    _plain(right.yaxis, (1, 2, 3, 5, 7, 10))
    _save(figure, "prediction-h200")


def _neighbours(found: dict[str, Any]) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4.2))
    for pairs, label, colour in (
        (found["predicted by gpu-let's form"], "gpu-let's linear form, refitted", RIVAL),
        (found["predicted"], "Lamina", COLOURS[0]),
    ):
        predicted, truth = np.array(pairs).T
        axis.plot(truth, predicted, "o", ms=3.5, alpha=0.7, color=colour, label=label)
    axis.plot([1, 1.7], [1, 1.7], color=INK, lw=0.8, ls=":")
    axis.set(
        xlabel="measured slowdown", ylabel="predicted slowdown", title="Functions side by side on an H200, each case left out"
    )
    axis.legend(loc="upper left")
    _save(figure, "prediction-neighbours")


def _v100(unseen: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 3.6))
    for run in unseen:
        _share_below(left, run["by model"], None if run is not unseen[0] else f"ours, {len(unseen)} seeds", COLOURS[0], alpha=0.6)
    left.axvline(5.29, color=RIVAL, ls="--", label="RaPP: mean (reported, models not named)")
    left.set(xlabel="mean error of an unseen model, %", ylabel="share of models", title="V100, RaPP's eleven probe points")
    left.legend()
    counts = [label for label in own[0]["probes"] if label.isdigit()]
    for run in own:
        errors = [100 * run["probes"][label]["mape"] for label in counts]
        label = None if run is not own[0] else f"our points, {len(own)} seeds"
        middle.plot([int(count) for count in counts], errors, ".-", lw=1, color=COLOURS[0], alpha=0.6, label=label)
    rapp = 100 * float(np.mean([run["mape"] for run in unseen]))
    middle.plot([len(RAPP)], [rapp], "*", ms=11, color=RIVAL, label="RaPP's points")
    middle.axhline(100 * GOAL, color=INK, lw=0.8, ls=":", label="goal")
    middle.set(xlabel="probes of each model", ylabel="mean error, %", xscale="log", title="V100, our own probe points")
    middle.set_ylim(bottom=4)
    middle.legend()
    _plain(middle.xaxis, tuple(map(int, counts)))
    data = load()
    for quota in (10, 20, 30, 50, 100):
        row = np.exp(data.grid[data.names.index("resnet18"), 0, :, quota // 10 - 1])
        right.plot(SHARES, row, ".-", label=f"quota {quota} %")
    right.set(xlabel="share of SMs, %", ylabel="ms", yscale="log", ylim=(6, 300))
    right.set_title("resnet18 at batch 1, as published: two sessions")
    right.legend(ncols=3, loc="upper center", fontsize="small")
    _save(figure, "prediction-v100")


def _share_below(axis: Any, errors: dict[str, float], label: str | None, colour: str, alpha: float = 1.0) -> None:
    values = np.sort(list(errors.values())) * 100
    axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=label, lw=1.5, color=colour, alpha=alpha)


def _plain(axis: Any, steps: tuple[int, ...]) -> None:
    """Numbers as they are said, not as powers of ten."""
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    axis.set_major_locator(FixedLocator(steps))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Any, name: str) -> None:
    figure.savefig(PLOTS / f"{name}.png")
