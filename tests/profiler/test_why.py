"""The explanation of a profile's uncertainty."""

from __future__ import annotations

import pytest

from lamina.profiler.measure import Measuring, Outcome
from lamina.profiler.why import unsteady, why_unsure
from tests.profiler.fake import FakeBench, straight


def measure(bench: FakeBench, budget_s: float, max_batch: int = 16) -> Outcome:
    return Measuring(bench, max_batch, 0.05, budget_s, clock_s=bench.clock_s).go()


def test_nothing_is_said_of_a_profile_that_is_sure() -> None:
    assert why_unsure(measure(FakeBench(straight, noise=0.02), 60.0)) == ""


def test_a_machine_that_is_not_steady_is_named_as_the_reason() -> None:
    bench = FakeBench(straight)
    bench.curve = lambda batch, units: straight(batch, units) * (1.6 if len(bench.asked) % 3 else 1.0)
    assert "from one run to the next" in why_unsure(measure(bench, 0.5, max_batch=4))


def test_samples_that_differ_are_no_unsteady_machine() -> None:
    runs = {(1, 1): [100.0, 300.0, 900.0, 101.0, 303.0, 890.0]}
    assert unsteady(runs, lambda batch: 3) < 0.02 < 1.0 < unsteady(runs, lambda batch: 1)


def test_samples_without_a_turn_are_named_as_the_reason() -> None:
    outcome = Outcome({(1, 1): [100.0, 300.0, 900.0]}, unsure=0.5, spent_s=1.0, reached=False, least_sure=(1, 1))
    assert "3 runs of samples that differ" in why_unsure(outcome, lambda batch: 4)


@pytest.mark.parametrize(("budget_s", "said"), [(0.005, "four corners"), (6.0, "is a guess between others")])
def test_a_short_time_is_named_as_the_reason(budget_s: float, said: str) -> None:
    outcome = measure(FakeBench(lambda b, u: 1000.0 * b**2 / u, units=8), budget_s, max_batch=32)
    assert said in why_unsure(outcome), why_unsure(outcome)
