"""GPU engine: one GPU, the executor process that owns it, and every function that is loaded there.

The functions share the process, so they share its fate: when it ends, for whatever reason, all of them are lost at once, and
the controller loads them again and retries what may be retried. Killing one function means killing the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from lamina.core.actions import JobRef, Load, StartBatch
from lamina.core.events import BatchPaused, Event, InstanceLost, InstanceSegmented
from lamina.drivers.engine import EngineShared, JobValues
from lamina.engines.inflight import InFlightBatch
from lamina.engines.process_engine import InstanceHandle, LogPipe, ProcessEngine, WorkerLimits
from lamina.gpu.early_start import EXECUTOR
from lamina.gpu.protocol import (
    BatchHung,
    ExecutorReady,
    ExecutorReport,
    ExecutorSetup,
    ExecutorUsage,
    FromExecutor,
    FunctionLoaded,
    FunctionLoadFailed,
    FunctionSegmented,
    FunctionUnloaded,
    LoadFunction,
    ModulesImported,
    MoveSlice,
    RunOnSlice,
    RunPaused,
    StandbyPrepared,
    UnloadFunction,
    ValueFetched,
    from_executor_reader,
)
from lamina.gpu.slicers import back_end
from lamina.gpu.supervisor import ExecutorProcess, ExecutorSupervisor, StandbyMode
from lamina.ipc.child_process import ProcessSpec, WarmProcess, exit_reason
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError
from lamina.state.kv_state import StateAccess
from lamina.types import DeviceSpec
from lamina.units import show_count
from lamina.values.references import DeviceRef, ErrorInfo, ShmRef
from lamina.values.slot_refs import SlotReferences
from lamina.worker.cpu_affinity import allowed_cores
from lamina.worker.protocol import BatchDone, BatchHeartbeat, JobFrame, StateRead

log = logging.getLogger("lamina")

STANDBY_MIB = 4096
"""A standby that has the device open takes up to so much of it, and does where that is a tenth at most."""

HANG_FLOOR_US, HANG_TIMES = 1_000_000, 5
"""When does a batch hang? A second is hundreds of times what one takes; or so many times what was predicted. The executor counts
only time in which it could look; an executor that is kept from looking is killed by the controller, after five seconds."""


@dataclass(slots=True, eq=False)
class GpuInstance(InstanceHandle):
    is_model: bool = False  #: which a standby can have ready too
    requested_mask: int = 0  #: its standing slice, as the executor was told when it was to load it


class HostCores:
    """Cores of the host that go with the slices of one GPU. The controller has counted them; here they get names."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._taken: dict[int, list[int]] = {}  #: by batch

    def take(self, action: StartBatch, open_batches: Container[int]) -> list[int]:
        """Cores of a batch: those of the one it is behind, else some that no open batch has."""
        if not action.cores or not self._cores:
            return []
        self._taken = {batch: cores for batch, cores in self._taken.items() if batch in open_batches}
        inherited = self._taken.get(action.behind, [])
        used = {core for cores in self._taken.values() for core in cores}
        order = [*inherited, *(core for core in self._cores if core not in used), *self._cores]
        found = self._taken[action.batch_id] = list(dict.fromkeys(order))[: action.cores]
        return found


