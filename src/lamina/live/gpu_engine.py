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
from lamina.live.batches import Batches, OpenBatch
from lamina.live.cores import allowed_cores
from lamina.live.frames import Beat, DeviceRef, Done, ErrorInfo, FrameError, ShmRef
from lamina.live.gpu_frames import (
    Fetched,
    FromExecutor,
    GpuSetup,
    Hung,
    Imported,
    Loaded,
    LoadOne,
    MoveTo,
    NotLoaded,
    RunOn,
    StandingBy,
    Unloaded,
    UnloadOne,
    Up,
    Usage,
    gateway_reader,
)
from lamina.live.gpu_lives import Life, Lives
from lamina.live.jobs import OriginOf, deliver, job_frames
from lamina.live.ledger import Ledger
from lamina.live.local import LocalLimits, OnPrinted
from lamina.live.process import Kind, how_it_ended
from lamina.live.tap import Tap
from lamina.live.timer import clock_us
from lamina.sdk.spans import Inner
from lamina.types import DeviceSpec

log = logging.getLogger("lamina")

SPARE_MIB = 4096
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
    lost_because: str = ""
    overdue: asyncio.TimerHandle | None = None
    asked_mask: int = 0  #: its standing slice, as the executor was told when it was to load it

    def settle(self) -> None:
        """Cancel the load timeout: the load has ended, well or not."""
        if self.overdue is not None:
            self.overdue.cancel()


