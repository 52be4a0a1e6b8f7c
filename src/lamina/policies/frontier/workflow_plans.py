"""Workflow plans: the look-ahead of every workflow, kept up to date while load and predictions move.

What a later step costs depends on how many will share its batch, and that on how fast its jobs come: a batch of n takes
its own time and that of waiting for n - 1 more. So the tables a plan is made of carry the time to fill a batch, and plans
are made again when the arrival rate of a function has changed by half, or its configuration table is a new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Each, Flow, Task, inner_flows
from lamina.planner.configs import ConfigArrays, ProfiledConfig
from lamina.planner.cost_to_go import CostToGo, NodePath
from lamina.planner.frontier import Frontier, Precision
from lamina.planner.workflow_frontier import plan_workflow
from lamina.policies.frontier.candidate_slots import ConfigTables
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, sizes_up_to
from lamina.types import NEVER_US, DeviceSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PRECISION = Precision(eps=0.01, points=256)
RATE_STEP = 1.5
"""A function's pace is known to this factor; finer steps would only make plans anew."""


class StepPlan(NamedTuple):
    """One step of one workflow: its configurations on all kinds of devices, and what comes after it."""

    step: CostToGo
    picks: list[BatchConfig]
    menus: list[ConfigTable]  #: of the kinds of devices
    kind: NDArray[np.int64]  #: per configuration, which of them
    held: NDArray[np.float64]  #: per configuration, its cost times its time
    squeeze: NDArray[np.float64]  #: and what it keeps others from, beyond its cost, where units or cores run out
    masks: dict[tuple[int, tuple[tuple[int, int], ...]], NDArray[np.bool_]]  #: what may be had, by jobs waiting and room


@dataclass(slots=True)
class _Known:
    flow: Flow
    checked_us: int
    basis: tuple[object, ...]
    steps: dict[NodePath, StepPlan]
    whole: Frontier | None = None
    groups: dict[int, Frontier] = field(default_factory=dict)  #: by how many go through it together


@dataclass(slots=True)
class PlanCache:
    menus: ConfigTables
    period_us: int = 1_000_000
    _known: dict[str, _Known] = field(default_factory=dict)
    _seen: dict[str, tuple[int, int, float]] = field(default_factory=dict)  #: arrivals, when, and gap at the last look

    def step_plan(self, view: View, job: Job) -> StepPlan | None:
        """Plan of the step this job is at; None for a function alone, and while the latency of another step is unknown."""
        flow = job.run.flow
        if flow.sole_task is not None:
            return None
        return self._fresh(view, flow).steps.get(node_path_of(job))

    def whole_frontier(self, view: View, flow: Flow) -> Frontier | None:
        """Of all of it, from its start."""
        return self._fresh(view, flow).whole

    def group_frontier(self, view: View, flow: Flow, count: int) -> Frontier | None:
        """Pareto front for `count` runs that start at once and share all batches, with no others: of the steps that every run
        comes to, what one of them pays. None while latencies are unknown."""
        known = self._fresh(view, flow)
        if known.whole is not None and count not in known.groups:
            menus = {name: self.menus.tables_of(view, view.functions[name]) for name in flow.functions}
            known.groups[count] = plan_workflow(
                flow, {name: _table(menus[name], count, flow.expected_jobs[name] >= 1) for name in menus}
            ).whole
        return known.groups.get(count)

    def _fresh(self, view: View, flow: Flow) -> _Known:
        known = self._known.get(flow.name)
        if known is None or known.flow is not flow or view.now_us - known.checked_us >= self.period_us:
            known = self._look(view, flow, known)
        return known

    def _look(self, view: View, flow: Flow, known: _Known | None) -> _Known:
        menus = {name: self.menus.tables_of(view, view.functions[name]) for name in flow.functions}
        paces = {name: self._pace(view, view.functions[name]) for name in flow.functions}
        basis: tuple[object, ...] = (tuple(id(menu) for found in menus.values() for menu in found), tuple(paces.values()))
        if known is None or known.flow is not flow or known.basis != basis:
            known = self._known[flow.name] = _Known(flow, view.now_us, basis, {})
            if all(any(menu.is_known for menu in found) for found in menus.values()):
                known.steps, known.whole = _plan(flow, menus, paces)
        known.checked_us = view.now_us
        return known

    def _pace(self, view: View, function: FunctionState) -> int:
        """Time between two jobs on average, as a power of PACE."""
        count, at_us, gap_us = self._seen.get(function.spec.name, (0, 0, 0.0))
        span_us = view.now_us - at_us
        if span_us >= self.period_us // 2:
            came = function.arrivals.count - count
            fresh_us = span_us / came if came else 2.0 * span_us
            gap_us = fresh_us if not gap_us else 0.5 * (gap_us + fresh_us)
            self._seen[function.spec.name] = (function.arrivals.count, view.now_us, gap_us)
        return round(math.log(max(1.0, gap_us)) / math.log(RATE_STEP))


