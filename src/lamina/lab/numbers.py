"""Number formatting and axes of plots: from values to places, and the round numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


def format_number(value: Any) -> str:
    """A number as a person would write it: four digits that count, thousands apart. Anything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        return f"{value:.2g}"
    whole = math.floor(math.log10(size)) + 1 if size else 1
    text = f"{value:.{4 - max(whole, 0)}f}"
    return text.rstrip("0").rstrip(".")


def format_tick(value: float) -> str:
    """Shorter than `number`: 20k, 1.5M, 0.01."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:g}{letter}"
    return f"{value:.10g}" if not value or abs(value) >= 1e-4 else f"{value:.0e}"


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Values `low` to `high` on a stretch of pixels; logarithmic if wanted and possible."""

    low: float
    high: float
    from_px: float
    to_px: float
    log: bool = False

    def px(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.from_px + part * (self.to_px - self.from_px)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)


def scale_for(values: Iterable[float], from_px: float, to_px: float, *, log: bool, zero: bool) -> AxisScale:
    """Fits all values. `zero`: the axis starts at nothing, as bars and shares must."""
    finite = [value for value in values if math.isfinite(value)]
    above = [value for value in finite if value > 0]
    if log and above:
        low, high = min(above), max(above)
        low, high = (low / 1.25, high * 1.25) if high / low < 100 else (low / 1.12, high * 1.12)
        return AxisScale(low, high, from_px, to_px, log=True)
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    if low == high:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    room = 0.04 * (high - low)
    low, high = (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)
    return AxisScale(low, high, from_px, to_px)


def _even_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    base = 10 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    factors = (1,) if decades > 3 else (1, 2, 5)
    stride = max(1, round(decades / 6))
    ticks = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        ticks += [factor * 10.0**power for factor in factors if power % stride == 0 and low <= factor * 10.0**power <= high]
    return ticks if len(ticks) >= 2 else _even_ticks(low, high)
