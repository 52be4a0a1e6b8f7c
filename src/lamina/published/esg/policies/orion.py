"""Orion (OSDI 2022), as ESG's authors adapt it: sizes for the whole call, found by descent before it begins.

From the smallest sizes one step up at a time, the one that lowers the end-to-end 95th percentile most, until that is
within the deadline (`descend`); the percentile comes from the spread of the steps (`preplanned_policy.py`). The
search is cut off after `rounds`, for a clock would make two runs differ. Calls of one workflow with the same time to spend
get the same plan, so it is made once for all of them: the real one pays for its search with every call.

A size is small if it is slow: a step up is a smaller batch, one core more, one unit more. What it costs is not looked at, which
is how it ends up expensive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lamina.core.policy import View
from lamina.core.workflow.flow import Flow
from lamina.planner.configs import ConfigArrays
from lamina.planner.deadline_split import series_parallel_runs, step_functions
from lamina.published.esg.preplanned_policy import FixedPlan, LatencyDistribution, PreplannedPolicy

Picks = tuple[int, ...]
"""A place in the table of every step."""


class DescentResult(NamedTuple):
    picks: Picks
    latency_us: float
    rounds: int
    met: bool


class ConfigGrid:
    """A table of configurations as a grid: what is one step up in a knob. Combinations never measured are stepped over."""

    def __init__(self, configs: ConfigArrays) -> None:
        self._place = {
            (-batch, cpus, units): place
            for place, (batch, cpus, units) in enumerate(
                zip(configs.batch.tolist(), configs.cpus.tolist(), configs.units.tolist(), strict=True)
            )
        }
        self._at = {place: key for key, place in self._place.items()}
        self._levels = [sorted({key[knob] for key in self._place}) for knob in range(3)]

    @property
    def smallest(self) -> int:
        """The largest batch on the fewest cores and units."""
        return self._place[min(self._place, key=lambda key: (key[2], key[1], key[0]))]

    def steps_up(self, place: int) -> list[int]:
        key = self._at[place]
        found = []
        for knob, levels in enumerate(self._levels):
            for level in levels[levels.index(key[knob]) + 1 :]:
                other = (*key[:knob], level, *key[knob + 1 :])
                if other in self._place:
                    found.append(self._place[other])
                    break
        return found


def descend(
    stages: Sequence[ConfigArrays], latency_us: Callable[[Picks], float], goal_us: float, rounds: int, start: Picks | None = None
) -> DescentResult:
    """Steepest descent for at most so many rounds; the search is cut off wherever it is then."""
    ladders = [ConfigGrid(stage) for stage in stages]
    picks = start if start is not None else tuple(ladder.smallest for ladder in ladders)
    now_us = latency_us(picks)
    for done in range(rounds):
        if now_us <= goal_us:
            return DescentResult(picks, now_us, done, True)
        tries = [
            (*picks[:stage], place, *picks[stage + 1 :])
            for stage, ladder in enumerate(ladders)
            for place in ladder.steps_up(picks[stage])
        ]
        if not tries:
            return DescentResult(picks, now_us, done, False)
        best_us, picks = min((latency_us(other), other) for other in tries)
        if best_us >= now_us and all(latency_us(other) >= now_us for other in tries):
            return DescentResult(picks, best_us, done + 1, best_us <= goal_us)
        now_us = best_us
    return DescentResult(picks, now_us, rounds, now_us <= goal_us)


@dataclass(slots=True)
class Policy(PreplannedPolicy):
    """Sizes for the whole call before it begins: up from the smallest until the 95th percentile is within the deadline."""

    rounds: int = 200  #: steps of the search before it is cut off
    part: float = 0.95  #: the percentile that must be within the deadline
    spread: float = 0.05  #: sigma of the logarithm of a step's time
    samples: int = 200
    seed: int = 1

    def plan_steps(self, view: View, flow: Flow, goal_us: int) -> FixedPlan:
        functions = step_functions(flow)
        steps = list(functions)
        stages = [self._tables.tables[name] for name in functions.values()]
        times = [stage.time_us.tolist() for stage in stages]
        spread = LatencyDistribution.log_normal(series_parallel_runs(flow), steps, self.spread, self.samples, self.seed)

        def latency_us(picks: tuple[int, ...]) -> float:
            planned = {step: row[pick] for step, row, pick in zip(steps, times, picks, strict=True)}
            return spread.quantile_us(planned, self.part)

        found = descend(stages, latency_us, goal_us, self.rounds)
        self.stats["rounds"] = self.stats.get("rounds", 0) + found.rounds
        return FixedPlan(flow, {step: stage[pick] for step, stage, pick in zip(steps, stages, found.picks, strict=True)})
