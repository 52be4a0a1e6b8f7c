"""Live view in a terminal: calls a second as stacked bars, p99 against the SLO as a line of blocks."""

from __future__ import annotations

from typing import Any

from lamina.load.results import LoadResult, SecondStats

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 70  #: fits with its labels into 80 columns
ROWS = 8
_PARTS = (("in_time", "#3a8f5a"), ("late", "#e69f00"), ("refused", "#999999"), ("failed", "#d55e00"))


def live_view(seconds: list[SecondStats], slo_ms: float) -> Any:
    """A rich renderable of the last `WIDTH` seconds."""
    from rich.console import Group
    from rich.text import Text

    shown = seconds[-WIDTH:]
    if not shown:
        return Text("waiting for the first second ...")
    top = max(1, *(max(one.offered, _answers(one)) for one in shown))
    lines = [_bar_row(shown, row, top) for row in range(ROWS, 0, -1)]
    lines.append(_p99_row(shown, slo_ms))
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
