"""The cluster: devices, instances on them, and batches that lease their units. Owner of all three.

- A lease starts with its batch and ends with it. A booked batch inherits the slice of the one it is behind, at the
  instant that one ends, however it ends.
- What a policy decides about them is checked here before anything changes: a policy in error leaves the state sound.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeVar

from lamina.core.actions import Action, JobRef, Kill, Load, ReleaseDevice, Resize, StartBatch, Unload
from lamina.core.giving_way import NO_PAUSES, Pauses, gives_way, retime_yielding
from lamina.core.lifecycle import DRAINING, LOADING, QUEUED, WARM
from lamina.core.policy import LoadInstance, ResizeInstance, ReturnDevice, Start, UnloadInstance, View
from lamina.core.scheduling.jobs import start
from lamina.core.scheduling.leases import Device, slice_label
from lamina.core.scheduling.queues import DispatchQueue
from lamina.core.scheduling.state import Batch, ControllerState, FunctionState, Instance
from lamina.core.token_bucket import time_share_bucket
from lamina.errors import PolicyError
from lamina.types import WHOLE_UNIT, DeviceSpec, FunctionSpec

Thing = TypeVar("Thing")


class Cluster:
    """Writer of `devices`, `instances` and `batches` of the state."""

    def __init__(self, state: ControllerState, view: View, dispatch_queue: DispatchQueue, out: list[Action]) -> None:
        self._state = state
        self._view = view
        self._dispatch_queue = dispatch_queue
        self._out = out

    # ---------------------------------------------------------------- batches

    def start_batch(self, decision: Start) -> Batch:
        jobs, slot = decision.jobs, decision.slot
        instance, device, behind = slot.instance, slot.device, slot.behind
        function = self._state.functions[instance.function]
        self._check_start(decision)
        predictor, units = self._view.predictor, slot.mask.bit_count()
        predicted_us = predictor.latency_us(function.spec.name, device.spec.kind, len(jobs), units, slot.cores)
        transfer_us = self._view.transfer_us(jobs, device) if device.spec.link_mib_per_s else 0
        if predicted_us:
            predicted_us += transfer_us
        now_us, way_us = self._view.now_us, device.way_us
        parts = function.spec.parts if function.spec.parts == WHOLE_UNIT else function.spec.parts_on(device.spec)
        soonest_us = max(now_us, slot.at_us - way_us)  # a policy that does not count the way is not in error
        if predicted_us and soonest_us + int(predicted_us * function.usual_part) > max([job.expires_us for job in jobs]):
            raise PolicyError(f"every job of this batch of {function.spec.name} would be too late")
        batch = Batch(
            self._state.next_batch_id(),
            instance,
            device,
            slot.mask,
            jobs,
            predicted_us,
            planned_start_us=slot.at_us,
            sent_us=now_us,
            ready_us=now_us + way_us,
            cores=slot.cores,
            transfer_us=transfer_us,
            early_us=int(predicted_us * (1 - function.usual_part)),
            part=parts / WHOLE_UNIT,
            gives_way=slot.gives_way,
            pauses=Pauses(is_promised=function.spec.slo.latency_us > 0) if slot.gives_way else NO_PAUSES,
        )
        if behind is not None:
            batch.book_behind(behind)
            device.expect_return(behind.id, batch.expected_end_us)
        elif batch.gives_way:
            batch.begin(now_us)
            device.lease_yielding(batch.id, batch.mask, batch.cores)
        else:
            batch.begin(now_us)
            device.lease(batch.id, batch.mask, batch.cores, parts, batch.ready_us + predicted_us)
        self._state.batches[batch.id] = batch
        instance.add_batch(batch)
        if device.yielding:
            retime_yielding(self._view, device, batch.mask)
        delay = self._dispatch_queue.dequeue(function, jobs)
        start(jobs, batch.id)
        self._out.append(
            StartBatch(
                batch.id,
                function.spec.name,
                instance.id,
                device.spec.id,
                slot.mask,
                tuple([JobRef(job.id, job.run.call.id, job.scope, job.node, job.execution_id) for job in jobs]),
                predicted_us,
                behind.id if behind is not None else 0,
                decision.why,
                slot.cores,
                transfer_us,
                delay,
                batch.part,
                batch.gives_way,
                self._overlaps(batch) if batch.gives_way or device.yielding else (),
            )
        )
        return batch

    def adopt_batch(self, batch: Batch, began_us: int) -> None:
        """What an adopted instance is at has its units as if it had been started here."""
        batch.begin(began_us)
        batch.device.lease(batch.id, batch.mask, batch.cores, end_us=batch.expected_end_us)
        self._state.batches[batch.id] = batch
        batch.instance.add_batch(batch)

    def _overlaps(self, batch: Batch) -> tuple[int, ...]:
        """Batches on units of this one that give way to it; or those to which it gives way, with what is booked behind them."""
        found = batch.device.overlapping(batch.mask, gives_way=batch.gives_way)
        if not batch.gives_way:
            return found
        followers = [self._state.batches[number].follower for number in found]
        return (*found, *[one.id for one in followers if one is not None and one.mask & batch.mask])

    def _check_start(self, decision: Start) -> None:
        jobs, slot = decision.jobs, decision.slot
        instance, device, mask, behind = slot.instance, slot.device, slot.mask, slot.behind
        name = instance.function
        function = self._state.functions[name]
        if not jobs:
            raise PolicyError("a batch needs at least one job")
        if len(jobs) > function.spec.max_batch:
            raise PolicyError(f"{name} takes {function.spec.max_batch} jobs at once, not {len(jobs)}")
        ids = {job.id for job in jobs if job.state is QUEUED and job.function == name and job.id in job.run.jobs}
        if len(ids) != len(jobs):
            raise PolicyError(f"a batch is made of waiting jobs of one function, each once; this one is for {name}")
        if instance.phase is not WARM or instance.device != device.spec.id:
            raise PolicyError(f"{instance.id} is {instance.phase.value} on {instance.device}")
        if not device.is_valid_slice(mask) or not (device.spec.limits.per_batch or mask == device.homes.get(instance.id)):
            raise PolicyError(f"{device.spec.id} has no slice {mask:b} for {instance.id}")
        own = behind is not None and behind.instance is instance
        parts = function.spec.parts if function.spec.parts == WHOLE_UNIT else function.spec.parts_on(device.spec)
        is_shared = (behind is not None and (behind.part < 1 or behind.gives_way)) or parts < WHOLE_UNIT
        limit = function.batches_at_once(device)
        if limit and not own and not instance.has_capacity(limit):
            raise PolicyError(f"{instance.id} has all the batches it may run at once")
        if slot.cores and not 0 < slot.cores <= (device.cores_free if behind is None else behind.cores):
            raise PolicyError(f"{device.spec.id} has no {slot.cores} cores to spare")
        if slot.gives_way:
            if behind is not None or not (gives_way(function, instance) or (instance.segment_us and self._view.spares_paused)):
                raise PolicyError(f"batches of {instance.id} do not give way, or not behind another")
            if mask & ~device.open_to_yielding(instance.id):
                raise PolicyError(f"{slice_label(device.spec.id, mask)} has a batch that gives way, or is reserved for another")
        elif behind is None:
            is_taken = mask & device.busy and mask & ~device.open_units(parts)
            if is_taken or (device.homes and mask & device.reserved_units(instance.id)):
                raise PolicyError(f"{slice_label(device.spec.id, mask)} is busy, or reserved for another")
        elif behind.follower is not None or behind.started_us < 0 or behind.id not in self._state.batches or is_shared:
            raise PolicyError(f"nothing can be booked behind batch {behind.id}")
        elif behind.device is not device or mask & ~behind.mask:
            raise PolicyError(f"{slice_label(device.spec.id, mask)} is not what batch {behind.id} leaves behind")

    def release_batch(self, batch: Batch) -> None:
        """End the lease of a batch; the booked batch behind it takes the slice over at once."""
        instance = batch.instance
        del self._state.batches[batch.id]
        instance.remove_batch(batch, self._view.now_us)
        self._dispatch_queue.device_changed(batch.device)
        if batch.started_us >= 0:
            batch.device.release(batch.id)
        elif batch.behind is not None:
            batch.device.expect_return(batch.behind.id, 0)
            batch.call_off()
        if batch.follower is not None:
            follower = batch.pass_on()
            follower.begin(self._view.now_us)
            follower.device.lease(follower.id, follower.mask, follower.cores, end_us=follower.expected_end_us)
            follower.instance.on_booked_batch_began()
        if batch.device.yielding:
            retime_yielding(self._view, batch.device, batch.mask)
        if instance.phase is DRAINING and not instance.batches:
            self._finish_unload(instance)

    # -------------------------------------------------------------- instances

    def on_segmented(self, instance: Instance) -> None:
        """Its batches may start where they could not."""
        self._dispatch_queue.device_changed(self._state.devices[instance.device])

    def load_instance(self, decision: LoadInstance) -> Instance:
        function = _known(self._state.functions, decision.function)
        device = _known(self._state.devices, decision.device)
        spec = function.spec
        if not spec.fits_family(device.spec.family) or not device.takes_instances:
            raise PolicyError(f"{spec.name} cannot run on {device.spec.id}: that is a {device.spec.family}, or it is leaving")
        if device.memory_used_mib + spec.memory_mib > device.spec.memory_mib:
            raise PolicyError(f"{spec.name} needs {spec.memory_mib} MiB; {device.spec.id} has no room for it")
        mask = self._shared_slice(device, decision) if decision.beside else _reserved_slice(device, decision.home_units)
        quota = _time_share(device, mask, decision.quota)
        return self.add_instance(function, device, mask, quota)

    def add_instance(self, function: FunctionState, device: Device, mask: int, quota: float, adopts: str = "") -> Instance:
        spec = function.spec
        instance = Instance(
            function.next_instance_id(),
            spec.name,
            device.spec.id,
            LOADING,
            self._view.now_us,
            spec.memory_mib,
            units=mask.bit_count() or spec.units_on(device.spec),
            quota=quota,
            bucket=time_share_bucket(quota, None, self._view.now_us),
            version=spec.version,
            is_adopted=bool(adopts),
        )
        device.add_instance(instance.id, spec.name, spec.memory_mib)
        if mask:
            device.reserve(instance.id, mask, spec.lend, quota)
        function.add_instance(instance)
        self._dispatch_queue.instance_added(function, device.spec.id)
        self._state.instances[instance.id] = instance
        self._out.append(Load(instance.id, spec.name, device.spec.id, mask, quota, adopts))
        return instance

    def _shared_slice(self, device: Device, decision: LoadInstance) -> int:
        """The reserved slice of another instance, to be used in turns."""
        mask = device.homes.get(decision.beside, 0)
        if not mask or mask.bit_count() != decision.home_units:
            raise PolicyError(f"{decision.beside!r} has no standing slice of {decision.home_units} units on {device.spec.id}")
        return mask

    def unload_instance(self, decision: UnloadInstance) -> None:
        instance = _known(self._state.instances, decision.instance)
        if not instance.batches:
            self._finish_unload(instance)
        elif instance.phase is WARM:
            instance.move("drain")
            self._state.functions[instance.function].on_instance_moved()

    def on_ready(self, instance: Instance) -> None:
        """It has been loaded, and takes batches from now on."""
        function = self._state.functions[instance.function]
        instance.move("ready")
        function.on_instance_moved()
        self._dispatch_queue.instance_ready(function, self._state.devices[instance.device])

    def redeploy_instance(self, instance: Instance, spec: FunctionSpec) -> None:
        """Put an instance under a new spec of its function: the terms of its home, or the units its batches ask for."""
        device = self._state.devices[instance.device]
        if instance.id in device.homes:
            device.reserve(instance.id, device.homes[instance.id], spec.lend, instance.quota)
        else:
            instance.resize(spec.units_on(device.spec), instance.quota, instance.bucket)
        self._dispatch_queue.device_changed(device)

    def resize_instance(self, decision: ResizeInstance) -> None:
        instance = _known(self._state.instances, decision.instance)
        device = self._state.devices[instance.device]
        spec = self._state.functions[instance.function].spec
        now = device.homes.get(instance.id, 0)
        stays = now.bit_count() == decision.home_units
        if stays and decision.quota == instance.quota:
            return
        mask = now if stays else _reserved_slice(device, decision.home_units, (instance.id,))
        quota = _time_share(device, mask, decision.quota, instance.id)
        bucket = time_share_bucket(quota, instance.bucket, self._view.now_us)
        if mask:
            device.reserve(instance.id, mask, spec.lend, quota)
        else:
            device.unreserve(instance.id)
        instance.resize(mask.bit_count() or spec.units_on(device.spec), quota, bucket)
        self._dispatch_queue.device_changed(device)
        self._out.append(Resize(instance.id, mask, quota))

    def kill_instance(self, instance: Instance, reason: str) -> None:
        """Request its forced end, once; until its loss is reported it gets nothing more to do."""
        if not instance.killed:
            instance.kill()
            self._state.functions[instance.function].on_instance_moved()
            self._dispatch_queue.needs_instance(instance.function)
            self._out.append(Kill(instance.id, reason))

    def remove_lost(self, instances: list[Instance]) -> tuple[list[Batch], list[Batch]]:
        """Remove lost instances, all at once; returns the batches begun on them and those only booked."""
        for instance in instances:
            instance.move("lost")
        batches = [batch for instance in instances for batch in instance.batches.values()]
        booked = [batch for batch in batches if batch.started_us < 0]
        begun = [batch for batch in batches if batch.started_us >= 0]
        for batch in (*booked, *begun):  # booked first: they must not be begun
            self.release_batch(batch)
        for instance in instances:
            self._remove_instance(instance)
        return begun, booked

    def _finish_unload(self, instance: Instance) -> None:
        """Unload a drained or idle instance."""
        instance.move("unload")
        self._remove_instance(instance)
        self._out.append(Unload(instance.id))

    def _remove_instance(self, instance: Instance) -> None:
        device = self._state.devices[instance.device]
        function = self._state.functions[instance.function]
        self._dispatch_queue.device_changed(device)  # its memory and its home are free for others
        device.remove_instance(instance.id, instance.memory_mib)
        function.remove_instance(instance)
        self._dispatch_queue.instance_removed(function, device.spec.id)
        del self._state.instances[instance.id]
        if len(function.queue) and not function.instances:
            self._dispatch_queue.needs_instance(function.spec.name)

    # ---------------------------------------------------------------- devices

    def add_device(self, spec: DeviceSpec) -> None:
        """A device has joined: functions without an instance may have room now."""
        self._state.devices[spec.id] = Device(spec)
        self._dispatch_queue.needs_instance(*self._state.functions)

    def remove_device(self, device: Device) -> None:
        """A lost device, whose instances have been removed."""
        del self._state.devices[device.spec.id]
        self._dispatch_queue.device_removed(device.spec.id)
        self._dispatch_queue.needs_instance(*self._state.functions)

    def release_device(self, decision: ReturnDevice) -> None:
        device = _known(self._state.devices, decision.device)
        if device.instances:
            raise PolicyError(f"{decision.device} is not empty")
        del self._state.devices[decision.device]
        self._dispatch_queue.device_removed(decision.device)
        self._out.append(ReleaseDevice(decision.device))


def _known(those: dict[str, Thing], name: str) -> Thing:
    if name not in those:
        raise PolicyError(f"there is no {name!r}")
    return those[name]


def _time_share(device: Device, mask: int, quota: float, instead_of: str = "") -> float:
    """Share of the time on a reserved slice; 1 without one."""
    if not mask:
        return 1.0
    if not 0 < quota <= 1 or device.time_share_given(mask, instead_of) + quota > 1 + 1e-9:
        raise PolicyError(f"{quota:g} of the time on {slice_label(device.spec.id, mask)} is more than there is left")
    return quota


def _reserved_slice(device: Device, units: int, instead_of: Container[str] = ()) -> int:
    """A block to reserve as a standing slice, 0 if none is wanted."""
    if not units:
        return 0
    mask = device.unreserved_block(units, instead_of) if units > 0 else 0
    if not device.is_valid_slice(mask):
        raise PolicyError(f"{device.spec.id} has no {units} units left for a standing slice")
    return mask
