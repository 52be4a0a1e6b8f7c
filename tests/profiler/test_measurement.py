"""Adaptive measurement: which points the profiler chooses, and when it stops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from lamina.predict.profile import Profile
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.bench import GridPoint, TimedRun, profile_grid, size_ladder
from lamina.profiler.build_profile import to_points
from lamina.profiler.measurement import LEAST_RUNS, AdaptiveMeasurement, MeasurementOutcome, MeasurementProgress
from tests.profiler.fake_bench import Curve, FakeBench, straight


def measure(bench: FakeBench, max_batch: int = 32, **options: object) -> MeasurementOutcome:
    return AdaptiveMeasurement(bench, max_batch, clock_s=bench.clock_s, **options).run()  # type: ignore[arg-type]


def worst_error(outcome: MeasurementOutcome, bench: FakeBench, max_batch: int = 32) -> float:
    """Of what plans would read off the profile, over all places, against the formula."""
    table = ProfileTable([Profile(function="f", device="d", points=to_points(outcome.runs))])
    places = profile_grid(bench.device, max_batch)
    return max(abs(math.log(table.median_us("f", "d", *place) / bench.curve(*place))) for place in places)


def step_at(edge: int) -> Curve:
    return lambda batch, units: 1000.0 if batch <= edge else 2500.0


@pytest.mark.parametrize("edge", [3, 8, 13, 20])
def test_it_finds_a_step_in_the_curve(edge: int) -> None:
    bench = FakeBench(step_at(edge))
    outcome = measure(bench)
    after = min(size for size in size_ladder(32) if size > edge)
    before = max(size for size in size_ladder(32) if size <= edge)
    assert {(before, 1), (after, 1)} <= outcome.runs.keys()


def test_a_straight_curve_takes_a_fraction_of_the_places() -> None:
    bench = FakeBench(straight, units=16)
    outcome = measure(bench, max_batch=64)
    assert outcome.reached
    assert len(outcome.runs) < 0.25 * len(profile_grid(bench.device, 64))


@pytest.mark.parametrize(
    "curve",
    [straight, lambda b, u: 300 * math.ceil(b / 8) + 2000 / u, lambda b, u: 100 + 40 * b**0.7 * u**-0.5],
    ids=["straight", "stairs", "powers"],
)
def test_when_it_says_five_percent_plans_are_within_ten_everywhere(curve: Curve) -> None:
    bench = FakeBench(curve, units=8, noise=0.02)
    outcome = measure(bench, budget_s=600.0)
    assert outcome.reached
    assert worst_error(outcome, bench) < 0.10


def test_it_stops_at_the_target_and_a_stricter_one_takes_more() -> None:
    loose, strict = FakeBench(straight, units=4, noise=0.05), FakeBench(straight, units=4, noise=0.05)
    first = measure(loose, target=0.2, budget_s=1e6)
    second = measure(strict, target=0.02, budget_s=1e6)
    assert first.uncertainty <= 0.2 and second.uncertainty <= 0.02
    assert len(loose.asked) < len(strict.asked)


def test_noise_alone_makes_it_repeat_a_place() -> None:
    quiet, loud = FakeBench(straight, noise=0.001), FakeBench(straight, noise=0.2)
    measure(quiet, max_batch=1)
    measure(loud, max_batch=1, budget_s=600.0)
    assert len(loud.asked) > 2 * len(quiet.asked)


def test_the_budget_is_respected() -> None:
    bench = FakeBench(lambda batch, units: 200_000.0 * batch, noise=0.3)
    outcome = measure(bench, budget_s=30.0, target=0.001)
    longest_s = 1.5 * 0.2 * 32
    assert not outcome.reached
    assert outcome.spent_s < 30.0 + longest_s


def test_places_there_is_no_time_left_for_give_way_to_quicker_ones() -> None:
    bench = FakeBench(lambda batch, units: 2000.0 if batch < 32 else 2e6, noise=0.2)
    runs: dict[GridPoint, list[float]] = {(32, 1): [2e6] * 3, (1, 1): [2000.0] * 3}
    measure(bench, budget_s=5.0, target=0.001, runs=runs)
    warm_up = 1
    assert bench.asked.count((32, 1)) == warm_up


def test_even_without_time_it_measures_one_place() -> None:
    bench = FakeBench(straight)
    assert len(measure(bench, budget_s=0.0).runs) == 1


def test_it_goes_on_from_what_is_known() -> None:
    first = FakeBench(straight, units=8, noise=0.02)
    known = measure(first, budget_s=600.0)
    again = FakeBench(straight, units=8, noise=0.02)
    assert measure(again, runs=known.runs).reached
    assert again.asked == []


def test_what_was_cut_short_is_finished_later() -> None:
    bench = FakeBench(straight, units=8, noise=0.02)
    part = measure(bench, budget_s=0.3)
    assert not part.reached
    places = set(part.runs)
    whole = measure(bench, budget_s=600.0, runs=part.runs)
    assert whole.reached and places < set(whole.runs)


def test_the_first_run_at_a_new_place_does_not_count() -> None:
    seen: list[GridPoint] = []

    def slow_at_first(batch: int, units: int) -> float:
        seen.append((batch, units))
        return 50_000.0 if seen[-2:-1] != [(batch, units)] else 1000.0

    outcome = measure(FakeBench(slow_at_first, units=2), max_batch=4)
    assert {us for runs in outcome.runs.values() for us in runs} == {1000.0}


def test_a_disturbed_run_is_repeated() -> None:
    bench = FakeBench(straight, waits=lambda number: 900.0 if number % 3 == 0 else 0.0)
    outcome = measure(bench, max_batch=1)
    assert set(outcome.runs[1, 1]) == {1500.0}
    assert outcome.disturbed > 0


def test_where_every_run_is_disturbed_the_wait_is_taken_off() -> None:
    outcome = measure(FakeBench(straight, waits=lambda number: 700.0), max_batch=1)
    assert outcome.runs[1, 1] == pytest.approx([1500.0] * len(outcome.runs[1, 1]))


def test_an_observer_is_told_after_every_visit() -> None:
    told: list[MeasurementProgress] = []
    outcome = measure(FakeBench(straight, units=4), watch=told.append)
    assert sum(len(progress.runs_us) for progress in told) == sum(map(len, outcome.runs.values()))
    assert all(len(progress.runs_us) >= LEAST_RUNS for progress in told)
    assert told[-1].uncertainty == outcome.uncertainty


def test_a_number_of_units_is_opened_with_both_of_its_ends() -> None:
    outcome = measure(FakeBench(lambda batch, units: 1000 + 3000 * batch / units**1.5, units=8), max_batch=16)
    rows = {units for _, units in outcome.runs}
    assert len(rows) > 2
    assert all({(1, units), (16, units)} <= outcome.runs.keys() for units in rows)


def test_ladders_hold_every_small_size_and_the_last() -> None:
    assert size_ladder(5) == [1, 2, 3, 4, 5]
    assert size_ladder(50) == [*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48, 50]


@dataclass
class VaryingBench(FakeBench):
    """Sixteen samples of which the longest takes three times as long as the shortest."""

    turns: dict[GridPoint, int] = field(default_factory=dict)

    def cycle(self, batch: int) -> int:
        return 16 // math.gcd(16, batch)

    def turn(self, place: GridPoint, count: int) -> None:
        self.turns[place] = count

    def run(self, batch: int, units: int) -> TimedRun:
        first = self.turns.get((batch, units), 0) * batch
        lengths = [1 + (5 * (first + number) % 16) / 8 for number in range(batch)]
        us = super().run(batch, units).us * sum(lengths) / batch
        return TimedRun(us)


def test_inputs_of_different_sizes_are_no_reason_never_to_be_sure() -> None:
    bench = VaryingBench(lambda batch, units: 20_000 + 10_000 * batch, noise=0.02)
    outcome = measure(bench, max_batch=4)
    assert outcome.reached and outcome.spent_s < 6  # 14 if all of it were chance
