"""Slot assignment: which job runs in which reserved slot. Owner of the reservation table and of its members.

A call has its slots from when it is admitted, a job from when it comes up. A slot lapses when no job comes for it; one whose
batch has ended gives back what is left of it, and one whose batch overruns keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.workflow.runs import WorkflowRun
from lamina.published.admission.reservation_table import ReservationTable, ReservedSlot
from lamina.published.admission.run_reservation import expected_end_us

_NO_SLOT = ReservedSlot("", "", 0, 0, 0)
"""Where a job is that has no slot: in no table."""


@dataclass(slots=True)
class SlotAssignment:
    table: ReservationTable = field(default_factory=ReservationTable)
    _plans: dict[str, dict[str, list[ReservedSlot]]] = field(default_factory=dict)  #: call -> function -> slots
    _runs: dict[str, WorkflowRun] = field(default_factory=dict)  #: calls whose first job has been seen
    _slots: dict[int, tuple[Job, ReservedSlot]] = field(default_factory=dict)  #: jobs that wait, and where they will run

    def set_slots(self, call: str, slots: dict[str, list[ReservedSlot]]) -> None:
        self._plans[call] = slots

    def slot_of(self, job: Job) -> ReservedSlot | None:
        """Where it was booked; None if it never was, or if that has lapsed."""
        known = self._slots.get(job.id)
        if known is None:
            call = job.run.call.id
            self._runs[call] = job.run
            booked = self._plans.get(call, {}).get(job.function)
            known = self._slots[job.id] = (job, booked.pop(0) if booked else _NO_SLOT)
        slot = known[1]
        return slot if slot.is_reserved and not slot.batch_id else None

    def assign(self, job: Job, slot: ReservedSlot) -> None:
        """A slot of its own."""
        slot.members.append(job.run.call.id)
        slot.latest_us = job.expires_us
        self.table.add(slot)
        self._slots[job.id] = (job, slot)

    def on_batch_started(self, jobs: list[Job], slot: ReservedSlot) -> None:
        slot.batch_id = jobs[0].batch_id
        for job in jobs:
            self._slots.pop(job.id, None)

    def cancel(self, slot: ReservedSlot, jobs: list[Job]) -> None:
        """These have missed it: they have no place."""
        self.table.remove(slot)
        for job in jobs:
            self._slots[job.id] = (job, _NO_SLOT)

    def expire(self, view: View) -> None:
        """Remove slots that are over or will not be used: so it is with runs that went another way than the most expensive."""
        for call in [
            call for call, run in self._runs.items() if run.is_answered or not (run.jobs or run.pending_data or run.executions)
        ]:
            self._on_call_ended(call)
        expected = set()
        for job, slot in list(self._slots.values()):
            if job.id in job.run.jobs:
                expected.add(id(slot))
            else:  # its result is not needed any more: jobs that share its slot need not wait for it
                del self._slots[job.id]
                self._withdraw(slot, job.run.call.id)
        for device in self.table.devices:
            if device not in view.devices:
                self.table.drop_device(device)
                continue
            for slot in list(self.table.slots_on(device)):
                if slot.batch_id:
                    if slot.batch_id not in view.batches:
                        self.table.remove(slot)
                    elif slot.end_us <= view.now_us:
                        slot.end_us = expected_end_us(slot.start_us, view.now_us)
                elif slot.end_us <= view.now_us and id(slot) not in expected:
                    self.table.remove(slot)

    def drop_lapsed(self) -> None:
        """Drop calls without any reserved slot left."""
        self._plans = {
            call: plan for call, plan in self._plans.items() if any(slot.is_reserved for own in plan.values() for slot in own)
        }

    def _on_call_ended(self, call: str) -> None:
        del self._runs[call]
        for slots in self._plans.pop(call, {}).values():
            for slot in slots:
                self._withdraw(slot, call)

    def _withdraw(self, slot: ReservedSlot, call: str) -> None:
        """One job of this call will not come."""
        for those in (slot.members, slot.uncertain):
            if call in those:
                those.remove(call)
        if not slot.members and not slot.batch_id:
            self.table.remove(slot)
