"""Plots of the HTML report: matplotlib, one visual style, as SVG inside the page.

Colours become the page's variables, so that a plot is right in light and in dark. Text stays text: it can be searched and
read aloud, and the file stays small. The same figures give the same bytes.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
from html import escape
from typing import Any

from lamina.errors import BadValue
from lamina.lab.experiment import Plot
from lamina.lab.report_style import CARD, COLOURS, INK, LINE, SOFT
from lamina.lab.text_report import format_number

SIZE_IN = (8.4, 3.6)
MARKERS = "osD^vPX*"
LEGEND_CHARS = 140
"""What goes into one row of the legend."""

FEW_POINTS = 25
"""Points of a line up to which each has a marker."""

Points = list[tuple[float | str, float]]

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lamina",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
}


def require_matplotlib() -> None:
    """An error that says what to install, before anything is drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadValue("lab report: matplotlib is not installed", hint="pip install 'lamina[plots]'")


def draw_plot(plot: Plot, title: str) -> str:
    """A plot as SVG; `title` is read aloud by screen readers."""
    series = {name: _finite(points) for name, points in plot.series.items()}
    if not any(series.values()):
        return '<p class="nothing">Nothing to draw.</p>'
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=SIZE_IN, layout="constrained")
        axes = figure.subplots()
        (_bars if plot.kind == "bar" else _lines)(axes, plot, series)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        if len(series) > 1:
            handles, labels = axes.get_legend_handles_labels()
            columns = max(1, min(6, len(series), LEGEND_CHARS // (6 + max(map(len, labels)))))
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(file.getvalue(), f"{title}: {plot.y_label} by {plot.x_label}")


def _finite(points: Points) -> Points:
    return [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]


def _lines(axes: Any, plot: Plot, series: dict[str, Points]) -> None:
    every = [point for points in series.values() for point in points]
    named = any(isinstance(x, str) for x, _ in every)
    place = {name: at for at, name in enumerate(dict.fromkeys(str(x) for x, _ in every))}
    marked = plot.kind == "line" and all(len(points) <= FEW_POINTS for points in series.values())
    for order, (name, points) in enumerate(series.items()):
        axes.plot(
            [place[str(x)] if named else float(x) for x, _ in points],
            [y for _, y in points],
            color=COLOURS[order % len(COLOURS)],
            marker=MARKERS[order % len(MARKERS)] if marked else None,  # by shape as well as colour: some pages are grey
            linestyle="-" if order < len(COLOURS) else "--",
            drawstyle="steps-post" if plot.kind == "cdf" else "default",
            markeredgecolor=CARD,
            label=name,
        )
    if named:
        axes.set_xticks(range(len(place)), place, rotation=0 if len(place) <= 8 else 30)
    elif plot.log_x and all(x > 0 for x, _ in every):  # type: ignore[operator]
        _log(axes.xaxis, axes.set_xscale)
    _y_axis(axes, plot, [y for _, y in every])


def _bars(axes: Any, plot: Plot, series: dict[str, Points]) -> None:
    groups = list(dict.fromkeys(_label(x) for points in series.values() for x, _ in points))
    width = min(0.3, 0.82 / len(series))
    for order, (name, points) in enumerate(series.items()):
        offset = (order - (len(series) - 1) / 2) * width
        places = [groups.index(_label(x)) + offset for x, _ in points]
        colour = COLOURS[order % len(COLOURS)]
        axes.bar(
            places, [y for _, y in points], 0.94 * width, color=colour, label=name, hatch="" if order < len(COLOURS) else "//"
        )
    axes.set_xticks(range(len(groups)), groups, rotation=0 if sum(map(len, groups)) <= 90 else 20)
    axes.grid(visible=False, axis="x")
    _y_axis(axes, plot, [y for points in series.values() for _, y in points])


def _y_axis(axes: Any, plot: Plot, values: list[float]) -> None:
    """From zero for bars and shares; a line may start anywhere, unless zero is near."""
    if plot.log_y and all(value > 0 for value in values):
        _log(axes.yaxis, axes.set_yscale)
    elif min(values) >= 0 and (plot.kind != "line" or min(values) < 0.6 * max(values)):
        axes.set_ylim(bottom=0)


def _log(axis: Any, set_scale: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    set_scale("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_number(float(value))))
    axis.set_minor_formatter(NullFormatter())


def _inline(svg: str, label: str) -> str:
    """Without what only a file of its own needs; fonts and colours by the page."""
    svg = svg[svg.index("<svg") :]
    for unused in (
        r"<metadata>.*?</metadata>",
        r"<style.*?</style>",
        r' id="(?:figure|axes|patch|line2d|text|[xy]tick|legend|matplotlib\.axis|[A-Za-z]*Collection)_\d+"',
        r"font-family: [^;]*; ",
        r' (?:xmlns:xlink|version)="[^"]*"',
    ):
        svg = re.sub(unused, "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    said = f'<svg role="img" aria-label="{escape(label, quote=True)}"'
    head = re.sub(r' (?:width|height)="[^"]*"', "", head).replace("<svg", said)
    svg = f"{head}>{rest.replace('xlink:href', 'href')}"
    variables = {INK: "--ink", SOFT: "--soft", LINE: "--line", CARD: "--card"}
    variables |= {colour: f"--c{place}" for place, colour in enumerate(COLOURS)}
    for colour, name in variables.items():
        svg = svg.replace(colour, f"var({name})")
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)  # places, not texts
    return re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><").strip()


def _label(x: float | str) -> str:
    return x if isinstance(x, str) else format_number(x)
