"""Reservation table: units of devices over time, as rectangles; and which job runs in which of its slots.

`SlotAssignment` owns the table. A call has its slots from when it is admitted, a job from when it comes up. A slot lapses when no
job comes for it; one whose batch has ended gives back what is left of it, and one whose batch overruns keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.unit_blocks import find_block
from lamina.types import NEVER_US, DeviceSpec

MAX_DELAY_US = 1_000_000
"""The most a step is put off so that its batch can grow, however much time its call has."""


def expected_end_us(since_us: int, now_us: int) -> int:
    """When to expect what should have ended by now: the longer it has taken, the longer it may still take."""
    return now_us + 1 + min(MAX_DELAY_US, (now_us - since_us) // 8)


@dataclass(slots=True, eq=False)
class ReservedSlot:
    """Units `mask` of a device from `start_us` until `end_us`, for a batch of one function."""

    function: str
    device: str
    mask: int
    start_us: int
    end_us: int
    cores: int = 0
    latest_us: int = NEVER_US  #: it must have ended by then, for the sake of those in it
    members: list[str] = field(default_factory=list)  #: calls, once for each of their jobs
    uncertain: list[str] = field(default_factory=list)  #: of them the calls that may take another branch
    batch_id: int = 0  #: the batch that runs in it; 0: not begun
    is_reserved: bool = False  #: it is in a table

    def overlaps(self, start_us: int, end_us: int) -> bool:
        return self.start_us < end_us and start_us < self.end_us


@dataclass(slots=True)
class ReservationTable:
    _slots: dict[str, list[ReservedSlot]] = field(default_factory=dict)  #: by device

    def __iter__(self) -> Iterator[ReservedSlot]:
        for slots in self._slots.values():
            yield from slots

    def slots_on(self, device: str) -> list[ReservedSlot]:
        return self._slots.get(device, [])

    def add(self, slot: ReservedSlot) -> None:
        self._slots.setdefault(slot.device, []).append(slot)
        slot.is_reserved = True

    def remove(self, slot: ReservedSlot) -> None:
        if slot.is_reserved:
            self._slots[slot.device].remove(slot)
            slot.is_reserved = False

    def drop_device(self, device: str) -> None:
        """It is gone, and what was booked there with it."""
        for slot in self._slots.pop(device, ()):
            slot.is_reserved = False

    @property
    def devices(self) -> list[str]:
        return list(self._slots)

    def occupied_units(self, device: str, start_us: int, end_us: int, without: ReservedSlot | None = None) -> int:
        """Units reserved at any time between."""
        mask = 0
        for slot in self._slots.get(device, ()):
            if slot is not without and slot.start_us < end_us and start_us < slot.end_us:
                mask |= slot.mask
        return mask

    def occupied_cores(self, device: str, start_us: int, end_us: int, without: ReservedSlot | None = None) -> int:
        """Cores of the host taken at the worst moment between, or more: slots that do not meet each other are added up."""
        return sum(slot.cores for slot in self.slots_on(device) if slot is not without and slot.overlaps(start_us, end_us))

    def fits(self, spec: DeviceSpec, slot: ReservedSlot, start_us: int, end_us: int) -> bool:
        """Could this slot be there then, if it were not where it is?"""
        if self.occupied_units(spec.id, start_us, end_us, slot) & slot.mask:
            return False
        return not slot.cores or slot.cores + self.occupied_cores(spec.id, start_us, end_us, slot) <= spec.cores

    def earliest(
        self,
        spec: DeviceSpec,
        units: int,
        ready_us: int,
        length_us: int,
        *,
        function: str = "",
        lanes: int = 0,
        cores: int = 0,
        busy: int = 0,
        by_us: int = NEVER_US,
    ) -> tuple[int, int]:
        """When and where so many units are free together for so long, ending at `by_us` at the latest: (start, units).

        At most `lanes` slots of one function meet, where there is such a limit. `busy` is left out altogether. (0, 0) if
        there is no such place. Slots begin where something ends, so only ends need to be tried.
        """
        around = [slot for slot in self.slots_on(spec.id) if slot.end_us > ready_us]
        everything = (1 << spec.units) - 1
        for start_us in (ready_us, *sorted({slot.end_us for slot in around})):
            end_us = start_us + length_us
            if end_us > by_us:
                break
            taken, together, held = busy, 0, 0
            for slot in around:
                if slot.start_us < end_us and start_us < slot.end_us:
                    taken |= slot.mask
                    together += slot.function == function
                    held += slot.cores
            if (lanes and together >= lanes) or (cores and held + cores > spec.cores):
                continue
            mask = find_block(everything & ~taken, units, spec.limits.aligned, spec.units)
            if mask:
                return start_us, mask
        return 0, 0

    def check(self) -> None:
        for device, slots in self._slots.items():
            for place, slot in enumerate(slots):
                assert slot.start_us < slot.end_us, f"a slot on {device} that takes no time"
                for other in slots[:place]:
                    apart = not slot.mask & other.mask or not slot.overlaps(other.start_us, other.end_us)
                    assert apart, f"two slots on {device} have the same units at the same time"


# ---------------------------------------------------------------------------------- slot assignment


_NO_SLOT = ReservedSlot("", "", 0, 0, 0)
"""Where a job is that has no slot: in no table."""


@dataclass(slots=True)
class SlotAssignment:
    table: ReservationTable = field(default_factory=ReservationTable)
    _plans: dict[str, dict[str, list[ReservedSlot]]] = field(default_factory=dict)  #: call -> function -> slots
    _runs: dict[str, ActiveCall] = field(default_factory=dict)  #: calls whose first job has been seen
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
        for call in [call for call, run in self._runs.items() if run.is_ended or not run.is_pending]:
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
