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
from lamina.values.references import DeviceRef, ErrorInfo, NodeRef, ShmRef
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


class RemoteValues:
    """Values of one machine. `release` is called for those that are not needed any more."""

    def __init__(self, parts: LeaderParts, address: str, key: TicketKey, release: Callable[[NodeRef], None]) -> None:
        self.address = address
        self._parts, self._key, self._release = parts, key, release
        self._values: dict[int, NodeRef] = {}  #: by the number they have here
        self._numbers = 0
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
        """The machine is gone, and its values with it."""
        self._values.clear()
        self._parts.fetcher.drop_machine(self.address)
        self._parts.references.remove_device(self.slots)
        self._parts.machine_of_owner.pop(self.slots.owner, None)
