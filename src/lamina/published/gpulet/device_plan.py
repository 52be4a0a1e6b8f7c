"""Gpu-let's planner on the devices there are: which are alike, which functions to plan for, and how much of the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lamina.core.policy import View
from lamina.planner.partitioning.catalogue import PlanTask
from lamina.planner.partitioning.plan import HEADROOMS, GpuletPlanner, PartitionPlan
from lamina.types import DeviceSpec, FunctionSpec

KEEP_FACTOR = 1.5  #: how much more others must be called to take the turn of a function that stands
SCALE_STEPS = 5  #: steps of the search for the largest part of all rates that fits


def device_labels(view: View) -> dict[str, str]:
    """Labels of the devices in a plan: their kind, with a number where devices of one kind are not of one make."""
    makes: dict[tuple[object, ...], str] = {}
    numbers: dict[str, int] = {}
    labels = {}
    for name, device in view.devices.items():
        spec = device.spec
        make = (spec.kind, spec.units, spec.memory_mib, spec.family, spec.limits, spec.cores)
        if make not in makes:
            number = numbers[spec.kind] = numbers.get(spec.kind, 0) + 1
            makes[make] = spec.kind if number == 1 else f"{spec.kind} #{number}"
        labels[name] = makes[make]
    return labels


def select_functions(view: View, rates: dict[str, float], kinds: Sequence[DeviceSpec], turns: int) -> list[FunctionSpec]:
    """Functions to plan for: as many as there are turns and memory for: the ones called most, in the order of `rates`."""
    memory_mib = sum(device.spec.memory_mib for device in view.devices.values())
    taken: set[str] = set()
    stays = {name: KEEP_FACTOR if view.functions[name].instances else 1.0 for name in rates}
    for name in sorted(rates, key=lambda one: (-rates[one] * stays[one], one)):
        spec = view.functions[name].spec
        able = any(spec.fits_family(kind.family) and spec.memory_mib <= kind.memory_mib for kind in kinds)
        if able and len(taken) < turns and spec.memory_mib <= memory_mib:
            taken.add(name)
            memory_mib -= spec.memory_mib
    return [view.functions[name].spec for name in rates if name in taken]


def plan_on_devices(planner: GpuletPlanner, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> PartitionPlan:
    """On as few devices as will do; on all of them with less headroom; on all of them at a part of every rate."""
    least, every = min(len(kinds), planner.gpus_at_least(tasks, kinds)), len(kinds)
    plan = planner.plan(tasks, kinds[:least], HEADROOMS[:1], thorough=False)
    if plan.schedulable:
        return plan
    whole = planner.plan(tasks, kinds, HEADROOMS[:1], thorough=False)
    count = least
    while whole.schedulable:  # if not even all will do, those in between need no look
        count += max(1, min(count // 8, every - count))
        plan = planner.plan(tasks, kinds[:count], HEADROOMS[:1], thorough=False) if count < every else whole
        if plan.schedulable:
            return plan
    plan = planner.plan(tasks, kinds, HEADROOMS[1:], thorough=False)
    if plan.schedulable:
        return plan
    scale = largest_scale(planner, tasks, kinds)
    less = planner.plan([replace(task, rate=task.rate * scale) for task in tasks], kinds, thorough=False) if scale else plan
    return less if less.schedulable else plan


def largest_scale(planner: GpuletPlanner, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> float:
    """The largest part of all rates that fits with the least headroom; 0 where next to nothing does not fit either."""

    def fits(scale: float) -> bool:
        less = [replace(task, rate=task.rate * scale) for task in tasks]
        return planner.plan(less, kinds, HEADROOMS[-1:], thorough=False).schedulable

    high = min(1.0, len(kinds) / max(1, planner.gpus_at_least(tasks, kinds) - 1))
    low = high * 0.5**SCALE_STEPS
    if not fits(low):
        return 0.0
    for _ in range(SCALE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
