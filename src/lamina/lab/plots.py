"""Plots as SVG text. Colours are classes, which the page sets for light and for dark; nothing is fetched from anywhere.

Own, and small, because a picture with colours of its own would be wrong in one of the two, and because it needs no
library: the report can be made wherever the results can be read.
"""

from __future__ import annotations

import math
from html import escape

from lamina.lab.experiment import Plot
from lamina.lab.numbers import AxisScale, format_number, format_tick, scale_for

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 52
COLOURS = 8
MARKS = ("circle", "square", "diamond", "triangle")

Points = list[tuple[float | str, float]]


def draw_plot(plot: Plot, title: str) -> str:
    """A plot as SVG; `title` is read aloud by screen readers."""
    series = {name: _finite(points) for name, points in plot.series.items()}
    if not any(series.values()):
        return '<p class="nothing">Nothing to draw.</p>'
    inner = _bars(plot, series) if plot.kind == "bar" else _lines(plot, series)
    label = escape(f"{title}: {plot.y_label} by {plot.x_label}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{inner}</svg>'


def _finite(points: Points) -> Points:
    return [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]


def _lines(plot: Plot, series: dict[str, Points]) -> str:
    every = [point for points in series.values() for point in points]
    named = any(isinstance(x, str) for x, _ in every)
    names = list(dict.fromkeys(str(x) for x, _ in every)) if named else []
    place = {name: float(at) for at, name in enumerate(names)}
    lines = {name: [(place[str(x)] if named else float(x), y) for x, y in points] for name, points in series.items()}
    xs = [x for points in lines.values() for x, _ in points]
    across = scale_for(xs, LEFT + 8, WIDTH - RIGHT, log=plot.log_x and not named, zero=False)
    down = scale_for([y for _, y in every], HEIGHT - BOTTOM, TOP, log=plot.log_y, zero=_from_zero(plot, every))
    parts = [_frame(plot, down)]
    if named:
        parts += [_x_label(across.px(place[name]), name) for name in names]
    else:
        parts += [_x_label(across.px(value), format_tick(value), grid=True) for value in across.ticks()]
    few = all(len(points) <= 25 for points in lines.values())
    for order, (name, points) in enumerate(lines.items()):
        ends = [(across.px(x), down.px(y)) for x, y in points]
        if ends:
            parts.append(f'<path class="line c{order % COLOURS}" d="{_path(ends, stepped=plot.kind == "cdf")}"/>')
        if few and plot.kind == "line":
            for (px, py), (x, y) in zip(ends, series[name], strict=True):
                parts.append(_mark(order, px, py, f"{name}: {format_number(y)} at {_say(x)}"))
    return "".join(parts)


def _bars(plot: Plot, series: dict[str, Points]) -> str:
    groups = list(dict.fromkeys(_say(x) for points in series.values() for x, _ in points))
    every = [point for points in series.values() for point in points]
    down = scale_for([y for _, y in every], HEIGHT - BOTTOM, TOP, log=plot.log_y, zero=not plot.log_y)
    room = (WIDTH - RIGHT - LEFT) / len(groups)
    width = min(44.0, 0.82 * room / len(series))
    ground = HEIGHT - BOTTOM if down.log else down.px(0.0)
    parts = [_frame(plot, down)]
    for at, group in enumerate(groups):
        middle = LEFT + (at + 0.5) * room
        parts.append(_x_label(middle, group, room=room))
        left = middle - width * len(series) / 2
        for order, (name, points) in enumerate(series.items()):
            for x, y in points:
                if _say(x) == group:
                    top, low = sorted((down.px(y), ground))
                    box = f'x="{left + order * width + 0.5:.1f}" y="{top:.1f}" width="{width - 1:.1f}"'
                    box = f'{box} height="{max(low - top, 0.8):.1f}"'
                    words = f"<title>{escape(f'{name}: {format_number(y)} ({group})')}</title>"
                    parts.append(f'<rect class="bar c{order % COLOURS}" {box}>{words}</rect>')
    return "".join(parts)


def _frame(plot: Plot, down: AxisScale) -> str:
    parts = []
    for value in down.ticks():
        y = down.px(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{format_tick(value)}</text>')
    ground, middle, centre = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2, (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{ground}" y2="{ground}"/>')
    parts.append(f'<text class="label" x="{centre}" y="{HEIGHT - 8}" text-anchor="middle">{escape(plot.x_label)}</text>')
    parts.append(
        f'<text class="label" transform="translate(15 {middle}) rotate(-90)" text-anchor="middle">{escape(plot.y_label)}</text>'
    )
    return "".join(parts)


def _x_label(px: float, text: str, *, grid: bool = False, room: float = 0.0) -> str:
    ground = HEIGHT - BOTTOM
    line = f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{ground}"/>' if grid else ""
    fits = int(room / 6.6) if room else len(text)
    shown = text if len(text) <= max(fits, 3) else text[: max(fits - 1, 2)] + "…"
    return f'{line}<text class="tick" x="{px:.1f}" y="{ground + 17}" text-anchor="middle">{escape(shown)}</text>'


def _path(ends: list[tuple[float, float]], *, stepped: bool) -> str:
    """Straight from point to point, or, for shares, level until the next point."""
    words = [f"M{ends[0][0]:.1f} {ends[0][1]:.1f}"]
    for x, y in ends[1:]:
        words.append(f"H{x:.1f}V{y:.1f}" if stepped else f"L{x:.1f} {y:.1f}")
    return "".join(words)


def _mark(order: int, x: float, y: float, words: str) -> str:
    """A marker, by shape as well as colour: for pages printed in grey and readers blind to red and green."""
    shape = MARKS[order // 2 % len(MARKS)] if order >= COLOURS else MARKS[order % len(MARKS)]
    kind, size = f'class="mark c{order % COLOURS}"', 3.6
    title = f"<title>{escape(words)}</title>"
    if shape == "circle":
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="{size}">{title}</circle>'
    ways = {
        "square": f"M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4z",
        "diamond": f"M{x:.1f} {y - 4.6:.1f}l4.6 4.6l-4.6 4.6l-4.6 -4.6z",
        "triangle": f"M{x:.1f} {y - 4.4:.1f}l4.4 7.8h-8.8z",
    }
    return f'<path {kind} d="{ways[shape]}">{title}</path>'


def _from_zero(plot: Plot, points: Points) -> bool:
    """A line may start anywhere, unless nothing is near enough to see anyway."""
    values = [y for _, y in points]
    return plot.kind == "cdf" or (min(values) >= 0 and min(values) < 0.6 * max(values))


def _say(x: float | str) -> str:
    return x if isinstance(x, str) else format_number(x)