class GpuEngine(ProcessEngine[GpuInstance, InFlightBatch]):
    def __init__(
        self,
        app: str,
        device: DeviceSpec,
        slicer: str,
        references: SlotReferences,
        *,
        ordinal: int = 0,
        environment: Mapping[str, str] | None = None,
        unprofiled: Iterable[str] = (),
        shared: EngineShared | None = None,
        host_cores: Sequence[int] = (),
        state: StateAccess | None = None,
        warm: WarmProcess | None = None,
        standby: StandbyMode = "models",
    ) -> None:
        """`warm` becomes its first executor; `standby` is what stands by behind it, where the device has room."""
        super().__init__(app, references, WorkerLimits(), shared or EngineShared(), unprofiled, state)
        self._warm, self._standby = warm, standby
        self.device = device
        self.usage: ExecutorUsage | None = None  #: what the executor said last
        self.loads: dict[str, dict[str, float]] = {}  #: by function: where the time of its last load went, in milliseconds
        self._slicer, self._ordinal = slicer, ordinal
        self._host_cores = HostCores(host_cores)
        declared = self.shared.declared  # no function of a stranger is in this process
        self._spec = ProcessSpec(EXECUTOR, from_executor_reader, {**declared, **(environment or {})}, cores=allowed_cores())
        self._uses_mps = bool(environment)
        self._output: LogPipe | None = None  #: one pipe for all executors there will be
        self._supervisor: ExecutorSupervisor | None = None  #: from `start` on

    @property
    def devices(self) -> list[DeviceSpec]:
        return [self.device]

    @property
    def pid(self) -> int:
        """Process id of the executor; 0 while there is none."""
        executor = self.executor
        return executor.process.pid if executor is not None and executor.process is not None else 0

    @property
    def restarts(self) -> int:
        """Restarts of the executor; the first start is none."""
        return self._supervisor.restarts if self._supervisor is not None else -1

    @property
    def executor(self) -> ExecutorProcess | None:
        """The executor process that owns the device at this moment."""
        return self._supervisor.current if self._supervisor is not None else None

    @property
    def report(self) -> ExecutorReport:
        return ExecutorReport(self.pid, self.restarts, self.replaced_s, self.standing_by, self.loads, self.usage)

    @property
    def standing_by(self) -> list[str] | None:
        """Functions that are ready in the hot standby; None without one."""
        return self._supervisor.standing_by if self._supervisor is not None else None

    @property
    def replaced_s(self) -> float:
        """From the last loss of the executor until the device was open again."""
        return self._supervisor.replaced_s if self._supervisor is not None else 0.0

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        await super().start(post, values, deadline_us)
        self._output = self._log_pipe(self.device.id)
        if self._output is not None:
            self._spec = replace(self._spec, output=self._output.fd)
        has_room = not back_end(self._slicer).has_device or self.device.memory_mib >= 10 * STANDBY_MIB
        opens_ahead = has_room and not self._uses_mps
        standby: StandbyMode = "imports" if self._standby == "models" and not opens_ahead else self._standby
        self._supervisor = ExecutorSupervisor(
            *(self._setup, self._spec, self.references, self._on_frame, self._on_executor_lost),
            standby=standby,
            is_loading=lambda: any(not instance.is_ready for instance in self._instances.values()),
            warm=self._warm,
        )
        self._supervisor.take_over()  # opening a device takes seconds: it need not wait for the first load

    # -------------------------------------------------------------- the process

    def _setup(self, executor: ExecutorProcess) -> ExecutorSetup:
        return ExecutorSetup(
            app=self._app,
            device=self.device.id,
            slicer=self._slicer,
            folder=self.references.directory.path,
            owner=executor.slots.owner,
            values_owner=executor.values.owner,
            pool_bytes=self._limits.worker_pool_bytes,
            ordinal=self._ordinal,
            soft=self.device.limits.soft,
            tags_output=self._output is not None,
            log_level=self.shared.log_level,
        )

    def _on_executor_lost(self, executor: ExecutorProcess) -> None:
        """Handle the end of the executor: all its functions are lost, whatever ended it."""
        assert self._supervisor is not None
        self.usage = None
        for batch in list(self._batches.open.values()):
            self._batches.close(batch)
        self._supervisor.close(executor)
        instances, self._instances = self._instances, {}
        for instance in instances.values():
            instance.cancel_load_timeout()
        if self._is_stopping:
            return
        ended = exit_reason(executor.process)
        log.warning("the executor of %s is lost, with %s: it %s", self.device.id, show_count(len(instances), "function"), ended)
        for fetched in [then for waiting in executor.fetching.values() for then in waiting]:
            fetched()
        if executor.is_up:
            self._supervisor.take_over()
        for name, instance in instances.items():
            if instance.load_error is not None:
                self.load_errors[instance.load.function] = instance.load_error
            elif not instance.is_ready:
                error = ErrorInfo("ExecutorLost", f"the executor {ended} while it was loading")
                self.load_errors.setdefault(instance.load.function, error)
            self._post(InstanceLost(name, instance.loss_reason))

    def _send(self, *frames: msgspec.Struct) -> None:
        if self.executor is not None:
            self.executor.send(*frames)

    def _kill_executor(self) -> None:
        if self.executor is not None and self.executor.process is not None:
            self.executor.process.kill()

    async def _stop_processes(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop(self._limits.unload_s, is_idle=not self._batches.open)
        if self._output is not None:
            self._output.close_child_end()

    # ---------------------------------------------------------------- instances

    def _load(self, action: Load) -> None:
        if self._supervisor is not None and self._supervisor.current is None:
            self._supervisor.take_over()
        instance = self._instances[action.instance] = GpuInstance(action)
        instance.arm_load_timeout(self._loop, self._limits.load_s, self._kill_executor)
        if self.executor is not None and self.executor.is_up:
            self._send_load(instance)

    def _send_load(self, instance: GpuInstance) -> None:
        load, source = instance.load, self.shared.source(instance.load.function)
        instance.requested_mask = load.mask
        self._send(
            LoadFunction(
                load.instance,
                source.name or load.function,
                load.mask,
                clock_us(),
                probe=load.function in self._unprofiled,
                app=source.path,
                is_reload=self.restarts > 0,
            )
        )

    def _unload(self, instance: GpuInstance) -> None:
        instance.cancel_load_timeout()
        del self._instances[instance.load.instance]
        self._send(UnloadFunction(instance.load.instance))
        self._update_standby()

    def _update_standby(self) -> None:
        """Tell the standby what is loaded: it has the same ready."""
        assert self._supervisor is not None
        models = [instance.load for instance in self._instances.values() if instance.is_model]
        sources = [self.shared.source(load.function) for load in models]
        named = zip(models, sources, strict=True)
        self._supervisor.prepare_standby([(source.name or load.function, load.mask, source.path) for load, source in named])

    def _resize(self, instance: GpuInstance, mask: int) -> None:
        """Move an instance's standing slice. Every batch brings its slice; graphs for the new one are made before it is used."""
        if instance.load.mask != mask:
            instance.resize(mask)
            if instance.is_ready:
                self._send(MoveSlice(instance.load.instance, mask))
                self._update_standby()

    def _kill(self, instance: GpuInstance, reason: str) -> None:
        log.warning("%s is %s: the executor of %s is ended", instance.load.instance, reason, self.device.id)
        instance.set_kill_reason(reason)
        self._kill_executor()

    # ------------------------------------------------------------------ batches

    def _start(self, action: StartBatch) -> None:
        if self.executor is not None:  # else it is lost; the controller is about to hear of it
            super()._start(action)

    def _device_owner(self) -> str:
        return self.executor.values.owner if self.executor is not None else ""

    def _send_batch(self, instance: GpuInstance, action: StartBatch, jobs: list[JobFrame], reads: list[ShmRef]) -> None:
        keep = [self._can_stay_on_device(job) for job in action.jobs]
        limit_us = max(HANG_FLOOR_US, HANG_TIMES * action.predicted_us) if action.predicted_us else 0
        cores = self._host_cores.take(action, self._batches.open)
        segments = action.gives_way, list(action.overlaps)
        run = RunOnSlice(action.batch_id, action.instance, action.mask, action.behind, jobs, keep, limit_us, cores, *segments)
        self._send(run)
        self._batches.add(InFlightBatch(action, reads))

    def _can_stay_on_device(self, job: JobRef) -> bool:
        """Is the result read as a whole, and only by functions that are loaded here?"""
        consumers = self._values.consumers(job)
        return bool(consumers) and consumers <= {instance.load.function for instance in self._instances.values()}

    # ------------------------------------------------------------------- values

    def missing(self, action: StartBatch) -> list[DeviceRef]:
        """Values of this device that a batch elsewhere needs, and that have not been fetched yet."""
        if self.executor is None or not self.executor.values.held:
            return []
        return self.executor.missing(stored for job in action.jobs for _, stored in self._values.inputs(job).leaves)

    def fetch(self, refs: list[DeviceRef], then: Callable[[], None]) -> None:
        """Call `then` when all of them are here, or lost with the device."""
        if self.executor is None:
            then()
        else:
            self.executor.fetch(refs, then)

    # ------------------------------------------------------------------- frames

    def _on_frame(self, executor: ExecutorProcess, frame: FromExecutor) -> None:
        match frame:
            case BatchDone():
                self._on_batch_done(executor, frame)
            case FunctionLoaded():
                self._on_function_loaded(frame)
            case FunctionLoadFailed():
                self._on_load_failed(frame)
            case FunctionSegmented():
                if frame.instance in self._instances:
                    self._post(InstanceSegmented(frame.instance, frame.segment_us))
            case RunPaused():
                if frame.batch_id in self._batches.open:
                    self._post(BatchPaused(frame.batch_id, frame.remaining_segments, frame.left_us))
            case ExecutorReady():
                assert self._supervisor is not None
                self._supervisor.on_ready(executor)
                for instance in self._instances.values():
                    self._send_load(instance)
            case ValueFetched():
                if isinstance(frame.value, ShmRef) and not self.references.accept_results(executor.slots, [frame.value]):
                    raise FrameError(f"{self.device.id} gives away a slot that is not its own")
                executor.fetched(frame)
            case ModulesImported():
                assert self._supervisor is not None
                self._supervisor.on_modules_imported(frame.names)
            case ExecutorUsage():
                self.usage = frame
            case BatchHung():
                self._on_batch_hung(frame)
            case BatchHeartbeat():
                self._on_heartbeat(self._batches.open.get(frame.batch_id))
            case StateRead():
                batch = self._batches.open.get(frame.batch_id)
                self._answer_state_read(batch.action.function if batch is not None else "", batch, frame, executor.send)
            case FunctionUnloaded() | StandbyPrepared():
                pass

    def _on_batch_hung(self, frame: BatchHung) -> None:
        batch = self._batches.open.get(frame.batch_id)
        instance = self._instances.get(batch.action.instance) if batch is not None else None
        if instance is not None:
            log.warning("batch %d of %s hangs", frame.batch_id, instance.load.function)
            instance.set_kill_reason("hung")
            self._kill_executor()

    def _on_function_loaded(self, frame: FunctionLoaded) -> None:
        instance = self._instances.get(frame.instance)
        if instance is None:  # unloaded while it was loading
            return
        instance.is_model = frame.is_model
        parts = {what: round(took_us / 1000, 1) for what, took_us in frame.parts}
        self.loads[instance.load.function] = {**parts, "all": round(frame.load_us / 1000, 1)}
        if frame.is_model:
            self._update_standby()
            if instance.load.mask != instance.requested_mask:
                self._send(MoveSlice(frame.instance, instance.load.mask))
        learnt_us = 0 if frame.was_standby else frame.load_us  # how long a load takes is not learnt from one that was prepared
        self._on_loaded(instance, learnt_us, frame.probes)

    def _on_load_failed(self, frame: FunctionLoadFailed) -> None:
        instance = self._instances.pop(frame.instance, None)
        if instance is not None:
            instance.cancel_load_timeout()
            self.load_errors[instance.load.function] = frame.error
            self._post(InstanceLost(frame.instance, "load-failed"))

    def _on_batch_done(self, executor: ExecutorProcess, done: BatchDone) -> None:
        batch = self._batches.open.get(done.batch_id)
        if batch is None or len(done.results) != len(batch.action.jobs):
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if done.state:
            self._commit_state(batch, done, executor.slots, partial(self._deliver, executor, batch, done))
        else:
            self._deliver(executor, batch, done)

    def _deliver(
        self, executor: ExecutorProcess, batch: InFlightBatch, done: BatchDone, errors: Mapping[int, ErrorInfo] | None = None
    ) -> None:
        self._on_results(batch, done, executor.slots, self.references.release, executor.values, errors)