def node_path_of(job: Job) -> NodePath:
    scope = job.run.scopes[job.scope]
    path: NodePath = (job.node,)
    while scope.parent is not None:
        path = (scope.node, *path)
        scope = scope.parent
    return path


def _plan(flow: Flow, menus: dict[str, list[ConfigTable]], paces: dict[str, int]) -> tuple[dict[NodePath, StepPlan], Frontier]:
    import numpy as np

    items = {name: max(1.0, count) for name, count in _together(flow, 1.0).items()}
    raw: dict[str, tuple[ConfigArrays, list[BatchConfig], NDArray[np.int64], NDArray[np.float64]]] = {}
    tables: dict[str, ConfigArrays] = {}
    for name, found in menus.items():
        picks: list[BatchConfig] = []
        kinds: list[int] = []
        for index, menu in enumerate(found):
            for batch in sizes_up_to(menu.max_batch, 4) if menu.max_batch > 16 else menu.batch_sizes:
                rows = menu.configs(batch)
                picks += rows
                kinds += [index] * len(rows)
        table = ConfigArrays.from_rows(ProfiledConfig(p.batch, p.cores, p.units, p.time_us, p.cost) for p in picks)
        squeeze = np.array([max(0.0, _kept_busy(found[kind].spec, p) - p.cost) for kind, p in zip(kinds, picks, strict=True)])
        raw[name] = (table, picks, np.array(kinds, np.int64), squeeze)
        fill_us = np.maximum(0, table.batch - items[name]) * RATE_STEP ** paces[name]
        tables[name] = ConfigArrays(
            table.batch,
            table.cpus,
            table.units,
            (table.time_us + np.minimum(fill_us, NEVER_US // 8)).astype(np.int64),
            table.cost,
        )
    planned = plan_workflow(flow, tables, precision=PRECISION)
    made: dict[NodePath, StepPlan] = {}
    for path, step in planned.steps.items():
        table, picks, kind, squeeze = raw[_function_at(flow, path)]
        made[path] = StepPlan(
            CostToGo(table, step.after), picks, menus[_function_at(flow, path)], kind, table.cost * table.time_us, squeeze, {}
        )
    return made, planned.whole


def _table(menus: list[ConfigTable], count: int, sure: bool) -> ConfigArrays:
    rows = [row for menu in menus for batch in menu.batch_sizes if batch <= count for row in menu.configs(batch)]
    return ConfigArrays.from_rows(ProfiledConfig(p.batch, p.cores, p.units, p.time_us, p.cost if sure else 0.0) for p in rows)


def _kept_busy(device: DeviceSpec, pick: BatchConfig) -> float:
    """The price of as much of the device as no other batch can use beside it: of units or cores, the larger share."""
    if not device.cores:
        return pick.cost
    share = max(pick.units / device.units, pick.cores / device.cores)
    return share * device.lease_price(device.units, device.cores) * pick.time_us / pick.batch


def _together(flow: Flow, times: float) -> dict[str, float]:
    """Per function, how many of its jobs one run brings at the same moment."""
    found: dict[str, float] = {}
    for node in flow.nodes.values():
        if isinstance(node, Task):
            found[node.function] = max(found.get(node.function, 0.0), times)
        for inner in inner_flows(node):
            for name, count in _together(inner, times * node.expected_items if isinstance(node, Each) else times).items():
                found[name] = max(found.get(name, 0.0), count)
    return found


def _function_at(flow: Flow, path: NodePath) -> str:
    node = flow.nodes[path[0]]
    if isinstance(node, Task):
        return node.function
    return next(_function_at(inner, path[1:]) for inner in inner_flows(node) if path[1] in inner.nodes)
