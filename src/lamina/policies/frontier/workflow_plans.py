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
from lamina.core.workflow.flow import Each, Flow, Task, inner_flows
from lamina.core.workflow.runs import flow_of, workflow_run
from lamina.planner.arrival_rates import ArrivalRates
from lamina.planner.configs import ConfigArrays, ProfiledConfig
from lamina.planner.cost_to_go import CostToGo, NodePath
from lamina.planner.frontier import Frontier, Precision
from lamina.planner.workflow_frontier import plan_workflow
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, ConfigTables, sizes_up_to
from lamina.types import NEVER_US, DeviceSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PRECISION = Precision(eps=0.01, points=256)
CHECK_US = 1_000_000
"""How often a plan is compared with what it was made of."""

UNKNOWN_CHECK_US = 20_000
"""Likewise where the time of a step was unknown: until it is made again, nothing can be promised or offered."""

KEPT_PLANS = 64
"""Plans that are kept, of all workflows together: to make one takes as long as a hundred decisions."""

RATE_STEP = 1.5
"""A function's arrival rate is known to this factor; finer steps would only rebuild plans."""


WAY_STEP = 1.25
"""Likewise the way to its devices."""


class StepPlan(NamedTuple):
    """One step of one workflow: its configurations on all kinds of devices, the fastest first, and what comes after it."""

    step: CostToGo
    configs: list[BatchConfig]
    tables: list[ConfigTable]  #: of the kinds of devices
    kind: NDArray[np.int64]  #: per configuration, which of them
    cost_times_time: NDArray[np.float64]  #: per configuration
    opportunity_cost: NDArray[np.float64]  #: per configuration, what it keeps others from beyond its cost, in units or cores
    costs: dict[tuple[int, tuple[tuple[int, int, int], ...]], NDArray[np.float64]]
    """Of what may be had, infinite for the rest, by jobs waiting and the largest room on each kind of device."""
    missing: dict[
        int, tuple[NDArray[np.int64], NDArray[np.int64]]
    ]  #: by jobs waiting, how many it is short of, and whether of any
    stays: dict[int, NDArray[np.float64]]  #: likewise what its stay costs on a full device, by the SLO


@dataclass(slots=True)
class _Plan:
    flow: Flow
    checked_us: int
    basis: tuple[object, ...]
    tables: dict[str, list[ConfigTable]]  #: that are in the basis by their identity
    steps: dict[NodePath, StepPlan]
    whole: Frontier | None = None
    groups: dict[int, Frontier] = field(default_factory=dict)  #: by how many go through it together

    @property
    def check_every_us(self) -> int:
        return CHECK_US if self.whole is not None else UNKNOWN_CHECK_US


@dataclass(slots=True)
class PlanCache:
    """Plans of all workflows, checked once a period."""

    tables: ConfigTables
    rates: ArrivalRates
    _plans: dict[str, _Plan] = field(default_factory=dict)  #: in use, by workflow
    _made: dict[tuple[object, ...], _Plan] = field(
        default_factory=dict
    )  #: of late, by what they were made of: rates go to and fro

    def step_plan(self, view: View, job: Job) -> StepPlan | None:
        """Plan of the step this job is at; None for a function alone, and while the latency of another step is unknown."""
        if not job.run.is_workflow:
            return None
        return self._current(view, flow_of(job.run)).steps.get(node_path_of(job))

    def whole_frontier(self, view: View, flow: Flow) -> Frontier | None:
        """Pareto front of all of it, from its start."""
        return self._current(view, flow).whole

    def group_frontier(self, view: View, flow: Flow, count: int) -> Frontier | None:
        """Pareto front for `count` runs that start at once and share all batches, with no others: of the steps that every run
        comes to, what one of them pays. None while latencies are unknown."""
        known = self._current(view, flow)
        if known.whole is not None and count not in known.groups:
            tables = {name: self.tables.tables_of(view, view.functions[name]) for name in flow.functions}
            arrays = {
                name: _group_configs(tables[name], count, flow.expected_jobs[name] >= 1, _way_us(view, name)) for name in tables
            }
            known.groups[count] = plan_workflow(flow, arrays).whole
        return known.groups.get(count)

    def _current(self, view: View, flow: Flow) -> _Plan:
        known = self._plans.get(flow.name)
        if known is None or known.flow is not flow or view.now_us - known.checked_us >= known.check_every_us:
            known = self._checked(view, flow, known)
        return known

    def _checked(self, view: View, flow: Flow, known: _Plan | None) -> _Plan:
        tables = {name: self.tables.tables_of(view, view.functions[name]) for name in flow.functions}
        gaps_us = [self.rates.planning_interarrival_us(view.now_us, view.functions[name]) for name in flow.functions]
        rates = {name: _rate_class(gap_us) for name, gap_us in zip(flow.functions, gaps_us, strict=True)}
        ways_us = {name: _way_us(view, name) for name in flow.functions}
        built_from = tuple(id(table) for found in tables.values() for table in found)
        basis: tuple[object, ...] = (built_from, tuple(rates.values()), tuple(ways_us.values()))
        if known is None or known.flow is not flow or known.basis != basis:
            key = (flow.name, *basis)
            known = self._made.pop(key, None)
            if known is None or known.flow is not flow:
                known = _make(view, flow, basis, tables, rates, ways_us)
            self._plans[flow.name] = self._made[key] = known
            if len(self._made) > KEPT_PLANS:
                del self._made[next(iter(self._made))]
        known.checked_us = view.now_us
        return known


