"""A bench whose function takes as long as a formula says, on a clock that only its runs move."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lamina.profiler.bench import GridPoint, TimedRun
from lamina.types import DeviceSpec

Curve = Callable[[int, int], float]


@dataclass
class FakeBench:
    curve: Curve  #: microseconds by batch and units
    units: int = 1
    noise: float = 0.0
    waits: Callable[[int], float] = lambda number: 0.0  #: microseconds run number n waits for its core, on top
    now_s: float = 0.0
    asked: list[GridPoint] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def device(self) -> DeviceSpec:
        return DeviceSpec(id="fake0", kind="fake", units=self.units, memory_mib=1000)

    def load(self) -> int:
        return 1234

    def run(self, batch: int, units: int) -> TimedRun:
        self.asked.append((batch, units))
        waited_us = self.waits(len(self.asked))
        us = self.curve(batch, units) * (1 + self.noise * self.rng.gauss(0, 1)) + waited_us
        self.now_s += us / 1e6
        return TimedRun(us, waited_us)

    def clock_s(self) -> float:
        return self.now_s

    def memory_mib(self) -> int:
        return 77

    def device_info(self) -> dict[str, Any]:
        return {"machine": "made up", "driver": "none"}

    def close(self) -> None:
        pass


def straight(batch: int, units: int) -> float:
    """A launch cost and a cost per item, perfectly parallel."""
    return 1000 + 500 * batch / units
