"""Forecast of the devices of one kind that will be needed when one that is requested now has come.

A machine takes seconds to minutes to boot, so the load of now is the wrong question: by then it may be twice as much. What counts
is the load at the end of a boot, by the trend of late; how long a boot takes is learnt from requests and arrivals. A trend that
could be noise is none, and no forecast is above twice the load there is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

FIRST_BOOT_US = 30_000_000
"""Of a boot, until one has been seen."""

SAMPLES, FEWEST = 12, 5
"""Samples of the load that a trend is taken from, over a little more than a boot; with fewer there is none."""

SURE = 4.0
"""Standard errors that a trend must be above nothing."""

MOST = 2.0
"""Times the load of now that a forecast is at most."""

GIVE_UP_US = 60_000_000
"""After so long, or three boots, a request that nothing came of counts no more."""


@dataclass(slots=True)
class DeviceForecast:
    """One kind of devices. `target`: the load of each that there is to be at most."""

    target: float
    boot_us: int = 0  #: learnt; 0: none has been seen
    expected_load: float = 0.0  #: of all, at the end of a boot, as of the last look
    _samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _known: frozenset[str] | None = None
    _asked_us: deque[int] = field(default_factory=deque)

    def missing(self, now_us: int, load: float, devices: Collection[str]) -> int:
        """How many more to request now; they count as requested from then on. At most as many are on their way as there are."""
        self._learn(now_us, devices)
        horizon_us = self.boot_us or FIRST_BOOT_US
        if not self._samples or now_us - self._samples[-1][0] >= horizon_us // 10:
            self._samples.append((now_us, load))
        self.expected_load = min(MOST * load, load + max(0.0, self._slope()) * horizon_us)
        wanted = math.ceil(self.expected_load / self.target - 1e-9)
        room = max(1, len(devices)) - len(self._asked_us)
        count = max(0, min(wanted - len(devices) - len(self._asked_us), room))
        self._asked_us.extend([now_us] * count)
        return count

    def _learn(self, now_us: int, devices: Collection[str]) -> None:
        for _ in frozenset(devices) - self._known if self._known is not None else ():
            if self._asked_us:
                took_us = now_us - self._asked_us.popleft()
                self.boot_us = took_us if not self.boot_us else self.boot_us + (took_us - self.boot_us) // 4
        self._known = frozenset(devices)
        while self._asked_us and now_us - self._asked_us[0] > max(GIVE_UP_US, 3 * self.boot_us):
            self._asked_us.popleft()

    def _slope(self) -> float:
        """Load a microsecond by least squares; 0.0 where it could be noise."""
        count = len(self._samples)
        if count < FEWEST:
            return 0.0
        mean_t = sum(at_us for at_us, _ in self._samples) / count
        mean = sum(load for _, load in self._samples) / count
        spread = sum((at_us - mean_t) ** 2 for at_us, _ in self._samples)
        if not spread:
            return 0.0
        slope = sum((at_us - mean_t) * (load - mean) for at_us, load in self._samples) / spread
        residual = sum((load - mean - slope * (at_us - mean_t)) ** 2 for at_us, load in self._samples)
        error = math.sqrt(residual / (count - 2) / spread)
        return slope if slope > SURE * error else 0.0
