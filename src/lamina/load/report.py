"""Reports of a load run: a live view and a table in the terminal, and an HTML page that needs nothing but itself.

The live view shows calls a second as stacked bars, and p99 against the SLO as a line of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lamina.load.results import LatencySummary, LoadResult, SecondStats

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 70  #: fits with its labels into 80 columns
ROWS = 8
_PARTS = (("in_time", "#3a8f5a"), ("late", "#e69f00"), ("refused", "#999999"), ("failed", "#d55e00"))


def live_view(seconds: list[SecondStats], slo_ms: float, *, is_over: bool = False) -> Any:
    """A rich renderable of the last `WIDTH` seconds. Once it is over, a table has the figures, and not the last second."""
    from rich.console import Group
    from rich.text import Text

    shown = seconds[-WIDTH:]
    if not shown:
        return Text("waiting for the first second ...")
    top = max(1, *(max(one.offered, _answers(one)) for one in shown))
    lines = [Text(f"{'calls/s':>8}", style="dim"), *(_bar_row(shown, row, top) for row in range(ROWS, 0, -1))]
    lines.append(_p99_row(shown, slo_ms))
    if is_over:
        return Group(*lines)
    last = shown[-1]
    lines.append(
        Text.assemble(
            f"{last.at_s:4d} s   offered {last.offered}/s   ",
            (f"in time {last.in_time}", _PARTS[0][1]),
            "   ",
            (f"late {last.late}", _PARTS[1][1]),
            "   ",
            (f"refused {last.refused}", _PARTS[2][1]),
            "   ",
            (f"failed {last.failed}", _PARTS[3][1]),
        )
    )
    lines.append(Text(f"{'':9}p50 {last.p50_ms:.1f} ms   p99 {last.p99_ms:.1f} ms   waiting {last.waiting}"))
    return Group(*lines)


def _answers(second: SecondStats) -> int:
    return second.in_time + second.late + second.refused + second.failed


def _bar_row(shown: list[SecondStats], row: int, top: int) -> Any:
    from rich.text import Text

    label = f"{top * row / ROWS:8.0f} " if row in (ROWS, ROWS // 2) else " " * 9
    line = Text(label, style="dim")
    for one in shown:
        below, glyph, colour = 0.0, " ", ""
        for name, shade in _PARTS:
            height = getattr(one, name) * ROWS / top
            if height and below < row and below + height > row - 1:
                filled = min(1.0, below + height - (row - 1))
                glyph, colour = BLOCKS[max(1, round(8 * filled))], shade
            below += height
        line.append(glyph, style=colour)
    return line


def _p99_row(shown: list[SecondStats], slo_ms: float) -> Any:
    from rich.text import Text

    scale = 2 * slo_ms if slo_ms else max(0.001, *(one.p99_ms for one in shown))
    line = Text("  p99 ms ", style="dim")
    for one in shown:
        glyph = BLOCKS[min(8, max(1 if one.p99_ms else 0, round(8 * one.p99_ms / scale)))]
        line.append(glyph, style="#d55e00" if slo_ms and one.p99_ms > slo_ms else "#2563a8")
    return line


def result_table(result: LoadResult) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, title=f"{result.offered} calls in {result.seconds:g} s, {result.shape}", title_justify="left")
    for name in ("", "calls", "share", "p50 ms", "p95 ms", "p99 ms", "max ms"):
        found.add_column(name, justify="left" if not name else "right")
    times = {"answered": result.answered, "refused": result.refusals}
    counts = {
        "answered": result.in_time + result.late,
        "in time": result.in_time,
        "refused": result.refused,
        "failed": result.failed,
        "no answer": result.unanswered,
    }
    for name, count in counts.items():
        spread = times.get(name)
        shown = (spread.p50_ms, spread.p95_ms, spread.p99_ms, spread.max_ms) if spread is not None and count else ()
        figures = [f"{value:.2f}" for value in shown]
        found.add_row(name, str(count), f"{100 * count / max(1, result.offered):.2f} %", *figures)
    return found


WIDE, HIGH, LEFT, LOW = 860, 220, 56, 28
SHADES = {"in_time": "#3a8f5a", "late": "#e69f00", "refused": "#a8a8a8", "failed": "#d55e00"}
NAMES = {"in_time": "in time", "late": "late", "refused": "refused", "failed": "failed"}
CSS = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:900px;margin:32px auto;padding:0 16px}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:28px 0 6px}table{border-collapse:collapse}
td,th{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid #e4e4e4}td:first-child,th:first-child{text-align:left}
th{font-weight:600;color:#555}svg{display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#666}
.key span{margin-right:16px}.key i{display:inline-block;width:10px;height:10px;margin-right:5px}p.note{color:#666}
"""


