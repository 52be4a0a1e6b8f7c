"""KNIX with a GPU manager: the user says which share of a GPU a function gets, and it has it for ever.

The shares of all functions of a workflow are summed up, and the workflow goes onto one device that has as much. Whether
there is one is checked *before* anything is deployed: what cannot be placed is refused with what is missing and the best
that could be had, instead of waiting for ever or being cut down in silence.

`elastic` is the soft limit of the GPU manager: a batch may use more than its share, up to `limit`, out of what is idle and
what its owners do not want at this moment. Lending is for one batch, so an owner waits no longer than that.

Source: KNIX MicroFunctions, its GPU branch, and HiPS '21; placement as its GPU manager does it (the device with least room
that fits). Repaired here: sums are checked against what is free on single devices, compute as well as memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lamina.core.flow import Flow
from lamina.core.lease import find_run
from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, Hold, LoadOn, Opening, ResizeTo, UnloadOf, View
from lamina.core.queue import Order
from lamina.core.state import FunctionState, Instance
from lamina.errors import NoCapacity
from lamina.planner.pods import fill, own_slices
from lamina.planner.shares import Group, Placement, place, room_on
from lamina.types import NEVER_US, FunctionSpec


@dataclass(frozen=True, slots=True)
class Policy:
    """Standing shares sized by the user, checked before deployment; what is idle may be lent."""

    elastic: bool = True  #: may a batch use more than its share?
    limit: float = 1.0  #: of a device, for one elastic batch
    placement: Placement = "binpack"
    period_us: int = 1_000_000
    order: Order = "arrival"

    def deploy(self, view: View, functions: tuple[FunctionSpec, ...], flows: tuple[Flow, ...]) -> None:
        """NoCapacity if what is new, with all that was promised before, does not fit."""
        specs = {name: function.spec for name, function in view.functions.items()} | {spec.name: spec for spec in functions}
        changed = {spec.name for spec in functions}
        gone = [i.id for i in view.instances.values() if i.function in changed]
        standing = {i.function for i in view.instances.values()} - changed
        rooms = {name: room_on(device, gone) for name, device in view.devices.items()}
        for instance in (view.instances[name] for name in gone):
            rooms[instance.device].memory_mib += instance.memory_mib
        known = {flow.name: flow for flow in (*view.flows.values(), *flows)}
        place(_groups(specs, known, standing), rooms, self.placement)

    def scale(self, view: View) -> Iterator[Decision]:
        for function in view.functions.values():
            for instance in function.instances.values():
                yield from self._right_size(view, function, instance)
        specs = {name: function.spec for name, function in view.functions.items()}
        standing = {i.function for i in view.instances.values()}
        rooms = {name: room_on(device) for name, device in view.devices.items()}
        for group in _groups(specs, view.flows, standing):
            try:
                places = place([group], rooms, self.placement)
            except NoCapacity:
                continue  # it was there when this was deployed; a device has been lost since
            for name, device in places.items():
                function = view.functions[name]
                if view.now_us >= function.not_before_us:
                    yield LoadOn(name, device, function.spec.units_on(view.devices[device].spec))

    def _right_size(self, view: View, function: FunctionState, instance: Instance) -> Iterator[Decision]:
        """A new version may ask for another share: where it stands if there is room, else somewhere else."""
        device = view.devices[instance.device]
        want = function.spec.units_on(device.spec)
        if instance.units == want or instance.phase is Phase.DRAINING:
            return
        if device.spare(want, (instance.id,)):
            yield ResizeTo(instance.id, want)
        else:
            yield UnloadOf(instance.id)

    def dispatch(self, view: View) -> Iterator[Decision]:
        for function in sorted(view.waiting.values(), key=lambda f: (f.queue.head().enqueued_us, f.queue.head().id)):
            for opening in self._openings(view, function):
                yield from fill(view, function, opening)
                if function.spec.name not in view.waiting:
                    break
            else:
                yield Hold(function.spec.name, view.no_opening_until_us(function), NEVER_US)

    def _openings(self, view: View, function: FunctionState) -> Iterator[Opening]:
        """Its own slice, grown by what is idle around it; then, own slice busy, what others lend."""
        if function.bucket and function.bucket.ready_us(view.now_us) > view.now_us:
            return
        for own in own_slices(view, function):
            yield self._grown(view, function, own) if self.elastic else own
        if self.elastic:
            for instance in function.instances.values():
                if instance.phase is Phase.WARM and instance.has_room(function.batches_at_once(view.devices[instance.device])):
                    borrowed = self._borrowed(view, function, instance, instance.units)
                    if borrowed is not None:
                        yield borrowed

    def _grown(self, view: View, function: FunctionState, own: Opening) -> Opening:
        """The largest slice there is for it, if that is any faster."""
        larger = self._borrowed(view, function, own.instance, own.units + 1)
        if larger is None:
            return own
        own_us, larger_us = (view.latency_us(function.spec.name, own.device, 1, o.units, o.cores) for o in (own, larger))
        return larger if larger_us < own_us else own

    def _borrowed(self, view: View, function: FunctionState, instance: Instance, least: int) -> Opening | None:
        """The largest block of at least so many units that is idle and wanted by nobody it belongs to."""
        device = view.devices[instance.device]
        limits = device.spec.limits
        cores = function.spec.cores_on(device.spec) if device.spec.cores else 0
        if not limits.per_batch or cores > device.cores_free:
            return None
        free = device.everything & ~device.busy & ~view.kept_from(instance, device)
        most = min(round(self.limit * device.spec.units), free.bit_count())
        for units in range(most, least - 1, -1):
            mask = find_run(free, units, limits.aligned, device.spec.units)
            if mask and device.allows(mask):
                return Opening(instance, device, mask, None, view.now_us, cores)
        return None


def _groups(specs: dict[str, FunctionSpec], flows: dict[str, Flow], standing: set[str]) -> list[Group]:
    """What is to be placed, each function once: with the first workflow that uses it, else alone."""
    groups: list[Group] = []
    todo = {name: spec for name, spec in specs.items() if name not in standing}
    for flow in sorted(flows.values(), key=lambda flow: flow.single is not None):
        members = tuple(todo.pop(name) for name in flow.functions if name in todo)
        if members:
            groups.append(Group(flow.name, members))
    return groups + [Group(name, (spec,)) for name, spec in todo.items()]
