"""Text report: sections on a terminal, their words and tables. Plots are for the HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.lab.experiment import ResultTable, Section
from lamina.lab.numbers import format_number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable


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
