"""Scalability: what does a decision cost as functions and devices become many, and how does that grow?"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from time import process_time
from typing import Any, cast

from msgspec.structs import replace

from lamina.core.actions import Reply
from lamina.core.controller import Controller
from lamina.core.policy import Decision, LoadInstance, View
from lamina.drivers.driver import Ending
from lamina.drivers.virtual import simulate
from lamina.lab.decision_times import MeasurementDone, TimedController
from lamina.lab.experiment import Cell, Plot, Reported, ResultTable, Row, Section, installed_policies
from lamina.lab.experiments._function_family import KINDS, FunctionKind, function, goal_us, profile
from lamina.lab.provenance import machine_info
from lamina.policies import build, new_controller
from lamina.predict import device_presets
from lamina.predict.profile_table import ProfileTable as Predictions
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.sim.run import random_stream, setup_events
from lamina.sim.scenario import Scenario
from lamina.types import Call, call_for

TITLE = "Cost of a decision as functions and devices grow"
ABOUT = """
Processor time of the controller on one core of the machine named above, the simulator's own work left out: per event handled, per
time the policy is asked to dispatch, and of all events per call. Calls are Poisson with Zipf popularity (exponent 1), at 40 % of
what the devices could serve call by call, to functions of the kind of an image classifier, a text embedder or a detector
(lab/experiments/_function_family.py) with 10 MiB of weights, so that all of them fit.

More functions: 10 to 10,000 on eight H200. More devices: 1 to 1,000 H200, calls in proportion, a hundred functions. In both,
every function is loaded before timing starts, and every device has at least ten instances. Cold functions: 10 to 10,000 on eight
devices, nothing loaded, each called once, so that nearly every call asks the policy to load something.

A cell measures until it has served its calls or used its time, whichever is first; how many it served is in the row. The
exponent is the slope of a straight line through the logarithms, by least squares: 0 is a cost that does not grow, 1 one that
grows in proportion.
"""
REPORTED: list[Reported] = []
ALONE = True  #: cells that measure time would measure each other

POLICIES = ("fifo", "edf", "frontier")
SIZES = {
    "functions": (10, 100, 1_000, 10_000),
    "devices": (1, 10, 100, 1_000),
    "cold functions": (10, 100, 1_000, 10_000),
}
QUICK_SIZES = {"functions": (10, 100), "devices": (1, 10), "cold functions": (10, 40)}
BESIDE = {"functions": 8, "devices": 100, "cold functions": 8}  #: how many of the other there are
BUSY = 0.4
CALLS, QUICK_CALLS = 20_000, 400
LIMIT_S, QUICK_LIMIT_S = 3.0, 0.3
WEIGHTS_MIB = 10
COLD_PER_S = 200.0
READY_US = 5_000_000  #: all loads are over by then


# ------------------------------------------------------------------------------------- cells to rows


def cells(seed: int, quick: bool) -> list[Cell]:
    sizes = QUICK_SIZES if quick else SIZES
    work = {"calls": QUICK_CALLS, "limit_s": QUICK_LIMIT_S} if quick else {"calls": CALLS, "limit_s": LIMIT_S}
    return [
        {"sweep": sweep, "size": size, "policy": policy, "seed": seed, **work}
        for sweep, steps in sizes.items()
        for policy in installed_policies(POLICIES)
        for size in steps
    ]


def run(cell: Cell) -> Row:
    other, cold = BESIDE[cell["sweep"]], cell["sweep"] == "cold functions"
    functions, gpus = (other, cell["size"]) if cell["sweep"] == "devices" else (cell["size"], other)
    scenario = make(functions, gpus, cell["seed"])
    table = Predictions(list(scenario.profiles), margin=scenario.margin)
    controller = new_controller(build(cell["policy"]), table)
    if not cold:
        controller._scale = PreloadedScaling(controller._scale, _places(scenario))
    timed = TimedController(controller)
    executor = SimulatedExecutor(
        controller, HardwareModel(table, random_stream(cell["seed"], "world"), scenario.noise), seed=cell["seed"]
    )
    ends = EndingCounts()
    calls = _cold_calls(scenario, cell, timed) if cold else _warm_calls(scenario, cell, timed)
    begin_s = process_time()
    with suppress(MeasurementDone):
        simulate(cast(Controller, timed), executor, calls, setup=setup_events(scenario), on_end=ends)
    took_s = process_time() - begin_s
    return cell | {
        "cpu": machine_info().cpu,
        "functions": functions,
        "devices": gpus,
        "served": timed.calls,
        "event_us": timed.event.mean_us,
        "event_p99_us": timed.event.quantile_us(0.99),
        "dispatch_us": timed.dispatch.mean_us,
        "admit_us": timed.admit.mean_us,
        "scale_us": timed.scale.mean_us,
        "call_us": round(timed.event.total_us / max(1, timed.calls), 3),
        "run_s": round(took_s, 3),
        "in_time": round(ends.good / ends.all, 6) if ends.all else None,
        "cold_starts": sum(executor.accounting.cold_starts.values()),
    }


def make(functions: int, gpus: int, seed: int) -> Scenario:
    specs, profiles = [], []
    for rank in range(functions):
        kind = _kind(rank)
        name = f"{kind.name}-{rank + 1}"
        spec = function(name, kind, slo_us=2 * goal_us(kind), idle_us=3_600_000_000)
        specs.append(replace(spec, memory_mib=WEIGHTS_MIB))
        profiles.append(profile(name, kind, few=True))
    made = device_presets.parse_devices(f"h200x{gpus}")
    return Scenario(name="scale", devices=tuple(made), functions=tuple(specs), profiles=tuple(profiles), loads=(), seed=seed)


def _kind(rank: int) -> FunctionKind:
    return KINDS[rank % 3]


def _places(scenario: Scenario) -> list[tuple[str, str]]:
    """(function, device): every function somewhere, and ten instances or more on every device."""
    names, places = [spec.name for spec in scenario.functions], scenario.devices
    each = max(min(10, len(names)), -(-len(names) // len(places)))
    pairs = [(names[(at * each + step) % len(names)], device.id) for at, device in enumerate(places) for step in range(each)]
    return list(dict.fromkeys(pairs))


class EndingCounts:
    """How calls ended. A whole report per function would take longer than the run."""

    def __init__(self) -> None:
        self.all = self.good = 0

    def __call__(self, now_us: int, ending: Ending) -> None:
        self.all += 1
        self.good += isinstance(ending, Reply) and not ending.late


class PreloadedScaling:
    """Loads what it is told when it is first asked, and then steps back behind the policy's own role."""

    def __init__(self, inner: Any, places: list[tuple[str, str]]) -> None:
        self._inner, self._places = inner, places
        self.period_us: int = inner.period_us

    def scale(self, view: View) -> Iterator[Decision]:
        if self._places and view.functions:
            for name, device in self._places:
                yield LoadInstance(name, device)
            self._places = []
        else:
            yield from self._inner.scale(view)


