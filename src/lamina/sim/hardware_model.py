"""Hardware model of the simulator and the emulated engine: profiled times with seeded noise.

One class for both, so that the two differ in nothing but the clock.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.workflow.flow import Choice, Each, Node, Wait
from lamina.planner.interference import InterferenceModel
from lamina.predict.profile import Handover
from lamina.predict.profile_table import ProfileTable
from lamina.types import DeviceSpec


class WayModel(NamedTuple):
    """Way to a device, there and back: a median, and the sigma of the logarithm of what a batch takes over it."""

    us: int
    spread: float = 0.0


SEGMENTS_COST = 1.01
"""Time of a batch in segments over that of the whole: at most, of four models on two sizes of slices of an H200
(`results/gpu/segments.json`: 0.99 to 1.012)."""

P99_SIGMAS = 2.326
"""Standard deviations from the median to the 99th percentile."""


@dataclass(slots=True)
class HardwareModel:
    table: ProfileTable
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    noise: float = 0.05  #: sigma of the logarithm of the true time over the profiled one; 0: none at all
    load_noise: float = 0.1  #: likewise, of loads; none either where there is no noise at all
    interference: InterferenceModel | None = None  #: None: batches beside each other do not feel each other
    ways: Mapping[str, WayModel] = field(default_factory=dict)  #: by device, or by kind for all of one
    segments_us: Mapping[str, int] = field(default_factory=dict)  #: by function: its batches can be paused after so long
    _sigma: dict[tuple[str, str], float] = field(default_factory=dict)  #: of profiles that say how far times spread
    _spread: dict[tuple[str, str], list[float]] = field(default_factory=dict)  #: likewise, of those that say how
    _handovers: dict[tuple[str, str], Handover] = field(default_factory=dict)
    _medians: dict[tuple[str, str, int, int, int], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for profile in self.table.profiles:
            if profile.handover is not None:
                self._handovers[profile.function, profile.device] = profile.handover
        if not self.noise:
            return
        for profile in self.table.profiles:
            if len(profile.spread) > 1:
                self._spread[profile.function, profile.device] = profile.spread
            spreads = [math.log(p.p99_us / p.p50_us) / P99_SIGMAS for p in profile.points if p.p99_us > p.p50_us > 0]
            if spreads:
                self._sigma[profile.function, profile.device] = statistics.median(spreads)

    def batch_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        key = (function, kind, batch, units, cores)
        known = self._medians.get(key)
        if known is None:
            sigma = self._sigma.get((function, kind), self.noise)
            known = self._medians[key] = (self.table.median_us(function, kind, batch, units, cores), sigma)
        spread = self._spread.get((function, kind)) if self._spread else None
        return max(1, round(known[0] * (self._noise_ratio(known[1]) if spread is None else self._draw_ratio(spread))))

    def handover_us(self, function: str, device: DeviceSpec, batch: int) -> int:
        """Time beside that on the slice: handover, where the profile has one, and the way to the device."""
        found = self._handovers.get((function, device.kind))
        us = found.time_us(batch) if found is not None else 0.0
        if self.ways:
            way = self.ways.get(device.id) or self.ways.get(device.kind)
            us += way.us * self._noise_ratio(way.spread) if way is not None else 0.0
        return round(us)

    def load_us(self, function: str, kind: str) -> int:
        return round(self.table.load_us(function, kind) * self._noise_ratio(self.load_noise if self.noise else 0.0))

    def in_segments(self, function: str, work_us: int, gives_way: bool) -> tuple[int, int]:
        """What a batch takes, and its segments: 0 if it runs whole."""
        segment_us = self.segments_us.get(function, 0) if gives_way else 0
        return (round(work_us * SEGMENTS_COST), segment_us) if segment_us else (work_us, 0)

    def resolve_data(self, node: Node, stage: str = "begin", rng: random.Random | None = None) -> int:
        """Draw an answer to a question about data: the number of items about `expect`, the branch by its odds. From `rng`, for an
        answer that must be the same again."""
        if stage != "begin":
            return 0
        if isinstance(node, Each):
            return self._item_count(node.expected_items, rng or self.rng)
        if isinstance(node, Wait):
            return node.duration_us
        if not isinstance(node, Choice):
            return 0
        odds = node.odds or (1.0,) * len(node.branches)
        return (rng or self.rng).choices(range(len(node.branches)), odds)[0]

    def _draw_ratio(self, spread: list[float]) -> float:
        """As the runs of its profile were: seldom far off and mostly close is not the same as always a little off."""
        at = self.rng.random() * (len(spread) - 1)
        low = int(at)
        return spread[low] + (at - low) * (spread[low + 1] - spread[low])

    def _noise_ratio(self, sigma: float) -> float:
        return math.exp(sigma * self.rng.gauss(0.0, 1.0)) if sigma else 1.0

    def _item_count(self, mean: float, rng: random.Random) -> int:
        """`mean` on average: at least one and Poisson above that, or now and then one if that is too many."""
        if mean < 1:
            return int(rng.random() < mean)
        if mean > 500:  # the product below would run out of digits; by now the bell curve is as good
            return max(1, round(rng.gauss(mean, math.sqrt(mean - 1))))
        limit, count, product = math.exp(1 - mean), 0, rng.random()
        while product > limit:
            count += 1
            product *= rng.random()
        return 1 + count
