"""Text report: sections on a terminal, their words and tables. Plots are for the HTML report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lamina.lab.experiment import ResultTable, Section

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable


def format_number(value: Any) -> str:
    """A number as a person would write it: four digits that count, thousands apart. Anything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        return f"{value:.2g}"
    whole = math.floor(math.log10(size)) + 1 if size else 1
    text = f"{value:.{4 - max(whole, 0)}f}"
    return text.rstrip("0").rstrip(".")


def render_sections(found: list[Section]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    for section in found:
        if section.table is None:
            continue
        parts.append(Padding(Text(section.title, style="bold"), (1, 0, 0, 0)))
        parts.append(render_table(section.table))
    return Group(*parts)


def render_table(values: ResultTable) -> RichTable:
    from rich.table import Table as RichTable

    drawn = RichTable(box=None, pad_edge=False, header_style="dim")
    for at, column in enumerate(values.columns):
        right = any(isinstance(row[at], int | float) for row in values.rows)
        drawn.add_column(column, justify="right" if right else "left")
    for row in values.rows:
        drawn.add_row(*(format_number(value) for value in row))
    return drawn
