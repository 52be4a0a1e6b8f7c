"""Planning time of one decision: the look-up against the published search and brute force, at 256 configurations a function."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from lamina.core.workflow.flow import Flow, Node, Task
from lamina.lab.experiments._esg_world import APPLICATIONS, MODELS, SETTINGS, smallest_us, table
from lamina.planner.cost_to_go import CostToGo
from lamina.planner.workflow_frontier import plan_workflow
from lamina.published.esg.path_search import brute_force, esg_1q

THREE = "image-classification"
TEN = [*MODELS, *list(MODELS)[:4]]


def first_step(functions: list[str] | tuple[str, ...]) -> CostToGo:
    """The look-ahead from the start of a chain."""
    names = [f"s{place}" for place in range(len(functions))]
    nodes: dict[str, Node] = {
        name: Task(name, function, tuple(names[place + 1 : place + 2]))
        for place, (name, function) in enumerate(zip(names, functions, strict=True))
    }
    return plan_workflow(Flow("chain", nodes, (names[0],)), {name: table(name) for name in functions}).step(names[0])


def _timed_us(work: Callable[..., Any], *args: Any, **options: Any) -> float:
    begin = time.perf_counter_ns()
    work(*args, **options)
    return (time.perf_counter_ns() - begin) / 1e3


def _spread(took: list[float]) -> dict[str, float]:
    took = sorted(took)
    return {"least": took[0]} | {f"p{part}": took[min(len(took) - 1, len(took) * part // 100)] for part in (50, 90, 99)}


def measure(setting: str, seed: int, quick: bool) -> dict[str, Any]:
    """Times in microseconds, each for budgets about the deadline of the setting; and whether all methods agree."""
    factor = SETTINGS[setting][0]
    stages = [table(name) for name in APPLICATIONS[THREE]]
    three, ten = first_step(APPLICATIONS[THREE]), first_step(TEN)
    goal_us = round(factor * smallest_us(THREE))
    ten_us = round(factor * sum(MODELS[name].time_us(1, 1, 1) for name in TEN))
    rng = random.Random(f"{seed}/{setting}")
    few, many = (1, 300) if quick else (3, 3_000)
    shares = [rng.uniform(0.9, 1.0) for _ in range(many)]
    budgets = [(int(share * goal_us), int(share * ten_us)) for share in shares]
    pairs = [(_timed_us(three.query, short), _timed_us(ten.query, long)) for short, long in budgets]
    filtered = [_timed_us(esg_1q, stages, short, prefilter=True) for short, _ in budgets[: many // 30]]
    plain = [_timed_us(esg_1q, stages, short) for short, _ in budgets[:few]]
    brute = [_timed_us(brute_force, stages, short, 1) for short, _ in budgets[:few]]
    ranking = three.query(goal_us)
    costs = [float(ranking.totals[ranking.best])]
    costs += [found.paths[0].cost for found in (esg_1q(stages, goal_us, prefilter=True), brute_force(stages, goal_us, 1))]
    return {
        "query_us": _spread([three_us for three_us, _ in pairs]),
        "query_10_us": _spread([long_us for _, long_us in pairs]),
        "esg_1q_filtered_us": _spread(filtered),
        "esg_1q_us": _spread(plain),
        "brute_force_us": _spread(brute),
        "agree": max(costs) - min(costs) <= 1e-9 * max(costs),
    }


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """In queries for three steps, the quietest of each: so the machine and its neighbours cancel out."""
    query_us = row["query_us"]["least"]
    return {
        name: row[key]["least"] / query_us
        for name, key in {
            "query, 10 steps": "query_10_us",
            "ESG_1Q, undominated only": "esg_1q_filtered_us",
            "ESG_1Q, plain": "esg_1q_us",
            "brute force": "brute_force_us",
        }.items()
    }
