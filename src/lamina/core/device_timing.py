"""What is learnt of devices: the way to each, and which one is slower than the others of its kind.

Predictions are learnt per kind of device: what one machine teaches, all of that kind believe. A machine that is slow for
reasons of its own (another user, a throttled clock, a failing disk) must not slow down the plans for the others. So a device
whose batches take far longer than predicted, while others of its kind keep to the prediction, teaches nothing; what it takes
longer counts as part of the way there, which is its own. When all become slower it is the function that has changed, and all
teach.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import Batch

WAY_SMOOTHING = 0.1  #: weight of the newest observation of the way to a device
WAY_FIRST_DEVIATION = 0.1  #: deviation assumed of a way that was seen once, as a part of it
WAY_PLAN_DEVIATIONS = 2.0  #: mean deviations that a plan adds: one that plans with the mean is late half of the time
WAY_CLIP, WAY_CLIP_US = 4, 1_000  #: most that one observation counts, in what is planned with: a stall is no way
WAY_RELAXED = 0.7  #: what is left of it when nothing has run for long that could prove it wrong


@dataclass(slots=True)
class WayEstimate:
    """Way to a device, there and back: hand-over, a network, and whatever else lies between the controller and a slice.

    Measured per device, from the start of a batch to its result less the executor's own time, and planned with in every estimate.
    So a device that is far away, or whose machine is busy, gets less to do, and no other does.
    """

    planning_us: int = 0
    _seen: int = 0
    _mean_us: float = 0.0
    _deviation_us: float = 0.0

    def observe(self, way_us: int) -> None:
        seen_us, mean_us = float(max(0, way_us)), self._mean_us
        if not self._seen or seen_us < 0.5 * mean_us - self._deviation_us:  # the first, or it is far shorter than it was
            self._seen, self._mean_us, self._deviation_us = 1, seen_us, WAY_FIRST_DEVIATION * seen_us
        else:
            self._seen += 1
            step = max(WAY_SMOOTHING, 1 / self._seen)
            seen_us = min(seen_us, float(max(WAY_CLIP * self.planning_us, WAY_CLIP_US)))
            self._deviation_us += step * (abs(seen_us - mean_us) - self._deviation_us)
            self._mean_us += step * (seen_us - mean_us)
        self.planning_us = int(self._mean_us + WAY_PLAN_DEVIATIONS * self._deviation_us)

    def relax(self) -> None:
        """Believe it less: calls are rejected because of it, and none runs that could prove it wrong."""
        self._mean_us *= WAY_RELAXED
        self._deviation_us *= WAY_RELAXED
        self.planning_us = int(self._mean_us + WAY_PLAN_DEVIATIONS * self._deviation_us)


SMOOTHING = 0.2
SLOWER = 2.0
"""So many times the pace of the fastest device of its kind makes one slow. Against each other: predictions have widened by
then."""

MIN_OBSERVATIONS = 5
LEAST_PACE = 0.1
"""A device is not so fast that all others are slow beside it."""


class DevicePace:
    """Mean of observed over predicted time, by device; those of one kind in order, so that the fastest other is found at once."""

    def __init__(self) -> None:
        self._paces: dict[str, tuple[int, float]] = {}
        self._fastest: dict[str, list[tuple[float, str]]] = {}  #: by kind: paces and devices that have been seen often enough

    def usual_us(self, batch: Batch, devices: Mapping[str, Device], device_us: int) -> int:
        """Of the time that a batch took on its device, what it would have taken on another of that kind: all of it, unless its
        own is slow by itself."""
        if not batch.predicted_us:
            return device_us
        device = batch.device.spec
        seen, before = self._paces.get(device.id, (0, 0.0))
        seen, ratio = seen + 1, device_us / batch.predicted_us
        pace = before + max(SMOOTHING, 1 / seen) * (ratio - before)
        self._paces[device.id] = (seen, pace)
        if seen < MIN_OBSERVATIONS:
            return device_us
        paces = self._fastest.setdefault(device.kind, [])
        if (at := bisect_left(paces, (before, device.id))) < len(paces) and paces[at] == (before, device.id):
            del paces[at]
        fastest = self._fastest_other(paces, device.kind, devices)
        insort(paces, (pace, device.id))
        is_slow = fastest is not None and pace > SLOWER * max(LEAST_PACE, fastest)
        return min(device_us, batch.predicted_us) if is_slow else device_us

    def _fastest_other(self, paces: list[tuple[float, str]], kind: str, devices: Mapping[str, Device]) -> float | None:
        """Least of these paces; entries of devices that have left are dropped when they come first."""
        while paces:
            pace, name = paces[0]
            device = devices.get(name)
            if device is not None and device.spec.kind == kind and self._paces[name][1] == pace:
                return pace
            del paces[0]
        return None
