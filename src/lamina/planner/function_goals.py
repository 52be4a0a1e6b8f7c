"""Rates and latency goals per function, derived from those of calls and workflows.

A workflow's goal is divided along its longest path, in proportion to how long each step takes at best. A function that
several targets reach must satisfy the most demanding of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lamina.core.workflow.flow import Flow
from lamina.planner.deadline_split import split_deadline, step_functions

NO_GOAL_US = 1_000_000
"""Where no call has an SLO, a second is a friendly answer."""


def function_rates(flows: Mapping[str, Flow], per_s: Mapping[str, float]) -> dict[str, float]:
    """Jobs a second of each function when so many calls of each target come."""
    rates: dict[str, float] = {}
    for target, rate in per_s.items():
        for name, times in flows[target].expected_jobs.items():
            rates[name] = rates.get(name, 0.0) + rate * times
    return rates


def function_goals_us(flows: Iterable[Flow], alone_us: Callable[[str], float]) -> dict[str, int]:
    """The tightest goal of each function. `alone_us`: how long one job of it takes at best."""
    goals: dict[str, int] = {}
    for flow in flows:
        whole_us = flow.slo.latency_us or NO_GOAL_US
        parts = {flow.sole_task.function: 1.0} if flow.sole_task is not None else _shares(flow, alone_us)
        for name, part in parts.items():
            goals[name] = min(goals.get(name, whole_us), max(1, int(whole_us * part)))
    return goals


def _shares(flow: Flow, alone_us: Callable[[str], float]) -> dict[str, float]:
    """Part of the goal each function may take; of several places in the workflow, the least."""
    functions = step_functions(flow)
    shares = split_deadline(flow, {}, 1, {task: alone_us(name) for task, name in functions.items()}).share
    least: dict[str, float] = {}
    for task, name in functions.items():
        least[name] = min(least.get(name, 1.0), shares.get(task, 1.0))
    return least
