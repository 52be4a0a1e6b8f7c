"""Steepest descent over sizes, and the percentile it goes by."""

from __future__ import annotations

import numpy as np
import pytest

from lamina.core.workflow.flow import Flow, Task
from lamina.planner.configs import ConfigArrays, ResourcePrices, config_grid
from lamina.planner.deadline_split import series_parallel_runs
from lamina.published.esg.policies.orion import ConfigGrid, descend
from lamina.published.esg.preplanned_policy import LatencyDistribution, run_time


def table(base: float) -> ConfigArrays:
    return config_grid(lambda b, c, u: base * (b + 10 / c + 100 / u), (1, 2, 4), (1, 2), (1, 2, 4), ResourcePrices(1.0, 1.0))


STAGES = [table(10), table(30)]


def total_us(picks: tuple[int, ...]) -> float:
    return float(sum(stage[pick].time_us for stage, pick in zip(STAGES, picks, strict=True)))


def sizes(picks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [stage[pick][:3] for stage, pick in zip(STAGES, picks, strict=True)]


def test_it_starts_from_the_largest_batch_on_the_least():
    found = descend(STAGES, total_us, goal_us=1e9, rounds=10)
    assert sizes(found.picks) == [(4, 1, 1), (4, 1, 1)]
    assert (found.rounds, found.met) == (0, True)


def test_the_first_step_is_the_one_that_saves_most():
    """A second unit halves the hundred of the longer function."""
    found = descend(STAGES, total_us, goal_us=1, rounds=1)
    assert sizes(found.picks) == [(4, 1, 1), (4, 1, 2)]


def test_it_stops_as_soon_as_the_goal_is_met():
    found = descend(STAGES, total_us, goal_us=3_000, rounds=100)
    one_less = descend(STAGES, total_us, goal_us=3_000, rounds=found.rounds - 1)
    assert found.met
    assert found.latency_us <= 3_000 < one_less.latency_us


def test_out_of_reach_it_ends_with_the_fastest():
    found = descend(STAGES, total_us, goal_us=1, rounds=100)
    assert not found.met
    assert sizes(found.picks) == [(1, 2, 4), (1, 2, 4)]


def test_a_ladder_steps_over_combinations_that_were_not_measured():
    whole = table(10)
    holed = whole.subset([p for p in range(len(whole)) if whole[p][:3] != (4, 1, 2)])
    ladder = ConfigGrid(holed)
    assert [holed[p][:3] for p in ladder.steps_up(ladder.smallest)] == [(2, 1, 1), (4, 2, 1), (4, 1, 4)]


# ------------------------------------------------------------------------------------------------------ the spread

CHAIN = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
FORK = Flow("w", {"a": Task("a", "f"), "b": Task("b", "g")}, ("a", "b"))


def test_in_series_times_add_and_side_by_side_the_longer_counts():
    times = {("a",): np.array([1.0, 5.0]), ("b",): np.array([2.0, 2.0])}
    assert run_time(series_parallel_runs(CHAIN), times).tolist() == [3.0, 7.0]
    assert run_time(series_parallel_runs(FORK), times).tolist() == [2.0, 5.0]


@pytest.mark.parametrize("sigma", [0.05, 0.3])
def test_the_spread_of_one_step_is_log_normal_with_its_99th_percentile_where_it_was_planned(sigma: float):
    flow = Flow("w", {"a": Task("a", "f")}, ("a",))
    spread = LatencyDistribution.log_normal(series_parallel_runs(flow), [("a",)], sigma, 2_000, seed=1)
    assert spread.quantile_us({("a",): 100.0}, 0.99) == pytest.approx(100.0, rel=0.02)
    assert spread.quantile_us({("a",): 100.0}, 0.5) == pytest.approx(100.0 * np.exp(-2.326 * sigma), rel=0.02)


def test_two_steps_in_a_row_are_seldom_both_slow():
    spread = LatencyDistribution.log_normal(series_parallel_runs(CHAIN), [("a",), ("b",)], 0.3, 2_000, seed=1)
    both = spread.quantile_us({("a",): 100.0, ("b",): 100.0}, 0.99)
    assert 100.0 < both < 0.9 * 200.0
