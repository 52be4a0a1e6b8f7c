"""Functions in processes of this machine: one worker per instance, each started from the app file itself.

The engine owns what outlives a worker: who reads which slot of shared memory, which batch waits behind which, which jobs
are still wanted. All of it happens on the loop's thread, so nothing here is locked and nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct, structs

from lamina.core.actions import Action, DropJob, Kill, Load, StartBatch, Unload
from lamina.core.events import BatchFailed, BatchFinished, Event, Heartbeat, InstanceLost, InstanceReady
from lamina.errors import Conflict, LaminaError
from lamina.live.cores import Aside, machine_device
from lamina.live.frames import (
    Beat,
    Changes,
    Done,
    Drop,
    ErrorInfo,
    FrameError,
    FromWorker,
    LoadFailed,
    Piece,
    Ready,
    Release,
    RunBatch,
    Settled,
    ShmRef,
    StateIs,
    StateRead,
    pack,
)
from lamina.live.jobs import NOBODY, Data, OriginOf, deliver, job_frame
from lamina.live.ledger import Ledger, WorkerSlots
from lamina.live.process import Kind, WorkerProcess
from lamina.live.statebook import Book
from lamina.live.tap import OnLine, Tap
from lamina.live.timer import clock_us
from lamina.live.worker import Setup
from lamina.sdk.spans import Inner
from lamina.types import DeviceSpec
from lamina.units import MIB

log = logging.getLogger("lamina")

OnPrinted = Callable[[str, str, tuple[str, ...], str], None]
"""Function, instance, the calls it was for, and the line."""

BEAT_S = 0.5
"""How often the controller hears of a function that yields."""


class LocalLimits(Struct, frozen=True, kw_only=True):
    pool_bytes: int = 1024 * MIB  #: shared memory for values of calls
    worker_pool_bytes: int = 256 * MIB  #: and for the results of each worker
    spill_bytes: int = 4096 * MIB  #: on disk, for values of calls that find no room in memory
    worker_spill_bytes: int = 2048 * MIB  #: and for such results of each worker
    load_s: float = 300.0  #: a load that takes longer has failed
    unload_s: float = 5.0  #: from asking a worker to leave to ending it


@dataclass(slots=True, eq=False)
class _Worker:
    load: Load
    slots: WorkerSlots
    process: WorkerProcess | None = None
    is_ready: bool = False
    is_leaving: bool = False  #: its end is expected, and no news to anybody
    lost_because: str = ""
    load_error: ErrorInfo | None = None
    batches: dict[int, _Batch] = field(default_factory=dict)
    overdue: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    action: StartBatch
    worker: _Worker
    wire: bytearray
    reads: list[ShmRef]
    is_sent: bool = False
    told_s: float = 0.0  #: when the controller last heard that it yields
    followers: list[_Batch] = field(default_factory=list)  #: on other workers; they start when this one ends


class LocalEngine:
    """`pool`, `reader` and `release` are for whoever keeps the values; `deadline_us` tells until when a call is worth
    running, on `clock_us`, and 0 without a limit."""

    def __init__(
        self,
        app: str,
        devices: list[DeviceSpec] | None = None,
        limits: LocalLimits | None = None,
        shm_base: str | None = None,
    ) -> None:
        self.devices = devices if devices is not None else [machine_device()]
        self.load_errors: dict[str, ErrorInfo] = {}  #: by function: why its last load failed, until one succeeds
        self.deadline_us: Callable[[str], int] = lambda call_id: 0
        self.origin: OriginOf | None = None  #: for functions that ask whose request they serve; None: nobody's in particular
        self.on_spans: Callable[[int, list[Inner]], None] | None = None  #: (batch, parts of it): who exports them
        self.book = Book("")  #: of the state that functions keep
        self.unknown: set[str] = set()  #: functions nobody has timed: the first instance of each looks before it takes calls
        self._app = app
        self.apps: dict[str, str] = {}  #: by function: where it is loaded from now, if not from there
        self.environment: Callable[[str], dict[str, str]] = lambda function: {}  #: for workers of a function: secrets, say
        self.isolated: dict[str, dict[str, str]] = {}  #: functions on a GPU in processes of their own, and what holds them there
        self.end_client: Callable[[int], None] | None = None  #: to be called, in a thread, before one of these is killed
        self.on_line: OnPrinted | None = None  #: who reads what they print
        self.echo_lines = True  #: it goes to stderr all the same
        self._taps: set[Tap] = set()
        self._limits = limits = limits or LocalLimits()
        self.ledger = ledger = Ledger(limits.pool_bytes, shm_base, limits.spill_bytes)
        self.pool, self.reader, self.release = ledger.pool, ledger.reader, ledger.release
        self._workers: dict[str, _Worker] = {}
        self._processes: set[WorkerProcess] = set()  #: until they are reaped
        self._batches: dict[int, _Batch] = {}
        self._aside = Aside()
        self._wanted: set[int] = set()  #: jobs in these batches, less the dropped ones
        self._is_stopping = False
        self._drained: asyncio.Event | None = None

    async def start(self, post: Callable[[Event], None], data: Data) -> None:
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._data = data

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case DropJob():
                self._wanted.discard(action.job_id)
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
        """The process of each instance."""
        return {name: worker.process.pid for name, worker in self._workers.items() if worker.process is not None}

    # ---------------------------------------------------------------- instances

    def _load(self, action: Load) -> None:
        if self._is_stopping:
            return
        worker = self._workers[action.instance] = _Worker(action, self.ledger.open_worker())
        setup = Setup(
            app=self.apps.get(action.function, self._app),
            function=action.function,
            device=action.device,
            mask=self._cores_of(action.function, action.mask),
            folder=self.ledger.folder.path,
            owner=worker.slots.owner,
            pool_bytes=self._limits.worker_pool_bytes,
            spill_bytes=self._limits.worker_spill_bytes,
            asked_us=clock_us(),
            probe=action.function in self.unknown and action.function not in self.isolated,
            marked=self.on_line is not None,
        )
        tap = self._tap(action) if self.on_line is not None else None
        environment = {**self.isolated.get(action.function, {}), **self.environment(action.function)}
        kind = Kind(environment=environment, output=tap.fd if tap is not None else None, cores=self._aside.allowed)
        try:
            process = WorkerProcess(
                self._loop, setup, lambda frame: self._frame(worker, frame), lambda: self._lost(worker), kind=kind
            )
        except OSError as error:
            worker.load_error = ErrorInfo("OSError", f"no worker could be started: {error.strerror}")
            self._lost(worker)
            return
        finally:
            if tap is not None:
                tap.close_theirs()
        worker.process = process
        worker.overdue = self._loop.call_later(self._limits.load_s, self._overdue, worker)
        self._processes.add(process)
        process.finished.add_done_callback(lambda _: self._processes.discard(process))

    def _tap(self, load: Load) -> Tap:
        on_line = self.on_line
        assert on_line is not None
        told: OnLine = lambda _, calls, line: on_line(load.function, load.instance, calls, line)  # noqa: E731
        tap = Tap(self._loop, told, echo=self.echo_lines)
        self._taps.add(tap)
        return tap

    def _overdue(self, worker: _Worker) -> None:
        worker.load_error = ErrorInfo("LoadTimeout", f"not loaded within {self._limits.load_s:g} s")
        self._end(worker, "load-failed")

    def _unload(self, action: Unload) -> None:
        worker = self._workers.get(action.instance)
        if worker is not None and worker.process is not None:
            worker.is_leaving = True
            if worker.is_ready:
                worker.process.stop(self._limits.unload_s)
            else:
                worker.process.kill()

    def _kill(self, action: Kill) -> None:
        worker = self._workers.get(action.instance)
        if worker is not None:
            self._end(worker, action.reason)

    def _end(self, worker: _Worker, reason: str) -> None:
        """`InstanceLost` follows when it is dead, and no sooner: until then it uses its cores."""
        worker.lost_because = worker.lost_because or reason
        process = worker.process
        if process is None:
            return
        if self.end_client is not None and worker.load.function in self.isolated:
            ending = self._loop.run_in_executor(None, self.end_client, process.pid)
            ending.add_done_callback(lambda _: process.kill())
        else:
            process.kill()

    def _cores_of(self, function: str, mask: int) -> int:
        """Units of a GPU are no cores: who is isolated there keeps those it has."""
        return 0 if function in self.isolated else mask

    def _lost(self, worker: _Worker) -> None:
        """Called once for each worker, whatever ended it."""
        instance = worker.load.instance
        del self._workers[instance]
        if worker.overdue is not None:
            worker.overdue.cancel()
        followers: list[_Batch] = []
        for batch in list(worker.batches.values()):
            followers += self._close(batch)
        self.ledger.orphan(worker.slots)
        if not worker.is_leaving:
            reason = worker.lost_because or ("worker-lost" if worker.is_ready else "load-failed")
            ended = how_it_ended(worker.process)
            if worker.is_ready:
                log.warning("%s is lost (%s): %s", instance, reason, ended)
            else:
                error = worker.load_error or ErrorInfo("WorkerLost", f"the worker {ended} while it was loading")
                log.warning("%s is lost (%s): %s: %s", instance, reason, error.type, error.message)
                if error != self.load_errors.get(worker.load.function) and error.trace:
                    log.warning("%s", error.trace.rstrip())  # once, not at every try
                self.load_errors[worker.load.function] = error
            self._post(InstanceLost(instance, reason))
        self._send_all(followers)

    # -------------------------------------------------------------------- batches

    def _start(self, action: StartBatch) -> None:
        worker = self._workers.get(action.instance)
        if worker is None:  # lost; that news is on its way to whoever decided this
            return
        reads: list[ShmRef] = []
        origin = self.origin
        jobs = [
            job_frame(
                *(self._data, self.ledger, job, reads, self.deadline_us(job.call_id)),
                origin=origin(job, action.batch_id) if origin is not None else NOBODY,
            )
            for job in action.jobs
        ]
        try:
            wire = pack(RunBatch(action.batch_id, self._cores_of(action.function, action.mask), jobs))
        except FrameError as error:
            log.warning("batch %d of %s is not sent: %s", action.batch_id, action.function, error)
            self.ledger.unpin(reads)
            self._post(BatchFailed(action.batch_id, error.code))  # smaller ones may fit
            return
        batch = _Batch(action, worker, wire, reads)
        before = self._batches.get(action.after)
        self._batches[action.batch_id] = worker.batches[action.batch_id] = batch
        self._wanted.update([job.id for job in action.jobs])
        self._step_aside()
        if before is None or (before.worker is worker and before.is_sent):
            self._send(batch)  # the worker itself keeps the order of what it is sent
        else:
            before.followers.append(batch)

    def _step_aside(self) -> None:
        leased = 0
        for batch in self._batches.values():
            leased |= self._cores_of(batch.action.function, batch.action.mask)
        self._aside.keep_off(leased)

    def _send_all(self, batches: list[_Batch]) -> None:
        for batch in batches:
            if batch.action.batch_id in self._batches:
                self._send(batch)

    def _send(self, batch: _Batch) -> None:
        batch.is_sent = True
        worker = batch.worker
        assert worker.process is not None
        released = worker.slots.released()
        worker.process.send(pack(*released) + batch.wire if released else batch.wire)
        batch.wire = bytearray()

    def _close(self, batch: _Batch) -> list[_Batch]:
        """It has ended, however it did; returns those that waited for this."""
        del self._batches[batch.action.batch_id], batch.worker.batches[batch.action.batch_id]
        self._wanted.difference_update([job.id for job in batch.action.jobs])
        self.ledger.unpin(batch.reads)
        if self._drained is not None and not self._batches:
            self._drained.set()
        return batch.followers

    # --------------------------------------------------------------------- frames

    def _frame(self, worker: _Worker, frame: FromWorker) -> None:
        match frame:
            case Done():
                self._done(worker, frame)
            case Piece():
                self._piece(worker, frame)
            case Ready():
                if worker.is_ready or worker.process is None or frame.pid != worker.process.pid:
                    raise FrameError(f"process {frame.pid} reports ready out of turn")
                worker.is_ready = True
                if worker.overdue is not None:
                    worker.overdue.cancel()
                self.load_errors.pop(worker.load.function, None)
                self.unknown.discard(worker.load.function)
                if not worker.is_leaving:
                    self._post(InstanceReady(worker.load.instance, frame.load_us, tuple(frame.probes)))
            case LoadFailed():
                worker.load_error = frame.error
                self._end(worker, "load-failed")
            case Beat():
                batch = worker.batches.get(frame.batch_id)
                for job in batch.action.jobs if batch is not None else ():
                    self._post(Heartbeat(job.call_id, job.id))
            case StateRead():
                batch = worker.batches.get(frame.batch_id)
                call_id = batch.action.jobs[0].call_id if batch is not None else ""
                assert worker.process is not None
                place = self.book.place(worker.load.function, call_id, frame.scope, frame.key)
                worker.process.send(pack(StateIs(self.book.read(place))))

    def _piece(self, worker: _Worker, piece: Piece) -> None:
        """Who yields is alive, however long it takes; the controller hears of that now and then."""
        batch = worker.batches.get(piece.batch_id)
        job = next((job for job in batch.action.jobs if job.id == piece.job_id), None) if batch is not None else None
        if batch is None or job is None or not batch.is_sent:
            raise FrameError(f"a piece of job {piece.job_id} in batch {piece.batch_id}, which it does not have")
        take = self._data.pieces.get(job.call_id)
        if take is None or job.id not in self._wanted:
            assert worker.process is not None
            worker.process.send(pack(Drop(job.id)))
            return
        now_s = self._loop.time()
        if now_s - batch.told_s > BEAT_S:
            batch.told_s = now_s
            self._post(Heartbeat(job.call_id, job.id))
        take(piece.value)

    def _done(self, worker: _Worker, done: Done) -> None:
        batch = worker.batches.get(done.batch_id)
        if batch is None or not batch.is_sent or len(done.results) != len(batch.action.jobs):
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if done.state is not None:
            settled = self._settle(worker, batch, done, done.state)
            if settled is None:
                return  # it runs again
            done = settled
        if any(ref not in batch.reads for ref in done.kept):
            raise FrameError(f"{worker.load.instance} keeps what it was not given")
        if not self.ledger.accept(worker.slots, [result for result in done.results if isinstance(result, ShmRef)]):
            raise FrameError(f"{worker.load.instance} gives away slots that are not there, or not its own")
        for ref in done.kept:
            self.ledger.retire(ref)
        wanted = [job.id in self._wanted for job in batch.action.jobs]
        self._send_all(self._close(batch))  # first of all: somebody's slice is idle
        if done.spans and self.on_spans is not None:
            self.on_spans(done.batch_id, done.spans)
        outcomes = deliver(self._data, batch.action.jobs, wanted, done.results, lambda ref: worker.slots.free(ref.slot))
        self._post(BatchFinished(done.batch_id, done.device_us, outcomes))

    def _settle(self, worker: _Worker, batch: _Batch, done: Done, changes: Changes) -> Done | None:
        """What a step changes of the state becomes so now, if it is wanted. None: it is out of date, and runs again."""
        job = batch.action.jobs[0]
        verdict: LaminaError | bool = True
        if job.id in self._wanted:
            step = (job.call_id, job.scope, job.node)
            verdict = self.book.commit(batch.action.function, step, changes.reads, changes.ops)
        again = verdict is False and changes.may
        if changes.reads:
            assert worker.process is not None
            worker.process.send(pack(Settled(again)))
        if again:
            return None
        if verdict is True:
            return done
        error = verdict or Conflict("state: what was read was changed meanwhile, again and again")
        if worker.process is not None:
            worker.process.send(pack(Release([result.slot for result in done.results if isinstance(result, ShmRef)])))
        return structs.replace(done, results=[ErrorInfo(type(error).__name__, error.message)] * len(done.results))

    # ----------------------------------------------------------------------- end

    async def stop(self, grace_s: float) -> None:
        """Let what runs end within `grace_s`, then end the rest; afterwards there is no process and no file left."""
        self._is_stopping = True
        if self._batches:
            self._drained = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_s)
        self._post = lambda event: None  # nobody is to react to what follows
        self._aside.keep_off(0)
        for worker in list(self._workers.values()):
            worker.is_leaving = True
            if worker.process is not None:
                if worker.is_ready and not worker.batches:
                    worker.process.stop(self._limits.unload_s)
                else:
                    worker.process.kill()
        if self._processes:
            await asyncio.wait([process.finished for process in self._processes])
        for tap in self._taps:
            tap.close()
        self.ledger.close()


def how_it_ended(process: WorkerProcess | None) -> str:
    if process is None:
        return "could not be started"
    if not process.exited.done():
        return "closed its connection"
    status = process.exited.result()
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