class GpuEngine:
    def __init__(
        self,
        app: str,
        device: DeviceSpec,
        slicer: str,
        ledger: Ledger,
        *,
        ordinal: int = 0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.device = device
        self.load_errors: dict[str, ErrorInfo] = {}
        self.deadline_us: Callable[[str], int] = lambda call_id: 0
        self.origin: OriginOf | None = None  #: for functions that ask whose request they serve
        self.on_spans: Callable[[int, list[Inner]], None] | None = None  #: (batch, parts of it): who exports them
        self.on_line: OnPrinted | None = None  #: who reads what functions print
        self.echo_lines = True  #: it goes to stderr all the same
        self._tap: Tap | None = None
        self.unknown: set[str] = set()
        self.usage: Usage | None = None  #: what the executor said last
        self.loads: dict[str, dict[str, float]] = {}  #: by function: where the time of its last load went, in milliseconds
        self.apps: dict[str, str] = {}  #: by function: where it is loaded from now, if not from `app`
        self._app, self._slicer, self._ordinal = app, slicer, ordinal
        self._ledger = ledger
        self._limits = LocalLimits()
        self._kind = Kind("lamina.live.gpu_process", gateway_reader, environment or {}, cores=allowed_cores())
        self._lives: Lives | None = None  #: from `start` on
        self._instances: dict[str, _Instance] = {}
        self._batches = Batches[OpenBatch](ledger)
        self._is_stopping = False

    @property
    def devices(self) -> list[DeviceSpec]:
        return [self.device]

    @property
    def pid(self) -> int:
        """Process id of the executor; 0 while there is none."""
        life = self.life
        return life.process.pid if life is not None and life.process is not None else 0

    @property
    def restarts(self) -> int:
        """Restarts of the executor; the first start is none."""
        return self._lives.restarts if self._lives is not None else -1

    @property
    def life(self) -> Life | None:
        """The executor process that owns the device at this moment."""
        return self._lives.now if self._lives is not None else None

    @property
    def standing_by(self) -> list[str] | None:
        """Functions that are ready in the hot standby; None without one."""
        return self._lives.standing_by if self._lives is not None else None

    @property
    def replaced_s(self) -> float:
        """From the last loss of the executor until the device was open again."""
        return self._lives.replaced_s if self._lives is not None else 0.0

    async def start(self, post: Callable[[Event], None], data: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._data = data
        self._listen()
        room = self._slicer in TWINS or self.device.memory_mib >= 10 * SPARE_MIB
        opens_ahead = room and not self._kind.environment  # of MPS
        self._lives = Lives(self._setup, self._kind, self._ledger, self._frame, self._lost, opens_ahead=opens_ahead)
        self._lives.take_over()  # opening a device takes seconds: it need not wait for the first load

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case DropJob():
                self._batches.drop(action.job_id)
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

    def _listen(self) -> None:
        """Open one log pipe for all executors there will be; tags of the lines say which function it was."""
        on_line, device = self.on_line, self.device.id
        if on_line is not None:
            self._tap = Tap(self._loop, lambda name, calls, line: on_line(name, device, calls, line), echo=self.echo_lines)
            self._kind = replace(self._kind, output=self._tap.fd)

    def _setup(self, life: Life) -> GpuSetup:
        return GpuSetup(
            app=self._app,
            device=self.device.id,
            slicer=self._slicer,
            folder=self._ledger.folder.path,
            owner=life.slots.owner,
            values_owner=life.values.owner,
            pool_bytes=self._limits.worker_pool_bytes,
            ordinal=self._ordinal,
            soft=self.device.limits.soft,
            marked=self._tap is not None,
        )

    def _lost(self, life: Life) -> None:
        """Handle the end of the executor: all its functions are lost, whatever ended it."""
        assert self._lives is not None
        self.usage = None
        for batch in list(self._batches.open.values()):
            self._batches.close(batch)
        self._lives.close(life)
        instances, self._instances = self._instances, {}
        for instance in instances.values():
            instance.settle()
        if self._is_stopping:
            return
        ended = how_it_ended(life.process)
        log.warning("the executor of %s is lost, with %d functions: it %s", self.device.id, len(instances), ended)
        for fetched in [then for waiting in life.fetching.values() for then in waiting]:
            fetched()
        if life.is_up:
            self._lives.take_over()
        for name, instance in instances.items():
            reason = instance.lost_because or ("worker-lost" if instance.is_ready else "load-failed")
            if not instance.is_ready:
                said = ErrorInfo("ExecutorLost", f"the executor {ended} while it was loading")
                self.load_errors.setdefault(instance.load.function, said)
            self._post(InstanceLost(name, reason))

    def _send(self, *frames: Any) -> None:
        if self.life is not None:
            self.life.send(*frames)

    # ---------------------------------------------------------------- instances

    def _load(self, action: Load) -> None:
        if self._is_stopping:
            return
        if self._lives is not None and self._lives.now is None:
            self._lives.take_over()
        instance = self._instances[action.instance] = _Instance(action)
        instance.overdue = self._loop.call_later(self._limits.load_s, self._overdue, instance)
        if self.life is not None and self.life.is_up:
            self._send_load(instance)

    def _send_load(self, instance: _Instance) -> None:
        load = instance.load
        instance.asked_mask = load.mask
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
        instance.settle()
        del self._instances[name]
        self._send(UnloadOne(name))
        self._stand()

    def _stand(self) -> None:
        """Tell the standby what is loaded: it has the same ready."""
        assert self._lives is not None
        models = [instance.load for instance in self._instances.values() if instance.is_model]
        self._lives.stand([(load.function, load.mask, self.apps.get(load.function, "")) for load in models])

    def _resize(self, action: Resize) -> None:
        """Move an instance's standing slice. Every batch brings its slice; graphs for the new one are made before it is used."""
        instance = self._instances.get(action.instance)
        if instance is not None and instance.load.mask != action.mask:
            instance.load = msgspec.structs.replace(instance.load, mask=action.mask)
            if instance.is_ready:
                self._send(MoveTo(action.instance, action.mask))
                self._stand()

    def _kill(self, action: Kill) -> None:
        instance = self._instances.get(action.instance)
        if instance is not None:
            log.warning("%s is %s: the executor of %s is ended", action.instance, action.reason, self.device.id)
            self._end(action.reason, instance)

    def _end(self, reason: str, instance: _Instance) -> None:
        instance.lost_because = reason
        if self.life is not None and self.life.process is not None:
            self.life.process.kill()

    # ------------------------------------------------------------------ batches

    def _start(self, action: StartBatch) -> None:
        life, instance = self.life, self._instances.get(action.instance)
        if life is None or instance is None:  # lost; that news is on its way to whoever decided this
            return
        jobs, reads = job_frames(self._data, self._ledger, action, self.deadline_us, self.origin, life.values.owner)
        keep = [self._may_stay(job) for job in action.jobs]
        try:
            limit_us = max(HANG_FLOOR_US, HANG_TIMES * action.predicted_us) if action.predicted_us else 0
            self._send(RunOn(action.batch_id, action.instance, action.mask, action.after, jobs, keep, limit_us))
        except FrameError as error:
            log.warning("batch %d of %s is not sent: %s", action.batch_id, action.function, error)
            self._ledger.unpin(reads)
            self._post(BatchFailed(action.batch_id, error.code))  # smaller ones may fit
            return
        self._batches.add(OpenBatch(action, reads))

    def _may_stay(self, job: JobRef) -> bool:
        """Is the result read as a whole, and only by functions that are loaded here?"""
        readers = self._data.readers(job)
        return bool(readers) and readers <= {instance.load.function for instance in self._instances.values()}

    # ------------------------------------------------------------------- values

    def missing(self, action: StartBatch) -> list[DeviceRef]:
        """Values of this device that a batch elsewhere needs, and that have not been fetched yet."""
        if self.life is None or not self.life.values.held:
            return []
        return self.life.missing(stored for job in action.jobs for _, stored in self._data.inputs(job).leaves)

    def fetch(self, refs: list[DeviceRef], then: Callable[[], None]) -> None:
        """Call `then` when all of them are here, or lost with the device."""
        if self.life is None:
            then()
        else:
            self.life.fetch(refs, then)

    # ------------------------------------------------------------------- frames

    def _frame(self, life: Life, frame: FromExecutor) -> None:
        match frame:
            case Done():
                self._done(life, frame)
            case Loaded():
                self._loaded(frame)
            case NotLoaded():
                self._not_loaded(frame)
            case Up():
                assert self._lives is not None
                self._lives.is_up(life)
                for instance in self._instances.values():
                    self._send_load(instance)
            case Fetched():
                if isinstance(frame.value, ShmRef) and not self._ledger.accept(life.slots, [frame.value]):
                    raise FrameError(f"{self.device.id} gives away a slot that is not its own")
                life.fetched(frame)
            case Imported():
                assert self._lives is not None
                self._lives.imported(frame.names)
            case Usage():
                self.usage = frame
            case Hung():
                self._hung(frame)
            case Beat():
                batch = self._batches.open.get(frame.batch_id)
                for job in batch.action.jobs if batch is not None else ():
                    self._post(Heartbeat(job.call_id, job.id))
            case Unloaded() | StandingBy():
                pass

    def _hung(self, frame: Hung) -> None:
        batch = self._batches.open.get(frame.batch_id)
        instance = self._instances.get(batch.action.instance) if batch is not None else None
        if instance is not None:
            log.warning("batch %d of %s hangs", frame.batch_id, instance.load.function)
            self._end("hung", instance)

    def _loaded(self, frame: Loaded) -> None:
        instance = self._instances.get(frame.instance)
        if instance is None:  # unloaded while it was loading
            return
        instance.is_ready, instance.is_model = True, frame.is_model
        parts = {what: round(took_us / 1000, 1) for what, took_us in frame.parts}
        self.loads[instance.load.function] = {**parts, "all": round(frame.load_us / 1000, 1)}
        if frame.is_model:
            self._stand()
            if instance.load.mask != instance.asked_mask:
                self._send(MoveTo(frame.instance, instance.load.mask))
        instance.settle()
        self.load_errors.pop(instance.load.function, None)
        self.unknown.discard(instance.load.function)
        learnt_us = 0 if frame.stood_by else frame.load_us  # how long a load takes is not learnt from one that was done before
        self._post(InstanceReady(frame.instance, learnt_us, tuple(frame.probes)))

    def _not_loaded(self, frame: NotLoaded) -> None:
        instance = self._instances.pop(frame.instance, None)
        if instance is not None:
            instance.settle()
            self.load_errors[instance.load.function] = frame.error
            self._post(InstanceLost(frame.instance, "load-failed"))

    def _done(self, life: Life, done: Done) -> None:
        batch = self._batches.open.get(done.batch_id)
        if batch is None or len(done.results) != len(batch.action.jobs):
            raise FrameError(f"{len(done.results)} results for batch {done.batch_id}, which it does not have")
        if any(ref not in batch.reads for ref in done.kept):
            raise FrameError(f"{self.device.id} keeps what it was not given")
        stays = [result for result in done.results if isinstance(result, DeviceRef)]
        shared = [result for result in done.results if type(result) is ShmRef]
        if any(ref.owner != life.values.owner or ref.slot in life.values.held for ref in stays):
            raise FrameError(f"{self.device.id} gives values that are not its own")
        if not self._ledger.accept(life.slots, shared):
            raise FrameError(f"{self.device.id} gives away slots that are not there, or not its own")
        life.values.held.update(ref.slot for ref in stays)
        for ref in done.kept:
            self._ledger.retire(ref)
        wanted = self._batches.close(batch)
        if done.spans and self.on_spans is not None:
            self.on_spans(done.batch_id, done.spans)
        outcomes = deliver(self._data, batch.action.jobs, wanted, done.results, self._ledger.release)
        self._post(BatchFinished(done.batch_id, done.device_us, outcomes))

    # ---------------------------------------------------------------------- end

    async def stop(self, grace_s: float) -> None:
        self._is_stopping = True
        await self._batches.drained(grace_s)
        self._post = lambda event: None
        for instance in self._instances.values():
            instance.settle()
        if self._lives is not None:
            await self._lives.stop(self._limits.unload_s, is_idle=not self._batches.open)
        if self._tap is not None:
            self._tap.close_theirs()
            self._tap.close()
