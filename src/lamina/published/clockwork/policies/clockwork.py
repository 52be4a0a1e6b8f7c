"""Clockwork (OSDI 2020): one controller that knows how long everything takes, and promises nothing it cannot keep.

Source: Clockwork (OSDI 2020), as the thesis "Serverless Accelerators" (UCB/EECS-2022-88, chapter 4) compares itself with
it. A GPU runs one batch at a time, which has it whole; steps on a host take the cores they want. The next batch of a GPU
is chosen when it is free, or at most `window_us` before: of all models loaded there the one that has to start soonest,
with as many requests (1, 2, 4, 8, 16) as all are in time with. A request that cannot be in time any more is dropped at
that moment, on arrival as well.

The thesis models it naively: a whole workflow on one device, one run at a time, and nothing dropped however late. That is
`compat`, and used by the reproduction alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, Decision, Drop, RecheckAt, Slot, Start, View
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import Batch, FunctionState, Instance
from lamina.core.unit_blocks import find_block
from lamina.planner.batching import batchable_prefix, largest_batch_within
from lamina.published.admission.reservation_table import ReservationTable, ReservedSlot
from lamina.published.admission.reserved_instances import ReservedInstances
from lamina.published.kaas.whole_gpu_policy import over_quota_until_us, resident_instance, whole_units
from lamina.types import NEVER_US, Call

SIZES = (16, 8, 4, 2, 1)
LOOK_AHEAD = 64
"""Jobs of a function that are looked at for the next run: those in front belong to runs that are under way."""


@dataclass(slots=True)
class Policy:
    """The batch that has to start soonest goes next; what is late is dropped."""

    window_us: int = 5_000  #: how long before a device is free its next batch may be sent
    compat: bool = False  #: as the thesis has it: a run on one device, one at a time, nothing dropped
    period_us: int = 1_000_000
    order: Order = "due"
    _instances: ReservedInstances = field(default_factory=ReservedInstances, init=False)
    _table: ReservationTable = field(
        default_factory=ReservationTable, init=False
    )  #: empty: nothing is booked ahead of its window
    _run_of_device: dict[str, ActiveCall] = field(
        default_factory=dict, init=False
    )  #: as the thesis has it: device -> the run that has it

    def __post_init__(self) -> None:
        self._instances.awaited_stay = not self.compat  # there a run waits for its own device, wherever its models stand

    def admit(self, view: View, call: Call) -> Admitted | Reject | None:
        flow = view.flows[call.target]
        for name in flow.functions:
            if not any(self._instances.can_host(view.functions[name].spec, device.spec) for device in view.devices.values()):
                return Reject(call.id, "no-capacity")
        if self.compat:
            hosted = any(self._can_host_all(view, flow.functions, device) for device in view.devices.values())
            return None if hosted else Reject(call.id, "no-capacity")
        least_us = max(flow.path_us(first, lambda name: self._fastest_us(view, name)) for first in flow.start)
        late_us = view.now_us + least_us - call.deadline_us
        return Reject(call.id, "deadline", max(1_000, late_us), least_us) if late_us > 0 else None

    def _fastest_us(self, view: View, name: str) -> int:
        """One request, at once, where the model is; the load comes first if it is nowhere."""
        function = view.functions[name]
        hosts = [view.devices[one.device] for one in function.instances.values() if one.phase is InstancePhase.WARM]
        if hosts:
            return min(device.way_us + _batch_us(view, name, device, 1) for device in hosts)
        able = [device for device in view.devices.values() if self._instances.can_host(function.spec, device.spec)]
        times = [
            view.predictor.load_us(name, device.spec.kind) + device.way_us + _batch_us(view, name, device, 1) for device in able
        ]
        return min(times, default=0)

    def scale(self, view: View) -> Iterator[Decision]:
        yield from self._instances.scale(view, self._table)

    def dispatch(self, view: View) -> Iterator[Decision]:
        yield from (self._dispatch_one_by_one(view) if self.compat else self._dispatch_windows(view))
        yield from self._instances.load(view, self._table)

    # -------------------------------------------------------------- as it is

    def _dispatch_windows(self, view: View) -> Iterator[Decision]:
        for function in list(view.waiting.values()):
            yield from self._drop_late(view, function)
            if len(function.queue) and not function.instances and not over_quota_until_us(view, function):
                self._request_instance(view, function)
        wake_us = min(
            (until_us for one in view.waiting.values() if (until_us := over_quota_until_us(view, one))), default=NEVER_US
        )
        for device in view.devices.values():
            while view.waiting:
                behind = None
                if device.spec.family == "gpu":
                    behind = next((view.batches[batch_id] for batch_id in device.running), None)
                    if behind is not None and behind.follower is not None:
                        break
                at_us = view.reach_us(device)
                if behind is not None:
                    send_us = behind.expected_end_us - behind.handover_us() - self.window_us
                    if send_us > view.now_us:
                        wake_us = min(wake_us, send_us)
                        break
                    at_us = max(at_us, behind.expected_end_us)
                start = self._next(view, device, behind, at_us)
                if start is None:
                    break
                yield start
        if wake_us < NEVER_US and view.waiting:
            yield RecheckAt(wake_us)

    def _drop_late(self, view: View, function: FunctionState) -> Iterator[Decision]:
        least_us = self._fastest_us(view, function.spec.name) if function.instances else 0
        while len(function.queue):
            job = function.queue.head()  # the most urgent
            if view.now_us + least_us <= job.due_us:
                return
            yield Drop(job)

    def _next(self, view: View, device: Device, behind: Batch | None, at_us: int) -> Start | None:
        best: tuple[int, int] | None = None
        choice: Start | None = None
        for name, function in view.waiting.items():
            if over_quota_until_us(view, function):
                continue
            instance = resident_instance(view, device, name)
            mask = behind.mask if behind is not None else _block(function, device)
            cores = function.spec.cores_on(device.spec)
            enough = cores <= (behind.cores if behind is not None else device.cores_free)
            if instance is None or not mask or not enough or not _is_free(instance, function, device, behind):
                continue
            jobs = self._batch(view, function, device, at_us)
            if jobs:
                urgent = (jobs[0].due_us - _batch_us(view, name, device, len(jobs)), jobs[0].id)
                if best is None or urgent < best:
                    why = f"had to start by {urgent[0]} us" if view.explain else ""
                    best, choice = urgent, Start(jobs, Slot(instance, device, mask, behind, at_us, cores), why)
        return choice

    def _batch(self, view: View, function: FunctionState, device: Device, at_us: int) -> list[Job]:
        """The most urgent that can be in time here, and as many more as it can take with it."""
        name, most = function.spec.name, min(function.spec.max_batch, SIZES[0])
        queued = function.queue.first(2 * most)
        moving_us = max(view.transfer_us([job], device) for job in queued)

        def takes_us(size: int) -> int:
            return _batch_us(view, name, device, size) + size * moving_us

        able = batchable_prefix([job for job in queued if at_us + takes_us(1) <= job.due_us][:most])
        if not able:
            return []
        count = largest_batch_within(len(able), able[0].due_us - at_us, takes_us)
        return able[: next(size for size in SIZES if size <= max(1, count))]

    def _request_instance(self, view: View, function: FunctionState) -> None:
        """It is nowhere: it will be where there is most room for it."""
        able = [d for d in view.devices.values() if self._instances.fits(view, self._table, function, d)]
        if able:
            device = max(able, key=lambda d: (d.spec.family == "gpu", d.spec.memory_mib - d.memory_used_mib))
            self._instances.request({function.spec.name: [ReservedSlot(function.spec.name, device.spec.id, 0, 0, 0)]})

    # ------------------------------------------------- as the thesis has it

    def _dispatch_one_by_one(self, view: View) -> Iterator[Decision]:
        for name, device in view.devices.items():
            run = self._run_of_device.get(name)
            if run is None or not run.is_pending:
                run = self._claim_run(view, device)
            job = next((job for job in run.jobs.values() if job.is_queued), None) if run is not None else None
            if job is None or device.busy:
                continue
            instance = resident_instance(view, device, job.function)
            if instance is None:
                self._instances.request({job.function: [ReservedSlot(job.function, name, 0, 0, 0)]})
            elif instance.phase is InstancePhase.WARM:
                took_us = view.latency_us(job.function, device, 1, whole_units(device.spec))
                if view.now_us + took_us > job.expires_us:
                    yield Drop(job)  # past its timeout, which is not its deadline: the controller starts nothing there
                else:
                    mask = (1 << whole_units(device.spec)) - 1
                    yield Start([job], Slot(instance, device, mask, None, view.reach_us(device)))

    def _can_host_all(self, view: View, functions: Iterable[str], device: Device) -> bool:
        return all(self._instances.can_host(view.functions[name].spec, device.spec) for name in functions)

    def _claim_run(self, view: View, device: Device) -> ActiveCall | None:
        """The oldest run not begun yet that this device can do all of."""
        self._run_of_device.pop(device.spec.id, None)
        taken = {id(run) for run in self._run_of_device.values()}
        oldest: Job | None = None
        for function in view.waiting.values():
            for job in function.queue.first(LOOK_AHEAD):
                if (
                    id(job.run) not in taken
                    and (oldest is None or job.id < oldest.id)
                    and self._can_host_all(view, job.run.flow.functions, device)
                ):
                    oldest = job
        if oldest is not None:
            self._run_of_device[device.spec.id] = oldest.run
        return oldest.run if oldest is not None else None


def _units(function: FunctionState, device: Device) -> int:
    """A GPU is one executor; a host has cores for several."""
    return whole_units(device.spec) if device.spec.family == "gpu" else function.spec.units_on(device.spec)


def _block(function: FunctionState, device: Device) -> int:
    free = device.all_units & ~device.busy
    return find_block(free, _units(function, device), device.spec.limits.aligned, device.spec.units)


def _batch_us(view: View, name: str, device: Device, batch: int) -> int:
    function = view.functions[name]
    return view.latency_us(name, device, batch, _units(function, device), function.spec.cores_on(device.spec))


def _is_free(instance: Instance, function: FunctionState, device: Device, behind: Batch | None) -> bool:
    if instance.phase is not InstancePhase.WARM:
        return False
    return instance.has_capacity(function.batches_at_once(device)) or (behind is not None and behind.instance is instance)
