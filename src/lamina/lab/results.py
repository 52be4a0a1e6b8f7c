"""Result files: JSON lines, the provenance first, then one line per row. Everything that is shown is read from them.

Rows are added as cells finish to a file beside it, so that an interrupted run leaves what it has and harms nothing. A
whole run then takes the place of the one before, in the order of its cells: the same run gives the same file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from lamina.errors import BadValue
from lamina.lab.experiment import Cell, Row
from lamina.lab.provenance import Provenance

FOLDER = Path("results/lab")


@dataclass(frozen=True, slots=True)
class Results:
    origin: Provenance
    rows: list[Row]

    @property
    def good(self) -> list[Row]:
        return [row for row in self.rows if "error" not in row]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if "error" in row]


def file_for(folder: Path, name: str, quick: bool, seed: int = 2) -> Path:
    """Quick runs, and those with odd seeds, which are for tuning, have files of their own: they must never take the place of a
    reported one."""
    return folder / f"{Path(name).stem}{'.quick' if quick else '.tuning' if seed % 2 else ''}.jsonl"


def unfinished(path: Path) -> Path:
    """Where rows go until all are there."""
    return path.with_suffix(".partial.jsonl")


def read(path: Path) -> Results:
    """A half-written last line, as an interrupted run may leave it, is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
        origin = msgspec.json.decode(lines[0], type=Provenance)
        last = len(lines) - 1  # what follows the last line break: nothing, or half a row
        rows = [msgspec.json.decode(line, type=Row) for line in lines[1:last] if line]
    except (OSError, msgspec.MsgspecError) as error:
        raise BadValue(f"results {path}: cannot be read: {error}", hint="run the experiment again") from None
    return Results(origin, rows)


def start(path: Path, origin: Provenance, rows: Iterable[Row] = ()) -> TextIO:
    """A file for the rows to come, with the origin and the rows there are; more follow with `add`."""
    write_atomically(unfinished(path), origin, rows)
    return unfinished(path).open("a", encoding="utf-8")


def add(file: TextIO, row: Row) -> None:
    file.write(_line(row))
    file.flush()


def finish(path: Path, origin: Provenance, rows: Iterable[Row]) -> None:
    write_atomically(path, origin, rows)
    unfinished(path).unlink(missing_ok=True)


def write_atomically(path: Path, origin: Provenance, rows: Iterable[Row]) -> None:
    """All at once, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(path.name + ".part")
        half.write_text(_line(origin) + "".join(map(_line, rows)), encoding="utf-8")
        os.replace(half, path)
    except OSError as error:
        raise BadValue(f"results {path}: {error.strerror}", hint="give --out a folder that can be written to") from None


def cell_key(cell: Cell, row: Row | None = None) -> str:
    """A cell by its values; with `row`, the values that row has in the fields of the cell."""
    return msgspec.json.encode({name: (cell if row is None else row).get(name) for name in sorted(cell)}).decode()


def finished_rows(cells: list[Cell], path: Path, origin: Provenance) -> dict[int, Row]:
    """Rows of earlier runs that need not be made again, by the place of their cell. Failed ones are tried again."""
    files = [read(file) for file in (unfinished(path), path) if file.exists()]
    rows = [row for file in files if file.origin.is_same_work(origin) for row in file.good]
    found: dict[int, Row] = {}
    by_fields: dict[tuple[str, ...], dict[str, Row]] = {}  # cells of one part have the same fields: one index for each part
    for place, cell in enumerate(cells):
        fields = tuple(sorted(cell))
        if fields not in by_fields:
            by_fields[fields] = {cell_key(cell, row): row for row in reversed(rows) if cell.keys() <= row.keys()}
        row = by_fields[fields].get(cell_key(cell))
        if row is not None:
            found[place] = row
    return found


def _line(value: Provenance | Row) -> str:
    return msgspec.json.encode(value).decode() + "\n"
