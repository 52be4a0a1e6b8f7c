"""Simulated world of the ESG comparison: six functions, four applications, sixteen nodes. All of it is ours to choose.

The shape follows what is public about the published evaluation. Every number here is a default of ours, some of them
recalled and none of them checked against the paper: nothing below may be quoted as its authors' figure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from lamina.core.workflow.flow import Choice, Flow, Node, Task
from lamina.lab.data import recorded_arrivals
from lamina.planner.configs import ConfigArrays, ResourcePrices, config_grid
from lamina.predict.profile import Point, Profile
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload, steps
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo

NODES, NODE_CORES, NODE_UNITS = 16, 16, 7
BATCHES, CORES, UNITS = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 4, 7)
PRICES = ResourcePrices(core_per_s=0.034 / 3600, unit_per_s=0.67 / 3600)
NOISE = 0.05
"""Sigma of the logarithm of a batch's time over the profiled one: its 99th percentile is 12 % above the median."""

LINK_MIB_PER_S, LINK_LATENCY_US = 119.0, 2_000
"""A gigabit a second, for data that is not on the node already."""

WARM_LOAD_US, WARM_UP_US = 200_000, 2_000_000
"""Where all is warm, models lie in the memory of every node and come up in no time; calls start when they are up. Where not,
the first calls find nothing loaded, and a load takes as long as the table below says."""


@dataclass(frozen=True, slots=True)
class EsgFunction:
    """t(b, c, g) = base (host b / c^by_cores + (1 - host) (fixed + (1 - fixed) b) / g^by_units), so t(1, 1, 1) = base.

    A part on the host that cores shorten, a part on the accelerator that units shorten, and of that a part that a batch
    pays once.
    """

    base_ms: float
    load_ms: int
    input_kib: int
    host: float
    fixed: float
    by_cores: float
    by_units: float

    def time_us(self, batch: int, cores: int, units: int) -> float:
        on_host = self.host * batch / cores**self.by_cores
        on_device = (1 - self.host) * (self.fixed + (1 - self.fixed) * batch) / units**self.by_units
        return float(self.base_ms * 1_000 * (on_host + on_device))


MODELS = {
    "super-resolution": EsgFunction(86, 3_503, 2_700, 0.25, 0.45, 0.85, 0.70),
    "segmentation": EsgFunction(293, 16_510, 2_500, 0.15, 0.35, 0.80, 0.85),
    "deblur": EsgFunction(319, 22_343, 1_100, 0.12, 0.30, 0.75, 0.90),
    "classification": EsgFunction(147, 18_299, 147, 0.30, 0.50, 0.90, 0.65),
    "background-removal": EsgFunction(1_047, 3_729, 2_500, 0.15, 0.25, 0.80, 0.90),
    "depth": EsgFunction(828, 16_479, 648, 0.18, 0.30, 0.85, 0.85),
}
APPLICATIONS = {
    "image-classification": ("super-resolution", "segmentation", "classification"),
    "depth-recognition": ("deblur", "super-resolution", "depth"),
    "background-elimination": ("super-resolution", "deblur", "background-removal"),
    "expanded-classification": ("deblur", "super-resolution", "background-removal", "segmentation", "classification"),
}
BRANCHING = "branching"
"""Our own, beside the four chains: two models side by side, and a last step for a third of the calls."""

SETTINGS = {
    "strict-light": (0.8, (40.0, 67.2)),
    "moderate-normal": (1.0, (20.0, 33.6)),
    "relaxed-heavy": (1.2, (10.0, 16.8)),
    "relaxed-peak": (1.2, (8.0, 13.44)),
}
"""Deadline as a factor of the time at the smallest configuration, and the range of gaps between calls in ms. The last one is
ours: a quarter more than heavy, which the nodes can only just serve, and only in batches."""

SIZED = {"edf": (2, 2 / 7), "fastgshare": (2, 0.0)}
"""Cores and part of the units for policies that take them as they are given; FaST-GShare chooses units, and knows no cores. The
others choose among all there are."""

OPTIONS: dict[str, dict[str, Any]] = {
    "esg": {"batches": BATCHES, "cores": CORES, "units": UNITS},
    "infless": {"batches": BATCHES, "cores": CORES, "units": UNITS},
    "orion": {"batches": BATCHES, "cores": CORES, "units": UNITS, "spread": NOISE},
    "aquatope": {"batches": BATCHES, "cores": CORES, "units": UNITS, "spread": NOISE},
    "fastgshare": {"period_us": 1_000_000},
}
"""The same 256 configurations for all policies that choose. Those that adapt by periods do so every second: a run is short."""


