"""Plot of a plan: a square per GPU, cut as the GPU is, filled as far as each slice is busy.

Coloured area is work; under every slice stand its share of the GPU and the length of its round.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from lamina.cli._plan_report import gpus_in_words
from lamina.planner.partitioning.plan import PartitionPlan, PlannedSlice

_COLOURS = ("#2563a8", "#d1652b", "#3a8f5a", "#8a4fa3", "#b8962e", "#4a9fb5", "#c04a6b", "#6b6b6b", "#7a9a2e", "#a0522d")
_INK, _EMPTY, _EDGE = "#333333", "#f3f3f3", "#ffffff"
_ACROSS = 4


def save(plan: PartitionPlan, policy: str, kinds: Sequence[str], path: Path) -> None:
    """PNG or SVG, by the ending of the name."""
    import matplotlib
    from matplotlib.figure import Figure

    across, down = min(_ACROSS, len(kinds)), ceil(len(kinds) / _ACROSS)
    figure = Figure(figsize=(1.2 + 3.1 * across, 1.5 + 2.7 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    models = sorted({share.model for cut in plan.slices for share in cut.shares})
    colours = {model: _COLOURS[place % len(_COLOURS)] for place, model in enumerate(models)}
    verdict = "everything fits" if plan.schedulable else "not everything fits"
    figure.suptitle(f"{gpus_in_words(kinds)}, policy {policy}: {verdict}", fontsize=13, color=_INK, x=0.02, ha="left")
    for index, square in enumerate(axes):
        if index >= len(kinds):
            square.set_visible(False)
            continue
        _gpu(square, f"GPU {index}: {kinds[index]}", [cut for cut in plan.slices if cut.gpu == index], colours)
        square.set_ylabel("running, % of the round" if index % across == 0 else "", color=_INK, fontsize=9)
    _legend(figure, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "lamina"}):  # the same plan gives the same file
        figure.savefig(path, dpi=140, metadata={"Date": None} if path.suffix == ".svg" else None)


def _gpu(axes: Any, title: str, slices: Sequence[PlannedSlice], colours: dict[str, str]) -> None:
    axes.set_title(title, fontsize=10, color=_INK, loc="left")
    left = 0
    for cut in slices:
        axes.bar(left, 100, cut.part, color=_EMPTY, edgecolor=_EDGE, linewidth=2.5, align="edge")
        bottom = 0.0
        for share in cut.shares:
            height = 100 * share.run_ms / cut.duty_ms
            axes.bar(left, height, cut.part, bottom, color=colours[share.model], edgecolor=_EDGE, linewidth=2.5, align="edge")
            if height >= 9 and cut.part >= 20:
                axes.text(
                    left + cut.part / 2,
                    bottom + height / 2,
                    f"x {share.batch}",
                    color="white",
                    fontsize=9,
                    ha="center",
                    va="center",
                )
            bottom += height
        left += cut.part
    ends = [sum(cut.part for cut in slices[: count + 1]) for count in range(len(slices))]
    notes = [f"{cut.part}%\n{f'{cut.duty_ms:.3g} ms' if cut.shares else 'free'}" for cut in slices]
    axes.set_xticks([end - cut.part / 2 for end, cut in zip(ends, slices, strict=True)], notes)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_yticks((0, 50, 100))
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(figure: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    if colours:
        handles = [Patch(color=colour, label=model) for model, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=min(6, len(handles)), frameon=False, fontsize=9)
