"""Simulated world of experiment `has`: published V100 profiles, published workloads, and what had to be assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from lamina.lab import data
from lamina.predict.profile import Point, Profile
from lamina.predict.profile import read as read_profile
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload, read_hasgpu
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo

UNITS = 20
"""Of 5 % of the SMs each: the grid the profiles were measured on."""

V100 = DeviceSpec(id="v100", kind="v100", units=UNITS, memory_mib=16_384, limits=SliceLimits(batches_per_instance=0))
"""Price 1 a second, so that cost is GPU-seconds."""

SHARE = 0.3  #: for policies that do not choose: what HAS-GPU starts every function with
LOAD_US = 3_000_000  #: assumed: not published
MEMORY_MIB = 1_525  #: of a ResNet pod as FaST-GShare reports it; the others were not published
WARM_UP_US = 5_000_000  #: pods that are always there have been loaded by the first call
TIMEOUT_US = 10_000_000
NOISE = 0.04

MIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "four models": (
        ("resnet50", "stress"),
        ("mobilenet_v3_large", "standard"),
        ("convnext_base", "standard"),
        ("bert_qa", "stress_json"),
    ),
    "eight models": (
        ("resnet50", "stress"),
        ("resnet101", "standard"),
        ("mobilenet_v3_large", "stress_json"),
        ("mobilenet_v2", "standard"),
        ("convnext_base", "standard"),
        ("shufflenet_v2_x0_5", "stress"),
        ("vgg16", "stress_json"),
        ("bert_qa", "standard"),
    ),
}
"""(model, workload) on shared devices."""


def profile_of(model: str) -> Profile:
    """The published table in units of 5 %. BERT was published on 30 and 50 % only: below that it is taken to slow down in
    proportion, which is the worst it could do."""
    profile = read_profile(data.repository() / "profiles" / "v100" / f"{model}.json")
    points = [replace(point, units=point.units * UNITS // 100) for point in profile.points]
    least = min(point.units for point in points)
    for point in [point for point in points if point.units == least and least > 1]:
        points += [Point(batch=point.batch, units=u, p50_us=point.p50_us * least / u) for u in range(1, least)]
    return replace(profile, function=model, points=points, load_us=LOAD_US)


def base_us(profile: Profile) -> float:
    """What a latency goal is a multiple of: the smallest batch measured, on the most SMs measured, time quota 100 %."""
    return max((point.units, -point.batch, point.p50_us) for point in profile.points)[2]


def scenario_of(cell: dict[str, Any]) -> Scenario:
    parts: Sequence[tuple[str, str]] = MIXES.get(cell["model"], ((cell["model"], cell["workload"]),))
    functions, profiles, loads = [], [], []
    for model, workload in parts:
        profile = profile_of(model)
        functions.append(_function(profile, cell["slo"]))
        profiles.append(profile)
        loads.append(_load(model, workload, cell))
    return Scenario(
        name="has",
        devices=tuple(replace(V100, id=f"v100-{number}") for number in range(cell["gpus"])),
        functions=tuple(functions),
        profiles=tuple(profiles),
        loads=tuple(loads),
        policy=cell["policy"].partition("(")[0],
        options={"compat": True} if "(" in cell["policy"] else {},
        seed=cell["seed"],
        duration_us=WARM_UP_US + round(cell["seconds"] * 1e6),
        noise=NOISE,
    )


def _function(profile: Profile, slo: float) -> FunctionSpec:
    goal = Slo(latency_us=round(slo * base_us(profile)), on_miss="serve", timeout_us=TIMEOUT_US)
    return FunctionSpec(
        name=profile.function,
        max_batch=max(point.batch for point in profile.points),
        gpu="must",
        share=SHARE,
        memory_mib=MEMORY_MIB,
        scale=ScaleSpec(min=1, max=16),
        slo=goal,
    )


def _load(model: str, workload: str, cell: dict[str, Any]) -> Workload:
    times = cell["times"]
    pieces = tuple(
        replace(piece, from_per_s=piece.from_per_s * times, to_per_s=piece.to_per_s * times)
        for piece in read_hasgpu(data.path(f"has-gpu/{workload}.json"))
    )
    return Workload(target=model, segments=pieces, cv=1.0 if cell["arrivals"] == "poisson" else 0.0, start_us=WARM_UP_US)
