"""An experiment for tests: numbers to halves. Cells can be told to fail, to die, or to answer what is no JSON."""

from __future__ import annotations

import os
from typing import Any

from lamina.lab.experiment import Plot, Reported, ResultTable, Section

TITLE = "Halves of numbers"
ABOUT = "Numbers are halved.\n\nNothing <else> happens."
REPORTED = [Reported("mean", "2.5 <exactly>", "the authors, table 1")]


def cells(seed: int, quick: bool) -> list[dict[str, Any]]:
    trouble = os.environ.get("FAKE_TROUBLE", "")
    made: list[dict[str, Any]] = [{"x": x, "seed": seed} for x in range(2 if quick else 4)]
    if trouble:
        made.insert(1, {"x": trouble, "seed": seed})
    return made


def run(cell: dict[str, Any]) -> dict[str, Any]:
    if cell["x"] == "raise":
        raise ValueError("no half of a word")
    if cell["x"] == "die":
        os._exit(9)
    if cell["x"] == "object":
        return {"half": object()}
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(f"{cell['x']}\n")
    return {"half": cell["x"] / 2}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    halves = [row["half"] for row in rows]
    return {"mean": sum(halves) / len(halves), "beside": {"mean": sum(halves) / len(halves)}}


def sections(rows: list[dict[str, Any]]) -> list[Section]:
    table = ResultTable(["x", "half"], [[row["x"], row["half"]] for row in rows])
    points: list[tuple[float | str, float]] = [(row["x"], row["half"]) for row in rows]
    return [
        Section("All halves", "One per number.", table, Plot("line", "number", "half", {"halves": points}), headline=True),
        Section("Bars of halves", plot=Plot("bar", "number", "half", {"halves": points})),
    ]
