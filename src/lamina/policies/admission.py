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

from lamina.core.actions import Refuse
from lamina.core.flow import Flow
from lamina.core.lease import Device, find_run
from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, Drop, Opening, Promise, Start, View, Wake
from lamina.core.queue import Job, Order
from lamina.core.state import FunctionState, Instance
from lamina.planner.batching import together
from lamina.planner.thesis.appointments import Appointments
from lamina.planner.thesis.booking import Booking, Grounds, batch_us
from lamina.planner.thesis.placements import Placement
from lamina.planner.thesis.prospects import Prospects
from lamina.planner.thesis.reservations import Slot
from lamina.policies._kaas import in_debt_until_us
from lamina.policies._keep import Keeper
from lamina.types import NEVER_US, Call

OFFERS = 4
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
    _booked: Appointments = field(default_factory=Appointments, init=False)
    _prospects: Prospects = field(init=False)
    _keeper: Keeper = field(default_factory=Keeper, init=False)
    _wakes: set[int] = field(default_factory=set, init=False)
    _dice: random.Random = field(default_factory=lambda: random.Random(0), init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._prospects = Prospects(self._keeper.suits, self.most)

    # -------------------------------------------------------------- admission

    def admit(self, view: View, call: Call) -> Promise | Refuse | None:
        self._booked.tidy(view)
        flow = view.flows[call.target]
        every = self._prospects.of(view, flow)
        if not every:
            return Refuse(call.id, "no-capacity")
        now_us, limit = view.now_us, call.cost_limit
        reserve_us = view.reserve_us(call.target)
        deadline_us = min(call.deadline_us, NEVER_US // 2) - reserve_us
        able = [placement for placement in every if now_us + placement.latency_us <= deadline_us]
        if limit:
            able = self._prospects.affordable(view, flow, able, limit, self._booked.table if self.batching else ())
        spares = (self.spare, 0.0) if self.spare and self.batching and call.deadline_us < NEVER_US else (0.0,)
        for placement in self._candidates(view, able):
            for spare in spares:
                booking = Booking(self._grounds(view), placement, call.id, deadline_us, self.batching, spare)
                done = booking.book(self._prospects.shape(flow), limit)
                if done is not None:
                    return self._promise(view, call, booking.slots, done[0])
        offer_us = self._offer(view, flow, every, limit)
        if not offer_us:
            return Refuse(call.id, "cost" if limit else "no-capacity")
        needed_us = offer_us + reserve_us
        late_us = now_us + needed_us - call.deadline_us
        return Refuse(call.id, "deadline", retry_after_us=max(1_000, late_us), offer_us=needed_us)

    def _candidates(self, view: View, able: list[Placement]) -> list[Placement]:
        """In the order they are tried: instances that stand, then the undominated, then the rest; cheapest first."""
        if self.draws:
            drawn = self._dice.sample(able, min(self.draws, len(able)))
            self._dice.shuffle(drawn)
            return drawn

        def rank(placement: Placement) -> tuple[bool, bool]:
            return not all(_stands(view, name, kind) for name, kind in placement.kinds.items()), placement.dominated

        return sorted(able, key=rank)[: self.tries]

    def _offer(self, view: View, flow: Flow, every: list[Placement], limit: float) -> int:
        """The soonest a run could be done within its cost, 0 if it could not at any time."""
        best_us = 0
        for placement in sorted(every, key=lambda placement: placement.latency_us)[:OFFERS]:
            booking = Booking(self._grounds(view), placement, "", NEVER_US // 2, self.batching)
            done = booking.book(self._prospects.shape(flow), limit)
            if done is not None:
                booking.undo()
                in_us = done[0] - view.now_us
                best_us = min(best_us, in_us) if best_us else in_us
        return best_us

    def _promise(self, view: View, call: Call, slots: dict[str, list[Slot]], finish_us: int) -> Promise | None:
        self._booked.plan(call.id, slots)
        self._keeper.want(slots)
        self._wakes |= {slot.start_us for own in slots.values() for slot in own if slot.start_us > view.now_us}
        return Promise(finish_us - view.now_us) if call.deadline_us < NEVER_US else None

    def _grounds(self, view: View) -> Grounds:
        table = self._booked.table
        return Grounds(view, table, lambda function, device: self._keeper.fits(view, table, function, device))

    # --------------------------------------------------------------- dispatch

    def dispatch(self, view: View) -> Iterator[Decision]:
        self._booked.tidy(view)
        yield from self._keeper.load(view, self._booked.table)
        for function in list(view.waiting.values()):
            waiting: dict[Slot, list[Job]] = {}
            for job in function.queue.jobs():
                slot = self._booked.of(job) or self._anew(view, function, job)
                if slot is not None:
                    waiting.setdefault(slot, []).append(job)
                elif job.id in job.run.jobs and self._hopeless(view, function, job):  # a drop may have ended other runs
                    yield Drop(job)
            for slot, jobs in waiting.items():
                yield from self._try(view, function, slot, [job for job in jobs if job.id in job.run.jobs])
        yield from self._keeper.load(view, self._booked.table)
        for at_us in sorted(self._wakes):
            yield Wake(at_us)
        self._wakes.clear()

    def _anew(self, view: View, function: FunctionState, job: Job) -> Slot | None:
        """The soonest slot for jobs that were not expected (more items, a second round) or missed their slot."""
        grounds = self._grounds(view)
        found = []
        for device in view.devices.values():
            if self._keeper.suits(function.spec, device.spec):
                slot = grounds.earliest(function, device, view.now_us, job.expires_us)
                if slot is not None:
                    found.append(slot)
        best = min(found, key=lambda slot: slot.end_us, default=None)
        if best is not None:
            self._booked.give(job, best)
            self._keeper.want({function.spec.name: [best]})
            if best.start_us > view.now_us:
                self._wakes.add(best.start_us)
        return best

    def _hopeless(self, view: View, function: FunctionState, job: Job) -> bool:
        """Is there no point in waiting for a place: no time for it, or a place that would be too late? What has been lost
        and is backing off, or finds the memory taken, may still come back in time."""
        able = [device for device in view.devices.values() if self._keeper.suits(function.spec, device.spec)]
        least_us = min((batch_us(view, function, device, 1) for device in able), default=0)
        grounds = self._grounds(view)
        return view.now_us + least_us > job.expires_us or any(grounds.ready_us(function, device) >= 0 for device in able)

    def _try(self, view: View, function: FunctionState, slot: Slot, jobs: list[Job]) -> Iterator[Decision]:
        """Start the slot if it is its time, or if it can be earlier; jobs that are not here then have missed it."""
        now_us, table = view.now_us, self._booked.table
        complete = len(jobs) >= len(slot.members)
        if not jobs:
            return
        ready_us = in_debt_until_us(view, function)
        if ready_us:
            self._wakes.add(ready_us)
            return
        if not complete and now_us <= slot.start_us:
            if now_us == slot.start_us:
                self._wakes.add(now_us + 1)  # what makes it complete may happen in this very instant
            return
        jobs = together(jobs[: function.spec.max_batch])  # a new version may take fewer; the others are booked anew
        place = self._place(view, function, slot, len(jobs))
        if place is None:
            stands = any(one.device == slot.device for one in function.instances.values())
            if not stands:  # what was loaded for it has been lost
                self._keeper.want({function.spec.name: [slot]})
            fits = stands or self._keeper.fits(view, table, function, view.devices[slot.device])
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
        why = f"booked for {len(slot.members)} jobs, ends by {slot.end_us} us" if view.explaining else ""
        yield Start(jobs, Opening(instance, device, mask, None, now_us, slot.cores), why)
        self._booked.begun(jobs, slot)
        if len(jobs) < len(slot.members):
            self._wakes.add(now_us + 1)

    def _place(self, view: View, function: FunctionState, slot: Slot, count: int) -> tuple[Instance, Device, int, int] | None:
        """Its own units, or, to be earlier or not later, others of the same kind that are not reserved."""
        now_us = view.now_us
        own = view.devices[slot.device]
        for device in (own, *(d for d in view.devices.values() if d is not own and d.spec.kind == own.spec.kind)):
            instance = next((one for one in function.instances.values() if _can_start(one, function, device)), None)
            if instance is None or function.spec.cores_on(device.spec) > device.cores_free:
                continue
            units, limits = function.spec.units_on(device.spec), device.spec.limits
            if units > view.most_units(function, device):
                continue
            if not find_run(device.everything & ~device.busy, units, limits.aligned, device.spec.units):
                continue
            length_us = batch_us(view, function, device, count)
            taken = self._booked.table.taken(device.spec.id, now_us, now_us + length_us, slot) | device.busy
            if device is own and slot.mask.bit_count() == units and not slot.mask & taken:
                return instance, device, slot.mask, length_us
            mask = find_run(device.everything & ~taken, units, limits.aligned, device.spec.units)
            if mask:
                return instance, device, mask, length_us
        return None

    def _move(self, view: View, function: FunctionState, slot: Slot, jobs: list[Job]) -> Iterator[Decision]:
        """Its time is over, and its place is taken: each of its jobs gets another slot. Where there is none now, it is looked
        for again when something happens."""
        self._booked.cancel(slot, jobs)
        for job in jobs:
            other = self._anew(view, function, job) if job.id in job.run.jobs else None
            if other is not None:
                yield from self._try(view, function, other, [job])

    def scale(self, view: View) -> Iterator[Decision]:
        self._prospects.forget()
        self._booked.tidy(view)
        self._booked.forget_lapsed()
        yield from self._keeper.scale(view, self._booked.table)


def _stands(view: View, function: str, kind: str) -> bool:
    instances = view.functions[function].instances.values()
    return any(view.devices[one.device].spec.kind == kind and one.phase is Phase.WARM for one in instances)


def _can_start(instance: Instance, function: FunctionState, device: Device) -> bool:
    able = instance.device == device.spec.id and instance.phase is Phase.WARM
    return able and instance.has_room(function.batches_at_once(device))
