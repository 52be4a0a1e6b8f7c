"""Explanation of the uncertainty of a profile in words: what helps depends on the cause.

Time helps where places or samples had no turn yet. Where the same batch of the same samples differs from one run to the next,
the machine or the function is not steady: time helps slowly, a steadier machine at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from lamina.profiler.bench import GridPoint
from lamina.profiler.measurement import MeasurementOutcome

STEADY_VARIATION = 0.02  #: so much from one run to the next is no obstacle

Runs = Mapping[GridPoint, Sequence[float]]
Cycle = Callable[[int], int]
"""After how many batches of a size its samples repeat."""


def explain_uncertainty(outcome: MeasurementOutcome, cycle: Cycle = lambda batch: 1) -> str:
    """Empty if it is as sure as it should be."""
    if outcome.reached:
        return ""
    if not math.isfinite(outcome.uncertainty):
        return "the time was too short for the four corners of the grid"
    batch, units = outcome.least_certain
    where = f"batch {batch} on {units} unit{'s'[: units > 1]}"
    if outcome.least_certain not in outcome.runs:
        return f"the time was too short, {where} is a guess between others"
    apart = run_to_run_variation(outcome.runs, cycle)
    if apart < STEADY_VARIATION:
        return f"the time was too short, {where} had {len(outcome.runs[outcome.least_certain])} runs of samples that differ"
    return f"the same batch takes {apart:.0%} more or less from one run to the next: the machine, or the function, is not steady"


def run_to_run_variation(runs: Runs, cycle: Cycle) -> float:
    """How far a batch of the same samples on the same slice is off when it is run again: half of them by less."""
    again = [
        abs(math.log(later / before))
        for (batch, _), values in runs.items()
        for before, later in zip(values, values[cycle(batch) :], strict=False)
    ]
    return math.expm1(statistics.median(again)) if again else 0.0