def functions_of(application: str) -> tuple[str, ...]:
    if application == BRANCHING:
        return ("super-resolution", "segmentation", "depth", "classification", "deblur")
    return APPLICATIONS[application]


def smallest_us(application: str) -> int:
    """L: one call by itself, with one core and one unit for every step; the longest way, where there are several."""
    if application == BRANCHING:
        way = ("super-resolution", "depth", "classification", "deblur")
        return round(sum(MODELS[name].time_us(1, 1, 1) for name in way))
    return round(sum(MODELS[name].time_us(1, 1, 1) for name in APPLICATIONS[application]))


def table(function: str) -> ConfigArrays:
    """Its 256 configurations, as medians."""
    return config_grid(MODELS[function].time_us, BATCHES, CORES, UNITS, PRICES)


def flow(application: str, factor: float) -> Flow:
    goal = Slo(latency_us=round(factor * smallest_us(application)))
    if application == BRANCHING:
        branching: dict[str, Node] = {
            "super-resolution": Task("super-resolution", "super-resolution", ("segmentation", "depth")),
            "segmentation": Task("segmentation", "segmentation", ("classification",)),
            "depth": Task("depth", "depth", ("classification",)),
            "classification": Task("classification", "classification", ("blurred",), tokens_needed=2),
            "blurred": Choice("blurred", (("deblur",), ()), odds=(0.35, 0.65)),
            "deblur": Task("deblur", "deblur"),
        }
        return Flow(application, branching, ("super-resolution",), goal)
    names = APPLICATIONS[application]
    nodes: dict[str, Node] = {name: Task(name, name, names[place + 1 : place + 2]) for place, name in enumerate(names)}
    return Flow(application, nodes, names[:1], goal)


def profile(function: str, warm: bool) -> Profile:
    model = MODELS[function]
    points = [
        Point(batch=batch, units=units, cores=cores, p50_us=model.time_us(batch, cores, units))
        for cores in CORES
        for units in UNITS
        for batch in BATCHES
    ]
    load_us = WARM_LOAD_US if warm else model.load_ms * 1_000
    return Profile(function=function, device="node", points=points, load_us=load_us)


def scenario(
    setting: str, application: str, policy: str, *, seed: int, seconds: float, warm: bool = True, recorded: bool = False
) -> Scenario:
    """One application, or all of them ("mixed") with the calls shared equally. `recorded`: arrivals as a service recorded them,
    at the same mean rate."""
    factor, gaps_ms = SETTINGS[setting]
    apps = list(APPLICATIONS) if application == "mixed" else [application]
    names = list(dict.fromkeys(name for app in apps for name in functions_of(app)))
    low, high = gaps_ms
    mean_ms = (low + high) / 2
    cv = (high - low) / 12**0.5 / mean_ms  # of gaps spread evenly over the range
    start_us = WARM_UP_US if warm else 0
    cores, share = SIZED.get(policy, (max(CORES), 0.0))
    functions = tuple(
        FunctionSpec(
            name=name,
            max_batch=max(BATCHES),
            gpu="must",
            cores=cores,
            share=share,
            memory_mib=2_000,
            input_kib=MODELS[name].input_kib,
            scale=ScaleSpec(min=NODES if warm else 0, max=NODES, idle_us=600_000_000),
        )
        for name in names
    )
    rate_per_s = 1_000 / mean_ms / len(apps)
    devices = tuple(
        DeviceSpec(
            id=f"node-{place:02}",
            kind="node",
            units=NODE_UNITS,
            memory_mib=40_000,
            cores=NODE_CORES,
            core_price_per_s=PRICES.core_per_s,
            price_per_s=PRICES.unit_per_s * NODE_UNITS,
            link_mib_per_s=LINK_MIB_PER_S,
            link_latency_us=LINK_LATENCY_US,
            limits=SliceLimits(sizes=UNITS, batches_per_instance=0),
        )
        for place in range(NODES)
    )
    return Scenario(
        name=f"{application} {setting}",
        devices=devices,
        functions=functions,
        profiles=tuple(profile(name, warm) for name in names),
        flows=tuple(flow(app, factor) for app in apps),
        loads=tuple(
            Workload(
                target=app,
                at_us=recorded_arrivals(rate_per_s, round(seconds * 1e6), random.Random(f"esg/{seed}/{app}")),
                start_us=start_us,
            )
            if recorded
            else Workload(
                target=app,
                segments=steps([(round(seconds * 1e6), rate_per_s)]),
                cv=1.0 if len(apps) > 1 else cv,
                start_us=start_us,
            )
            for app in apps
        ),
        policy=policy,
        options=OPTIONS.get(policy, {}),
        seed=seed,
        noise=NOISE,
    )
