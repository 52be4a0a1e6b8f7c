"""Figures in the documentation are those of the recorded results: a table that quotes a file in `results/` is held beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GPU_SLICES = "docs/explanation/gpu-slices.md"


def rows_below(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    table = next(block for block in text.split("\n\n") if block.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def figures(text: str) -> list[str]:
    return [found.replace(",", "") for found in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)]


def is_rounded(figure: str, value: float) -> bool:
    """Whether the figure is the value, to as many digits as are shown."""
    return abs(float(figure) - value) <= 0.501 * 10.0 ** -len(figure.partition(".")[2])


def result(path: str) -> Any:
    return json.loads((ROOT / "results" / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("server", "column"), [("lamina", 1), ("litserve", 3)])
def test_the_rates_beside_litserve_are_those_of_the_run(server: str, column: int) -> None:
    told = {figures(row[0])[0]: row[column : column + 2] for row in rows_below(GPU_SLICES, "### Beside LitServe") if row[column]}
    for row in result("gpu/peers.json")["rows"]:
        name, _, rest = row["what"].partition(", ")
        if name == server:
            rate, latencies = told[figures(rest)[0]]
            details = row["details"]
            values = [row["value"], 100 * details["share"], details["p50_ms"], details["p99_ms"]]
            shown = figures(rate) + figures(latencies)
            assert all(is_rounded(figure, value) for figure, value in zip(shown, values, strict=True)), row["what"]


def test_the_landing_page_names_the_best_of_that_run() -> None:
    best = max(row["value"] for row in result("gpu/peers.json")["rows"] if row["what"].startswith("lamina"))
    assert f"{best:,.0f} calls/s" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_capacities_of_five_models_are_those_of_the_run() -> None:
    found = result("gpu/five.json")["rows"]
    table = {int(figures(row[0])[0]): row for row in rows_below(GPU_SLICES, "### Five models at once, by way of sharing")}
    for slo, row in table.items():
        for column, kind in ((1, "temporal"), (2, "mps"), (3, "streams"), (4, "hard slices"), (6, "`frontier` as it comes")):
            best = max(one["value"] for one in found if one["what"].startswith(f"{slo}x solo,") and kind in one["what"])
            assert is_rounded(figures(row[column])[0], best), (slo, kind)


def test_takeovers_are_as_quick_as_was_measured() -> None:
    kinds = {
        "killed": "kill",
        "stopped": "stop",
        "frozen": "freeze",
        "cut off from the database": "cut",
        "without an answer from the database": "hang",
    }
    page = (ROOT / "docs" / "how-to" / "standby.md").read_text(encoding="utf-8")
    seconds = result("attacks/takeovers.json")["first_answer_s"]
    for words, kind in kinds.items():
        cells = [
            f"{seconds[key]['median']:.2f}, {seconds[key]['worst']:.2f}"
            for key in (f"sqlite/{kind}", f"postgres/{kind}")
            if key in seconds
        ]
        [line] = [line for line in page.splitlines() if line.startswith(f"| {words} |")]
        assert re.findall(r"\d\.\d\d, \d\.\d\d", line) == cells
