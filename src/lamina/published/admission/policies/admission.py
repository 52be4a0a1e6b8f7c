"""Admission control of whole workflows by reservations over time, with a limit on latency and one on cost.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 4, made sound. Ahead of time: all placements (function ->
kind of device) of a workflow with their latency and cost, the undominated first and the others as fall-back. When a call
arrives every job of its run is booked, on instances there are, in batches that wait, or on new ones, until a placement
meets *both* limits; else the call is refused at once, with the time it could have been done in as the offer. What is
booked is what is dispatched: units are reserved for an interval on one device, so a call that is admitted later cannot delay
one admitted before. (The thesis checks memory alone, takes the union of the two sets of placements where it needs the
intersection, and picks one of `draws` random placements at random.)

A job starts before its time when its units are free and no other reservation suffers. A job that comes too late for its
slot is reserved anew; a slot without a job lapses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, Decision, Drop, RecheckAt, Slot, Start, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.unit_blocks import find_block
from lamina.core.workflow.flow import Flow
from lamina.planner.batching import batchable_prefix
from lamina.published.admission.placements import CandidatePlacements, DevicePlacement, batch_us
from lamina.published.admission.reservation_table import ReservedSlot, SlotAssignment
from lamina.published.admission.reserved_instances import ReservedInstances
from lamina.published.admission.run_reservation import ReservationContext, RunReservation
from lamina.published.kaas.whole_gpu_policy import over_quota_until_us
from lamina.types import NEVER_US, Call

MAX_OFFERS = 4
"""Placements tried for an offer."""


@dataclass(slots=True)
class Policy:
    """A reservation over CPUs and GPUs made at arrival, or a refusal."""

    draws: int = 0  #: as published: so many placements at random, and one of those that would do; 0: the cheapest that does
    seed: int = 0
    batching: bool = True  #: join batches that wait
    spare: float = 0.5  #: part of its slack a call leaves between its steps, so that batches can still grow
    most: int = 4_096  #: placements of one workflow
    tries: int = 16  #: of them, for one call
    period_us: int = 1_000_000
    order: Order = "due"
    _slots: SlotAssignment = field(default_factory=SlotAssignment, init=False)
    _placements: CandidatePlacements = field(init=False)
    _instances: ReservedInstances = field(default_factory=ReservedInstances, init=False)
    _wakes: set[int] = field(default_factory=set, init=False)
    _rng: random.Random = field(default_factory=lambda: random.Random(0), init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._placements = CandidatePlacements(self._instances.can_host, self.most)

    # -------------------------------------------------------------- admission

    def admit(self, view: View, call: Call) -> Admitted | Reject | None:
        self._slots.expire(view)
        flow = view.flows[call.target]
        every = self._placements.placements_for(view, flow)
        if not every:
            return Reject(call.id, "no-capacity")
        now_us, limit = view.now_us, call.cost_limit
        reserve_us = view.admission_margin_us(call.target)
        deadline_us = min(call.deadline_us, NEVER_US // 2) - reserve_us
        able = [placement for placement in every if now_us + placement.latency_us <= deadline_us]
        if limit:
            able = self._placements.affordable(view, flow, able, limit, self._slots.table if self.batching else ())
        spares = (self.spare, 0.0) if self.spare and self.batching and call.deadline_us < NEVER_US else (0.0,)
        for placement in self._candidates(view, able):
            for spare in spares:
                booking = RunReservation(self._context(view), placement, call.id, deadline_us, self.batching, spare)
                done = booking.reserve(self._placements.shape_of(flow), limit)
                if done is not None:
                    return self._promise(view, call, booking.slots, done[0])
        offer_us = self._feasible_latency_us(view, flow, every, limit)
        if not offer_us:
            return Reject(call.id, "cost" if limit else "no-capacity")
        needed_us = offer_us + reserve_us
        late_us = now_us + needed_us - call.deadline_us
        return Reject(call.id, "deadline", retry_after_us=max(1_000, late_us), offer_us=needed_us)

    def _candidates(self, view: View, able: list[DevicePlacement]) -> list[DevicePlacement]:
        """In the order they are tried: instances that stand, then the undominated, then the rest; cheapest first."""
        if self.draws:
            drawn = self._rng.sample(able, min(self.draws, len(able)))
            self._rng.shuffle(drawn)
            return drawn

        def rank(placement: DevicePlacement) -> tuple[bool, bool]:
            return not all(_has_instance(view, name, kind) for name, kind in placement.kinds.items()), placement.dominated

        return sorted(able, key=rank)[: self.tries]

    def _feasible_latency_us(self, view: View, flow: Flow, every: list[DevicePlacement], limit: float) -> int:
        """The soonest a run could be done within its cost, 0 if it could not at any time."""
        best_us = 0
        for placement in sorted(every, key=lambda placement: placement.latency_us)[:MAX_OFFERS]:
            booking = RunReservation(self._context(view), placement, "", NEVER_US // 2, self.batching)
            done = booking.reserve(self._placements.shape_of(flow), limit)
            if done is not None:
                booking.undo()
                in_us = done[0] - view.now_us
                best_us = min(best_us, in_us) if best_us else in_us
        return best_us

    def _promise(self, view: View, call: Call, slots: dict[str, list[ReservedSlot]], finish_us: int) -> Admitted | None:
        self._slots.set_slots(call.id, slots)
        self._instances.request(slots)
        self._wakes |= {slot.start_us for own in slots.values() for slot in own if slot.start_us > view.now_us}
        return Admitted(finish_us - view.now_us) if call.deadline_us < NEVER_US else None

    def _context(self, view: View) -> ReservationContext:
        table = self._slots.table
        return ReservationContext(view, table, lambda function, device: self._instances.fits(view, table, function, device))

    # --------------------------------------------------------------- dispatch

    def dispatch(self, view: View) -> Iterator[Decision]:
        self._slots.expire(view)
        yield from self._instances.load(view, self._slots.table)
        for function in list(view.waiting.values()):
            waiting: dict[ReservedSlot, list[Job]] = {}
            for job in function.queue.jobs():
                slot = self._slots.slot_of(job) or self._reserve_again(view, function, job)
                if slot is not None:
                    waiting.setdefault(slot, []).append(job)
                elif job.id in job.run.jobs and self._is_infeasible(view, function, job):  # a drop may have ended other runs
                    yield Drop(job)
            for slot, jobs in waiting.items():
                yield from self._try(view, function, slot, [job for job in jobs if job.id in job.run.jobs])
        yield from self._instances.load(view, self._slots.table)
        for at_us in sorted(self._wakes):
            yield RecheckAt(at_us)
        self._wakes.clear()

    def _reserve_again(self, view: View, function: FunctionState, job: Job) -> ReservedSlot | None:
        """The soonest slot for jobs that were not expected (more items, a second round) or missed their slot."""
        grounds = self._context(view)
        found = []
        for device in view.devices.values():
            if self._instances.can_host(function.spec, device.spec):
                slot = grounds.earliest(function, device, view.now_us, job.expires_us)
                if slot is not None:
                    found.append(slot)
        best = min(found, key=lambda slot: slot.end_us, default=None)
        if best is not None:
            self._slots.assign(job, best)
            self._instances.request({function.spec.name: [best]})
            if best.start_us > view.now_us:
                self._wakes.add(best.start_us)
        return best

    def _is_infeasible(self, view: View, function: FunctionState, job: Job) -> bool:
        """Is there no point in waiting for a place: no time for it, or a place that would be too late? What has been lost
        and is backing off, or finds the memory taken, may still come back in time."""
        able = [device for device in view.devices.values() if self._instances.can_host(function.spec, device.spec)]
        least_us = min((batch_us(view, function, device, 1) for device in able), default=0)
        grounds = self._context(view)
        return view.now_us + least_us > job.expires_us or any(grounds.ready_us(function, device) >= 0 for device in able)

    def _try(self, view: View, function: FunctionState, slot: ReservedSlot, jobs: list[Job]) -> Iterator[Decision]:
        """Start the slot if it is its time, or if it can be earlier; jobs that are not here then have missed it."""
        now_us, table = view.now_us, self._slots.table
        complete = len(jobs) >= len(slot.members)
        if not jobs:
            return
        ready_us = over_quota_until_us(view, function)
        if ready_us:
            self._wakes.add(ready_us)
            return
        if not complete and now_us <= slot.start_us:
            if now_us == slot.start_us:
                self._wakes.add(now_us + 1)  # what makes it complete may happen in this very instant
            return
        jobs = batchable_prefix(jobs[: function.spec.max_batch])  # a new version may take fewer; the others are booked anew
        place = self._place(view, function, slot, len(jobs))
        if place is None:
            stands = any(one.device == slot.device for one in function.instances.values())
            if not stands:  # what was loaded for it has been lost
                self._instances.request({function.spec.name: [slot]})
            fits = stands or self._instances.fits(view, table, function, view.devices[slot.device])
            if now_us > slot.end_us or not fits:
                yield from self._move(view, function, slot, jobs)
            return
        instance, device, mask, length_us = place
        late = [job for job in jobs if now_us + length_us > job.expires_us and job.expires_us < NEVER_US]
        for job in late:
            if job.id in job.run.jobs:
                yield Drop(job)
        jobs = [job for job in jobs if job not in late and job.id in job.run.jobs]
        table.remove(slot)
        if not jobs:
            return
        slot.device, slot.mask, slot.start_us, slot.end_us = device.spec.id, mask, now_us, now_us + length_us
        slot.cores = function.spec.cores_on(device.spec)
        table.add(slot)
        why = f"booked for {len(slot.members)} jobs, ends by {slot.end_us} us" if view.explain else ""
        yield Start(jobs, Slot(instance, device, mask, None, view.reach_us(device), slot.cores), why)
        self._slots.on_batch_started(jobs, slot)
        if len(jobs) < len(slot.members):
            self._wakes.add(now_us + 1)

    def _place(
        self, view: View, function: FunctionState, slot: ReservedSlot, count: int
    ) -> tuple[Instance, Device, int, int] | None:
        """Its own units, or, to be earlier or not later, others of the same kind that are not reserved."""
        now_us = view.now_us
        own = view.devices[slot.device]
        for device in (own, *(d for d in view.devices.values() if d is not own and d.spec.kind == own.spec.kind)):
            instance = next((one for one in function.instances.values() if _can_start(one, function, device)), None)
            if instance is None or function.spec.cores_on(device.spec) > device.cores_free:
                continue
            units, limits = function.spec.units_on(device.spec), device.spec.limits
            if units > view.max_units_by_bandwidth(function, device):
                continue
            if not find_block(device.all_units & ~device.busy, units, limits.aligned, device.spec.units):
                continue
            length_us = batch_us(view, function, device, count)
            taken = self._slots.table.occupied_units(device.spec.id, now_us, now_us + length_us, slot) | device.busy
            if device is own and slot.mask.bit_count() == units and not slot.mask & taken:
                return instance, device, slot.mask, length_us
            mask = find_block(device.all_units & ~taken, units, limits.aligned, device.spec.units)
            if mask:
                return instance, device, mask, length_us
        return None

    def _move(self, view: View, function: FunctionState, slot: ReservedSlot, jobs: list[Job]) -> Iterator[Decision]:
        """Its time is over, and its place is taken: each of its jobs gets another slot. Where there is none now, it is looked
        for again when something happens."""
        self._slots.cancel(slot, jobs)
        for job in jobs:
            other = self._reserve_again(view, function, job) if job.id in job.run.jobs else None
            if other is not None:
                yield from self._try(view, function, other, [job])

    def scale(self, view: View) -> Iterator[Decision]:
        self._placements.invalidate()
        self._slots.expire(view)
        self._slots.drop_lapsed()
        yield from self._instances.scale(view, self._slots.table)


def _has_instance(view: View, function: str, kind: str) -> bool:
    instances = view.functions[function].instances.values()
    return any(view.devices[one.device].spec.kind == kind and one.phase is InstancePhase.WARM for one in instances)


def _can_start(instance: Instance, function: FunctionState, device: Device) -> bool:
    able = instance.device == device.spec.id and instance.phase is InstancePhase.WARM
    return able and instance.has_capacity(function.batches_at_once(device))
