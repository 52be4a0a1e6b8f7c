"""A policy that decides anything it may, and nothing it may not.

It is drawn from a seed, so a run with it can be repeated. From `calm_us` on it serves like fifo: the end of a test needs a
policy that wants the work done.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.policy import (
    Decision,
    Defer,
    Drop,
    LoadInstance,
    RecheckAt,
    RequestDevice,
    ResizeInstance,
    ReturnDevice,
    Slot,
    Start,
    UnloadInstance,
    View,
)
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.core.unit_blocks import find_block
from lamina.policies import fifo
from lamina.policies.defaults import ReactiveAutoscaler
from lamina.types import Call


@dataclass
class Policy:
    seed: int
    order: Order = "arrival"
    calm_us: int = 10**12
    period_us: int = 300_000
    rng: random.Random = field(init=False)
    calm: fifo.Policy = field(default_factory=fifo.Policy)
    calm_scale: ReactiveAutoscaler = field(default_factory=ReactiveAutoscaler)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def _may(self, odds: float) -> bool:
        return self.rng.random() < odds

    def admit(self, view: View, call: Call) -> Reject | None:
        return Reject(call.id, "mood") if view.now_us < self.calm_us and self._may(0.05) else None

    # ------------------------------------------------------------------- dispatch

    def dispatch(self, view: View) -> Iterator[Decision]:
        if view.now_us >= self.calm_us:
            yield from self.calm.dispatch(view)
            return
        functions = list(view.waiting.values())
        self.rng.shuffle(functions)
        for function in functions:
            if self._may(0.1):
                yield RecheckAt(view.now_us + self.rng.randint(0, 20_000))
            if self._may(0.2):
                yield Defer(
                    function.spec.name,
                    view.now_us + self.rng.randint(-5, 50_000),
                    self.rng.randint(0, 2 * function.spec.max_batch),
                )
                continue
            units = self.rng.choice((0, 0, 1, 2))
            for opening in view.slots(function, self._legal(view, function, units), self.rng.randint(0, 2)):
                yield from self._serve(view, function, opening)
            if len(function.queue) and self._may(0.05):
                yield Drop(self.rng.choice(function.queue.jobs()))
        if self._may(0.03) and view.instances:
            yield UnloadInstance(self.rng.choice(list(view.instances)))

    def _legal(self, view: View, function: FunctionState, units: int) -> int:
        """Slices of this size exist on every device the function is on; 0 otherwise, its own wish."""
        for instance in function.instances.values():
            device = view.devices[instance.device].spec
            if units > device.units or (device.limits.sizes and units not in device.limits.sizes):
                return 0
        return units

    def _serve(self, view: View, function: FunctionState, opening: Slot) -> Iterator[Decision]:
        jobs = function.queue.jobs()
        if not jobs or self._may(0.2):
            return
        if self._may(0.5):
            self.rng.shuffle(jobs)
        jobs = jobs[: self.rng.randint(1, function.spec.max_batch)]
        takes_us = view.latency_us(function.spec.name, opening.device, len(jobs), opening.units, opening.cores)
        ends_us = opening.at_us + takes_us + view.transfer_us(jobs, opening.device)
        if ends_us <= max(job.expires_us for job in jobs):
            yield Start(jobs, opening, "chance")

    # ---------------------------------------------------------------------- scale

    def scale(self, view: View) -> Iterator[Decision]:
        if view.now_us >= self.calm_us:
            yield from self.calm_scale.scale(view)
            return
        for name, function in view.functions.items():
            if self._may(0.5) or (len(function.queue) and not function.instances):
                yield from self._load(view, name, function)
        for instance in list(view.instances.values()):
            device = view.devices[instance.device]
            if self._may(0.04):
                yield UnloadInstance(instance.id)
            elif self._may(0.15):
                units = self._home_units(device, instance.id)
                if units and device.homes.get(instance.id, 0).bit_count() != units:
                    yield ResizeInstance(instance.id, units, self.rng.choice((1.0, 0.5)))
                elif instance.id in device.homes:
                    most = 1 - device.time_share_given(device.homes[instance.id], instance.id)
                    yield ResizeInstance(instance.id, instance.units, most * self.rng.choice((1.0, 0.5)))
        for device in list(view.devices.values()):
            if not device.instances and self._may(0.02):
                yield ReturnDevice(device.spec.id)
        if self._may(0.05):
            yield RequestDevice("gpu")

    def _load(self, view: View, name: str, function: FunctionState) -> Iterator[Decision]:
        spec = function.spec
        for device in self.rng.sample(list(view.devices.values()), len(view.devices)):
            if not spec.fits_family(device.spec.family):
                continue
            if device.memory_used_mib + spec.memory_mib > device.spec.memory_mib or len(device.instances) > 6:
                continue
            home = 0
            if spec.home or not device.spec.limits.per_batch or self._may(0.1):
                home = self._home_units(device, "")
                if not home and not device.spec.limits.per_batch:
                    continue
            hosts = [owner for owner, mask in device.homes.items() if device.time_share_given(mask) < 1]
            if hosts and self._may(0.4):
                beside = self.rng.choice(hosts)
                mask = device.homes[beside]
                yield LoadInstance(name, device.spec.id, mask.bit_count(), (1 - device.time_share_given(mask)) / 2, beside)
            else:
                yield LoadInstance(name, device.spec.id, home, self.rng.choice((1.0, 0.5)) if home else 1.0)
            return

    def _home_units(self, device: Device, instance: str) -> int:
        """A size for which there is still a standing slice; 0 if there is none."""
        taken = 0
        for owner, mask in device.homes.items():
            if owner != instance:
                taken |= mask
        sizes = device.spec.limits.sizes or (1, 2, 3)
        free = device.all_units & ~taken
        fitting = [n for n in sizes if find_block(free, n, device.spec.limits.aligned, device.spec.units)]
        return self.rng.choice(fitting) if fitting else 0
