"""Small worlds for policies with reserved slices: a GPU of 20 units, functions whose time follows their units."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lamina.core.actions import Load, Resize, Unload
from lamina.core.controller import Controller
from lamina.predict.profile import Point, Profile
from lamina.sim.run import run
from lamina.sim.scenario import Scenario
from lamina.sim.summary import Summary
from lamina.sim.workload import Workload as Calls
from lamina.sim.workload import steps
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo
from tests.script import Script

MS, S = 1_000, 1_000_000
UNITS = 20
GPU = DeviceSpec(id="gpu0", kind="gpu", units=UNITS, memory_mib=16_000, limits=SliceLimits(batches_per_instance=0))


def gpus(count: int, units: int = UNITS) -> list[DeviceSpec]:
    return [replace(GPU, id=f"gpu{number}", units=units) for number in range(count)]


def goal(ms: float) -> Slo:
    """Who is late is still served."""
    return Slo(latency_us=round(ms * MS), on_miss="serve", timeout_us=5 * S)


def a_model(name: str = "f", memory_mib: int = 500, **more: Any) -> FunctionSpec:
    more.setdefault("slo", goal(200))
    more.setdefault("scale", ScaleSpec(min=1, max=16))
    return FunctionSpec(name=name, max_batch=8, gpu="must", memory_mib=memory_mib, **more)


def takes(batch: int, units: int) -> int:
    """10 ms a job on one unit, on up to ten of them in proportion; and 5 ms for the launch."""
    return 5 * MS + 10 * MS * batch // min(units, 10)


def profile(name: str, load_us: int = S) -> Profile:
    points = [Point(batch=b, units=u, p50_us=takes(b, u)) for b in (1, 2, 4, 8) for u in range(1, UNITS + 1)]
    return Profile(function=name, device="gpu", points=points, load_us=load_us)


def simulated(
    *functions: FunctionSpec,
    policy: str,
    rates: dict[str, list[tuple[int, float]]],
    devices: list[DeviceSpec] | None = None,
    options: dict[str, Any] | None = None,
    cv: float = 1.0,
    **more: Any,
) -> Summary:
    """`rates`: per function, stages of (seconds, calls a second), from the fifth second on. All invariants are checked."""
    scenario = Scenario(
        name="small",
        devices=tuple(devices or gpus(2)),
        functions=functions,
        profiles=tuple(profile(spec.name) for spec in functions),
        loads=tuple(
            Calls(target=name, segments=steps((s * S, rate) for s, rate in stages), cv=cv, start_us=5 * S)
            for name, stages in rates.items()
        ),
        policy=policy,
        options=options or {},
        seed=5,
        noise=0.02,
        **more,
    )
    return run(scenario, check=True)


def called(script: Script, per_s: float, seconds: float, target: str = "f") -> None:
    """Calls at an even rate from now on."""
    start_us, count = script.now_us, len(script.endings) + len(script.controller.state.runs)
    for number in range(round(per_s * seconds)):
        script.at(start_us + round(number * S / per_s))
        script.arrives(f"{target}{count + number}", target=target, within_us=200 * MS, expires_us=5 * S)
    script.at(start_us + round(seconds * S))


def shapes(controller: Controller, function: str = "f") -> list[tuple[int, int]]:
    """(units, percent of the time) of its pods."""
    pods = controller.state.functions[function].instances.values()
    return sorted((pod.units, round(100 * pod.quota)) for pod in pods)


def loads(script: Script) -> list[Load]:
    return [action for _, action in script.said if isinstance(action, Load)]


def resizes(script: Script) -> list[Resize]:
    return [action for _, action in script.said if isinstance(action, Resize)]


def unloads(script: Script) -> list[Unload]:
    return [action for _, action in script.said if isinstance(action, Unload)]
