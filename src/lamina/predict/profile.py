"""Latency profile of one function on one kind of device: small, text, versioned, never a pickle. And two of them compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from lamina.errors import BadValue, read_user_file

VERSION = 1


class Point(Struct, frozen=True, kw_only=True):
    """Measured latency at one (batch, units)."""

    batch: int
    units: int
    p50_us: float
    p99_us: float = 0.0  #: 0: not measured
    cores: int = 0  #: of the host that it had; 0: not measured by cores


class Traits(Struct, frozen=True):
    """Memory traffic of a function, as neighbours feel it: bytes moved in a batch, and weights that may stay in a cache."""

    parameter_bytes: float
    fixed_bytes: float
    item_bytes: float

    def bytes_moved(self, batch: int) -> float:
        return self.fixed_bytes + self.item_bytes * batch


class Handover(Struct, frozen=True):
    """Handover time of a batch beside its time on the slice: the way to its process, and that of its results back."""

    batch_us: float
    item_us: float = 0.0

    def time_us(self, batch: int) -> float:
        return self.batch_us + self.item_us * batch


class Profile(Struct, frozen=True, kw_only=True):
    function: str
    device: str  #: kind of device
    points: list[Point]
    load_us: int = 0
    memory_mib: int = 0
    bandwidth: float = 0.0  #: part of the peak memory bandwidth it asks for on the whole device; 0: not measured
    traits: Traits | None = None  #: None: not known
    handover: Handover | None = None  #: None: not measured
    spread: list[float] = field(default_factory=list)  #: of runs over their median: quantiles, evenly apart, least to most
    version: int = VERSION
    meta: dict[str, Any] = field(default_factory=dict)  #: driver, date, commit, source


_HINT = "a profile is a JSON file as written by lamina profile"


def read(path: str | Path) -> Profile:
    """A profile file; what is wrong with it is said with its name."""
    content = read_user_file(path, _HINT)
    try:
        profile = msgspec.json.decode(content, type=Profile)
    except msgspec.MsgspecError as error:
        raise BadValue(f"{path}: no profile: {error}", hint=_HINT) from None
    if profile.version != VERSION:
        raise BadValue(f"{path}: version {profile.version} of the profile format", hint=f"this is version {VERSION}")
    return profile


def read_all(folder: str | Path) -> list[Profile]:
    return [read(path) for path in sorted(Path(folder).glob("*.json"))]


def write(profile: Profile, path: str | Path) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


class PointChange(Struct, frozen=True, kw_only=True):
    batch: int
    units: int
    cores: int = 0
    before_us: float
    after_us: float
    ratio: float  #: after / before: 1.1 is 10 % slower


class ProfileComparison(Struct, frozen=True, kw_only=True):
    changes: list[PointChange]
    median_ratio: float
    biggest: PointChange
    only_before: int  #: places that one has and the other has not
    only_after: int


def compare_profiles(before: Profile, after: Profile) -> ProfileComparison:
    """By the medians of the places both have."""
    old = {(p.units, p.cores, p.batch): p.p50_us for p in before.points}
    new = {(p.units, p.cores, p.batch): p.p50_us for p in after.points}
    both = sorted(old.keys() & new.keys())
    if not both:
        raise BadValue(
            f"no place is in both: {_places(before)} before, {_places(after)} after",
            hint="profile both with the same batch sizes and units",
        )
    changes = [
        PointChange(
            units=u, cores=c, batch=b, before_us=old[u, c, b], after_us=new[u, c, b], ratio=_ratio(old[u, c, b], new[u, c, b])
        )
        for u, c, b in both
    ]
    return ProfileComparison(
        changes=changes,
        median_ratio=statistics.median(change.ratio for change in changes),
        biggest=_biggest(changes),
        only_before=len(old) - len(both),
        only_after=len(new) - len(both),
    )


def _ratio(before_us: float, after_us: float) -> float:
    return max(after_us, 0.001) / max(before_us, 0.001)


def _biggest(changes: Sequence[PointChange]) -> PointChange:
    """Twice as fast is as big a change as twice as slow."""
    return max(changes, key=lambda change: abs(math.log(change.ratio)))


def _places(profile: Profile) -> str:
    return f"{len(profile.points)} points"
