"""Process engine: the base of engines whose functions run in child processes, one each (CPU) or all in one (GPU).

It owns what outlives a process: the instances and their load timeouts, the batches in flight and the values they read, the log
pipes. A subclass says which process a batch goes to, and what ends with a process. All of it happens on the loop's thread, so
nothing here is locked and nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakSet

from msgspec import Struct, structs

from lamina import encoding
from lamina.core.actions import Action, DropJob, Kill, Load, Resize, StartBatch, Unload
from lamina.core.events import BatchFailed, BatchFinished, Event, Heartbeat, InstanceReady
from lamina.core.token_bucket import TokenBucket
from lamina.drivers.engine import EngineShared, JobValues
from lamina.engines.inflight import (
    BatchT,
    InFlightBatches,
    checked_changes,
    commit_errors,
    deliver_results,
    encode_jobs,
    read_changes,
    read_spans,
)
from lamina.ipc.framing import FrameError
from lamina.sdk.app_state import Verdict
from lamina.state.kv_state import StateAccess, StateTable
from lamina.units import MIB
from lamina.values.references import DeviceRef, ErrorInfo, ShmRef
from lamina.values.slot_refs import DeviceSlots, SlotReferences, WorkerSlots
from lamina.worker.output_tags import split_tag
from lamina.worker.protocol import BatchDone, JobFrame, StateRead, StateValue

log = logging.getLogger("lamina")

_READ_BYTES = 65_536
_LINE_BYTES = 16_384
OUTPUT_BYTES_PER_S, OUTPUT_BURST_BYTES = 256 * 2**10, 4 * 2**20
"""What one process may print: a function that prints in a loop fills no disk, and takes the loop no time."""
"""A longer line is cut: a function that prints without an end must not fill our memory."""

OnLine = Callable[[str, tuple[str, ...], str], None]
"""Function and calls, where that is known, and what was printed."""


class WorkerLimits(Struct, frozen=True, kw_only=True):
    pool_bytes: int = 1024 * MIB  #: shared memory for values of calls
    worker_pool_bytes: int = 256 * MIB  #: and for the results of each process
    spill_bytes: int = 4096 * MIB  #: on disk, for values of calls that find no room in memory
    worker_spill_bytes: int = 2048 * MIB  #: and for such results of each worker
    load_s: float = 300.0  #: a load that takes longer has failed
    unload_s: float = 5.0  #: from asking a process to exit to killing it


@dataclass(slots=True, eq=False)
class InstanceHandle:
    """One instance of a function, from load to loss: is it ready, and why is it lost?"""

    load: Load
    is_ready: bool = False
    is_unloading: bool = False  #: its end is expected, and not reported
    load_error: ErrorInfo | None = None
    _kill_reason: str = ""
    _load_timeout: asyncio.TimerHandle | None = None

    def arm_load_timeout(self, loop: asyncio.AbstractEventLoop, load_s: float, kill: Callable[[], None]) -> None:
        """Call `kill` if it is not loaded by then. `loop` may stand still: the profiler runs it for its answers only."""

        def too_late() -> None:
            self.load_error = ErrorInfo("LoadTimeout", f"not loaded within {load_s:g} s")
            self.set_kill_reason("load-failed")
            kill()

        self._load_timeout = loop.call_later(load_s, too_late)

    def cancel_load_timeout(self) -> None:
        """The function is loaded, or never will be."""
        if self._load_timeout is not None:
            self._load_timeout.cancel()

    def fail_load(self, error: ErrorInfo) -> None:
        """Remember why it cannot be loaded, until its process is gone and that is reported."""
        self.load_error = error

    def resize(self, mask: int) -> None:
        self.load = structs.replace(self.load, mask=mask)

    def set_kill_reason(self, reason: str) -> None:
        """Remember why it is being killed: the first reason is the one reported."""
        self._kill_reason = self._kill_reason or reason

    @property
    def loss_reason(self) -> str:
        return self._kill_reason or ("worker-lost" if self.is_ready else "load-failed")


InstanceT = TypeVar("InstanceT", bound=InstanceHandle)


class ProcessEngine(Generic[InstanceT, BatchT]):
    """Base of the CPU and the GPU engine. `unprofiled` are functions to be timed when they are loaded first; `state` is what
    functions keep between calls."""

    def __init__(
        self,
        app: str,
        references: SlotReferences,
        limits: WorkerLimits,
        shared: EngineShared,
        unprofiled: Iterable[str],
        state: StateAccess | None,
    ) -> None:
        self._state: StateAccess = state or StateTable("")
        self.shared, self.references = shared, references
        self._app, self._limits = app, limits
        self._unprofiled = set(unprofiled)
        self._instances: dict[str, InstanceT] = {}
        self._batches = InFlightBatches[BatchT](references)
        self._log_pipes: WeakSet[LogPipe] = WeakSet()  #: until their last writer has gone
        self._is_stopping = False
        self._post: Callable[[Event], None] = _ignore

    @property
    def load_errors(self) -> dict[str, ErrorInfo]:
        return self.shared.load_errors

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._post, self._values, self._deadline_us = post, values, deadline_us

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case DropJob():
                if self._batches.drop_job(action.job_id):
                    self._on_job_dropped(action.job_id)
            case Load():
                if not self._is_stopping:
                    self._load(action)
            case Unload() | Kill() | Resize():
                instance = self._instances.get(action.instance)
                if instance is None:  # lost; that news is on its way
                    return
                match action:
                    case Unload():
                        self._unload(instance)
                    case Kill():
                        self._kill(instance, action.reason)
                    case Resize():
                        self._resize(instance, action.mask)
            case _:
                pass

    async def stop(self, grace_s: float) -> None:
        """Drain within `grace_s`, then kill the rest; afterwards there is no process left."""
        self._is_stopping = True
        await self._batches.wait_drained(grace_s)
        self._post = _ignore  # nothing is to react to what follows
        for instance in self._instances.values():
            instance.cancel_load_timeout()
        await self._stop_processes()
        for pipe in list(self._log_pipes):
            pipe.close()

    # ------------------------------------------------------------- what a subclass does

    def _load(self, action: Load) -> None:
        raise NotImplementedError

    def _unload(self, instance: InstanceT) -> None:
        raise NotImplementedError

    def _kill(self, instance: InstanceT, reason: str) -> None:
        raise NotImplementedError

    def _resize(self, instance: InstanceT, mask: int) -> None:
        """Move a standing slice. Mostly nothing is to be done: every batch brings its own mask."""

    def _send_batch(self, instance: InstanceT, action: StartBatch, jobs: list[JobFrame], reads: list[ShmRef]) -> None:
        """Raises FrameError, with nothing changed, if the batch is too large to be sent."""
        raise NotImplementedError

    def _device_owner(self) -> str:
        """Owner of the values that a batch here may read on the device; "" without any."""
        return ""

    def _user(self, instance: InstanceT) -> int:
        """User that an instance runs as; 0: the server's."""
        return 0

    def _on_job_dropped(self, job_id: int) -> None:
        """The result of a job in an open batch is not wanted any more."""

    def _on_closed(self, batch: BatchT) -> None:
        """A batch has ended, and its slice is free."""

    async def _stop_processes(self) -> None:
        raise NotImplementedError

    # ---------------------------------------------------------------- written once

    def _log_pipe(self, instance: str, function: str = "") -> LogPipe | None:
        """A pipe for the output of a process, if it is collected. A process of many functions tags its lines with theirs."""
        if not self.shared.collects_output:
            return None
        shared = self.shared
        pipe = LogPipe(
            self._loop,
            lambda tagged, calls, line: shared.on_output(function or tagged, instance, calls, line),
            echo=shared.echoes_output,
        )
        self._log_pipes.add(pipe)
        return pipe

    def _on_loaded(self, instance: InstanceT, load_us: int, probes: Iterable[tuple[int, int, int]]) -> None:
        instance.is_ready = True
        instance.cancel_load_timeout()
        self.load_errors.pop(instance.load.function, None)
        self._unprofiled.discard(instance.load.function)
        self.shared.probe_times[instance.load.function] = probes = tuple(probes)
        if not instance.is_unloading:
            self._post(InstanceReady(instance.load.instance, load_us, probes))

    def _start(self, action: StartBatch) -> None:
        instance = self._instances.get(action.instance)
        if instance is None:  # lost; the controller is about to hear of it
            return
        where = (self._device_owner(), self._user(instance))
        jobs, reads, lost = encode_jobs(self._values, self.references, action, self._deadline_us, self.shared.origin, *where)
        try:
            self._send_batch(instance, action, jobs, reads)
            self._batches.note_lost(action.batch_id, lost)
        except FrameError as error:
            log.warning("batch %d of %s is not sent: %s", action.batch_id, action.function, error)
            self.references.unpin(reads)
            self._post(BatchFailed(action.batch_id, error.code))  # smaller ones may fit

    def _on_heartbeat(self, batch: BatchT | None, alive_only: bool = False) -> None:
        for job in batch.action.jobs if batch is not None else ():
            self._post(Heartbeat(job.call_id, job.id, alive_only))

    # ---------------------------------------------------------------------- state

    def _answer_state_read(
        self, function: str, batch: BatchT | None, asked: StateRead, send: Callable[[StateValue], None]
    ) -> None:
        """Answer a read of a job; of a probe, which is no batch, too."""
        jobs = batch.action.jobs if batch is not None else ()
        if batch is not None and asked.place >= len(jobs):
            raise FrameError(f"a read of job {asked.place} in batch {asked.batch_id}, which it does not have")
        call_id = jobs[asked.place].call_id if jobs else ""
        answer = partial(StateValue, asked.question)
        self._state.ask(function, call_id, asked.scope, asked.key, lambda cell: send(answer(cell)))

    def _commit_state(
        self, batch: BatchT, done: BatchDone, slots: WorkerSlots, then: Callable[[dict[int, ErrorInfo]], None]
    ) -> None:
        """Commit what the jobs of a batch have changed of the state; `then` gets errors in place of results, by place.

        A job's changes are made if what it has read is unchanged, and its result is wanted at all. Otherwise it alone runs again,
        or fails."""
        jobs = batch.action.jobs
        changes, unread = read_changes(done.state)
        if any(place >= len(jobs) for place in unread):
            raise FrameError(f"changes of a job that batch {done.batch_id} does not have")
        if any(isinstance(result, ShmRef) and result.owner != slots.owner for result in done.results):
            raise FrameError(f"{batch.action.instance} gives away slots that are not its own")  # a node shows them to its leader
        wanted = [
            one for one in checked_changes(done.batch_id, changes, len(jobs)) if self._batches.is_wanted(jobs[one.place].id)
        ]

        def decided(verdicts: dict[int, Verdict]) -> None:
            if batch.action.batch_id in self._batches.open:  # else its process was lost while the verdicts were on their way
                then(commit_errors(jobs, verdicts, lambda job: job.call_id not in self._values.pieces) | unread)

        if wanted:
            steps = [(job.call_id, job.scope, job.node) for job in jobs]
            results = [unread.get(place, result) for place, result in enumerate(done.results)] if unread else done.results
            self._state.submit(batch.action.function, steps, structs.replace(done, results=results), wanted, decided)
        else:
            then(unread)

    def _on_results(
        self,
        batch: BatchT,
        done: BatchDone,
        slots: WorkerSlots,
        free: Callable[[ShmRef], None],
        device: DeviceSlots | None = None,
        errors: Mapping[int, ErrorInfo] | None = None,
    ) -> None:
        """Accept the results of a batch from the process with these `slots`, and deliver them; `free` what is not wanted, and
        that in whose place there are `errors`.

        Raises FrameError, with nothing changed, if the process gives or keeps what is not its own."""
        name = batch.action.instance
        on_device = [result for result in done.results if isinstance(result, DeviceRef)]
        if any(ref not in batch.reads for ref in done.still_viewed):
            raise FrameError(f"{name} keeps what it was not given")
        if on_device and (device is None or any(ref.owner != device.owner or ref.slot in device.held for ref in on_device)):
            raise FrameError(f"{name} gives values that are not its own")
        if not self.references.accept_results(slots, [result for result in done.results if type(result) is ShmRef]):
            raise FrameError(f"{name} gives away slots that are not there, or not its own")
        if device is not None:
            device.held.update(ref.slot for ref in on_device)
        for ref in done.still_viewed:
            self.references.retire(ref)
        wanted = self._batches.close(batch)
        self._on_closed(batch)
        if done.spans and self.shared.on_spans is not None:
            self.shared.on_spans(done.batch_id, read_spans(done.spans))
        results = done.results
        for place, error in errors.items() if errors else ():
            refused = results[place]
            if isinstance(refused, ShmRef):
                free(refused)
            results[place] = error
        changed = [place for place, _ in done.state]
        outcomes = deliver_results(self._values, batch.action.jobs, wanted, results, free, batch.lost, changed)
        self._post(BatchFinished(done.batch_id, done.device_us, outcomes, done.is_warmup))


