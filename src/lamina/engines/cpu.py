"""CPU engine: functions in processes of this machine, one worker per instance, each started from the app file itself.

The engine owns what outlives a worker: which batch reads which slot of shared memory, which batch waits behind which, which jobs
are still wanted. All of it happens on the loop's thread, so nothing here is locked and nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakSet

from msgspec import Struct

from lamina.core.actions import Action, DropJob, Kill, Load, StartBatch, Unload
from lamina.core.events import BatchFailed, BatchFinished, Event, Heartbeat, InstanceLost, InstanceReady
from lamina.drivers.timer import clock_us
from lamina.engines.inflight import InFlightBatches
from lamina.engines.job_delivery import JobValues, OriginOf, deliver_results, job_frames
from lamina.engines.log_pipe import LogPipe, OnLine
from lamina.engines.worker_handle import WorkerBatch, WorkerHandle
from lamina.ipc.child_process import ChildProcess, ProcessSpec, exit_reason
from lamina.ipc.protocol import (
    BatchDone,
    BatchHeartbeat,
    CancelStream,
    ErrorInfo,
    FrameError,
    FromWorker,
    ResultChunk,
    RunBatch,
    ShmRef,
    StateRead,
    WorkerLoadFailed,
    WorkerReady,
    pack,
)
from lamina.sdk.spans import InnerSpan
from lamina.state.commit import answer_read, commit_changes
from lamina.state.kv_state import StateTable
from lamina.types import DeviceSpec
from lamina.units import MIB
from lamina.values.slot_refs import SlotReferences
from lamina.worker.cpu_affinity import GatewayAffinity, cpu_device
from lamina.worker.main import WorkerSetup

log = logging.getLogger("lamina")

OnFunctionOutput = Callable[[str, str, tuple[str, ...], str], None]
"""Function, instance, the calls it was for, and the line."""

STREAM_HEARTBEAT_S = 0.5
"""How often the controller hears of a function that yields."""


class WorkerLimits(Struct, frozen=True, kw_only=True):
    pool_bytes: int = 1024 * MIB  #: shared memory for values of calls
    worker_pool_bytes: int = 256 * MIB  #: and for the results of each worker
    spill_bytes: int = 4096 * MIB  #: on disk, for values of calls that find no room in memory
    worker_spill_bytes: int = 2048 * MIB  #: and for such results of each worker
    load_s: float = 300.0  #: a load that takes longer has failed
    unload_s: float = 5.0  #: from asking a worker to leave to ending it


class CpuEngine:
    """Engine with one worker process per instance.

    `pool`, `reader` and `release` are for the store of run values; `deadline_us` tells until when a call is worth running, on
    `clock_us`, and 0 without a limit."""

    def __init__(
        self,
        app: str,
        devices: list[DeviceSpec] | None = None,
        limits: WorkerLimits | None = None,
        shm_base: str | None = None,
    ) -> None:
        self.devices = devices if devices is not None else [cpu_device()]
        self.load_errors: dict[str, ErrorInfo] = {}  #: by function: why its last load failed, until one succeeds
        self.deadline_us: Callable[[str], int] = lambda call_id: 0
        self.origin: OriginOf | None = None  #: for functions that ask whose request they serve; None: nobody's in particular
        self.on_spans: Callable[[int, list[InnerSpan]], None] | None = None  #: (batch, parts of it): who exports them
        self.book = StateTable("")  #: of the state that functions keep
        self.unknown: set[str] = set()  #: functions nobody has timed: the first instance of each looks before it takes calls
        self._app = app
        self.apps: dict[str, str] = {}  #: by function: where it is loaded from now, if not from there
        self.environment: Callable[[str], dict[str, str]] = lambda function: {}  #: for workers of a function: secrets, say
        self.isolated: dict[str, dict[str, str]] = {}  #: functions on a GPU in processes of their own, and what holds them there
        self.end_client: Callable[[int], None] | None = None  #: to be called, in a thread, before one of these is killed
        self.on_line: OnFunctionOutput | None = None  #: who reads what they print
        self.echo_lines = True  #: it goes to stderr all the same
        self._log_pipes: WeakSet[LogPipe] = WeakSet()  #: until nobody can print into them any more
        self._limits = limits = limits or WorkerLimits()
        self.ledger = ledger = SlotReferences(limits.pool_bytes, shm_base, limits.spill_bytes)
        self.pool, self.reader, self.release = ledger.pool, ledger.reader, ledger.release
        self._workers: dict[str, WorkerHandle] = {}
        self._processes: set[ChildProcess] = set()  #: until they are reaped
        self._batches = InFlightBatches[WorkerBatch](ledger)
        self._affinity = GatewayAffinity()
        self._is_stopping = False

    async def start(self, post: Callable[[Event], None], data: JobValues) -> None:
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._data = data

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case DropJob():
                self._batches.drop_job(action.job_id)
            case Load():
                self._load(action)
            case Unload():
                self._unload(action)
            case Kill():
                self._kill(action)
            case _:  # a standing slice that moves needs nothing: every batch brings its own mask
                pass

    @property
    def pids(self) -> dict[str, int]:
        """Process id by instance."""
        return {name: worker.process.pid for name, worker in self._workers.items() if worker.process is not None}

    # ---------------------------------------------------------------- instances

    def _load(self, action: Load) -> None:
        if self._is_stopping:
            return
        isolated = self.isolated.get(action.function)
        worker = WorkerHandle(action, self.ledger.add_worker(), self.end_client if isolated is not None else None)
        self._workers[action.instance] = worker
        setup = WorkerSetup(
            app=self.apps.get(action.function, self._app),
            function=action.function,
            device=action.device,
            mask=self._cores_of(action.function, action.mask),
            folder=self.ledger.directory.path,
            owner=worker.slots.owner,
            pool_bytes=self._limits.worker_pool_bytes,
            spill_bytes=self._limits.worker_spill_bytes,
            requested_us=clock_us(),
            probe=action.function in self.unknown and isolated is None,
            tags_output=self.on_line is not None,
        )
        tap = self._log_pipe(action) if self.on_line is not None else None
        environment = {**(isolated or {}), **self.environment(action.function)}
        kind = ProcessSpec(environment=environment, output=tap.fd if tap is not None else None, cores=self._affinity.allowed)
        try:
            process = ChildProcess(
                self._loop, setup, lambda frame: self._on_frame(worker, frame), lambda: self._on_worker_lost(worker), kind=kind
            )
        except OSError as error:
            worker.load_error = ErrorInfo("OSError", f"no worker could be started: {error.strerror}")
            self._on_worker_lost(worker)
            return
        finally:
            if tap is not None:
                tap.close_child_end()
        worker.on_started(process, self._loop, self._limits.load_s)
        self._processes.add(process)
        process.finished.add_done_callback(lambda _: self._processes.discard(process))

    def _log_pipe(self, load: Load) -> LogPipe:
        on_line = self.on_line
        assert on_line is not None
        told: OnLine = lambda _, calls, line: on_line(load.function, load.instance, calls, line)  # noqa: E731
        tap = LogPipe(self._loop, told, echo=self.echo_lines)
        self._log_pipes.add(tap)
        return tap

    def _unload(self, action: Unload) -> None:
        worker = self._workers.get(action.instance)
        if worker is not None:
            worker.unload(self._limits.unload_s)

    def _kill(self, action: Kill) -> None:
        worker = self._workers.get(action.instance)
        if worker is not None:
            worker.kill(action.reason)

    def _cores_of(self, function: str, mask: int) -> int:
        """Cores of a batch's mask. Units of a GPU are no cores: a function isolated on a GPU keeps all of them."""
        return 0 if function in self.isolated else mask

    def _on_worker_lost(self, worker: WorkerHandle) -> None:
        """Clean up after a worker; called once for each, whatever ended it."""
        del self._workers[worker.load.instance]
        worker.cancel_load_timeout()
        followers: list[WorkerBatch] = []
        for batch in list(worker.batches.values()):
            self._close(batch)
            followers += batch.followers
        self.ledger.on_worker_lost(worker.slots)
        if not worker.is_leaving:
            self._report(worker)
            self._post(InstanceLost(worker.load.instance, worker.loss_reason))
        self._send_all(followers)

    def _report(self, worker: WorkerHandle) -> None:
        load, ended = worker.load, exit_reason(worker.process)
        if worker.is_ready:
            log.warning("%s is lost (%s): %s", load.instance, worker.loss_reason, ended)
            return
        error = worker.load_error or ErrorInfo("WorkerLost", f"the worker {ended} while it was loading")
        log.warning("%s is lost (%s): %s: %s", load.instance, worker.loss_reason, error.type, error.message)
        if error != self.load_errors.get(load.function) and error.trace:
            log.warning("%s", error.trace.rstrip())  # once, not at every try
        self.load_errors[load.function] = error

    # -------------------------------------------------------------------- batches

    def _start(self, action: StartBatch) -> None:
        worker = self._workers.get(action.instance)
        if worker is None:  # lost; that news is on its way to whoever decided this
            return
        jobs, reads = job_frames(self._data, self.ledger, action, self.deadline_us, self.origin)
        try:
            wire = pack(RunBatch(action.batch_id, self._cores_of(action.function, action.mask), jobs))
        except FrameError as error:
            log.warning("batch %d of %s is not sent: %s", action.batch_id, action.function, error)
            self.ledger.unpin(reads)
            self._post(BatchFailed(action.batch_id, error.code))  # smaller ones may fit
            return
        batch = WorkerBatch(action, reads, worker, wire)
        before = self._batches.open.get(action.behind)
        self._batches.add(batch)
        worker.batches[action.batch_id] = batch
        self._avoid_leased_cores()
        if before is None or (before.worker is worker and before.is_sent):
            worker.send_batch(batch)  # the worker itself keeps the order of what it is sent
        else:
            before.followers.append(batch)

    def _avoid_leased_cores(self) -> None:
        leased = 0
        for batch in self._batches.open.values():
            leased |= self._cores_of(batch.action.function, batch.action.mask)
        self._affinity.avoid(leased)

    def _send_all(self, batches: list[WorkerBatch]) -> None:
        for batch in batches:
            if batch.action.batch_id in self._batches.open:
                batch.worker.send_batch(batch)

    def _close(self, batch: WorkerBatch) -> list[bool]:
        """Close a batch, however it ended; returns which of its results are still wanted."""
        del batch.worker.batches[batch.action.batch_id]
        return self._batches.close(batch)

    # --------------------------------------------------------------------- frames

    def _on_frame(self, worker: WorkerHandle, frame: FromWorker) -> None:
        match frame:
            case BatchDone():
                self._on_batch_done(worker, frame)
            case ResultChunk():
                self._on_stream_chunk(worker, frame)
            case WorkerReady():
                worker.on_ready(frame.pid)
                self.load_errors.pop(worker.load.function, None)
                self.unknown.discard(worker.load.function)
                if not worker.is_leaving:
                    self._post(InstanceReady(worker.load.instance, frame.load_us, tuple(frame.probes)))
            case WorkerLoadFailed():
                worker.load_error = frame.error
                worker.kill("load-failed")
            case BatchHeartbeat():
                batch = worker.batches.get(frame.batch_id)
                for job in batch.action.jobs if batch is not None else ():
                    self._post(Heartbeat(job.call_id, job.id))
            case StateRead():
                answer_read(self.book, worker, frame)

    def _on_stream_chunk(self, worker: WorkerHandle, piece: ResultChunk) -> None:
        """Forward one chunk of a streamed answer. It is proof of life: the controller gets a heartbeat now and then."""
        batch = worker.batches.get(piece.batch_id)
        job = next((job for job in batch.action.jobs if job.id == piece.job_id), None) if batch is not None else None
        if batch is None or job is None or not batch.is_sent:
            raise FrameError(f"a piece of job {piece.job_id} in batch {piece.batch_id}, which it does not have")
        take = self._data.pieces.get(job.call_id)
        if take is None or not self._batches.is_wanted(job.id):
            worker.send(CancelStream(job.id))
            return
        now_s = self._loop.time()
        if now_s - batch.last_heartbeat_s > STREAM_HEARTBEAT_S:
            batch.last_heartbeat_s = now_s
            self._post(Heartbeat(job.call_id, job.id))
        take(piece.value)

    def _on_batch_done(self, worker: WorkerHandle, done: BatchDone) -> None:
        batch = worker.batches.get(done.batch_id)
        if batch is None or not batch.is_sent or len(done.results) != len(batch.action.jobs):
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if done.state is not None:
            settled = commit_changes(self.book, batch, done, done.state, self._batches.is_wanted(batch.action.jobs[0].id))
            if settled is None:
                return  # it runs again
            done = settled
        if any(ref not in batch.reads for ref in done.still_viewed):
            raise FrameError(f"{worker.load.instance} keeps what it was not given")
        if not self.ledger.accept_results(worker.slots, [result for result in done.results if isinstance(result, ShmRef)]):
            raise FrameError(f"{worker.load.instance} gives away slots that are not there, or not its own")
        for ref in done.still_viewed:
            self.ledger.retire(ref)
        wanted = self._close(batch)
        self._send_all(batch.followers)  # first of all: somebody's slice is idle
        if done.spans and self.on_spans is not None:
            self.on_spans(done.batch_id, done.spans)
        outcomes = deliver_results(self._data, batch.action.jobs, wanted, done.results, lambda ref: worker.slots.free(ref.slot))
        self._post(BatchFinished(done.batch_id, done.device_us, outcomes))

    # ----------------------------------------------------------------------- end

    async def stop(self, grace_s: float) -> None:
        """Drain within `grace_s`, then kill the rest; afterwards there is no process and no file left."""
        self._is_stopping = True
        await self._batches.wait_drained(grace_s)
        self._post = lambda event: None  # nobody is to react to what follows
        self._affinity.avoid(0)
        for worker in list(self._workers.values()):
            worker.unload(0 if worker.batches else self._limits.unload_s)
        if self._processes:
            await asyncio.wait([process.finished for process in self._processes])
        for tap in list(self._log_pipes):
            tap.close()
        self.ledger.close()
