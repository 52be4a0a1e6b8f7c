"""Online latency predictor: learns from what is served, with or without a profile to start from, and detects drift.

Per (function, device kind, units, cores): a curve over batch sizes where there is no profile. Each size seen keeps its own mean
and mean deviation, so steps in the curve (a matrix product of four rows may cost as much as one of sixteen) are learnt as they
are; sizes not seen are read off between their neighbours. Where there is a profile, only the ratio of observed to profiled time
is learnt: the shape of the profile survives and its scale is corrected. Planning adds two mean deviations: a plan on the mean is
late half of the time.

Drift: a machine that is slower from now on (another clock, another driver) is another matter than one slow run. A running sum
(CUSUM) tells them apart: each observation adds how far it is from the mean, in mean deviations, less one and at most three, so
that noise adds up to nothing, one outlier is not enough and three in a row are. What was seen since the sum left zero then is the
new level.

A profile has an interval of its own: from its median to the time it plans with, and as far to the other side. If most of what is
seen lies outside, the profile is stale: `stale_profiles()` names it, so that it is measured again, and until then plans have
a wider margin, since a profile that is wrong where it can be seen may be wrong in its shape too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from msgspec import structs

from lamina.planner.interference import InterferenceModel
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable

PLAN_DEVIATIONS = 2.0  #: mean deviations that a plan adds
INITIAL_DEVIATION = 0.05  #: deviation assumed of something seen once
SMOOTHING = 0.1  #: weight of the newest observation
MAX_RATIO = 4.0  #: times the mean: more than that counts as a stall of the machine, and no more than this is learnt from it
BEGINNING = 3  #: runs of a function without a profile before the best of them is believed to be possible at all
CUSUM_SLACK = 1.0  #: mean deviations an observation may be off before it counts towards a change
CUSUM_CLIP = 3.0  #: and no more than this many count
CUSUM_THRESHOLD = 5.5  #: sum of what counted that makes a change of level
MIN_OBSERVATIONS = 4  #: observations before a change can be told from a beginning
STALE_SHARE = 0.5  #: share of observations outside of a profile's interval that makes it stale
STALE_MIN_OBSERVATIONS = 8  #: observations before that can be said
MIN_INTERVAL = 0.05  #: an interval is no narrower than this to either side
STALE_MARGIN = 0.1  #: of a stale profile, on top of the deviation seen
SOFT_SLICE_DEVIATIONS = 1.4  #: mean deviations that a plan adds where slices are soft


@dataclass(slots=True)
class _Cusum:
    """Two-sided CUSUM: has the level changed, and to what? One sum for slower, one for faster."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    since: list[list[float]] = field(default_factory=lambda: [[], []])  #: observations since each sum left zero

    def add(self, value: float, mean: float, deviation: float) -> list[float]:
        """The observations of the new level, or nothing."""
        off = (value - mean) / max(deviation, 0.2 * INITIAL_DEVIATION * mean)
        for side, sign in enumerate((1.0, -1.0)):
            self.sums[side] = max(0.0, self.sums[side] + min(CUSUM_CLIP, sign * off) - CUSUM_SLACK)
            if not self.sums[side]:
                self.since[side].clear()
                continue
            self.since[side].append(value)
            if self.sums[side] > CUSUM_THRESHOLD:
                level = self.since[side][-8:]
                self.sums, self.since = [0.0, 0.0], [[], []]
                return level
        return []


@dataclass(slots=True)
class DriftingMean:
    """Running mean of one quantity that follows level changes. `minimum` is the best ever, in a profile or since."""

    mean: float
    deviation: float
    minimum: float
    count: int = 1
    level_changes: int = 0  #: of level that were followed
    _cusum: _Cusum = field(default_factory=_Cusum)

    def observe(self, value: float) -> None:
        is_doubted = self.mean < self.minimum
        self.count += 1
        self.minimum = min(self.minimum, value)
        # the first run of a size is often slow, and tells nothing
        if is_doubted or (self.count <= 3 and value < 0.5 * self.mean):
            self.mean, self.deviation = value, INITIAL_DEVIATION * value
            return
        value = min(value, MAX_RATIO * self.mean)
        level = self._cusum.add(value, self.mean, self.deviation) if self.count > MIN_OBSERVATIONS else []
        if level:
            self.level_changes += 1
            self.mean = median(level)  # the first of them may still be of the old level
            spread = median(abs(seen - self.mean) for seen in level)
            self.deviation, self.count = (
                max(INITIAL_DEVIATION * self.mean, spread),
                1,
            )  # a beginning: if it was a stall, the next run says so
            return
        step = max(SMOOTHING, 1 / self.count)
        self.deviation += step * (abs(value - self.mean) - self.deviation)
        self.mean += step * (value - self.mean)

    def relax(self, is_beginning: bool = False) -> None:
        """Believe it less, and a beginning least of all: all that was seen may be one slow run, which no other has shown yet."""
        least = 0.0 if is_beginning else self.minimum
        self.mean += (0.3 if self.count > MIN_OBSERVATIONS else 0.7) * (least - self.mean)
        self.deviation *= 0.7

    @property
    def planning_value(self) -> float:
        return self.mean + PLAN_DEVIATIONS * self.deviation


