"""Rolling update: functions are deployed, and instances of a new version replace those of the old one without a call noticing.

One instance of a function at a time: its successor is loaded beside it, or on another device that has the room, and only when
that one is ready does the old one finish what it has and leave. Where there is no room for both, the old one leaves first, and
calls wait for the new one. A successor that cannot be loaded ends the renewal: what is left of the old version goes on serving.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import LoadInstance, UnloadInstance
from lamina.core.scheduling.cluster import Cluster
from lamina.core.scheduling.queues import DispatchQueue, Order, Queue
from lamina.core.scheduling.state import Clock, ControllerState, FunctionState, Instance
from lamina.core.token_bucket import quota_bucket, request_bucket
from lamina.errors import PolicyError
from lamina.types import FunctionSpec


class RollingUpdate:
    """Writer of `functions` of the state."""

    def __init__(
        self, state: ControllerState, clock: Clock, dispatch_queue: DispatchQueue, cluster: Cluster, order: Order
    ) -> None:
        self._state = state
        self._clock = clock
        self._dispatch_queue = dispatch_queue
        self._cluster = cluster
        self._order: Order = order
        self._replaces: dict[str, str] = {}  #: instances being loaded, and the old ones that will leave for them
        self._previous_specs: dict[str, FunctionSpec] = {}  #: what functions were before their last deployment
        self.halted: dict[str, str] = {}  #: functions whose new version cannot be loaded, and which that is

    def deploy(self, specs: Iterable[FunctionSpec]) -> None:
        """Functions exist from now on, or under a new spec: instances go on under its terms."""
        for spec in specs:
            known = self._state.functions.get(spec.name)
            if known is None:
                known = self._state.functions[spec.name] = FunctionState(spec, Queue(spec.name, self._order))
            else:
                self._previous_specs[spec.name] = known.spec
                known.redeploy(spec)
                for instance in known.instances.values():
                    self._cluster.redeploy_instance(instance, spec)
            now_us = self._clock.now_us
            known.set_quota(quota_bucket(spec.quota, known.bucket, now_us), request_bucket(spec.quota, known.owed, now_us))
            if spec.scale.min:
                self._dispatch_queue.needs_instance(spec.name)

    def replace_outdated(self, specs: Iterable[FunctionSpec]) -> None:
        for spec in specs:
            self.halted.pop(spec.name, None)
            self._continue(self._state.functions[spec.name])

    def is_successor(self, instance: str) -> bool:
        """Whether it is being loaded to replace another. A policy that counts instances finds one too many meanwhile, and must
        not unload that one."""
        return instance in self._replaces

    def replace(self, function: FunctionState, old: Instance, nodes: Container[str] | None = None) -> bool:
        """Load a successor, if there is room on `nodes` and none is on its way; the old one leaves when it is ready."""
        new = self._load_successor(function, old, nodes) if old.id not in self._replaces.values() else None
        if new is not None:
            self._replaces[new.id] = old.id
        return new is not None

    def on_instance_ready(self, instance: Instance) -> None:
        """Continue when a successor, or any other instance, is ready."""
        old = self._replaces.pop(instance.id, "")
        if old in self._state.instances:
            self._cluster.unload_instance(UnloadInstance(old))
        self._continue(self._state.functions[instance.function])

    def on_instance_lost(self, instance: Instance, reason: str) -> None:
        """Halt if a successor cannot be loaded; called before it is removed. A lost device, or one where
        nothing of it can be loaded, is not the version's fault."""
        old = self._state.instances.get(self._replaces.pop(instance.id, ""))
        is_new = old is not None and old.version != instance.version and reason not in ("device-lost", "device-failed")
        if is_new and instance.phase is InstancePhase.LOADING:
            self.halted[instance.function] = instance.version

    def resume(self, function: FunctionState, withdrawn: str = "") -> None:
        """Continue elsewhere, after a successor could not be loaded where it was tried, or was withdrawn from there."""
        self._replaces.pop(withdrawn, None)
        self._continue(function)

    def outdated(self, function: FunctionState) -> list[Instance]:
        """Instances of another version that do not leave yet."""
        version = function.spec.version
        return [i for i in function.instances.values() if i.version != version and i.phase is not InstancePhase.DRAINING]

    def _continue(self, function: FunctionState) -> None:
        name = function.spec.name
        if name in self.halted or any(new in self._replaces for new in function.instances) or not self._has_place(function):
            return
        for old in self.outdated(function):
            if old.phase is InstancePhase.LOADING:
                self._cluster.unload_instance(UnloadInstance(old.id))  # it has served nothing yet
                continue
            if self.replace(function, old):
                return
            self._cluster.unload_instance(UnloadInstance(old.id))

    def _has_place(self, function: FunctionState) -> bool:
        """Whether there is a device at all that successors could be on: else the old ones are better than none."""
        devices = self._state.devices.values()
        return any(device.takes_instances and function.spec.fits_family(device.spec.family) for device in devices)

    def _load_successor(self, function: FunctionState, old: Instance, nodes: Container[str] | None) -> Instance | None:
        """Load a successor, with a home as large as the old one's, unless another size was deployed."""
        home_units = self._state.devices[old.device].homes.get(old.id, 0).bit_count()
        before = self._previous_specs.get(function.spec.name, function.spec)
        for device_id in dict.fromkeys([old.device, *self._state.devices]):
            device = self._state.devices[device_id]
            asked = function.spec.units_on(device.spec)
            wanted = 0 if not home_units else home_units if before.units_on(device.spec) == asked else asked
            is_elsewhere = nodes is not None and device.spec.node not in nodes
            if is_elsewhere or not device.takes_instances or not function.spec.fits_family(device.spec.family):
                continue
            if function.avoids(device.spec) or not device.unreserved_block(wanted or asked, borrow=not wanted):
                continue
            try:
                return self._cluster.load_instance(LoadInstance(function.spec.name, device_id, wanted))
            except PolicyError:
                continue  # no room there
        return None
