"""ESG (HPDC 2024): one search per batch over the configurations of the steps that are left.

At every visit of a queue the time left until the oldest job's deadline is shared out: the step's group (a few functions
in a row, by dominators) gets its part by average normalised latency (`planner/deadline_split.py`). Within it `ESG_1Q` finds the K
cheapest ways (`path_search.py`), and their first configurations are tried in turn. Because it plans again at every
step, what one step wasted or saved is passed on to the next.

Ours where the paper as we know it is silent: if nothing is in time, but nearly so, the fastest configurations come first,
for profiles are cautious; if the deadline is lost, the cheapest do, or one late call would cost the next its deadline. Answers
of the search are kept by budget, rounded down to `grain`, because the same question is asked hundreds of times a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.workflow.flow import Flow
from lamina.planner.configs import ConfigArrays, ProfiledConfig
from lamina.planner.cost_to_go import NodePath
from lamina.planner.deadline_split import DeadlineSplit, split_deadline, step_functions
from lamina.published.esg.path_search import LaterStages, esg_1q
from lamina.published.esg.queue_policy import MAX_CACHED, StepQueue, StepQueuePolicy, round_down

FEASIBLE_PART = 0.9
"""Of the least time needed: with so much of it left a call may still make it."""


@dataclass(slots=True)
class Policy(StepQueuePolicy):
    """The cheapest configuration now for which the rest of the group can still be in time; planned anew at every step."""

    group: int = 3  #: functions that are planned together
    k: int = 20  #: ways the search returns; their first configurations are the fall-back list
    prefilter: bool = (
        True  #: search undominated configurations only: the same best way, other ways to fall back on; as published: False
    )
    grain: float = 0.02  #: budgets are rounded down to steps of this factor; 0: every budget is searched for itself
    _splits: dict[str, tuple[Flow, DeadlineSplit, dict[NodePath, str]]] = field(default_factory=dict, init=False)
    _later: dict[tuple[str, NodePath], LaterStages] = field(default_factory=dict, init=False)
    _cache: dict[tuple[str, NodePath, int, int], list[ProfiledConfig]] = field(default_factory=dict, init=False)

    def on_profiles_changed(self) -> None:
        self._splits.clear()
        self._later.clear()
        self._cache.clear()

    def rank_configs(self, view: View, queue: StepQueue, jobs: list[Job]) -> Sequence[ProfiledConfig]:
        shares, functions = self._split(queue.flow)
        remaining_us = jobs[0].run.call.deadline_us - view.now_us
        stages = [self._tables.tables[functions[path]] for path in shares.groups[queue.path]]
        slowest_us = sum(int(stage.time_us.max()) for stage in stages)
        budget_us = shares.budget_us(queue.path, remaining_us)
        goal_us = slowest_us if budget_us >= slowest_us else round_down(budget_us, self.grain)  # more time changes nothing
        own = self._tables.up_to(functions[queue.path], len(jobs))
        key = (queue.flow.name, queue.path, goal_us, len(own))
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            found = self._cache[key] = self._search(queue, [own, *stages[1:]], goal_us)
        return found

    def _search(self, queue: StepQueue, stages: list[ConfigArrays], goal_us: int) -> list[ProfiledConfig]:
        own = stages[0]
        self.stats["searches"] = self.stats.get("searches", 0) + 1
        if self.prefilter:
            first = esg_1q(stages, goal_us, self.k, prefilter=True).first_configs
        else:
            later = self._later.get(queue.key)
            if later is None:
                later = self._later[queue.key] = LaterStages(stages, self.k)
            first = later.first_configs(own, goal_us)
        if not first:
            hopeful = goal_us >= FEASIBLE_PART * sum(int(stage.time_us.min()) for stage in stages)
            order = (own.time_us if hopeful else own.cost).argsort(kind="stable")
            first = tuple(order[: self.k].tolist())
        return [own[place] for place in first]

    def _split(self, flow: Flow) -> tuple[DeadlineSplit, dict[NodePath, str]]:
        known = self._splits.get(flow.name)
        if known is None or known[0] is not flow:
            self._cache = {key: found for key, found in self._cache.items() if key[0] != flow.name}
            self._later = {key: found for key, found in self._later.items() if key[0] != flow.name}
            known = self._splits[flow.name] = (flow, split_deadline(flow, self._tables.tables, self.group), step_functions(flow))
        return known[1], known[2]
