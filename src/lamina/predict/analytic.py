"""Closed-form latency under a time quota: `max(G(b, s), T(q))`, a GPU that computes beside a host that launches.

G is the time of a batch on a slice that is always on; T the time the launches alone take when the function may run a part q
of the time only. Whichever is longer hides the other. Both are read off measured points, so a quota needs one row of
measurements and not a third axis: on the published V100 set 89 points say what 800 say, give or take 5.5 %.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from lamina.errors import BadValue
from lamina.planner.interference import InterferenceModel
from lamina.predict.profile_table import ProfileTable

Key = tuple[str, str]
"""Function, kind of device."""


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Measured times of a light batch by quota, `quotas` rising; between two of them a straight line in the logarithms."""

    quotas: tuple[float, ...]
    times_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.quotas or len(self.quotas) != len(self.times_us) or list(self.quotas) != sorted(set(self.quotas)):
            raise BadValue(f"launch times at quotas {self.quotas}", hint="one time per quota, quotas rising")
        if self.quotas[0] <= 0 or min(self.times_us) <= 0:
            raise BadValue("a quota or a launch time is not above zero", hint="quotas are parts of the time, above 0 and up to 1")

    def interpolate(self, quota: float) -> float:
        """Less time to run never makes it faster, whatever the noise said."""
        times = list(self.times_us)
        for place in range(len(times) - 2, -1, -1):
            times[place] = max(times[place], times[place + 1])
        place = bisect_left(self.quotas, quota)
        if place == len(times):
            return times[-1]
        if self.quotas[place] == quota:
            return times[place]
        if place == 0:  # less than was measured: in proportion
            return times[0] * self.quotas[0] / quota
        left, right = math.log(self.quotas[place - 1]), math.log(self.quotas[place])
        part = (math.log(quota) - left) / (right - left)
        return math.exp(math.log(times[place - 1]) * (1 - part) + math.log(times[place]) * part)


@dataclass(slots=True)
class QuotaPredictor:
    """A predictor whose functions may have a quota. Functions without launch times are as in the table."""

    table: ProfileTable  #: G: measured with all of the time
    launches: Mapping[Key, LaunchTimes]  #: T
    quotas: Mapping[Key, float]  #: of the functions that do not have all of the time

    @property
    def interference(self) -> InterferenceModel | None:
        return self.table.interference

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        us = self.table.latency_us(function, kind, batch, units, cores)
        return max(us, math.ceil(self._launching_us(function, kind))) if us else 0

    def median_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> float:
        us = self.table.median_us(function, kind, batch, units, cores)
        return max(us, self._launching_us(function, kind)) if us else 0.0

    def _launching_us(self, function: str, kind: str) -> float:
        launches = self.launches.get((function, kind))
        return launches.interpolate(self.quotas.get((function, kind), 1.0)) if launches else 0.0

    def load_us(self, function: str, kind: str) -> int:
        return self.table.load_us(function, kind)

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        pass

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        pass

    def relax(self, function: str) -> None:
        pass
