"""Latency learnt from what is served, with or without a profile to start from.

Per (function, device kind, units, cores) a curve over batch sizes: each size seen keeps its own mean and mean deviation, so steps
in the curve (a matrix product of four rows may cost as much as one of sixteen) are learnt as they are; sizes not seen are
read off between their neighbours. Where a profile exists, only the ratio of observed to profiled time is learnt: the shape
of the profile survives and its scale is corrected. Planning adds two mean deviations: a plan on the mean is late half of
the time.

A machine that is slower from now on (another clock, another driver) is another matter than one slow run. A running sum tells
them apart (CUSUM): each observation adds how far it is from the mean, in mean deviations, less one and at most three, so
that noise adds up to nothing, one outlier is not enough and three in a row are. What was seen since the sum left zero then
is the new level.

A profile has an interval of its own: from its median to the time it plans with, and as far to the other side. If most of what is
seen lies outside, the profile is stale: `stale()` names it, so that somebody measures again, and until then plans have
a wider margin, since a profile that is wrong where it can be seen may be wrong in its shape too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from lamina.planner.neighbours import Interference
from lamina.predict.profile import Profile
from lamina.predict.table import Table

WIDEN = 2.0
FIRST = 0.05  #: deviation assumed of something seen once
STEP = 0.1  #: weight of the newest observation
MOST = 4.0  #: times the mean: more than that counts as a stall of the machine, and no more than this is learnt from it
ALLOWED = 1.0  #: mean deviations an observation may be off before it counts towards a change
FARTHEST = 3.0  #: and no more than this many count
CHANGED = 5.5  #: sum of what counted that makes a change of level
SETTLED = 4  #: observations before a change can be told from a beginning
OUTSIDE = 0.5  #: share of observations outside of a profile's interval that makes it stale
ENOUGH = 8  #: observations before that can be said
NARROWEST = 0.05  #: an interval is no narrower than this to either side
WIDER = 0.1  #: of a stale profile, on top of the deviation seen


class Stale(NamedTuple):
    """A profile that no longer says what is seen."""

    function: str
    kind: str
    units: int
    cores: int
    ratio: float  #: observed over profiled time
    outside: float  #: share of what was seen lately that lies outside of its interval


@dataclass(slots=True)
class _Drift:
    """Has the level changed, and to what? Two sums: one for slower, one for faster."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    since: list[list[float]] = field(default_factory=lambda: [[], []])  #: observations since each sum left zero

    def add(self, value: float, mean: float, deviation: float) -> list[float]:
        """The observations of the new level, or nothing."""
        off = (value - mean) / max(deviation, 0.2 * FIRST * mean)
        for side, sign in enumerate((1.0, -1.0)):
            self.sums[side] = max(0.0, self.sums[side] + min(FARTHEST, sign * off) - ALLOWED)
            if not self.sums[side]:
                self.since[side].clear()
                continue
            self.since[side].append(value)
            if self.sums[side] > CHANGED:
                level = self.since[side][-8:]
                self.sums, self.since = [0.0, 0.0], [[], []]
                return level
        return []


@dataclass(slots=True)
class _Mean:
    """Of one batch size. `least` is the best it has ever been."""

    mean: float
    deviation: float
    least: float
    count: int = 1
    changes: int = 0  #: of level that were followed
    _drift: _Drift = field(default_factory=_Drift)

    def add(self, value: float) -> None:
        self.count += 1
        self.least = min(self.least, value)
        if self.count <= 3 and value < 0.5 * self.mean:  # the first run of a size is often slow, and tells nothing
            self.mean, self.deviation = value, FIRST * value
            return
        value = min(value, MOST * self.mean)
        level = self._drift.add(value, self.mean, self.deviation) if self.count > SETTLED else []
        if level:
            self.changes += 1
            self.mean = median(level)  # the first of them may still be of the old level
            spread = median(abs(seen - self.mean) for seen in level)
            self.deviation, self.count = max(FIRST * self.mean, spread), 1  # a beginning: if it was a stall, the next run says so
            return
        self.deviation += STEP * (abs(value - self.mean) - self.deviation)
        self.mean += max(STEP, 1 / self.count) * (value - self.mean)

    def relax(self) -> None:
        self.mean += 0.3 * (self.least - self.mean)
        self.deviation *= 0.7

    @property
    def plan(self) -> float:
        return self.mean + WIDEN * self.deviation


