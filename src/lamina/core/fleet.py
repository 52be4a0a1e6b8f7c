"""The cluster: devices, instances on them, and batches that lease their units. Owner of all three.

- A lease starts with its batch and ends with it. A booked batch inherits the slice of the one it is behind, at the
  instant that one ends, however it ends.
- What a policy decides about them is checked here before anything changes: a policy in error leaves the state sound.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeVar

from lamina.core.actions import Action, JobRef, Kill, Load, ReleaseDevice, Resize, StartBatch, Unload
from lamina.core.lease import Device, mask_label
from lamina.core.lifecycle import Phase, move
from lamina.core.lines import Lines
from lamina.core.policy import GiveDevice, LoadOn, ResizeTo, Start, UnloadOf, View
from lamina.core.quota import share_bucket
from lamina.core.state import Batch, Instance, State
from lamina.errors import PolicyError

Thing = TypeVar("Thing")


class Fleet:
    def __init__(self, state: State, view: View, lines: Lines, out: list[Action]) -> None:
        self._state = state
        self._view = view
        self._lines = lines
        self._out = out

    # ---------------------------------------------------------------- batches

    def start(self, decision: Start) -> Batch:
        jobs, opening = decision.jobs, decision.opening
        instance, device, after = opening.instance, opening.device, opening.after
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
            planned_us=opening.at_us,
            cores=opening.cores,
            transfer_us=transfer_us,
        )
        if after is not None:
            batch.after = after
            after.follower = batch
        else:
            self._begin(batch)
        state.batches[batch.id] = batch
        instance.batches[batch.id] = batch
        self._lines.leave(function, jobs)
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
        jobs, opening = decision.jobs, decision.opening
        instance, device, mask, after = opening.instance, opening.device, opening.mask, opening.after
        name = instance.function
        function = self._state.functions[name]
        if not jobs:
            raise PolicyError("a batch needs at least one job")
        if len(jobs) > function.spec.max_batch:
            raise PolicyError(f"{name} takes {function.spec.max_batch} jobs at once, not {len(jobs)}")
        ids = {job.id for job in jobs if not job.batch_id and job.function == name and job.id in job.run.jobs}
        if len(ids) != len(jobs):
            raise PolicyError(f"a batch is made of waiting jobs of one function, each once; this one is for {name}")
        if instance.phase is not Phase.WARM or instance.device != device.spec.id:
            raise PolicyError(f"{instance.id} is {instance.phase.value} on {instance.device}")
        if not device.allows(mask) or not (device.spec.limits.per_batch or mask == device.homes.get(instance.id)):
            raise PolicyError(f"{device.spec.id} has no slice {mask:b} for {instance.id}")
        own = after is not None and after.instance is instance
        if not own and not instance.has_room(function.batches_at_once(device)):
            raise PolicyError(f"{instance.id} has all the batches it may run at once")
        if opening.cores < 0 or opening.cores > (device.cores_free if after is None else after.cores):
            raise PolicyError(f"{device.spec.id} has no {opening.cores} cores to spare")
        if after is None:
            if mask & (device.busy | device.kept_from(instance.id)):
                raise PolicyError(f"{mask_label(device.spec.id, mask)} is busy, or kept for somebody else")
        elif after.follower is not None or after.started_us < 0 or after.id not in self._state.batches:
            raise PolicyError(f"nothing can be booked behind batch {after.id}")
        elif after.device is not device or mask & ~after.mask:
            raise PolicyError(f"{mask_label(device.spec.id, mask)} is not what batch {after.id} leaves behind")

    def _begin(self, batch: Batch) -> None:
        batch.started_us = self._view.now_us
        batch.device.take(batch.id, batch.mask, batch.cores)
        batch.instance.running += 1

    def release(self, batch: Batch) -> None:
        """End the lease of a batch; the booked batch behind it takes the slice over at once."""
        instance = batch.instance
        del self._state.batches[batch.id]
        del instance.batches[batch.id]
        self._lines.stir(batch.device)
        if batch.started_us >= 0:
            batch.device.give_back(batch.id)
            instance.running -= 1
            instance.used_us = self._view.now_us
        elif batch.after is not None:
            batch.after.follower = None
        follower = batch.follower
        if follower is not None:
            batch.follower = None
            follower.after = None
            self._begin(follower)
        if instance.phase is Phase.DRAINING and not instance.batches:
            self._part(instance)

    # -------------------------------------------------------------- instances

    def load(self, decision: LoadOn) -> Instance:
        function = _known(self._state.functions, decision.function)
        device = _known(self._state.devices, decision.device)
        spec = function.spec
        if not spec.fits_family(device.spec.family):
            raise PolicyError(f"{spec.name} cannot run on {device.spec.id}: that is a {device.spec.family}")
        if device.memory_used_mib + spec.memory_mib > device.spec.memory_mib:
            raise PolicyError(f"{spec.name} needs {spec.memory_mib} MiB; {device.spec.id} has no room for it")
        mask = self._shared(device, decision) if decision.beside else _standing(device, decision.home_units)
        quota = _time_share(device, mask, decision.quota)
        function.loads += 1
        instance = Instance(
            f"{spec.name}-{function.loads}",
            spec.name,
            device.spec.id,
            Phase.LOADING,
            self._view.now_us,
            spec.memory_mib,
            units=mask.bit_count() or spec.units_on(device.spec),
            quota=quota,
            bucket=share_bucket(quota, None, self._view.now_us),
            version=spec.version,
        )
        device.memory_used_mib += spec.memory_mib
        device.instances[instance.id] = None
        if mask:
            device.keep(instance.id, mask, spec.lend, quota)
        function.instances[instance.id] = instance
        function.hosts[device.spec.id] = function.hosts.get(device.spec.id, 0) + 1
        self._state.instances[instance.id] = instance
        self._out.append(Load(instance.id, spec.name, device.spec.id, mask, quota))
        return instance

    def _shared(self, device: Device, decision: LoadOn) -> int:
        """The reserved slice of another instance, to be used in turns."""
        mask = device.homes.get(decision.beside, 0)
        if not mask or mask.bit_count() != decision.home_units:
            raise PolicyError(f"{decision.beside!r} has no standing slice of {decision.home_units} units on {device.spec.id}")
        return mask

    def unload(self, decision: UnloadOf) -> None:
        instance = _known(self._state.instances, decision.instance)
        if not instance.batches:
            self._part(instance)
        elif instance.phase is Phase.WARM:
            instance.phase = move(instance.phase, "drain")

    def resize(self, decision: ResizeTo) -> None:
        instance = _known(self._state.instances, decision.instance)
        device = self._state.devices[instance.device]
        spec = self._state.functions[instance.function].spec
        now = device.homes.get(instance.id, 0)
        stays = now.bit_count() == decision.home_units
        if stays and decision.quota == instance.quota:
            return
        mask = now if stays else _standing(device, decision.home_units, (instance.id,))
        instance.quota = _time_share(device, mask, decision.quota, instance.id)
        instance.bucket = share_bucket(instance.quota, instance.bucket, self._view.now_us)
        if mask:
            device.keep(instance.id, mask, spec.lend, instance.quota)
        else:
            device.leave(instance.id)
        instance.units = mask.bit_count() or spec.units_on(device.spec)
        self._lines.stir(device)
        self._out.append(Resize(instance.id, mask, instance.quota))

    def kill(self, instance: Instance, reason: str) -> None:
        """Request its forced end, once; until its loss is reported it gets nothing more to do."""
        if not instance.killed:
            instance.killed = True
            if instance.phase is Phase.WARM:
                instance.phase = move(instance.phase, "drain")
            self._lines.cold[instance.function] = None
            self._out.append(Kill(instance.id, reason))

    def lose(self, instances: list[Instance]) -> tuple[list[Batch], list[Batch]]:
        """Remove lost instances, all at once; returns the batches begun on them and those only booked."""
        for instance in instances:
            instance.phase = move(instance.phase, "lost")
        batches = [batch for instance in instances for batch in instance.batches.values()]
        booked = [batch for batch in batches if batch.started_us < 0]
        begun = [batch for batch in batches if batch.started_us >= 0]
        for batch in (*booked, *begun):  # booked first: they must not be begun
            self.release(batch)
        for instance in instances:
            self._remove(instance)
        return begun, booked

    def _part(self, instance: Instance) -> None:
        """Unload a drained or idle instance."""
        instance.phase = move(instance.phase, "unload")
        self._remove(instance)
        self._out.append(Unload(instance.id))

    def _remove(self, instance: Instance) -> None:
        device = self._state.devices[instance.device]
        function = self._state.functions[instance.function]
        self._lines.stir(device)  # its memory and its home are free for others
        device.memory_used_mib -= instance.memory_mib
        device.forget(instance.id)
        del function.instances[instance.id]
        function.hosts[instance.device] -= 1
        if not function.hosts[instance.device]:
            del function.hosts[instance.device]
        del self._state.instances[instance.id]
        if len(function.queue) and not function.instances:
            self._lines.cold[function.spec.name] = None

    # ---------------------------------------------------------------- devices

    def give(self, decision: GiveDevice) -> None:
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
    if not 0 < quota <= 1 or device.promised(mask, instead_of) + quota > 1 + 1e-9:
        raise PolicyError(f"{quota:g} of the time on {mask_label(device.spec.id, mask)} is more than there is left")
    return quota


def _standing(device: Device, units: int, instead_of: Container[str] = ()) -> int:
    """A block to reserve as a standing slice, 0 if none is wanted."""
    if not units:
        return 0
    mask = device.spare(units, instead_of) if units > 0 else 0
    if not device.allows(mask):
        raise PolicyError(f"{device.spec.id} has no {units} units left for a standing slice")
    return mask