class LogPipe:
    """A pipe: give `fd` to the child, then call `close_child_end`. It ends by itself when its last writer has gone.

    `on_line` gets every line; with `echo` it also goes to stderr, with control characters escaped. A process may print `burst`
    bytes at once and `bytes_per_s` in the long run; what is beyond is read, counted and dropped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_line: OnLine,
        *,
        echo: bool = True,
        bytes_per_s: int = OUTPUT_BYTES_PER_S,
        burst: int = OUTPUT_BURST_BYTES,
    ) -> None:
        self._loop = loop
        self._room = TokenBucket(bytes_per_s / 1e6, burst, burst, int(loop.time() * 1e6))
        self._dropped_bytes = 0
        self._on_line = on_line
        self._echo = echo
        self._rest = b""
        self._ours, self.fd = os.pipe()
        os.set_blocking(self._ours, False)
        loop.add_reader(self._ours, self._read)

    def close_child_end(self) -> None:
        os.close(self.fd)

    def _read(self) -> None:
        try:
            data = os.read(self._ours, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        if not self._has_room(len(data)):
            self._dropped_bytes += len(data)
            self._rest = b""
            return
        if self._dropped_bytes:
            self._deliver([b"(%d bytes of output were dropped here: too many at once)" % self._dropped_bytes])
            self._dropped_bytes = 0
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._deliver(lines)

    def _has_room(self, size: int) -> bool:
        now_us = int(self._loop.time() * 1e6)
        if self._room.level(now_us) < size:
            return False
        self._room.charge(now_us, size)
        return True

    def _deliver(self, lines: list[bytes]) -> None:
        found = [split_tag(line[:_LINE_BYTES].decode("utf-8", "replace")) for line in lines]
        if self._echo:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("".join(f"{encoding.escape_controls(text)}\n" for _, _, text in found))
                sys.stderr.flush()
        for function, calls, text in found:
            self._on_line(function, calls, text)

    def close(self) -> None:
        """Deliver what is still in it, and close."""
        if self._ours < 0:
            return
        self._loop.remove_reader(self._ours)
        os.close(self._ours)
        self._ours = -1
        if self._rest:
            self._deliver([self._rest])
            self._rest = b""


def _ignore(event: Event) -> None:
    pass
