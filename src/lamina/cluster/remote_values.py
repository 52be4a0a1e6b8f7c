"""Remote values: what lies on another machine, an agent's or a front door's, as the leader holds it.

A large value stays where it was made. The leader counts references to it and gives tickets to fetch it; the machine that needs it
fetches it from there. Only what the leader itself must read comes to the leader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from lamina.cluster.credentials import TicketKey
from lamina.cluster.data_port import FetchFailed, make_request
from lamina.cluster.packages import PackageSource
from lamina.cluster.value_fetcher import Fetched, ValueFetcher
from lamina.core.actions import StartBatch
from lamina.core.events import Event
from lamina.drivers.engine import EngineShared, JobValues
from lamina.state.kv_state import StateTable
from lamina.values.references import DeviceRef, ErrorInfo, NodeRef, ShmRef, Stored
from lamina.values.slot_refs import SlotReferences, ValueLost


@dataclass(frozen=True, slots=True)
class LeaderParts:
    """What the leader's ends of other machines share with the server they belong to."""

    post: Callable[[Event], None]
    values: JobValues
    deadline_us: Callable[[str], int]
    shared: EngineShared
    references: SlotReferences
    state: StateTable
    packages: PackageSource
    fetcher: ValueFetcher
    machine_of_owner: dict[str, RemoteValues]  #: by owner of the values there

    def host_of(self, stored: Stored) -> RemoteValues | None:
        """The machine that others fetch a value from; None: it is here."""
        if not isinstance(stored, DeviceRef):
            return None
        found = self.machine_of_owner.get(stored.owner)
        return found if found is None or found.serves(stored) else None


class RemoteValues:
    """Values of one machine. `release` is called for those that are not needed any more."""

    def __init__(self, parts: LeaderParts, address: str, key: TicketKey, release: Callable[[NodeRef], None]) -> None:
        self.address = address
        self._parts, self._key, self._release = parts, key, release
        self._values: dict[int, NodeRef] = {}  #: by the number they have here
        self._numbers = 0
        self._moving: set[int] = set()  #: values that were asked for because the machine is about to leave
        self._is_closed = False
        self.slots = parts.references.add_device(self._forget)
        parts.machine_of_owner[self.slots.owner] = self

    def keep(self, there: NodeRef) -> DeviceRef:
        """Hold a value that stays there."""
        self._numbers += 1
        self._values[self._numbers] = there
        self.slots.held.add(self._numbers)
        return DeviceRef(self.slots.owner, self._numbers, there.size)

    def _forget(self, number: int) -> None:
        there = self._values.pop(number, None)
        if there is not None:
            self._release(there)
        self._remove_if_done()

    def serves(self, ref: ShmRef) -> bool:
        """Whether others are to fetch a value from there; of a machine that is about to leave only what is not here yet."""
        return ref.slot not in self._moving or ref.slot not in self.slots.copies

    def move_here(self, then: Callable[[], None]) -> bool:
        """The machine is about to leave: have copies of its values here. True: it may, and none of them is being read there;
        else `then` is called when one more has come, or failed to."""
        for number in self._values.keys() - self._moving:
            self._moving.add(number)
            if number not in self.slots.copies:
                self.bring(structs.replace(self._values[number], start=0), partial(self._on_moved, number, then))
        return not self.slots.is_read and self._values.keys() <= self.slots.copies.keys()

    def _on_moved(self, number: int, then: Callable[[], None], found: bytes | ShmRef | ErrorInfo) -> None:
        if number in self._values and not isinstance(found, ErrorInfo):
            self.slots.copies[number] = found
        else:
            if isinstance(found, ShmRef):
                self._parts.references.release(found)
            self._values.pop(number, None)  # there is no room for it here, most likely: it is lost with its machine
        then()

    def reference(self, ref: ShmRef, receiver: RemoteValues | None = None) -> NodeRef:
        """A value of this machine, for another one or for itself. Raises `ValueLost` if it could not be fetched once."""
        there = self._values.get(ref.slot)
        if there is None:
            raise ValueLost(f"a value was lost with {ref.owner}, where it was")
        address = "" if receiver is self else self.address
        ticket = make_request(self._key, there.owner, there.slot, ref.start, ref.size, there.serial) if address else b""
        return structs.replace(there, address=address, size=ref.size, start=ref.start, ticket=ticket)

    def missing(self, action: StartBatch) -> list[DeviceRef]:
        """Values of this machine that a batch on the leader's own devices needs, and that are not here yet."""
        if not self._values:
            return []
        leaves = [stored for job in action.jobs for _, stored in self._parts.values.inputs(job).leaves]
        mine = [stored for stored in leaves if isinstance(stored, DeviceRef) and stored.owner == self.slots.owner]
        return [ref for ref in dict.fromkeys(mine) if ref.slot not in self.slots.copies and ref.slot in self._values]

    def fetch(self, refs: list[DeviceRef], then: Callable[[], None]) -> None:
        """Call `then` when copies of all of them are here, or known to be lost."""
        left = len(refs)

        def fetched(number: int, found: bytes | ShmRef | ErrorInfo) -> None:
            nonlocal left
            if number in self._values and not isinstance(found, ErrorInfo):
                self.slots.copies[number] = found
            elif isinstance(found, ShmRef):
                self._parts.references.release(found)
            if isinstance(found, ErrorInfo):
                self._values.pop(number, None)  # asked for once: a step that needs it fails
            left -= 1
            if not left:
                then()

        for ref in refs:
            self.bring(structs.replace(self._values[ref.slot], start=0), partial(fetched, ref.slot))

    def bring(self, there: NodeRef, then: Callable[[bytes | ShmRef | ErrorInfo], None]) -> None:
        """Fetch a value into a slot of the leader's own."""
        ticket = make_request(self._key, there.owner, there.slot, there.start, there.size, there.serial)
        asked = structs.replace(there, address=self.address, ticket=ticket)

        def fetched(found: Fetched) -> None:
            then(ErrorInfo(type(found).__name__, found.message, hint=found.hint) if isinstance(found, FetchFailed) else found)

        self._parts.fetcher.bring(asked, fetched)

    def close(self) -> None:
        """The machine is gone, and its values with it, but for those that have a copy here."""
        self._is_closed = True
        self._values.clear()
        self._parts.fetcher.drop_machine(self.address)
        self._parts.machine_of_owner.pop(self.slots.owner, None)
        for number in self.slots.held - self.slots.copies.keys():
            self.slots.free(number)
        self._remove_if_done()

    def _remove_if_done(self) -> None:
        if self._is_closed and not self.slots.held:
            self._parts.references.remove_device(self.slots)