def _rate_per_s(scenario: Scenario) -> float:
    """Calls a second that would keep `BUSY` of all units busy, one call to a batch."""
    weights = [1 / (rank + 1) for rank in range(len(scenario.functions))]
    each_s = [_kind(rank).units * _kind(rank).latency_us(1, _kind(rank).units) / 1e6 for rank in range(len(weights))]
    mean_s = sum(weight * cost_s for weight, cost_s in zip(weights, each_s, strict=True)) / sum(weights)
    return BUSY * sum(device.units for device in scenario.devices) / mean_s


def _warm_calls(scenario: Scenario, cell: Cell, timed: TimedController) -> Iterator[Call]:
    """The first tenth fills the devices; the rest is timed, for as long as it may take."""
    specs, rate_per_s = scenario.functions, _rate_per_s(scenario)
    dice = random.Random(f"scale/{cell['seed']}")
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(specs))))
    at_us, begun_s = float(READY_US), 0.0
    for number in range(cell["calls"]):
        if number == 1:  # calls are drawn one ahead: by now all is loaded
            begun_s = process_time()
        at_us += dice.expovariate(rate_per_s) * 1e6
        spec = specs[min(bisect(weights, dice.random() * weights[-1]), len(specs) - 1)]
        late = number > 1 and process_time() - begun_s > cell["limit_s"]
        if number == cell["calls"] // 10 or (late and not timed.calls):
            timed.begin()
            begun_s = process_time()
        elif late:
            break
        yield call_for(f"c{number}", spec.name, int(at_us), spec.slo)
    timed.end()


