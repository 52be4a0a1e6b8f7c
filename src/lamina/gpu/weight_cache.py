"""Weight cache: which weights stay on the device when not all of them fit, by cost of loading, size and use.

Credit of a set of weights = the level at which it was last used + uses x cost of loading / size. The one with the least
credit is evicted, and its credit becomes the level, so that what was popular long ago sinks below what is used now
(GreedyDual-Size-Frequency). Nothing here touches a device: the weight store asks what to evict, and moves the bytes itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lamina.errors import LaminaError


class NoDeviceMemory(LaminaError):
    """It cannot be loaded now: everything that could make room is in use, or it is larger than the device."""

    status = 503
    code: ClassVar[str] = "no-room"
    is_permanent = False  #: there would be none without any other weights either


@dataclass(slots=True)
class _CachedWeights:
    size: int
    cost_us: float
    uses: int = 0
    credit: float = 0.0
    busy: int = 0  #: batches that need it at this moment


@dataclass(slots=True)
class WeightCache:
    """Cached sets of weights of one device, by key."""

    capacity: int
    used: int = 0
    level: float = 0.0
    loads: int = 0
    evictions: int = 0
    _held: dict[str, _CachedWeights] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def place(self, key: str, size: int, cost_us: float) -> list[str]:
        """Insert a set; returns the ones to evict first. Raises `NoDeviceMemory` and changes nothing if that is not enough."""
        assert key not in self._held, f"{key} is there already"
        gone = self._victims(size)
        if gone is None:
            error = NoDeviceMemory(
                f"no room for {size >> 20} MiB: {self.used >> 20} of {self.capacity >> 20} MiB are used",
                hint="use a larger device, or fewer functions at once",
            )
            error.is_permanent = size > self.capacity
            raise error
        for victim in gone:
            self._evict(victim)
        self._held[key] = _CachedWeights(size, cost_us, credit=self.level)
        self.used += size
        self.loads += 1
        return gone

    def pin(self, key: str) -> None:
        """Pin a set for a batch; it cannot be evicted before `unpin`."""
        held = self._held[key]
        held.uses += 1
        held.busy += 1
        held.credit = self.level + held.uses * held.cost_us / max(1, held.size)

    def unpin(self, key: str) -> None:
        self._held[key].busy -= 1

    def remove(self, key: str) -> None:
        self.used -= self._held.pop(key).size

    def evict_next(self, keep: str) -> str | None:
        """Evict the next one although there seems to be room; None if all but `keep` are in use."""
        found = next((key for key in self._idle() if key != keep), None)
        if found is not None:
            self._evict(found)
        return found

    def _evict(self, key: str) -> None:
        self.level = max(self.level, self._held[key].credit)
        self.remove(key)
        self.evictions += 1

    def _idle(self) -> list[str]:
        """Unused sets, in the order of eviction."""
        return sorted((key for key in self._held if not self._held[key].busy), key=lambda key: self._held[key].credit)

    def _victims(self, size: int) -> list[str] | None:
        need = self.used + size - self.capacity
        gone: list[str] = []
        for key in self._idle():
            if need <= 0:
                break
            gone.append(key)
            need -= self._held[key].size
        return gone if need <= 0 else None

    def check(self) -> None:
        assert self.used == sum(held.size for held in self._held.values()) <= self.capacity, "the cache miscounts"
        assert all(held.busy >= 0 for held in self._held.values()), "more ends than beginnings"
