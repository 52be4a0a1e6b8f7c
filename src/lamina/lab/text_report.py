"""Text report: sections on a terminal, and headline tables as Markdown for the documentation. Plots are for the HTML report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lamina.lab.experiment import Experiment, ResultTable, Section
from lamina.lab.results import Results

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


MARKDOWN_ROWS = 60
"""Of one table; the HTML page has all of them."""

MARKDOWN_HEAD = """\
<!-- written by `lamina lab report --markdown`; edits are lost -->

# Lab: results

Headline tables of every experiment; the whole of it is in `results/lab/report.html`. All figures are simulated unless the
experiment says otherwise. Constants of `frontier` are tuned on odd seeds; these are even ones.
"""


def markdown_report(entries: list[tuple[Experiment, Results]]) -> str:
    """Provenance, and the sections that experiments call headlines, as a page of the documentation."""
    parts = [MARKDOWN_HEAD]
    for experiment, results in entries:
        origin = results.origin
        quick = ", quick: too short to quote" if origin.quick else ""
        parts.append(
            f"## {experiment.TITLE}\n\n`{origin.experiment}`, commit {origin.commit or 'unknown'}, {origin.date[:10]}, "
            f"from seed {origin.seed}, {len(results.good):,} cells{quick}.\n"
        )
        try:
            sections = experiment.sections(results.good)
        except Exception as error:  # rows of an older version may lack what a figure is made of
            parts.append(f"These rows could not be made into figures: {type(error).__name__}: {error}. Run it again.\n")
            continue
        for section in sections:
            if section.headline:
                parts.append(f"### {section.title}\n\n{section.text}\n")
                if section.table is not None and section.table.rows:
                    parts.append(_markdown_table(section.table))
    return "\n".join(parts)


def _markdown_table(table: ResultTable) -> str:
    numeric = [any(isinstance(row[at], int | float) for row in table.rows) for at in range(len(table.columns))]
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "|".join("--:" if right else "---" for right in numeric) + "|"]
    rows = [[format_number(value).replace("|", "/") for value in row] for row in table.rows[:MARKDOWN_ROWS]]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    more = len(table.rows) - MARKDOWN_ROWS
    return "\n".join(lines) + "\n" + (f"\n{more:,} more in the HTML page.\n" if more > 0 else "")
