"""Online gpu-let: measure rates, plan, apply, serve by rounds. What its three policies have in common.

Every `period_us` the rates of the last period go to the planner. If one of them has left its band (more than 5 % up or 10 %
down, and more than chance explains), a new plan is made and applied, make before break; else the old one stays. Until there
is a first measurement, `rates` stands in for it, as the published system's configuration does; without it, plans follow
each other in steps that double until they reach the period.

A plan takes as few devices as will do. If all devices are not enough, all rates are planned for in the same proportion,
the largest that fits. There are only so many turns to be had, and so much memory: the functions that are called most have them,
the others are unplanned (`planner/partitioning/unplanned.py`).

Planning is bounded, so that it never holds up dispatch: of many functions only as many as there are turns are looked at, a
function without a plan brings a new plan forward, but each time at twice the distance, and a plan for nearly the same rates
is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log, sqrt

from lamina.core.policy import Decision, View, Wake
from lamina.core.queue import Order
from lamina.core.state import FunctionState
from lamina.planner.applied.fleet_plan import alike, best_plan, chosen
from lamina.planner.applied.goals import NO_GOAL_US, function_goals_us
from lamina.planner.applied.guests import Guests
from lamina.planner.applied.places import Cut, Turn, what_is
from lamina.planner.applied.rounds import Rounds
from lamina.planner.applied.standing import Standing
from lamina.planner.glet.adapt import Pairwise, catalogue, two_cuts
from lamina.planner.glet.model import Rules, Task
from lamina.planner.glet.plan import Plan, Planner
from lamina.planner.glet.quirks import REPAIRED
from lamina.planner.neighbours import known_interference
from lamina.types import DeviceSpec, FunctionSpec

FIRST_US = 250_000
"""From the first arrival to the second plan; then twice as long each time, up to the period."""

AGAIN_US = 50_000
"""A function without a plan has work: a new plan, this long after the last; then twice as long, until one was due anyhow."""

RETRY_US = 5_000
UNKNOWN_US = 10_000
"""A batch of something never measured is planned to take this long; it will be known better soon."""

UP, DOWN, CHANCE = 1.05, 0.9, 3.0
ENOUGH = 1.0  #: requests a second that are planned for every function with any
SAME = 1.03  #: rates no further apart than this have one plan
PLANS = 16  #: that are remembered


@dataclass(slots=True)
class Elastic:
    """Fields without an underscore are options of the policies."""

    period_us: int = 20_000_000
    max_models: int = 3  #: functions that may take turns on one slice
    rates: dict[str, float] = field(default_factory=dict)  #: requests a second by function, until they are measured
    order: Order = "due"
    _standing: Standing = field(default_factory=Standing, init=False)
    _rounds: Rounds = field(default_factory=Rounds, init=False)
    _planned: dict[str, float] = field(default_factory=dict, init=False)  #: rates the plan was made for
    _counts: dict[str, int] = field(default_factory=dict, init=False)  #: arrivals at the last look
    _looked_us: int = field(default=0, init=False)
    _first_us: int = field(default=-1, init=False)  #: when the first call came
    _next_us: int = field(default=0, init=False)
    _soonest_us: int = field(default=0, init=False)
    _wake_us: int = field(default=-1, init=False)
    _again_us: int = field(default=AGAIN_US, init=False)
    _there: tuple[DeviceSpec | FunctionSpec, ...] = field(default=(), init=False)  #: devices and functions the plan knows
    _guests: Guests = field(default_factory=Guests, init=False)
    _known: dict[tuple[object, ...], list[Cut]] = field(default_factory=dict, init=False)  #: plans made before

    def rules(self) -> Rules:
        raise NotImplementedError

    # -------------------------------------------------------------------- roles

    def scale(self, view: View) -> Iterator[Decision]:
        yield from self._attend(view)

    def dispatch(self, view: View) -> Iterator[Decision]:
        if self._first_us < 0 and view.waiting:
            self._begin(view)
        guests = self._guests
        if self._standing.changing or view.now_us >= self._next_us or guests.waiting or guests.lacking(view, self._housed(view)):
            yield from self._attend(view)
        yield from self._rounds.dispatch(view, self._standing)

    def _attend(self, view: View) -> Iterator[Decision]:
        now_us = view.now_us
        if self._due(view):
            self._plan(view)
        yield from self._standing.steps(view)
        yield from self._guests.steps(view, self._housed(view))
        unsettled = self._standing.changing or self._guests.waiting
        at_us = now_us + RETRY_US if unsettled or self._next_us <= now_us else self._next_us
        at_us = min(at_us, self._next_us) if self._next_us > now_us else at_us
        if self._wake_us <= now_us or at_us < self._wake_us:
            self._wake_us = max(at_us, now_us + 1)
            yield Wake(self._wake_us)

    def _housed(self, view: View) -> Callable[[FunctionState], bool]:
        return lambda function: self._standing.houses(view, function)

    # ----------------------------------------------------------------- planning

    def _begin(self, view: View) -> None:
        """The first call: time is counted from here."""
        self._first_us = self._looked_us = view.now_us
        self._next_us = min(self._next_us, view.now_us + FIRST_US)

    def _due(self, view: View) -> bool:
        if what_is(view) != self._there:
            return True
        if self._standing.changing and view.now_us < self._looked_us + self.period_us:
            return False  # let the last plan come to stand first
        if view.now_us >= self._next_us:
            return True
        new = any(name not in self._planned for name in (*view.waiting, *view.held))
        return new and view.now_us >= self._soonest_us

    def _plan(self, view: View) -> None:
        now_us = view.now_us
        there = what_is(view)
        rates = self._measure(view)
        age_us = now_us - self._first_us if self._first_us >= 0 else 0
        self._again_us = AGAIN_US if now_us >= self._next_us else min(self.period_us, 2 * self._again_us)
        self._soonest_us = now_us + self._again_us
        self._next_us = now_us + min(self.period_us, max(FIRST_US, age_us))
        if there == self._there and not self._moved(rates, now_us):
            return
        self._looked_us = now_us
        self._counts = {name: function.meter.count for name, function in view.functions.items()}
        if there != self._there:
            self._known.clear()
        self._there = there
        self._planned = {name: rate for name, rate in rates.items() if rate > 0}
        if self._planned and view.devices:
            labels = alike(view)
            self._standing.adopt(view, self._cuts(view, self._planned, labels), labels)
            self._rounds.forget()

    def _measure(self, view: View) -> dict[str, float]:
        """Requests a second since the last look; what has just begun is judged by the gaps between its arrivals."""
        span_us = view.now_us - self._looked_us
        rates = {}
        for name, function in view.functions.items():
            meter = function.meter
            count = meter.count - self._counts.get(name, 0)
            if not meter.count:
                rates[name] = self.rates.get(name, ENOUGH if function.spec.scale.min else 0.0)
            elif name in self._planned and span_us < FIRST_US:
                rates[name] = self._planned[name]  # too soon to tell
            elif name not in self._planned:
                gaps = 1e6 / max(1.0, meter.gap_us, AGAIN_US / meter.count) if meter.count > 2 else 0.0  # a burst is not a rate
                rates[name] = max(self.rates.get(name, 0.0), gaps, len(function.queue) * 1e6 / FIRST_US, ENOUGH)
            else:
                rates[name] = max(count * 1e6 / span_us, ENOUGH if len(function.queue) else 0.0)
        return rates

    def _moved(self, rates: dict[str, float], now_us: int) -> bool:
        span_s = max(1, now_us - self._looked_us) / 1e6
        for name, rate in rates.items():
            before = self._planned.get(name, 0.0)
            chance = CHANCE * sqrt(max(before, rate) / span_s)
            if rate > before * UP and rate - before > chance:
                return True
            if rate < before * DOWN and before - rate > chance:
                return True
            if rate > 0 and not before:
                return True
        return False

    def _cuts(self, view: View, rates: dict[str, float], labels: dict[str, str]) -> list[Cut]:
        kinds: dict[str, DeviceSpec] = {}
        for name, label in labels.items():
            kinds.setdefault(label, view.devices[name].spec)
        rules = self.rules()
        turns = (self.max_models if not rules.self_tuning else 1) * (2 if rules.partitioning else 1)
        specs = chosen(view, rates, list(kinds.values()), turns * len(labels))
        if not specs:
            return []
        key = (*labels.values(), *self._fingerprint(view, rates, specs, kinds))
        cuts = self._known.get(key)
        if cuts is None:
            if len(self._known) >= PLANS:
                del self._known[next(iter(self._known))]
            cuts = self._known[key] = self._think(view, rates, specs, kinds, list(labels.values()))
        return cuts

    def _fingerprint(
        self, view: View, rates: dict[str, float], specs: Sequence[FunctionSpec], kinds: dict[str, DeviceSpec]
    ) -> Iterator[object]:
        """What a plan depends on, rounded: rates, and how long batches take."""
        for spec in specs:
            yield spec.name
            yield _rounded(rates[spec.name])
            for device in kinds.values():
                for batch in (1, spec.max_batch):
                    cores = spec.cores_on(device)
                    yield _rounded(view.predictor.latency_us(spec.name, device.kind, batch, device.units, cores))

    def _think(
        self,
        view: View,
        rates: dict[str, float],
        specs: Sequence[FunctionSpec],
        kinds: dict[str, DeviceSpec],
        devices: list[str],
    ) -> list[Cut]:
        def latency_us(function: str, kind: str, batch: int, units: int, cores: int) -> int:
            return view.predictor.latency_us(function, kind, batch, units, cores) or UNKNOWN_US

        known = catalogue(specs, kinds, latency_us, two_cuts)
        model = known_interference(view.predictor) if self.rules().interference else None
        rules = replace(self.rules(), interference=model is not None, latency_ratio=1.0, max_models=self.max_models)
        planner = Planner(known, rules, REPAIRED, Pairwise(known, model) if model is not None else None)

        def alone_us(name: str) -> float:
            spec = view.functions[name].spec
            able = [device for device in kinds.values() if spec.fits_family(device.family)]
            times_us = (latency_us(name, one.kind, 1, max(two_cuts(one).values()), spec.cores_on(one)) for one in able)
            return min(times_us, default=UNKNOWN_US)

        flows = [flow for flow in view.flows.values() if not rates.keys().isdisjoint(flow.functions)]
        goals_us = function_goals_us(flows, alone_us)
        tasks = [
            Task(number, rates[spec.name], max(goals_us.get(spec.name, NO_GOAL_US), 2.1 * alone_us(spec.name)) / 1000)
            for number, spec in enumerate(specs)
        ]
        slow = planner.too_slow(tasks, devices)
        if slow is not None:
            tasks = [task for task in tasks if specs[task.model].name not in slow.unserved]
        return cuts_of(best_plan(planner, tasks, devices)) if tasks else []


def _rounded(value: float) -> int:
    return round(log(value) / log(SAME)) if value > 0 else -1_000_000


def cuts_of(plan: Plan) -> list[Cut]:
    """Slice assignments of a plan, for the policies that carry it out."""
    return [
        Cut(
            cut.gpu,
            cut.kind,
            cut.units,
            int(cut.duty_ms * 1000),
            int(sum(share.run_ms for share in cut.shares) * 1000),
            tuple(Turn(share.model, share.batch, share.throughput) for share in cut.shares),
        )
        for cut in plan.slices
        if cut.shares
    ]