@dataclass(slots=True)
class LatencyCurve:
    """Monotone curve by pooling: where a bigger batch looks faster than a smaller one, both get their weighted mean, so one
    unlucky run of a rare size is overruled by many of its neighbour."""

    sizes: dict[int, DriftingMean] = field(default_factory=dict)
    _points: list[tuple[int, float]] = field(default_factory=list)  #: (size, time), both growing; empty: to be made
    _cache: dict[int, float] = field(default_factory=dict)

    def observe(self, batch: int, value: float) -> None:
        self._invalidate()
        if batch in self.sizes:
            self.sizes[batch].observe(value)
        else:
            self.sizes[batch] = DriftingMean(value, self._expected_deviation() * value, value)

    def _expected_deviation(self) -> float:
        """Mean deviation to expect of a size seen once, over its time: that of the others. Were it less, sizes seldom seen would
        look best, and a plan that chooses among them would break its promises."""
        seen = sum(size.count for size in self.sizes.values())
        return (
            max(INITIAL_DEVIATION, sum(size.count * size.deviation / size.mean for size in self.sizes.values()) / seen)
            if seen
            else INITIAL_DEVIATION
        )

    def relax(self) -> None:
        self._invalidate()
        is_beginning = sum(size.count for size in self.sizes.values()) < BEGINNING
        for size in self.sizes.values():
            size.relax(is_beginning)

    def planning_us(self, batch: int) -> float:
        value = self._cache.get(batch)
        if value is None:
            value = self._cache[batch] = self._interpolate(batch)
        return value

    def _invalidate(self) -> None:
        self._points.clear()
        self._cache.clear()

    def _pooled(self) -> list[tuple[int, float]]:
        pools: list[tuple[float, float, list[int]]] = []  # time, weight, sizes
        for size in sorted(self.sizes):
            us, weight, members = self.sizes[size].planning_value, float(min(20, self.sizes[size].count)), [size]
            while pools and pools[-1][0] > us:
                before_us, before_weight, before = pools.pop()
                us = (us * weight + before_us * before_weight) / (weight + before_weight)
                weight += before_weight
                members = before + members
            pools.append((us, weight, members))
        return [(size, us) for us, _, members in pools for size in members]

    def _interpolate(self, batch: int) -> float:
        if not self._points:
            self._points = self._pooled()
        low, low_us = 0, 0.0
        for size, us in self._points:
            if size == batch:
                return us
            if size > batch:
                if not low:
                    return us * (0.5 + 0.5 * batch / size)
                return low_us + (us - low_us) * (batch - low) / (size - low)
            low, low_us = size, us
        return self._extrapolate(batch, low, low_us)

    def _extrapolate(self, batch: int, last: int, last_us: float) -> float:
        """Larger than any size seen: as it has grown so far, but at most as if half of it were fixed. That may be too
        hopeful, and then it is soon known better; a size thought too slow would never be tried."""
        first, first_us = self._points[0]
        slope = 0.5 * last_us / last
        if last > first:
            slope = min(slope, (last_us - first_us) / (last - first))
        return last_us + slope * (batch - last)


class StaleProfile(NamedTuple):
    """A profile that no longer matches observations."""

    function: str
    kind: str
    units: int
    cores: int
    ratio: float  #: observed over profiled time
    outside: float  #: share of what was seen lately that lies outside of its interval


@dataclass(slots=True)
class _Ratio:
    """Ratio of observed to profiled time, and how often it leaves the profile's own interval."""

    mean: DriftingMean
    seen: int = 0
    outside: float = 0.0
    is_separate: bool = False  #: this slice is another matter than the function as a whole
    is_stale: bool = False

    def observe(self, ratio: float, widest: float, everywhere: DriftingMean) -> None:
        """`widest`: how many times its median the profile plans with."""
        self.seen += 1
        apart = abs(self.mean.mean - everywhere.mean)
        self.is_separate = apart > (0.5 if self.is_separate else 1.0) * self.mean.deviation
        widest = max(widest, 1 + MIN_INTERVAL)
        left = not 1 / widest <= ratio <= widest
        self.outside += max(SMOOTHING, 1 / self.seen) * (left - self.outside)
        self.is_stale = self.seen >= STALE_MIN_OBSERVATIONS and self.outside > STALE_SHARE


