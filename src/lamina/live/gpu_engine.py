"""One GPU as an engine: a process that owns it, and every function that is loaded there.

The functions share the process, so they share its fate: when it ends, for whatever reason, all of them are lost at once, and
the controller loads them again and retries what may be retried. Killing one function means killing the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lamina.core.actions import Action, DropJob, JobRef, Kill, Load, StartBatch, Unload
from lamina.core.events import BatchFailed, BatchFinished, Event, InstanceLost, InstanceReady
from lamina.live.cores import allowed_cores
from lamina.live.frames import DeviceRef, Done, ErrorInfo, FrameError, ShmRef, pack
from lamina.live.gpu_frames import (
    Fetch,
    Fetched,
    Forget,
    FromExecutor,
    Go,
    GpuSetup,
    Loaded,
    LoadOne,
    NotLoaded,
    RunOn,
    Unloaded,
    UnloadOne,
    Up,
    Usage,
    gateway_reader,
)
from lamina.live.jobs import NOBODY, OriginOf, deliver, job_frame
from lamina.live.ledger import DeviceSlots, Ledger, WorkerSlots
from lamina.live.local import LocalLimits, how_it_ended
from lamina.live.process import Kind, WorkerProcess
from lamina.live.timer import clock_us
from lamina.sdk.spans import Inner
from lamina.types import DeviceSpec

log = logging.getLogger("lamina")

SPARE_AFTER_S = 3.0
"""From a device being open until a spare process gets ready behind it: first those who wait for functions."""


@dataclass(slots=True, eq=False)
class _Instance:
    load: Load
    is_ready: bool = False
    lost_because: str = ""
    batches: set[int] = field(default_factory=set)
    overdue: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    action: StartBatch
    reads: list[ShmRef]


@dataclass(slots=True, eq=False)
class _Executor:
    """One life of the process."""

    slots: WorkerSlots
    values: DeviceSlots
    process: WorkerProcess | None = None
    is_up: bool = False
    forgotten: list[int] = field(default_factory=list)
    fetching: dict[int, list[Callable[[], None]]] = field(default_factory=dict)


class GpuEngine:
    def __init__(
        self,
        app: str,
        device: DeviceSpec,
        slicer: str,
        ledger: Ledger,
        *,
        ordinal: int = 0,
        limits: LocalLimits | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.device = device
        self.load_errors: dict[str, ErrorInfo] = {}
        self.deadline_us: Callable[[str], int] = lambda call_id: 0
        self.origin: OriginOf | None = None  #: for functions that ask whose request they serve
        self.on_spans: Callable[[int, list[Inner]], None] | None = None  #: (batch, parts of it): who exports them
        self.unknown: set[str] = set()
        self.usage: Usage | None = None  #: what the executor said last
        self.restarts = -1  #: of the process; the first start is none
        self.apps: dict[str, str] = {}  #: by function: where it is loaded from now, if not from `app`
        self._app, self._slicer, self._ordinal = app, slicer, ordinal
        self._ledger = ledger
        self._limits = limits or LocalLimits()
        self._kind = Kind("lamina.live.gpu_worker", gateway_reader, environment or {}, cores=allowed_cores())
        self._executor: _Executor | None = None
        self._spare: _Executor | None = None
        self._processes: set[WorkerProcess] = set()
        self._instances: dict[str, _Instance] = {}
        self._batches: dict[int, _Batch] = {}
        self._wanted: set[int] = set()
        self._is_stopping = False
        self._drained: asyncio.Event | None = None

    @property
    def devices(self) -> list[DeviceSpec]:
        return [self.device]

    @property
    def pid(self) -> int:
        """Of the executor; 0 while there is none."""
        found = self._executor
        return found.process.pid if found is not None and found.process is not None else 0

    async def start(self, post: Callable[[Event], None], data: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._data = data
        self._take_over()  # opening a device takes seconds: it need not wait for the first load

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case DropJob():
                self._wanted.discard(action.job_id)
            case Load():
                self._load(action)
            case Unload():
                self._unload(action.instance)
            case Kill():
                self._kill(action)
            case _:  # a standing slice that moves needs nothing: every batch brings its own, and graphs follow
                pass

    # -------------------------------------------------------------- the process

    def _take_over(self) -> None:
        """A process for the device: the spare one, which needs a second, or a fresh one, which needs ten."""
        self.restarts += 1
        spare, self._spare = self._spare, None
        self._executor = spare or self._spawn()
        if spare is not None:
            self._send(Go())

    def _make_spare(self) -> None:
        if not self._is_stopping and self._spare is None and self._executor is not None:
            self._spare = self._spawn(is_spare=True)

    def _spawn(self, is_spare: bool = False) -> _Executor:
        executor = _Executor(self._ledger.open_worker(), self._ledger.open_device(lambda slot: executor.forgotten.append(slot)))
        setup = GpuSetup(
            app=self._app,
            device=self.device.id,
            slicer=self._slicer,
            folder=self._ledger.folder.path,
            owner=executor.slots.owner,
            values_owner=executor.values.owner,
            pool_bytes=self._limits.worker_pool_bytes,
            ordinal=self._ordinal,
            is_spare=is_spare,
        )
        try:
            process = WorkerProcess(
                self._loop, setup, lambda frame: self._frame(executor, frame), lambda: self._lost(executor), kind=self._kind
            )
        except OSError as error:
            log.error("no executor for %s could be started: %s", self.device.id, error.strerror)
            self._loop.call_soon(self._lost, executor)
            return executor
        executor.process = process
        self._processes.add(process)
        process.finished.add_done_callback(lambda _: self._processes.discard(process))
        return executor

    def _lost(self, executor: _Executor) -> None:
        """Called once for each life of the process, whatever ended it."""
        if self._spare is executor:
            self._spare = None
            self._ledger.orphan(executor.slots)
            self._ledger.close_device(executor.values)
            return
        self._executor = None
        self.usage = None
        for batch in list(self._batches.values()):
            self._close(batch)
        self._ledger.orphan(executor.slots)
        self._ledger.close_device(executor.values)
        instances, self._instances = self._instances, {}
        if self._is_stopping:
            return
        ended = how_it_ended(executor.process)
        log.warning("the executor of %s is lost, with %d functions: it %s", self.device.id, len(instances), ended)
        for fetched in [then for waiting in executor.fetching.values() for then in waiting]:
            fetched()
        if executor.is_up:
            self._take_over()
        for name, instance in instances.items():
            if instance.overdue is not None:
                instance.overdue.cancel()
            reason = instance.lost_because or ("worker-lost" if instance.is_ready else "load-failed")
            if not instance.is_ready:
                said = ErrorInfo("ExecutorLost", f"the executor {ended} while it was loading")
                self.load_errors.setdefault(instance.load.function, said)
            self._post(InstanceLost(name, reason))

    def _send(self, *frames: Any) -> None:
        executor = self._executor
        if executor is not None and executor.process is not None:
            ahead = [*executor.slots.released()]
            if executor.forgotten:
                ahead.append(Forget(executor.forgotten))  # type: ignore[arg-type]
                executor.forgotten = []
            executor.process.send(pack(*ahead, *frames))

    # ---------------------------------------------------------------- instances

    def _load(self, action: Load) -> None:
        if self._is_stopping:
            return
        if self._executor is None:
            self._take_over()
        instance = self._instances[action.instance] = _Instance(action)
        instance.overdue = self._loop.call_later(self._limits.load_s, self._overdue, instance)
        executor = self._executor
        if executor is not None and executor.is_up:
            self._send_load(instance)

    def _send_load(self, instance: _Instance) -> None:
        load = instance.load
        app = self.apps.get(load.function, "")
        self._send(
            LoadOne(load.instance, load.function, load.mask, clock_us(), load.function in self.unknown, app, self.restarts > 0)
        )

    def _overdue(self, instance: _Instance) -> None:
        said = ErrorInfo("LoadTimeout", f"not loaded within {self._limits.load_s:g} s")
        self.load_errors[instance.load.function] = said
        self._end("load-failed", instance)

    def _unload(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is None:
            return
        if instance.overdue is not None:
            instance.overdue.cancel()
        del self._instances[name]
        self._send(UnloadOne(name))

    def _kill(self, action: Kill) -> None:
        instance = self._instances.get(action.instance)
        if instance is not None:
            self._end(action.reason, instance)

    def _end(self, reason: str, instance: _Instance) -> None:
        instance.lost_because = reason
        if self._executor is not None and self._executor.process is not None:
            self._executor.process.kill()

    # ------------------------------------------------------------------ batches

    def _start(self, action: StartBatch) -> None:
        executor, instance = self._executor, self._instances.get(action.instance)
        if executor is None or instance is None:  # lost; that news is on its way to whoever decided this
            return
        reads: list[ShmRef] = []
        place = executor.values.owner
        origin = self.origin
        jobs = [
            job_frame(
                *(self._data, self._ledger, job, reads, self.deadline_us(job.call_id), place),
                origin=origin(job, action.batch_id) if origin is not None else NOBODY,
            )
            for job in action.jobs
        ]
        keep = [self._may_stay(job) for job in action.jobs]
        batch = _Batch(action, reads)
        try:
            self._send(RunOn(action.batch_id, action.instance, action.mask, action.after, jobs, keep))
        except FrameError as error:
            log.warning("batch %d of %s is not sent: %s", action.batch_id, action.function, error)
            self._ledger.unpin(reads)
            self._post(BatchFailed(action.batch_id, error.code))  # smaller ones may fit
            return
        self._batches[action.batch_id] = batch
        instance.batches.add(action.batch_id)
        self._wanted.update([job.id for job in action.jobs])

    def _may_stay(self, job: JobRef) -> bool:
        """Only functions that are loaded here will read it, as a whole."""
        readers = self._data.readers(job)
        return bool(readers) and readers <= {instance.load.function for instance in self._instances.values()}

    def _close(self, batch: _Batch) -> None:
        action = batch.action
        del self._batches[action.batch_id]
        instance = self._instances.get(action.instance)
        if instance is not None:
            instance.batches.discard(action.batch_id)
        self._wanted.difference_update([job.id for job in action.jobs])
        self._ledger.unpin(batch.reads)
        if self._drained is not None and not self._batches:
            self._drained.set()

    # ------------------------------------------------------------------- values

    def missing(self, action: StartBatch) -> list[DeviceRef]:
        """Values of this device that a batch elsewhere needs, and that nobody has fetched yet."""
        executor = self._executor
        if executor is None or not executor.values.held:
            return []
        leaves = [stored for job in action.jobs for _, stored in self._data.inputs(job).leaves]
        held = executor.values
        mine = [leaf for leaf in leaves if isinstance(leaf, DeviceRef) and leaf.owner == held.owner]
        return [leaf for leaf in mine if leaf.slot not in held.copies and leaf.slot not in held.lost]

    def fetch(self, refs: list[DeviceRef], then: Callable[[], None]) -> None:
        """Call `then` when all of them are here, or lost with the device."""
        executor = self._executor
        left = {ref.slot for ref in refs}
        if executor is None:
            then()
            return
        for slot in list(left):

            def one(slot: int = slot) -> None:
                left.discard(slot)
                if not left:
                    then()

            waiting = executor.fetching.setdefault(slot, [])
            waiting.append(one)
            if len(waiting) == 1:
                executor.values.pin(slot)  # nobody may let it go while it is on its way
                self._send(Fetch(slot))

    def _fetched(self, executor: _Executor, frame: Fetched) -> None:
        if isinstance(frame.value, ShmRef) and not self._ledger.accept(executor.slots, [frame.value]):
            raise FrameError(f"{self.device.id} gives away a slot that is not its own")
        if isinstance(frame.value, ErrorInfo):
            executor.values.lost.add(frame.slot)
        else:
            executor.values.copies[frame.slot] = frame.value
        waiting = executor.fetching.pop(frame.slot, [])
        for then in waiting:
            then()
        if waiting:
            executor.values.unpin(frame.slot)

    # ------------------------------------------------------------------- frames

    def _frame(self, executor: _Executor, frame: FromExecutor) -> None:
        match frame:
            case Done():
                self._done(executor, frame)
            case Loaded():
                self._loaded(frame)
            case NotLoaded():
                self._not_loaded(frame)
            case Up():
                executor.is_up = True
                self._loop.call_later(SPARE_AFTER_S, self._make_spare)
                for instance in self._instances.values():
                    self._send_load(instance)
            case Fetched():
                self._fetched(executor, frame)
            case Usage():
                self.usage = frame
            case Unloaded():
                pass

    def _loaded(self, frame: Loaded) -> None:
        instance = self._instances.get(frame.instance)
        if instance is None:  # unloaded while it was loading
            return
        instance.is_ready = True
        if instance.overdue is not None:
            instance.overdue.cancel()
        self.load_errors.pop(instance.load.function, None)
        self.unknown.discard(instance.load.function)
        self._post(InstanceReady(frame.instance, frame.load_us, tuple(frame.probes)))

    def _not_loaded(self, frame: NotLoaded) -> None:
        instance = self._instances.pop(frame.instance, None)
        if instance is not None:
            if instance.overdue is not None:
                instance.overdue.cancel()
            self.load_errors[instance.load.function] = frame.error
            self._post(InstanceLost(frame.instance, "load-failed"))

    def _done(self, executor: _Executor, done: Done) -> None:
        batch = self._batches.get(done.batch_id)
        if batch is None or len(done.results) != len(batch.action.jobs):
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if any(ref not in batch.reads for ref in done.kept):
            raise FrameError(f"{self.device.id} keeps what it was not given")
        stays = [result for result in done.results if isinstance(result, DeviceRef)]
        shared = [result for result in done.results if type(result) is ShmRef]
        if any(ref.owner != executor.values.owner or ref.slot in executor.values.held for ref in stays):
            raise FrameError(f"{self.device.id} gives values that are not its own")
        if not self._ledger.accept(executor.slots, shared):
            raise FrameError(f"{self.device.id} gives away slots that are not there, or not its own")
        executor.values.held.update(ref.slot for ref in stays)
        for ref in done.kept:
            self._ledger.retire(ref)
        wanted = [job.id in self._wanted for job in batch.action.jobs]
        self._close(batch)
        if done.spans and self.on_spans is not None:
            self.on_spans(done.batch_id, done.spans)
        outcomes = deliver(self._data, batch.action.jobs, wanted, done.results, self._ledger.release)
        self._post(BatchFinished(done.batch_id, done.device_us, outcomes))

    # ---------------------------------------------------------------------- end

    async def stop(self, grace_s: float) -> None:
        self._is_stopping = True
        if self._batches:
            self._drained = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_s)
        self._post = lambda event: None
        for instance in self._instances.values():
            if instance.overdue is not None:
                instance.overdue.cancel()
        if self._spare is not None and self._spare.process is not None:
            self._spare.process.kill()
        executor = self._executor
        if executor is not None and executor.process is not None:
            if executor.is_up and not self._batches:
                executor.process.stop(self._limits.unload_s)
            else:
                executor.process.kill()
        if self._processes:
            await asyncio.wait([process.finished for process in self._processes])
