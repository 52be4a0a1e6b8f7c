"""Comparison of two profiles of one function, point by point: what has become slower, and what faster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

from lamina.errors import BadValue
from lamina.predict.profile import Profile


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