def html_report(result: LoadResult) -> str:
    goal = f", goal {result.slo_ms:g} ms" if result.slo_ms else ""
    key = "".join(f'<span><i style="background:{SHADES[name]}"></i>{NAMES[name]}</span>' for name in SHADES)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load</title>'
        f"<style>{CSS}</style></head><body><h1>{100 * result.attainment:.2f} % of {result.offered:,} calls in time</h1>"
        f"<p>{escape(result.url)}: {escape(result.shape)}, seed {result.seed}, {result.seconds:g} s{goal}; "
        f"goodput {result.goodput:,.1f} calls a second.</p>{_table(result)}"
        f'<h2>Calls a second</h2><p class="key">{key}<span>black line: offered</span></p>{_stack(result.series)}'
        f"<h2>Latency over time, ms (p50 and p99)</h2>{_latency(result)}"
        f"<h2>Distribution of answers, ms</h2>{_curve(result)}"
        '<p class="note">Times count from when a call was due, not from when it could be sent. '
        f"The generator sent with a delay of {result.send_lag_ms.p50_ms:g} ms (p50) and {result.send_lag_ms.p99_ms:g} ms (p99)."
        "</p></body></html>\n"
    )


def _table(result: LoadResult) -> str:
    rows = [
        ("answered", result.in_time + result.late, result.answered),
        ("in time", result.in_time, None),
        ("refused", result.refused, result.refusals),
        ("failed", result.failed, None),
        ("no answer", result.unanswered, None),
    ]
    head = "".join(f"<th>{name}</th>" for name in ("", "calls", "p50", "p95", "p99", "p99.9", "max"))
    return f"<table><tr>{head}</tr>{''.join(_row(*row, result.offered) for row in rows)}</table>"


def _row(name: str, count: int, times: LatencySummary | None, offered: int) -> str:
    spread = (times.p50_ms, times.p95_ms, times.p99_ms, times.p999_ms, times.max_ms) if times and count else ()
    share = f"{count:,} ({100 * count / max(1, offered):.1f} %)"
    return f"<tr><td>{name}</td><td>{share}</td>{''.join(f'<td>{value:.2f} ms</td>' for value in spread)}</tr>"


def _frame(top: float, right: str, inside: str) -> str:
    """Axes from 0 to `top`; what is inside is drawn on (LEFT, 0)-(WIDE, HIGH)."""
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDE}" y1="{_y(part, 1):.1f}" y2="{_y(part, 1):.1f}" stroke="#e4e4e4"/>'
        f'<text x="{LEFT - 6}" y="{_y(part, 1) + 4:.1f}" text-anchor="end">{top * part:.4g}</text>'
        for part in (0, 0.5, 1)
    )
    return (
        f'<svg viewBox="0 -10 {WIDE + 10} {HIGH + LOW + 10}">{lines}{inside}'
        f'<text x="{LEFT}" y="{HIGH + 18}">0</text><text x="{WIDE}" y="{HIGH + 18}" text-anchor="end">{right}</text></svg>'
    )


def _y(value: float, top: float) -> float:
    return HIGH - HIGH * min(1.0, value / top)


def _line(points: Sequence[tuple[float, float]], colour: str, width: float = 1.6) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _xs(count: int) -> list[float]:
    return [LEFT + (WIDE - LEFT) * (place + 0.5) / max(1, count) for place in range(count)]


def _stack(series: list[SecondStats]) -> str:
    top = max([1, *(max(one.offered, one.in_time + one.late + one.refused + one.failed) for one in series)])
    wide = (WIDE - LEFT) / max(1, len(series))
    bars = []
    for x, one in zip(_xs(len(series)), series, strict=True):
        below = 0
        for name, colour in SHADES.items():
            count = getattr(one, name)
            if count:
                high = HIGH * count / top
                y = HIGH - HIGH * below / top - high
                size = f'width="{max(0.8, wide - 0.6):.1f}" height="{high:.1f}"'
                bars.append(f'<rect x="{x - wide / 2:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
            below += count
    offered = _line([(x, _y(one.offered, top)) for x, one in zip(_xs(len(series)), series, strict=True)], "#111", 1.2)
    return _frame(top, f"{len(series)} s", "".join(bars) + offered)


def _latency(result: LoadResult) -> str:
    shown = [one for one in result.series if one.p99_ms]
    top = max([1e-3, 1.2 * result.slo_ms, *(one.p99_ms for one in shown)])
    xs = dict(zip([one.at_s for one in result.series], _xs(len(result.series)), strict=True))
    inside = _line([(xs[one.at_s], _y(one.p50_ms, top)) for one in shown], "#8ab0d8")
    inside += _line([(xs[one.at_s], _y(one.p99_ms, top)) for one in shown], "#2563a8")
    return _frame(top, f"{len(result.series)} s", inside + _goal(result.slo_ms, top))


def _goal(slo_ms: float, top: float) -> str:
    if not slo_ms:
        return ""
    y = _y(slo_ms, top)
    return f'<line x1="{LEFT}" x2="{WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d55e00" stroke-dasharray="5 4"/>'


def _curve(result: LoadResult) -> str:
    """Share of answers at or below a time; the axis ends at p99.9, behind which one slow call would flatten the rest."""
    end = max(1e-3, result.answered.p999_ms, 1.1 * result.slo_ms)
    points = [(LEFT + (WIDE - LEFT) * min(1.0, ms / end), _y(share, 1)) for ms, share in result.curve]
    inside = _line(points, "#2563a8") if points else ""
    if result.slo_ms:
        x = LEFT + (WIDE - LEFT) * result.slo_ms / end
        inside += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HIGH}" stroke="#d55e00" stroke-dasharray="5 4"/>'
    return _frame(1, f"{end:.4g} ms", inside)
