"""GPU engine: one GPU, the executor process that owns it, and every function that is loaded there.

The functions share the process, so they share its fate: when it ends, for whatever reason, all of them are lost at once, and
the controller loads them again and retries what may be retried. Killing one function means killing the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from lamina.core.actions import Action, DropJob, JobRef, Kill, Load, Resize, StartBatch, Unload
from lamina.core.events import BatchFailed, BatchFinished, Event, Heartbeat, InstanceLost, InstanceReady
from lamina.drivers.timer import clock_us
from lamina.engines.cpu import OnFunctionOutput, WorkerLimits
from lamina.engines.inflight import InFlightBatch, InFlightBatches
from lamina.engines.job_delivery import OriginOf, deliver_results, job_frames
from lamina.engines.log_pipe import LogPipe
from lamina.gpu.protocol import (
    BatchHung,
    ExecutorReady,
    ExecutorSetup,
    ExecutorUsage,
    FromExecutor,
    FunctionLoaded,
    FunctionLoadFailed,
    FunctionUnloaded,
    LoadFunction,
    ModulesImported,
    MoveSlice,
    RunOnSlice,
    StandbyPrepared,
    UnloadFunction,
    ValueFetched,
    from_executor_reader,
)
from lamina.gpu.supervisor import ExecutorProcess, ExecutorSupervisor
from lamina.ipc.child_process import ProcessSpec, exit_reason
from lamina.ipc.protocol import BatchDone, BatchHeartbeat, DeviceRef, ErrorInfo, FrameError, ShmRef
from lamina.sdk.spans import InnerSpan
from lamina.types import DeviceSpec
from lamina.values.slot_refs import SlotReferences
from lamina.worker.cpu_affinity import allowed_cores

log = logging.getLogger("lamina")

STANDBY_MIB = 4096
"""A spare that has the device open takes up to so much of it, and does where that is a tenth at most."""

TWINS = ("null", "cpu")
"""Slicers without a device."""

HANG_FLOOR_US, HANG_TIMES = 1_000_000, 5
"""When does a batch hang? A second is hundreds of times what one takes; or so many times what was predicted. The executor counts
only time in which it could look; whoever stops it from looking is ended by the controller, after five seconds."""


@dataclass(slots=True, eq=False)
class _Instance:
    load: Load
    is_ready: bool = False
    is_model: bool = False  #: which a spare can have ready too
    loss_reason: str = ""
    load_timeout: asyncio.TimerHandle | None = None
    asked_mask: int = 0  #: its standing slice, as the executor was told when it was to load it

    def cancel_load_timeout(self) -> None:
        """Cancel the load timeout: the load has ended, well or not."""
        if self.load_timeout is not None:
            self.load_timeout.cancel()


class GpuEngine:
    def __init__(
        self,
        app: str,
        device: DeviceSpec,
        slicer: str,
        ledger: SlotReferences,
        *,
        ordinal: int = 0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.device = device
        self.load_errors: dict[str, ErrorInfo] = {}
        self.deadline_us: Callable[[str], int] = lambda call_id: 0
        self.origin: OriginOf | None = None  #: for functions that ask whose request they serve
        self.on_spans: Callable[[int, list[InnerSpan]], None] | None = None  #: (batch, parts of it): who exports them
        self.on_line: OnFunctionOutput | None = None  #: who reads what functions print
        self.echo_lines = True  #: it goes to stderr all the same
        self._log_pipe: LogPipe | None = None
        self.unknown: set[str] = set()
        self.usage: ExecutorUsage | None = None  #: what the executor said last
        self.loads: dict[str, dict[str, float]] = {}  #: by function: where the time of its last load went, in milliseconds
        self.apps: dict[str, str] = {}  #: by function: where it is loaded from now, if not from `app`
        self._app, self._slicer, self._ordinal = app, slicer, ordinal
        self._ledger = ledger
        self._limits = WorkerLimits()
        self._kind = ProcessSpec("lamina.gpu.executor_main", from_executor_reader, environment or {}, cores=allowed_cores())
        self._supervisor: ExecutorSupervisor | None = None  #: from `start` on
        self._instances: dict[str, _Instance] = {}
        self._batches = InFlightBatches[InFlightBatch](ledger)
        self._is_stopping = False

    @property
    def devices(self) -> list[DeviceSpec]:
        return [self.device]

    @property
    def pid(self) -> int:
        """Process id of the executor; 0 while there is none."""
        life = self.executor
        return life.process.pid if life is not None and life.process is not None else 0

    @property
    def restarts(self) -> int:
        """Restarts of the executor; the first start is none."""
        return self._supervisor.restarts if self._supervisor is not None else -1

    @property
    def executor(self) -> ExecutorProcess | None:
        """The executor process that owns the device at this moment."""
        return self._supervisor.current if self._supervisor is not None else None

    @property
    def standing_by(self) -> list[str] | None:
        """Functions that are ready in the hot standby; None without one."""
        return self._supervisor.standing_by if self._supervisor is not None else None

    @property
    def replaced_s(self) -> float:
        """From the last loss of the executor until the device was open again."""
        return self._supervisor.replaced_s if self._supervisor is not None else 0.0

    async def start(self, post: Callable[[Event], None], data: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._data = data
        self._open_log_pipe()
        room = self._slicer in TWINS or self.device.memory_mib >= 10 * STANDBY_MIB
        opens_ahead = room and not self._kind.environment  # of MPS
        self._supervisor = ExecutorSupervisor(
            self._setup, self._kind, self._ledger, self._on_frame, self._on_executor_lost, opens_ahead=opens_ahead
        )
        self._supervisor.take_over()  # opening a device takes seconds: it need not wait for the first load

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case DropJob():
                self._batches.drop_job(action.job_id)
            case Load():
                self._load(action)
            case Unload():
                self._unload(action.instance)
            case Kill():
                self._kill(action)
            case Resize():
                self._resize(action)
            case _:
                pass

    # -------------------------------------------------------------- the process

    def _open_log_pipe(self) -> None:
        """Open one log pipe for all executors there will be; tags of the lines say which function it was."""
        on_line, device = self.on_line, self.device.id
        if on_line is not None:
            self._log_pipe = LogPipe(
                self._loop, lambda name, calls, line: on_line(name, device, calls, line), echo=self.echo_lines
            )
            self._kind = replace(self._kind, output=self._log_pipe.fd)

    def _setup(self, life: ExecutorProcess) -> ExecutorSetup:
        return ExecutorSetup(
            app=self._app,
            device=self.device.id,
            slicer=self._slicer,
            folder=self._ledger.directory.path,
            owner=life.slots.owner,
            values_owner=life.values.owner,
            pool_bytes=self._limits.worker_pool_bytes,
            ordinal=self._ordinal,
            soft=self.device.limits.soft,
            tags_output=self._log_pipe is not None,
        )

    def _on_executor_lost(self, life: ExecutorProcess) -> None:
        """Handle the end of the executor: all its functions are lost, whatever ended it."""
        assert self._supervisor is not None
        self.usage = None
        for batch in list(self._batches.open.values()):
            self._batches.close(batch)
        self._supervisor.close(life)
        instances, self._instances = self._instances, {}
        for instance in instances.values():
            instance.cancel_load_timeout()
        if self._is_stopping:
            return
        ended = exit_reason(life.process)
        log.warning("the executor of %s is lost, with %d functions: it %s", self.device.id, len(instances), ended)
        for fetched in [then for waiting in life.fetching.values() for then in waiting]:
            fetched()
        if life.is_up:
            self._supervisor.take_over()
        for name, instance in instances.items():
            reason = instance.loss_reason or ("worker-lost" if instance.is_ready else "load-failed")
            if not instance.is_ready:
                said = ErrorInfo("ExecutorLost", f"the executor {ended} while it was loading")
                self.load_errors.setdefault(instance.load.function, said)
            self._post(InstanceLost(name, reason))

    def _send(self, *frames: Any) -> None:
        if self.executor is not None:
            self.executor.send(*frames)

    # ---------------------------------------------------------------- instances

    def _load(self, action: Load) -> None:
        if self._is_stopping:
            return
        if self._supervisor is not None and self._supervisor.current is None:
            self._supervisor.take_over()
        instance = self._instances[action.instance] = _Instance(action)
        instance.load_timeout = self._loop.call_later(self._limits.load_s, self._on_load_timeout, instance)
        if self.executor is not None and self.executor.is_up:
            self._send_load(instance)

    def _send_load(self, instance: _Instance) -> None:
        load = instance.load
        instance.asked_mask = load.mask
        app = self.apps.get(load.function, "")
        self._send(
            LoadFunction(
                load.instance, load.function, load.mask, clock_us(), load.function in self.unknown, app, self.restarts > 0
            )
        )

    def _on_load_timeout(self, instance: _Instance) -> None:
        said = ErrorInfo("LoadTimeout", f"not loaded within {self._limits.load_s:g} s")
        self.load_errors[instance.load.function] = said
        self._end("load-failed", instance)

    def _unload(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is None:
            return
        instance.cancel_load_timeout()
        del self._instances[name]
        self._send(UnloadFunction(name))
        self._update_standby()

    def _update_standby(self) -> None:
        """Tell the standby what is loaded: it has the same ready."""
        assert self._supervisor is not None
        models = [instance.load for instance in self._instances.values() if instance.is_model]
        self._supervisor.prepare_standby([(load.function, load.mask, self.apps.get(load.function, "")) for load in models])

    def _resize(self, action: Resize) -> None:
        """Move an instance's standing slice. Every batch brings its slice; graphs for the new one are made before it is used."""
        instance = self._instances.get(action.instance)
        if instance is not None and instance.load.mask != action.mask:
            instance.load = msgspec.structs.replace(instance.load, mask=action.mask)
            if instance.is_ready:
                self._send(MoveSlice(action.instance, action.mask))
                self._update_standby()

    def _kill(self, action: Kill) -> None:
        instance = self._instances.get(action.instance)
        if instance is not None:
            log.warning("%s is %s: the executor of %s is ended", action.instance, action.reason, self.device.id)
            self._end(action.reason, instance)

    def _end(self, reason: str, instance: _Instance) -> None:
        instance.loss_reason = reason
        if self.executor is not None and self.executor.process is not None:
            self.executor.process.kill()

    # ------------------------------------------------------------------ batches

    def _start(self, action: StartBatch) -> None:
        life, instance = self.executor, self._instances.get(action.instance)
        if life is None or instance is None:  # lost; that news is on its way to whoever decided this
            return
        jobs, reads = job_frames(self._data, self._ledger, action, self.deadline_us, self.origin, life.values.owner)
        keep = [self._can_stay_on_device(job) for job in action.jobs]
        try:
            limit_us = max(HANG_FLOOR_US, HANG_TIMES * action.predicted_us) if action.predicted_us else 0
            self._send(RunOnSlice(action.batch_id, action.instance, action.mask, action.behind, jobs, keep, limit_us))
        except FrameError as error:
            log.warning("batch %d of %s is not sent: %s", action.batch_id, action.function, error)
            self._ledger.unpin(reads)
            self._post(BatchFailed(action.batch_id, error.code))  # smaller ones may fit
            return
        self._batches.add(InFlightBatch(action, reads))

    def _can_stay_on_device(self, job: JobRef) -> bool:
        """Is the result read as a whole, and only by functions that are loaded here?"""
        readers = self._data.consumers(job)
        return bool(readers) and readers <= {instance.load.function for instance in self._instances.values()}

    # ------------------------------------------------------------------- values

    def missing(self, action: StartBatch) -> list[DeviceRef]:
        """Values of this device that a batch elsewhere needs, and that have not been fetched yet."""
        if self.executor is None or not self.executor.values.held:
            return []
        return self.executor.missing(stored for job in action.jobs for _, stored in self._data.inputs(job).leaves)

    def fetch(self, refs: list[DeviceRef], then: Callable[[], None]) -> None:
        """Call `then` when all of them are here, or lost with the device."""
        if self.executor is None:
            then()
        else:
            self.executor.fetch(refs, then)

    # ------------------------------------------------------------------- frames

    def _on_frame(self, life: ExecutorProcess, frame: FromExecutor) -> None:
        match frame:
            case BatchDone():
                self._on_batch_done(life, frame)
            case FunctionLoaded():
                self._on_loaded(frame)
            case FunctionLoadFailed():
                self._on_load_failed(frame)
            case ExecutorReady():
                assert self._supervisor is not None
                self._supervisor.on_ready(life)
                for instance in self._instances.values():
                    self._send_load(instance)
            case ValueFetched():
                if isinstance(frame.value, ShmRef) and not self._ledger.accept_results(life.slots, [frame.value]):
                    raise FrameError(f"{self.device.id} gives away a slot that is not its own")
                life.fetched(frame)
            case ModulesImported():
                assert self._supervisor is not None
                self._supervisor.on_modules_imported(frame.names)
            case ExecutorUsage():
                self.usage = frame
            case BatchHung():
                self._on_batch_hung(frame)
            case BatchHeartbeat():
                batch = self._batches.open.get(frame.batch_id)
                for job in batch.action.jobs if batch is not None else ():
                    self._post(Heartbeat(job.call_id, job.id))
            case FunctionUnloaded() | StandbyPrepared():
                pass

    def _on_batch_hung(self, frame: BatchHung) -> None:
        batch = self._batches.open.get(frame.batch_id)
        instance = self._instances.get(batch.action.instance) if batch is not None else None
        if instance is not None:
            log.warning("batch %d of %s hangs", frame.batch_id, instance.load.function)
            self._end("hung", instance)

    def _on_loaded(self, frame: FunctionLoaded) -> None:
        instance = self._instances.get(frame.instance)
        if instance is None:  # unloaded while it was loading
            return
        instance.is_ready, instance.is_model = True, frame.is_model
        parts = {what: round(took_us / 1000, 1) for what, took_us in frame.parts}
        self.loads[instance.load.function] = {**parts, "all": round(frame.load_us / 1000, 1)}
        if frame.is_model:
            self._update_standby()
            if instance.load.mask != instance.asked_mask:
                self._send(MoveSlice(frame.instance, instance.load.mask))
        instance.cancel_load_timeout()
        self.load_errors.pop(instance.load.function, None)
        self.unknown.discard(instance.load.function)
        learnt_us = 0 if frame.was_standby else frame.load_us  # how long a load takes is not learnt from one that was done before
        self._post(InstanceReady(frame.instance, learnt_us, tuple(frame.probes)))

    def _on_load_failed(self, frame: FunctionLoadFailed) -> None:
        instance = self._instances.pop(frame.instance, None)
        if instance is not None:
            instance.cancel_load_timeout()
            self.load_errors[instance.load.function] = frame.error
            self._post(InstanceLost(frame.instance, "load-failed"))

    def _on_batch_done(self, life: ExecutorProcess, done: BatchDone) -> None:
        batch = self._batches.open.get(done.batch_id)
        if batch is None or len(done.results) != len(batch.action.jobs):
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if any(ref not in batch.reads for ref in done.still_viewed):
            raise FrameError(f"{self.device.id} keeps what it was not given")
        stays = [result for result in done.results if isinstance(result, DeviceRef)]
        shared = [result for result in done.results if type(result) is ShmRef]
        if any(ref.owner != life.values.owner or ref.slot in life.values.held for ref in stays):
            raise FrameError(f"{self.device.id} gives values that are not its own")
        if not self._ledger.accept_results(life.slots, shared):
            raise FrameError(f"{self.device.id} gives away slots that are not there, or not its own")
        life.values.held.update(ref.slot for ref in stays)
        for ref in done.still_viewed:
            self._ledger.retire(ref)
        wanted = self._batches.close(batch)
        if done.spans and self.on_spans is not None:
            self.on_spans(done.batch_id, done.spans)
        outcomes = deliver_results(self._data, batch.action.jobs, wanted, done.results, self._ledger.release)
        self._post(BatchFinished(done.batch_id, done.device_us, outcomes))

    # ---------------------------------------------------------------------- end

    async def stop(self, grace_s: float) -> None:
        self._is_stopping = True
        await self._batches.wait_drained(grace_s)
        self._post = lambda event: None
        for instance in self._instances.values():
            instance.cancel_load_timeout()
        if self._supervisor is not None:
            await self._supervisor.stop(self._limits.unload_s, is_idle=not self._batches.open)
        if self._log_pipe is not None:
            self._log_pipe.close_child_end()
            self._log_pipe.close()
