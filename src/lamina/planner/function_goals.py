"""Rates and latency goals per function, derived from those of calls and workflows.

A workflow's goal is divided along its longest path, in proportion to how long each step takes at best. A function that
several targets reach must satisfy the most demanding of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.planner.deadline_split import split_deadline, step_functions

NO_GOAL_US = 1_000_000
"""Where no call has an SLO, a second is a friendly answer."""

LATELY_US = 10_000_000
"""A workflow counts for so long after its last call. Its goal is divided anew as often: times are learnt."""


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


@dataclass(slots=True)
class StepGoals:
    """Goal of each function as a step of the workflows that were called lately, rejected calls included."""

    _called_us: dict[str, int] = field(default_factory=dict)  #: by workflow, the last call
    _divided: dict[str, tuple[Flow, int]] = field(default_factory=dict)  #: likewise which one it was, and when it was divided
    by_function: dict[str, dict[str, int]] = field(default_factory=dict)  #: of each, the goals by workflow

    def on_call_arrived(self, view: View, flow: Flow) -> None:
        """Note a call of a workflow."""
        if not flow.slo.latency_us:
            return
        self._called_us[flow.name] = view.now_us
        known, divided_us = self._divided.get(flow.name, (None, 0))
        if known is not flow or view.now_us - divided_us > LATELY_US:
            self._divided[flow.name] = (flow, view.now_us)
            goals = function_goals_us([flow], lambda name: _alone_us(view, view.functions[name]))
            for by_workflow in self.by_function.values():
                by_workflow.pop(flow.name, None)
            for name, goal_us in goals.items():
                self.by_function.setdefault(name, {})[flow.name] = goal_us

    def tightest(self, now_us: int, function: str) -> tuple[int, str]:
        """The tightest of these goals, and whose it is; 0 where there is none."""
        goals = self.by_function.get(function)
        if not goals:
            return 0, ""
        return min([(us, flow) for flow, us in goals.items() if now_us - self._called_us[flow] <= LATELY_US], default=(0, ""))

    def is_step(self, function: str, workflow: str) -> bool:
        return workflow in self.by_function.get(function, ())


def _alone_us(view: View, function: FunctionState) -> int:
    """Time of one job on the slice that it asks for, where it is loaded or could be."""
    spec = function.spec
    hosts = function.instances_by_device or [name for name, one in view.devices.items() if spec.fits_family(one.spec.family)]
    times = []
    for host in list(hosts)[:1]:
        device = view.devices[host]
        cores = spec.cores_on(device.spec) if device.spec.cores else 0
        times.append(view.latency_us(spec.name, device, 1, spec.units_on(device.spec), cores))
    return max(1, *times) if times else 1
