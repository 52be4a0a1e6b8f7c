"""Reference counts of shared-memory slots: the gateway's side of all slots, its own and those of its workers.

Three things keep a slot: its run (until `release`), a batch that reads it (until `unpin`), and code that went on looking
into it afterwards (for ever; see `shm`). References are counted here because workers die and the gateway does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from lamina.errors import LaminaError
from lamina.values.references import DeviceRef, ReleaseSlots, ShmRef, Stored
from lamina.values.shm import INLINE_BYTES, RefCountedSlots, ShmPool, ShmReader
from lamina.values.shm_directory import FOREIGN, BadSlot, ShmDirectory, is_foreign, spill_base

GATEWAY = "gateway"


class WorkerSlots(RefCountedSlots):
    """Result slots of one worker that are still referenced here. They may outlive it."""

    def __init__(self, folder: ShmDirectory, owner: str) -> None:
        super().__init__(owner)
        self.held: set[int] = set()
        self.is_orphaned = False
        self._directory = folder
        self._reusable: list[int] = []
        self._retired_for_good: list[int] = []

    def on_worker_lost(self) -> None:
        """Remove the slots of a dead worker that are not referenced."""
        self.is_orphaned = True
        self._directory.unlink_all(self.owner, but=self.held)

    def take_releases(self) -> list[ReleaseSlots]:
        """Releases to be sent along with the next batch: only then does the worker need room."""
        if not self._reusable and not self._retired_for_good:
            return []
        release = ReleaseSlots(self._reusable, self._retired_for_good)
        self._reusable, self._retired_for_good = [], []
        return [release]

    def _recycle(self, slot: int, again: bool) -> None:
        if slot not in self.held:
            raise BadSlot(f"slot {slot} of {self.owner} holds nothing")
        self.held.remove(slot)
        if self.is_orphaned:
            self._directory.unlink(self.owner, slot)
        else:
            (self._reusable if again else self._retired_for_good).append(slot)


class ValueLost(LaminaError):
    """Loss of a value that was only on a device or another machine, when that died. `steps`: those that it was the result of."""

    status = 503
    code: ClassVar[str] = "value-lost"

    def __init__(self, message: str, *, steps: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.steps = tuple(steps)


class DeviceSlots(RefCountedSlots):
    """Values that are on a device. `forget` is called for those without references; copies made for others go with them."""

    def __init__(self, owner: str, forget: Callable[[int], None], free: Callable[[ShmRef], None]) -> None:
        super().__init__(owner)
        self.held: set[int] = set()
        self.copies: dict[int, Stored] = {}
        self.lost: set[int] = set()  #: asked for, and not there any more
        self._drop_on_device = forget
        self._free_copy = free

    def _recycle(self, slot: int, again: bool) -> None:
        self.held.discard(slot)
        self.lost.discard(slot)
        self._drop_on_device(slot)
        copy = self.copies.pop(slot, None)
        if isinstance(copy, ShmRef):
            self._free_copy(copy)


class SlotReferences:
    def __init__(self, pool_bytes: int, base: str | None = None, spill_bytes: int = 0) -> None:
        self.directory = ShmDirectory(base, spill_base=spill_base() if spill_bytes else None)
        self.pool = ShmPool(self.directory.path, GATEWAY, pool_bytes, spill_bytes)
        self.reader = ShmReader(self.directory.path)
        self._slots: dict[str, RefCountedSlots] = {GATEWAY: self.pool}
        self._owners_made = 0

    def add_worker(self, user: int = 0) -> WorkerSlots:
        """Add a new worker's slots, under an owner name no other has had. `user`: it runs as this one; 0: as the server's."""
        self._owners_made += 1
        slots = WorkerSlots(self.directory, f"{FOREIGN if user else 'w'}{self._owners_made}")
        if user:
            self.directory.add_foreign(slots.owner, user)
        self._slots[slots.owner] = slots
        return slots

    def add_device(self, forget: Callable[[int], None]) -> DeviceSlots:
        """Add slots for the values a new executor keeps on its device."""
        self._owners_made += 1
        slots = DeviceSlots(f"d{self._owners_made}", forget, self.release)
        self._slots[slots.owner] = slots
        return slots

    def remove_device(self, slots: DeviceSlots) -> None:
        """Drop a device: its values are gone, but for copies that running batches still read."""
        for slot in list(slots.held):
            slots.free(slot)
        self._slots.pop(slots.owner, None)

    def on_worker_lost(self, slots: WorkerSlots) -> None:
        slots.on_worker_lost()
        self._close_if_done(slots)

    def pin(self, stored: Stored, reads: list[ShmRef], device: str = "", user: int = 0) -> Stored:
        """Pin a value for a batch that reads it; its slot, if it has one, is added to `reads`.

        A value that is on another device than `device` must have been fetched before. `user`: the batch runs as this one, and its
        slot is not used again: whatever came into it later could be read there too.
        """
        if isinstance(stored, DeviceRef) and stored.owner != device:
            held = self._slots.get(stored.owner)
            copy = held.copies.get(stored.slot) if isinstance(held, DeviceSlots) else None
            if copy is None:
                raise ValueLost(f"a value was lost with {stored.owner}, where it was")
            if isinstance(copy, bytes):
                return copy
            stored = copy
        if isinstance(stored, ShmRef):
            slots = self._slots.get(stored.owner)
            if slots is None:
                raise BadSlot(f"slot {stored.slot} of {stored.owner} is gone")
            slots.pin(stored.slot)
        elif len(stored) <= INLINE_BYTES:
            return stored
        else:
            ref = self.pool.put(stored)
            if ref is None:
                return stored
            self.pool.pin(ref.slot)
            self.pool.free(ref.slot)  # it is for this batch alone
            stored = ref
        reads.append(stored)
        if user and not is_foreign(stored.owner):  # slots of its own user it may read
            self.directory.show(stored, user)
            self.retire(stored)
        return stored

    def unpin(self, reads: list[ShmRef]) -> None:
        for ref in reads:
            slots = self._slots.get(ref.owner)
            if slots is None:  # a device that is gone
                continue
            slots.unpin(ref.slot)
            self._close_if_done(slots)

    def retire(self, ref: ShmRef) -> None:
        self._slots[ref.owner].retire(ref.slot)

    def release(self, ref: ShmRef) -> None:
        """Drop the reference of the run."""
        slots = self._slots.get(ref.owner)
        if slots is not None:
            slots.free(ref.slot)
            self._close_if_done(slots)

    def accept_results(self, slots: WorkerSlots, given: list[ShmRef]) -> bool:
        """Take over results. A reference names a file and a length, and both are checked: False if any is wrong."""
        numbers = {ref.slot for ref in given}
        if len(numbers) < len(given) or numbers & slots.held:
            return False
        if any(ref.owner != slots.owner or not self.directory.has_slot(ref) for ref in given):
            return False
        slots.held |= numbers
        return True

    def serial(self, ref: ShmRef) -> int:
        """Serial of the value in a slot of this process' own; 0: it is another's, and not known."""
        return self.pool.serial(ref.slot) if ref.owner == self.pool.owner else 0

    def is_current(self, owner: str, slot: int, serial: int) -> bool:
        """Whether a value is still in its slot."""
        return owner != self.pool.owner or self.pool.serial(slot) == serial

    def trim(self) -> None:
        """Give back shared memory that is not in use; called now and then."""
        self.pool.trim()
        self.reader.trim()

    def close(self) -> None:
        self.pool.close()
        self.reader.close()
        self.directory.close()

    def _close_if_done(self, slots: RefCountedSlots) -> None:
        if isinstance(slots, WorkerSlots) and slots.is_orphaned and not slots.held and slots.owner in self._slots:
            del self._slots[slots.owner]
            self.directory.unlink_all(slots.owner)
            self.reader.drop_owner(slots.owner)
