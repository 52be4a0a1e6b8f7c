"""INFless (ASPLOS 2022), as ESG's authors compare with it: a fixed part of the deadline per function.

The deadline is shared out once, by the functions' average times. Inside its share a step takes the largest batch that is
there and in time, on the configuration that serves most requests per resource (the part of a node's cores plus the part
of its units). What a step saves or wastes is not passed on, and where its input is does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.workflow.flow import Flow
from lamina.planner.configs import ConfigArrays, ProfiledConfig
from lamina.planner.cost_to_go import NodePath
from lamina.planner.deadline_split import split_deadline, step_functions
from lamina.published.esg.config_tables import sample_device
from lamina.published.esg.queue_policy import MAX_CACHED, StepQueue, StepQueuePolicy


@dataclass(slots=True)
class Policy(StepQueuePolicy):
    """A fixed share of the deadline per step; inside it the largest batch, and the most throughput per resource."""

    _shares: dict[str, tuple[Flow, dict[NodePath, float]]] = field(default_factory=dict, init=False)
    _cache: dict[tuple[str, NodePath, int, int], list[ProfiledConfig]] = field(default_factory=dict, init=False)

    def on_profiles_changed(self) -> None:
        self._shares.clear()
        self._cache.clear()

    def prefers_locality(self, queue: StepQueue) -> bool:
        return False

    def rank_configs(self, view: View, queue: StepQueue, jobs: list[Job]) -> Sequence[ProfiledConfig]:
        call = jobs[0].run.call
        share_us = int((call.deadline_us - call.arrived_us) * self._share(queue))
        name = queue.function.spec.name
        own = self._tables.up_to(name, len(jobs))
        key = (queue.flow.name, queue.path, share_us, len(own))
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            found = self._cache[key] = self._rank(view, queue, own, share_us)
        return found

    def _rank(self, view: View, queue: StepQueue, own: ConfigArrays, share_us: int) -> list[ProfiledConfig]:
        node = sample_device(view, queue.function.spec)
        rows = [own[place] for place in range(len(own))]
        fits = [row for row in rows if row.time_us <= share_us]

        def per_resource(row: ProfiledConfig) -> float:
            assert node is not None
            part = row.units / node.spec.units + (row.cpus / node.spec.cores if node.spec.cores else 0.0)
            return row.batch / row.time_us / part

        if fits and node is not None:  # a function deployed anew may suit no machine, and have instances from before
            return sorted(fits, key=lambda row: (-row.batch, -per_resource(row), row.units, row.cpus))
        return sorted(rows, key=lambda row: (row.time_us, row.units, row.cpus))

    def _share(self, queue: StepQueue) -> float:
        known = self._shares.get(queue.flow.name)
        if known is None or known[0] is not queue.flow:
            tables = self._tables.tables
            means = {path: float(tables[name].time_us.mean()) for path, name in step_functions(queue.flow).items()}
            shares = split_deadline(queue.flow, tables, 1, means).share
            known = self._shares[queue.flow.name] = (queue.flow, shares)
            self._cache = {key: found for key, found in self._cache.items() if key[0] != queue.flow.name}
        return known[1][queue.path]
