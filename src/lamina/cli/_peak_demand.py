"""Peak demand of a scenario by function: the highest call rate, and the latency SLO.

Rates of workloads that may coincide are added up, each at its peak: a plan that holds then holds always. A recorded trace counts
with its busiest minute.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import islice

from msgspec.structs import replace

from lamina.core.workflow.flow import Flow, function_flow
from lamina.planner.function_goals import function_goals_us, function_rates
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload
from lamina.types import Slo

_MINUTE_US = 60_000_000
_P99 = 2.33
_MAX_ARRIVALS = 2_000_000
"""Arrivals of a trace that are looked at."""


def peak_per_s(load: Workload) -> float:
    if not load.trace:
        peak = max((max(piece.from_per_s, piece.to_per_s) for piece in load.segments), default=0.0)
        return peak + max(0.0, load.cv - 1) * _P99 * math.sqrt(peak)  # planners add headroom for a Poisson load only
    once = replace(load, loop=False, start_us=0)
    minutes: Counter[int] = Counter()
    last_us = 1
    for at_us in islice(once.arrivals(random.Random(0)), _MAX_ARRIVALS):
        minutes[at_us // _MINUTE_US] += 1
        last_us = max(last_us, at_us)
    return max(minutes.values(), default=0) * 1e6 / min(last_us, _MINUTE_US)


def peak_demand(scenario: Scenario, alone_us: Callable[[str], float]) -> tuple[dict[str, float], dict[str, int]]:
    """Rate a second and latency goal by function. `alone_us`: how long one job takes at best."""
    per_s: dict[str, float] = {}
    slos: dict[str, Slo] = {}
    for load in scenario.loads:
        per_s[load.target] = per_s.get(load.target, 0.0) + peak_per_s(load)
        slo = load.slo or scenario.slo_of(load.target)
        known = slos.setdefault(load.target, slo)
        if slo.latency_us and (not known.latency_us or slo.latency_us < known.latency_us):
            slos[load.target] = slo
    flows: dict[str, Flow] = {flow.name: flow for flow in scenario.flows}
    for spec in scenario.functions:
        flows[spec.name] = function_flow(spec.name, spec.slo)
    called = {target: replace(flows[target], slo=slos[target]) for target in per_s}
    return function_rates(called, per_s), function_goals_us(called.values(), alone_us)
