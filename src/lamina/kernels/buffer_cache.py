"""Buffer cache: which weights and buffers stay in a memory that cannot hold all of them. One rule, wherever something is evicted.

Credit of an entry = the level at which it was last used + uses x cost of loading / size. The one with the least credit is
evicted, and its credit becomes the level, so that what was popular long ago sinks below what is used now
(GreedyDual-Size-Frequency). Of equal credit, the one that came first goes. Nothing here touches memory: its owner asks what to
evict, and moves the bytes itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

from lamina.errors import LaminaError

COPY_BYTES_PER_US, COPY_FIXED_US = 55_000, 300
"""From pinned memory to a device over PCIe 5, measured on an H200, and what a copy takes however small it is."""


def copy_time_us(size: int) -> int:
    """Microseconds to bring so many bytes to a device: the cost of loading."""
    return size // COPY_BYTES_PER_US + COPY_FIXED_US


class NoBufferRoom(LaminaError):
    """It cannot be loaded now: everything that could make room is in use, or it is larger than the memory."""

    status = 503
    code: ClassVar[str] = "no-room"
    is_permanent = False  #: there would be none without anything else either


@dataclass(slots=True)
class _CachedBuffer:
    size: int
    cost_us: float
    arrived: int  #: a count, which tells equal credits apart
    uses: int = 0
    credit: float = 0.0
    busy: int = 0  #: batches that need it at this moment


@dataclass(slots=True)
class BufferCache:
    """Entries of one memory, by key."""

    capacity: int
    used: int = 0
    level: float = 0.0
    loads: int = 0
    evictions: int = 0
    _held: dict[str, _CachedBuffer] = field(default_factory=dict)
    _order: list[tuple[float, int, str]] = field(default_factory=list)  #: a heap of those that may go; some are out of date

    full_error: ClassVar[type[NoBufferRoom]] = NoBufferRoom
    full_hint: ClassVar[str] = "give it more memory, or use fewer at once"

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def place(self, key: str, size: int, cost_us: float) -> list[str]:
        """Insert an entry; returns those to evict first. Raises `NoBufferRoom` and changes nothing if that is not enough."""
        assert key not in self._held, f"{key} is there already"
        gone = self._victims(size)
        if gone is None:
            error = self.full_error(
                f"no room for {size >> 20} MiB: {self.used >> 20} of {self.capacity >> 20} MiB are used", hint=self.full_hint
            )
            error.is_permanent = size > self.capacity
            raise error
        for victim in gone:
            self._evict(victim)
        self.loads += 1
        self._held[key] = held = _CachedBuffer(size, cost_us, self.loads, credit=self.level)
        self.used += size
        heappush(self._order, (held.credit, held.arrived, key))
        return gone

    def pin(self, key: str) -> None:
        """Pin an entry for a batch; it cannot be evicted before `unpin`."""
        held = self._held[key]
        held.uses += 1
        held.busy += 1
        held.credit = self.level + held.uses * held.cost_us / max(1, held.size)

    def unpin(self, key: str) -> None:
        held = self._held[key]
        held.busy -= 1
        if not held.busy:
            heappush(self._order, (held.credit, held.arrived, key))
            if len(self._order) > 64 + 4 * len(self._held):
                self._order = [(one.credit, one.arrived, name) for name, one in self._held.items() if not one.busy]
                self._order.sort()

    def remove(self, key: str) -> None:
        self.used -= self._held.pop(key).size

    def evict_next(self, keep: str) -> str | None:
        """Evict the next one although there seems to be room; None if all but `keep` are in use."""
        kept, found = None, self._pop_idle()
        while found is not None and found[2] == keep:
            kept, found = found, self._pop_idle()
        if kept is not None:
            heappush(self._order, kept)
        if found is None:
            return None
        self._evict(found[2])
        return found[2]

    def _evict(self, key: str) -> None:
        self.level = max(self.level, self._held[key].credit)
        self.remove(key)
        self.evictions += 1

    def _pop_idle(self) -> tuple[float, int, str] | None:
        """The entry that goes next, off the heap. What is found out of date on the way is forgotten."""
        while self._order:
            credit, arrived, key = found = heappop(self._order)
            held = self._held.get(key)
            if held is not None and not held.busy and (held.credit, held.arrived) == (credit, arrived):
                return found
        return None

    def _victims(self, size: int) -> list[str] | None:
        """Entries to evict for one of this size, off the heap; None, and nothing is changed, if all of them are not enough."""
        need = self.used + size - self.capacity
        gone: dict[str, tuple[float, int, str]] = {}
        while need > 0:
            found = self._pop_idle()
            if found is None:
                for entry in gone.values():
                    heappush(self._order, entry)
                return None
            if found[2] not in gone:  # used at no cost it is on the heap twice
                gone[found[2]] = found
                need -= self._held[found[2]].size
        return list(gone)

    def check(self) -> None:
        assert self.used == sum(held.size for held in self._held.values()) <= self.capacity, "the cache miscounts"
        assert all(held.busy >= 0 for held in self._held.values()), "more ends than beginnings"
        able = {key for _, _, key in self._order}
        assert all(held.busy or key in able for key, held in self._held.items()), "something could never be evicted"
