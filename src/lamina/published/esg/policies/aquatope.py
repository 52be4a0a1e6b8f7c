"""Aquatope (ASPLOS 2023), as ESG's authors compare with it: one configuration per step for ever, found offline.

When a workflow is first seen, constrained Bayesian optimisation (`bayesian_optimization.py`) tries 10 random plans and then 20
rounds of 3, each trial a run with the profiled times and their spread, and keeps the cheapest that was in time. Nothing
moves after that. Its warm pool (a neural forecast of arrivals) is not here: keep-alive and `prewarm` are.

Offline means here: while the controller waits, for a quarter of a second. So only the first few workflows are planned with
all trials at once. Any others get the best of the random plans, and their turn later, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from lamina.core.policy import View
from lamina.core.workflow.flow import Flow
from lamina.planner.configs import ProfiledConfig
from lamina.planner.cost_to_go import NodePath
from lamina.planner.deadline_split import SeriesRun, series_parallel_runs, step_functions
from lamina.published.esg.bayesian_optimization import minimise
from lamina.published.esg.config_tables import nearest_config
from lamina.published.esg.preplanned_policy import P99, FixedPlan, PreplannedPolicy, run_time, runs_per_call


@dataclass(slots=True)
class Policy(PreplannedPolicy):
    """One configuration per step, the same for every call: the best that 70 offline trials have found."""

    starts: int = 10  #: random plans that are tried first
    rounds: int = 20  #: of optimisation
    each: int = 3  #: plans tried in a round
    spread: float = 0.05  #: sigma of the logarithm of a step's time in a trial
    seed: int = 1
    at_once: int = 4  #: plans that may be made one right after the other
    pause_us: int = 10_000_000  #: between two plans after those
    _full: int = field(default=0, init=False)  #: plans with all trials
    _next_us: int = field(default=0, init=False)

    def may_replan(self, view: View) -> bool:
        return self._full < self.at_once or view.now_us >= self._next_us

    def plan_steps(self, view: View, flow: Flow, goal_us: int) -> FixedPlan:
        functions = step_functions(flow)
        weights = runs_per_call(flow)
        steps = tuple(
            StepChoices(path, weights[path], tuple(table[place] for place in range(len(table))))
            for path, table in ((path, self._tables.tables[name]) for path, name in functions.items())
        )
        rounds = self.rounds if self.may_replan(view) else 0
        found, trials = search(series_parallel_runs(flow), steps, goal_us, self.spread, self.seed, self.starts, rounds, self.each)
        self.stats["trials"] = self.stats.get("trials", 0) + trials
        if trials > self.starts:
            self._full += 1
            self._next_us = view.now_us + self.pause_us
        return FixedPlan(flow, {step.path: config for step, config in zip(steps, found, strict=True)}, rough=not rounds)


class StepChoices(NamedTuple):
    path: NodePath
    times: float  #: it runs in one run of the workflow
    rows: tuple[ProfiledConfig, ...]


@lru_cache(maxsize=256)
def search(
    run: SeriesRun, steps: tuple[StepChoices, ...], goal_us: int, spread: float, seed: int, starts: int, rounds: int, each: int
) -> tuple[tuple[ProfiledConfig, ...], int]:
    """The best plan found, and how many were tried. A question asked before has the answer it had: many worlds are alike."""
    import numpy as np

    knobs = [[sorted(set(sizes)) for sizes in zip(*(row[:3] for row in step.rows), strict=True)] for step in steps]
    measured = [{row[:3]: row for row in step.rows} for step in steps]
    dice = np.random.default_rng(seed)

    def plan(point: tuple[int, ...]) -> tuple[ProfiledConfig, ...]:
        found = []
        for place, (levels, rows) in enumerate(zip(knobs, measured, strict=True)):
            batch, cpus, units = (sizes[at] for sizes, at in zip(levels, point[3 * place : 3 * place + 3], strict=True))
            found.append(rows.get((batch, cpus, units)) or nearest_config(rows, (batch, cpus, units)))
        return tuple(found)

    def trial(point: tuple[int, ...]) -> tuple[float, float]:
        times, cost = {}, 0.0
        for step, config in zip(steps, plan(point), strict=True):
            factor = np.exp(spread * (dice.standard_normal(1) - P99))
            times[step.path] = config.time_us * factor
            cost += config.cost * float(factor[0]) * step.times
        return cost, float(run_time(run, times)[0])

    levels = [len(sizes) for row in knobs for sizes in row]
    found = minimise(trial, levels, goal_us, seed, starts=starts, rounds=rounds, each=each)
    return plan(found.best.point), len(found.trials)
