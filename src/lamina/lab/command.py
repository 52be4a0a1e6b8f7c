"""`lamina lab`: the experiments behind every published figure. List them, run one, gather all into a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lamina.cli._shared import CommandGroup, console
from lamina.errors import BadValue

if TYPE_CHECKING:
    from lamina.lab.results import Results

FOLDER = Path("results/lab")
WIDTH = 140


@click.group(cls=CommandGroup)
def command() -> None:
    """Experiments: compare policies on the same workloads."""


@command.command("ls")
@click.option("--out", "folder", type=click.Path(path_type=Path), default=FOLDER, help="Folder with results.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def list_all(folder: Path, as_json: bool) -> None:
    """List the experiments, and when each was run last."""
    from lamina.lab import experiment

    found = []
    for name in experiment.names():
        module = experiment.load(name)
        results = _latest(folder, name)
        found.append({"name": name, "title": module.TITLE, "date": results.origin.date if results else None})
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found).decode())
        return
    from lamina.lab.experiment import ResultTable

    rows = [[row["name"], row["title"], (row["date"] or "never")[:10]] for row in found]
    _print_table(ResultTable(["experiment", "question", "last run"], rows))


@command.command("run")
@click.argument("name")
@click.option("--quick", is_flag=True, help="A short run of a few seconds, as a smoke test.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=2, show_default=True, help="First seed; even: reported, odd: for tuning."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Cells in parallel; default: the number of cores.")
@click.option("--resume", is_flag=True, help="Keep rows made by the same code with the same seed.")
@click.option("--json", "as_json", is_flag=True, help="Print only the figures, as one JSON object.")
@click.option("--out", "folder", type=click.Path(path_type=Path), default=FOLDER, help="Folder for results.")
def run_one(name: str, quick: bool, seed: int, jobs: int | None, resume: bool, as_json: bool, folder: Path) -> int:
    """Run the experiment NAME (or the path of a file with one), and show its figures."""
    from lamina.lab import experiment, results
    from lamina.lab.experiment import Row
    from lamina.lab.provenance import provenance
    from lamina.lab.runner import cores, run_cells

    module = experiment.load(name)
    if getattr(module, "ALONE", False):
        jobs = 1  # cells that measure time would measure each other
    origin = provenance(Path(name).stem, seed, quick)
    path = results.file_for(folder, name, quick, seed)
    cells = module.cells(seed, quick)
    rows: dict[int, Row] = results.finished_rows(cells, path, origin) if resume else {}
    kept = len(rows)
    missing = {place: cell for place, cell in enumerate(cells) if place not in rows}
    file = results.start(path, origin, rows.values())
    with file, _progress(name, len(cells), kept) as step:
        for place, row in run_cells(name, missing, jobs or cores()):
            rows[place] = row
            results.add(file, row)
            step()
    made = results.Results(origin, [rows[place] for place in sorted(rows)])
    results.finish(path, origin, made.rows)
    for row in made.failed:
        inside = row["trace"][-1] if row["trace"] else ""
        click.echo(f"failed: {row['error']}" + (f" ({inside})" if inside else ""), err=True)
    _show(module, made, as_json)
    if not as_json:
        note = f", {kept} of them kept from before" if kept else ""
        click.echo(f"\n{len(made.good)} of {len(cells)} cells{note}; rows in {path}", err=True)
    return 1 if made.failed else 0


@command.command("report")
@click.argument("names", nargs=-1)
@click.option("--results", "folder", type=click.Path(path_type=Path), default=FOLDER, help="Folder with results.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER / "report.html", help="HTML page to write.")
@click.option("--markdown", is_flag=True, help="Write the headline tables as Markdown instead; `--out -` is standard output.")
def report(names: tuple[str, ...], folder: Path, out: Path, markdown: bool) -> None:
    """Write one HTML page with all experiments that have results, or those named."""
    from lamina.lab import experiment
    from lamina.lab.html_report import ReportEntry, html_report
    from lamina.lab.text_report import markdown_report

    entries = []
    for name in names or experiment.names():
        results = _latest(folder, name)
        if results is not None:
            entries.append(ReportEntry(Path(name).stem, experiment.load(name), results))
        elif names:
            raise BadValue(f"{name}: no results in {folder}", hint=f"run it first: lamina lab run {name}")
    if not entries:
        raise BadValue(f"--results {folder}: no results of any experiment", hint="run one first: lamina lab run NAME")
    written = markdown_report([(e.experiment, e.results) for e in entries]) if markdown else html_report(entries)
    if markdown and str(out) == "-":
        click.echo(written, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(written, encoding="utf-8")
    except OSError as error:
        raise BadValue(f"--out {out}: {error.strerror}", hint="give a file in a folder that can be written to") from None
    click.echo(f"{len(entries)} experiment{'s'[: len(entries) != 1]} in {out}")


def _latest(folder: Path, name: str) -> Results | None:
    """A full run if there is one, else a quick one, which the page marks as such."""
    from lamina.lab import results

    for quick in (False, True):
        path = results.file_for(folder, name, quick)
        if path.exists():
            return results.read(path)
    return None


def _show(module: Any, made: Results, as_json: bool) -> None:
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(module.figures(made.good)).decode())
        return
    from lamina.lab import text_report

    console(WIDTH).print(text_report.render_sections(module.sections(made.good)))


def _print_table(table: Any) -> None:
    from lamina.lab import text_report

    console(WIDTH).print(text_report.render_table(table))


@contextmanager
def _progress(name: str, total: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda: bar.advance(task)
