"""Task lists for `lamina plan`: which model, how often, how fast. As gpu-let writes them, or as CSV with a header."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from lamina.errors import BadValue, did_you_mean, unreadable_file
from lamina.planner.partitioning.catalogue import Catalogue, PlanTask

_COLUMNS = {"model": ("model", "id", "name", "model_id"), "rate": ("rate", "rps"), "slo": ("slo", "slo_ms", "slo(ms)")}


Row = tuple[str, float, float]
"""Name, requests a second, milliseconds."""


def read_tasks(file: Path, catalogue: Catalogue) -> list[PlanTask]:
    """Models by number or name."""
    numbers = {model.name: model.id for model in catalogue.models.values()}
    rows = read_rows(file, list(numbers), {str(number): name for name, number in numbers.items()})
    return [PlanTask(numbers[name], rate, slo_ms) for name, rate, slo_ms in rows]


def read_rows(file: Path, names: Sequence[str], also: Mapping[str, str] | None = None) -> list[Row]:
    """Lines of `model,rate,SLO`: what is called how (`also`: other names of the same), requests a second, milliseconds.

    The first line may be the number of tasks, as in gpu-let, or name the columns in any order.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable_file(file, error, "a CSV of model,rate,SLO lines") from None
    rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(csv.reader(lines), 1)]
    rows = [(number, row[:-1] if row[-1:] == [""] else row) for number, row in rows if any(row) and not row[0].startswith("#")]
    if not rows:
        raise BadValue(f"{file}: no tasks", hint="a line for each: model,rate,SLO")
    order, announced = (0, 1, 2), None
    first = rows[0][1]
    if len(first) == 1 and first[0].isdigit():
        announced, rows = int(first[0]), rows[1:]
    elif _is_header(first):
        order, rows = _order(file, first), rows[1:]
    if announced is not None and announced != len(rows):
        raise BadValue(f"{file}:1: {announced} tasks announced, {len(rows)} follow", hint="correct the number or leave it out")
    known = {name: name for name in names} | dict(also or {})
    tasks = [_task(f"{file}:{number}", row, order, known, names) for number, row in rows]
    seen: set[str] = set()
    for (number, _), (name, _, _) in zip(rows, tasks, strict=True):
        if name in seen:
            raise BadValue(f"{file}:{number}: model {name!r} is there twice", hint="add up the rates")
        seen.add(name)
    return tasks


def _is_header(row: Sequence[str]) -> bool:
    return len(row) >= 3 and not any(_is_number(cell) for cell in row)


def _order(file: Path, header: Sequence[str]) -> tuple[int, int, int]:
    found = []
    for wanted, names in _COLUMNS.items():
        places = [place for place, cell in enumerate(header) if cell.lower() in names]
        if len(places) != 1:
            raise BadValue(f"{file}:1: no column {wanted!r} in {','.join(header)!r}", hint="name the columns model,rate,slo")
        found.append(places[0])
    return found[0], found[1], found[2]


def _task(place: str, row: Sequence[str], order: tuple[int, int, int], known: Mapping[str, str], names: Sequence[str]) -> Row:
    if len(row) <= max(order):
        raise BadValue(f"{place}: {','.join(row)!r} has too few fields", hint="write model,rate,SLO")
    model, rate, slo_ms = (row[column] for column in order)
    if model not in known:
        hint = did_you_mean(model, names, f"there are {', '.join(names)}")
        raise BadValue(f"{place}: model {model!r} is not known", hint=hint)
    return known[model], _positive(place, "rate", rate), _positive(place, "SLO", slo_ms, above=True)


def _positive(place: str, field: str, text: str, *, above: bool = False) -> float:
    value = float(text) if _is_number(text) else -1.0
    if not 0 <= value <= 1e9 or (above and not value):
        raise BadValue(
            f"{place}: {field} {text!r} cannot be", hint="a number of requests a second" if field == "rate" else "milliseconds"
        )
    return int(value) if value == int(value) else value


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False
