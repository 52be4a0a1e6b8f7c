"""Candidate placements of every workflow, with latency and cost. Worked out when asked for, and anew as predictions move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.published.admission.placements import DevicePlacement, WorkflowShape, enumerate_placements
from lamina.published.admission.reservation_table import ReservedSlot
from lamina.published.admission.run_reservation import batch_us, price_per_us
from lamina.types import DeviceSpec, FunctionSpec


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