@dataclass(slots=True)
class _Ratio:
    """Of observed to profiled time, and how often that leaves the profile's own interval."""

    mean: _Mean
    seen: int = 0
    outside: float = 0.0
    alone: bool = False  #: this slice is another matter than the function as a whole

    def add(self, ratio: float, widest: float, everywhere: _Mean) -> None:
        """`widest`: how many times its median the profile plans with."""
        self.seen += 1
        apart = abs(self.mean.mean - everywhere.mean)
        self.alone = apart > (0.5 if self.alone else 1.0) * self.mean.deviation
        widest = max(widest, 1 + NARROWEST)
        left = not 1 / widest <= ratio <= widest
        self.outside += max(STEP, 1 / self.seen) * (left - self.outside)

    @property
    def stale(self) -> bool:
        return self.seen >= ENOUGH and self.outside > OUTSIDE

    def plan(self, everywhere: _Mean) -> float:
        plan = self.mean.plan if self.alone else everywhere.plan
        return plan * (1 + WIDER) if self.stale else plan


@dataclass(slots=True)
class _Curve:
    """Made monotone by pooling: where a bigger batch looks faster than a smaller one, both get their weighted mean, so one
    unlucky run of a rare size is overruled by many of its neighbour."""

    sizes: dict[int, _Mean] = field(default_factory=dict)
    _points: list[tuple[int, float]] = field(default_factory=list)  #: (size, time), both growing; empty: to be made
    _known: dict[int, float] = field(default_factory=dict)

    def add(self, batch: int, value: float) -> None:
        self._forget()
        if batch in self.sizes:
            self.sizes[batch].add(value)
        else:
            self.sizes[batch] = _Mean(value, FIRST * value, value)

    def relax(self) -> None:
        self._forget()
        for size in self.sizes.values():
            size.relax()

    def at(self, batch: int) -> float:
        value = self._known.get(batch)
        if value is None:
            value = self._known[batch] = self._read(batch)
        return value

    def _forget(self) -> None:
        self._points.clear()
        self._known.clear()

    def _pooled(self) -> list[tuple[int, float]]:
        pools: list[tuple[float, float, list[int]]] = []  # time, weight, sizes
        for size in sorted(self.sizes):
            us, weight, members = self.sizes[size].plan, float(min(20, self.sizes[size].count)), [size]
            while pools and pools[-1][0] > us:
                before_us, before_weight, before = pools.pop()
                us = (us * weight + before_us * before_weight) / (weight + before_weight)
                weight += before_weight
                members = before + members
            pools.append((us, weight, members))
        return [(size, us) for us, _, members in pools for size in members]

    def _read(self, batch: int) -> float:
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
        return self._beyond(batch, low, low_us)

    def _beyond(self, batch: int, last: int, last_us: float) -> float:
        """Larger than any size seen: as it has grown so far, but at most as if half of it were fixed. That may be too
        hopeful, and then it is soon known better; a size thought too slow would never be tried."""
        first, first_us = self._points[0]
        slope = 0.5 * last_us / last
        if last > first:
            slope = min(slope, (last_us - first_us) / (last - first))
        return last_us + slope * (batch - last)


