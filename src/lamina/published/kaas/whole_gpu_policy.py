"""Base of the KaaS policies: one request at a time on a whole GPU, and memory that the system manages.

A GPU keeps every model it has run until another needs the room, so a model is loaded on a GPU once (a cold start) and is
there from then on. The policies differ in one question only: a GPU is free, which request goes to which? They answer it
in `choose`; the rest is here. A GPU that loads serves no other request: in KaaS one executor does both.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 6, and the KaaS executor. Lateness is ours: a request that
cannot be in time any more is dropped, for the controller starts nothing that is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lamina.core.actions import Reject
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, Decision, Drop, LoadInstance, RecheckAt, Slot, Start, UnloadInstance, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.types import Call, DeviceSpec, FunctionSpec

EvictionRule = Literal["two-list", "lru", "cost"]
FREQUENT_USES = 2
"""A model used more often than this counts as one that stays; it goes only when no other is left."""


@dataclass(slots=True)
class LoadingGpu:
    """A GPU that loads a model for a request."""

    job: Job
    instance: str


@dataclass(slots=True)
class WholeGpuPolicy:
    """`choose` is for the policies; everything else is here."""

    evict: EvictionRule = (
        "two-list"  #: eviction when memory is short: seldom used ones first, the oldest, or the cheapest to miss
    )
    period_us: int = 1_000_000
    order: Order = "arrival"
    _free_order: list[str] = field(default_factory=list, init=False)  #: free GPUs, the one that has been free longest first
    _loading: dict[str, LoadingGpu] = field(default_factory=dict, init=False)  #: GPUs that load, and for which request
    _running: dict[str, str] = field(default_factory=dict, init=False)  #: GPU -> the instance that runs there
    _chosen_at: dict[str, int] = field(default_factory=dict, init=False)  #: GPU -> when it was last chosen, as a count
    _count: int = field(default=0, init=False)
    _uses: dict[str, int] = field(default_factory=dict, init=False)  #: instance -> requests it has served

    def choose(self, view: View) -> tuple[Job, Device] | None:
        """Which waiting request goes to which free GPU; None: nothing for now."""
        raise NotImplementedError

    # ----------------------------------------------------------------- roles

    def admit(self, view: View, call: Call) -> Admitted | Reject | None:
        """Only what fits on no GPU at all is turned away: the thesis knows no deadlines."""
        for name in view.flows[call.target].functions:
            if not any(can_host(view.functions[name].spec, device.spec) for device in view.devices.values()):
                return Reject(call.id, "no-capacity")
        return None

    def dispatch(self, view: View) -> Iterator[Decision]:
        self._collect_freed(view)
        yield from self._run_loaded(view)
        while self._free_order:
            choice = self.choose(view)
            if choice is None:
                break
            yield from self._place(view, *choice)
        yield from self._wake_for_quotas(view)

    def scale(self, view: View) -> Iterator[Decision]:
        """A model comes with its first request and goes when its memory is needed, so there is nothing to do by the clock."""
        return iter(())

    # ------------------------------------------------------- for the policies

    def free_gpus(self, view: View) -> list[Device]:
        return [view.devices[device] for device in self._free_order]

    def oldest_requests(self, view: View) -> Iterator[Job]:
        """Per function, the request that has waited longest and that nothing is being loaded for."""
        claimed = {claim.job.id for claim in self._loading.values()}
        for function in view.waiting.values():
            if over_quota_until_us(view, function):
                continue
            for job in function.queue.first(len(claimed) + 1):
                if job.id not in claimed:
                    yield job
                    break

    def can_run_on(self, view: View, job: Job, device: Device) -> bool:
        """May it go there? Not while its model must not be loaded because it crashed."""
        function = view.functions[job.function]
        able = can_host(function.spec, device.spec)
        return able and (view.now_us >= function.load_not_before_us or resident_instance(view, device, job.function) is not None)

    def first_free(self, view: View, job: Job) -> Device | None:
        return next((device for device in self.free_gpus(view) if self.can_run_on(view, job, device)), None)

    # ----------------------------------------------------------------- inside

    def _collect_freed(self, view: View) -> None:
        """Collect GPUs freed since: in the order they were, and of one instant in the order their runs began."""
        freed = []
        for name, instance_id in list(self._running.items()):
            device = view.devices.get(name)
            if device is None or not device.busy:
                del self._running[name]
                instance = view.instances.get(instance_id)
                freed.append((instance.last_used_us if instance else view.now_us, self._chosen_at[name], name))
        for name, claim in list(self._loading.items()):
            if claim.instance not in view.instances:  # it was lost while it loaded; the request waits as before
                del self._loading[name]
                freed.append((view.now_us, self._chosen_at[name], name))
        self._free_order += [name for _, _, name in sorted(freed)]
        self._free_order += [name for name in view.devices if name not in self._chosen_at]
        for name in view.devices:
            self._chosen_at.setdefault(name, -1)
        if any(name not in view.devices for name in self._chosen_at):
            self._free_order = [name for name in self._free_order if name in view.devices]
            self._chosen_at = {name: turn for name, turn in self._chosen_at.items() if name in view.devices}

    def _run_loaded(self, view: View) -> Iterator[Decision]:
        for name, claim in list(self._loading.items()):
            instance = view.instances[claim.instance]
            if instance.phase is InstancePhase.LOADING:
                continue
            del self._loading[name]
            job = claim.job
            if job.id not in job.run.jobs or instance.phase is not InstancePhase.WARM:
                self._free_order.append(name)
            elif self._is_late(view, job, view.devices[name]):
                self._free_order.append(name)
                yield Drop(job)
            else:
                yield self._start(view, job, instance)

    def _place(self, view: View, job: Job, device: Device) -> Iterator[Decision]:
        name = device.spec.id
        instance = resident_instance(view, device, job.function)
        elsewhere = len(view.functions[job.function].instances) > (instance is not None)
        load_us = view.predictor.load_us(job.function, device.spec.kind) if instance is None else 0
        # a load that comes too late for this one is still made for requests that come after it: where the model is nowhere, or
        # where no other has to go for it
        crowded = view.functions[job.function].spec.memory_mib > device.spec.memory_mib - device.memory_used_mib
        if self._is_late(view, job, device) or (elsewhere and crowded and self._is_late(view, job, device, load_us)):
            yield Drop(job)
            return
        self._free_order.remove(name)
        self._count += 1
        self._chosen_at[name] = self._count
        if instance is not None and instance.phase is InstancePhase.WARM:
            yield self._start(view, job, instance)
            return
        if instance is None:
            yield from self._make_room(view, device, view.functions[job.function])
            yield LoadInstance(job.function, name)
            instance = resident_instance(view, device, job.function)
            assert instance is not None, "it has just been loaded"
            self._uses = {one: uses for one, uses in self._uses.items() if one in view.instances}
        self._loading[name] = LoadingGpu(job, instance.id)

    def _start(self, view: View, job: Job, instance: Instance) -> Start:
        device = view.devices[instance.device]
        self._running[device.spec.id] = instance.id
        self._uses[instance.id] = self._uses.get(instance.id, 0) + 1
        cores = view.functions[job.function].spec.cores_on(device.spec)
        mask = (1 << whole_units(device.spec)) - 1
        why = f"{job.function} has {device.spec.id} to itself" if view.explain else ""
        return Start([job], Slot(instance, device, mask, None, view.reach_us(device), cores), why)

    def _is_late(self, view: View, job: Job, device: Device, load_us: int = 0) -> bool:
        took_us = request_us(view, job.function, device)
        return took_us > 0 and view.reach_us(device) + load_us + took_us + view.transfer_us([job], device) > job.expires_us

    def _make_room(self, view: View, device: Device, function: FunctionState) -> Iterator[Decision]:
        missing_mib = function.spec.memory_mib - (device.spec.memory_mib - device.memory_used_mib)
        idle = [view.instances[one] for one in device.instances if not view.instances[one].batches]
        for instance in sorted(idle, key=lambda one: self._eviction_key(view, one)):
            if missing_mib <= 0:
                return
            missing_mib -= instance.memory_mib
            yield UnloadInstance(instance.id)

    def _eviction_key(self, view: View, instance: Instance) -> tuple[float, ...]:
        """Eviction order: the instance worth least goes first."""
        if self.evict == "lru":
            return (instance.last_used_us,)
        if self.evict == "two-list":
            return (self._uses.get(instance.id, 0) > FREQUENT_USES, instance.last_used_us)
        meter = view.functions[instance.function].arrivals
        silent_us = max(meter.interarrival_us, view.now_us - meter.last_us, 1.0)
        load_us = view.predictor.load_us(instance.function, view.devices[instance.device].spec.kind)
        return (load_us / silent_us / max(1, instance.memory_mib), instance.last_used_us)

    def _wake_for_quotas(self, view: View) -> Iterator[Decision]:
        """A timer for quotas: they refill without an event."""
        if self._free_order:
            for function in view.waiting.values():
                ready_us = over_quota_until_us(view, function)
                if ready_us:
                    yield RecheckAt(ready_us)


@dataclass(slots=True)
class PreloadedRequests:
    """The thesis's simulator reads all requests before it starts, and its queues hold those that have not arrived yet."""

    left: list[tuple[str, int]]  #: (function, arrival), in order of arrival

    def head(self, function: str) -> tuple[str, int] | None:
        return next((entry for entry in self.left if entry[0] == function), None)

    def functions(self) -> list[str]:
        return list(dict.fromkeys(function for function, _ in self.left))


def whole_units(device: DeviceSpec) -> int:
    return max((size for size in device.limits.sizes if size <= device.units), default=device.units)


def can_host(spec: FunctionSpec, device: DeviceSpec) -> bool:
    """Could it be loaded there at all? Slices that stand cannot be the whole GPU for one request and nothing for the next."""
    return spec.fits_family(device.family) and spec.memory_mib <= device.memory_mib and device.limits.per_batch


def over_quota_until_us(view: View, function: FunctionState) -> int:
    """When its quota lets it begin again; 0 if it may now."""
    ready_us = function.bucket.ready_at_us(view.now_us) if function.bucket else 0
    return ready_us if ready_us > view.now_us else 0


def resident_instance(view: View, device: Device, function: str) -> Instance | None:
    for one in device.instances:
        instance = view.instances[one]
        if instance.function == function and instance.phase in (InstancePhase.WARM, InstancePhase.LOADING):
            return instance
    return None


def request_us(view: View, function: str, device: Device) -> int:
    """One request alone on the whole of the device."""
    cores = view.functions[function].spec.cores_on(device.spec)
    return view.latency_us(function, device, 1, whole_units(device.spec), cores)
