"""Figures of `scale`: fitted exponents, tables, and lines on logarithmic axes."""

from __future__ import annotations

import math
from typing import Any

from lamina.lab.experiment import Plot, ResultTable, Row, Section

TIMES = {
    "event_us": "event us",
    "event_p99_us": "p99 us",
    "dispatch_us": "dispatch us",
    "admit_us": "admit us",
    "scale_us": "scale us",
    "call_us": "call us",
}
MEASURES = {"event_us": "per event", "dispatch_us": "per dispatch", "call_us": "whole run, per call"}


def figures(rows: list[Row]) -> dict[str, Any]:
    return {
        "machines": sorted({row["cpu"] for row in rows}),
        "exponents": _fits(rows, 0),
        "exponents_last_step": _fits(rows, -2),
        "cells": [{name: row[name] for name in ("sweep", "size", "policy", *MEASURES, "event_p99_us")} for row in rows],
    }


def _fits(rows: list[Row], first: int) -> dict[str, Any]:
    """Exponents over the sizes from `first` on; -2 is the last step alone, where growth that comes late shows."""
    fits: dict[str, Any] = {}
    for sweep in _sweeps(rows):
        for policy in _policies(rows):
            mine = _of(rows, sweep, policy)[first:]
            found = {measure: exponent([(row["size"], row[measure]) for row in mine]) for measure in MEASURES}
            fits.setdefault(sweep, {})[policy] = found
    return fits


def exponent(points: list[tuple[float, float]]) -> float | None:
    """Slope of log y over log x by least squares; nothing for fewer than two points."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    middle_x = sum(x for x, _ in logs) / len(logs)
    middle_y = sum(y for _, y in logs) / len(logs)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in logs) / sum((x - middle_x) ** 2 for x, _ in logs)
    return round(slope, 3)


def sections(rows: list[Row]) -> list[Section]:
    whole, last = _fits(rows, 0), _fits(rows, -2)
    fits = [
        [sweep, policy, *(fit[measure] for measure in MEASURES), *(last[sweep][policy][measure] for measure in MEASURES)]
        for sweep, by_policy in whole.items()
        for policy, fit in by_policy.items()
    ]
    columns = ["growing", "policy", *MEASURES.values(), *(f"{name}, last step" for name in MEASURES.values())]
    text = "Over the whole sweep, and over its last step alone: growth that comes late is hidden in the first."
    made = [Section("Fitted exponents", text, ResultTable(columns, fits))]
    for sweep in _sweeps(rows):
        table = [
            [row["size"], row["policy"], *(row[name] for name in TIMES), _percent(row["in_time"]), row["served"]]
            for row in sorted(rows, key=lambda row: (row["size"], row["policy"]))
            if row["sweep"] == sweep
        ]
        made.append(
            Section(
                f"More {sweep}",
                "Microseconds are means.",
                ResultTable([sweep, "policy", *TIMES.values(), "in time %", "calls"], table),
                _lines(rows, sweep, "event_us"),
            )
        )
        made.append(Section(f"More {sweep}: one dispatch", plot=_lines(rows, sweep, "dispatch_us")))
        made.append(Section(f"More {sweep}: the whole run", plot=_lines(rows, sweep, "call_us")))
    return made


def _lines(rows: list[Row], sweep: str, measure: str) -> Plot:
    label = {"event_us": "us per event", "dispatch_us": "us per dispatch", "call_us": "us per call"}[measure]
    series: dict[str, list[tuple[float | str, float]]] = {}
    for policy in _policies(rows):
        points = [(row["size"], row[measure]) for row in _of(rows, sweep, policy)]
        slope = exponent(points)
        series[policy if slope is None else f"{policy}: n^{slope:.2f}"] = list(points)
    return Plot("line", sweep, label, series, log_x=True, log_y=True)


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def _of(rows: list[Row], sweep: str, policy: str) -> list[Row]:
    return sorted((row for row in rows if (row["sweep"], row["policy"]) == (sweep, policy)), key=lambda row: int(row["size"]))


def _policies(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _sweeps(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["sweep"] for row in rows))
