"""Memory-bandwidth limit: the total demand that batches running side by side on a device may have.

Slices keep compute apart and share the memory behind it; past some part of its peak every neighbour slows down. A function
without demand, or one that runs alone, is never limited. A booked batch counts from the start as if it ran in place of the one
before it, if that demands less: when it begins, no further check is made.

The predictor knows demands, from profiles. Where it does not, there is no limit (`View.bandwidth` is None).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import Batch, FunctionState, Instance

EPSILON = 1e-9
"""Sums of shares are not exact."""


@runtime_checkable
class HasBandwidthDemand(Protocol):
    """Interference model that knows bandwidth demands, by function and kind of device: parts of the peak memory
    bandwidth, were they to have the whole device."""

    @property
    def demand(self) -> Mapping[tuple[str, str], float]: ...

    @property
    def limit(self) -> float: ...


@dataclass(frozen=True, slots=True)
class BandwidthRule:
    demand: Mapping[tuple[str, str], float]
    limit: float  #: part of the peak that neighbours may ask for together

    def max_units(self, function: str, device: Device, batches: Mapping[int, Batch], after: Batch | None = None) -> int:
        """The largest slice one more batch of this function may have now; with `behind`, once that one has ended."""
        beside = [batches[batch_id] for batch_id in device.running]
        return self._units_left(function, device, sum([self.demand_of(batch) for batch in beside if batch is not after]))

    def wait_us(self, function: str, units: int, device: Device, batches: Mapping[int, Batch], now_us: int) -> int:
        """Time until so many units are within the limit, if nothing else starts."""
        beside = sorted([batches[batch_id] for batch_id in device.running], key=lambda batch: batch.expected_end_us)
        theirs = sum([self.demand_of(batch) for batch in beside])
        at_us = now_us
        for batch in beside:
            if self._units_left(function, device, theirs) >= units:
                break
            theirs -= self.demand_of(batch)
            at_us = batch.expected_end_us
        return max(0, at_us - now_us)

    def can_colocate(self, function: FunctionState, device: Device, others: Iterable[Instance]) -> bool:
        """Whether all of them could run at once on the slices they usually have."""
        kind, units = device.spec.kind, device.spec.units
        theirs = sum(self.demand.get((one.function, kind), 0.0) * one.units / units for one in others)
        return self._units_left(function.spec.name, device, theirs) >= function.spec.units_on(device.spec)

    def demand_of(self, batch: Batch) -> float:
        """Demand of the batch, or of the one booked behind it if that is more."""
        kind, units = batch.device.spec.kind, batch.device.spec.units
        lane = (batch, batch.follower) if batch.follower is not None else (batch,)
        return max([self.demand.get((one.instance.function, kind), 0.0) * one.mask.bit_count() / units for one in lane])

    def _units_left(self, function: str, device: Device, theirs: float) -> int:
        own, units = self.demand.get((function, device.spec.kind), 0.0), device.spec.units
        if not own or theirs <= EPSILON:
            return units
        return max(0, min(units, int((self.limit - theirs + EPSILON) / own * units)))


def bandwidth_rule(predictor: object) -> BandwidthRule | None:
    """The limit of this predictor; None if it knows no demands."""
    model = getattr(predictor, "interference", None)
    return BandwidthRule(model.demand, model.limit) if isinstance(model, HasBandwidthDemand) and model.demand else None
