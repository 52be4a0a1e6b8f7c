"""Reprofiling: some points of a profile measured again, all others rescaled by how these have changed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable

Place = tuple[int, int]
"""A batch size and a number of units."""


def rescale_profile(profile: Profile, runs: Mapping[Place, Sequence[float]], **meta: Any) -> Profile:
    """Rescale by `runs` (microseconds): a row of units that was measured as its own points changed, others as all points."""
    before = ProfileTable([profile])
    now_us = {place: statistics.median(us) for place, us in runs.items()}
    ratios = {place: us / before.median_us(profile.function, profile.device, *place) for place, us in now_us.items()}
    rows = {units: statistics.median(r for (_, count), r in ratios.items() if count == units) for _, units in ratios}
    all_over = statistics.median(ratios.values())
    old = {(point.batch, point.units): point for point in profile.points}
    tail = statistics.median(max(1.0, point.p99_us / point.p50_us) if point.p50_us else 1.0 for point in profile.points)
    points = []
    for batch, units in sorted({*old, *now_us}, key=lambda place: (place[1], place[0])):
        known = old.get((batch, units))
        if (batch, units) in now_us:
            us = now_us[batch, units]
            p99_us = us * (known.p99_us / known.p50_us if known and known.p50_us else tail) if not known or known.p99_us else 0.0
            points.append(Point(batch=batch, units=units, p50_us=round(us, 1), p99_us=round(p99_us, 1)))
        elif known is not None:
            ratio = rows.get(units, all_over)
            points.append(replace(known, p50_us=round(known.p50_us * ratio, 1), p99_us=round(known.p99_us * ratio, 1)))
    return replace(profile, points=points, meta=profile.meta | meta)
