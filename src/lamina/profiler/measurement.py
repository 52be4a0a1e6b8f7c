"""Adaptive measurement: the next point is always the one with the highest uncertainty, until all are certain enough.

The four corners come first, since every other place lies between them. A number of units that was not measured yet begins
with both of its ends for the same reason. The first run after the batch or the slice has changed is not counted: caches,
threads and sessions are made for it.

A run that had to wait for its core was disturbed by another process, and is repeated. Where that keeps happening, the
time it waited is taken off instead: what is asked is how long the function takes on a slice of its own.

Why a profile is not as certain as was asked for is said in words, since what helps depends on it. Time helps where points or
samples had no turn yet. Where the same batch of the same samples differs from one run to the next, the machine or the function
is not steady: time helps slowly, a steadier machine at once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lamina.profiler.bench import Bench, CyclesSamples, GridPoint, profile_grid
from lamina.profiler.surrogate import Surrogate

LEAST_RUNS, MOST_RUNS = 3, 20
VISIT_US = 100_000
"""A visit goes on for so long, within these numbers of runs: short batches are repeated more, long ones come back if needed."""

DISTURBED = 0.02
"""Part of a run spent waiting for a core from which it is not believed."""

WARM_UP_US = 1_000_000
"""After loading, the function runs at its largest batch for so long at most, so that a sleepy machine wakes first."""
WARM_UP_RUNS = 5


@dataclass(frozen=True, slots=True)
class MeasurementProgress:
    """State after every visit, for progress displays."""

    point: GridPoint
    runs_us: list[float]
    spent_s: float
    points: int
    uncertainty: float  #: of the least sure place; infinite until the corners are in


@dataclass(slots=True)
class MeasurementOutcome:
    runs: dict[GridPoint, list[float]]
    uncertainty: float  #: of the least sure place
    spent_s: float
    reached: bool  #: whether that is the target
    disturbed: int = 0  #: runs of this session that had to wait for a core
    least_certain: GridPoint = (1, 1)


@dataclass(slots=True)
class AdaptiveMeasurement:
    """Adaptive measurement of one function on one bench. `runs` holds what is known already, from an earlier session say."""

    bench: Bench
    max_batch: int
    target: float = 0.05
    budget_s: float = 60.0
    runs: dict[GridPoint, list[float]] = field(default_factory=dict)
    watch: Callable[[MeasurementProgress], None] | None = None
    clock_s: Callable[[], float] = time.monotonic
    _known: tuple[int, Surrogate] | None = None
    _disturbed: int = 0
    _last: GridPoint | None = None
    _started_s: float = 0.0

    def run(self) -> MeasurementOutcome:
        """The function must be loaded. Ends at the target, or when the budget is spent; at least one place is measured."""
        places = self._places
        self._started_s = self.clock_s()
        unsure = self._worst_uncertainty(places)
        if unsure > self.target:
            self._warm_up()
        while unsure > self.target and (self._left_s() > 0 or not self.runs):
            place = self._next_point(places)
            if place is None:
                break
            runs_us = self._visit(place)
            if not runs_us:
                break
            self.runs.setdefault(place, []).extend(runs_us)
            unsure = self._worst_uncertainty(places)
            if self.watch is not None:
                self.watch(MeasurementProgress(place, runs_us, self._spent_s(), len(self.runs), unsure))
        return self.current_outcome()

    def current_outcome(self) -> MeasurementOutcome:
        places = self._places
        unsure = self._worst_uncertainty(places)
        where = max(places, key=self._surrogate().uncertainty) if math.isfinite(unsure) else places[0]
        return MeasurementOutcome(self.runs, unsure, self._spent_s(), unsure <= self.target, self._disturbed, where)

    @property
    def _places(self) -> list[GridPoint]:
        return profile_grid(self.bench.device, self.max_batch)

    # ------------------------------------------------------------------ choosing

    def _next_point(self, places: Sequence[GridPoint]) -> GridPoint | None:
        """The least sure of the places there is still time for."""
        for corner in _corners(places):
            if corner not in self.runs:
                return corner
        model = self._surrogate()
        for place in sorted(places, key=lambda place: (-model.uncertainty(place), -model.distance_to_nearest(place), place)):
            if LEAST_RUNS * model.predicted_us(place) / 1e6 > self._left_s():
                continue
            return next((end for end in _row_ends(places, place[1]) if end not in self.runs), place)
        return None

    def _worst_uncertainty(self, places: Sequence[GridPoint]) -> float:
        if any(corner not in self.runs for corner in _corners(places)):
            return math.inf
        model = self._surrogate()
        return max(model.uncertainty(place) for place in places)

    def _surrogate(self) -> Surrogate:
        """Made anew after each visit, and asked twice."""
        count = sum(map(len, self.runs.values()))
        if self._known is None or self._known[0] != count:
            self._known = (count, Surrogate(self.runs, self.sample_cycle))
        return self._known[1]

    def sample_cycle(self, batch: int) -> int:
        return self.bench.sample_cycle(batch) if isinstance(self.bench, CyclesSamples) else 1

    # ----------------------------------------------------------------- measuring

    def _warm_up(self) -> None:
        spent_us, runs = 0.0, 0
        while runs < WARM_UP_RUNS and spent_us < WARM_UP_US and (not runs or self._left_s() > 0):
            spent_us += self.bench.run(self.max_batch, self.bench.device.units).us
            runs += 1
        self._last = None

    def _visit(self, place: GridPoint) -> list[float]:
        if place != self._last:
            self.bench.run(*place)
            self._last = place
        quiet: list[float] = []
        mended: list[float] = []
        total_us = 0.0
        while len(quiet) < MOST_RUNS and (len(quiet) < LEAST_RUNS or total_us < VISIT_US):
            tries = len(quiet) + len(mended)
            if (self._left_s() <= 0 and (tries or self.runs)) or (tries >= 3 * LEAST_RUNS and total_us >= VISIT_US):
                break
            if isinstance(self.bench, CyclesSamples):
                self.bench.set_sample_turn(place, len(self.runs.get(place, ())) + len(quiet))
            run = self.bench.run(*place)
            total_us += max(0.1, run.us)
            if run.waited_us <= DISTURBED * run.us:
                quiet.append(max(0.1, run.us))
                continue
            self._disturbed += 1
            mended.append(max(0.1, run.us - run.waited_us))
        return quiet if len(quiet) >= LEAST_RUNS else quiet + mended

    def _spent_s(self) -> float:
        return self.clock_s() - self._started_s

    def _left_s(self) -> float:
        return self.budget_s - self._spent_s()


def _corners(places: Sequence[GridPoint]) -> list[GridPoint]:
    """The corners of the grid, those that bound all others first: the slowest and the fastest."""
    batches, units = [batch for batch, _ in places], [count for _, count in places]
    low, high, few, many = min(batches), max(batches), min(units), max(units)
    return list(dict.fromkeys([(high, few), (low, many), (low, few), (high, many)]))


def _row_ends(places: Sequence[GridPoint], units: int) -> list[GridPoint]:
    row = [batch for batch, count in places if count == units]
    return list(dict.fromkeys([(max(row), units), (min(row), units)]))


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
    return f"the same batch varies by {apart:.0%} between runs: the machine, or the function, is not steady"


def run_to_run_variation(runs: Runs, cycle: Cycle) -> float:
    """How far a batch of the same samples on the same slice is off when it is run again: half of them by less."""
    again = [
        abs(math.log(later / before))
        for (batch, _), values in runs.items()
        for before, later in zip(values, values[cycle(batch) :], strict=False)
    ]
    return math.expm1(statistics.median(again)) if again else 0.0