@dataclass(slots=True)
class Predictor:
    """Starts from `base` where it has an answer, from nothing where it has not."""

    base: Table = field(default_factory=lambda: Table([]))
    _curves: dict[tuple[str, str, int, int], _Curve] = field(default_factory=dict)
    _ratios: dict[tuple[str, str, int, int], _Ratio] = field(default_factory=dict)
    _everywhere: dict[tuple[str, str], _Mean] = field(default_factory=dict)  #: the same ratio, on all slices together
    _loads: dict[tuple[str, str], float] = field(default_factory=dict)
    _said: dict[str, dict[tuple[str, int, int, int], int]] = field(default_factory=dict)  #: by function: until it learns more

    @property
    def interference(self) -> Interference | None:
        return self.base.interference

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        """A decision asks this a dozen times, and most answers are the same as for the one before."""
        said = self._said.get(function)
        if said is None:
            said = self._said[function] = {}
        key = (kind, batch, units, cores)
        found = said.get(key)
        if found is None:
            found = said[key] = self._latency_us(function, kind, batch, units, cores)
        return found

    def _latency_us(self, function: str, kind: str, batch: int, units: int, cores: int) -> int:
        everywhere = self._everywhere.get((function, kind))
        if everywhere is not None:
            ratio = self._ratios.get((function, kind, units, cores))
            plan = ratio.plan(everywhere) if ratio is not None else everywhere.plan
            return int(self.base.typical_us(function, kind, batch, units, cores) * plan) + 1
        curve = self._curves.get((function, kind, units, cores))
        if curve is not None:
            return int(curve.at(batch)) + 1
        return self.base.latency_us(function, kind, batch, units, cores)

    @property
    def changes(self) -> int:
        """How often a time has changed for good, over everything learnt so far."""
        learnt = [
            *(ratio.mean for ratio in self._ratios.values()),
            *(size for curve in self._curves.values() for size in curve.sizes.values()),
        ]
        return sum(mean.changes for mean in learnt)

    def stale(self) -> list[Stale]:
        """Profiles to measure again."""
        found = sorted(key for key, ratio in self._ratios.items() if ratio.stale)
        return [Stale(*key, ratio=self._ratios[key].mean.mean, outside=self._ratios[key].outside) for key in found]

    def renew(self, profile: Profile) -> None:
        """It was measured again: from now on this is its profile, and what was learnt about the old one is void."""
        kept = [one for one in self.base.profiles if (one.function, one.device) != (profile.function, profile.device)]
        self.base = Table([*kept, profile], self.base.margin, self.base.interference)
        self.forget(profile.function, profile.device)

    def forget(self, function: str = "", kind: str = "") -> None:
        """What was learnt of a function there is void: its profile is a new one. Without a name, of all of them."""
        self._said.clear()
        learnt: tuple[dict[Any, Any], ...] = (self._curves, self._ratios, self._everywhere)
        for known in learnt:
            for key in [key for key in known if not function or key[:2] == (function, kind)]:
                del known[key]

    def load_us(self, function: str, kind: str) -> int:
        return int(self._loads.get((function, kind), 0.0)) or self.base.load_us(function, kind)

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        key = (function, kind, units, cores)
        self._said.pop(function, None)
        device_us = max(1, device_us)  # a mean of zero could never grow again: what is learnt is cut at a multiple of it
        profiled = self.base.typical_us(function, kind, batch, units, cores)
        if not profiled:
            self._curves.setdefault(key, _Curve()).add(batch, float(device_us))
            return
        ratio = device_us / profiled
        everywhere = self._everywhere.get((function, kind))
        if everywhere is not None:
            everywhere.add(ratio)
        else:
            everywhere = self._everywhere[function, kind] = _Mean(ratio, 2 * FIRST, ratio)
        if key in self._ratios:
            self._ratios[key].mean.add(ratio)
        else:
            self._ratios[key] = _Ratio(_Mean(ratio, 2 * FIRST, ratio))
        widest = self.base.latency_us(function, kind, batch, units, cores) / profiled
        self._ratios[key].add(ratio, widest, everywhere)

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        key = (function, kind)
        self._loads[key] = load_us if key not in self._loads else self._loads[key] + 0.3 * (load_us - self._loads[key])

    def relax(self, function: str) -> None:
        """Calls are refused and nothing runs that could prove the prediction wrong: believe a little more."""
        self._said.pop(function, None)
        for (name, _, _, _), curve in self._curves.items():
            if name == function:
                curve.relax()
        for (name, _, _, _), ratio in self._ratios.items():
            if name == function:
                ratio.mean.relax()
        for (name, _), everywhere in self._everywhere.items():
            if name == function:
                everywhere.relax()
