"""KNIX with a GPU manager: a function has the share of a GPU that the user asks for, for ever.

The shares of all functions of a workflow are summed up, and the workflow goes onto one device that has as much. Whether
there is one is checked *before* anything is deployed: what cannot be placed is refused with what is missing and the best
that could be had, instead of waiting for ever or being cut down in silence.

`elastic` is the soft limit of the GPU manager: a batch may use more than its share, up to `limit`, out of what is idle and
what its owners do not want at this moment. Lending is for one batch, so an owner waits no longer than that; and what an owner
with an SLO would wait too long for is not lent (`planner/blocking.py`; the original lends it).

A share is lost with its device. Its function is then placed alone if its workflow does not fit any more; if it does not
either, it runs on what is free or lent, and what finds no place for `patience_us` is given up.

Source: KNIX MicroFunctions, its GPU branch, and HiPS '21; placement as its GPU manager does it (the device with least room
that fits). Repaired here: sums are checked against what is free on single devices, compute as well as memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, Decision, Defer, Drop, LoadInstance, ResizeInstance, Slot, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.unit_blocks import find_block
from lamina.core.workflow.flow import Flow
from lamina.errors import NoCapacity
from lamina.planner.blocking import BlockingRule
from lamina.published.knix.share_placement import FreeSpace, FunctionGroup, PlacementStrategy, free_space, place_most
from lamina.published.reserved_slices import fill_slice, idle_own_slices
from lamina.types import NEVER_US, Call, FunctionSpec


@dataclass(frozen=True, slots=True)
class Policy:
    """Standing shares sized by the user, checked before deployment; what is idle may be lent."""

    elastic: bool = True  #: may a batch use more than its share?
    limit: float = 1.0  #: of a device, for one elastic batch
    placement: PlacementStrategy = "binpack"
    patience_us: int = 60_000_000  #: how long work waits for a place when its share has been lost
    period_us: int = 1_000_000
    order: Order = "arrival"
    _blocking: BlockingRule = field(default_factory=BlockingRule, init=False)

    def admit(self, view: View, call: Call) -> Admitted | Reject | None:
        """What no device could ever run is not kept waiting."""
        for name in view.flows[call.target].functions:
            function = view.functions[name]
            if not function.instances and not view.can_host(function):
                return Reject(call.id, "no-capacity")
        return None

    def deploy(self, view: View, functions: tuple[FunctionSpec, ...], flows: tuple[Flow, ...]) -> None:
        """NoCapacity if what is new, with all that was promised before, does not fit.

        What asks for nothing new is not refused, though a device may have been lost since and it has no place now.
        """
        known = {name: function.spec for name, function in view.functions.items()}
        asking = {
            spec.name
            for spec in functions
            if spec.name not in known or _requested_share(spec) != _requested_share(known[spec.name])
        }
        if not asking:
            return
        after = self._lacking(view, known | {spec.name: spec for spec in functions}, flows, asking)
        before = self._lacking(view, known, (), set()) if after else {}
        for name, refusal in after.items():
            if name in asking or name not in before:
                raise refusal

    def _lacking(
        self, view: View, specs: dict[str, FunctionSpec], flows: tuple[Flow, ...], changed: set[str]
    ) -> dict[str, NoCapacity]:
        """Functions without a place, were these deployed."""
        rooms, standing = self._rooms(view, changed)
        known = {flow.name: flow for flow in (*view.flows.values(), *flows)}
        return place_most(_groups(specs, known, standing), rooms, self.placement)[1]

    def _rooms(self, view: View, changed: set[str]) -> tuple[dict[str, FreeSpace], set[str]]:
        """Free space and shares in use; without functions that are about to change or have lost their share."""
        owners = [one for one in view.instances.values() if one.id in view.devices[one.device].homes]
        gone = [one for one in view.instances.values() if one.function in changed or one not in owners]
        rooms = {name: free_space(device, [one.id for one in gone]) for name, device in view.devices.items()}
        for instance in gone:
            rooms[instance.device].memory_mib += instance.memory_mib
        return rooms, {one.function for one in owners} - changed

    def scale(self, view: View) -> Iterator[Decision]:
        for function in view.functions.values():
            for instance in list(function.instances.values()):
                yield from self._right_size(view, function, instance)
        specs = {name: function.spec for name, function in view.functions.items()}
        rooms, standing = self._rooms(view, set())
        groups = _groups(specs, view.flows, standing)
        places, lacking = place_most(groups, rooms, self.placement)
        if lacking:  # it was there when this was deployed, and has been lost since: each for itself, as far as it goes
            alone = [FunctionGroup(name, (specs[name],)) for name in lacking]
            places |= place_most(alone, rooms, "mixed")[0]
        for name, device in places.items():
            yield from self._settle(view, view.functions[name], view.devices[device])
        for name in lacking:
            if name not in places:
                yield from self._host(view, view.functions[name])

    def _settle(self, view: View, function: FunctionState, device: Device) -> Iterator[Decision]:
        """Give it its share, and end its time as a guest. Guests are not counted in the plan, so they may be in the way."""
        spec = function.spec
        if view.now_us < function.load_not_before_us:
            return
        guests = [view.instances[one] for one in device.instances if one not in device.homes]
        for guest in sorted(guests, key=lambda one: (one.function != spec.name, one.id)):
            if guest.function != spec.name and device.memory_used_mib + spec.memory_mib <= device.spec.memory_mib:
                break
            yield UnloadInstance(guest.id)
        if device.memory_used_mib + spec.memory_mib <= device.spec.memory_mib and device.unreserved_block(
            spec.units_on(device.spec)
        ):
            for guest in [one for one in function.instances.values() if one.id not in view.devices[one.device].homes]:
                yield UnloadInstance(guest.id)
            yield LoadInstance(spec.name, device.spec.id, spec.units_on(device.spec))

    def _host(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """Host a function that has lost its share and has work on free or lent units; without work there is nothing to host."""
        spec = function.spec
        if not len(function.queue):
            for guest in [one for one in function.instances.values() if not one.batches]:
                yield UnloadInstance(guest.id)
        elif not function.instances and view.now_us >= function.load_not_before_us:
            able = [device for device in view.devices.values() if self._takes_guest(spec, device)]
            if able:
                device = max(able, key=lambda device: device.unreserved_block(spec.units_on(device.spec)) != 0)
                yield LoadInstance(spec.name, device.spec.id)

    def _takes_guest(self, spec: FunctionSpec, device: Device) -> bool:
        able = spec.fits_family(device.spec.family) and device.spec.limits.per_batch
        able = able and device.memory_used_mib + spec.memory_mib <= device.spec.memory_mib
        return able and device.unreserved_block(spec.units_on(device.spec), borrow=self.elastic) != 0

    def _right_size(self, view: View, function: FunctionState, instance: Instance) -> Iterator[Decision]:
        """A new version may ask for another share: where it stands if there is room, else somewhere else."""
        device, spec = view.devices[instance.device], function.spec
        want = spec.units_on(device.spec)
        if instance.phase is InstancePhase.DRAINING:
            return
        if not spec.fits_family(device.spec.family):
            yield UnloadInstance(instance.id)
        elif instance.id not in device.homes:
            if not device.unreserved_block(want, borrow=self.elastic):
                yield UnloadInstance(instance.id)  # shares given since leave no place for it
        elif instance.units != want:
            yield (
                ResizeInstance(instance.id, want)
                if device.unreserved_block(want, (instance.id,))
                else UnloadInstance(instance.id)
            )

    def dispatch(self, view: View) -> Iterator[Decision]:
        for function in sorted(view.waiting.values(), key=lambda f: (f.queue.head().enqueued_us, f.queue.head().id)):
            yield from self._give_up(view, function)
            if not len(function.queue):
                continue
            for opening in self._slots(view, function):
                yield from fill_slice(view, function, opening)
                if function.spec.name not in view.waiting:
                    break
            else:
                until_us = view.next_slot_us(function)
                if not function.instances:
                    until_us = max(function.queue.head().enqueued_us + self.patience_us + 1, function.load_not_before_us)
                yield Defer(function.spec.name, until_us, NEVER_US)

    def _give_up(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """Work that was accepted for a share that has been lost, and for which no other place has been found for long."""
        while len(function.queue) and not function.instances and view.now_us >= function.load_not_before_us:
            job = function.queue.head()
            if view.now_us - job.enqueued_us <= self.patience_us:
                return
            yield Drop(job, "no-capacity")

    def _slots(self, view: View, function: FunctionState) -> Iterator[Slot]:
        """Its own slice, grown by what is idle around it; then, own slice busy, what others lend."""
        if function.bucket and function.bucket.ready_at_us(view.now_us) > view.now_us:
            return
        for own in idle_own_slices(view, function):
            yield self._grown_slice(view, function, own) if self.elastic else own
        for instance in list(function.instances.values()):
            device = view.devices[instance.device]
            if instance.phase is not InstancePhase.WARM or not instance.has_capacity(function.batches_at_once(device)):
                continue
            borrowed = None
            if instance.id not in device.homes:
                borrowed = self._slots_unplaced(view, function, instance)
            elif self.elastic:
                borrowed = self._lent_slice(view, function, instance, instance.units)
            if borrowed is not None:
                yield borrowed

    def _slots_unplaced(self, view: View, function: FunctionState, instance: Instance) -> Slot | None:
        device = view.devices[instance.device]
        cores = function.spec.cores_on(device.spec)
        kept = view.reserved_units(instance, device) if self.elastic else device.reserved_units(instance.id, lent=True)
        mask = device.find_slice(instance.id, instance.units, kept) if cores <= device.cores_free else 0
        may = 0 < mask.bit_count() <= view.max_units_by_bandwidth(function, device)
        return Slot(instance, device, mask, None, view.reach_us(device), cores) if may else None

    def _grown_slice(self, view: View, function: FunctionState, own: Slot) -> Slot:
        """The largest slice there is for it, if that is any faster."""
        larger = self._lent_slice(view, function, own.instance, own.units + 1)
        if larger is None:
            return own
        own_us, larger_us = (view.latency_us(function.spec.name, own.device, 1, o.units, o.cores) for o in (own, larger))
        return larger if larger_us < own_us else own

    def _lent_slice(self, view: View, function: FunctionState, instance: Instance, least: int) -> Slot | None:
        """The largest block of at least so many units that is idle and not wanted by its owners."""
        device = view.devices[instance.device]
        limits = device.spec.limits
        cores = function.spec.cores_on(device.spec) if device.spec.cores else 0
        if not limits.per_batch or cores > device.cores_free:
            return None
        free = device.all_units & ~device.busy & ~view.reserved_units(instance, device)
        free &= ~self._kept_units(view, function, device, free, least)
        most = min(round(self.limit * device.spec.units), free.bit_count(), view.max_units_by_bandwidth(function, device))
        for units in range(most, least - 1, -1):
            mask = find_block(free, units, limits.aligned, device.spec.units)
            if mask and device.is_valid_slice(mask):
                return Slot(instance, device, mask, None, view.reach_us(device), cores)
        return None

    def _kept_units(self, view: View, function: FunctionState, device: Device, free: int, units: int) -> int:
        """Units that owners need within their SLO, for as long as a batch would borrow them."""
        time_us = view.latency_us(function.spec.name, device, 1, units, function.spec.cores_on(device.spec))
        if not time_us or len(device.instances) < 2:
            return 0
        return self._blocking.kept_units(view, function, device, free, view.now_us, time_us + device.way_us)


def _requested_share(spec: FunctionSpec) -> tuple[str, float, int, int]:
    """What it asks of a device."""
    return spec.gpu, spec.share, spec.cores, spec.memory_mib


def _groups(specs: dict[str, FunctionSpec], flows: Mapping[str, Flow], standing: set[str]) -> list[FunctionGroup]:
    """What is to be placed, each function once: with the first workflow that uses it, else alone."""
    groups: list[FunctionGroup] = []
    todo = {name: spec for name, spec in specs.items() if name not in standing}
    for flow in sorted(flows.values(), key=lambda flow: flow.sole_task is not None):
        members = tuple(todo.pop(name) for name in flow.functions if name in todo)
        if members:
            groups.append(FunctionGroup(flow.name, members))
    return groups + [FunctionGroup(name, (spec,)) for name, spec in todo.items()]
