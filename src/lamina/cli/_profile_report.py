"""Profiles as tables and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lamina.cli._shared import console
from lamina.predict.profile import Profile
from lamina.units import show_bytes, show_count, show_us

_COLOURS = ("#2563a8", "#d1652b", "#3a8f5a", "#8a4fa3", "#b8962e", "#4a9fb5", "#c04a6b", "#6b6b6b")
_INK = "#333333"
_MOST_CURVES = 8
WIDTH = 140


def table(*columns: str, title: str = "") -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
    return made


def latencies(profile: Profile) -> None:
    """Table of latencies, batch sizes by units or the other way round if there are more units: median, and p99 if known."""
    for cores in sorted({point.cores for point in profile.points}):
        points = {(p.batch, p.units): p for p in profile.points if p.cores == cores}
        batches, units = sorted({batch for batch, _ in points}), sorted({count for _, count in points})
        beside = f", {cores} cores beside it" if cores else ""
        times = "p50 / p99" if any(point.p99_us for point in points.values()) else "p50"
        if profile.meta.get("source") == "predicted":
            times = "predicted median / 19 of 20 lie below"
        title = f"{profile.function} on {profile.device}{beside}: {times}"
        turned = len(units) > max(8, len(batches))
        first, across, down = ("units", batches, units) if turned else ("batch", units, batches)
        heads = [f"batch {batch}" for batch in batches] if turned else [show_count(unit, "unit") for unit in units]
        rows = [[_cell(points.get((column, row) if turned else (row, column))) for column in across] for row in down]
        for columns in _column_groups(heads, rows):
            made = table(first, *heads[columns], title=title)
            for name, cells in zip(down, rows, strict=True):
                made.add_row(str(name), *cells[columns])
            console(140).print(made)


def _column_groups(heads: list[str], rows: list[list[str]]) -> Iterator[slice]:
    """Groups of columns that fit the screen: a time that is folded or cut off cannot be read."""
    widest = max(map(len, (*heads, *(cell for row in rows for cell in row))))
    fit = max(1, (console(140).width - 8) // (widest + 3))
    each = math.ceil(len(heads) / math.ceil(len(heads) / fit))  # evenly: seven columns and one are not nice
    yield from (slice(start, start + each) for start in range(0, len(heads), each))


def other_measurements(profile: Profile) -> list[str]:
    """Other measurements, a line each: hand-over, spread, and interference with neighbours."""
    lines = []
    if profile.handover is not None:
        lines.append(f"hand-over {show_us(profile.handover.batch_us)} a batch and {show_us(profile.handover.item_us)} an item")
    if profile.spread:
        least, middle, most = profile.spread[0], profile.spread[len(profile.spread) // 2], profile.spread[-1]
        lines.append(f"spread {least:.2f} to {most:.2f} of the median, half of the runs up to {middle:.2f}")
    if profile.bandwidth:
        lines.append(f"bandwidth {profile.bandwidth:.1%} of the device's peak, alone on all of it")
    if profile.traits is not None:
        traits = profile.traits
        moved = f"{show_bytes(traits.fixed_bytes)} a batch and {show_bytes(traits.item_bytes)} an item"
        lines.append(f"moves {moved}; parameters {show_bytes(traits.parameter_bytes)}")
    return lines


def _cell(point: Any) -> str:
    """Cell of a latency table; a unit that both times share is written once, to save width."""
    if point is None:
        return "-"
    p50, p99 = show_us(point.p50_us), show_us(point.p99_us)
    number, tail = (text.rstrip("uminsec") for text in (p50, p99))
    if not point.p99_us:
        return p50
    return f"{number} / {p99}" if p50[len(number) :] == p99[len(tail) :] else f"{p50} / {p99}"


def save(profile: Profile, path: Path) -> None:
    """PNG or SVG, by the ending of the name: latency over the batch size, a curve per number of units."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(
        f"{profile.function} on {profile.device}: latency of a batch, median and 99th percentile", loc="left", color=_INK
    )
    for place, units in enumerate(_drawn(sorted({point.units for point in profile.points}))):
        row = sorted(
            (p for p in profile.points if p.units == units and p.cores == profile.points[0].cores), key=lambda p: p.batch
        )
        colour = _COLOURS[place % len(_COLOURS)]
        batches = [p.batch for p in row]
        axes.plot(
            batches, [p.p50_us / 1000 for p in row], marker="o", markersize=4, color=colour, label=show_count(units, "unit")
        )
        if any(p.p99_us for p in row):
            tails = [max(p.p50_us, p.p99_us) / 1000 for p in row]
            axes.fill_between(batches, [p.p50_us / 1000 for p in row], tails, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="batch", ylabel="milliseconds")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="both", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "lamina"}):  # the same profile gives the same file
        figure.savefig(path, dpi=140, metadata={"Date": None} if path.suffix == ".svg" else None)


def _drawn(units: list[int]) -> list[int]:
    """At most eight curves, the ends among them; more cannot be told apart."""
    if len(units) <= _MOST_CURVES:
        return units
    return [units[round(place * (len(units) - 1) / (_MOST_CURVES - 1))] for place in range(_MOST_CURVES)]
