"""Experiment interface, and the values it shows.

An experiment is one file, `lab/experiments/NAME.py`, with five things in it:

    TITLE, ABOUT, REPORTED                            what is compared, how it is set up, what others published
    cells(seed, quick) -> list of JSON objects        independent pieces of work; `quick` is a few seconds in all
    run(cell) -> JSON object                          one row, a pure function of its cell, in a process of its own
    figures(rows) -> JSON object                      the figures, for programs
    sections(rows) -> list of Section                 the same for people: text, tables, plots

Two more are optional. `ALONE = True` runs cells one at a time, for those that measure time. `figures` may hold
`"beside": {name of a Reported: our value}`; the report then shows both in one row.

Cells are plain JSON, so they go to a process, into a file and back without anything that could be executed. Rows carry
the keys of their cell (the runner sees to it): a file of rows can be read without the code that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from lamina import plugins
from lamina.errors import BadValue

Cell = dict[str, Any]
Row = dict[str, Any]

PARTS = ("TITLE", "ABOUT", "REPORTED", "cells", "run", "figures", "sections")


@dataclass(frozen=True, slots=True)
class Reported:
    """A published figure, in the words and digits of its authors. Never mixed with ours."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class ResultTable:
    columns: list[str]
    rows: list[list[Any]]
    """Numbers stay numbers: the report rounds and aligns them."""

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise BadValue(f"table: a row of {len(wrong)} under {len(self.columns)} columns", hint=f"columns {self.columns}")


@dataclass(frozen=True, slots=True)
class Plot:
    """`line`: points in their order. `bar`: groups by x, a bar per series. `cdf`: steps that rise to the last point."""

    kind: Literal["line", "bar", "cdf"]
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float | str, float]]] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what belongs under it. Text: paragraphs with an empty line between them. `headline`: it is part of the
    documentation."""

    title: str
    text: str = ""
    table: ResultTable | None = None
    plot: Plot | None = None
    headline: bool = False


class Experiment(Protocol):
    """The shape of a module in `lab/experiments`."""

    TITLE: str
    ABOUT: str
    REPORTED: list[Reported]

    def cells(self, seed: int, quick: bool) -> list[Cell]: ...
    def run(self, cell: Cell) -> Row: ...
    def figures(self, rows: list[Row]) -> dict[str, Any]: ...
    def sections(self, rows: list[Row]) -> list[Section]: ...


def names() -> list[str]:
    """All experiments there are."""
    return plugins.names("lab.experiments")


def load(name: str) -> Experiment:
    """The experiment called `name`, or the file itself if `name` is a path that ends in `.py`."""
    module = plugins.load("lab.experiments", name)
    missing = [part for part in PARTS if not hasattr(module, part)]
    if missing:
        raise BadValue(f"experiment {name}: it has no {', '.join(missing)}", hint=f"an experiment has {', '.join(PARTS)}")
    return cast(Experiment, module)


def installed_policies(wanted: Sequence[str]) -> list[str]:
    """Those of `wanted` that are installed, in the order given: a comparison goes on without the others."""
    known = set(plugins.names("policies"))
    return [name for name in wanted if name in known]
