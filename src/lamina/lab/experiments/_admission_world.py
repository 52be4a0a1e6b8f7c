"""Simulated world of the `admission` experiment: two workflows on CPU cores and GPU slices, limits on latency and cost.

Made up, for the thesis says nothing of its cluster: an ensemble (prepare, three models side by side, combine) and a cascade
(a small model, and a large one for the third of the calls it is not sure of). A model on two cores takes five times as long as
on a quarter of a GPU and costs two thirds of it; a batch of eight on the GPU is cheaper than either. A GPU costs as much as
sixty cores, which is what the thesis gives as the least ratio.
"""

from __future__ import annotations

import math
import random
from typing import Any

from lamina.core.workflow.flow import Choice, Flow, Task
from lamina.predict.profile import Point, Profile
from lamina.sim.run import random_stream
from lamina.sim.scenario import Scenario
from lamina.sim.workload import poisson
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo, call_for

WARM_US = 1_000_000
"""Calls begin when everything that stands from the start has been loaded."""

MANY = SliceLimits(batches_per_instance=0)
CPU = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=16, memory_mib=64_000, price_per_s=0.8, limits=MANY)
GPU = DeviceSpec(id="gpu0", kind="gpu", family="gpu", units=4, memory_mib=16_000, price_per_s=3.0, limits=MANY)
SIZES = (1, 2, 4, 8, 16)

TIMES: dict[str, tuple[int, dict[str, tuple[float, float]]]] = {
    "prepare": (1, {"cpu": (1.5, 1.0)}),
    "model1": (2, {"cpu": (10.0, 20.0), "gpu": (4.8, 1.2)}),
    "model2": (2, {"cpu": (10.0, 20.0), "gpu": (4.8, 1.2)}),
    "model3": (2, {"cpu": (10.0, 20.0), "gpu": (4.8, 1.2)}),
    "combine": (1, {"cpu": (1.0, 0.5)}),
    "small": (2, {"cpu": (5.0, 10.0), "gpu": (2.4, 0.6)}),
    "large": (4, {"cpu": (20.0, 40.0), "gpu": (9.6, 2.4)}),
}
"""Cores wanted, and per kind of device (milliseconds of a batch, milliseconds more per job) on that many cores or a quarter
of the GPU."""

ENSEMBLE = Flow(
    "ensemble",
    {
        "prepare": Task("prepare", "prepare", ("model1", "model2", "model3")),
        **{name: Task(name, name, ("combine",)) for name in ("model1", "model2", "model3")},
        "combine": Task("combine", "combine", tokens_needed=3),
    },
    ("prepare",),
)
CASCADE = Flow(
    "cascade",
    {
        "small": Task("small", "small", ("sure",)),
        "sure": Choice("sure", (("large",), ()), odds=(0.35, 0.65)),
        "large": Task("large", "large"),
    },
    ("small",),
)
FLOWS = {flow.name: flow for flow in (ENSEMBLE, CASCADE)}


def world(flow: str, policy: str, options: dict[str, Any], *, noise: float = 0.0, seed: int = 1) -> Scenario:
    names = FLOWS[flow].functions
    functions = tuple(
        FunctionSpec(
            name=name,
            max_batch=16,
            cores=TIMES[name][0],
            share=0.25,
            gpu="may" if "gpu" in TIMES[name][1] else "no",
            memory_mib=1_000,
            scale=ScaleSpec(min=1, max=8),
        )
        for name in names
    )
    return Scenario(
        name=flow,
        devices=(CPU, GPU),
        functions=functions,
        flows=(FLOWS[flow],),
        profiles=tuple(profile for name in names for profile in _profiles(name)),
        loads=(),
        policy=policy,
        options=options,
        seed=seed,
        noise=noise,
    )


def _profiles(name: str) -> list[Profile]:
    """More units than it wants make a batch faster, but less so than they cost: twice the units, 1.6 times the speed."""
    cores, times = TIMES[name]
    made = []
    for kind, (fixed_ms, job_ms) in times.items():
        usual = cores if kind == "cpu" else 1
        units = [count for count in (1, 2, 4, 8, 16) if count <= (CPU if kind == "cpu" else GPU).units]
        points = [
            Point(batch=size, units=count, p50_us=1_000 * (fixed_ms + job_ms * size) * 1.6 ** -math.log2(count / usual))
            for size in SIZES
            for count in units
        ]
        made.append(Profile(function=name, device=kind, points=points, load_us=200_000))
    return made


def calls(flow: str, rate_per_s: float, span_us: int, slo: Slo, cost_limit: float, seed: int) -> list[Call]:
    dice: random.Random = random_stream(seed, f"admission/{flow}")
    made: list[Call] = []
    for at_us in poisson(rate_per_s, dice):
        if at_us >= span_us:
            break
        made.append(call_for(f"c{len(made) + 1}", flow, WARM_US + at_us, slo, cost_limit=cost_limit))
    return made


def one_executor(each_ms: float) -> Scenario:
    """One device that does one thing at a time, for as long as it says."""
    profile = Profile(function="dag", device="gpu", points=[Point(batch=1, units=1, p50_us=each_ms * 1_000)])
    return Scenario(
        name="burst",
        devices=(DeviceSpec(id="gpu0", kind="gpu", units=1, memory_mib=16_000),),
        functions=(FunctionSpec(name="dag", gpu="must", scale=ScaleSpec(min=1), max_queue=100_000),),
        profiles=(profile,),
        loads=(),
        noise=0.0,
    )


def burst(requests: int) -> list[Call]:
    slo = Slo(latency_us=20_000, on_miss="serve", timeout_us=600_000_000)
    return [call_for(f"c{number}", "dag", WARM_US, slo) for number in range(1, requests + 1)]