def _make(
    view: View,
    flow: Flow,
    basis: tuple[object, ...],
    tables: dict[str, list[ConfigTable]],
    rates: dict[str, int],
    ways_us: dict[str, int],
) -> _Plan:
    made = _Plan(flow, view.now_us, basis, tables, {})
    if all(any(table.is_known for table in found) for found in tables.values()):
        made.steps, made.whole = _plan(flow, tables, rates, ways_us)
    return made


def _rate_class(gap_us: float) -> int:
    """Time between two jobs, as a power of `RATE_STEP`."""
    return round(math.log(max(1.0, gap_us)) / math.log(RATE_STEP))


def node_path_of(job: Job) -> NodePath:
    scope = workflow_run(job.run).scopes[job.scope]
    path: NodePath = (job.node,)
    while scope.parent is not None:
        path = (scope.node, *path)
        scope = scope.parent
    return path


def _way_us(view: View, name: str) -> int:
    """Way to the nearest device the function is on, rounded up to a step, so that plans are made anew only when it has moved."""
    devices = [view.devices[instance.device] for instance in view.functions[name].instances.values()]
    way_us = min((device.way_us for device in devices or view.devices.values()), default=0)
    return math.ceil(WAY_STEP ** math.ceil(math.log(way_us, WAY_STEP))) if way_us > 1 else 0


def _plan(
    flow: Flow, tables: dict[str, list[ConfigTable]], rates: dict[str, int], ways_us: dict[str, int]
) -> tuple[dict[NodePath, StepPlan], Frontier]:
    import numpy as np

    items = {name: max(1.0, count) for name, count in _simultaneous_jobs(flow, 1.0).items()}
    raw: dict[str, tuple[ConfigArrays, list[BatchConfig], NDArray[np.int64], NDArray[np.float64]]] = {}
    arrays: dict[str, ConfigArrays] = {}
    for name, found in tables.items():
        configs: list[BatchConfig] = []
        kinds: list[int] = []
        for index, table in enumerate(found):
            for batch in sizes_up_to(table.max_batch, 4) if table.max_batch > 16 else table.batch_sizes:
                rows = table.configs(batch)
                configs += rows
                kinds += [index] * len(rows)
        by_time = sorted(zip([config.time_us for config in configs], range(len(configs)), strict=True))
        configs, kinds = [configs[at] for _, at in by_time], [kinds[at] for _, at in by_time]
        own = ConfigArrays.from_rows(ProfiledConfig(c.batch, c.cores, c.units, c.time_us, c.cost) for c in configs)
        lost = np.array([max(0.0, _kept_busy(found[kind].spec, c) - c.cost) for kind, c in zip(kinds, configs, strict=True)])
        raw[name] = (own, configs, np.array(kinds, np.int64), lost)
        fill_us = np.maximum(0, own.batch - items[name]) * RATE_STEP ** rates[name]
        arrays[name] = ConfigArrays(
            own.batch,
            own.cpus,
            own.units,
            (own.time_us + ways_us[name] + np.minimum(fill_us, NEVER_US // 8)).astype(np.int64),
            own.cost,
        )
    planned = plan_workflow(flow, arrays, precision=PRECISION)
    made: dict[NodePath, StepPlan] = {}
    for path, step in planned.steps.items():
        name = _function_at(flow, path)
        own, configs, kind, lost = raw[name]
        made[path] = StepPlan(CostToGo(own, step.after), configs, tables[name], kind, own.cost * own.time_us, lost, {}, {}, {})
    return made, planned.whole


def _group_configs(tables: list[ConfigTable], count: int, is_certain: bool, way_us: int) -> ConfigArrays:
    rows = [row for table in tables for batch in table.batch_sizes if batch <= count for row in table.configs(batch)]
    return ConfigArrays.from_rows(
        ProfiledConfig(c.batch, c.cores, c.units, c.time_us + way_us, c.cost if is_certain else 0.0) for c in rows
    )


def _kept_busy(device: DeviceSpec, config: BatchConfig) -> float:
    """The price of as much of the device as no other batch can use beside it: of units or cores, the larger share."""
    if not device.cores:
        return config.cost
    share = max(config.units / device.units, config.cores / device.cores)
    return share * device.lease_price(device.units, device.cores) * config.time_us / config.batch


def _simultaneous_jobs(flow: Flow, times: float) -> dict[str, float]:
    """Per function, how many of its jobs one run brings at the same moment."""
    found: dict[str, float] = {}
    for node in flow.nodes.values():
        if isinstance(node, Task):
            found[node.function] = max(found.get(node.function, 0.0), times)
        for inner in inner_flows(node):
            inside = times * node.expected_items if isinstance(node, Each) else times
            for name, count in _simultaneous_jobs(inner, inside).items():
                found[name] = max(found.get(name, 0.0), count)
    return found


def _function_at(flow: Flow, path: NodePath) -> str:
    node = flow.nodes[path[0]]
    if isinstance(node, Task):
        return node.function
    return next(_function_at(inner, path[1:]) for inner in inner_flows(node) if path[1] in inner.nodes)
