"""Plot of a summary: latency distribution, call rates, utilisation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from lamina.errors import BadValue
from lamina.sim.summary import Summary

_COLOURS = ("#2563a8", "#d1652b", "#3a8f5a", "#8a4fa3", "#b8962e", "#4a9fb5", "#c04a6b", "#6b6b6b")
_INK, _FAINT = "#333333", "#d8d8d8"
_LEGEND = {"frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 0.85}


def check_path(path: Path) -> None:
    """Check the file name before a long run rather than after it."""
    if path.suffix not in (".png", ".svg"):
        raise BadValue(f"plot {str(path)!r}: no picture ends in {path.suffix!r}", hint="end the name in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadValue("plot: matplotlib is not installed", hint="pip install 'lamina[plots]'")


def save(summary: Summary, path: str | Path) -> None:
    """PNG or SVG, by the ending of the name."""
    path = Path(path)
    check_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9.5), layout="constrained")
    latency, rate, busy = figure.subplots(3, 1, height_ratios=[1.25, 1, 0.8])
    total = summary.total
    figure.suptitle(
        f"{total.scenario}: policy {total.policy}, {100 * total.attainment:.2f}% of {total.offered:,} calls in time",
        fontsize=13,
        color=_INK,
        x=0.02,
        ha="left",
    )
    _latency(latency, summary)
    _rate(rate, summary)
    _utilisation(busy, summary)
    for axes in (latency, rate, busy):
        _style_axes(axes)
    busy.sharex(rate)
    path.parent.mkdir(parents=True, exist_ok=True)
    # no date inside, and ids of an SVG that do not change: the same run gives the same file
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "lamina"}):
        figure.savefig(path, dpi=140, metadata={"Date": None} if path.suffix == ".svg" else None)


def _latency(axes: Any, summary: Summary) -> None:
    axes.set_title("Latency of answers, and the goal of each target")
    drawn = 0
    for place, row in enumerate(summary.targets):
        curve = summary.curves.latency.get(row.target)
        if not curve:
            continue
        drawn += 1
        colour = _COLOURS[place % len(_COLOURS)]
        times, shares = zip(*curve, strict=True)
        label = f"{row.target}: {100 * row.attainment:.1f}% in time, p99 {_short(row.p99_ms)}"
        axes.step([times[0], *times], [0.0, *(100 * share for share in shares)], where="post", color=colour, label=label)
        if row.slo_ms:
            axes.axvline(row.slo_ms, color=colour, linestyle=(0, (4, 3)), linewidth=1.2, alpha=0.8)
    axes.set_xlabel("milliseconds (dashed: the goal)")
    axes.set_ylabel("answers at or below, %")
    axes.set_ylim(0, 101)
    if drawn:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(loc="lower right", fontsize=9, **_LEGEND)
    else:
        axes.text(0.5, 0.5, "no call was answered", transform=axes.transAxes, ha="center", color=_INK)


def _rate(axes: Any, summary: Summary) -> None:
    curves = summary.curves
    axes.set_title("Calls offered, and answered in time")
    offered, good = _smooth(_without_last_bin(curves.offered_per_s)), _smooth(_without_last_bin(curves.goodput_per_s))
    seconds = [(place + 0.5) * curves.width_us / 1e6 for place in range(len(offered))]
    axes.fill_between(seconds, offered, color=_FAINT, step="mid", label="offered", linewidth=0)
    axes.step(seconds, good, where="mid", color=_COLOURS[2], label="in time", linewidth=1.5)
    axes.set_ylabel("calls a second")
    axes.set_ylim(0, 1.2 * max(*offered, *good, 1e-9))  # room for the legend
    axes.set_xlim(0, max(seconds[-1] + curves.width_us / 2e6, 1e-6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.legend(loc="upper right", fontsize=9, ncols=2, **_LEGEND)


def _utilisation(axes: Any, summary: Summary) -> None:
    curves = summary.curves
    axes.set_title("Units under batches")
    by_name = {row.device: row for row in summary.devices}
    for place, (device, parts) in enumerate(curves.utilisation.items()):
        parts = _smooth(_without_last_bin(parts))
        seconds = [(step + 0.5) * curves.width_us / 1e6 for step in range(len(parts))]
        label = f"{device}: {100 * by_name[device].utilisation:.1f}%"
        colour = _COLOURS[place % len(_COLOURS)]
        axes.step(seconds, [100 * part for part in parts], where="mid", color=colour, linewidth=1.3, label=label)
    axes.set_xlabel("seconds")
    axes.set_ylabel("of the device, %")
    axes.set_ylim(0, 102)
    if len(curves.utilisation) <= 8:
        axes.legend(loc="upper right", fontsize=9, ncols=4, **_LEGEND)


def _without_last_bin(values: list[float]) -> list[float]:
    """Without the last stretch, which the run ended in the middle of: it would look like a fall."""
    return values[:-1] if len(values) > 8 else values


def _smooth(values: list[float]) -> list[float]:
    """Runs that fill all stretches are a little jagged; a moving mean of three shows the same."""
    if len(values) < 60:
        return values
    padded = [values[0], *values, values[-1]]
    return [sum(padded[place : place + 3]) / 3 for place in range(len(values))]


def _style_axes(axes: Any) -> None:
    axes.title.set(fontsize=11, color=_INK, ha="left", x=0.0)
    axes.grid(True, color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#aaaaaa")
    axes.tick_params(colors=_INK, labelsize=9)


def _short(ms: float) -> str:
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"
