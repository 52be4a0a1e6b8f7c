"""The default: every batch in the cheapest way that is still in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Refuse
from lamina.core.flow import Flow
from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, Drop, Hold, Promise, Start, View
from lamina.core.queue import Job, Order
from lamina.core.state import FunctionState
from lamina.planner.ahead import Plans
from lamina.planner.batching import together
from lamina.planner.menu import Pick
from lamina.planner.offer import Offers
from lamina.planner.price import Demand
from lamina.planner.seats import Menus, Seat, bookings, seats
from lamina.planner.weigh import NOTHING, Verdict, Weigh, cheapest
from lamina.types import NEVER_US, Call


@dataclass(slots=True)
class Policy:
    lead_us: int = 500
    margin: float = 0.05
    patience: float = 0.6
    spare: float = 0.1
    order: Order = "due"
    any_size: bool = field(default=True, init=False)
    _menus: Menus = field(init=False)
    _plans: Plans = field(init=False)
    _weigh: Weigh = field(init=False)
    _offers: Offers = field(init=False)
    _demand: Demand = field(default_factory=Demand, init=False)
    _wanted_us: dict[str, int] = field(default_factory=dict, init=False)
    _slot_us: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._menus = Menus()
        self._plans = Plans(self._menus)
        self._weigh = Weigh(self.spare, self.patience)
        self._offers = Offers(self._menus, self._plans)

    def admit(self, view: View, call: Call) -> Promise | Refuse:
        flow = view.flows[call.target]
        allowed_us = call.expires_us - view.now_us
        if flow.single is not None:
            function = view.functions[flow.single.function]
            if not view.can_host(function):
                return Refuse(call.id, "no-capacity")
            finish_us = self._offers.finish_us(view, function, allowed_us)
        else:
            if not all(view.can_host(view.functions[name]) for name in flow.functions):
                return Refuse(call.id, "no-capacity")
            finish_us = self._offers.flow_finish_us(view, flow, allowed_us)
        needed_us = int(finish_us * (1 + self.margin)) + view.reserve_us(call.target) if finish_us else 0
        if needed_us <= allowed_us:
            if self._too_dear(view, flow):
                return Refuse(call.id, "deadline", retry_after_us=100_000, offer_us=0)
            return Promise(finish_us)
        return Refuse(call.id, "deadline", retry_after_us=max(1_000, needed_us - allowed_us), offer_us=needed_us)

    def _too_dear(self, view: View, flow: Flow) -> bool:
        """More is asked than there is, and this call asks for much."""
        demand = self._demand
        demand.offered(flow.name)
        hosts = self._offers.hosts(view, flow)
        for device in hosts:
            demand.saw(device, view.devices[device].busy.bit_count() / view.devices[device].spec.units)
        if demand.due(view.now_us):
            units = {name: device.spec.units for name, device in view.devices.items()}
            demand.look(view.now_us, units, {target: self._offers.work(view, other) for target, other in view.flows.items()})
        return demand.tight and not demand.admits(flow.name, hosts)

    # ---------------------------------------------------------------- dispatch

    def dispatch(self, view: View) -> Iterator[Decision]:
        for function in sorted(view.waiting.values(), key=lambda f: (f.queue.head().due_us, f.queue.head().id)):
            while function.spec.name in view.waiting:
                yield from self._serve(view, function)

    def _serve(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """One batch, or a reason to wait."""
        name, queue, now_us = function.spec.name, function.queue, view.now_us
        fast_us = self._fastest_us(view, function)
        if fast_us < 0:  # nowhere yet
            yield Hold(name, NEVER_US, NEVER_US)
            return
        while len(queue) and queue.head().expires_us < now_us + fast_us:
            yield Drop(queue.head())
        if not len(queue):
            return
        room = seats(view, self._menus, function)
        late = queue.due_before(now_us + fast_us)
        jobs = self._company(function, late, room, now_us)
        head = jobs[0]
        in_time = late < len(queue)
        if room and not fast_us:
            seat = room[0]
            units = seat.units if seat.home else function.spec.units_on(seat.device.spec)
            pick = Pick(0.0, 0, len(jobs), units, function.spec.cores_on(seat.device.spec))
            yield Start(jobs, seat.opening(pick))
            return
        verdict = self._verdict(view, function, head, len(jobs), room, in_time) if room else NOTHING
        if verdict.until_us > now_us:
            self._wanted_us.pop(name, None)
            yield Hold(name, verdict.until_us, verdict.count, firm=True)
            return
        seat, pick = verdict.seat, verdict.pick
        if seat is None or pick is None:
            self._wanted_us.setdefault(name, now_us)
            yield from self._book(view, function, jobs, in_time, fast_us)
            return
        wanted_us = self._wanted_us.pop(name, now_us)
        self._slot_us[name] = max(now_us - wanted_us, 0.9 * self._slot_us.get(name, 0.0))
        yield Start(jobs[: pick.batch], seat.opening(pick))

    def _verdict(self, view: View, function: FunctionState, head: Job, count: int, room: list[Seat], in_time: bool) -> Verdict:
        now_us = view.now_us
        if not in_time:
            call = head.run.call
            found = cheapest(room, count, head.expires_us - now_us, call.deadline_us - call.arrived_us)
            return Verdict(*found) if found else NOTHING
        waiting = self._weigh.waiting(view, function, head, count, self._slot_us.get(function.spec.name, 0.0))
        ahead = self._plans.of(view, head)
        if ahead is not None:
            verdict = self._weigh.ahead(now_us, room, count, head.run.call.deadline_us - now_us, waiting, ahead)
            if verdict is not NOTHING:
                return verdict
        call = head.run.call
        return self._weigh.alone(
            now_us, room, count, head.due_us - now_us, waiting if ahead is None else None, call.deadline_us - call.arrived_us
        )

    def _book(self, view: View, function: FunctionState, jobs: list[Job], in_time: bool, fast_us: int) -> Iterator[Decision]:
        name, now_us, head = function.spec.name, view.now_us, jobs[0]
        end_us = head.due_us if in_time else head.expires_us
        found = bookings(view, self._menus, function, end_us - fast_us)
        soonest_us = NEVER_US
        for seat in sorted(found, key=lambda seat: seat.at_us):
            pick = seat.menu.best(len(jobs), end_us - seat.at_us, -seat.units if seat.home else seat.units, seat.cores)
            if pick is not None:
                if seat.at_us - self.lead_us <= now_us:
                    yield Start(jobs[: pick.batch], seat.opening(pick))
                    return
                soonest_us = min(soonest_us, seat.at_us - self.lead_us)
        ready_us = view.no_opening_until_us(function)
        yield Hold(name, max(now_us + 1, min(soonest_us, ready_us, end_us - fast_us + 1)), NEVER_US)

    def _fastest_us(self, view: View, function: FunctionState) -> int:
        """One job on the best slice of any device it is on; 0 if nobody knows, below 0 if it is nowhere."""
        best = -1
        for instance in function.instances.values():
            if instance.phase is Phase.WARM:
                menu = self._menus.of(view, function, view.devices[instance.device])
                pick = menu.fastest(1, menu.sizes[-1], menu.hands[-1])
                us = pick.time_us if pick is not None else 0
                best = us if best < 0 else min(best, us)
        return best

    def _company(self, function: FunctionState, late: int, room: list[Seat], now_us: int) -> list[Job]:
        """Who shares the next batch, its leader first: those who can be in time, then those who are late anyway."""
        queue, most = function.queue, function.spec.max_batch
        if late >= len(queue):
            return together(queue.first(most))
        start = self._leader(function, late, room, now_us)
        jobs = queue.some(start, most)
        if start and len(jobs) < most:
            jobs += queue.some(0, min(start, most - len(jobs)))
        return together(jobs)

    def _leader(self, function: FunctionState, late: int, room: list[Seat], now_us: int) -> int:
        """More wait than fit into one batch: a job so urgent that the batch would be small or dear for it is passed over if
        more are served, in the same time on the same units, without it."""
        queue, most = function.queue, function.spec.max_batch
        if len(queue) - late <= most or not room:
            return late
        jobs = queue.some(late, most)
        ideal = cheapest(room, most, NEVER_US)
        first = cheapest(room, most, jobs[0].due_us - now_us)
        if ideal is None or (first is not None and first[1].cost <= 1.1 * ideal[1].cost):
            return late
        best, best_rate = late, 0.0
        for passed, job in enumerate(jobs):
            found = cheapest(room, most, job.due_us - now_us)
            if found is not None:
                rate = (found[1].batch - passed) / (found[1].cost * found[1].batch)
                if rate > best_rate:
                    best, best_rate = late + passed, rate
                if found[1].cost <= 1.1 * ideal[1].cost:
                    break
        return best
