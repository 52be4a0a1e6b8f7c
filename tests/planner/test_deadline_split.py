"""Deadline split: groups and shares as ESG makes them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.workflow.error_policy import Catcher, ErrorPolicy
from lamina.core.workflow.flow import Each, Flow, Parallel, Pass, Task
from lamina.planner.configs import ConfigArrays, ProfiledConfig
from lamina.planner.deadline_split import ParallelBranches, dominators, series_parallel_runs, split_deadline, step_functions
from tests.planner.reference import dag, draw, random_dag
from tests.properties import examples

seeds = st.integers(0, 10**9)
many = examples(300)


def reached(edges: dict[int, list[int]], without: int | None) -> set[int]:
    seen, todo = set(), [0] if without != 0 else []
    while todo:
        node = todo.pop()
        if node not in seen and node != without:
            seen.add(node)
            todo += edges[node]
    return seen


@many
@given(seeds)
def test_a_dominator_is_a_node_without_which_there_is_no_way(seed: int):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    edges = {node: [other for other in range(count) if other and rng.random() < 0.3] for node in range(count)}
    idom = dominators(edges, 0)
    assert set(idom) == reached(edges, None)
    for node in set(idom) - {0}:
        above = set()
        at = node
        while at != 0:
            at = idom[at]
            above.add(at)
        assert above == {other for other in idom if other != node and node not in reached(edges, other)}


def fixed(**times_us: int) -> dict[str, ConfigArrays]:
    return {
        name: ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, us, 1.0), ProfiledConfig(2, 1, 1, 2 * us, 0.5)])
        for name, us in times_us.items()
    }


def test_a_diamond_is_a_run_with_a_block_in_it():
    flow, _ = dag(1, [(0, 1), (0, 2), (1, 3), (2, 3)], 4)
    assert series_parallel_runs(flow) == (("t0",), ParallelBranches(((("t1",),), (("t2",),))), ("t3",))


def test_a_body_is_a_block_of_one_branch():
    body = Flow("body", {"x": Task("x", "f", ("y",)), "y": Task("y", "f")}, ("x",))
    flow = Flow("each", {"e": Each("e", body)}, ("e",))
    assert series_parallel_runs(flow) == (ParallelBranches(((("e", "x"), ("e", "y")),)),)


def test_shares_follow_the_times():
    flow, _ = dag(1, [(0, 1), (1, 2), (2, 3)], 4)
    found = split_deadline(flow, fixed(t0=10, t1=20, t2=30, t3=40), most=3)
    assert [found.share[name,] for name in ("t0", "t1", "t2", "t3")] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert found.groups["t0",] == (("t0",), ("t1",), ("t2",)) and found.groups["t3",] == (("t3",),)


def test_a_group_gets_its_part_of_the_time_that_is_left():
    flow, _ = dag(1, [(0, 1), (1, 2), (2, 3)], 4)
    found = split_deadline(flow, fixed(t0=10, t1=20, t2=30, t3=40), most=3)
    assert found.budget_us(("t0",), 1000) == 600
    assert found.budget_us(("t1",), 900) == 500
    assert found.budget_us(("t3",), 350) == 350


def test_every_branch_has_the_whole_share_of_its_block():
    flow, _ = dag(1, [(0, 1), (0, 2), (1, 3), (2, 3)], 4)
    found = split_deadline(flow, fixed(t0=10, t1=30, t2=5, t3=10))
    assert found.share["t1",] == found.share["t2",] == pytest.approx(0.6)


def test_a_workflow_without_tasks_has_nothing_to_split():
    flow = Flow("idle", {"e": Each("e", Flow("body", {"p": Pass("p")}, ("p",)))}, ("e",))
    assert split_deadline(flow, {}).groups == {}


def longest(flow: Flow, took: dict[tuple[str, ...], float], path: tuple[str, ...] = ()) -> float:
    """By walking the flow itself, all branches alike."""
    ends: dict[str, float] = {}

    def end(name: str) -> float:
        if name not in ends:
            node = flow.nodes[name]
            own = longest(node.body, took, (*path, name)) if isinstance(node, Each) else took.get((*path, name), 0.0)
            ends[name] = own + max((end(low) for low, other in flow.nodes.items() if name in other.next), default=0.0)
        return ends[name]

    return max(end(name) for name in flow.nodes)


@many
@given(seeds, st.integers(1, 4))
def test_groups_are_small_and_tasks_that_keep_to_their_shares_keep_the_deadline(seed: int, most: int):
    flow, tables = draw(seed) if seed % 2 else random_dag(seed)
    found = split_deadline(flow, tables, most)
    assert max(len(group) for group in found.groups.values()) <= most
    assert longest(flow, found.share) == pytest.approx(1.0)


@many
@given(seeds)
def test_what_is_left_from_a_task_on_is_enough_for_all_that_follow_it(seed: int):
    flow, tables = random_dag(seed)
    found = split_deadline(flow, tables)
    for name, node in flow.nodes.items():
        for follower in node.next:
            assert found.rest[name,] >= found.share[name,] + found.rest[follower,] - 1e-9


ONE_WAY = ConfigArrays.from_rows([ProfiledConfig(1, 1, 1, 1_000, 1.0)])


def test_a_step_only_a_failure_leads_to_may_take_all_the_time_that_is_left():
    caught = ErrorPolicy(catch=(Catcher(("States.ALL",), ("z",)),))
    flow = Flow("w", {"a": Task("a", "f", error_policy=caught), "z": Task("z", "g")}, ("a",))
    found = split_deadline(flow, dict.fromkeys("fg", ONE_WAY))
    assert found.budget_us(("z",), 700) == 700


def test_steps_of_one_name_in_two_branches_are_two_steps():
    branches = tuple(Flow(name, {"x": Task("x", name)}, ("x",)) for name in "fg")
    flow = Flow("w", {"p": Parallel("p", branches)}, ("p",))
    assert list(step_functions(flow).values()) == ["f", "g"]
