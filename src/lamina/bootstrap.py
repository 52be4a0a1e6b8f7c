"""Composition root: an app, a policy, engines, run values and the real-time driver, wired into one runtime.

`serve`, `run` and tests all begin here, and nowhere else are these objects put together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from lamina import policies
from lamina.core.controller import Controller
from lamina.core.policy import DispatchRole
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.composite import CompositeEngine
from lamina.engines.cpu import CpuEngine
from lamina.engines.emulated import EmulatedEngine, EmulatedValues
from lamina.engines.gpu import GpuEngine
from lamina.engines.shadow_batches import ShadowRunner
from lamina.errors import BadValue
from lamina.gpu import discovery
from lamina.gpu.opened import open_slicer
from lamina.gpu.slice_mode import SliceMode, uses_soft_slices
from lamina.gpu.slicers.mps import MpsSlicer
from lamina.plugins import DEFAULT_POLICY
from lamina.predict import device_presets, online, profile
from lamina.predict.interference import bandwidth_interference
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.idle_reprofile import IdleReprofiler
from lamina.sdk.app import App
from lamina.sdk.app_loader import load_app
from lamina.sdk.sample_inputs import samples_of
from lamina.sim.hardware_model import HardwareModel
from lamina.state.kv_state import StateTable
from lamina.types import DeviceSpec
from lamina.values.run_values import RunValues

ON_GPU = {"LAMINA_TORCH_DEVICE": "cuda"}
"""Where a `TorchModel` runs that is alone in its process."""

NOISE = 0.05
"""Of emulated devices: sigma of the logarithm of a batch's time over its profile, as scenarios have it."""


@dataclass(slots=True)
class ServingRuntime:
    app: App
    loop: RealtimeDriver
    state: StateTable = field(default_factory=lambda: StateTable(""))  #: of the state that functions keep
    reprofiler: IdleReprofiler | None = None  #: looks after profiles that no longer hold

    async def start(self) -> None:
        await self.loop.start(self.app.deployed())
        if self.reprofiler is not None:
            self.reprofiler.begin()


def open_local(
    app_path: str,
    *,
    policy: DispatchRole | None = None,
    profiles: Path | None = None,
    probe: bool = False,
    gpu: str = "no",
    slices: SliceMode = "auto",
) -> ServingRuntime:
    """Runtime on this machine: CPU cores in worker processes, and the GPUs that `gpu` names ("auto": those there are), in slices
    that have SMs of their own or share all of them (see `Slices`).

    With `probe`, what has no profile is timed on its sample inputs when it is loaded, and what has one that no longer holds is
    measured again while the server is idle.
    """
    app = load_app(app_path)
    engine = _open_engines(app, app_path, gpu, slices)
    known = read_profiles(app_path, profiles)
    table = ProfileTable(known, interference=bandwidth_interference(known))
    if probe:  # what must not run twice is not run for a measurement either
        functions = [function for function in app.functions.values() if function.spec.idempotent]
        for part in engine.parts:
            kind = part.devices[0].kind
            part.unknown = {one.name for one in functions if not table.latency_us(one.name, kind, 1, 1)}
    predictor = online.OnlinePredictor(table, frozenset(device.kind for device in engine.devices if device.limits.soft))
    controller = Controller(policy or policies.build(DEFAULT_POLICY), predictor)
    data = RunValues(engine.pool, engine.reader, engine.release)
    loop = RealtimeDriver(controller, engine, data)
    engine.deadline_us = loop.deadline_us
    engine.cpu.book = book = StateTable(app.name)
    book.target_of = lambda call_id: run.call.target if (run := controller.state.runs.get(call_id)) is not None else ""
    remeasure = None
    if probe:
        loop.shadow_runner = ShadowRunner(engine)
        remeasure = IdleReprofiler(loop, lambda: samples_of(app, app_path))
    return ServingRuntime(app, loop, book, remeasure)


def _open_engines(app: App, app_path: str, gpu: str, slices: SliceMode) -> CompositeEngine:
    local = CpuEngine(app_path)
    if not any(function.spec.gpu != "no" for function in app.functions.values()):
        gpu = "no"  # no function asks for one
    if gpu == "auto":
        found = discovery.find_gpus_in_subprocess()
    elif gpu == "no":
        found = []
    else:
        slicer = open_slicer(gpu)
        found = [(gpu, 0, slicer.device)]
        slicer.close()
    soft = uses_soft_slices(slices, app.functions.values())
    found = [(name, place, replace(at, owned=True, limits=replace(at.limits, soft=soft))) for name, place, at in found]
    mps, environment = _isolate(app, local, found)
    gpus = [
        GpuEngine(app_path, device, name, local.ledger, ordinal=place, environment=environment) for name, place, device in found
    ]
    return CompositeEngine(local, gpus, mps)


def _isolate(app: App, local: CpuEngine, found: list[tuple[str, int, DeviceSpec]]) -> tuple[MpsSlicer | None, dict[str, str]]:
    """Process isolation: functions that asked for a process of their own on the GPU get one, under MPS where there is a real one.

    The executor must then be a client of the same daemon: processes that are not take turns on the device instead of sharing it.
    """
    alone = [function for function in app.functions.values() if function.isolated]
    if not found:  # on cores every instance has a process of its own, and needs no fixed slice for that
        for function in alone:
            function.spec = replace(function.spec, home=function.home, lend=True)
    if not alone or not found:
        return None, {}
    name, _, device = found[0]
    mps = MpsSlicer(device) if name in ("green", "mig") else None
    for function in alone:
        mask = (1 << function.spec.units_on(device)) - 1
        local.isolated[function.name] = {**mps.environment(mask, function.spec.memory_mib), **ON_GPU} if mps is not None else {}
    if mps is None:
        return None, {}
    local.end_client = mps.daemon.terminate
    return mps, dict(mps.daemon.environment)


def open_emulated(
    app: App,
    kinds: str,
    found: list[profile.Profile],
    *,
    policy: DispatchRole | None = None,
    seed: int = 0,
) -> ServingRuntime:
    """Runtime on emulated devices, which take as long as the profiles say."""
    made = [replace(device, owned=True) for device in device_presets.parse_devices(kinds)]
    table = ProfileTable(found, margin=2 * NOISE, interference=bandwidth_interference(found))
    for name, function in app.functions.items():
        fitting = [device for device in made if function.spec.fits_family(device.family)]
        if not fitting:
            raise BadValue(f"{name!r} fits none of {kinds}", hint="give it gpu=GPU(...), or emulate a cpu as well")
        if not any(table.latency_us(name, device.kind, 1, 1) for device in fitting):
            raise BadValue(
                f"no profile of {name!r} on {', '.join(sorted({device.kind for device in fitting}))}",
                hint="`lamina profile` makes one, in `profiles` beside the app; or name a folder that has it with --profiles",
            )
    world = HardwareModel(table, random.Random(seed), NOISE)
    controller = Controller(policy or policies.build(DEFAULT_POLICY), online.OnlinePredictor(table))
    return ServingRuntime(app, RealtimeDriver(controller, EmulatedEngine(made, world), EmulatedValues(world)))


def read_profiles(app_path: str, folder: Path | None) -> list[profile.Profile]:
    """Profiles from `folder`, or by default from a folder `profiles` beside the app."""
    if folder is None:
        beside = Path(app_path.rpartition(":")[0] if ".py:" in app_path else app_path).parent / "profiles"
        return profile.read_all(beside) if beside.is_dir() else []
    if not folder.is_dir():
        raise BadValue(f"profiles: no folder {str(folder)!r}", hint="lamina profile writes one; none is needed")
    return profile.read_all(folder)
