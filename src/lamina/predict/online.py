"""Latency learnt from what is served, with or without a profile to start from.

Per (function, device kind, units) a line t = a + c * batch is kept by exponentially weighted least squares: five sums, a
few flops per batch. If a profile exists, the line is fitted to the *ratio* of observed to profiled time instead, so that
the shape of the profile survives and only its scale is corrected. Planning adds two mean deviations: a plan on the mean
is late half of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.predict.table import Table

FORGET = 0.97
WIDEN = 2.0


@dataclass(slots=True)
class _Line:
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    deviation: float = 0.0
    smallest: int = 0
    largest: int = 0
    seen: int = 0

    def add(self, x: int, y: float) -> None:
        if self.seen >= 3:
            expected = self.at(x)
            y = min(y, 4.0 * expected)  # one stall of the machine must not close the door for a minute
            self.deviation += 0.1 * (abs(y - expected) - self.deviation)
        else:
            self.deviation = max(self.deviation, 0.1 * y)
        self.weight = self.weight * FORGET + 1.0
        self.x = self.x * FORGET + x
        self.y = self.y * FORGET + y
        self.xx = self.xx * FORGET + x * x
        self.xy = self.xy * FORGET + x * y
        self.smallest = min(self.smallest or x, x)
        self.largest = max(self.largest, x)
        self.seen += 1

    def at(self, x: int) -> float:
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread > 1e-9 * max(1.0, mean_x * mean_x) and self.largest > self.smallest:
            slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread)
            slope = min(slope, mean_y / mean_x)  # a batch never costs more than its jobs one by one
        else:
            slope = 0.5 * mean_y / mean_x  # one size seen so far: half fixed, half per item, until we know better
        return max(mean_y + slope * (x - mean_x), 0.25 * mean_y)


@dataclass(slots=True)
class Predictor:
    """Starts from `base` where it has an answer, from nothing where it has not."""

    base: Table = field(default_factory=lambda: Table([]))
    _lines: dict[tuple[str, str, int], _Line] = field(default_factory=dict)
    _loads: dict[tuple[str, str], float] = field(default_factory=dict)

    def latency_us(self, function: str, kind: str, batch: int, units: int) -> int:
        line = self._lines.get((function, kind, units))
        profiled = self.base.typical_us(function, kind, batch, units)
        if line is None:
            return self.base.latency_us(function, kind, batch, units)
        if profiled:
            ratio = line.y / line.weight + WIDEN * line.deviation
            return int(profiled * ratio) + 1
        return int(line.at(batch) + WIDEN * line.deviation) + 1

    def load_us(self, function: str, kind: str) -> int:
        return int(self._loads.get((function, kind), 0.0)) or self.base.load_us(function, kind)

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int) -> None:
        line = self._lines.get((function, kind, units))
        device_us = max(1, device_us)  # a mean of zero could never grow again: outliers are cut at a multiple of it
        profiled = self.base.typical_us(function, kind, batch, units)
        if line is None:
            line = self._lines[function, kind, units] = _Line()
            if profiled:  # until it knows better, as wide as the profile
                planned_us = self.base.latency_us(function, kind, batch, units)
                line.deviation = max(0.0, planned_us / profiled - 1.0) / WIDEN
        if profiled:
            ratio = device_us / profiled
            mean = line.y / line.weight if line.weight else ratio
            line.deviation += 0.1 * (abs(min(ratio, 4 * mean) - mean) - line.deviation)
            line.weight = line.weight * FORGET + 1.0
            line.y = line.y * FORGET + min(ratio, 4 * mean)
        else:
            line.add(batch, float(device_us))

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        key = (function, kind)
        self._loads[key] = load_us if key not in self._loads else self._loads[key] + 0.3 * (load_us - self._loads[key])
