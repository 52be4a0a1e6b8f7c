"""Kalman filter of the arrival rate: the rate is a random walk, seen through noise.

    before each look   P' = P + process
    at each look       K = P' / (P' + noise);  x += K * (measured - x);  P = (1 - K) * P'

With the constants HAS-GPU uses (process 1, noise 10, both in calls a second, squared) the gain settles at 0.27, and the
standard deviation at 1.64. One filter belongs to one function: fed with several loads in turn it follows none of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class KalmanFilter:
    process: float = 1.0  #: variance the true rate gains between two looks
    noise: float = 10.0  #: variance of one look
    rate: float = 0.0  #: the estimate
    variance: float = 1.0  #: of the estimate

    def update(self, measured: float) -> float:
        """Update with one measurement; returns the new estimate."""
        before = self.variance + self.process
        gain = before / (before + self.noise)
        self.rate += gain * (measured - self.rate)
        self.variance = (1 - gain) * before
        return self.rate

    @property
    def deviation(self) -> float:
        return math.sqrt(self.variance)

    def provisioned_rate(self, measured: float, sigmas: float = 1.0) -> float:
        """Update, and the rate to provision for: the estimate and a margin, and never less than is measured."""
        return max(self.update(measured) + sigmas * self.deviation, measured)

    def update_as_published(self, measured: float, floor: float = 5.0) -> float:
        """The original: the margin is fed back into the estimate, and a constant is added to every load, large or small."""
        self.rate = max(self.update(measured) + self.deviation, measured + floor)
        return self.rate
