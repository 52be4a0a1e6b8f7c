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

from lamina.core.policy import Decision, RecheckAt, View
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.planner.function_goals import NO_GOAL_US, function_goals_us
from lamina.planner.interference import InterferenceModel
from lamina.planner.partitioning.catalogue import PlannerRules, PlanTask
from lamina.planner.partitioning.device_catalogue import PairwiseInterference, build_catalogue, halving_cuts
from lamina.planner.partitioning.plan import HEADROOMS, PartitionPlan
from lamina.planner.partitioning.plan_rollout import PlanRollout
from lamina.planner.partitioning.round_dispatch import RoundDispatcher
from lamina.planner.partitioning.slice_placement import SliceAssignment, plan_inputs, slice_assignments
from lamina.planner.partitioning.unplanned import UnplannedFunctions
from lamina.published.gpulet.planner import GpuletPlanner
from lamina.published.gpulet.quirks import REPAIRED
from lamina.types import DeviceSpec, FunctionSpec

FIRST_US = 250_000
"""From the first arrival to the second plan; then twice as long each time, up to the period."""

REPLAN_US = 50_000
"""A function without a plan has work: a new plan, this long after the last; then twice as long, until one was due anyhow."""

RETRY_US = 5_000
UNKNOWN_US = 10_000
"""A batch of something never measured is planned to take this long; it will be known better soon."""

UP_FACTOR, DOWN_FACTOR, NOISE_SIGMAS = 1.05, 0.9, 3.0
MIN_RATE = 1.0  #: requests a second that are planned for every function with any
RATE_GRAIN = 1.03  #: rates no further apart than this have one plan
MAX_PLANS = 16  #: that are remembered


