"""Which configuration now, and is it better to wait for company? One look at everything that could be had.

    in time     its own time, and for a step of a workflow the time of all that comes after it
    cost        of its slice, and of the cheapest way to do the rest in the time that is left (`ahead.py`)
    waiting     a larger batch costs less per request; it takes the time until its jobs are here

Waiting costs nothing but time, so a batch that is expected to fill is waited for as long as the goal allows, less what is
kept spare: `patience` of the whole time a call has may be spent on it, and twice what this function had to wait for a slice
of late stays free. A lone request does not wait for company that does not come: the gap between arrivals grows while nobody
arrives. Clients in a loop call again when they are answered, not before, so waiting for them is for `batching.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lamina.core.policy import View
from lamina.core.queue import Job
from lamina.core.state import FunctionState
from lamina.planner.ahead import Ahead
from lamina.planner.menu import Menu, Pick
from lamina.planner.seats import Seat
from lamina.types import NEVER_US

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GAIN = 0.03
"""Company that saves less than this is not waited for."""

PRESS = 1.0

LOOP = 0.5
"""So many callers who come back at once make it a loop."""


class Verdict(NamedTuple):
    """Take `pick` at `seat`, or wait until `until_us` for as many as `count`."""

    seat: Seat | None
    pick: Pick | None
    until_us: int = 0
    count: int = 0


NOTHING = Verdict(None, None)


class Waiting(NamedTuple):
    """How long company may take to come: the pace it comes at, and what must stay free of the time a call has."""

    gap_us: float
    slo_us: int
    slot_us: int
    impatience: float

    def kept_us(self, fastest_us: int) -> int:
        return int(self.impatience * max(0, self.slo_us - fastest_us)) + self.slot_us


@dataclass(slots=True)
class Weigh:
    spare: float
    patience: float
    _masks: dict[tuple[int, int, tuple[tuple[int, int], ...]], NDArray[np.bool_]] = field(default_factory=dict)

    def waiting(self, view: View, function: FunctionState, job: Job, count: int, slot_us: float) -> Waiting | None:
        """None: there is nobody to wait for."""
        meter, call, slo = function.meter, job.run.call, job.run.flow.slo
        if count >= function.spec.max_batch or meter.gap_us >= NEVER_US or meter.echo > LOOP or call.deadline_us >= NEVER_US:
            return None
        if not slo.latency_us and call.deadline_us - call.arrived_us >= slo.timeout_us:
            return None  # no goal: nobody said that it may take this long
        gap_us = max(meter.gap_us, float(view.now_us - meter.last_us))
        return Waiting(gap_us, call.deadline_us - call.arrived_us, int(2 * slot_us), 1 - self.patience)

    # ------------------------------------------------------------------ one step

    def alone(
        self, now_us: int, seats: list[Seat], count: int, within_us: int, waiting: Waiting | None, slo_us: int = 0
    ) -> Verdict:
        """A function by itself, with `within_us` to go."""
        careful_us = int(within_us / (1 + self.spare))
        found = cheapest(seats, count, careful_us, slo_us) or cheapest(seats, count, within_us)
        if found is None:
            return NOTHING
        seat, pick = found
        if waiting is None or pick.batch < count or seat.home:
            return Verdict(seat, pick)
        menu = seat.menu
        least, target = pick.cost * (1 - GAIN), None
        rest_us = within_us - waiting.kept_us(pick.time_us)
        more = 1
        while True:
            batch = min(count + more, menu.most)
            time_us = int((rest_us - (batch - count) * waiting.gap_us) / (1 + self.spare))
            if time_us <= 0:
                break
            tried = menu.best(batch, time_us, menu.sizes[-1], menu.hands[-1])
            if tried is not None and tried.batch > count and tried.cost < least:
                least, target = tried.cost, tried
            if batch == menu.most:
                break
            more *= 2
        if target is None:
            return Verdict(seat, pick)
        latest_us = now_us + rest_us - int(target.time_us * (1 + self.spare))
        return Verdict(seat, pick, _until_us(now_us, latest_us, target.batch - count, waiting), target.batch)

    # ------------------------------------------------------- a step of a workflow

    def ahead(self, now_us: int, seats: list[Seat], count: int, budget_us: int, waiting: Waiting | None, ahead: Ahead) -> Verdict:
        """A step with others after it; `budget_us` is for all of them."""
        import numpy as np

        step = ahead.step
        room = tuple(_room(seats, menu) for menu in ahead.menus)
        allowed = self._allowed(ahead, count if waiting is None else -count, room)
        delay_us = None
        kept_us = 0
        if waiting is not None:
            kept_us = waiting.kept_us(int(step.configs.time_us.min()) + step.after.fastest_us)
            over = np.maximum(step.configs.batch - count, 0)
            delay_us = (over * waiting.gap_us).astype(np.int64)
            delay_us[over > 0] += kept_us
        ranking = step.query(int(budget_us / (1 + self.spare)), allowed=allowed, delay_us=delay_us)
        if not ranking.fits:
            ranking = step.query(budget_us, allowed=allowed, delay_us=delay_us)
            if not ranking.fits:
                return NOTHING
        best = ranking.best
        target = ahead.picks[best]
        if target.batch > count:
            batch = step.configs.batch
            now = next((int(row) for row in ranking.order[: ranking.fits] if batch[row] <= count), -1)
            if now >= 0 and ranking.totals[best] >= (1 - GAIN) * ranking.totals[now]:
                best, target = now, ahead.picks[now]
        if target.batch > count:
            assert waiting is not None
            left_us = int(budget_us / (1 + self.spare)) - target.time_us - kept_us
            times = step.after.time_us
            place = int(times.searchsorted(left_us - int((target.batch - count) * waiting.gap_us), side="right"))
            latest_us = now_us + left_us - (int(times[place - 1]) if place else 0)
            return Verdict(None, None, _until_us(now_us, latest_us, target.batch - count, waiting), target.batch)
        menu = ahead.menus[int(ahead.kind[best])]
        fitting = [seat for seat in seats if seat.menu is menu and seat.units >= target.units and seat.cores >= target.cores]
        return Verdict(fitting[0], target) if fitting else NOTHING

    def _allowed(self, ahead: Ahead, count: int, room: tuple[tuple[int, int], ...]) -> NDArray[np.bool_]:
        """No batch larger than the queue (a negative count: unless waited for), no slice larger than there is room for."""
        key = (id(ahead.step), count, room)
        found = self._masks.get(key)
        if found is None:
            import numpy as np

            if len(self._masks) > 4096:
                self._masks.clear()
            configs = ahead.step.configs
            units, cores = np.array(room, np.int64).T
            found = (configs.units <= units[ahead.kind]) & (configs.cpus <= cores[ahead.kind]) & (configs.batch <= abs(count))
            if count < 0:
                found |= configs.batch > -count
            self._masks[key] = found
        return found


def cheapest(seats: list[Seat], count: int, within_us: int, hurry_us: int = 0) -> tuple[Seat, Pick] | None:
    """Standing slices first: they are paid for.

    `hurry_us`: the less of a device is free, the dearer is time on it, by as much as its price where the device is full and
    the batch takes that long.
    """
    best: tuple[Seat, Pick] | None = None
    least: tuple[bool, float, Pick] | None = None
    for seat in seats:
        menu = seat.menu
        times, picks = menu.shelf(count, -seat.units if seat.home else seat.units, seat.cores)
        place = bisect_right(times, within_us)
        if not place:
            continue
        pick = picks[place - 1]
        cost = pick.cost
        if hurry_us and not seat.home:
            device = seat.device
            rush = PRESS * device.busy.bit_count() / device.spec.units / hurry_us
            if rush:
                cost *= 1 + rush * pick.time_us
                for other in picks[: place - 1]:
                    tried = other.cost * (1 + rush * other.time_us)
                    if tried < cost:
                        pick, cost = other, tried
        rank = (not seat.home, cost, pick)
        if least is None or rank < least:
            best, least = (seat, pick), rank
    return best


def _room(seats: list[Seat], menu: Menu) -> tuple[int, int]:
    units = cores = 0
    for seat in seats:
        if seat.menu is menu and (seat.units, seat.cores) > (units, cores):
            units, cores = seat.units, seat.cores
    return units, cores


def _until_us(now_us: int, latest_us: int, missing: int, waiting: Waiting) -> int:
    return min(latest_us, now_us + int(3 * missing * waiting.gap_us) + 50)
