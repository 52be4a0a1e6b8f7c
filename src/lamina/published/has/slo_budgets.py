"""SLO budget of each function, from the goals of the workflows it is in: a fixed split by how long its steps take.

This is how autoscalers that know nothing of workflows are made to serve them. A function in several workflows gets the
smallest of its parts. What is left over by one step is not given to the next: that is the weakness of any fixed split.
"""

from __future__ import annotations

from collections.abc import Callable

from lamina.core.policy import View
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow


def budgets_us(view: View) -> dict[str, int]:
    """Per function; those without any goal are left out."""
    parts: dict[str, int] = {}
    means: dict[str, float] = {}

    def mean_us(name: str) -> int:
        if name not in means:
            means[name] = average_latency_us(view, view.functions[name])
        return round(means[name])

    for flow in view.flows.values():
        if flow.slo.latency_us:
            for name, part_us in _split(flow, mean_us).items():
                parts[name] = min(parts.get(name, part_us), part_us)
    return parts


def _split(flow: Flow, mean_us: Callable[[str], int]) -> dict[str, int]:
    if flow.sole_task is not None:
        return {flow.sole_task.function: flow.slo.latency_us}
    path_us = max((flow.path_us(first, mean_us) for first in flow.start), default=0)
    return {name: int(flow.slo.latency_us * mean_us(name) / path_us) for name in flow.functions} if path_us else {}


def average_latency_us(view: View, function: FunctionState) -> float:
    """Of one request alone, over all sizes of slices there are for it."""
    times = [
        view.latency_us(function.spec.name, device, 1, units)
        for device in view.devices.values()
        if function.spec.fits_family(device.spec.family)
        for units in (device.spec.limits.sizes or range(1, device.spec.units + 1))
    ]
    return sum(times) / len(times) if times else 0.0
