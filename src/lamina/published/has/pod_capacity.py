"""Pod capacity. A pod is an instance with a standing slice of `units` and a `quota`, its part of the time there.

A batch of b runs for G(b, units); then its pod owes that time and earns it back at the rate of its quota. So batches follow
each other every L = G / quota, which is the time to plan a request with, and b / L is the throughput.

A request also waits for its turn: on average rho / (2 (1 - rho)) periods of a pod that is busy for a part rho of the time
(random arrivals, equal service times). To keep the goal, pods must be idle enough for that: with room for s periods
between L and the goal, and a tail `wait` times the average, rho may be 2 s / (wait + 2 s). Batches of several form only behind
one that is running, and wait for it: those need room for a whole period more. The capability is b / L times rho, for the
batch where it is largest.

Quotas are whole percent points here: they are counted in steps, and sums of them must come out even.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState

FULL_QUOTA = 100

MIN_BUSY = 0.1
"""However tight the goal: no more pods than ten times the load are kept for it."""


@dataclass(frozen=True, slots=True, order=True)
class PodShape:
    """Shape of a pod: how many units, and which part of the time, in percent."""

    units: int
    quota: int

    @property
    def area(self) -> int:
        """What it costs to keep."""
        return self.units * self.quota


@dataclass(slots=True)
class PodCapacity:
    """Requests a second of a pod. `wait`: how far above the average wait to plan; 0 leaves waiting out."""

    view: View
    budget_us: dict[str, int] = field(default_factory=dict)  #: latency goal per function; 0 or missing: none
    wait: float = 0.0

    def per_s(self, function: FunctionState, device: Device, shape: PodShape) -> float:
        """Requests a second; 0 if the batch time is unknown, or if no batch is in time."""
        return self._best(function, device, shape)[0]

    def best_batch(self, function: FunctionState, device: Device, shape: PodShape) -> int:
        return self._best(function, device, shape)[1]

    def latency_us(self, function: FunctionState, device: Device, batch: int, shape: PodShape) -> float:
        """Of a batch of this size, at this part of the time."""
        alone_us = self.view.latency_us(function.spec.name, device, batch, shape.units)
        return alone_us * FULL_QUOTA / shape.quota

    def meets_goal(self, function: FunctionState, device: Device, shape: PodShape) -> bool:
        return self._best(function, device, shape)[1] > 0

    def _best(self, function: FunctionState, device: Device, shape: PodShape) -> tuple[float, int]:
        goal_us = self.budget_us.get(function.spec.name, 0)
        best, best_batch = 0.0, 0
        for batch in range(1, function.spec.max_batch + 1):
            period_us = self.latency_us(function, device, batch, shape)
            periods = 2 if batch > 1 and self.wait else 1
            if not period_us or (goal_us and periods * period_us > goal_us):
                break  # a larger batch is never faster
            per_us = batch / period_us * (self._busy(goal_us / period_us - 1) if goal_us else 1.0)
            if per_us > best:
                best, best_batch = per_us, batch
        return best * 1e6, best_batch

    def _busy(self, slack: float) -> float:
        """Part of the time a pod may be busy, with so many periods between one period and the goal."""
        return max(MIN_BUSY, 2 * slack / (self.wait + 2 * slack)) if self.wait else 1.0
