"""Arrival rates of functions over longer windows than `ArrivalStats`: one owner for everything that plans ahead.

`ArrivalStats` follows bursts within a handful of arrivals. Plans want it calmer, each in its own measure:

    interarrival_us           choice of devices, cost limits: counted for a fifth of a second at a time, not so calm that a stream
                              is over before it is believed
    planning_interarrival_us  workflow plans: half a second at a time, smoothed; to rebuild plans costs milliseconds
    scaling_rate              autoscaling: once a period, up at once and down by halves
    longest_silence_us        keep-alive: the longest gap of late, forgotten slowly
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.scheduling.state import FunctionState

FIRST_WINDOW_US, WINDOW_US = 50_000, 200_000
"""Arrivals are counted over so long a time: at first, when nothing else is known, and then."""

PLANNING_WINDOW_US = 500_000

Sample = tuple[int, int, float]
"""Arrivals, when, and the value at the last look."""


@dataclass(slots=True)
class ArrivalRates:
    """`period_us` is between two samples of the scaling rate."""

    period_us: int = 1_000_000
    scaling_rates: dict[str, float] = field(default_factory=dict)  #: jobs a microsecond at the last sample, by function
    _samples: dict[str, Sample] = field(default_factory=dict)
    _planning_samples: dict[str, Sample] = field(default_factory=dict)
    _scaling_samples: dict[str, tuple[int, int]] = field(default_factory=dict)  #: arrivals and when
    _silences: dict[str, tuple[int, int]] = field(default_factory=dict)  #: last arrival seen, longest silence of late
    _rejected: dict[str, int] = field(default_factory=dict)  #: jobs of calls that alone would have been too dear

    def on_rejected(self, function: str) -> None:
        """A call was rejected because alone it would be too dear. It counts: admitted, such calls would share batches."""
        self._rejected[function] = self._rejected.get(function, 0) + 1

    def interarrival_us(self, now_us: int, function: FunctionState) -> float:
        """Time between two of its jobs, on average. Until that is counted the short-term average has to do."""
        name = function.spec.name
        count = function.arrivals.count + self._rejected.get(name, 0)
        known = self._samples.get(name)
        if known is None or now_us - known[1] >= (WINDOW_US if known[2] else FIRST_WINDOW_US):
            gap_us = (now_us - known[1]) / max(1, count - known[0]) if known else 0.0
            known = self._samples[name] = (count, now_us, gap_us)
        return max(1.0, known[2] or function.arrivals.interarrival_us)

    def planning_interarrival_us(self, now_us: int, function: FunctionState) -> float:
        """Time between two of its jobs, on average; 0 in the first moments."""
        count, at_us, gap_us = self._planning_samples.get(function.spec.name, (0, 0, 0.0))
        span_us = now_us - at_us
        if span_us >= PLANNING_WINDOW_US:
            arrived = function.arrivals.count - count
            fresh_us = span_us / arrived if arrived else 2.0 * span_us
            gap_us = fresh_us if not gap_us else 0.5 * (gap_us + fresh_us)
            self._planning_samples[function.spec.name] = (function.arrivals.count, now_us, gap_us)
        return gap_us

    def scaling_rate(self, now_us: int, function: FunctionState) -> float:
        """Jobs a microsecond, rejected calls among them; none after as long a silence as the function's `idle_us`."""
        name, arrivals = function.spec.name, function.arrivals
        count, at_us = self._scaling_samples.get(name, (0, now_us))
        span_us = now_us - at_us
        if span_us >= self.period_us or name not in self._scaling_samples:
            self._scaling_samples[name] = (arrivals.offered, now_us)
            fresh = (arrivals.offered - count) / span_us if span_us else 0.0
            self.scaling_rates[name] = max(fresh, 0.5 * (self.scaling_rates.get(name, 0.0) + fresh))
        silent = now_us - arrivals.offered_us >= function.spec.scale.idle_us
        return 0.0 if silent else self.scaling_rates[name]

    def offered_lately(self, function: FunctionState) -> int:
        """Its calls since the scaling rate was last sampled, rejected ones among them."""
        return function.arrivals.offered - self._scaling_samples.get(function.spec.name, (0, 0))[0]

    def longest_silence_us(self, function: FunctionState) -> int:
        """The longest time between two looks at which it had been called anew."""
        last_us, silence_us = self._silences.get(function.spec.name, (-1, 0))
        arrivals = function.arrivals
        if arrivals.last_us > last_us:
            gap_us = arrivals.last_us - last_us if last_us >= 0 else 0
            silence_us = max(gap_us, int(0.8 * silence_us))
            self._silences[function.spec.name] = (arrivals.last_us, silence_us)
        return silence_us
