"""Composition root: an app, a policy, engines, run values and the real-time driver, wired into one runtime.

`serve`, `run` and tests all begin here, and nowhere else are these objects put together.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lamina import policies
from lamina.asl.evaluation import DATA_LIMIT_BYTES
from lamina.cluster.agent import Agent, NodeShared
from lamina.cluster.agent_listener import ListenForAgents
from lamina.cluster.cluster_engine import ClusterEngine
from lamina.cluster.launchers import Launcher
from lamina.cluster.leader_session import AgentConfig
from lamina.cluster.node_pools import NodePool
from lamina.cluster.node_values import LeaderState
from lamina.cluster.packages import Pack, PackageStore, Unpack
from lamina.core.controller import HANG_FLOOR_US, Controller
from lamina.core.policy import DispatchRole
from lamina.drivers.engine import EngineShared, TargetSource
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.app_environments import AppEnvironments, EnvironmentOptions
from lamina.engines.composite import CompositeEngine
from lamina.engines.cpu import CallBuffers, CpuEngine, VolumeFolders
from lamina.engines.emulated import EmulatedEngine, EmulatedValues
from lamina.engines.gpu import GpuEngine
from lamina.engines.gpu_processes import GpuProcesses
from lamina.engines.in_process import InProcessEngine
from lamina.engines.isolation import TENANT_USERS, ProcessIsolation
from lamina.engines.process_engine import WorkerLimits
from lamina.engines.shadow_batches import ShadowRunner
from lamina.errors import BadValue, LaminaError
from lamina.gpu import discovery
from lamina.gpu.mps import MpsSlicer
from lamina.gpu.segments import SEGMENT_US, gives_way_with, is_long
from lamina.gpu.slicers import SliceMode, back_end, open_slicer, uses_soft_slices
from lamina.gpu.supervisor import StandbyMode
from lamina.ipc.child_process import WarmProcess
from lamina.kernels.buffer_store import BufferStore
from lamina.plugins import DEFAULT_POLICY
from lamina.policies import new_controller
from lamina.predict import device_presets, online, profile
from lamina.predict.interference import bandwidth_interference
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.idle_reprofile import IdleReprofiler
from lamina.sdk.app import App
from lamina.sdk.app_loader import load_app
from lamina.sdk.function import Function
from lamina.sdk.sample_inputs import samples_of
from lamina.server.process_status import default_memory_budget
from lamina.sim.hardware_model import HardwareModel
from lamina.state.kv_state import StateTable
from lamina.types import Call, DeviceSpec
from lamina.values.run_values import RunValues
from lamina.values.task_tokens import TaskTokens
from lamina.worker.cpu_affinity import cores_for_gpus, cpu_device

STATE_SHARE = 4
"""One part in so many of the memory budget is for state, which is all in memory."""

NOISE = 0.05
"""Of emulated devices: sigma of the logarithm of a batch's time over its profile, as scenarios have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Agents of other machines: where they join, how apps are packed for them, and whether this machine's devices serve too."""

    listen: ListenForAgents
    pack: Pack
    local_devices: bool = True
    pools: tuple[tuple[Launcher, NodePool], ...] = ()  #: of machines that can be had and given back


@dataclass(slots=True)
class ServingRuntime:
    app: App
    driver: RealtimeDriver
    state: StateTable = field(default_factory=lambda: StateTable(""))  #: of the state that functions keep
    reprofiler: IdleReprofiler | None = None  #: looks after profiles that no longer hold
    shadow_runner: ShadowRunner | None = None  #: for batches of measurements
    buffers: BufferStore = field(default_factory=BufferStore)  #: by key, of tenants

    async def start(self) -> None:
        await self.driver.start(self.app.deployed())
        if self.reprofiler is not None:
            self.reprofiler.begin()


def open_local(
    app_path: str,
    *,
    policy: DispatchRole | None = None,
    profiles: Path | None = None,
    probe: bool = False,
    shadow_batches: bool = False,
    gpu: str = "no",
    slices: SliceMode = "auto",
    gpu_cores: int = 0,
    gpu_standby: StandbyMode = "models",
    explain: bool = False,
    memory_bytes: int = 0,
    state_data_bytes: int = DATA_LIMIT_BYTES,
    environment: Mapping[str, str] | None = None,
    tenant_users: tuple[int, int] = TENANT_USERS,
    hang_floor_us: int = HANG_FLOOR_US,
    cluster: ClusterOptions | None = None,
    app: App | None = None,
    log_level: str = "INFO",
    buffers: Path | None = None,
    warm: WarmProcess | None = None,
) -> ServingRuntime:
    """Runtime on this machine: CPU cores in worker processes, and the GPUs that `gpu` names ("auto": those there are), in slices
    that have SMs of their own or share all of them (see `Slices`). `gpu_cores` of the cores are set apart for the slices of each
    GPU, and leased with them. `gpu_standby`: what stands by behind the executor of a GPU.

    With `probe`, what has no profile is timed on its sample inputs when it is loaded, and what has one that no longer holds is
    measured again while the server is idle. `shadow_batches`: measurements may run batches of their own (with `probe`, they do).
    With `explain`, the policy records what it weighed. `memory_bytes` is the memory budget of the server, of which shared memory
    may take half; 0: a part of the memory there is. `state_data_bytes` is the data limit of states of state machines.
    `environment` is added to that of the app's functions; `tenant_users` are the users that functions of tenants run as.
    No batch of a known length counts as hung before `hang_floor_us`. With `cluster`, agents of other machines may join. `app` is
    the app at that path, where it is loaded already; from `log_level` on it is shown what functions log.
    Buffers that kernel graphs name by key are kept in a folder below `buffers`; without it, until the server ends.
    `warm` becomes the executor of the first GPU; the caller closes one that has not become one when the runtime has started.
    """
    app = app or load_app(app_path)
    known = read_profiles(app_path, profiles)
    table = ProfileTable(known, interference=bandwidth_interference(known))
    gpus = [(name, place, replace(device, cores=gpu_cores)) for name, place, device in _find_gpus(app, gpu, slices)]
    cores = cpu_device(set_apart=gpu_cores * len(gpus))
    soft = frozenset(device.kind for _, _, device in gpus if device.limits.soft)
    predictor = online.OnlinePredictor(table, soft)
    policy = policy or policies.build(DEFAULT_POLICY)
    controller = new_controller(policy, predictor, explain=explain, hang_floor_us=hang_floor_us)
    functions = controller.state.functions
    users = tenant_users if os.geteuid() == 0 else (0, 0)
    shared = EngineShared(environment, lambda name: functions[name].spec if name in functions else None, log_level, users)
    budget_bytes = memory_bytes or default_memory_budget()
    call_of = call_lookup(controller)
    state = StateTable(app.name, call_of, shared.source, budget_bytes // STATE_SHARE)
    limits = _shm_limits(memory_bytes)
    isolation = ProcessIsolation(tenant_users)

    def tenant_of(call_id: str) -> str:
        call = call_of(call_id)
        return call.tenant if call is not None else ""

    held = CallBuffers(BufferStore(buffers / f"{app.name}.buffers" if buffers is not None else None), tenant_of)
    volumes = VolumeFolders(buffers.resolve() / "volumes" if buffers is not None else None, app.name)
    probes = table if probe else None
    engine = _open_engines(
        *(app, app_path, cores, gpus, state, shared, isolation, probes, limits, held, volumes, warm), gpu_standby=gpu_standby
    )
    if cluster is not None:
        engine = ClusterEngine(
            engine, cluster.listen, app_path, state, cluster.pack, local=cluster.local_devices, pools=cluster.pools
        )
    slots = engine.references
    shadow_runner = ShadowRunner(engine) if probe or shadow_batches else None
    data = RunValues(
        slots.pool,
        slots.reader,
        slots.release,
        state_data_bytes=state_data_bytes,
        limit_bytes=budget_bytes,
        tokens=TaskTokens(state.task_token_key),
    )
    driver = RealtimeDriver(controller, engine, data, interceptor=shadow_runner)
    reprofiler = None
    if probe and shadow_runner is not None:
        reprofiler = IdleReprofiler(driver, predictor, shadow_runner, lambda: samples_of(app, app_path))
    return ServingRuntime(app, driver, state, reprofiler, shadow_runner, held.store)


def open_agent(
    config: AgentConfig,
    unpack: Unpack,
    *,
    gpu: str = "auto",
    slices: SliceMode = "auto",
    gpu_cores: int = 0,
    gpu_standby: StandbyMode = "models",
    memory_bytes: int = 0,
    environments: EnvironmentOptions | None = None,
) -> Agent:
    """Agent with the devices of this machine: its cores, and the GPUs that `gpu` names, with `gpu_cores` of the cores for the
    slices of each. `environments` says how packages of apps are installed here."""
    state, shared = LeaderState(), NodeShared()
    soft = slices == "soft"
    found = [] if gpu == "no" else _name_gpus(gpu)
    gpus = [(name, place, replace(at, owned=True, limits=replace(at.limits, soft=soft))) for name, place, at in found]
    gpus = [(name, place, replace(device, cores=gpu_cores)) for name, place, device in gpus]
    cores = cpu_device(set_apart=gpu_cores * len(gpus))
    isolated = GpuProcesses((name, device) for name, _, device in gpus)
    cpu = CpuEngine("", [cores], _shm_limits(memory_bytes), state=state, shared=shared, gpu_processes=isolated)
    engines = [
        GpuEngine(
            *("", device, name, cpu.references), ordinal=place, shared=shared, host_cores=own, state=state, standby=gpu_standby
        )
        for (name, place, device), own in zip(gpus, cores_for_gpus(len(gpus), gpu_cores), strict=True)
    ]
    packages = PackageStore(config.folder / "packages", unpack)
    built = AppEnvironments(config.folder / "environments", environments)
    built.collect(_keys_of(packages, built))
    return Agent(config, CompositeEngine(cpu, engines), shared, state, packages, built)


def _keys_of(packages: PackageStore, built: AppEnvironments) -> set[str]:
    """Environments that packages of an agent ask for."""
    found = set()
    for sha256 in packages.stored():
        with contextlib.suppress(LaminaError, OSError):
            found.add(built.key_of(Path(packages.path(sha256, ""))))
    return found


def _shm_limits(memory_bytes: int) -> WorkerLimits:
    """Shared memory within the memory budget: what finds no room there goes to disk."""
    budget, most = memory_bytes or default_memory_budget(), WorkerLimits()
    return replace(most, pool_bytes=min(most.pool_bytes, budget // 2), worker_pool_bytes=min(most.worker_pool_bytes, budget // 4))


def call_lookup(controller: Controller) -> Callable[[str], Call | None]:
    """Finds the call of a run under way, by its id."""
    runs = controller.state.runs

    def call_of(call_id: str) -> Call | None:
        run = runs.get(call_id)
        return run.call if run is not None else None

    return call_of


FoundGpu = tuple[str, int, DeviceSpec]
"""Slicer, ordinal, device."""


def _find_gpus(app: App, gpu: str, slices: SliceMode) -> list[FoundGpu]:
    """GPUs that `gpu` names, if any function asks for one."""
    if gpu == "no" or not any(function.spec.gpu != "no" for function in app.functions.values()):
        return []
    soft = uses_soft_slices(slices, app.functions.values())
    found = _name_gpus(gpu)
    return [(name, place, replace(at, owned=True, limits=replace(at.limits, soft=soft))) for name, place, at in found]


def _name_gpus(gpu: str) -> list[FoundGpu]:
    """GPUs that `gpu` names; "auto": those there are."""
    if gpu == "auto":
        return discovery.find_gpus_in_subprocess()
    slicer = open_slicer(gpu)
    try:
        return [(gpu, 0, slicer.device)]
    finally:
        slicer.close()


def _open_engines(
    app: App,
    app_path: str,
    cores: DeviceSpec,
    gpus: list[FoundGpu],
    state: StateTable,
    shared: EngineShared,
    isolation: ProcessIsolation,
    probe: ProfileTable | None,
    limits: WorkerLimits,
    buffers: CallBuffers,
    volumes: VolumeFolders,
    warm: WarmProcess | None,
    *,
    gpu_standby: StandbyMode,
) -> CompositeEngine:
    """Engines of this machine's devices. With `probe`, functions without a profile there are timed when they are loaded."""
    isolated = _isolate(app, gpus)

    def unprofiled(device: DeviceSpec) -> list[str]:
        """What must not run twice is not run for a measurement either."""
        functions = [one for one in app.functions.values() if one.spec.idempotent] if probe is not None else []
        return [one.name for one in functions if probe is not None and not probe.latency_us(one.name, device.kind, 1, 1)]

    cpu = CpuEngine(
        app_path,
        [cores],
        limits,
        state=state,
        unprofiled=unprofiled(cores),
        gpu_processes=isolated,
        shared=shared,
        isolation=isolation,
        probes_deployed=probe is not None,
        buffers=buffers,
        volumes=volumes,
    )
    environment = dict(isolated.mps.daemon.environment) if isolated.mps is not None else {}
    gpu_engines = [
        GpuEngine(
            app_path,
            device,
            name,
            cpu.references,
            ordinal=place,
            environment=environment,
            unprofiled=unprofiled(device),
            shared=shared,
            host_cores=own,
            state=state,
            warm=warm if place == gpus[0][1] and not shared.declared and not environment else None,  # it has none of its own
            standby=gpu_standby,
        )
        for (name, place, device), own in zip(gpus, cores_for_gpus(len(gpus), gpus[0][2].cores if gpus else 0), strict=True)
    ]
    return CompositeEngine(cpu, gpu_engines)


