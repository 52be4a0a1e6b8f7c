"""Gpu-let on line: measure rates, plan, apply, serve by rounds. What its three policies have in common.

Every `period_us` the rates of the last period go to the planner. If one of them has left its band (more than 5 % up or 10 %
down, and more than chance explains), a new plan is made and applied, make before break; else the old one stays. Until there
is a first measurement, `rates` stands in for it, as the published system's configuration does; without it, plans follow
each other in steps that double until they reach the period.

A plan takes as few devices as will do. If all devices are not enough, all rates are planned for in the same proportion,
the largest that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

from lamina.core.policy import Decision, View, Wake
from lamina.core.queue import Order
from lamina.planner.applied import Cut, Standing, Turn
from lamina.planner.glet.adapt import Pairwise, catalogue, two_cuts
from lamina.planner.glet.model import Rules, Task
from lamina.planner.glet.plan import HEADROOMS, Plan, Planner
from lamina.planner.glet.quirks import REPAIRED
from lamina.planner.goals import NO_GOAL_US, function_goals_us
from lamina.planner.neighbours import known_interference
from lamina.planner.rounds import Rounds
from lamina.types import DeviceSpec

FIRST_US = 250_000
"""From the first arrival to the second plan; then twice as long each time, up to the period."""

AGAIN_US = 50_000
"""A function nobody planned for has work: a new plan, but not more often than this."""

RETRY_US = 5_000
UNKNOWN_US = 10_000
"""A batch of something never measured is planned to take this long; it will be known better soon."""

UP, DOWN, CHANCE = 1.05, 0.9, 3.0
ENOUGH = 1.0  #: requests a second that are planned for whoever has any


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
    _there: tuple[str, ...] = field(default=(), init=False)  #: devices and functions the plan knows

    def rules(self) -> Rules:
        raise NotImplementedError

    # -------------------------------------------------------------------- roles

    def scale(self, view: View) -> Iterator[Decision]:
        yield from self._attend(view)

    def dispatch(self, view: View) -> Iterator[Decision]:
        if self._first_us < 0 and view.waiting:
            self._begin(view)
        if self._standing.changing or view.now_us >= self._next_us:
            yield from self._attend(view)
        yield from self._rounds.dispatch(view, self._standing)

    def _attend(self, view: View) -> Iterator[Decision]:
        now_us = view.now_us
        if self._due(view):
            self._plan(view)
        yield from self._standing.steps(view)
        at_us = min(self._next_us, now_us + RETRY_US if self._standing.changing else self._next_us)
        if self._wake_us <= now_us or at_us < self._wake_us:
            self._wake_us = max(at_us, now_us + 1)
            yield Wake(self._wake_us)

    # ----------------------------------------------------------------- planning

    def _begin(self, view: View) -> None:
        """The first call: time is counted from here."""
        self._first_us = self._looked_us = view.now_us
        self._next_us = min(self._next_us, view.now_us + FIRST_US)

    def _due(self, view: View) -> bool:
        if (*view.devices, *view.functions) != self._there:
            return True
        if view.now_us >= self._next_us:
            return True
        new = any(name not in self._planned for name in (*view.waiting, *view.held))
        return new and view.now_us >= self._soonest_us

    def _plan(self, view: View) -> None:
        now_us = view.now_us
        there = (*view.devices, *view.functions)
        rates = self._measure(view)
        age_us = now_us - self._first_us if self._first_us >= 0 else 0
        self._next_us = now_us + min(self.period_us, max(FIRST_US, age_us))
        self._soonest_us = now_us + AGAIN_US
        if there == self._there and not self._moved(rates, now_us):
            return
        self._looked_us = now_us
        self._counts = {name: function.meter.count for name, function in view.functions.items()}
        self._there = there
        self._planned = {name: rate for name, rate in rates.items() if rate > 0}
        if self._planned and view.devices:
            self._standing.adopt(view, self._cuts(view, self._planned))
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
                gaps = 1e6 / max(1.0, meter.gap_us) if meter.count > 2 else 0.0
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

    def _cuts(self, view: View, rates: dict[str, float]) -> list[Cut]:
        specs = [view.functions[name].spec for name in rates]
        kinds: dict[str, DeviceSpec] = {}
        for device in view.devices.values():
            kinds.setdefault(device.spec.kind, device.spec)

        def latency_us(function: str, kind: str, batch: int, units: int, cores: int) -> int:
            return view.predictor.latency_us(function, kind, batch, units, cores) or UNKNOWN_US

        known = catalogue(specs, kinds, latency_us, two_cuts)
        model = known_interference(view.predictor) if self.rules().interference else None
        rules = replace(self.rules(), interference=model is not None, latency_ratio=1.0, max_models=self.max_models)
        planner = Planner(known, rules, REPAIRED, Pairwise(known, model) if model is not None else None)

        def alone_us(name: str) -> float:
            able = [spec for spec in kinds.values() if view.functions[name].spec.fits_family(spec.family)]
            return min((latency_us(name, spec.kind, 1, spec.units, 0) for spec in able), default=UNKNOWN_US)

        flows = [flow for flow in view.flows.values() if not rates.keys().isdisjoint(flow.functions)]
        goals_us = function_goals_us(flows, alone_us)
        tasks = [
            Task(number, rates[spec.name], max(goals_us.get(spec.name, NO_GOAL_US), 2.1 * alone_us(spec.name)) / 1000)
            for number, spec in enumerate(specs)
        ]
        return cuts_of(best_plan(planner, tasks, [device.spec.kind for device in view.devices.values()]))


def best_plan(planner: Planner, tasks: Sequence[Task], kinds: Sequence[str]) -> Plan:
    """On as few devices as will do; on all of them with less headroom; on all of them at a part of every rate."""
    least = min(len(kinds), planner.gpus_at_least(tasks, kinds))
    for count in range(least, len(kinds) + 1):
        plan = planner.plan(tasks, kinds[:count], HEADROOMS[:1], thorough=False)
        if plan.schedulable:
            return plan
    plan = planner.plan(tasks, kinds, HEADROOMS[1:], thorough=False)
    if plan.schedulable:
        return plan
    scale = planner.largest_scale(tasks, kinds, steps=5)
    less = planner.plan([replace(task, rate=task.rate * scale) for task in tasks], kinds, thorough=False) if scale else plan
    return less if less.schedulable else plan


def cuts_of(plan: Plan) -> list[Cut]:
    """A plan as what is to stand."""
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
