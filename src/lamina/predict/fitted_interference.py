"""Interference model fitted to measured co-locations. The third model beside the two of `interference.py`.

On an H200 cut into disjoint slices every batch is slowed by neighbours although the sum of bandwidths is far from the peak. What
tells most of it is, in this order: how large the function's weights are (small models live from the L2 cache, and lose more
when others use it), how many neighbours there are, how much bandwidth these ask for, and how much the function itself asks
for per unit it has. A straight line in those four (three of them as logarithms), ridge-fitted to the logarithm of the
slowdown: with 187 measured tenants more terms do not help functions that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.planner.interference import ColocatedBatch
from lamina.predict.device_presets import PRESETS
from lamina.predict.model_features import Record
from lamina.predict.profile import Point, Profile, Traits
from lamina.predict.profile_table import ProfileTable

SHIPPED_REGRESSIONS = Path(__file__).parent / "models" / "neighbours"
RIDGE = 2.0
PEAK_GB_PER_S = {"h200": 4800.0}
"""GB/s of the memory."""

Key = tuple[str, str]
"""Function, kind of device."""


def traits_from_record(record: Record) -> Traits:
    """From a static record; bytes are those of all operators, as if nothing were cached."""
    once, eight = (record[f"read_bytes_b{batch}"] + record[f"written_bytes_b{batch}"] for batch in (1, 8))
    item = max(0.0, (eight - once) / 7)
    return Traits(float(max(1, record["param_bytes"])), float(max(1.0, once - item)), item)


def bandwidth_demand(traits: Traits, kind: str, points: Sequence[Point]) -> float:
    """Part of the peak bandwidth asked for on the whole device, at its worst batch; 0 where the peak is not known."""
    if kind not in PEAK_GB_PER_S or not points:
        return 0.0
    most = max(point.units for point in points)
    return max(
        traits.bytes_moved(point.batch) / point.p50_us / 1e3 / PEAK_GB_PER_S[kind] for point in points if point.units == most
    )


class ColocatedTenant(Struct, frozen=True):
    """One function of a co-location: `demand` is of the peak bandwidth, `share` of the device's units."""

    parameter_bytes: float
    demand: float
    share: float


def regression_terms(own: ColocatedTenant, others: Sequence[ColocatedTenant]) -> list[float]:
    return [
        math.log(own.parameter_bytes),
        float(len(others)),
        math.log(sum(other.demand for other in others) + 0.02),
        math.log(own.demand / own.share + 0.02),
    ]


class SlowdownRegression(Struct, frozen=True):
    """Linear regression of the logarithm of the slowdown on `regression_terms`, clipped to the fitted range."""

    base: float
    slopes: list[float]
    least: list[float]
    most: list[float]

    def slowdown(self, own: ColocatedTenant, others: Sequence[ColocatedTenant]) -> float:
        if not others:
            return 1.0
        inside = (
            min(max(x, low), high) for x, low, high in zip(regression_terms(own, others), self.least, self.most, strict=True)
        )
        return max(1.0, math.exp(self.base + sum(slope * x for slope, x in zip(self.slopes, inside, strict=True))))


def fit_slowdown(cases: Iterable[tuple[ColocatedTenant, Sequence[ColocatedTenant], float]]) -> SlowdownRegression:
    """From tenants, their neighbours and how many times longer they took."""
    import numpy as np

    seen = list(cases)
    if len(seen) < 10:
        raise BadValue(
            f"{len(seen)} co-located tenants are too few to fit a line to", hint="measure at least 10; 60 cases are of use"
        )
    rows = np.array([regression_terms(own, others) for own, others, _ in seen])
    logs = np.log([slowdown for *_, slowdown in seen])
    center, scale = rows.mean(0), rows.std(0) + 1e-9
    points = (rows - center) / scale
    slopes = np.linalg.solve(points.T @ points + RIDGE * np.eye(rows.shape[1]), points.T @ (logs - logs.mean())) / scale
    base = float(logs.mean() - slopes @ center)
    return SlowdownRegression(base, slopes.tolist(), rows.min(0).tolist(), rows.max(0).tolist())


def shipped_regression(kind: str) -> SlowdownRegression:
    path = SHIPPED_REGRESSIONS / f"{kind}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=SlowdownRegression)
    except OSError as error:
        raise BadValue(f"no fitted interference for device kind {kind!r}", hint="use the bandwidth model instead") from error


def fitted_interference(profiles: Iterable[Profile]) -> FittedInterference:
    """From profiles that have traits, for the kinds of devices something was fitted for."""
    known = [profile for profile in profiles if profile.traits is not None]
    kinds = {profile.device for profile in known}
    lines = {kind: shipped_regression(kind) for kind in kinds if (SHIPPED_REGRESSIONS / f"{kind}.json").exists()}
    if not lines:
        raise BadValue(
            "no profile with traits for a device kind with fitted interference",
            hint=f"there is {', '.join(sorted(p.stem for p in SHIPPED_REGRESSIONS.glob('*.json')))}; or use the bandwidth model",
        )
    traits = {(profile.function, profile.device): profile.traits for profile in known if profile.traits is not None}
    units = {kind: PRESETS[kind].units for kind in kinds if kind in PRESETS}
    return FittedInterference(lines, traits, ProfileTable(known), units)


@dataclass(frozen=True, slots=True)
class FittedInterference:
    """Fitted interference of functions with known traits and times; a function that is not in `traits` has no part in it."""

    regressions: Mapping[str, SlowdownRegression]  #: by kind of device
    traits: Mapping[Key, Traits]
    table: ProfileTable  #: times alone
    units: Mapping[str, int]  #: of a whole device, by kind
    _tenants: dict[tuple[str, ColocatedBatch], ColocatedTenant | None] = field(default_factory=dict, repr=False, compare=False)

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        own = self._tenant(function, kind)
        others = [side for other in neighbours if (side := self._tenant(other, kind)) is not None]
        return self.regressions[kind].slowdown(own, others) if own is not None and kind in self.regressions else 1.0

    def _tenant(self, running: ColocatedBatch, kind: str) -> ColocatedTenant | None:
        key = (kind, running)
        if key not in self._tenants:
            self._tenants[key] = self._make_tenant(running, kind)
        return self._tenants[key]

    def _make_tenant(self, running: ColocatedBatch, kind: str) -> ColocatedTenant | None:
        known = self.traits.get((running.function, kind))
        units = max(1, round(running.share * self.units.get(kind, 1)))
        alone_us = self.table.median_us(running.function, kind, running.batch, units) if known else 0.0
        if known is None or not alone_us or running.share <= 0:
            return None
        gb_s = known.bytes_moved(running.batch) / alone_us / 1e3
        return ColocatedTenant(known.parameter_bytes, gb_s / PEAK_GB_PER_S.get(kind, 1000.0), running.share)
