"""The default: every batch in the cheapest way that is still in time.

- At dispatch all configurations (batch, units, cores) on all devices with room are weighed at once, for a step of a workflow
  together with the cheapest way to do the rest of it (`planner/cheapest/weigh.py`). Small slices and full batches are what costs
  least, so they are taken and waited for while the goal allows it; the tighter the goal, the larger the slice.
- Who cannot be in time is refused on arrival and told what could be had (`planner/cheapest/offer.py`). If more is asked than
  there is, the calls that take most go first (`planner/cheapest/price.py`): as many as can be are then answered in time.
- Late jobs that are still wanted give way to those that can be in time.
- What stands where, ahead of demand and by worth: `planner/cheapest/standing.py`.

Where nobody states a goal a function gets the slice it asks for. Where nobody knows how long it takes, it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Refuse
from lamina.core.flow import Flow
from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, Drop, Hold, Promise, Start, View
from lamina.core.queue import Job, Order
from lamina.core.state import FunctionState
from lamina.planner.ample import idle, lets_one_in, promise, promised_lately
from lamina.planner.batching import ask_again_at, echo_is_better, wait_until_us
from lamina.planner.cheapest import why
from lamina.planner.cheapest.ahead import Plans
from lamina.planner.cheapest.allowance import allowance
from lamina.planner.cheapest.kinds import Kinds
from lamina.planner.cheapest.later import better_elsewhere
from lamina.planner.cheapest.leader import company
from lamina.planner.cheapest.luck import Luck
from lamina.planner.cheapest.menu import Pick
from lamina.planner.cheapest.offer import Offers
from lamina.planner.cheapest.price import Demand
from lamina.planner.cheapest.seats import Menus, Seat, bookings, seats
from lamina.planner.cheapest.shut import Shut
from lamina.planner.cheapest.standing import Standing
from lamina.planner.cheapest.weigh import LOOP, NOTHING, Verdict, Weigh, cheapest, has_goal, states_goal
from lamina.planner.company import wait_for_company_us
from lamina.types import NEVER_US, Call

SILENCE = 8
"""Times the usual gap between two calls: after that, those who were waited for do not come."""

AGAIN = 16
"""Of batches that leave jobs behind, one in so many takes them all."""


@dataclass(slots=True)
class Policy:
    """Cheapest in time, by exact look-ahead."""

    lead_us: int = 500  #: how long before a slice is free its next batch is committed
    margin: float = 0.05  #: of the expected time, kept spare at admission
    spare: float = 0.02  #: of a batch's time, kept spare when it is chosen
    patience: float = 0.8  #: of the time a call has, what may be spent on waiting for company
    doubt: float = 0.25  #: on a machine of one's own, what smaller batches must promise to save before a batch is parted
    period_us: int = 1_000_000  #: between two looks at what should stand where
    order: Order = field(default="due", init=False)
    any_size: bool = field(default=True, init=False)
    _menus: Menus = field(default_factory=Menus, init=False)
    _demand: Demand = field(default_factory=Demand, init=False)
    _kinds: Kinds = field(init=False)
    _luck: Luck = field(default_factory=Luck, init=False)
    _plans: Plans = field(init=False)
    _weigh: Weigh = field(init=False)
    _offers: Offers = field(init=False)
    _standing: Standing = field(init=False)
    _shut: Shut = field(default_factory=Shut, init=False)
    _parted: dict[str, int] = field(default_factory=dict, init=False)  #: batches that left some behind
    _coming: dict[str, None] = field(default_factory=dict, init=False)  #: functions a run will come to that stand nowhere

    def __post_init__(self) -> None:
        self._plans = Plans(self._menus)
        self._weigh = Weigh(self.spare, self.patience)
        self._kinds = Kinds(self._menus)
        self._offers = Offers(self._menus, self._plans, self._kinds)
        self._standing = Standing(period_us=self.period_us, menus=self._menus)

    # -------------------------------------------------------------------- admit

    def admit(self, view: View, call: Call) -> Promise | Refuse:
        flow = view.flows[call.target]
        if not self._demand.tight and (lately := promised_lately(view, flow, call)):
            self._demand.offered(flow.name)
            return lately
        allowed_us = call.expires_us - view.now_us
        if flow.single is not None and not view.explaining:
            function = view.functions[flow.single.function]
            needed_us = self._shut.needed_us(view, function, allowed_us)
            if needed_us > allowed_us and not idle(view, function):
                self._demand.offered(flow.name)
                return Refuse(call.id, "deadline", max(1_000, needed_us - allowed_us), needed_us)
        if not all(view.can_host(view.functions[name]) for name in flow.functions):
            return Refuse(call.id, "no-capacity")
        heavy = self._too_heavy(view, flow) and states_goal(call, flow.slo)  # who has no goal can wait
        reserve_us = view.reserve_us(call.target)
        if flow.single is not None:
            within_us = int((allowed_us - reserve_us) / (1 + self.margin))
            finish_us = self._offers.finish_us(view, view.functions[flow.single.function], allowed_us, within_us)
        else:
            finish_us = self._offers.flow_finish_us(view, flow, allowed_us, self._demand.tight)
        needed_us = int(finish_us * (1 + self.margin)) + reserve_us if finish_us else 0
        shut = needed_us > allowed_us and not lets_one_in(view, flow, needed_us - reserve_us, allowed_us)
        if shut or heavy:
            said = why.refused(finish_us, reserve_us, self.margin, allowed_us, heavy) if view.explaining else ""
            refuse = Refuse(call.id, "deadline", max(1_000, needed_us - allowed_us), needed_us, said)
            if flow.single is not None and not heavy:
                self._shut.close(view, view.functions[flow.single.function], allowed_us, needed_us)
            return refuse
        if flow.single is None:
            self._coming.update({name: None for name in flow.functions if not view.functions[name].instances})
        return promise(view, flow, finish_us)

    def _too_heavy(self, view: View, flow: Flow) -> bool:
        """More is asked than there is, and this call asks for much."""
        demand, devices = self._demand, view.devices
        demand.offered(flow.name)
        hosts = self._offers.hosts(view, flow)
        for host in hosts:
            demand.saw(host, devices[host].busy.bit_count() / devices[host].spec.units)
        if demand.due(view.now_us):
            work = {target: self._offers.work(view, view.flows[target]) for target in demand.targets if target in view.flows}
            demand.look(view.now_us, {name: device.spec.units for name, device in devices.items()}, work)
        return demand.tight and not demand.admits(flow.name, hosts)

    # -------------------------------------------------------------------- scale

    def scale(self, view: View) -> Iterator[Decision]:
        return self._standing.scale(view)

    # ----------------------------------------------------------------- dispatch

    def dispatch(self, view: View) -> Iterator[Decision]:
        if self._coming:
            names = tuple(self._coming)
            self._coming.clear()
            yield from self._standing.prefetch(view, names)
        for function in sorted(view.waiting.values(), key=lambda f: (f.queue.head().due_us, f.queue.head().id)):
            while function.spec.name in view.waiting:
                yield from self._serve(view, function)

    def _serve(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """One batch, or something to wait for."""
        name, queue, now_us = function.spec.name, function.queue, view.now_us
        fast_us = self._fastest_us(view, function)
        if fast_us < 0:  # it stands nowhere; when it does, it is asked about again
            yield Hold(name, NEVER_US, NEVER_US)
            return
        while len(queue) and queue.head().expires_us < now_us + fast_us:
            yield Drop(queue.head())
        if not len(queue):
            return
        room = seats(view, self._menus, function)
        late = queue.due_before(now_us + fast_us)
        in_time = late < len(queue)
        jobs = company(function, late, room, now_us)
        room = [self._moved(view, jobs, seat) for seat in room]
        unknown = next((seat for seat in room if not seat.menu.known), None)
        if unknown is not None:
            yield from self._try(function, jobs, unknown)
            return
        if in_time:
            room = self._worth(view, function, jobs[0], room)
        cap = allowance(view, self._kinds, jobs[0]) if in_time else math.inf
        verdict = self._verdict(view, function, jobs, room, in_time, cap) if room else NOTHING
        if verdict.until_us > now_us:
            self._luck.hope(name, len(jobs))
            yield Hold(name, verdict.until_us, verdict.company, firm=True)
        elif verdict.seat is None or verdict.pick is None:
            yield from self._book(view, function, jobs, in_time, fast_us)
        elif elsewhere := self._elsewhere(view, function, jobs, verdict.seat, verdict.pick, in_time, cap):
            yield from self._book(view, function, jobs, in_time, fast_us, elsewhere)
        else:
            yield from self._start(view, function, jobs, verdict.seat, verdict.pick, room)

    def _verdict(
        self, view: View, function: FunctionState, jobs: list[Job], room: list[Seat], in_time: bool, cap: float
    ) -> Verdict:
        now_us, head, count = view.now_us, jobs[0], len(jobs)
        call = head.run.call
        slo_us = call.deadline_us - call.arrived_us
        if not has_goal(head):
            return self._as_wished(view, function, head, room, count)
        if not in_time:
            found = cheapest(room, count, head.expires_us - now_us, slo_us)
            return Verdict(*found) if found else NOTHING
        waiting = None
        if self._luck.trusts(function.spec.name):
            waiting = self._weigh.waiting(view, function, head, count, room)
        ahead = self._plans.of(view, head)
        verdict = NOTHING
        if ahead is not None:
            within_us = call.deadline_us - now_us
            if cap < math.inf:
                verdict = self._weigh.ahead(now_us, room, count, within_us, slo_us, waiting, ahead, cap)
            if verdict is NOTHING:
                verdict = self._weigh.ahead(now_us, room, count, within_us, slo_us, waiting, ahead)
        if verdict is NOTHING:
            verdict = self._weigh.alone(now_us, room, count, head.due_us - now_us, slo_us, waiting if ahead is None else None)
        return self._known_company(view, function, head, count, verdict)

    def _as_wished(self, view: View, function: FunctionState, head: Job, room: list[Seat], count: int) -> Verdict:
        """Nobody said how long it may take: on the slice it asks for, and no waiting but what pays in throughput."""
        wished = []
        for seat in room:
            units = function.spec.units_on(seat.device.spec)
            if seat.exact:
                wished.append(seat)
            elif seat.units >= units:
                wished.append(seat._replace(units=units, exact=True))
        found = cheapest(wished, count, head.expires_us - view.now_us)
        return self._known_company(view, function, head, count, Verdict(*found)) if found else NOTHING

    def _known_company(self, view: View, function: FunctionState, head: Job, count: int, verdict: Verdict) -> Verdict:
        """Those one step away; and without a plan for the rest of a workflow, whoever is worth it in throughput."""
        seat, pick, now_us = verdict.seat, verdict.pick, view.now_us
        if seat is None or pick is None or verdict.until_us > now_us:
            return verdict
        verdict = verdict._replace(pick=(pick := self._whole(function, head, count, seat, pick)))
        if pick.batch < count or count >= function.spec.max_batch:
            return verdict

        def latency_us(batch: int) -> int:
            return seat.menu.latency_us(batch, pick.units, pick.cores)

        most_us = latency_us(min(count + 1, function.spec.max_batch))
        start_by_us = min(head.due_us, head.expires_us) - int(most_us * (1 + self.spare)) - 1
        if head.run.flow.single is not None:  # whoever waits to the last moment is late as often as batches are
            start_by_us -= view.reserve_us(head.run.call.target)
        until_us, again = 0, count + 1
        if function.coming >= 1:
            until_us = wait_for_company_us(view, function, count, now_us, latency_us, start_by_us)
        paid = seat.exact or seat.device.spec.owned
        alone = head.run.flow.single is not None or paid or function.meter.echo > LOOP
        if until_us <= now_us and head.due_us < NEVER_US and alone:
            until_us = wait_until_us(now_us, function, count, function.spec.max_batch, latency_us, start_by_us)
            again = ask_again_at(now_us, function, count)
        return verdict._replace(until_us=until_us, company=again) if until_us > now_us else verdict

    def _worth(self, view: View, function: FunctionState, head: Job, places: list[Seat]) -> list[Seat]:
        """Without the kinds of devices that do not pay at this pace."""
        if len(function.instances) < 2 or not has_goal(head):
            return places
        slo_us = head.run.call.deadline_us - head.run.call.arrived_us
        dear = self._kinds.look(view, function, head.run.flow, slo_us, self._plans.of(view, head), self._demand.tight)
        return [seat for seat in places if seat.device.spec.kind not in dear] if dear else places

    def _elsewhere(
        self, view: View, function: FunctionState, jobs: list[Job], seat: Seat, pick: Pick, in_time: bool, cap: float
    ) -> list[Seat]:
        if not in_time or not has_goal(jobs[0]) or (len(function.instances) < 2 and pick.cost <= cap):
            return []
        ahead = self._plans.of(view, jobs[0])
        return better_elsewhere(view, self._menus, function, jobs, seat, pick, ahead, self.spare, cap)

    def _book(
        self,
        view: View,
        function: FunctionState,
        jobs: list[Job],
        in_time: bool,
        fast_us: int,
        only: list[Seat] | None = None,
    ) -> Iterator[Decision]:
        """Nothing that is free would do: a place behind a running batch, committed just before that one ends."""
        now_us, head = view.now_us, jobs[0]
        end_us = head.due_us if in_time else head.expires_us
        again_us = min(view.no_opening_until_us(function), end_us - fast_us + 1)
        places = only or bookings(view, self._menus, function, end_us - fast_us)
        if in_time:
            places = self._worth(view, function, head, places)
        for seat in sorted(places, key=lambda seat: seat.at_us):
            seat = self._moved(view, jobs, seat)
            pick = seat.best(len(jobs), end_us - seat.at_us)
            if pick is None:
                continue
            pick = self._whole(function, head, len(jobs), seat, pick)
            if self._echo_first(function, seat, pick):
                continue
            full = in_time and pick.batch == function.spec.max_batch and _own_lane(function, seat)
            book_us = seat.at_us - self.lead_us
            if full or book_us <= now_us:
                yield from self._start(view, function, jobs, seat, pick, [seat])
                return
            again_us = min(again_us, book_us)
        yield Hold(function.spec.name, max(now_us + 1, again_us), NEVER_US)

    def _echo_first(self, function: FunctionState, seat: Seat, pick: Pick) -> bool:
        """Will the callers of the batch before be back at once, and worth waiting for?"""

        def latency_us(batch: int) -> int:
            return seat.menu.latency_us(batch, pick.units, pick.cores)

        return seat.after is not None and echo_is_better(function, seat.after, pick.batch, latency_us)

    def _start(
        self, view: View, function: FunctionState, jobs: list[Job], seat: Seat, pick: Pick, room: list[Seat]
    ) -> Iterator[Decision]:
        chosen = jobs[: pick.batch]
        for job in chosen:
            call = job.run.call
            if call.cost_limit and job.run.cost + pick.cost > call.cost_limit:
                yield Drop(job, "cost")
                return
        opening = seat.opening(pick)
        us = view.latency_us(function.spec.name, seat.device, pick.batch, opening.units, pick.cores)
        us += view.transfer_us(chosen, seat.device)
        if seat.at_us + us > max(job.expires_us for job in chosen):  # predictions have moved since the menu was made
            self._menus.forget(function.spec.name)
            yield Hold(function.spec.name, view.now_us + 1, NEVER_US)
            return
        direct, quiet_us = chosen[0].run.flow.single is not None, view.now_us - function.meter.last_us
        silent = direct and len(chosen) < function.spec.max_batch and quiet_us > SILENCE * function.meter.gap_us
        self._luck.start(function.spec.name, len(chosen), silent)
        said = why.started(view, jobs, seat, pick, room, self._plans.of(view, jobs[0])) if view.explaining else ""
        yield Start(chosen, opening, said)

    def _whole(self, function: FunctionState, head: Job, count: int, seat: Seat, pick: Pick) -> Pick:
        """On a machine of one's own: all who wait in one batch, if that is in time and not clearly slower a job. Learnt times are
        noisy, and who parts a batch for less than their noise is slower in the end. Every so often even then: a size that was
        slow once, before caches were warm, would else never be seen again. Where time is not paid for, trying costs nothing."""
        if pick.batch >= count or not seat.device.spec.owned:
            return pick
        us = seat.menu.latency_us(count, pick.units, pick.cores)
        whole = Pick(pick.cost * us / pick.time_us * pick.batch / count, us, count, pick.units, pick.cores)
        if not 0 < seat.at_us + seat.time_us(whole) <= head.due_us:
            return pick
        if whole.time_us * pick.batch <= (1 + self.doubt) * pick.time_us * count:
            return whole
        name = function.spec.name
        self._parted[name] = parted = self._parted.get(name, 0) + 1
        return pick if parted % AGAIN else whole

    def _try(self, function: FunctionState, jobs: list[Job], seat: Seat) -> Iterator[Decision]:
        """Nobody knows how long it takes here, and nobody will unless it is tried."""
        units = function.spec.units_on(seat.device.spec)
        if seat.exact or units <= seat.units:
            cores = min(seat.cores, function.spec.cores_on(seat.device.spec))
            pick = Pick(0.0, 0, len(jobs), seat.units if seat.exact else units, cores)
            yield Start(jobs, seat.opening(pick), "nobody knows yet how long it takes here")
        else:
            yield Hold(function.spec.name, NEVER_US, NEVER_US)

    # -------------------------------------------------------------- who and where

    def _fastest_us(self, view: View, function: FunctionState) -> int:
        """One job on the best slice of any device it is on; 0 if nobody knows, below 0 if it is nowhere."""
        best_us = -1
        for instance in function.instances.values():
            if instance.phase is Phase.WARM:
                pick = self._menus.of(view, function, view.devices[instance.device]).fastest()
                us = pick.time_us if pick is not None else 0
                best_us = us if best_us < 0 else min(best_us, us)
        return best_us

    def _moved(self, view: View, jobs: list[Job], seat: Seat) -> Seat:
        if not seat.device.spec.link_mib_per_s:
            return seat
        return seat._replace(moving_us=-(-view.transfer_us(jobs, seat.device) // len(jobs)))


def _own_lane(function: FunctionState, seat: Seat) -> bool:
    """Behind a batch of its own, where it may have but one at a time: what is full can be booked as well now as later."""
    return seat.after is not None and seat.after.instance is seat.instance and function.batches_at_once(seat.device) == 1
