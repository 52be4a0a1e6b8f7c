"""Interference models: how much longer a batch takes beside others on the same device.

`LinearInterference` is gpu-let's (Choi et al., USENIX ATC 2022): a weighted sum of both sides' L2 and DRAM use; of several
neighbours the worst one counts, as it was fitted. `BandwidthInterference` is what was seen on an H200: slices keep compute
apart but not memory bandwidth, and as long as all demands together stay below 70 % of its peak there is little of it; above,
all batches slow down in proportion.

`FittedInterference` is fitted to measured co-locations. On an H200 cut into disjoint slices every batch is slowed by neighbours
although the sum of bandwidths is far from the peak. What tells most of it is, in this order: how large the function's weights are
(small models live from the L2 cache, and lose more when others use it), how many neighbours there are, how much bandwidth these
ask for, and how much the function itself asks for per unit it has. A straight line in those four (three of them as logarithms),
ridge-fitted to the logarithm of the slowdown: with 187 measured tenants more terms do not help functions that were left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.planner.interference import ColocatedBatch
from lamina.predict.device_presets import PRESETS
from lamina.predict.model_features import Record
from lamina.predict.profile import Point, Profile, Traits
from lamina.predict.profile_table import ProfileTable

if TYPE_CHECKING:
    from lamina.planner.partitioning.catalogue import InterferenceWeights  # a whole planner, which a server need not load

BANDWIDTH_LIMIT = 0.7
"""Part of the peak bandwidth that may be asked for before it hurts."""

Key = tuple[str, str]
"""Function, kind of device."""


@dataclass(frozen=True, slots=True)
class BandwidthInterference:
    demand: Mapping[Key, float]  #: of the peak, on the whole device; a function that is not in it asks for nothing
    limit: float = BANDWIDTH_LIMIT

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        """What it takes alone is in its profile already, however much of the bandwidth that is."""
        own = self._demand_of(function, kind)
        together = own + sum(self._demand_of(other, kind) for other in neighbours)
        return max(1.0, together / max(self.limit, own))

    def _demand_of(self, running: ColocatedBatch, kind: str) -> float:
        return self.demand.get((running.function, kind), 0.0) * running.share


def bandwidth_interference(profiles: Iterable[Profile], limit: float = BANDWIDTH_LIMIT) -> BandwidthInterference:
    """From what the profiles say; a profile that says nothing has no part in it."""
    return BandwidthInterference(
        {(profile.function, profile.device): profile.bandwidth for profile in profiles if profile.bandwidth}, limit
    )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Measured shares of peak L2 and DRAM bandwidth by batch size; linear between two sizes, constant beyond the last."""

    batches: tuple[int, ...]
    l2: tuple[float, ...]
    dram: tuple[float, ...]

    def interpolate(self, batch: int) -> tuple[float, float]:
        place = bisect_left(self.batches, batch)
        if place == len(self.batches):
            return self.l2[-1], self.dram[-1]
        if not place or self.batches[place] == batch:
            return self.l2[place], self.dram[place]
        low, high = self.batches[place - 1], self.batches[place]
        part = (batch - low) / (high - low)
        before, after = place - 1, place
        return (
            self.l2[before] + part * (self.l2[after] - self.l2[before]),
            self.dram[before] + part * (self.dram[after] - self.dram[before]),
        )


@dataclass(frozen=True, slots=True)
class LinearInterference:
    weights: Mapping[str, InterferenceWeights]  #: by kind of device; a kind that is not in it has no interference
    use: Mapping[Key, MemoryUse]
    _cache: dict[tuple[str, ColocatedBatch], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        if not neighbours or kind not in self.weights:
            return 1.0
        theirs = max(self._contributions(kind, other)[1] for other in neighbours)
        return max(1.0, self._contributions(kind, function)[0] + theirs)

    def _contributions(self, kind: str, running: ColocatedBatch) -> tuple[float, float]:
        """What it adds to its own slowdown, and to its neighbour's."""
        found = self._cache.get((kind, running))
        if found is None:
            use, weights = self.use.get((running.function, kind)), self.weights[kind]
            l2, dram = use.interpolate(running.batch) if use is not None else (0.0, 0.0)
            l2, dram = l2 * running.share, dram * running.share
            found = (
                weights.own_l2 * l2 + weights.own_dram * dram + weights.base,
                weights.other_l2 * l2 + weights.other_dram * dram,
            )
            self._cache[kind, running] = found
        return found


SHIPPED_REGRESSIONS = Path(__file__).parent / "models" / "neighbours"
RIDGE = 2.0
PEAK_GB_PER_S = {"h200": 4800.0}
"""GB/s of the memory."""


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
