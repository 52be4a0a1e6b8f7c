"""Terms of the optimisation besides time and price, for all configurations of a step at once: what can be had at all, what it
takes until a batch can begin, and what a long stay on a full device costs the jobs behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.core.scheduling.leases import Device
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.config_table import ConfigTable
from lamina.policies.frontier.workflow_plans import StepPlan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def allowed(seats: list[CandidateSlot], count: int, ahead: StepPlan) -> NDArray[np.bool_]:
    """No batch larger than the queue (a negative count: unless waited for), no slice larger than there is room for."""
    room = tuple(_room(seats, menu) for menu in ahead.menus)
    found = ahead.masks.get((count, room))
    if found is None:
        import numpy as np

        configs = ahead.step.configs
        units, cores = np.array(room, np.int64).T
        found = (configs.units <= units[ahead.kind]) & (configs.cpus <= cores[ahead.kind]) & (configs.batch <= abs(count))
        if count < 0:
            found |= configs.batch > -count
        ahead.masks[count, room] = found
    return found


def delay_us(
    seats: list[CandidateSlot], count: int, gap_us: float | None, kept_us: int, ahead: StepPlan
) -> NDArray[np.int64] | None:
    """Delay of configurations besides their own time: until their jobs are here (`gap_us` apart; None: no waiting), and until
    the inputs are."""
    found, batch = None, ahead.step.configs.batch
    if gap_us is not None:
        over = (batch - count).clip(0)
        found = (over * gap_us).astype(batch.dtype)
        found[over > 0] += kept_us
    if any(seat.moving_us for seat in seats):
        import numpy as np

        moving_us = np.array([_least_moving_us(seats, menu) for menu in ahead.menus])[ahead.kind] * batch
        found = moving_us if found is None else found + moving_us
    return found


def congestion_cost(crowded: list[float], slo_us: int, ahead: StepPlan) -> NDArray[np.float64] | None:
    """What a long stay costs besides on a full device; None: they are empty."""
    if not max(crowded):
        return None
    costs: NDArray[np.float64] = ahead.held / max(1, slo_us) + ahead.squeeze
    if len(crowded) > 1:
        import numpy as np

        costs *= np.array(crowded)[ahead.kind]
    else:
        costs *= crowded[0]
    return costs


def least_busy(seats: list[CandidateSlot], menu: ConfigTable) -> float:
    return min((_busy(seat.device) for seat in seats if seat.menu is menu), default=1.0)


def _busy(device: Device) -> float:
    """Of units or of cores, whichever there is less left of."""
    busy = device.busy.bit_count() / device.spec.units
    return max(busy, 1 - device.cores_free / device.spec.cores) if device.spec.cores else busy


def _room(seats: list[CandidateSlot], menu: ConfigTable) -> tuple[int, int]:
    mine = [(seat.units, seat.cores) for seat in seats if seat.menu is menu]
    return max(mine, default=(0, 0))


def _least_moving_us(seats: list[CandidateSlot], menu: ConfigTable) -> int:
    return min((seat.moving_us for seat in seats if seat.menu is menu), default=0)
