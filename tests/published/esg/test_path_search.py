"""ESG_1Q against every path there is, and against the look-ahead that takes its place."""

from __future__ import annotations

import math
import random
from bisect import insort

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.workflow.flow import Flow, Task
from lamina.planner.configs import ConfigArrays
from lamina.planner.workflow_frontier import plan_workflow
from lamina.published.esg.path_search import LaterStages, brute_force, esg_1q, least_by_first
from tests.planner.reference import configs
from tests.properties import examples

seeds = st.integers(0, 10**9)
many = examples(400)
K = (1, 2, 5, 10)


def instance(seed: int, most: int = 6) -> tuple[list[ConfigArrays], int]:
    """A few stages and a goal that is tight, loose or out of reach."""
    rng = random.Random(seed)
    stages = [configs(rng, most) for _ in range(rng.randint(1, 4))]
    fastest_us = sum(int(stage.time_us.min()) for stage in stages)
    return stages, fastest_us + rng.randint(-2, 30)


def look_ahead(stages: list[ConfigArrays], goal_us: int) -> np.ndarray:
    names = [f"s{place}" for place in range(len(stages))]
    nodes = {name: Task(name, name, tuple(names[place + 1 : place + 2])) for place, name in enumerate(names)}
    found = plan_workflow(Flow("chain", nodes, ("s0",)), dict(zip(names, stages, strict=True)))
    return found.step("s0").query(goal_us).totals


@many
@given(seeds)
def test_the_best_path_costs_what_the_look_ahead_says(seed: int):
    stages, goal_us = instance(seed)
    found = esg_1q(stages, goal_us, 1)
    assert (found.paths[0].cost if found.paths else math.inf) == look_ahead(stages, goal_us).min()


@many
@given(seeds, st.sampled_from(K))
def test_the_k_best_paths_cost_what_they_cost_among_all_paths(seed: int, k: int):
    stages, goal_us = instance(seed)
    assert [path.cost for path in esg_1q(stages, goal_us, k).paths] == [
        path.cost for path in brute_force(stages, goal_us, k).paths
    ]


@many
@given(seeds)
def test_a_path_is_what_it_says_it_is_and_in_time(seed: int):
    stages, goal_us = instance(seed)
    for path in esg_1q(stages, goal_us, 5).paths:
        picked = [stage[place] for stage, place in zip(stages, path.picks, strict=True)]
        assert (path.cost, path.time_us) == (sum(one.cost for one in picked), sum(one.time_us for one in picked))
        assert path.time_us <= goal_us


@many
@given(seeds)
def test_leaving_dominated_configurations_out_first_keeps_the_best_path(seed: int):
    stages, goal_us = instance(seed)
    plain, filtered = esg_1q(stages, goal_us, 1), esg_1q(stages, goal_us, 1, prefilter=True)
    assert [path.cost for path in plain.paths] == [path.cost for path in filtered.paths]
    assert filtered.paths_tried <= plain.paths_tried


@many
@given(seeds)
def test_brute_force_finds_for_each_first_configuration_what_the_look_ahead_says(seed: int):
    stages, goal_us = instance(seed)
    assert np.array_equal(least_by_first(stages, goal_us), look_ahead(stages, goal_us))


@many
@given(seeds)
def test_the_first_configurations_come_each_once_in_the_order_of_their_best_paths(seed: int):
    stages, goal_us = instance(seed)
    every = math.prod(len(stage) for stage in stages)
    found = esg_1q(stages, goal_us, every)
    least = least_by_first(stages, goal_us)
    assert len(set(found.first_configs)) == len(found.first_configs) == np.isfinite(least).sum()
    assert [least[place] for place in found.first_configs] == sorted(least[np.isfinite(least)])


def test_k_paths_are_a_poor_list_to_fall_back_on():
    """Why the look-ahead ranks configurations and not paths."""
    firsts = [len(esg_1q(stages, goal_us, 5).first_configs) for stages, goal_us in map(instance, range(300)) if len(stages) > 2]
    assert min(firsts) <= 1 and np.mean(firsts) < 4


def crowd() -> list[ConfigArrays]:
    return [configs(random.Random(place), 40, least=40) for place in range(3)]


def test_the_time_blade_stops_at_the_first_configuration_that_is_too_slow():
    """With as many paths wanted as there are, cost cuts nothing."""
    stages = crowd()
    fastest_us = sum(int(stage.time_us.min()) for stage in stages)
    assert esg_1q(stages, fastest_us, 40**3).paths_tried < 2 * 40


