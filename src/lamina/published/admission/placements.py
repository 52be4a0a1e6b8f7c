"""Placements of a workflow: a kind of device for each function, with the latency and cost of the whole.

A placement gives every function of a workflow a kind of device. With r kinds and n functions there are r^n of them; each
is a point (latency, cost) of a run that has the devices to itself. No placement is thrown away: one that is beaten in both
may be the only one that has room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import ceil, prod

from lamina.core.workflow.flow import Choice, Each, Flow, Task, inner_flows
from lamina.planner.task_graph import TaskGraph

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
