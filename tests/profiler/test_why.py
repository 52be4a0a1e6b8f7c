"""What a user is told when a profile is not as sure as was asked for."""

from __future__ import annotations

import random

import pytest

from lamina.profiler.measure import Measuring, Outcome
from lamina.profiler.why import pace, why_unsure
from tests.profiler.fake import FakeBench, straight


def measure(bench: FakeBench, budget_s: float, max_batch: int = 16) -> Outcome:
    return Measuring(bench, max_batch, 0.05, budget_s, clock_s=bench.clock_s).go()


def test_nothing_is_said_of_a_profile_that_is_sure() -> None:
    assert why_unsure(measure(FakeBench(straight, noise=0.02), 60.0)) == ""


def test_a_machine_that_became_slower_is_named_as_the_reason() -> None:
    bench = FakeBench(straight, noise=0.1)
    bench.curve = lambda batch, units: straight(batch, units) * (1.5 if bench.now_s > 2.5 else 1.0)
    outcome = measure(bench, 5.0)
    assert "the machine's own pace changed" in why_unsure(outcome)


def test_runs_that_differ_by_chance_are_named_as_the_reason() -> None:
    outcome = measure(FakeBench(straight, noise=0.25), 1.0, max_batch=4)
    assert "runs of batch" in why_unsure(outcome) and "apart" in why_unsure(outcome)


@pytest.mark.parametrize(("budget_s", "said"), [(0.005, "four corners"), (0.3, "is a guess between others")])
def test_a_short_time_is_named_as_the_reason(budget_s: float, said: str) -> None:
    outcome = measure(FakeBench(lambda b, u: 1000.0 * b**2 / u, units=8), budget_s, max_batch=32)
    assert said in why_unsure(outcome), why_unsure(outcome)


def test_pace_is_that_of_most_places() -> None:
    rng = random.Random(3)
    runs = {(batch, 1): [rng.gauss(100, 1) * (1.0 if n < 10 else 1.3) for n in range(20)] for batch in range(1, 6)}
    runs[6, 1] = [100.0] * 10 + [900.0] * 10
    assert pace(runs) == pytest.approx(1.3, rel=0.02)
