"""Executor loop: the serving thread of the process that owns one GPU, with the batches of many functions on slices of it.

One thread takes frames, starts batches and polls for what has ended; it waits for nothing but events. How functions are loaded,
each in a thread of its own, is in `model_loader`; a batch without a graph runs in that thread too, eagerly; callables of users
run in one thread per slice. An error of the device ends the process at once, because nothing it says after that can be believed:
the gateway starts another, and retries what may be retried.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lamina.core.scheduling.jobs import DEADLINE_GRACE_US
from lamina.gpu.device_telemetry import DeviceTelemetry
from lamina.gpu.device_values import DeviceValues
from lamina.gpu.executor import ExecutorLost, FinishedBatch, SliceExecutor
from lamina.gpu.gc_schedule import GcSchedule
from lamina.gpu.hang_detector import HangDetector
from lamina.gpu.hot_standby import import_all
from lamina.gpu.loaded_function import CallableBatch, LoadedFunction, SliceThread
from lamina.gpu.model_loader import ModelLoader
from lamina.gpu.protocol import (
    BatchHung,
    ExecutorReady,
    ExecutorSetup,
    ExecutorUsage,
    FetchValue,
    ForgetValues,
    ImportModules,
    LoadFunction,
    MoveSlice,
    PrepareStandby,
    Promote,
    RunOnSlice,
    RunPaused,
    UnloadFunction,
)
from lamina.gpu.slicer import Slicer
from lamina.gpu.state_reads import StateReads
from lamina.gpu.weight_cache import NoDeviceMemory
from lamina.ipc.framing import FrameChannel, StopProcess
from lamina.sdk.app_state import WHICH_REQUEST, BatchState
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.spans import InnerSpan
from lamina.values.references import ErrorInfo, ReleaseSlots, ShmRef
from lamina.values.shm import INLINE_BYTES, ShmPool, ShmReader
from lamina.worker.job_codec import decode_arguments, encode_results, packed_changes, packed_spans
from lamina.worker.protocol import BatchDone, BatchHeartbeat, StateValue

USAGE_EVERY_S = 1.0

IDLE_S = 0.25
"""Without a batch for so long, graphs are captured without pauses: between two calls of a busy device the next would meet it."""

STUCK_US = 30_000_000
"""A batch so far past its deadlines has a primary thread that hangs: it sends no heartbeat any more, and the controller ends
the process."""


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch in flight."""

    frame: RunOnSlice
    function: LoadedFunction
    outputs: list[Any]
    places: list[int]  #: of the jobs that run, in the order of the executor's items
    reads: list[ShmRef]
    state: BatchState
    keeps: bool = False
    is_warmup: bool = False  #: it ran without a graph, and the next ones will have one
    is_ordered_by_slice: bool = False  #: its slice will run it before whatever comes to that slice later
    is_waiting: bool = False  #: for its primary thread, for room on the device, or for the state
    ticket: int = 0  #: of the executor; 0: none
    followers: list[Callable[[], None]] = field(default_factory=list)  #: to be called when it has ended, and been told
    spans: list[InnerSpan] = field(default_factory=list)  #: parts of it that the function wants to be seen