def _cold_calls(scenario: Scenario, cell: Cell, timed: TimedController) -> Iterator[Call]:
    dice = random.Random(f"cold/{cell['seed']}")
    at_us, begun_s = 0.0, 0.0
    for number, spec in enumerate(scenario.functions):
        if number == 1:
            timed.begin()
            begun_s = process_time()
        at_us += dice.expovariate(COLD_PER_S) * 1e6
        if number > 1 and process_time() - begun_s > cell["limit_s"]:
            break
        yield call_for(f"c{number}", spec.name, int(at_us), replace(spec.slo, latency_us=READY_US))
    timed.end()


# -------------------------------------------------------------------------------- figures and sections


TIMES = {
    "event_us": "event us",
    "event_p99_us": "p99 us",
    "dispatch_us": "dispatch us",
    "admit_us": "admit us",
    "scale_us": "scale us",
    "call_us": "call us",
}
MEASURES = {"event_us": "per event", "dispatch_us": "per dispatch", "call_us": "whole run, per call"}


def figures(rows: list[Row]) -> dict[str, Any]:
    return {
        "machines": sorted({row["cpu"] for row in rows}),
        "exponents": _fits(rows, 0),
        "exponents_last_step": _fits(rows, -2),
        "cells": [{name: row[name] for name in ("sweep", "size", "policy", *MEASURES, "event_p99_us")} for row in rows],
    }


def _fits(rows: list[Row], first: int) -> dict[str, Any]:
    """Exponents over the sizes from `first` on; -2 is the last step alone, where growth that comes late shows."""
    fits: dict[str, Any] = {}
    for sweep in _sweeps(rows):
        for policy in _policies(rows):
            mine = _of(rows, sweep, policy)[first:]
            found = {measure: exponent([(row["size"], row[measure]) for row in mine]) for measure in MEASURES}
            fits.setdefault(sweep, {})[policy] = found
    return fits


def exponent(points: list[tuple[float, float]]) -> float | None:
    """Slope of log y over log x by least squares; nothing for fewer than two points."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    middle_x = sum(x for x, _ in logs) / len(logs)
    middle_y = sum(y for _, y in logs) / len(logs)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in logs) / sum((x - middle_x) ** 2 for x, _ in logs)
    return round(slope, 3)


def sections(rows: list[Row]) -> list[Section]:
    whole, last = _fits(rows, 0), _fits(rows, -2)
    fits = [
        [sweep, policy, *(fit[measure] for measure in MEASURES), *(last[sweep][policy][measure] for measure in MEASURES)]
        for sweep, by_policy in whole.items()
        for policy, fit in by_policy.items()
    ]
    columns = ["growing", "policy", *MEASURES.values(), *(f"{name}, last step" for name in MEASURES.values())]
    text = "Over the whole sweep, and over its last step alone: growth that comes late is hidden in the first."
    made = [Section("Fitted exponents", text, ResultTable(columns, fits), headline=True)]
    for sweep in _sweeps(rows):
        table = [
            [row["size"], row["policy"], *(row[name] for name in TIMES), _percent(row["in_time"]), row["served"]]
            for row in sorted(rows, key=lambda row: (row["size"], row["policy"]))
            if row["sweep"] == sweep
        ]
        made.append(
            Section(
                f"More {sweep}",
                "Microseconds are means.",
                ResultTable([sweep, "policy", *TIMES.values(), "in time %", "calls"], table),
                _lines(rows, sweep, "event_us"),
            )
        )
        made.append(Section(f"More {sweep}: one dispatch", plot=_lines(rows, sweep, "dispatch_us")))
        made.append(Section(f"More {sweep}: the whole run", plot=_lines(rows, sweep, "call_us")))
    return made


def _lines(rows: list[Row], sweep: str, measure: str) -> Plot:
    label = {"event_us": "us per event", "dispatch_us": "us per dispatch", "call_us": "us per call"}[measure]
    series: dict[str, list[tuple[float | str, float]]] = {}
    for policy in _policies(rows):
        points = [(row["size"], row[measure]) for row in _of(rows, sweep, policy)]
        slope = exponent(points)
        series[policy if slope is None else f"{policy}: n^{slope:.2f}"] = list(points)
    return Plot("line", sweep, label, series, log_x=True, log_y=True)


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def _of(rows: list[Row], sweep: str, policy: str) -> list[Row]:
    return sorted((row for row in rows if (row["sweep"], row["policy"]) == (sweep, policy)), key=lambda row: int(row["size"]))


def _policies(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _sweeps(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["sweep"] for row in rows))
