"""The explanation of a profile's uncertainty."""

from __future__ import annotations

import pytest

from lamina.profiler.measurement import AdaptiveMeasurement, MeasurementOutcome, explain_uncertainty, run_to_run_variation
from tests.profiler.fake_bench import FakeBench, straight


def measure(bench: FakeBench, budget_s: float, max_batch: int = 16) -> MeasurementOutcome:
    return AdaptiveMeasurement(bench, max_batch, 0.05, budget_s, clock_s=bench.clock_s).run()


def test_nothing_is_said_of_a_profile_that_is_sure() -> None:
    assert explain_uncertainty(measure(FakeBench(straight, noise=0.02), 60.0)) == ""


def test_a_machine_that_is_not_steady_is_named_as_the_reason() -> None:
    bench = FakeBench(straight)
    bench.curve = lambda batch, units: straight(batch, units) * (1.6 if len(bench.asked) % 3 else 1.0)
    assert "between runs" in explain_uncertainty(measure(bench, 0.5, max_batch=4))


def test_samples_that_differ_are_no_unsteady_machine() -> None:
    runs = {(1, 1): [100.0, 300.0, 900.0, 101.0, 303.0, 890.0]}
    assert run_to_run_variation(runs, lambda batch: 3) < 0.02 < 1.0 < run_to_run_variation(runs, lambda batch: 1)


def test_samples_without_a_turn_are_named_as_the_reason() -> None:
    outcome = MeasurementOutcome(
        {(1, 1): [100.0, 300.0, 900.0]}, uncertainty=0.5, spent_s=1.0, reached=False, least_certain=(1, 1)
    )
    assert "3 runs of samples that differ" in explain_uncertainty(outcome, lambda batch: 4)


@pytest.mark.parametrize(("budget_s", "said"), [(0.005, "four corners"), (6.0, "is a guess between others")])
def test_a_short_time_is_named_as_the_reason(budget_s: float, said: str) -> None:
    outcome = measure(FakeBench(lambda b, u: 1000.0 * b**2 / u, units=8), budget_s, max_batch=32)
    assert said in explain_uncertainty(outcome), explain_uncertainty(outcome)
