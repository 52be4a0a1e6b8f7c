"""CPU engine: functions in processes of this machine, one worker per instance, each started from the app file itself."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from pathlib import Path

import msgspec
from msgspec import Struct

from lamina import encoding
from lamina.core.actions import Load, StartBatch
from lamina.core.events import Heartbeat, InstanceLost
from lamina.drivers.engine import EngineShared, MessageStream, TargetSource
from lamina.engines.gpu_processes import GpuProcesses
from lamina.engines.inflight import InFlightBatch
from lamina.engines.isolation import ProcessIsolation
from lamina.engines.process_engine import InstanceHandle, ProcessEngine, WorkerLimits
from lamina.errors import BadValue, LaminaError, NotFound, Refused
from lamina.ipc.child_process import ChildProcess, ChildProcesses, ProcessSpec, exit_reason
from lamina.ipc.confinement import Confinement
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError, pack, wire_mask
from lamina.kernels.buffer_store import BufferStore, StoredBuffer
from lamina.sdk.volume import VARIABLE as VOLUMES
from lamina.state.kv_state import StateAccess
from lamina.types import DeviceSpec
from lamina.values.references import ErrorInfo, ShmRef
from lamina.values.slot_refs import SlotReferences, WorkerSlots
from lamina.worker.cpu_affinity import GatewayAffinity, cpu_device
from lamina.worker.main import WorkerSetup
from lamina.worker.protocol import (
    BatchDone,
    BatchHeartbeat,
    BufferAnswer,
    BufferRead,
    BufferWrite,
    CancelStream,
    FromWorker,
    InputTaken,
    JobFrame,
    ResultChunk,
    RunBatch,
    StateRead,
    StreamInput,
    WorkerLoadFailed,
    WorkerReady,
    from_worker_reader,
)

log = logging.getLogger("lamina")

WORKER = "lamina.worker.main"

STREAM_HEARTBEAT_S = 0.5
"""How often the controller hears of a function that yields."""


@dataclass(frozen=True, slots=True)
class CallBuffers:
    """Buffers by key for functions: `tenant_of` says whose call it is that they serve."""

    store: BufferStore
    tenant_of: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class VolumeFolders:
    """Folders of the volumes of apps, below `root`; `own_app` is the app that the server was started with. None: there are
    none."""

    root: Path | None
    own_app: str

    def open(self, source: TargetSource) -> str:
        """Folder of the volumes of an app; "": none. That of a tenant is made here, for its user; the operator's when it is
        used."""
        if self.root is None:
            return ""
        folder = self.root / (f"tenant-{source.tenant}" if source.tenant else "operator") / (source.app or self.own_app)
        if source.user:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.chown(folder, source.user, source.user)
        return str(folder)


def _told(error: LaminaError) -> ErrorInfo:
    return ErrorInfo(type(error).__name__, error.message, hint=error.hint)


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerHandle(InstanceHandle):
    """One worker process, from load to exit, with its batches."""

    slots: WorkerSlots
    confinement: Confinement
    end_client: Callable[[int], None] | None = None  #: to be called, in a thread, before its process is killed
    process: ChildProcess | None = None
    batches: dict[int, WorkerBatch] = field(default_factory=dict)

    def check_ready(self, pid: int) -> None:
        if self.is_ready or self.process is None or pid != self.process.own_pid:
            raise FrameError(f"process {pid} reports ready out of turn")

    def send(self, *frames: Struct) -> None:
        assert self.process is not None
        self.process.send(pack(*frames))

    def send_batch(self, batch: WorkerBatch) -> None:
        assert self.process is not None
        batch.is_sent = True
        released = self.slots.take_releases()
        self.process.send(pack(*released) + batch.wire if released else batch.wire)
        batch.wire = bytearray()

    def unload(self, grace_s: float) -> None:
        self.is_unloading = True
        if self.process is not None:
            if self.is_ready and grace_s:
                self.process.stop(grace_s)
            else:
                self.process.kill()

    def kill(self) -> None:
        """Kill the process. The loss is reported when it is dead, and no sooner: until then it uses its cores."""
        process = self.process
        if process is None:
            return
        if self.end_client is not None:
            ending = asyncio.get_running_loop().run_in_executor(None, self.end_client, process.pid)
            ending.add_done_callback(lambda _: process.kill())
        else:
            process.kill()


@dataclass(slots=True, eq=False)
class WorkerBatch(InFlightBatch):
    worker: WorkerHandle
    wire: bytearray
    cores: int = 0  #: that it has been given, as a mask
    is_sent: bool = False
    last_heartbeat_s: float = 0.0  #: when the controller last heard that it yields
    followers: list[WorkerBatch] = field(default_factory=list)  #: on other workers; they start when this one ends


MAX_BUFFER_WRITES = 64
"""Buffers of workers that are on their way to the disk: each may be as large as a frame."""


class CpuEngine(ProcessEngine[WorkerHandle, WorkerBatch]):
    """Engine with one worker process per instance.

    `state` is what functions keep between calls. `gpu_processes` says which functions run on a GPU in processes of their own,
    and what holds them there. `isolation` keeps the processes of tenants apart."""

    def __init__(
        self,
        app: str,
        devices: list[DeviceSpec] | None = None,
        limits: WorkerLimits | None = None,
        shm_base: str | None = None,
        *,
        state: StateAccess | None = None,
        unprofiled: Iterable[str] = (),
        gpu_processes: GpuProcesses | None = None,
        shared: EngineShared | None = None,
        isolation: ProcessIsolation | None = None,
        probes_deployed: bool = False,
        buffers: CallBuffers | None = None,
        volumes: VolumeFolders | None = None,
    ) -> None:
        limits = limits or WorkerLimits()
        self.isolation = isolation or ProcessIsolation()
        references = SlotReferences(limits.pool_bytes, shm_base, limits.spill_bytes)
        super().__init__(app, references, limits, shared or EngineShared(), unprofiled, state)
        self.devices = devices if devices is not None else [cpu_device()]
        self.gpu_processes = gpu_processes or GpuProcesses()
        self._probes_deployed = probes_deployed  #: what is deployed later is timed too, each version once
        self._probed: set[tuple[str, str]] = set()
        self._buffers = buffers
        self._writing = 0  #: buffers of workers, on their way to the disk
        self._volumes = volumes or VolumeFolders(None, "")
        self._processes = ChildProcesses()
        self._affinity = GatewayAffinity()
        self._leased: Counter[int] = Counter()  #: masks of cores that batches have, and how many batches
        self._concurrent: dict[int, WorkerHandle] = {}  #: jobs that run beside others in one worker

    @property
    def pids(self) -> dict[str, int]:
        """Process id by instance."""
        return {name: worker.process.pid for name, worker in self._instances.items() if worker.process is not None}

    # ---------------------------------------------------------------- instances

    def isolates(self, action: Load) -> bool:
        """Is it of a function that gets a process of its own on that GPU?"""
        spec, user = self.shared.spec_of(action.function), self.shared.source(action.function).user
        return self.gpu_processes.isolates(spec, action.device, user)

    def _load(self, action: Load) -> None:
        is_on_gpu = action.device in self.gpu_processes.devices
        end_client = self.gpu_processes.end_client if is_on_gpu else None
        asked = self.shared.spec_of(action.function)
        held = self.gpu_processes.environment(asked, action.device)
        source, folder = self.shared.source(action.function), self.references.directory.path
        shown: tuple[str, ...] = (folder,)
        if source.user and self._buffers is not None:
            shown = (folder, str(self._buffers.store.folder_of(source.tenant, source.user)))
        volumes = self._volumes.open(source)
        shown += (volumes,) if source.user and volumes else ()
        confinement = self.isolation.confinement(source, asked, action.instance, shown)
        slots = self.references.add_worker(confinement.user)
        worker = WorkerHandle(action, slots=slots, confinement=confinement, end_client=end_client)
        self._instances[action.instance] = worker
        setup = WorkerSetup(
            app=source.path or self._app,
            function=source.name or action.function,
            device=action.device,
            mask=self._cores_of(action),
            folder=folder,
            owner=worker.slots.owner,
            pool_bytes=self._limits.worker_pool_bytes,
            spill_bytes=0 if confinement.user else self._limits.worker_spill_bytes,
            requested_us=clock_us(),
            probe=not is_on_gpu and (action.function in self._unprofiled or self._is_newly_deployed(action.function)),
            tags_output=self.shared.collects_output,
            confinement=Confinement() if source.python else confinement,  # walls stand before that interpreter starts
            log_level=self.shared.log_level,
        )
        pipe = self._log_pipe(action.instance, action.function)
        spec = ProcessSpec(
            WORKER,
            from_worker_reader,
            environment={**held, **self.shared.environment(action.function), VOLUMES: volumes},
            confinement=confinement,
            output=pipe.fd if pipe is not None else None,
            cores=self._affinity.allowed,
            python=source.python,
        )
        try:
            worker.process = self._processes.start(
                self._loop, setup, lambda frame: self._on_frame(worker, frame), lambda: self._on_worker_lost(worker), spec
            )
        except OSError as error:
            worker.fail_load(ErrorInfo("OSError", f"no worker could be started: {error.strerror}"))
            self._on_worker_lost(worker)
            return
        finally:
            if pipe is not None:
                pipe.close_child_end()
        worker.arm_load_timeout(self._loop, self._limits.load_s, worker.kill)

    def _is_newly_deployed(self, function: str) -> bool:
        key, spec = (function, self.shared.source(function).path), self.shared.spec_of(function)
        if not self._probes_deployed or not key[1] or key in self._probed or spec is None or not spec.idempotent:
            return False
        self._probed.add(key)
        return True

    def _unload(self, worker: WorkerHandle) -> None:
        worker.unload(self._limits.unload_s)

    def _kill(self, worker: WorkerHandle, reason: str) -> None:
        worker.set_kill_reason(reason)
        worker.kill()

    def _cores_of(self, action: Load | StartBatch) -> int:
        """Cores of a mask. Units of a GPU are no cores: a function isolated on a GPU keeps all of them."""
        return 0 if action.device in self.gpu_processes.devices else action.mask

    def _user(self, worker: WorkerHandle) -> int:
        return worker.confinement.user

    def _on_worker_lost(self, worker: WorkerHandle) -> None:
        """Clean up after a worker; called once for each, whatever ended it."""
        swept = self.isolation.end(worker.confinement)
        del self._instances[worker.load.instance]
        worker.cancel_load_timeout()
        followers: list[WorkerBatch] = []
        for batch in list(worker.batches.values()):
            del worker.batches[batch.action.batch_id]
            self._batches.close(batch)
            self._unlease(batch)
            self._forget(batch)
            followers += batch.followers
        self.references.on_worker_lost(worker.slots)
        if not worker.is_unloading:
            self._report_loss(worker, swept)
            self._post(InstanceLost(worker.load.instance, worker.loss_reason))
        self._send_all(followers)

    def _report_loss(self, worker: WorkerHandle, swept: str) -> None:
        load, ended = worker.load, exit_reason(worker.process)
        ended = f"{ended}: {swept}" if swept else ended
        if worker.is_ready:
            log.warning("%s is lost (%s): %s", load.instance, worker.loss_reason, ended)
            return
        error = worker.load_error or ErrorInfo("WorkerLost", f"the worker {ended} while it was loading")
        log.warning("%s is lost (%s): %s: %s", load.instance, worker.loss_reason, error.type, error.message)
        if error != self.load_errors.get(load.function) and error.trace:
            log.warning("%s", error.trace.rstrip())  # once, not at every try
        self.load_errors[load.function] = error

    async def _stop_processes(self) -> None:
        self._affinity.avoid(0)
        for worker in list(self._instances.values()):
            worker.unload(0 if worker.batches else self._limits.unload_s)
        await self._processes.wait()

    async def stop(self, grace_s: float) -> None:
        """Drain within `grace_s`, then kill the rest; afterwards there is no process and no file left."""
        await super().stop(grace_s)
        self.references.close()
        self.isolation.close()
        if self._buffers is not None:
            self._buffers.store.close()

    # -------------------------------------------------------------------- batches

    def _send_batch(self, worker: WorkerHandle, action: StartBatch, jobs: list[JobFrame], reads: list[ShmRef]) -> None:
        cores = self._cores_of(action)
        wire = pack(RunBatch(action.batch_id, wire_mask(cores), jobs))
        batch = WorkerBatch(action, reads, worker, wire, cores)
        before = self._batches.open.get(action.behind)
        self._batches.add(batch)
        worker.batches[action.batch_id] = batch
        self._leased[cores] += 1
        self._affinity.avoid(reduce(or_, self._leased))
        if before is None or (before.worker is worker and before.is_sent):
            worker.send_batch(batch)  # the worker itself keeps the order of what it is sent
            if action.part < 1:
                self._attach(worker, jobs)
        else:
            before.followers.append(batch)

    def _attach(self, worker: WorkerHandle, jobs: list[JobFrame]) -> None:
        """A call beside others in its worker: its client's messages, and its end, reach it while it runs."""
        for job in jobs:
            self._concurrent[job.job_id] = worker
            sink = self._values.pieces.get(job.call_id)
            if isinstance(sink, MessageStream):
                sink.attach(partial(self._send_input, job.job_id))

    def _send_input(self, job_id: int, value: bytes | None) -> None:
        worker = self._concurrent.get(job_id)
        if worker is not None:
            worker.send(StreamInput(job_id, value))

    def _on_input_taken(self, worker: WorkerHandle, taken: InputTaken) -> None:
        batch = worker.batches.get(taken.batch_id)
        job = next((job for job in batch.action.jobs if job.id == taken.job_id), None) if batch is not None else None
        sink = self._values.pieces.get(job.call_id) if job is not None else None
        if isinstance(sink, MessageStream):
            sink.on_taken(taken.count)

    def _on_job_dropped(self, job_id: int) -> None:
        """What runs looks for this where it yields or sends a heartbeat; a call beside others is cancelled where it waits."""
        for batch in self._batches.open.values():
            if batch.is_sent and any(job.id == job_id for job in batch.action.jobs):
                batch.worker.send(CancelStream(job_id))

    def _unlease(self, batch: WorkerBatch) -> None:
        self._leased[batch.cores] -= 1
        if not self._leased[batch.cores]:
            del self._leased[batch.cores]

    def _on_closed(self, batch: WorkerBatch) -> None:
        del batch.worker.batches[batch.action.batch_id]
        self._unlease(batch)
        self._send_all(batch.followers)  # first of all: their slice is idle
        if self._concurrent:
            self._forget(batch)

    def _forget(self, batch: WorkerBatch) -> None:
        for job in batch.action.jobs:
            self._concurrent.pop(job.id, None)

    def _send_all(self, batches: list[WorkerBatch]) -> None:
        for batch in batches:
            if batch.action.batch_id in self._batches.open:
                batch.worker.send_batch(batch)

    # --------------------------------------------------------------------- frames

    def _on_frame(self, worker: WorkerHandle, frame: FromWorker) -> None:
        match frame:
            case BatchDone():
                self._on_batch_done(worker, frame)
            case ResultChunk():
                self._on_stream_chunk(worker, frame)
            case WorkerReady():
                worker.check_ready(frame.pid)
                self._on_loaded(worker, frame.load_us, frame.probes)
            case WorkerLoadFailed():
                worker.fail_load(frame.error)
                self._kill(worker, "load-failed")
            case BatchHeartbeat():
                self._on_heartbeat(worker.batches.get(frame.batch_id), frame.alive_only)
            case InputTaken():
                self._on_input_taken(worker, frame)
            case StateRead():
                self._answer_state_read(worker.load.function, worker.batches.get(frame.batch_id), frame, worker.send)
            case BufferRead() | BufferWrite():
                self._answer_buffer(worker, frame)

    def _on_stream_chunk(self, worker: WorkerHandle, chunk: ResultChunk) -> None:
        """Forward one chunk of a streamed answer. It is proof of life: the controller gets a heartbeat now and then."""
        batch = worker.batches.get(chunk.batch_id)
        job = next((job for job in batch.action.jobs if job.id == chunk.job_id), None) if batch is not None else None
        if batch is None or job is None or not batch.is_sent:
            raise FrameError(f"a chunk of job {chunk.job_id} in batch {chunk.batch_id}, which it does not have")
        deliver = self._values.pieces.get(job.call_id)
        if deliver is None or not self._batches.is_wanted(job.id):
            worker.send(CancelStream(job.id))
            return
        now_s = self._loop.time()
        if now_s - batch.last_heartbeat_s > STREAM_HEARTBEAT_S:
            batch.last_heartbeat_s = now_s
            self._post(Heartbeat(job.call_id, job.id))
        deliver(chunk.value)

    def _on_batch_done(self, worker: WorkerHandle, done: BatchDone) -> None:
        batch = worker.batches.get(done.batch_id)
        if batch is None or not batch.is_sent or len(done.results) != len(batch.action.jobs):
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if done.state:
            self._commit_state(batch, done, batch.worker.slots, partial(self._deliver, batch, done))
        else:
            self._deliver(batch, done)

    def _deliver(self, batch: WorkerBatch, done: BatchDone, errors: Mapping[int, ErrorInfo] | None = None) -> None:
        slots = batch.worker.slots
        self._on_results(batch, done, slots, lambda ref: slots.free(ref.slot), errors=errors)

    # --------------------------------------------------------------------- buffers

    def _answer_buffer(self, worker: WorkerHandle, asked: BufferRead | BufferWrite) -> None:
        """Answer a request for a buffer. Which tenant's it is, is known from the job, whatever the worker says."""
        batch = worker.batches.get(asked.batch_id)
        job = next((job for job in batch.action.jobs if job.id == asked.job_id), None) if batch is not None else None
        if job is None:
            raise FrameError(f"a buffer for job {asked.job_id} in batch {asked.batch_id}, which it does not have")
        value = asked.value if isinstance(asked, BufferWrite) else b""
        if isinstance(value, ShmRef) and (value.owner != worker.slots.owner or not self.references.directory.has_slot(value)):
            raise FrameError("a buffer from a slot that is not its own")
        try:
            if self._buffers is None:
                raise BadValue("key: there is no data layer here", hint="functions on this machine reach none")
            tenant, owner = self._buffers.tenant_of(job.call_id), self.shared.source(worker.load.function).tenant
            if worker.confinement.user and tenant != owner:
                raise NotFound(f"no buffer under key {asked.key[:80]!r}", hint="functions of a tenant reach that tenant's alone")
            if isinstance(asked, BufferRead):
                stored = self._buffers.store.find(tenant, asked.key)
                if worker.confinement.user:
                    self._buffers.store.show(stored, worker.confinement.user)
                worker.send(BufferAnswer(stored.path, stored.digest))
            else:
                self._write_buffer(worker, tenant, asked)
        except LaminaError as error:
            worker.send(BufferAnswer(error=_told(error)))

    def _write_buffer(self, worker: WorkerHandle, tenant: str, asked: BufferWrite) -> None:
        """Keep an array, in a thread; the worker waits, and its slot is its own until it is answered."""
        assert self._buffers is not None
        store, value = self._buffers.store, asked.value
        if self._writing >= MAX_BUFFER_WRITES:
            raise Refused("too many buffers are being written", hint="try again in a moment", reason="buffers")

        def write() -> StoredBuffer:
            view = self.references.reader.view(value) if isinstance(value, ShmRef) else memoryview(value)
            try:  # looked at as it is: to decode whatever it may be takes long, and holds up the loop from any thread
                parts = encoding.tensor_parts(view)
            except (msgspec.MsgspecError, ValueError, IndexError):
                parts = None
            if parts is None:
                raise BadValue("key: this is no array", hint="only arrays are kept under keys")
            dtype, shape, data = parts
            return store.write(tenant, asked.key, dtype, tuple(shape), data)

        def done(written: asyncio.Future[StoredBuffer]) -> None:
            self._writing -= 1
            answer = BufferAnswer()
            try:
                store.commit(written.result())
            except LaminaError as error:
                answer = BufferAnswer(error=_told(error))
            except Exception as error:
                log.exception("a buffer of %s could not be written", worker.load.function)
                answer = BufferAnswer(error=ErrorInfo("LaminaError", f"the buffer could not be kept: {type(error).__name__}"))
            if worker.load.instance in self._instances:
                worker.send(answer)

        self._writing += 1
        self._loop.run_in_executor(None, write).add_done_callback(done)
