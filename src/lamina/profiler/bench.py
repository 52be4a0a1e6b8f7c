"""Profiler bench: the interface to a device. Load the function, run one batch on one slice, time it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lamina.predict.profile import Handover, Traits
from lamina.types import DeviceSpec

GridPoint = tuple[int, int]
"""A batch size and a number of units."""


class TimedRun(NamedTuple):
    us: float  #: on the slice
    waited_us: float = 0.0  #: of it, runnable while another process had the core; 0 also where that cannot be told


class Bench(Protocol):
    device: DeviceSpec

    def load(self) -> int:
        """Brings the function up; returns how long that took, in microseconds."""
        ...

    def run(self, batch: int, units: int) -> TimedRun:
        """One batch on a slice of so many units. Raises the function's error, if it has one."""
        ...

    def memory_mib(self) -> int:
        """The most it has held so far; 0: cannot be told."""
        ...

    def device_info(self) -> dict[str, Any]:
        """What the machine is called and what drives it, for the profile."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ReportsTraits(Protocol):
    """A bench that reports the memory traffic of the function."""

    def traits(self) -> Traits | None: ...


@runtime_checkable
class CyclesSamples(Protocol):
    """A bench with samples that differ from each other. Batches of a point take them in turn, so after `sample_cycle` of them all
    have had theirs, and what one composition takes more than another is no chance any more."""

    def sample_cycle(self, batch: int) -> int: ...

    def set_sample_turn(self, place: GridPoint, count: int) -> None:
        """So many batches have counted there: the next one takes the samples that follow."""
        ...


@runtime_checkable
class ReportsHandover(Protocol):
    """A bench that reports the handover time of a batch beside its time on the slice."""

    def handover(self) -> Handover | None: ...


def size_ladder(most: int) -> list[int]:
    """Sizes worth asking about: every one up to 16, then eight to a doubling, and the last."""
    found = set(range(1, min(most, 16) + 1)) | {most}
    step = 2
    while 8 * step < most:
        found.update(range(8 * step, min(most, 16 * step) + 1, step))
        step *= 2
    return sorted(found)


def profile_grid(device: DeviceSpec, max_batch: int) -> list[GridPoint]:
    """All places a profile could have a point at."""
    units: Sequence[int] = sorted(size for size in device.limits.sizes if size <= device.units) or size_ladder(device.units)
    return [(batch, count) for count in units for batch in size_ladder(max_batch)]
