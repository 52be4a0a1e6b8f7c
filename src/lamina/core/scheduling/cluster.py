"""The cluster: devices, instances on them, and batches that lease their units. Owner of all three.

- A lease starts with its batch and ends with it. A booked batch inherits the slice of the one it is behind, at the
  instant that one ends, however it ends.
- What a policy decides about them is checked here before anything changes: a policy in error leaves the state sound.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeVar

from lamina.core.actions import Action, JobRef, Kill, Load, ReleaseDevice, Resize, StartBatch, Unload
from lamina.core.lifecycle import InstancePhase, next_phase
from lamina.core.policy import LoadInstance, ResizeInstance, ReturnDevice, Start, UnloadInstance, View
from lamina.core.scheduling.dispatch_queue import DispatchQueue
from lamina.core.scheduling.leases import Device, slice_label
from lamina.core.scheduling.state import Batch, ControllerState, Instance
from lamina.core.scheduling.token_bucket import time_share_bucket
from lamina.errors import PolicyError

Thing = TypeVar("Thing")


class Cluster:
    def __init__(self, state: ControllerState, view: View, lines: DispatchQueue, out: list[Action]) -> None:
        self._state = state
        self._view = view
        self._dispatch_queue = lines
        self._out = out

    # ---------------------------------------------------------------- batches

    def start_batch(self, decision: Start) -> Batch:
        jobs, opening = decision.jobs, decision.slot
        instance, device, after = opening.instance, opening.device, opening.behind
        function = self._state.functions[instance.function]
        self._check_start(decision)
        predicted_us = self._view.latency_us(function.spec.name, device, len(jobs), opening.units, opening.cores)
        transfer_us = self._view.transfer_us(jobs, device)
        if predicted_us:
            predicted_us += transfer_us
        if predicted_us and opening.at_us + predicted_us > max([job.expires_us for job in jobs]):
            raise PolicyError(f"every job of this batch of {function.spec.name} would be too late")
        state = self._state
        state.last_batch += 1
        batch = Batch(
            state.last_batch,
            instance,
            device,
            opening.mask,
            jobs,
            predicted_us,
            planned_start_us=opening.at_us,
            cores=opening.cores,
            transfer_us=transfer_us,
        )
        if after is not None:
            batch.behind = after
            after.follower = batch
        else:
            self._begin_batch(batch)
        state.batches[batch.id] = batch
        instance.batches[batch.id] = batch
        self._dispatch_queue.dequeue(function, jobs)
        for job in jobs:
            job.batch_id = batch.id
        self._out.append(
            StartBatch(
                batch.id,
                function.spec.name,
                instance.id,
                device.spec.id,
                opening.mask,
                tuple([JobRef(job.id, job.run.call.id, job.scope, job.node) for job in jobs]),
                predicted_us,
                after.id if after is not None else 0,
                decision.why,
                opening.cores,
                transfer_us,
            )
        )
        return batch

    def _check_start(self, decision: Start) -> None:
        jobs, opening = decision.jobs, decision.slot
        instance, device, mask, after = opening.instance, opening.device, opening.mask, opening.behind
        name = instance.function
        function = self._state.functions[name]
        if not jobs:
            raise PolicyError("a batch needs at least one job")
        if len(jobs) > function.spec.max_batch:
            raise PolicyError(f"{name} takes {function.spec.max_batch} jobs at once, not {len(jobs)}")
        ids = {job.id for job in jobs if not job.batch_id and job.function == name and job.id in job.run.jobs}
        if len(ids) != len(jobs):
            raise PolicyError(f"a batch is made of waiting jobs of one function, each once; this one is for {name}")
        if instance.phase is not InstancePhase.WARM or instance.device != device.spec.id:
            raise PolicyError(f"{instance.id} is {instance.phase.value} on {instance.device}")
        if not device.is_valid_slice(mask) or not (device.spec.limits.per_batch or mask == device.homes.get(instance.id)):
            raise PolicyError(f"{device.spec.id} has no slice {mask:b} for {instance.id}")
        own = after is not None and after.instance is instance
        if not own and not instance.has_capacity(function.batches_at_once(device)):
            raise PolicyError(f"{instance.id} has all the batches it may run at once")
        if opening.cores < 0 or opening.cores > (device.cores_free if after is None else after.cores):
            raise PolicyError(f"{device.spec.id} has no {opening.cores} cores to spare")
        if after is None:
            if mask & (device.busy | device.reserved_units(instance.id)):
                raise PolicyError(f"{slice_label(device.spec.id, mask)} is busy, or kept for somebody else")
        elif after.follower is not None or after.started_us < 0 or after.id not in self._state.batches:
            raise PolicyError(f"nothing can be booked behind batch {after.id}")
        elif after.device is not device or mask & ~after.mask:
            raise PolicyError(f"{slice_label(device.spec.id, mask)} is not what batch {after.id} leaves behind")

    def _begin_batch(self, batch: Batch) -> None:
        batch.started_us = self._view.now_us
        batch.device.lease(batch.id, batch.mask, batch.cores)
        batch.instance.running += 1

    def release_batch(self, batch: Batch) -> None:
        """End the lease of a batch; the booked batch behind it takes the slice over at once."""
        instance = batch.instance
        del self._state.batches[batch.id]
        del instance.batches[batch.id]
        self._dispatch_queue.device_changed(batch.device)
        if batch.started_us >= 0:
            batch.device.release(batch.id)
            instance.running -= 1
            instance.last_used_us = self._view.now_us
        elif batch.behind is not None:
            batch.behind.follower = None
        follower = batch.follower
        if follower is not None:
            batch.follower = None
            follower.behind = None
            self._begin_batch(follower)
        if instance.phase is InstancePhase.DRAINING and not instance.batches:
            self._finish_unload(instance)

    # -------------------------------------------------------------- instances

    def load_instance(self, decision: LoadInstance) -> Instance:
        function = _known(self._state.functions, decision.function)
        device = _known(self._state.devices, decision.device)
        spec = function.spec
        if not spec.fits_family(device.spec.family):
            raise PolicyError(f"{spec.name} cannot run on {device.spec.id}: that is a {device.spec.family}")
        if device.memory_used_mib + spec.memory_mib > device.spec.memory_mib:
            raise PolicyError(f"{spec.name} needs {spec.memory_mib} MiB; {device.spec.id} has no room for it")
        mask = self._shared_slice(device, decision) if decision.beside else _reserved_slice(device, decision.home_units)
        quota = _time_share(device, mask, decision.quota)
        function.loads_started += 1
        instance = Instance(
            f"{spec.name}-{function.loads_started}",
            spec.name,
            device.spec.id,
            InstancePhase.LOADING,
            self._view.now_us,
            spec.memory_mib,
            units=mask.bit_count() or spec.units_on(device.spec),
            quota=quota,
            bucket=time_share_bucket(quota, None, self._view.now_us),
            version=spec.version,
        )
        device.memory_used_mib += spec.memory_mib
        device.instances[instance.id] = None
        if mask:
            device.reserve(instance.id, mask, spec.lend, quota)
        function.instances[instance.id] = instance
        function.instances_by_device[device.spec.id] = function.instances_by_device.get(device.spec.id, 0) + 1
        self._state.instances[instance.id] = instance
        self._out.append(Load(instance.id, spec.name, device.spec.id, mask, quota))
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
        elif instance.phase is InstancePhase.WARM:
            instance.phase = next_phase(instance.phase, "drain")

    def resize_instance(self, decision: ResizeInstance) -> None:
        instance = _known(self._state.instances, decision.instance)
        device = self._state.devices[instance.device]
        spec = self._state.functions[instance.function].spec
        now = device.homes.get(instance.id, 0)
        stays = now.bit_count() == decision.home_units
        if stays and decision.quota == instance.quota:
            return
        mask = now if stays else _reserved_slice(device, decision.home_units, (instance.id,))
        instance.quota = _time_share(device, mask, decision.quota, instance.id)
        instance.bucket = time_share_bucket(instance.quota, instance.bucket, self._view.now_us)
        if mask:
            device.reserve(instance.id, mask, spec.lend, instance.quota)
        else:
            device.unreserve(instance.id)
        instance.units = mask.bit_count() or spec.units_on(device.spec)
        self._dispatch_queue.device_changed(device)
        self._out.append(Resize(instance.id, mask, instance.quota))

    def kill_instance(self, instance: Instance, reason: str) -> None:
        """Request its forced end, once; until its loss is reported it gets nothing more to do."""
        if not instance.killed:
            instance.killed = True
            if instance.phase is InstancePhase.WARM:
                instance.phase = next_phase(instance.phase, "drain")
            self._dispatch_queue.needs_instance[instance.function] = None
            self._out.append(Kill(instance.id, reason))

    def remove_lost(self, instances: list[Instance]) -> tuple[list[Batch], list[Batch]]:
        """Remove lost instances, all at once; returns the batches begun on them and those only booked."""
        for instance in instances:
            instance.phase = next_phase(instance.phase, "lost")
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
        instance.phase = next_phase(instance.phase, "unload")
        self._remove_instance(instance)
        self._out.append(Unload(instance.id))

    def _remove_instance(self, instance: Instance) -> None:
        device = self._state.devices[instance.device]
        function = self._state.functions[instance.function]
        self._dispatch_queue.device_changed(device)  # its memory and its home are free for others
        device.memory_used_mib -= instance.memory_mib
        device.remove_instance(instance.id)
        del function.instances[instance.id]
        function.instances_by_device[instance.device] -= 1
        if not function.instances_by_device[instance.device]:
            del function.instances_by_device[instance.device]
        del self._state.instances[instance.id]
        if len(function.queue) and not function.instances:
            self._dispatch_queue.needs_instance[function.spec.name] = None

    # ---------------------------------------------------------------- devices

    def release_device(self, decision: ReturnDevice) -> None:
        device = _known(self._state.devices, decision.device)
        if device.instances:
            raise PolicyError(f"{decision.device} is not empty")
        del self._state.devices[decision.device]
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
