"""Comparison of two profiles of one function, point by point: what has become slower, and what faster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

from lamina.errors import BadValue
from lamina.predict.profile import Profile


class Change(Struct, frozen=True, kw_only=True):
    batch: int
    units: int
    cores: int = 0
    before_us: float
    after_us: float
    ratio: float  #: after / before: 1.1 is 10 % slower


class Comparison(Struct, frozen=True, kw_only=True):
    changes: list[Change]
    median_ratio: float
    biggest: Change
    only_before: int  #: places that one has and the other has not
    only_after: int


def compare(before: Profile, after: Profile) -> Comparison:
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
        Change(units=u, cores=c, batch=b, before_us=old[u, c, b], after_us=new[u, c, b], ratio=_ratio(old[u, c, b], new[u, c, b]))
        for u, c, b in both
    ]
    return Comparison(
        changes=changes,
        median_ratio=statistics.median(change.ratio for change in changes),
        biggest=_biggest(changes),
        only_before=len(old) - len(both),
        only_after=len(new) - len(both),
    )


def _ratio(before_us: float, after_us: float) -> float:
    return max(after_us, 0.001) / max(before_us, 0.001)


def _biggest(changes: Sequence[Change]) -> Change:
    """Twice as fast is as big a change as twice as slow."""
    return max(changes, key=lambda change: abs(math.log(change.ratio)))


def _places(profile: Profile) -> str:
    return f"{len(profile.points)} points"
