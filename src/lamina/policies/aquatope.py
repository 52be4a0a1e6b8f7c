"""Aquatope (ASPLOS 2023), as ESG's authors compare with it: one configuration per step for ever, found off line.

When a workflow is first seen, constrained Bayesian optimisation (`planner/bayes.py`) tries 10 random plans and then 20
rounds of 3, each trial a run with the profiled times and their spread, and keeps the cheapest that was in time. Nothing
moves after that. Its warm pool (a neural forecast of arrivals) is not here: keep-alive and `prewarm` are.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.flow import Flow
from lamina.core.policy import View
from lamina.planner.bayes import minimise
from lamina.planner.split import functions_of, runs
from lamina.planner.spread import P99, along, times_run
from lamina.policies._fixed import Fixed, FixedPolicy


@dataclass(slots=True)
class Policy(FixedPolicy):
    """One configuration per step, the same for every call: the best that 70 trials off line have found."""

    starts: int = 10  #: random plans that are tried first
    rounds: int = 20  #: of optimisation
    each: int = 3  #: plans tried in a round
    spread: float = 0.05  #: sigma of the logarithm of a step's time in a trial
    seed: int = 1

    def planned(self, view: View, flow: Flow, goal_us: int) -> Fixed:
        import numpy as np

        functions = functions_of(flow)
        run, weights = runs(flow), times_run(flow)
        tables = self._tables.known
        knobs = {
            path: [sorted(set(column.tolist())) for column in (tables[name].batch, tables[name].cpus, tables[name].units)]
            for path, name in functions.items()
        }
        rows = {
            path: {config[:3]: config for config in (tables[name][place] for place in range(len(tables[name])))}
            for path, name in functions.items()
        }
        dice = np.random.default_rng(self.seed)

        def plan(point: tuple[int, ...]) -> Fixed:
            found: Fixed = {}
            for place, path in enumerate(functions):
                sizes = [levels[at] for levels, at in zip(knobs[path], point[3 * place : 3 * place + 3], strict=True)]
                found[path] = rows[path][sizes[0], sizes[1], sizes[2]]
            return found

        def trial(point: tuple[int, ...]) -> tuple[float, float]:
            times, cost = {}, 0.0
            for path, config in plan(point).items():
                factor = np.exp(self.spread * (dice.standard_normal(1) - P99))
                times[path] = config.time_us * factor
                cost += config.cost * float(factor[0]) * weights[path]
            return cost, float(along(run, times)[0])

        levels = [len(sizes) for path in functions for sizes in knobs[path]]
        found = minimise(trial, levels, goal_us, self.seed, starts=self.starts, rounds=self.rounds, each=self.each)
        self.stats["trials"] = self.stats.get("trials", 0) + len(found.trials)
        return plan(found.best.point)
