"""HTML report: all results on one page that needs nothing but itself, no script, font or picture from elsewhere.

A page is read long after the run that made it, by readers that did not see it. So everything stands beside its provenance, and
what others published stands in a column that says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec

from lamina.lab.experiment import Experiment, Plot, Reported, ResultTable, Section
from lamina.lab.plots import draw_plot, require_matplotlib
from lamina.lab.report_style import CSS
from lamina.lab.results import Results
from lamina.lab.text_report import format_number


@dataclass(frozen=True, slots=True)
class ReportEntry:
    name: str
    experiment: Experiment
    results: Results


SHORT = ' class="s"'


def html_report(entries: list[ReportEntry]) -> str:
    require_matplotlib()
    links = "".join(f'<li><a href="#{e.name}">{escape(e.experiment.TITLE)}</a></li>' for e in entries)
    nothing = "" if entries else '<p class="nothing">No experiment has results yet.</p>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Lamina: the lab</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{CSS}</style></head><body>"
        f'<nav><p class="brand">Lamina<span>the lab</span></p><ol>{links}</ol></nav>'
        f"<main>{_opening(entries)}{nothing}{''.join(map(_experiment, entries))}</main></body></html>\n"
    )


def _opening(entries: list[ReportEntry]) -> str:
    rows = []
    for entry in entries:
        origin = entry.results.origin
        failed = len(entry.results.failed)
        cells = f"{len(entry.results.rows)}" + (f", {failed} failed" if failed else "")
        rows.append([entry.experiment.TITLE, cells, origin.date[:10], origin.commit or "-", origin.seed, _kind(entry)])
    table = _table(ResultTable(["experiment", "cells", "date", "commit", "seed", "run"], rows)) if rows else ""
    return (
        "<header><h1>What was tried, and what came of it</h1>"
        "<p>Every figure here comes from the simulator around the controller that serves, unless its experiment says "
        "otherwise, and can be made again with <code>lamina lab run NAME</code>. Figures that others published are "
        f'marked <span class="reported">reported</span>; all others are ours.</p>'
        "<p>Constants of <code>frontier</code> are tuned on odd seeds; these are even ones, ten of them in every comparison. "
        "Every comparison names the cells in which another policy is ahead, in its figure or in one of three bills: device time "
        f"used, time held, rent of whole devices.</p>{table}</header>"
    )


def _experiment(entry: ReportEntry) -> str:
    about = _text(entry.experiment.ABOUT)
    try:
        figures: dict[str, Any] = entry.experiment.figures(entry.results.good)
        sections = entry.experiment.sections(entry.results.good)
    except Exception as error:  # half a run may lack what a figure is made of; the other experiments are still shown
        figures, sections = {}, []
        words = escape(f"{type(error).__name__}: {error}")
        about += f'<p class="failed">These rows could not be made into figures: {words}</p>'
    beside = figures.get("beside", {})
    return (
        f'<article id="{escape(entry.name, quote=True)}"><h2>{escape(entry.experiment.TITLE)}</h2>'
        f"{_origin(entry)}{about}{_reported(entry.experiment.REPORTED, beside)}"
        f"{''.join(map(_section, sections))}{_failures(entry.results)}{_raw(figures)}</article>"
    )


def _origin(entry: ReportEntry) -> str:
    origin = entry.results.origin
    machine = origin.machine
    facts = {
        "date": origin.date.replace("T", " ").replace("+00:00", " UTC"),
        "commit": origin.commit or "unknown",
        "seed": str(origin.seed),
        "run": _kind(entry),
        "version": f"lamina {origin.version}, Python {origin.python}",
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.system}",
    }
    pairs = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="origin">{pairs}</dl>'


def _kind(entry: ReportEntry) -> str:
    return "quick: too short to quote" if entry.results.origin.quick else "full"


def _reported(reported: list[Reported], beside: dict[str, Any]) -> str:
    if not reported:
        return ""
    columns = ["figure", "reported", *(["ours"] if beside else []), "source"]
    rows = [[item.name, item.value, *([_ours(beside.get(item.name))] if beside else []), item.source] for item in reported]
    return (
        f'<h3>What others published <span class="reported">reported</span></h3>{_table(ResultTable(columns, rows), words=True)}'
    )


def _ours(value: Any) -> str:
    return "not tried" if value is None else format_number(value)


def _section(section: Section) -> str:
    plot = _plot(section.plot, section.title) if section.plot else ""
    table = _table(section.table) if section.table else ""
    return f"<section><h3>{escape(section.title)}</h3>{_text(section.text)}{plot}{table}</section>"


def _plot(plot: Plot, title: str) -> str:
    return f"<figure>{draw_plot(plot, title)}</figure>"


def _table(table: ResultTable, *, words: bool = False) -> str:
    """Numbers to the right, where digits line up; a column of words to the left. `words`: leave all to the left."""
    numeric = [
        not words and any(isinstance(row[at], int | float) for row in table.rows) and _no_words(table, at)
        for at in range(len(table.columns))
    ]
    kinds = [' class="n"' if right else "" for right in numeric]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell(format_number(value), kind) for value, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(said: str, kind: str) -> str:
    """A few words stay on one line."""
    return f"<td{kind or (SHORT if len(said) <= 24 else '')}>{escape(said)}</td>"


def _no_words(table: ResultTable, at: int) -> bool:
    return all(isinstance(row[at], int | float) or row[at] is None or len(str(row[at])) <= 12 for row in table.rows)


def _failures(results: Results) -> str:
    if not results.failed:
        return ""
    items = "".join(
        f"<li><code>{escape(row['error'])}</code><br><small>{escape(' < '.join(reversed(row.get('trace', []))))}</small></li>"
        for row in results.failed
    )
    return f'<section><h3>Cells that failed</h3><ul class="failed">{items}</ul></section>'


def _raw(figures: dict[str, Any]) -> str:
    if not figures:
        return ""
    text = msgspec.json.format(msgspec.json.encode(figures), indent=1).decode()
    return f"<details><summary>All figures as JSON</summary><pre>{escape(text)}</pre></details>"


def _text(text: str) -> str:
    """Paragraphs, with an empty line between them."""
    return "".join(f"<p>{escape(' '.join(part.split()))}</p>" for part in text.strip().split("\n\n") if part.strip())