class ExecutorLoop:
    def __init__(
        self, setup: ExecutorSetup, channel: FrameChannel, slicer: Slicer, executor: SliceExecutor, app: Any = None
    ) -> None:
        self.leaving = False
        self._is_standby = True  #: until it is told to go
        self.wake, self.woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._setup, self._channel = setup, channel
        self._slicer, self._executor = slicer, executor
        self._pool = ShmPool(setup.folder, setup.owner, setup.pool_bytes)
        self._reader = ShmReader(setup.folder)
        self._values = DeviceValues(setup.values_owner, self._pool, self._reader)
        self._gc_schedule = GcSchedule()
        self._loader = ModelLoader(
            setup.app,
            slicer,
            executor,
            self._gc_schedule,
            send=channel.send,
            call_soon=self.call_soon,
            submit=self._submit,
            is_idle=lambda: not self._open and time.monotonic() - self._last_batch_s > IDLE_S,
            freed=self._retry_waiting_for_memory,
        )
        if app is not None:
            self._loader.apps[setup.app] = app
        self._open: dict[int, _Batch] = {}
        self._last_batch_s = 0.0  #: when one ended last
        self._waiting_for_memory: list[tuple[_Batch, list[Any]]] = []  #: batches whose weights find no room beside those in use
        self._slice_threads: dict[int, SliceThread] = {}
        self._callbacks: queue.SimpleQueue[Any] = queue.SimpleQueue()  #: from other threads, to be called here
        self._state_reads = StateReads(channel.send)
        self._said_usage_s = 0.0
        self._hang_detector = HangDetector()
        self._telemetry: DeviceTelemetry | None = None
        if not setup.opens_ahead:
            self._promote()

    # ---------------------------------------------------------------- the loop

    def serve(self) -> None:
        try:
            self._serve()
        finally:
            if self._telemetry is not None:
                self._telemetry.end()

    def _serve(self) -> None:
        self._state_reads.begin()
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while not self.leaving or self._open:
            frame = self._channel.next_buffered()
            if frame is not None:
                self._on_frame(frame)
                continue
            is_busy = self._executor.has_work
            ready = dict(poller.poll(0 if is_busy else 10 if self._loader.captures.has_work else 100 if self._open else 1000))
            if ready.pop(self.wake, 0):
                os.read(self.wake, 4096)
            if ready and not self._channel.read():
                return
            while not self._callbacks.empty():
                self._callbacks.get()()
            if is_busy or self._executor.has_work:
                self._poll_executor()
            self._loader.step()
            if self._gc_schedule.collect_if_due(time.monotonic(), is_idle=not self._open, is_loading=self._loader.is_loading):
                self._executor.models.trim()
            for batch_id in self._hang_detector.find_hung(time.monotonic(), self._paused_batches()):
                self._channel.send(BatchHung(batch_id))
            if not self._is_standby:
                self._report_usage()

    def _paused_batches(self) -> set[int]:
        tickets = self._executor.paused
        return {batch_id for batch_id, batch in self._open.items() if batch.ticket in tickets} if tickets else set()

    def _promote(self) -> None:
        """Begin to serve: the device is ours."""
        self._is_standby = False
        self._loader.standby.on_promoted()
        self._telemetry = self._slicer.telemetry()
        if self._telemetry is not None:
            self._telemetry.begin()
        self._channel.send(ExecutorReady(os.getpid(), self._slicer.device.memory_mib))

    def _on_frame(self, frame: Any) -> None:
        match frame:
            case RunOnSlice():
                self._run(frame)
            case Promote():
                self._promote()
            case ImportModules():
                import_all(frame.names)
            case PrepareStandby():
                self._loader.standby.prepare(frame.functions)
            case LoadFunction():
                self._loader.load(frame)
            case UnloadFunction():
                self._loader.unload(frame.instance)
            case MoveSlice():
                self._loader.move(frame.instance, frame.mask)
            case StateValue():
                self._state_reads.on_answer(frame)
            case FetchValue():
                self._channel.send(self._values.fetch(frame.slot))
            case ForgetValues():
                self._values.remove(frame.slots)
            case ReleaseSlots():
                self._pool.release(frame)
            case StopProcess():
                self.leaving = True

    def call_soon(self, work: Any) -> None:
        """Run a callback in the serving thread; from any thread."""
        self._callbacks.put(work)
        with contextlib.suppress(BlockingIOError):  # so many wake-ups are on their way that one more tells nothing
            os.write(self.woken, b"!")

    # ------------------------------------------------------------------- batches

    def _run(self, frame: RunOnSlice) -> None:
        loaded = self._loader.functions.get(frame.instance)
        before = self._open.get(frame.after)
        if before is not None and not _is_ordered_by_slice(before, frame, loaded):
            before.followers.append(lambda: self._run(frame))
            return
        if loaded is None:
            lost = ErrorInfo("UnknownTarget", f"{frame.instance} is not loaded here")
            self._channel.send(BatchDone(frame.batch_id, 0, [lost] * len(frame.jobs)))
            return
        outputs, calls = self._calls(frame, loaded)
        reads = [stored for job in frame.jobs for _, stored in job.leaves if type(stored) is ShmRef]
        state = BatchState(partial(self._state_reads.read, frame.batch_id))
        batch = self._open[frame.batch_id] = _Batch(frame, loaded, outputs, list(calls), reads, state)
        loaded.on_batch_started(frame.batch_id)
        if loaded.model is None:
            self._run_callable(batch, list(calls.values()))
        else:
            self._run_model(batch, loaded.model, list(calls.values()))

    def _calls(self, frame: RunOnSlice, loaded: LoadedFunction) -> tuple[list[Any], dict[int, dict[str, Any]]]:
        outputs: list[Any] = [None] * len(frame.jobs)
        calls: dict[int, dict[str, Any]] = {}
        open_value = self._values.open if loaded.takes_device_values else self._values.open_on_host
        for index, job in enumerate(frame.jobs):
            try:
                if job.error is None:
                    calls[index] = decode_arguments(job, open_value)
                else:
                    outputs[index] = job.error
            except Exception as error:
                outputs[index] = error
        return outputs, calls

    def _run_model(self, batch: _Batch, model: Any, calls: list[dict[str, Any]]) -> None:
        if model.has_host_code:
            self._run_host_code(batch, lambda: model.rows(calls), lambda rows: self._on_rows(batch, model, rows))
        else:
            self._on_rows(batch, model, model.rows(calls))

    def _run_host_code(self, batch: _Batch, work: Callable[[], list[Any]], then: Callable[[list[Any]], None]) -> None:
        """Run `pre` or `post` of a model for a batch: here; or in a thread of its function, if that is known to read the state,
        which this thread cannot wait for."""
        context, before = self._context(batch), batch.state.checkpoint()

        def run() -> list[Any]:
            with active_context(context):
                return work()

        if not batch.function.reads_state:
            found = self._state_reads.try_here(run)
            if found is not None:
                then(found)
                return
            batch.state.roll_back(before)
            batch.function.on_state_read()
        batch.is_waiting = True

        def run_there() -> None:
            try:
                found = run()
            except BaseException as error:  # SystemExit too: a function may end its call, not its executor
                found = [RuntimeError(f"{type(error).__name__}: {error}")] * len(batch.places)
            self.call_soon(lambda: then(found))

        batch.function.run_on_host(run_there)

    def _context(self, batch: _Batch) -> BatchContext:
        frame = batch.frame
        jobs = [frame.jobs[place] for place in batch.places]
        ends_s = min((job.deadline_us for job in jobs if job.deadline_us), default=math.inf) / 1e6
        transaction = WHICH_REQUEST if batch.function.function.spec.max_batch > 1 else batch.state.transaction(0)
        return BatchContext(
            frame.mask.bit_count(),
            len(jobs),
            tuple([job.call_id for job in jobs]),
            self._setup.device,
            len(frame.cores) or 1,
            ends_s,
            transaction=transaction,
            origins=jobs,
            spans=batch.spans,
            function=batch.function.name,
            batch_state=batch.state,
            places=tuple(batch.places),
        )

    def _on_rows(self, batch: _Batch, model: Any, rows: list[Any]) -> None:
        good: list[int] = []
        for place, row in zip(batch.places, rows, strict=True):
            if isinstance(row, Exception):
                batch.outputs[place] = row
            else:
                good.append(place)
        items = [row for row in rows if not isinstance(row, Exception)]
        batch.places = good
        if not items:
            self._on_batch_done(batch, 0, [])
            return
        batch.keeps = all(batch.frame.keep) and not model.has_post and batch.function.row_bytes > INLINE_BYTES
        self._launch(batch, items)

    def _launch(self, batch: _Batch, items: list[Any]) -> None:
        """Launch a batch by its graph, or eagerly in its primary thread, where libraries know its size."""
        instance, mask = batch.frame.instance, batch.frame.mask
        models = self._executor.models
        if models.is_ready(instance, len(items), mask) and not models.is_eager_only(instance):
            self._begin(batch)
            batch.is_ordered_by_slice = True
            frame, others = batch.frame, self._overlapping(batch.frame)
            batch.ticket = self._executor.submit(
                *(instance, items, mask),
                keep=batch.keeps,
                then=lambda done: self._on_model_done(batch, items, done),
                preempts=() if frame.gives_way else others,
                preempted_by=others if frame.gives_way else (),
                preemptible=frame.gives_way and len(self._loader.functions) > 1,  # else nothing could preempt it
            )
            self._loader.captures.on_launched(batch.function, len(items), mask)
            return
        try:
            self._slicer.slice(mask)
            models.pin(instance)
        except Exception as error:
            self._on_model_done(batch, items, FinishedBatch(0, 0, None, error))
            return
        batch.is_waiting, batch.is_warmup = True, self._loader.captures.is_awaited(batch.function, len(items), mask)
        self._reserve(batch)
        batch.function.on_eager_started()
        batch.function.makers.submit(self._run_eager, batch, items)

    def _overlapping(self, frame: RunOnSlice) -> list[int]:
        """Tickets of batches on units of its slice: those that give way to it, or to which it gives way. One that began before
        this one was known here has named it."""
        named = {one for one, batch in self._open.items() if frame.batch_id in batch.frame.overlaps}
        return [self._open[one].ticket for one in named.union(frame.overlaps) if one in self._open]

    def _reserve(self, batch: _Batch) -> None:
        """It runs beside the executor: what gives way waits for it, and goes on when it has ended."""
        batch.ticket = self._executor.reserve(() if batch.frame.gives_way else self._overlapping(batch.frame))

    def _release(self, batch: _Batch) -> None:
        self._executor.release(batch.ticket)
        batch.ticket = 0

    def _submit(
        self, instance: str, items: list[Any], mask: int, then: Callable[[FinishedBatch], None], *, keep: bool = False
    ) -> None:
        self._executor.submit(instance, items, mask, keep=keep, then=then)

    def _begin(self, batch: _Batch) -> None:
        """Start its hang clock: it has its slice to itself, or waits only for batches before it there."""
        batch.is_waiting = False
        self._hang_detector.on_batch_started(batch.frame.batch_id, batch.frame.mask, batch.frame.limit_us / 1e6)

    def _run_eager(self, batch: _Batch, items: list[Any]) -> None:
        """Run a batch eagerly, in its primary thread."""
        frame = batch.frame
        self.call_soon(lambda: self._begin(batch))
        try:
            if _is_late(frame):
                raise TimeoutError("past its deadline before it began")
            known, models = batch.function.warm_buckets, self._executor.models
            done = FinishedBatch(0, *models.run_eager(frame.instance, items, frame.mask, known, keep=batch.keeps))
        except BaseException as error:  # SystemExit too
            traceback.clear_frames(error.__traceback__)  # which would keep what it had on the device
            done = FinishedBatch(0, 0, None, error)
        self.call_soon(lambda: self._on_eager_done(batch, items, done))

    def _on_eager_done(self, batch: _Batch, items: list[Any], done: FinishedBatch) -> None:
        batch.function.on_eager_ended()
        self._release(batch)
        self._executor.models.unpin(batch.frame.instance)
        if done.error is not None and self._executor.is_broken(done.error):
            raise ExecutorLost(f"{batch.function.function.name} broke the device: {done.error}")
        self._loader.captures.on_graph_missing(batch.function, len(items), batch.frame.mask)
        self._on_model_done(batch, items, done)

    def _on_model_done(self, batch: _Batch, items: list[Any], done: FinishedBatch) -> None:
        if isinstance(done.error, NoDeviceMemory) and not done.error.is_permanent:  # others will go when their batches end
            self._hang_detector.on_batch_ended(batch.frame.batch_id, batch.frame.mask)
            batch.is_ordered_by_slice, batch.is_waiting = False, True
            self._waiting_for_memory.append((batch, items))
            return
        loaded, outputs = batch.function, done.outputs
        if done.error is not None or outputs is None:
            self._on_batch_done(batch, done.device_us, [done.error] * len(batch.places))
        elif batch.keeps:
            self._on_batch_done(batch, done.device_us, [self._values.keep(output) for output in outputs])
        else:
            loaded.on_outputs(outputs)
            model: Any = loaded.model
            if model.has_host_code:
                self._hang_detector.on_batch_ended(batch.frame.batch_id, batch.frame.mask)
                told = partial(self._on_batch_done, batch, done.device_us)
                self._run_host_code(batch, lambda: model.answers(outputs), told)
            else:
                self._on_batch_done(batch, done.device_us, model.answers(outputs))

    def _retry_waiting_for_memory(self) -> None:
        crowded, self._waiting_for_memory = self._waiting_for_memory, []
        for batch, items in crowded:
            if _is_late(batch.frame):
                self._on_batch_done(batch, 0, [TimeoutError("no room on the device until its deadline")] * len(batch.places))
            else:
                self._launch(batch, items)

    def _run_callable(self, batch: _Batch, calls: list[dict[str, Any]]) -> None:
        frame = batch.frame
        lane = self._slice_threads.get(frame.mask)
        if lane is None:
            try:
                slice_ = self._slicer.slice(frame.mask)
            except Exception as error:
                self._on_batch_done(batch, 0, [error] * len(calls))
                return
            lane = self._slice_threads[frame.mask] = SliceThread(
                slice_, lambda *end: self.call_soon(lambda: self._on_callable_done(*end))
            )
        ends = [job.deadline_us / 1e6 for job in frame.jobs if job.deadline_us]
        limit_s = frame.limit_us / 1e6
        if limit_s and ends:  # how long it takes is up to its inputs: it may, until its deadlines
            limit_s = max(limit_s, max(ends) + 2 * DEADLINE_GRACE_US / 1e6 - time.monotonic())
        self._hang_detector.on_batch_started(frame.batch_id, frame.mask, limit_s)
        self._reserve(batch)
        lane.put(CallableBatch(frame.batch_id, batch.function.runner, calls, self._context(batch), frame.cores))
        batch.is_ordered_by_slice = True

    def _on_callable_done(self, batch_id: int, took_us: int, outputs: list[Any]) -> None:
        if any(isinstance(output, Exception) and self._executor.is_broken(output) for output in outputs):
            raise ExecutorLost("a function broke the device")
        self._release(self._open[batch_id])
        self._on_batch_done(self._open[batch_id], took_us, outputs)

    def _poll_executor(self) -> None:
        """Handle every batch that has ended."""
        for done in self._executor.poll():
            if isinstance(done.error, ExecutorLost):
                raise done.error
            assert done.then is not None
            done.then(done)
        if self._executor.paused:
            batches = {batch.ticket: batch_id for batch_id, batch in self._open.items()}
            for ticket, segments, left_us in self._executor.take_paused():
                if ticket in batches:
                    self._channel.send(RunPaused(batches[ticket], segments, left_us))

    def _on_batch_done(self, batch: _Batch, device_us: int, outputs: list[Any]) -> None:
        frame, loaded = batch.frame, batch.function
        self._hang_detector.on_batch_ended(frame.batch_id, frame.mask)
        for place, output in zip(batch.places, outputs, strict=True):
            batch.outputs[place] = output
        del self._open[frame.batch_id]
        self._last_batch_s = time.monotonic()
        loaded.on_batch_ended(frame.batch_id)
        results = encode_results(self._pool, batch.outputs)
        batch.outputs = []
        kept = [ref for ref in batch.reads if self._reader.is_viewed(ref)]
        packed = (packed_changes(batch.state, results), packed_spans(batch.spans))
        self._channel.send(BatchDone(frame.batch_id, device_us, results, kept, *packed, batch.is_warmup))
        for then in batch.followers:
            then()
        if self._waiting_for_memory:
            self._retry_waiting_for_memory()

    # --------------------------------------------------------------------- usage

    def _report_usage(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_usage_s < USAGE_EVERY_S:
            return
        self._said_usage_s = now_s
        models = self._executor.models
        telemetry, captures = self._telemetry, self._loader.captures
        bandwidth, clocks = (telemetry.bandwidth, telemetry.clocks) if telemetry is not None else (-1.0, None)
        said = (models.weights_mib, self._slicer.memory_used_mib(), models.graphs, models.evictions, bandwidth)
        self._channel.send(ExecutorUsage(*said, captures.missing, captures.eager_batches, clocks))
        paused = self._executor.paused
        for batch in self._open.values():
            if (batch.is_waiting or batch.ticket in paused) and not _is_late(
                batch.frame, STUCK_US
            ):  # and alive, however long that takes
                self._channel.send(BatchHeartbeat(batch.frame.batch_id))
        self._retry_waiting_for_memory()


def _is_late(frame: RunOnSlice, by_us: int = 2 * DEADLINE_GRACE_US) -> bool:
    """Are all its jobs past their deadlines?"""
    late_us = time.monotonic_ns() // 1000 - by_us
    return all(0 < job.deadline_us < late_us for job in frame.jobs)


def _is_ordered_by_slice(before: _Batch, frame: RunOnSlice, loaded: LoadedFunction | None) -> bool:
    """Does the slice itself keep the order of the two? Batches of modules share its stream, callables its thread."""
    same_kind = loaded is not None and (loaded.model is None) == (before.function.model is None)
    return same_kind and before.is_ordered_by_slice and before.frame.mask == frame.mask
