"""The look-ahead against every plan there is, on random small workflows; and the error bounds that go with it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.errors import BadValue
from lamina.planner import workflow_frontier
from lamina.planner.configs import ConfigArrays, ProfiledConfig, ResourcePrices, config_grid
from lamina.planner.cost_to_go import CostToGo, WorkflowPlan
from lamina.planner.frontier import (
    EXACT,
    Frontier,
    Precision,
    from_configs,
    in_parallel,
    in_series,
    scaled,
    thin,
    zero,
)
from lamina.planner.series_parallel import bits, completion_times_us, copied_downward, copied_upward
from lamina.planner.task_graph import TaskGraph
from lamina.planner.workflow_frontier import plan_workflow
from tests.planner.reference import EveryPlan, configs, dag, draw, least_cost, random_dag
from tests.properties import examples

seeds = st.integers(0, 10**9)
many = examples(400)
some = examples(150)
few = examples(60)

BUDGETS = np.arange(0, 160)
CHAIN_ONLY = Precision(sums=0)

SHAPES = {
    "chain": ([(0, 1), (1, 2), (2, 3)], 4),
    "diamond": ([(0, 1), (0, 2), (1, 3), (2, 3)], 4),
    "two by two": ([(0, 2), (0, 3), (1, 2), (1, 3)], 4),
    "N": ([(0, 2), (0, 3), (1, 3)], 4),
    "bridge": ([(0, 2), (0, 3), (1, 4), (2, 4)], 5),
    "W": ([(0, 3), (1, 3), (1, 4), (2, 4)], 5),
    "N inside a diamond": ([(0, 1), (0, 2), (1, 3), (1, 4), (2, 4), (3, 5), (4, 5)], 6),
}


def costs(frontier: Frontier, budgets: np.ndarray = BUDGETS) -> np.ndarray:
    return frontier.costs_within(budgets)


# ------------------------------------------------------------ exact


@many
@given(seeds)
def test_the_frontier_of_a_workflow_is_the_best_of_all_its_plans(seed: int):
    flow, tables = draw(seed, most=3)
    assert np.array_equal(costs(plan_workflow(flow, tables).whole), least_cost(*EveryPlan(flow, tables).whole(flow), BUDGETS))


@some
@given(seeds)
def test_the_frontier_behind_a_task_is_the_best_of_all_plans_for_what_follows_from_it(seed: int):
    flow, tables = draw(seed, most=3)
    every = EveryPlan(flow, tables)
    for path, step in plan_workflow(flow, tables).steps.items():
        assert costs(step.after) == pytest.approx(least_cost(*every.after(flow, path), BUDGETS), rel=1e-12), path


@many
@given(seeds)
def test_any_small_order_of_tasks_is_solved_exactly(seed: int):
    flow, tables = random_dag(seed)
    found = plan_workflow(flow, tables)
    assert found.whole.error == 0
    assert np.array_equal(costs(found.whole), least_cost(*EveryPlan(flow, tables).whole(flow), BUDGETS))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_classic_shapes_are_solved_exactly(shape: str):
    for seed in range(60):
        flow, tables = dag(seed, *SHAPES[shape])
        assert np.array_equal(costs(plan_workflow(flow, tables).whole), least_cost(*EveryPlan(flow, tables).whole(flow), BUDGETS))


@pytest.mark.parametrize(("shape", "how"), [("diamond", set()), ("two by two", set()), ("N", {"fixed"}), ("bridge", {"fixed"})])
def test_a_plan_says_where_it_had_to_fix_configurations(shape: str, how: set[str]):
    flow, tables = dag(1, *SHAPES[shape])
    assert {one.how for one in plan_workflow(flow, tables).approximations} == how


@some
@given(seeds)
def test_every_configuration_of_every_task_is_ranked_by_what_the_rest_really_costs(seed: int):
    flow, tables = draw(seed, most=3)
    every = EveryPlan(flow, tables)
    budget_us = random.Random(seed).randint(0, 80)
    for path, step in plan_workflow(flow, tables).steps.items():
        rest = least_cost(*every.after(flow, path), budget_us - step.configs.time_us)
        assert step.query(budget_us).totals == pytest.approx(step.configs.cost + rest, rel=1e-12), path


def test_a_loop_counts_once():
    nodes = (Task("try", "f", ("enough",)), Choice("enough", (("try",), ("last",)), odds=(0.75, 0.25)), Task("last", "g"))
    flow = Flow("loop", {node.name: node for node in nodes}, ("try",))
    flow.check()
    tables = {name: ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, 10, 4.0)]) for name in "fg"}
    found = plan_workflow(flow, tables)
    assert (found.whole.fastest_us, found.whole.cost_within(20)) == (20, 8.0)


def test_a_branch_is_certain_for_those_inside_it_and_its_odds_count_for_those_before():
    nodes = (Task("a", "f", ("c",)), Choice("c", (("b",), ("d",)), odds=(1, 3)), Task("b", "f", ("d",)), Task("d", "f"))
    flow = Flow("skip", {node.name: node for node in nodes}, ("a",))
    found = plan_workflow(flow, {"f": ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, 10, 4.0)])})
    assert found.step("a").after.cost_within(20) == 0.25 * 4 + 4
    assert found.step("b").after.cost_within(20) == 4


def test_a_node_that_runs_twice_costs_twice_and_looks_ahead_once():
    nodes = (Task("a", "f", ("c",)), Task("b", "f", ("c",)), Task("c", "f", ("d",), tokens_needed=1), Task("d", "f"))
    flow = Flow("twice", {node.name: node for node in nodes}, ("a", "b"))
    found = plan_workflow(flow, {"f": ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, 10, 4.0)])})
    assert found.whole.cost_within(30) == 6 * 4
    assert found.step("c").after.cost_within(10) == 4


def test_a_workflow_without_tasks_is_done_at_once():
    flow = Flow("idle", {"e": Each("e", Flow("body", {"p": Pass("p")}, ("p",)))}, ("e",))
    assert plan_workflow(flow, {}).whole.cost_within(0) == 0


def test_observed_rates_take_the_place_of_the_usual_ones():
    body = Flow("body", {"x": Task("x", "f")}, ("x",))
    nodes = (Choice("c", (("e",), ("end",)), odds=(0.5, 0.5)), Each("e", body, ("end",), expected_items=4), Pass("end"))
    flow = Flow("rates", {node.name: node for node in nodes}, ("c",))
    table = {"f": ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, 10, 1.0)])}
    assert plan_workflow(flow, table).whole.cost_within(10) == 2.0
    assert plan_workflow(flow, table, odds={("c",): (1, 3)}, items={("e",): 8}).whole.cost_within(10) == 2.0
    assert plan_workflow(flow, table, odds={("c",): (3, 1)}, items={("e",): 8}).whole.cost_within(10) == 6.0


# ------------------------------------------------------------ not exact, and by how much


@some
@given(seeds)
def test_what_is_made_to_wait_is_never_promised_too_cheap_and_never_called_impossible(seed: int):
    flow, tables = random_dag(seed, most_tasks=7)
    found, true = plan_workflow(flow, tables, precision=CHAIN_ONLY).whole, plan_workflow(flow, tables, precision=EXACT).whole
    assert (costs(found) >= costs(true)).all()
    assert found.fastest_us == true.fastest_us
    assert (costs(found) == costs(true)).all() or found.error == np.inf


def test_a_plan_says_where_it_made_tasks_wait():
    flow, tables = dag(1, *SHAPES["N"])
    assert {one.how for one in plan_workflow(flow, tables, precision=CHAIN_ONLY).approximations} == {"chained"}


def rough(seed: int, size: int = 60) -> ConfigArrays:
    rng = random.Random(seed)
    return ConfigArrays.from_rows(
        [ProfiledConfig(1, 1, 1, rng.randint(1, 10**6), rng.random() * 10 ** rng.randint(-3, 3)) for _ in range(size)]
    )


@some
@given(seeds, st.sampled_from((1e-3, 1e-2, 0.1, 1.0)))
def test_thinning_gives_away_no_time_and_no_more_cost_than_it_says(seed: int, eps: float):
    full = from_configs(rough(seed))
    thinned = thin(full, eps)
    assert thinned.error <= eps * (1 + 1e-9)
    there = thinned.costs_within(full.time_us)
    assert (full.cost <= there).all()
    assert (there <= full.cost * (1 + thinned.error) * (1 + 1e-12)).all()


@few
@given(seeds, st.sampled_from((1e-3, 1e-2, 0.1)))
def test_the_error_of_a_whole_plan_covers_all_its_thinnings(seed: int, eps: float):
    flow, tables = draw(seed, tasks=5)
    tables = {name: rough(seed + place, 20) for place, name in enumerate(tables)}
    true, thinned = (
        plan_workflow(flow, tables, precision=EXACT).whole,
        plan_workflow(flow, tables, precision=Precision(eps)).whole,
    )
    there = thinned.costs_within(true.time_us)
    assert thinned.fastest_us == true.fastest_us
    assert (true.cost <= there * (1 + 1e-12)).all()
    assert (there <= true.cost * (1 + thinned.error) * (1 + 1e-12)).all()


def test_a_cap_on_points_is_kept_and_paid_for_in_error():
    flow, tables = dag(0, [(0, 1), (1, 2)], 3)
    tables = {name: rough(place) for place, name in enumerate(tables)}
    capped = plan_workflow(flow, tables, precision=Precision(points=20)).whole
    assert len(capped) <= 20
    assert 0 < capped.error < 10


# ------------------------------------------------------------ asking


@some
@given(seeds)
def test_more_time_never_costs_more(seed: int):
    flow, tables = draw(seed)
    for step in plan_workflow(flow, tables).steps.values():
        rows = np.array([step.query(budget_us).totals for budget_us in range(0, 120, 3)])
        assert (rows[1:] <= rows[:-1]).all()


@some
@given(seeds)
def test_dominated_configurations_never_change_the_best(seed: int):
    rng = random.Random(seed)
    flow, tables = draw(seed)
    worse = {}
    for name, table in tables.items():
        rows = [table[place] for place in range(len(table))]
        extra = [row._replace(time_us=row.time_us + rng.randint(0, 5), cost=row.cost + rng.randint(0, 5)) for row in rows]
        worse[name] = ConfigArrays.from_rows(rows + extra)
    small, large = plan_workflow(flow, tables), plan_workflow(flow, worse)
    assert np.array_equal(costs(small.whole), costs(large.whole))
    for path, step in small.steps.items():
        assert step.query(60).totals.min() == large.steps[path].query(60).totals.min()


@some
@given(seeds)
def test_the_ranking_holds_every_configuration_once_cheapest_first(seed: int):
    flow, tables = draw(seed)
    for step in plan_workflow(flow, tables).steps.values():
        ranking = step.query(50)
        assert sorted(ranking.order.tolist()) == list(range(len(step.configs)))
        if ranking.fits:
            falling = ranking.totals[ranking.order]
            assert (falling[1:] >= falling[:-1]).all()
            assert np.isfinite(falling[: ranking.fits]).all() and np.isinf(falling[ranking.fits :]).all()


F = [ProfiledConfig(1, 1, 1, 10, 9.0), ProfiledConfig(2, 1, 1, 20, 5.0), ProfiledConfig(4, 1, 1, 40, 3.0)]
G = [ProfiledConfig(1, 1, 1, 10, 6.0), ProfiledConfig(1, 1, 2, 30, 1.0)]
TWO = Flow("two", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))


def two_steps(first: list[ProfiledConfig] = F) -> WorkflowPlan:
    return plan_workflow(TWO, {"f": ConfigArrays.from_rows(first), "g": ConfigArrays.from_rows(G)})


def test_the_best_first_step_looks_ahead():
    ranking = two_steps().step("a").query(50)
    assert ranking.totals.tolist() == [9 + 1, 5 + 1, 3 + 6]
    assert ranking.order.tolist() == [1, 2, 0]


def test_what_is_not_allowed_is_ranked_behind_everything_that_is():
    ranking = two_steps().step("a").query(50, allowed=np.array([True, False, True]))
    assert (ranking.best, ranking.fits) == (2, 2)
    assert ranking.order.tolist() == [2, 0, 1]


def test_delays_and_extra_costs_count_as_the_configurations_own():
    step = two_steps().step("a")
    assert step.query(50, delay_us=np.array([0, 20, 0])).totals.tolist() == [10, 5 + 6, 9]
    assert step.query(50, delay_us=1).totals.tolist() == [10, 5 + 6, np.inf]
    assert step.query(50, extra_cost=np.array([0.0, 4.5, 0.0])).best == 2
    assert step.query(50, extra_cost=1).totals.tolist() == [11, 7, 10]


def test_of_equal_totals_the_faster_comes_first():
    equal = [ProfiledConfig(1, 1, 1, 30, 4.0), ProfiledConfig(1, 1, 2, 20, 9.0), ProfiledConfig(1, 1, 4, 10, 9.0)]
    ranking = two_steps(equal).step("a").query(50)
    assert ranking.totals.tolist() == [10, 10, 10]
    assert ranking.order.tolist() == [2, 1, 0]


def test_when_nothing_fits_the_least_late_comes_first():
    ranking = two_steps().step("a").query(15, delay_us=np.array([30, 0, 0]))
    assert (ranking.fits, ranking.best, ranking.late_us) == (0, 1, 20 + 10 - 15)


def test_of_two_equally_late_the_cheaper_comes_first():
    ranking = two_steps().step("a").query(15, delay_us=np.array([30, 0, 0]))
    assert ranking.order.tolist() == [1, 2, 0]


def test_when_nothing_is_allowed_there_is_no_best():
    ranking = two_steps().step("a").query(50, allowed=np.zeros(3, np.bool_))
    assert (ranking.best, ranking.fits, ranking.late_us) == (-1, 0, 0)


@some
@given(seeds, st.integers(2, 6))
def test_with_shared_joins_equal_arms_do_together_what_is_best_for_all(seed: int, arms: int):
    rng = random.Random(seed)
    tables = {"arm": configs(rng, 6, least=2), "end": configs(rng, 6, least=2)}
    names = [f"a{place}" for place in range(arms)]
    nodes = {name: Task(name, "arm", ("end",)) for name in names} | {"end": Task("end", "end", tokens_needed=arms)}
    flow = Flow("fork", nodes, tuple(names))
    found = plan_workflow(flow, tables, joins="shared")
    budget_us = found.whole.fastest_us + rng.randint(0, 20)
    picked = tables["arm"][found.step("a0").query(budget_us).best]
    after = found.step("end").query(budget_us - picked.time_us)
    assert arms * picked.cost + after.totals[after.best] == pytest.approx(found.whole.cost_within(budget_us), rel=1e-12)


def test_with_shared_joins_an_arm_carries_its_part_of_everything_behind_the_join():
    waits = [(0, 2), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5)]
    flow, tables = dag(4, waits, 6)
    tables = dict.fromkeys(tables, configs(random.Random(4), 5, least=3))
    whole, shared = plan_workflow(flow, tables).step("t0").after, plan_workflow(flow, tables, joins="shared").step("t0").after
    assert np.array_equal(costs(shared), costs(whole) / 2)


@some
@given(seeds)
def test_a_node_of_fixed_time_can_be_copied_without_changing_the_longest_path(seed: int):
    rng = random.Random(seed)
    flow, _ = random_dag(seed, most_tasks=8)
    below = TaskGraph(flow).below
    times_us = [rng.randint(1, 9) for _ in below]
    node = rng.randrange(len(below))
    for copied in (copied_upward(below, node), copied_downward(below, node)):
        assert all(copied[low] & ~under == 0 for under in copied for low in bits(under)), "what lies below the below is below"
        longer = times_us + [times_us[node]] * (len(copied) - len(below))
        assert max(completion_times_us(copied, longer)) == max(completion_times_us(below, times_us))


# ------------------------------------------------------------ tables, operations, errors


@few
@given(seeds)
def test_nothing_is_neutral_and_the_order_of_merging_does_not_matter(seed: int):
    a, b, c = (from_configs(configs(random.Random(seed + place), 6)) for place in range(3))
    assert np.array_equal(costs(in_series(a, zero())), costs(a)) and np.array_equal(costs(in_parallel([a, zero()])), costs(a))
    assert np.array_equal(costs(in_series(a, in_series(b, c))), costs(in_series(in_series(c, a), b)))
    assert np.array_equal(costs(in_parallel([a, b, c])), costs(in_parallel([c, in_parallel([b, a])])))


def test_branches_never_taken_cost_nothing_and_must_still_be_in_time():
    fast, slow = (
        from_configs(ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, 10, 8.0)])),
        from_configs(ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, 30, 2.0)])),
    )
    both = in_parallel([scaled(fast, 1), scaled(slow, 0)])  # as the branches of a choice are put together
    assert (both.fastest_us, both.cost_within(30)) == (30, 8.0)
    assert scaled(slow, 0).cost.tolist() == [0.0]


def test_a_grid_prices_every_combination_and_leaves_out_what_was_not_measured():
    table = config_grid(lambda b, c, u: 0 if u == 2 else 1000.2 * b / c, (1, 2), (1, 2), (1, 2), ResourcePrices(1.0, 2.0))
    assert len(table) == 4
    assert table[1] == ProfiledConfig(1, 2, 1, 501, (2 * 1.0 + 1 * 2.0) * 501e-6)


def test_the_efficient_ones_are_those_that_none_beats_fastest_first():
    table = ConfigArrays.from_rows(
        [ProfiledConfig(1, 1, 1, t, c) for t, c in ((5, 5.0), (3, 9.0), (5, 4.0), (7, 4.0), (9, 1.0), (3, 9.0))]
    )
    assert table.pareto_indices.tolist() == [1, 2, 4]


def test_a_function_without_a_table_is_named():
    with pytest.raises(BadValue, match="no configurations for g"):
        plan_workflow(TWO, {"f": rough(1)})


def test_a_table_needs_rows():
    with pytest.raises(BadValue, match="without configurations"):
        ConfigArrays.from_rows([])


def test_a_task_that_is_not_there_is_named():
    with pytest.raises(BadValue, match="'each/x'"):
        two_steps().step("each", "x")


def test_odds_must_be_as_many_as_branches():
    flow = Flow("odd", {"c": Choice("c", (("t",), ()), odds=(1.0,)), "t": Task("t", "f")}, ("c",))
    with pytest.raises(BadValue, match="2 branches and 1 odds"):
        plan_workflow(flow, {"f": rough(1)})


def test_a_chain_is_cut_into_its_parts_once_however_many_tasks_look_ahead_over_it(monkeypatch: pytest.MonkeyPatch):
    """A workflow of a thousand steps must not take the square of its length in work: each step finds what comes after it."""
    cut = workflow_frontier.series_parts
    asked: list[int] = []
    monkeypatch.setattr(workflow_frontier, "series_parts", lambda below, nodes: asked.append(nodes) or cut(below, nodes))
    names = [f"s{number}" for number in range(60)]
    nodes = {name: Task(name, "f", (after,) if after else ()) for name, after in zip(names, [*names[1:], ""], strict=True)}
    table = ConfigArrays.from_rows([(1, 1, 1, 100, 2.0), (1, 1, 2, 60, 3.0)])
    found = plan_workflow(Flow("chain", nodes, (names[0],)), {"f": table})
    assert len(found.steps) == 60
    assert len(asked) <= 3


@given(seed=st.integers(0, 10_000), budget_us=st.integers(0, 90))
@examples(60)
def test_the_cheapest_of_a_table_in_order_of_time_is_the_first_of_its_ranking(seed: int, budget_us: int):
    dice = np.random.default_rng(seed)
    size = int(dice.integers(1, 40))
    times_us = np.sort(dice.integers(1, 60, size))
    costs = dice.integers(1, 9, size).astype(float)  # with ties
    rows = [ProfiledConfig(1, 1, 1, int(us), float(cost)) for us, cost in zip(times_us, costs, strict=True)]
    step = CostToGo(ConfigArrays.from_rows(rows), two_steps().step("a").after)
    allowed, delay_us, extra = dice.random(size) < 0.7, dice.integers(0, 5, size), dice.random(size).round(1)
    ranking = step.query(budget_us, allowed=allowed, delay_us=delay_us, extra_cost=extra)
    best, totals = step.cheapest(budget_us, np.where(allowed, step.configs.cost, np.inf), delay_us, extra)
    assert best == (ranking.best if ranking.fits else -1)
    if ranking.fits:
        assert totals.tolist() == ranking.totals.tolist()