@dataclass(slots=True)
class OnlinePredictor:
    """Online predictor: starts from `base` where it has an answer, from nothing where it has not.

    `soft_kinds` are kinds of devices with slices that share SMs. There a run takes as long as its neighbours let it: far less
    than on SMs of its own when it is alone, about as long beside others. No profile is stale for that, and deviations are wide
    for reasons that pass, so a plan adds less of them: else calls that would have been in time are dropped beside idle slices.
    """

    base: ProfileTable = field(default_factory=lambda: ProfileTable([]))
    soft_kinds: frozenset[str] = frozenset()
    _curves: dict[tuple[str, str, int, int], LatencyCurve] = field(default_factory=dict)
    _ratios: dict[tuple[str, str, int, int], _Ratio] = field(default_factory=dict)
    _all_slices: dict[tuple[str, str], DriftingMean] = field(default_factory=dict)  #: the same ratio, on all slices together
    _loads: dict[tuple[str, str], float] = field(default_factory=dict)
    _cache: dict[str, dict[tuple[str, int, int, int], int]] = field(default_factory=dict)  #: by function: until it learns more

    @property
    def interference(self) -> InterferenceModel | None:
        return self.base.interference

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        """A decision asks this a dozen times, and most answers are the same as for the one before."""
        known = self._cache.get(function)
        if known is None:
            known = self._cache[function] = {}
        key = (kind, batch, units, cores)
        us = known.get(key)
        if us is not None:
            return us
        everywhere = self._all_slices.get((function, kind))
        if everywhere is not None:
            plan = self._planning_ratio(everywhere, function, kind, units, cores)
            us = int(self.base.median_us(function, kind, batch, units, cores) * plan) + 1
        elif (curve := self._curves.get((function, kind, units, cores))) is not None:
            us = int(curve.planning_us(batch)) + 1
        else:
            us = self.base.latency_us(function, kind, batch, units, cores)
        known[key] = us
        return us

    def latencies_us(self, function: str, kind: str, batch: int, units: Sequence[int], cores: int = 0) -> list[int]:
        """Of all these slices, as tables of configurations ask."""
        everywhere = self._all_slices.get((function, kind))
        if everywhere is None:
            curves = [self._curves.get((function, kind, size, cores)) for size in units]
            base = self.base.latencies_us(function, kind, batch, units, cores)
            return [int(one.planning_us(batch)) + 1 if one is not None else us for one, us in zip(curves, base, strict=True)]
        medians = self.base.medians_us(function, kind, batch, units, cores)
        plans = [self._planning_ratio(everywhere, function, kind, size, cores) for size in units]
        return [int(us * plan) + 1 for us, plan in zip(medians, plans, strict=True)]

    def _planning_ratio(self, everywhere: DriftingMean, function: str, kind: str, units: int, cores: int) -> float:
        """Observed over profiled time on this slice, as plans count with it."""
        ratio = self._ratios.get((function, kind, units, cores))
        level = ratio.mean if ratio is not None and ratio.is_separate else everywhere
        if kind in self.soft_kinds:
            return level.mean + SOFT_SLICE_DEVIATIONS * level.deviation
        plan = level.mean + PLAN_DEVIATIONS * level.deviation
        return plan * (1 + STALE_MARGIN) if ratio is not None and ratio.is_stale else plan

    @property
    def level_changes(self) -> int:
        """How often a time has changed for good, over everything learnt so far."""
        learnt = [
            *(ratio.mean for ratio in self._ratios.values()),
            *(size for curve in self._curves.values() for size in curve.sizes.values()),
        ]
        return sum(mean.level_changes for mean in learnt)

    def stale_profiles(self) -> list[StaleProfile]:
        """Profiles to measure again."""
        found = sorted(key for key, ratio in self._ratios.items() if ratio.is_stale and key[1] not in self.soft_kinds)
        return [StaleProfile(*key, ratio=self._ratios[key].mean.mean, outside=self._ratios[key].outside) for key in found]

    def learnt_profiles(self, of: str = "") -> list[Profile]:
        """What is known by now, as profiles: those it began with at the scale that was seen, and curves learnt from nothing; of
        one function, or of all."""
        began = {(one.function, one.device): one for one in self.base.profiles if of in ("", one.function)}
        curves: dict[tuple[str, str], list[tuple[int, int, LatencyCurve]]] = {}
        for (function, kind, units, cores), curve in self._curves.items():
            if of in ("", function):
                curves.setdefault((function, kind), []).append((units, cores, curve))
        runs_of: dict[tuple[str, str], int] = {}
        for (function, kind, _, _), ratio in self._ratios.items():
            runs_of[function, kind] = runs_of.get((function, kind), 0) + ratio.seen
        found = []
        for key in sorted({*began, *curves}):
            base = began.get(key) or Profile(function=key[0], device=key[1], points=[])
            points = [self._learnt_point(key, point) for point in base.points]
            points += [
                Point(batch=batch, units=units, cores=cores, p50_us=seen.mean, p99_us=seen.planning_value)
                for units, cores, curve in curves.get(key, ())
                for batch, seen in sorted(curve.sizes.items())
            ]
            runs = runs_of.get(key, 0) + sum(seen.count for _, _, curve in curves.get(key, ()) for seen in curve.sizes.values())
            meta = base.meta | {"source": "learnt", "runs": runs} if runs else base.meta
            found.append(structs.replace(base, points=points, load_us=self.load_us(*key), meta=meta))
        return found

    def _learnt_point(self, key: tuple[str, str], point: Point) -> Point:
        everywhere = self._all_slices.get(key)
        if everywhere is None:
            return point
        ratio = self._ratios.get((*key, point.units, point.cores))
        level = ratio.mean if ratio is not None and ratio.is_separate else everywhere
        return structs.replace(point, p50_us=point.p50_us * level.mean, p99_us=point.p50_us * level.planning_value)

    def replace_profile(self, profile: Profile) -> None:
        """It was measured again: from now on this is its profile, and what was learnt about the old one is void."""
        kept = [one for one in self.base.profiles if (one.function, one.device) != (profile.function, profile.device)]
        self.base = ProfileTable([*kept, profile], self.base.margin, self.base.interference)
        self.reset(profile.function, profile.device)

    def reset(self, function: str = "", kind: str = "") -> None:
        """What was learnt of a function there is void: its profile is a new one. Without a name, of all of them."""
        self._cache.clear()
        learnt: tuple[dict[Any, Any], ...] = (self._curves, self._ratios, self._all_slices)
        for known in learnt:
            for key in [key for key in known if not function or key[:2] == (function, kind)]:
                del known[key]

    def load_us(self, function: str, kind: str) -> int:
        return int(self._loads.get((function, kind), 0.0)) or self.base.load_us(function, kind)

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        key = (function, kind, units, cores)
        self._cache.pop(function, None)
        device_us = max(1, device_us)  # a mean of zero could never grow again: what is learnt is cut at a multiple of it
        profiled = self.base.median_us(function, kind, batch, units, cores)
        if not profiled:
            self._curves.setdefault(key, LatencyCurve()).observe(batch, float(device_us))
            return
        ratio = device_us / profiled
        everywhere = self._all_slices.get((function, kind))
        if everywhere is not None:
            everywhere.observe(ratio)
        else:
            everywhere = self._all_slices[function, kind] = DriftingMean(
                ratio, 2 * INITIAL_DEVIATION, min(1.0, ratio)
            )  # a profile was seen too
        if key in self._ratios:
            self._ratios[key].mean.observe(ratio)
        else:
            self._ratios[key] = _Ratio(DriftingMean(ratio, 2 * INITIAL_DEVIATION, min(1.0, ratio)))
        widest = self.base.latency_us(function, kind, batch, units, cores) / profiled
        self._ratios[key].observe(ratio, widest, everywhere)

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        key = (function, kind)
        self._loads[key] = load_us if key not in self._loads else self._loads[key] + 0.3 * (load_us - self._loads[key])

    def relax(self, function: str) -> None:
        """Calls are refused and nothing runs that could prove the prediction wrong: believe a little more."""
        self._cache.pop(function, None)
        for (name, _, _, _), curve in self._curves.items():
            if name == function:
                curve.relax()
        for (name, _, _, _), ratio in self._ratios.items():
            if name == function:
                ratio.mean.relax()
        for (name, _), everywhere in self._all_slices.items():
            if name == function:
                everywhere.relax()


def measured_times(predictor: object, of: str = "") -> list[tuple[str, int, float]]:
    """Usual times of batches of one that have been measured: function, units, microseconds; of one function, or of all."""
    if not isinstance(predictor, OnlinePredictor):
        return []
    known = predictor.learnt_profiles(of)
    return [(one.function, point.units, point.p50_us) for one in known for point in one.points if point.batch == 1]
