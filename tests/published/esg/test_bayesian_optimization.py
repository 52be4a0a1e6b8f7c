"""Constrained Bayesian optimisation on grids whose best point is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamina.published.esg.bayesian_optimization import (
    GaussianProcess,
    expected_improvement,
    fit_without_outliers,
    minimise,
    normal_cdf,
)


def bowl(point: tuple[int, ...]) -> tuple[float, float]:
    """Cost grows and latency falls with every level: the cheapest in time lies on the edge of what is allowed."""
    return 1.0 + sum(point), 100.0 / (1.0 + sum(point))


def test_it_finds_a_plan_in_time_that_costs_little_more_than_the_best():
    """Within 10 means levels that add up to 9, at a cost of 10; a plan at random costs 14."""
    found = minimise(bowl, [8, 8, 4], 10.0, seed=1)
    assert found.met
    assert found.best.cost <= 11.0


@pytest.mark.parametrize("seed", range(3))
def test_it_does_better_than_as_many_plans_at_random(seed: int):
    levels = [8, 8, 4, 8, 8, 4]

    def trial(point: tuple[int, ...]) -> tuple[float, float]:
        far = sum((at - best) ** 2 for at, best in zip(point, (5, 2, 1, 3, 6, 2), strict=True))
        return 1.0 + far, 50.0 + sum(point)

    rng = random.Random(seed)
    drawn = [trial(tuple(rng.randrange(top) for top in levels)) for _ in range(70)]
    found = minimise(trial, levels, 75.0, seed)
    assert found.best.cost < min(cost for cost, latency in drawn if latency <= 75.0)


def test_if_nothing_is_in_time_the_fastest_that_was_tried_is_the_answer():
    found = minimise(bowl, [4, 4], 1.0, seed=1)
    assert not found.met
    assert found.best.latency == min(trial.latency for trial in found.trials)


def test_it_tries_as_often_as_it_is_told_and_no_point_twice_in_a_round():
    found = minimise(bowl, [8, 8, 4], 10.0, seed=1, starts=4, rounds=5, each=3)
    assert len(found.trials) == 4 + 5 * 3
    for turn in range(5):
        chosen = [trial.point for trial in found.trials[4 + 3 * turn : 7 + 3 * turn]]
        assert len(set(chosen)) == 3


def test_the_same_seed_makes_the_same_trials():
    assert minimise(bowl, [8, 8, 4], 10.0, seed=7) == minimise(bowl, [8, 8, 4], 10.0, seed=7)


def test_a_process_goes_through_what_it_was_fitted_to_and_is_sure_there():
    points = np.linspace(0, 1, 8)[:, None]
    values = np.sin(5 * points[:, 0])
    mean, deviation = GaussianProcess.fit(points, values).predict(points)
    assert np.allclose(mean, values, atol=0.05)
    assert deviation.max() < 0.1


def test_far_from_all_trials_a_process_knows_nothing():
    points = np.linspace(0, 0.2, 6)[:, None]
    values = np.sin(40 * points[:, 0])
    process = GaussianProcess.fit(points, values, (0.05,))
    assert process.predict(np.array([[5.0]]))[1] == pytest.approx(values.std(), rel=0.01)


def test_a_trial_the_others_contradict_is_set_aside():
    points = np.linspace(0, 1, 12)[:, None]
    values = points[:, 0].copy()
    values[6] += 3.0
    assert fit_without_outliers(points, values).predict(points[6:7])[0] == pytest.approx(points[6, 0], abs=0.2)


def test_improvement_counts_what_is_lower_and_never_what_is_higher():
    mean, deviation = np.array([-1.0, 0.0, 5.0]), np.array([1e-6, 1.0, 1e-6])
    assert expected_improvement(mean, deviation, 0.0) == pytest.approx([1.0, 0.3989, 0.0], abs=1e-3)


def test_half_of_a_normal_distribution_is_below_its_middle():
    assert normal_cdf(np.array([-1.96, 0.0, 1.96])) == pytest.approx([0.025, 0.5, 0.975], abs=1e-3)


def test_a_space_smaller_than_the_trials_is_tried_point_by_point():
    found = minimise(bowl, [3, 2], 30.0, seed=1)
    assert sorted(trial.point for trial in found.trials) == [(a, b) for a in range(3) for b in range(2)]


def test_a_goal_that_is_over_already_gives_the_fastest_plan():
    found = minimise(bowl, [8, 8, 4], 0.0, seed=1, rounds=2)
    assert found.best.latency == min(trial.latency for trial in found.trials)