@dataclass(slots=True)
class OnlineGpulet:
    """Fields without an underscore are options of the policies."""

    period_us: int = 20_000_000
    max_models: int = 3  #: functions that may take turns on one slice
    rates: dict[str, float] = field(default_factory=dict)  #: requests a second by function, until they are measured
    order: Order = "due"
    _rollout: PlanRollout = field(default_factory=PlanRollout, init=False)
    _rounds: RoundDispatcher = field(default_factory=RoundDispatcher, init=False)
    _planned: dict[str, float] = field(default_factory=dict, init=False)  #: rates the plan was made for
    _counts: dict[str, int] = field(default_factory=dict, init=False)  #: arrivals at the last look
    _looked_us: int = field(default=0, init=False)
    _first_us: int = field(default=-1, init=False)  #: when the first call came
    _next_us: int = field(default=0, init=False)
    _soonest_us: int = field(default=0, init=False)
    _wake_us: int = field(default=-1, init=False)
    _replan_gap_us: int = field(default=REPLAN_US, init=False)
    _plan_inputs: tuple[DeviceSpec | FunctionSpec, ...] = field(default=(), init=False)  #: devices and functions the plan knows
    _unplanned: UnplannedFunctions = field(default_factory=UnplannedFunctions, init=False)
    _plan_cache: dict[tuple[object, ...], list[SliceAssignment]] = field(default_factory=dict, init=False)  #: plans made before

    def rules(self) -> PlannerRules:
        raise NotImplementedError

    # -------------------------------------------------------------------- roles

    def scale(self, view: View) -> Iterator[Decision]:
        yield from self._advance(view)

    def dispatch(self, view: View) -> Iterator[Decision]:
        if self._first_us < 0 and view.waiting:
            self._on_first_call(view)
        unplanned = self._unplanned
        if (
            self._rollout.changing
            or view.now_us >= self._next_us
            or unplanned.waiting
            or unplanned.has_unserved(view, self._is_served(view))
        ):
            yield from self._advance(view)
        yield from self._rounds.dispatch(view, self._rollout)

    def _advance(self, view: View) -> Iterator[Decision]:
        now_us = view.now_us
        if self._is_due(view):
            self._plan(view)
        yield from self._rollout.advance(view)
        yield from self._unplanned.advance(view, self._is_served(view))
        unsettled = self._rollout.changing or self._unplanned.waiting
        at_us = now_us + RETRY_US if unsettled or self._next_us <= now_us else self._next_us
        at_us = min(at_us, self._next_us) if self._next_us > now_us else at_us
        if self._wake_us <= now_us or at_us < self._wake_us:
            self._wake_us = max(at_us, now_us + 1)
            yield RecheckAt(self._wake_us)

    def _is_served(self, view: View) -> Callable[[FunctionState], bool]:
        return lambda function: self._rollout.is_served(view, function)

    # ----------------------------------------------------------------- planning

    def _on_first_call(self, view: View) -> None:
        """The first call: time is counted from here."""
        self._first_us = self._looked_us = view.now_us
        self._next_us = min(self._next_us, view.now_us + FIRST_US)

    def _is_due(self, view: View) -> bool:
        if plan_inputs(view) != self._plan_inputs:
            return True
        if self._rollout.changing and view.now_us < self._looked_us + self.period_us:
            return False  # let the last plan come to stand first
        if view.now_us >= self._next_us:
            return True
        new = any(name not in self._planned for name in (*view.waiting, *view.deferred))
        return new and view.now_us >= self._soonest_us

    def _plan(self, view: View) -> None:
        now_us = view.now_us
        there = plan_inputs(view)
        rates = self._measured_rates(view)
        age_us = now_us - self._first_us if self._first_us >= 0 else 0
        self._replan_gap_us = REPLAN_US if now_us >= self._next_us else min(self.period_us, 2 * self._replan_gap_us)
        self._soonest_us = now_us + self._replan_gap_us
        self._next_us = now_us + min(self.period_us, max(FIRST_US, age_us))
        if there == self._plan_inputs and not self._rates_moved(rates, now_us):
            return
        self._looked_us = now_us
        self._counts = {name: function.arrivals.count for name, function in view.functions.items()}
        if there != self._plan_inputs:
            self._plan_cache.clear()
        self._plan_inputs = there
        self._planned = {name: rate for name, rate in rates.items() if rate > 0}
        if self._planned and view.devices:
            labels = device_labels(view)
            self._rollout.set_plan(view, self._plan_slices(view, self._planned, labels), labels)
            self._rounds.reset()

    def _measured_rates(self, view: View) -> dict[str, float]:
        """Requests a second since the last look; what has just begun is judged by the gaps between its arrivals."""
        span_us = view.now_us - self._looked_us
        rates = {}
        for name, function in view.functions.items():
            meter = function.arrivals
            count = meter.count - self._counts.get(name, 0)
            if not meter.count:
                rates[name] = self.rates.get(name, MIN_RATE if function.spec.scale.min else 0.0)
            elif name in self._planned and span_us < FIRST_US:
                rates[name] = self._planned[name]  # too soon to tell
            elif name not in self._planned:
                gaps = (
                    1e6 / max(1.0, meter.interarrival_us, REPLAN_US / meter.count) if meter.count > 2 else 0.0
                )  # a burst is not a rate
                rates[name] = max(self.rates.get(name, 0.0), gaps, len(function.queue) * 1e6 / FIRST_US, MIN_RATE)
            else:
                rates[name] = max(count * 1e6 / span_us, MIN_RATE if len(function.queue) else 0.0)
        return rates

    def _rates_moved(self, rates: dict[str, float], now_us: int) -> bool:
        span_s = max(1, now_us - self._looked_us) / 1e6
        for name, rate in rates.items():
            before = self._planned.get(name, 0.0)
            chance = NOISE_SIGMAS * sqrt(max(before, rate) / span_s)
            if rate > before * UP_FACTOR and rate - before > chance:
                return True
            if rate < before * DOWN_FACTOR and before - rate > chance:
                return True
            if rate > 0 and not before:
                return True
        return False

    def _plan_slices(self, view: View, rates: dict[str, float], labels: dict[str, str]) -> list[SliceAssignment]:
        kinds: dict[str, DeviceSpec] = {}
        for name, label in labels.items():
            kinds.setdefault(label, view.devices[name].spec)
        rules = self.rules()
        turns = (self.max_models if not rules.self_tuning else 1) * (2 if rules.partitioning else 1)
        specs = select_functions(view, rates, list(kinds.values()), turns * len(labels))
        if not specs:
            return []
        key = (*labels.values(), *self._fingerprint(view, rates, specs, kinds))
        cuts = self._plan_cache.get(key)
        if cuts is None:
            if len(self._plan_cache) >= MAX_PLANS:
                del self._plan_cache[next(iter(self._plan_cache))]
            cuts = self._plan_cache[key] = self._make_plan(view, rates, specs, kinds, list(labels.values()))
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

    def _make_plan(
        self,
        view: View,
        rates: dict[str, float],
        specs: Sequence[FunctionSpec],
        kinds: dict[str, DeviceSpec],
        devices: list[str],
    ) -> list[SliceAssignment]:
        def latency_us(function: str, kind: str, batch: int, units: int, cores: int) -> int:
            return view.predictor.latency_us(function, kind, batch, units, cores) or UNKNOWN_US

        known = build_catalogue(specs, kinds, latency_us, halving_cuts)
        model: InterferenceModel | None = getattr(view.predictor, "interference", None) if self.rules().interference else None
        rules = replace(self.rules(), interference=model is not None, latency_ratio=1.0, max_models=self.max_models)
        planner = GpuletPlanner(known, rules, REPAIRED, PairwiseInterference(known, model) if model is not None else None)

        def alone_us(name: str) -> float:
            spec = view.functions[name].spec
            able = [device for device in kinds.values() if spec.fits_family(device.family)]
            times_us = (latency_us(name, one.kind, 1, max(halving_cuts(one).values()), spec.cores_on(one)) for one in able)
            return min(times_us, default=UNKNOWN_US)

        flows = [flow for flow in view.flows.values() if not rates.keys().isdisjoint(flow.functions)]
        goals_us = function_goals_us(flows, alone_us)
        tasks = [
            PlanTask(number, rates[spec.name], max(goals_us.get(spec.name, NO_GOAL_US), 2.1 * alone_us(spec.name)) / 1000)
            for number, spec in enumerate(specs)
        ]
        slow = planner.infeasible_plan(tasks, devices)
        if slow is not None:
            tasks = [task for task in tasks if specs[task.model].name not in slow.unserved]
        return slice_assignments(plan_on_devices(planner, tasks, devices)) if tasks else []


