"""Placements of a workflow: a kind of device for each function, with the latency and cost of the whole.

`CandidatePlacements` keeps those of every workflow: worked out when asked for, and anew as predictions move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import ceil, prod

from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Choice, Each, Flow, Task, inner_flows
from lamina.planner.task_graph import TaskGraph
from lamina.published.admission.reservation_table import ReservedSlot
from lamina.types import DeviceSpec, FunctionSpec

DEFAULT_BATCH_US = 1_000
"""Assumed time of a batch that was never measured: slots of no time would follow each other in no time."""

GRACE_US = 1
"""Part of every slot: events of one instant come one after another, and the last of them may be the one waited for."""

MAX_OUTCOMES = 64
"""Ways a run can go that are told apart; beyond that all branches are counted."""

KindOptions = Mapping[str, Mapping[str, tuple[int, float]]]
"""function -> kind of device -> (time of one job, its cost)."""


@dataclass(slots=True, eq=False)
class WorkflowShape:
    """A workflow, or a body in it, as it is walked: nodes in order, and the ways it can go."""

    flow: Flow
    path: str = ""
    net: TaskGraph = field(init=False)
    outcomes: list[frozenset[str]] = field(init=False)  #: sets of nodes that run, one for each way the choices can go
    certain: frozenset[str] = field(init=False)  #: nodes that run whichever way it goes
    bodies: dict[str, list[WorkflowShape]] = field(init=False)  #: what runs inside a node: each branch, or each item, all alike

    def __post_init__(self) -> None:
        self.net = TaskGraph(self.flow)
        self.outcomes = self._outcomes()
        self.certain = frozenset.intersection(*self.outcomes) if self._is_enumerable() else frozenset()
        self.bodies = {}
        for name, node in self.flow.nodes.items():
            shapes = [WorkflowShape(inner, f"{self.path}/{name}.{place}") for place, inner in enumerate(inner_flows(node))]
            if shapes:
                self.bodies[name] = shapes * ceil(node.expected_items) if isinstance(node, Each) else shapes

    def _choices(self) -> list[str]:
        return [name for name in self.net.topological_order if isinstance(self.flow.nodes[name], Choice)]

    def _is_enumerable(self) -> bool:
        return prod(max(1, len(self.net.branches[name])) for name in self._choices()) <= MAX_OUTCOMES

    def _outcomes(self) -> list[frozenset[str]]:
        if not self._is_enumerable():
            return [frozenset(self.net.topological_order)]
        choices = self._choices()
        found: dict[frozenset[str], None] = {}
        for taken in product(*(self.net.branches[name] for name in choices)):
            way = dict(zip(choices, taken, strict=True))
            runs = set(self.flow.start)
            for name in self.net.topological_order:
                if name in runs:
                    runs.update(*([way[name]] if name in way else self.net.branches[name]))
            found[frozenset(runs)] = None
        return list(found)

    def max_cost(self, per_node: Mapping[str, float]) -> float:
        """What a run costs whichever way it goes, from the cost of each node."""
        return max(sum(per_node.get(name, 0.0) for name in outcome) for outcome in self.outcomes)

    def cost(self, task_cost: Callable[[str], float]) -> float:
        """The same from the cost of one job of each function."""
        per_node: dict[str, float] = {}
        for name, node in self.flow.nodes.items():
            if isinstance(node, Task):
                per_node[name] = task_cost(node.function)
            elif name in self.bodies:
                per_node[name] = sum(body.cost(task_cost) for body in self.bodies[name])
        return self.max_cost(per_node)

    def tails(self, task_us: Callable[[str], int]) -> dict[str, dict[str, int]]:
        """By path: least time from the end of each node to the end of the flow or body it is in."""
        found = {self.path: self.flow.remaining_path_us(task_us)}
        for body in (body for bodies in self.bodies.values() for body in bodies):
            if body.path not in found:
                found |= body.tails(task_us)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlacement:
    kinds: dict[str, str]  #: function -> kind of device
    latency_us: int
    cost: float  #: of one run alone, whichever way its choices go
    dominated: bool  #: another is at least as good in both
    tails: dict[str, dict[str, int]]  #: see `Shape.tails`


def enumerate_placements(shape: WorkflowShape, options: KindOptions, most: int = 4_096) -> list[DevicePlacement]:
    """All of them, cheapest first. Where there would be more than `most`, those on a path from the fastest to the cheapest
    are kept: one function after another moves to its cheapest kind, first the one that saves most for the time it loses.
    """
    flow = shape.flow
    names = list(flow.functions)
    if not all(options.get(name) for name in names):
        return []
    if prod(len(options[name]) for name in names) <= most:
        choices = [dict(zip(names, kinds, strict=True)) for kinds in product(*(options[name] for name in names))]
    else:
        choices = _fastest_to_cheapest(names, options)
    points = []
    for kinds in choices:
        times = {name: options[name][kinds[name]] for name in names}
        latency_us = max(flow.path_us(first, lambda name, times=times: times[name][0]) for first in flow.start)  # type: ignore[misc]
        points.append((shape.cost(lambda name, times=times: times[name][1]), latency_us, kinds, times))  # type: ignore[misc]
    points.sort(key=lambda point: (point[0], point[1], sorted(point[2].items())))
    found: list[DevicePlacement] = []
    fastest_us = 1 << 62
    for cost, latency_us, kinds, times in points:
        tails = shape.tails(lambda name, times=times: times[name][0])  # type: ignore[misc]
        found.append(DevicePlacement(kinds, latency_us, cost, latency_us >= fastest_us, tails))
        fastest_us = min(fastest_us, latency_us)
    return found


def _fastest_to_cheapest(names: list[str], options: KindOptions) -> list[dict[str, str]]:
    fastest = {name: min(options[name], key=lambda kind: options[name][kind]) for name in names}
    cheapest = {name: min(options[name], key=lambda kind: options[name][kind][::-1]) for name in names}

    def loses(name: str) -> float:
        (fast_us, dear), (slow_us, cheap) = options[name][fastest[name]], options[name][cheapest[name]]
        return (slow_us - fast_us) / (dear - cheap) if dear > cheap else 0.0

    path = [dict(fastest)]
    for name in sorted((name for name in names if fastest[name] != cheapest[name]), key=loses):
        path.append(path[-1] | {name: cheapest[name]})
    return path


def batch_us(view: View, function: FunctionState, device: Device, batch: int) -> int:
    """How long a slot for so many jobs is, their inputs brought over from wherever they are, and the way there and back."""
    spec = function.spec
    moving_us = 0
    if device.spec.link_mib_per_s:
        moving_us = device.spec.link_latency_us + int(spec.input_kib / 1024 / device.spec.link_mib_per_s * 1e6)
    took_us = (
        view.latency_us(spec.name, device, batch, spec.units_on(device.spec), spec.cores_on(device.spec)) or DEFAULT_BATCH_US
    )
    return took_us + batch * moving_us + device.way_us + GRACE_US


def price_per_us(function: FunctionState, device: Device) -> float:
    """Of one microsecond of its slice."""
    return device.spec.lease_price(function.spec.units_on(device.spec), function.spec.cores_on(device.spec))


@dataclass(slots=True)
class CandidatePlacements:
    can_host: Callable[[FunctionSpec, DeviceSpec], bool]  #: may it be booked there at all?
    max_placements: int  #: placements of one workflow
    _shapes: dict[str, WorkflowShape] = field(default_factory=dict)
    _known: dict[str, list[DevicePlacement]] = field(default_factory=dict)
    _costs: dict[tuple[str, str], float] = field(default_factory=dict)  #: (function, kind) -> one job alone

    def invalidate(self) -> None:
        self._known.clear()

    def shape_of(self, flow: Flow) -> WorkflowShape:
        shape = self._shapes.get(flow.name)
        if shape is None or shape.flow is not flow:
            shape = self._shapes[flow.name] = WorkflowShape(flow)
            self._known.pop(flow.name, None)
        return shape

    def placements_for(self, view: View, flow: Flow) -> list[DevicePlacement]:
        shape = self.shape_of(flow)
        if flow.name not in self._known:
            options = {name: self._options(view, view.functions[name]) for name in flow.functions}
            self._known[flow.name] = enumerate_placements(shape, options, self.max_placements)
        return self._known[flow.name]

    def affordable(
        self, view: View, flow: Flow, able: list[DevicePlacement], limit: float, waiting: Iterable[ReservedSlot]
    ) -> list[DevicePlacement]:
        """Those that could keep to the limit: alone, or by joining batches that wait with room."""
        if not any(placement.cost > limit for placement in able):
            return able
        rooms = set()
        for slot in waiting:
            if not slot.batch_id and len(slot.members) < view.functions[slot.function].spec.max_batch:
                rooms.add((slot.function, view.devices[slot.device].spec.kind))
        shape = self.shape_of(flow)

        def least(placement: DevicePlacement) -> float:
            return shape.cost(
                lambda name: 0.0 if (name, placement.kinds[name]) in rooms else self._costs[name, placement.kinds[name]]
            )

        return [placement for placement in able if placement.cost <= limit or (rooms and least(placement) <= limit)]

    def _options(self, view: View, function: FunctionState) -> dict[str, tuple[int, float]]:
        found: dict[str, tuple[int, float]] = {}
        for device in view.devices.values():
            if self.can_host(function.spec, device.spec):
                took_us = batch_us(view, function, device, 1)
                found.setdefault(device.spec.kind, (took_us, took_us * price_per_us(function, device)))
                self._costs[function.spec.name, device.spec.kind] = found[device.spec.kind][1]
        return found