def _isolate(app: App, found: list[FoundGpu]) -> GpuProcesses:
    """Process isolation: functions that ask for a process of their own on the GPU get one, under MPS where that is a real one."""
    alone = [function for function in app.functions.values() if function.spec.isolated]
    if not found:  # on cores every instance has a process of its own, and needs no fixed slice for that
        for function in alone:
            function.update_spec(home=function.home, lend=True)
    mps = MpsSlicer(found[0][2]) if alone and found and back_end(found[0][0]).supports_mps else None
    return GpuProcesses(((name, device) for name, _, device in found), mps)


def open_emulated(
    app: App,
    kinds: str,
    found: list[profile.Profile],
    *,
    policy: DispatchRole | None = None,
    seed: int = 0,
    explain: bool = False,
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
    world = HardwareModel(table, random.Random(seed), NOISE, segments_us=_emulated_segments(app, table, made))
    controller = new_controller(policy or policies.build(DEFAULT_POLICY), online.OnlinePredictor(table), explain=explain)
    signatures = {one.name: one.signature for one in app.functions.values()}
    signatures |= {one.name: one.signature for one in app.workflows.values()}
    data = EmulatedValues(world, signatures)
    return ServingRuntime(app, RealtimeDriver(controller, EmulatedEngine(made, world), data))


def open_in_process(
    app: App,
    *,
    policy: DispatchRole | None = None,
    mocks: Mapping[str, Callable[..., object]] | None = None,
    units: int = 0,
) -> ServingRuntime:
    """Runtime whose functions run in threads of this process, for notebooks and for tests (`InProcessEngine`). `units` is how
    many batches of one core run at once; 0: as many as there are cores. Functions for GPUs alone find one there too."""
    device = cpu_device()
    if units:
        device = replace(device, units=units)
    devices = [device]
    if any(function.spec.gpu == "must" for function in app.functions.values()):
        devices = [replace(device, id="gpu0", family="gpu")]
        if any(function.spec.gpu == "no" for function in app.functions.values()):
            devices.append(device)
    controller = new_controller(policy or policies.build(DEFAULT_POLICY), online.OnlinePredictor(ProfileTable([])))
    state = StateTable(app.name, call_lookup(controller), lambda target: TargetSource())
    driver = RealtimeDriver(
        controller,
        InProcessEngine(app, devices, mocks, state.mark_stateful),
        RunValues(None, None, tokens=TaskTokens(state.task_token_key)),
    )
    return ServingRuntime(app, driver, state)


def read_profiles(app_path: str, folder: Path | None) -> list[profile.Profile]:
    """Profiles from `folder`, or by default from a folder `profiles` beside the app."""
    if folder is None:
        beside = Path(app_path.rpartition(":")[0] if ".py:" in app_path else app_path).parent / "profiles"
        return profile.read_all(beside) if beside.is_dir() else []
    if not folder.is_dir():
        raise BadValue(f"profiles: no folder {str(folder)!r}", hint="lamina profile writes one; none is needed")
    return profile.read_all(folder)


def _emulated_segments(app: App, table: ProfileTable, devices: list[DeviceSpec]) -> dict[str, int]:
    """Functions whose batches give way, as they would on a GPU, and after how long: models whose graphs are long."""

    def gives_way(function: Function[..., Any], device: DeviceSpec) -> bool:
        spec = function.spec
        took_us = table.latency_us(function.name, device.kind, spec.max_batch, spec.units_on(device))
        return device.family == "gpu" and is_long(took_us) and gives_way_with(spec.slo.latency_us, took_us)

    models = [function for function in app.functions.values() if function.runs_in_graphs and not function.spec.isolated]
    return {one.name: SEGMENT_US for one in models if any(gives_way(one, device) for device in devices)}
