"""Reservation of one run, step by step, in the reservation table: where and when each of its jobs will run.

`reserve` follows the order of the workflow. Each job takes the place of its function's kind of device that is ready first;
if a batch that waits for its turn has room and leaves enough time for the rest, the job joins that instead, for a batch is
cheaper than two. What is booked is undone if the whole does not keep to its limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Each, Task, Wait
from lamina.published.admission.placements import GRACE_US, DevicePlacement, WorkflowShape, batch_us, price_per_us
from lamina.published.admission.reservation_table import MAX_DELAY_US, ReservationTable, ReservedSlot, expected_end_us
from lamina.types import NEVER_US


@dataclass(slots=True)
class ReservationContext:
    """What a reservation needs to know: when an instance could serve on a device, and how many batches at once."""

    view: View
    table: ReservationTable
    fits: Callable[[FunctionState, Device], bool]  #: could it be loaded there now?

    def ready_us(self, function: FunctionState, device: Device) -> int:
        """When an instance there can begin, -1 if none ever can."""
        soonest_us = -1
        for instance in function.instances.values():
            if instance.device != device.spec.id or instance.phase not in (InstancePhase.WARM, InstancePhase.LOADING):
                continue
            at_us = self.view.now_us
            if instance.phase is InstancePhase.LOADING:
                ready_us = instance.created_us + self.view.predictor.load_us(function.spec.name, device.spec.kind)
                at_us = ready_us if ready_us > at_us else expected_end_us(instance.created_us, at_us)
            soonest_us = at_us if soonest_us < 0 else min(soonest_us, at_us)
        if soonest_us < 0 and self.view.now_us >= function.load_not_before_us and self.fits(function, device):
            return self.view.now_us + self.view.predictor.load_us(function.spec.name, device.spec.kind)
        return soonest_us

    def max_concurrent(self, function: FunctionState, device: Device) -> int:
        """Batches of it that may run at once there; 0: as many as there is room for."""
        limit = function.batches_at_once(device)
        return limit * max(1, sum(one.device == device.spec.id for one in function.instances.values()))

    def earliest(
        self, function: FunctionState, device: Device, ready_us: int, by_us: int, length_us: int = 0
    ) -> ReservedSlot | None:
        """The soonest place for one job there."""
        at_us = self.ready_us(function, device)
        if at_us < 0:
            return None
        length_us = length_us or batch_us(self.view, function, device, 1)
        units, cores = function.spec.units_on(device.spec), function.spec.cores_on(device.spec)
        start_us, mask = self.table.earliest(
            device.spec,
            units,
            max(ready_us, at_us),
            length_us,
            function=function.spec.name,
            lanes=self.max_concurrent(function, device),
            cores=cores,
            by_us=by_us,
        )
        return ReservedSlot(function.spec.name, device.spec.id, mask, start_us, start_us + length_us, cores) if mask else None


@dataclass(slots=True)
class RunReservation:
    """A run as it is being booked; `undo` takes everything back."""

    grounds: ReservationContext
    placement: DevicePlacement
    call: str
    deadline_us: int
    batching: bool = True
    spare: float = 0.0  #: part of the time left that is kept between a step and the next, so that its batch can grow
    slots: dict[str, list[ReservedSlot]] = field(default_factory=dict)  #: function -> its jobs, in the order of the walk
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _last: list[tuple[ReservedSlot, int]] = field(default_factory=list)  #: what each slot must end by

    def reserve(self, shape: WorkflowShape, limit: float) -> tuple[int, float] | None:
        """(finish, cost) if all of it is in time and within the limit, else None, and nothing is booked."""
        done = self._walk(shape, self.grounds.view.now_us, self.deadline_us, 0, sure=True)
        if done is None or done[0] > self.deadline_us or (limit and done[1] > limit * (1 + 1e-9)):
            self.undo()
            return None
        for slot, latest_us in self._last:
            slot.latest_us = min(slot.latest_us, latest_us)
        return done[0], done[1]

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.slots = {}

    def _walk(
        self, shape: WorkflowShape, now_us: int, deadline_us: int, after_us: int, *, sure: bool
    ) -> tuple[int, float] | None:
        """One flow or body that starts now, for `sure` or perhaps; `after_us` is the least time that comes behind it."""
        nodes, ways = shape.flow.nodes, shape.net.branches
        ready = dict.fromkeys(shape.flow.start, now_us)
        begun: dict[str, int] = {}
        own: dict[str, list[ReservedSlot]] = {}
        costs: dict[str, float] = {}
        finish_us = now_us
        certain = shape.certain if sure else frozenset()
        for name in shape.net.topological_order:
            if name not in ready:
                continue
            node, at_us = nodes[name], ready[name]
            tail_us = self.placement.tails[shape.path][name] + after_us
            if isinstance(node, Task):
                slot = self._slot(node.function, at_us, deadline_us - tail_us)
                if slot is None:
                    return None
                self._join_slot(slot, name in certain)
                at_us, begun[name], own[name] = slot.end_us, slot.start_us, [slot]
                costs[name] = self._max_share(slot, name in certain)
            elif isinstance(node, Wait):
                at_us += node.duration_us
            elif name in shape.bodies:
                costs[name] = 0.0
                first = len(self._last)
                for body in shape.bodies[name]:
                    always = name in certain and not isinstance(node, Each)  # there may be fewer items
                    item = self._walk(body, at_us, deadline_us, tail_us, sure=always)
                    if item is None:
                        return None
                    costs[name] += item[1]
                own[name] = [slot for slot, _ in self._last[first:]]
                begun[name] = min((slot.start_us for slot in own[name]), default=at_us)
                at_us = max((slot.end_us for slot in own[name]), default=at_us)
            finish_us = max(finish_us, at_us)
            if name in own and self.spare:
                at_us += min(MAX_DELAY_US, int(self.spare * max(0, deadline_us - tail_us - at_us)))
            for way in ways[name]:
                for follower in way:
                    ready[follower] = max(ready.get(follower, 0), at_us)
        self._bounds(shape, begun, own, deadline_us - after_us)
        return finish_us, shape.max_cost(costs)

    def _bounds(self, shape: WorkflowShape, begun: dict[str, int], own: dict[str, list[ReservedSlot]], end_us: int) -> None:
        """Until when each job may last: until what follows it begins."""
        latest: dict[str, int] = {}
        for name in reversed(shape.net.topological_order):
            followers = [follower for way in shape.net.branches[name] for follower in way]
            latest[name] = min((begun.get(one, latest.get(one, end_us)) for one in followers), default=end_us)
            self._last += [(slot, latest[name]) for slot in own.get(name, ())]

    def _slot(self, name: str, ready_us: int, by_us: int) -> ReservedSlot | None:
        view, table = self.grounds.view, self.grounds.table
        function = view.functions[name]
        kind = self.placement.kinds[name]
        hosts = [device for device in view.devices.values() if device.spec.kind == kind]
        if self.batching and by_us < NEVER_US // 2:
            for device in hosts:
                for slot in table.slots_on(device.spec.id):
                    if slot.function == name and slot.start_us >= ready_us and self._join(function, device, slot, by_us):
                        return slot
        found = [self.grounds.earliest(function, device, ready_us, by_us) for device in hosts]
        best = min((slot for slot in found if slot is not None), key=lambda slot: (slot.end_us, slot.start_us), default=None)
        if best is None:
            return None
        table.add(best)
        self._undo.append(lambda: table.remove(best))
        return best

    def _join(self, function: FunctionState, device: Device, slot: ReservedSlot, by_us: int) -> bool:
        count = len(slot.members)
        if slot.batch_id or not 0 < count < function.spec.max_batch:
            return False
        view, table = self.grounds.view, self.grounds.table
        longer_us = batch_us(view, function, device, count + 1)
        end_us, before_us = slot.start_us + longer_us, slot.end_us
        dearer = longer_us * count > (before_us - slot.start_us) * (count + 1)  # never at the expense of those in it
        if dearer or end_us > min(by_us, slot.latest_us) or not table.fits(device.spec, slot, slot.start_us, end_us):
            return False
        bounds = [latest_us for other, latest_us in self._last if other is slot]
        if (self.call in slot.members and not bounds) or min(bounds, default=end_us) < end_us:
            return False  # what follows it in this very run may be booked already

        def leave() -> None:
            slot.end_us = before_us

        slot.end_us = end_us
        self._undo.append(leave)
        return True

    def _join_slot(self, slot: ReservedSlot, sure: bool) -> None:
        slot.members.append(self.call)
        self._undo.append(lambda: slot.members.remove(self.call))
        if not sure:
            slot.uncertain.append(self.call)
            self._undo.append(lambda: slot.uncertain.remove(self.call))
        self.slots.setdefault(slot.function, []).append(slot)

    def _max_share(self, slot: ReservedSlot, sure: bool) -> float:
        """What it will pay at most: shared only with jobs that are certain to come."""
        function = self.grounds.view.functions[slot.function]
        device = self.grounds.view.devices[slot.device]
        company = len(slot.members) - len(slot.uncertain) + (not sure)
        took_us = batch_us(self.grounds.view, function, device, company) - device.way_us - GRACE_US
        return took_us * price_per_us(function, device) / company
