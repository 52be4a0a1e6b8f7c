"""Pace of devices: which machine is slower than the others of its kind, and by how much.

Predictions are learnt per kind of device: what one machine teaches, all of that kind believe. A machine that is slow for
reasons of its own (another user, a throttled clock, a failing disk) must not slow down the plans for the others. So a device
whose batches take far longer than predicted, while others of its kind keep to the prediction, teaches nothing; what it takes
longer counts as part of the way there, which is its own. When all become slower it is the function that has changed, and all
teach.
"""

from __future__ import annotations

from collections.abc import Mapping

from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Batch

SMOOTHING = 0.2
SLOWER = 2.0
"""So many times the pace of the fastest device of its kind makes one slow. Against each other: predictions have widened by
then."""

MIN_OBSERVATIONS = 5
LEAST_PACE = 0.1
"""A device is not so fast that all others are slow beside it."""


class DevicePace:
    """Mean of observed over predicted time, by device."""

    def __init__(self) -> None:
        self._paces: dict[str, tuple[int, float]] = {}

    def usual_us(self, batch: Batch, devices: Mapping[str, Device], device_us: int) -> int:
        """Of the time that a batch took on its device, what it would have taken on another of that kind: all of it, unless its
        own is slow by itself."""
        if not batch.predicted_us:
            return device_us
        device = batch.device.spec
        seen, pace = self._paces.get(device.id, (0, 0.0))
        seen, ratio = seen + 1, device_us / batch.predicted_us
        pace += max(SMOOTHING, 1 / seen) * (ratio - pace)
        self._paces[device.id] = (seen, pace)
        if seen < MIN_OBSERVATIONS:
            return device_us
        others = [one.spec.id for one in devices.values() if one.spec.kind == device.kind and one.spec.id != device.id]
        known = [found[1] for name in others if (found := self._paces.get(name)) is not None and found[0] >= MIN_OBSERVATIONS]
        is_slow = bool(known) and pace > SLOWER * max(LEAST_PACE, min(known))
        return min(device_us, batch.predicted_us) if is_slow else device_us
