"""Why a profile is not as sure as was asked for, in words: what helps depends on it.

More time helps against chance and against places nobody looked at. Against a machine whose pace changed it does not: a quieter
machine does, or profiling again later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from lamina.profiler.bench import Place
from lamina.profiler.measure import Outcome
from lamina.profiler.surrogate import without_stalls

ENOUGH = 6  #: runs of a place from which its earlier half is compared with its later one
PACE = 0.1  #: change of it that is worth a word, as a logarithm


def why_unsure(outcome: Outcome) -> str:
    """Empty if it is as sure as it should be."""
    if outcome.reached:
        return ""
    if not math.isfinite(outcome.unsure):
        return "the time was too short for the four corners of the grid"
    ratio = pace(outcome.runs)
    if abs(math.log(ratio)) > PACE:
        return f"the machine's own pace changed: the same batches took {ratio:.2f} times as long in later runs as in earlier ones"
    batch, units = outcome.least_sure
    where = f"batch {batch} on {units} unit{'s'[: units > 1]}"
    if outcome.least_sure not in outcome.runs:
        return f"the time was too short: {where} is a guess between others"
    values = without_stalls(outcome.runs[outcome.least_sure])
    return f"{len(values)} runs of {where} lie {max(values) / min(values) - 1:.0%} apart"


def pace(runs: Mapping[Place, Sequence[float]]) -> float:
    """How many times as long later runs took as earlier ones of the same place; the middle of all places, so that one with odd
    runs does not count. 1 if nothing was repeated often enough."""
    halves = [(values[: len(values) // 2], values[len(values) // 2 :]) for values in runs.values() if len(values) >= ENOUGH]
    return statistics.median(statistics.median(late) / statistics.median(early) for early, late in halves) if halves else 1.0
