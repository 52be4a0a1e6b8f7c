"""Membership of devices: they join, fall silent, drain and are lost, and bring along what they have loaded.

- A silent device gets nothing new, and what runs there is waited for: most often it is back in a moment.
- A draining one goes on with what it has while its instances are replaced elsewhere. The last instance of a function that is in
  use stays until another is ready: a device that is about to leave is better than none.
- What a device had loaded when it joined is adopted where it is of use: no weight is loaded twice because the way there was cut,
  or because another controller leads now. It takes the place of one that is still being loaded: devices join one after the
  other, and the first one is given what the next one brings along.
- What it still runs for a controller that is gone is booked as a batch without jobs: it has its units, an expected end, and is
  ended when it is in the way (`hang_rule.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.core.actions import Action, StartBatch, Unload
from lamina.core.events import (
    AbandonedBatch,
    DeviceDraining,
    DeviceJoined,
    DeviceLost,
    DeviceSuspended,
    InstanceFound,
    InstanceReady,
)
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import UnloadInstance
from lamina.core.rolling_update import RollingUpdate
from lamina.core.scheduling.cluster import Cluster
from lamina.core.scheduling.failures import Failures
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import DispatchQueue
from lamina.core.scheduling.state import Batch, Clock, ControllerState, FunctionState, Instance


class Membership:
    """Handlers of what happens to devices as a whole, and of instances that are ready, which some were when they were found.
    `on_change` is called when there are more or fewer devices."""

    def __init__(
        self,
        state: ControllerState,
        clock: Clock,
        cluster: Cluster,
        dispatch_queue: DispatchQueue,
        failures: Failures,
        rolling_update: RollingUpdate,
        on_ready: Callable[[InstanceReady], None],
        on_change: Callable[[], None],
        out: list[Action],
    ) -> None:
        self._state = state
        self._cluster = cluster
        self._dispatch_queue = dispatch_queue
        self._failures = failures
        self._rolling_update = rolling_update
        self._clock = clock
        self._on_ready = on_ready
        self._on_change = on_change
        self._out = out

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Handlers by event, for the controller."""
        return {
            DeviceJoined: self.on_device_joined,
            DeviceLost: self.on_device_lost,
            DeviceSuspended: self.on_device_suspended,
            DeviceDraining: self.on_device_draining,
            InstanceFound: self.on_instance_found,
            InstanceReady: self.on_instance_ready,
        }

    def on_device_joined(self, event: DeviceJoined) -> None:
        if event.device.id not in self._state.devices:
            self._cluster.add_device(event.device)
            for function in self._state.functions.values():
                if function.consecutive_crashes and not function.instances:
                    function.forgive()  # it may be loaded here
                    self._dispatch_queue.needs_instance(function.spec.name)
            self._on_change()
            self.replace_draining()

    def on_device_lost(self, event: DeviceLost) -> None:
        device = self._state.devices.get(event.device)
        if device is not None:
            lost = [self._state.instances[instance_id] for instance_id in device.instances]
            self._failures.remove_lost(lost, "device-lost", blames=event.blames)
            self._cluster.remove_device(device)
            self._on_change()

    def on_device_suspended(self, event: DeviceSuspended) -> None:
        device = self._state.devices.get(event.device)
        if device is not None:
            device.set_membership(suspended=event.suspended, draining=device.is_draining)
            self._dispatch_queue.device_changed(device)

    def on_device_draining(self, event: DeviceDraining) -> None:
        device = self._state.devices.get(event.device)
        if device is not None:
            device.set_membership(suspended=device.is_suspended, draining=True)
            self.replace_draining()

    # ------------------------------------------------------------------ adoption

    def on_instance_found(self, event: InstanceFound) -> None:
        function, device = self._state.functions.get(event.function), self._state.devices.get(event.device)
        if function is None or device is None:
            self._out.append(Unload(event.name))
            return
        loading = self._still_loading(function)
        if not self._is_of_use(function, device, event, len(function.instances) - (loading is not None)):
            self._out.append(Unload(event.name))
            return
        if loading is not None:
            self._cluster.unload_instance(UnloadInstance(loading.id))
        self._cluster.add_instance(function, device, event.mask, event.quota, event.name)

    def on_instance_ready(self, event: InstanceReady) -> None:
        self._on_ready(event)
        instance = self._state.instances.get(event.instance)
        if event.abandoned is not None and instance is not None and instance.is_adopted and not instance.batches:
            self._book_abandoned(instance, event.abandoned)

    def _book_abandoned(self, instance: Instance, found: AbandonedBatch) -> None:
        """It is at work, for a controller that is gone. On units that others have, or keep, it is not booked: it shares them."""
        device = self._state.devices[instance.device]
        taken = device.busy | device.reserved_units(instance.id)
        is_slice = device.is_valid_slice(found.mask) and not found.mask & taken
        if not is_slice or not (device.spec.limits.per_batch or found.mask == device.homes.get(instance.id)):
            return
        cores = min(found.cores, device.cores_free)
        batch = Batch(self._state.next_batch_id(), instance, device, found.mask, [], found.predicted_us, cores=cores)
        self._cluster.adopt_batch(batch, max(0, self._clock.now_us - found.ran_us))
        where = (instance.function, instance.id, device.spec.id, batch.mask)
        overlaps = device.overlapping(batch.mask, gives_way=False)
        self._out.append(StartBatch(batch.id, *where, (), found.predicted_us, cores=cores, overlaps=overlaps))

    def _still_loading(self, function: FunctionState) -> Instance | None:
        """The instance that was begun last of those that are being loaded, for no other reason than that there was none."""
        found = [
            one
            for one in function.instances.values()
            if one.phase is InstancePhase.LOADING
            and not (one.is_adopted or one.batches or self._rolling_update.is_successor(one.id))
        ]
        return found[-1] if found else None

    def _is_of_use(self, function: FunctionState, device: Device, event: InstanceFound, others: int) -> bool:
        """Whether it is of the version wanted, no more than may be, and finds its place on its device."""
        spec = function.spec
        if spec.version != event.version or not spec.fits_family(device.spec.family) or not device.takes_instances:
            return False
        if others >= max(1, spec.scale.max):
            return False
        if device.memory_used_mib + spec.memory_mib > device.spec.memory_mib:
            return False
        needs_home = spec.home or not device.spec.limits.per_batch
        if not event.mask:
            return not needs_home
        is_free = not any(mask & event.mask for mask in device.homes.values())
        return needs_home and is_free and device.is_valid_slice(event.mask) and 0 < event.quota <= 1

    def rearrange(self) -> None:
        """Move instances off draining devices, and apart. To be called now and then."""
        for function in self._state.functions.values():
            if function.avoided:
                function.forget_avoided(self._clock.now_us)
        self.replace_draining()
        self.spread()

    # ----------------------------------------------------------------- spreading

    def spread(self) -> None:
        """Move standing instances apart: a function that is to stand more than once, and does so on one machine, is loaded on
        another one that has none of it: a machine that joined later is empty."""
        nodes = {device.spec.node for device in self._state.devices.values() if device.takes_instances}
        for function in self._state.functions.values() if len(nodes) > 1 else ():
            if function.spec.scale.min >= 2:
                self._spread(function)

    def _spread(self, function: FunctionState) -> None:
        devices = self._state.devices
        standing: dict[str, Instance] = {}
        for instance in function.instances.values():
            if instance.phase is not InstancePhase.WARM:
                return  # one move at a time
            node = devices[instance.device].spec.node
            if node in standing:
                free = {device.spec.node for device in devices.values()} - {
                    devices[one.device].spec.node for one in function.instances.values()
                }
                self._rolling_update.replace(function, instance, free)
                return
            standing[node] = instance

    # ------------------------------------------------------------------ draining

    def replace_draining(self) -> None:
        """Replace what is on draining devices, as far as there is room elsewhere by now. To be called now and then."""
        for device in list(self._state.devices.values()):
            for instance_id in list(device.instances) if device.is_draining else ():
                self._replace(self._state.instances[instance_id])

    def _replace(self, old: Instance) -> None:
        function = self._state.functions[old.function]
        if old.phase is InstancePhase.DRAINING:
            return
        if old.phase is InstancePhase.LOADING or self._is_spare(function, old):
            self._cluster.unload_instance(UnloadInstance(old.id))
            self._rolling_update.resume(function, withdrawn=old.id)
        else:
            self._rolling_update.replace(function, old)

    def _is_spare(self, function: FunctionState, old: Instance) -> bool:
        """Whether it can leave without a successor: enough stand elsewhere, or none is in use."""
        devices = self._state.devices
        kept = [one for one in function.instances.values() if devices[one.device].takes_instances]
        ready = sum(one.phase is InstancePhase.WARM for one in kept)
        is_used = bool(len(function.queue) or old.batches or function.expected_jobs > 0)
        return ready >= max(function.spec.scale.min, int(is_used))