def _rounded(value: float) -> int:
    return round(log(value) / log(RATE_GRAIN)) if value > 0 else -1_000_000


# ------------------------------------------------------------------ the planner on the devices there are


KEEP_FACTOR = 1.5  #: how much more others must be called to take the turn of a function that stands
SCALE_STEPS = 5  #: steps of the search for the largest part of all rates that fits


def device_labels(view: View) -> dict[str, str]:
    """Labels of the devices in a plan: their kind, with a number where devices of one kind are not of one make."""
    makes: dict[tuple[object, ...], str] = {}
    numbers: dict[str, int] = {}
    labels = {}
    for name, device in view.devices.items():
        spec = device.spec
        make = (spec.kind, spec.units, spec.memory_mib, spec.family, spec.limits, spec.cores)
        if make not in makes:
            number = numbers[spec.kind] = numbers.get(spec.kind, 0) + 1
            makes[make] = spec.kind if number == 1 else f"{spec.kind} #{number}"
        labels[name] = makes[make]
    return labels


def select_functions(view: View, rates: dict[str, float], kinds: Sequence[DeviceSpec], turns: int) -> list[FunctionSpec]:
    """Functions to plan for: as many as there are turns and memory for: the ones called most, in the order of `rates`."""
    memory_mib = sum(device.spec.memory_mib for device in view.devices.values())
    taken: set[str] = set()
    stays = {name: KEEP_FACTOR if view.functions[name].instances else 1.0 for name in rates}
    for name in sorted(rates, key=lambda one: (-rates[one] * stays[one], one)):
        spec = view.functions[name].spec
        able = any(spec.fits_family(kind.family) and spec.memory_mib <= kind.memory_mib for kind in kinds)
        if able and len(taken) < turns and spec.memory_mib <= memory_mib:
            taken.add(name)
            memory_mib -= spec.memory_mib
    return [view.functions[name].spec for name in rates if name in taken]


def plan_on_devices(planner: GpuletPlanner, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> PartitionPlan:
    """On as few devices as will do; on all of them with less headroom; on all of them at a part of every rate."""
    least, every = min(len(kinds), planner.gpus_at_least(tasks, kinds)), len(kinds)
    plan = planner.plan(tasks, kinds[:least], HEADROOMS[:1], thorough=False)
    if plan.schedulable:
        return plan
    whole = planner.plan(tasks, kinds, HEADROOMS[:1], thorough=False)
    count = least
    while whole.schedulable:  # if not even all will do, those in between need no look
        count += max(1, min(count // 8, every - count))
        plan = planner.plan(tasks, kinds[:count], HEADROOMS[:1], thorough=False) if count < every else whole
        if plan.schedulable:
            return plan
    plan = planner.plan(tasks, kinds, HEADROOMS[1:], thorough=False)
    if plan.schedulable:
        return plan
    scale = largest_scale(planner, tasks, kinds)
    less = planner.plan([replace(task, rate=task.rate * scale) for task in tasks], kinds, thorough=False) if scale else plan
    return less if less.schedulable else plan


def largest_scale(planner: GpuletPlanner, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> float:
    """The largest part of all rates that fits with the least headroom; 0 where next to nothing does not fit either."""

    def fits(scale: float) -> bool:
        less = [replace(task, rate=task.rate * scale) for task in tasks]
        return planner.plan(less, kinds, HEADROOMS[-1:], thorough=False).schedulable

    high = min(1.0, len(kinds) / max(1, planner.gpus_at_least(tasks, kinds) - 1))
    low = high * 0.5**SCALE_STEPS
    if not fits(low):
        return 0.0
    for _ in range(SCALE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