def test_the_cost_blade_cuts_most_paths_when_time_cuts_none():
    stages = crowd()
    assert esg_1q(stages, 1000, 5).paths_tried < brute_force(stages, 1000, 5).paths_tried / 20


def with_one_running_list(stages: list[ConfigArrays], goal_us: int, k: int) -> list[float]:
    """The search with its one trap: bounds kept from depth to depth, so a path and its own extension count as two."""
    rows = [sorted(zip(stage.time_us.tolist(), stage.cost.tolist(), strict=True)) for stage in stages]
    sure: list[float] = []
    paths = [(0.0, 0)]
    for depth, options in enumerate(rows):
        later = rows[depth + 1 :]
        time_after, sure_after = sum(one[0][0] for one in later), sum(one[0][1] for one in later)
        least_after = sum(min(cost for _, cost in one) for one in later)
        kept = []
        for spent, used_us in sorted(paths):
            for time_us, cost in options:
                limit = sure[k - 1] if len(sure) >= k else math.inf
                if used_us + time_us + time_after > goal_us:
                    break
                if spent + cost + least_after <= limit:
                    insort(sure, spent + cost + sure_after)
                    kept.append((spent + cost, used_us + time_us))
        limit = sure[k - 1] if len(sure) >= k else math.inf
        paths = [path for path in kept if path[0] + least_after <= limit]
    return [cost for cost, _ in sorted(paths)[:k]]


def test_one_running_list_of_bounds_finds_the_best_path_and_loses_others():
    wrong_best = wrong_list = 0
    for stages, goal_us in map(instance, range(400)):
        right = [path.cost for path in brute_force(stages, goal_us, 5).paths]
        found = with_one_running_list(stages, goal_us, 5)
        wrong_best += found[:1] != right[:1]
        wrong_list += found != right
    assert wrong_best == 0
    assert wrong_list > 0


@pytest.mark.parametrize("k", K)
def test_a_goal_out_of_reach_finds_nothing(k: int):
    stages, _ = instance(3)
    assert esg_1q(stages, 0, k).paths == () == brute_force(stages, 0, k).paths


@many
@given(seeds, st.sampled_from(K))
def test_later_stages_found_once_give_the_first_configurations_of_the_search(seed: int, k: int):
    """Costs are drawn so that hardly two paths cost the same; where they do, either may be among the k."""
    stages, goal_us = instance(seed)
    later = LaterStages(stages, k)
    found, wanted = later.first_configs(stages[0], goal_us), esg_1q(stages, goal_us, k)
    every = esg_1q(stages, goal_us, 10_000).paths
    limit = wanted.paths[-1].cost if wanted.paths else 0.0
    surely = {path.picks[0] for path in every if path.cost < limit}
    maybe = {path.picks[0] for path in every if path.cost <= limit}
    assert surely <= set(found) <= maybe
    assert bool(found) == bool(wanted.paths)
    least = {place: min(path.cost for path in every if path.picks[0] == place) for place in found}
    assert [least[place] for place in found] == sorted(least.values())


@many
@given(seeds, st.sampled_from(K))
def test_the_cost_blade_cuts_paths_that_cannot_be_among_the_best(seed: int, k: int):
    """With all the time there is, only cost can cut: what is looked at is what K sure completions leave, not every path."""
    rng = random.Random(seed)
    stages = [configs(rng, 12) for _ in range(4)]
    every = sum(math.prod(len(stage) for stage in stages[:depth]) for depth in range(1, len(stages) + 1))
    found = esg_1q(stages, 10**9, k)
    assert [path.cost for path in found.paths] == [path.cost for path in brute_force(stages, 10**9, k).paths]
    reached = [1, *(_reachable(stages, depth, k) for depth in range(1, len(stages)))]
    assert found.paths_tried <= sum(count * len(stage) for count, stage in zip(reached, stages, strict=True)) <= every


def _reachable(stages: list[ConfigArrays], depth: int, k: int) -> int:
    """Beginnings of this length whose cheapest completion costs no more than the K-th cheapest sure one (the fastest rows)."""
    least = sum(float(stage.cost.min()) for stage in stages[depth:])
    sure = sum(min(zip(stage.time_us.tolist(), stage.cost.tolist(), strict=True))[1] for stage in stages[depth:])
    costs = np.zeros(1)
    for stage in stages[:depth]:
        costs = (costs[:, None] + stage.cost).ravel()
    ordered = np.sort(costs)
    limit = ordered[k - 1] + sure if len(ordered) >= k else math.inf
    return int((costs + least <= limit + 1e-9).sum())
