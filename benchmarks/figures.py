"""House style of the pictures in docs/img: the colours and axes of `lamina sim --plot`, as matplotlib settings."""

from __future__ import annotations

from typing import Any

COLOURS = ("#2563a8", "#d1652b", "#3a8f5a", "#8a4fa3", "#b8962e", "#4a9fb5", "#c04a6b", "#6b6b6b")
INK, RIVAL = "#333333", "#9a9a9a"
"""Lamina is drawn in colour, what it is compared with in grey."""

STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#aaaaaa",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eeeeee",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 140,
}


def use_style() -> None:
    """Draw without a screen, in the house style, from now on."""
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)})
