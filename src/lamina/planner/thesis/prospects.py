"""Candidate placements of every workflow, with latency and cost. Worked out when asked for, and anew as predictions move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lamina.core.flow import Flow
from lamina.core.policy import View
from lamina.core.state import FunctionState
from lamina.planner.thesis.booking import batch_us, price
from lamina.planner.thesis.placements import Placement, Shape, placements
from lamina.planner.thesis.reservations import Slot
from lamina.types import DeviceSpec, FunctionSpec


@dataclass(slots=True)
class Prospects:
    suits: Callable[[FunctionSpec, DeviceSpec], bool]  #: may it be booked there at all?
    most: int  #: placements of one workflow
    _shapes: dict[str, Shape] = field(default_factory=dict)
    _known: dict[str, list[Placement]] = field(default_factory=dict)
    _costs: dict[tuple[str, str], float] = field(default_factory=dict)  #: (function, kind) -> one job alone

    def forget(self) -> None:
        self._known.clear()

    def shape(self, flow: Flow) -> Shape:
        shape = self._shapes.get(flow.name)
        if shape is None or shape.flow is not flow:
            shape = self._shapes[flow.name] = Shape(flow)
            self._known.pop(flow.name, None)
        return shape

    def of(self, view: View, flow: Flow) -> list[Placement]:
        shape = self.shape(flow)
        if flow.name not in self._known:
            options = {name: self._options(view, view.functions[name]) for name in flow.functions}
            self._known[flow.name] = placements(shape, options, self.most)
        return self._known[flow.name]

    def affordable(self, view: View, flow: Flow, able: list[Placement], limit: float, waiting: Iterable[Slot]) -> list[Placement]:
        """Those that could keep to the limit: alone, or by joining batches that wait with room."""
        if not any(placement.cost > limit for placement in able):
            return able
        rooms = set()
        for slot in waiting:
            if not slot.batch_id and len(slot.members) < view.functions[slot.function].spec.max_batch:
                rooms.add((slot.function, view.devices[slot.device].spec.kind))
        shape = self.shape(flow)

        def least(placement: Placement) -> float:
            return shape.cost(
                lambda name: 0.0 if (name, placement.kinds[name]) in rooms else self._costs[name, placement.kinds[name]]
            )

        return [placement for placement in able if placement.cost <= limit or (rooms and least(placement) <= limit)]

    def _options(self, view: View, function: FunctionState) -> dict[str, tuple[int, float]]:
        found: dict[str, tuple[int, float]] = {}
        for device in view.devices.values():
            if self.suits(function.spec, device.spec):
                took_us = batch_us(view, function, device, 1)
                found.setdefault(device.spec.kind, (took_us, took_us * price(function, device)))
                self._costs[function.spec.name, device.spec.kind] = found[device.spec.kind][1]
        return found
