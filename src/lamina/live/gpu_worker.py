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
from typing import Any

from lamina.core.alarm import GRACE_US
from lamina.gpu.executor import Executor, ExecutorLost, Finished
from lamina.gpu.memory import NoRoom
from lamina.gpu.traffic import Traffic, traffic_of
from lamina.live.frames import Beat, Channel, Done, ErrorInfo, Release, ShmRef, Stop
from lamina.live.gpu_frames import (
    Fetch,
    Forget,
    Go,
    GpuSetup,
    Hung,
    Import,
    LoadOne,
    MoveTo,
    RunOn,
    StandBy,
    UnloadOne,
    Up,
    Usage,
)
from lamina.live.gpu_functions import Held, Lane, Piece
from lamina.live.gpu_garbage import Garbage
from lamina.live.gpu_loading import Loading
from lamina.live.gpu_standby import import_all
from lamina.live.gpu_values import DeviceValues
from lamina.live.gpu_watch import Watch
from lamina.live.results import arguments, packed
from lamina.live.shm import INLINE_BYTES, Pool, Reader
from lamina.sdk.context import Context
from lamina.sdk.spans import Inner
from lamina.sdk.state import Refusal

USAGE_EVERY_S = 1.0

STUCK_US = 30_000_000
"""A batch nobody has waited for since then has a maker that hangs: it is not said to be alive any more, and the process ends."""

NO_STATE = Refusal("state: functions on a GPU have none", "keep it in a step on the CPU")


@dataclass(slots=True, eq=False)
class _Open:
    """A batch in flight."""

    frame: RunOn
    held: Held
    outputs: list[Any]
    places: list[int]  #: of the jobs that run, in the order of the executor's items
    reads: list[ShmRef]
    keeps: bool = False
    is_in_line: bool = False  #: its slice will run it before whatever comes to that slice later
    is_waiting: bool = False  #: for its maker, or for room on the device
    followers: list[Callable[[], None]] = field(default_factory=list)  #: to be called when it has ended, and been told
    spans: list[Inner] = field(default_factory=list)  #: parts of it that the function wants to be seen


class GpuWorker:
    def __init__(self, setup: GpuSetup, channel: Channel, slicer: Any, executor: Executor, app: Any = None) -> None:
        self.leaving = False
        self._is_spare = True  #: until it is told to go
        self.wake, self.woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._setup, self._channel = setup, channel
        self._slicer, self._executor = slicer, executor
        self._is_gpu = hasattr(slicer, "driver")
        self._pool = Pool(setup.folder, setup.owner, setup.pool_bytes)
        self._reader = Reader(setup.folder)
        self._values = DeviceValues(setup.values_owner, self._pool, self._reader)
        self._garbage = Garbage()
        self._loading = Loading(
            setup.app,
            slicer,
            executor,
            self._garbage,
            send=channel.send,
            call_soon=self.call_soon,
            submit=self._submit,
            is_idle=lambda: not self._open,
            freed=self._try_crowded,
        )
        if app is not None:
            self._loading.apps[setup.app] = app
        self._open: dict[int, _Open] = {}
        self._tickets: dict[int, Callable[[Finished], None]] = {}  #: who is to be told of the end
        self._crowded: list[tuple[_Open, list[Any]]] = []  #: batches whose weights find no room beside those in use
        self._lanes: dict[int, Lane] = {}
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()  #: from other threads, to be called here
        self._said_usage_s = 0.0
        self._watch = Watch()
        self._traffic: Traffic | None = None
        if not setup.opens_ahead:
            self._go()

    # ---------------------------------------------------------------- the loop

    def serve(self) -> None:
        try:
            self._serve()
        finally:
            if self._traffic is not None:
                self._traffic.end()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while not self.leaving or self._open:
            frame = self._channel.waiting()
            if frame is not None:
                self._take(frame)
                continue
            is_busy = self._executor.has_work
            ready = dict(poller.poll(0 if is_busy else 10 if self._loading.making.is_behind else 100 if self._open else 1000))
            if ready.pop(self.wake, 0):
                os.read(self.wake, 4096)
            if ready and not self._channel.read():
                return
            while not self._news.empty():
                self._news.get()()
            if is_busy or self._executor.has_work:
                self._collect()
            self._loading.see_to()
            if self._garbage.look(time.monotonic(), is_idle=not self._open, is_loading=self._loading.is_loading):
                self._executor.functions.trim()
            for batch_id in self._watch.look(time.monotonic()):
                self._channel.send(Hung(batch_id))
            if not self._is_spare:
                self._tell_usage()

    def _go(self) -> None:
        """Begin to serve: the device is ours."""
        self._is_spare = False
        self._loading.standby.go()
        if self._is_gpu:
            self._traffic = traffic_of(self._setup.ordinal)
            self._traffic.begin()
        self._channel.send(Up(os.getpid(), self._slicer.device.memory_mib))

    def _take(self, frame: Any) -> None:
        match frame:
            case RunOn():
                self._run(frame)
            case Go():
                self._go()
            case Import():
                import_all(frame.names)
            case StandBy():
                self._loading.standby.want(frame.functions)
            case LoadOne():
                self._loading.begin(frame)
            case UnloadOne():
                self._loading.unload(frame.instance)
            case MoveTo():
                self._loading.move(frame.instance, frame.mask)
            case Fetch():
                self._channel.send(self._values.fetched(frame.slot))
            case Forget():
                self._values.forget(frame.slots)
            case Release():
                for slot in frame.retired:
                    self._pool.retire(slot)
                for slot in (*frame.slots, *frame.retired):
                    self._pool.free(slot)
            case Stop():
                self.leaving = True

    def call_soon(self, work: Any) -> None:
        """Run a callback in the serving thread; from any thread."""
        self._news.put(work)
        with contextlib.suppress(BlockingIOError):  # so many wake-ups are on their way that one more tells nothing
            os.write(self.woken, b"!")

    # ------------------------------------------------------------------- batches

    def _run(self, frame: RunOn) -> None:
        held = self._loading.held.get(frame.instance)
        before = self._open.get(frame.after)
        if before is not None and not _in_line(before, frame, held):
            before.followers.append(lambda: self._run(frame))
            return
        if held is None:
            lost = ErrorInfo("UnknownTarget", f"{frame.instance} is not loaded here")
            self._channel.send(Done(frame.batch_id, 0, [lost] * len(frame.jobs)))
            return
        outputs, calls = self._calls(frame, held)
        reads = [stored for job in frame.jobs for _, stored in job.leaves if type(stored) is ShmRef]
        batch = self._open[frame.batch_id] = _Open(frame, held, outputs, list(calls), reads)
        held.batches.add(frame.batch_id)
        if held.model is None:
            self._run_callable(batch, list(calls.values()))
        else:
            self._run_model(batch, held.model, list(calls.values()))

    def _calls(self, frame: RunOn, held: Held) -> tuple[list[Any], dict[int, dict[str, Any]]]:
        outputs: list[Any] = [None] * len(frame.jobs)
        calls: dict[int, dict[str, Any]] = {}
        open_value = self._values.open if held.takes_device_values else self._values.open_on_host
        for index, job in enumerate(frame.jobs):
            try:
                if job.error is None:
                    calls[index] = arguments(job, open_value)
                else:
                    outputs[index] = job.error
            except Exception as error:
                outputs[index] = error
        return outputs, calls

    def _run_model(self, batch: _Open, model: Any, calls: list[dict[str, Any]]) -> None:
        rows = model.rows(calls)
        good: list[int] = []
        for place, row in zip(batch.places, rows, strict=True):
            if isinstance(row, Exception):
                batch.outputs[place] = row
            else:
                good.append(place)
        items = [row for row in rows if not isinstance(row, Exception)]
        batch.places = good
        if not items:
            self._ended(batch, 0, [])
            return
        batch.keeps = all(batch.frame.keep) and not model.has_post and batch.held.row_bytes > INLINE_BYTES
        self._launch(batch, items)

    def _launch(self, batch: _Open, items: list[Any]) -> None:
        """Launch a batch by its graph, or eagerly in its primary thread, where libraries know its size."""
        instance, mask = batch.frame.instance, batch.frame.mask
        functions = self._executor.functions
        if functions.is_ready(instance, len(items), mask) and not functions.runs_apart(instance):
            self._begin(batch)
            batch.is_in_line = True
            self._submit(instance, items, mask, lambda done: self._model_ended(batch, items, done), keep=batch.keeps)
            return
        try:
            self._slicer.slice(mask)
            functions.hold(instance)
        except Exception as error:
            self._model_ended(batch, items, Finished(0, 0, None, error))
            return
        batch.is_waiting = True
        batch.held.eager += 1
        batch.held.maker.submit(self._run_apart, batch, items)

    def _submit(
        self, instance: str, items: list[Any], mask: int, then: Callable[[Finished], None], *, keep: bool = False
    ) -> None:
        self._tickets[self._executor.submit(instance, items, mask, keep=keep)] = then

    def _begin(self, batch: _Open) -> None:
        """Start its hang clock: it has its slice to itself, or waits only for batches before it there."""
        batch.is_waiting = False
        self._watch.begin(batch.frame.batch_id, batch.frame.mask, batch.frame.limit_us / 1e6)

    def _run_apart(self, batch: _Open, items: list[Any]) -> None:
        """Run a batch eagerly, in its primary thread."""
        frame = batch.frame
        self.call_soon(lambda: self._begin(batch))
        try:
            if _is_late(frame):
                raise TimeoutError("past its deadline before it began")
            known, functions = batch.held.warm, self._executor.functions
            done = Finished(0, *functions.run_apart(frame.instance, items, frame.mask, known, keep=batch.keeps))
        except BaseException as error:  # SystemExit too
            traceback.clear_frames(error.__traceback__)  # which would keep what it had on the device
            done = Finished(0, 0, None, error)
        self.call_soon(lambda: self._ran_apart(batch, items, done))

    def _ran_apart(self, batch: _Open, items: list[Any], done: Finished) -> None:
        batch.held.eager -= 1
        self._executor.functions.let_go(batch.frame.instance)
        if done.error is not None and self._executor.is_broken(done.error):
            raise ExecutorLost(f"{batch.held.function.name} broke the device: {done.error}")
        self._loading.making.missed(batch.held, len(items), batch.frame.mask)
        self._model_ended(batch, items, done)

    def _model_ended(self, batch: _Open, items: list[Any], done: Finished) -> None:
        if isinstance(done.error, NoRoom) and not done.error.is_for_good:  # others will go when their batches end
            self._watch.end(batch.frame.batch_id, batch.frame.mask)
            batch.is_in_line, batch.is_waiting = False, True
            self._crowded.append((batch, items))
            return
        self._ended(batch, done.device_us, self._model_outputs(batch, done))

    def _try_crowded(self) -> None:
        crowded, self._crowded = self._crowded, []
        for batch, items in crowded:
            if _is_late(batch.frame):
                self._ended(batch, 0, [TimeoutError("no room on the device until its deadline")] * len(batch.places))
            else:
                self._launch(batch, items)

    def _run_callable(self, batch: _Open, calls: list[dict[str, Any]]) -> None:
        frame = batch.frame
        lane = self._lanes.get(frame.mask)
        if lane is None:
            try:
                slice_ = self._slicer.slice(frame.mask)
            except Exception as error:
                self._ended(batch, 0, [error] * len(calls))
                return
            lane = self._lanes[frame.mask] = Lane(slice_, lambda *end: self.call_soon(lambda: self._lane_ended(*end)))
        ends = [job.deadline_us / 1e6 for job in frame.jobs if job.deadline_us]
        ends_s = min(ends, default=math.inf)
        limit_s = frame.limit_us / 1e6
        if limit_s and ends:  # how long it takes is up to its inputs: while somebody waits for it, it may
            limit_s = max(limit_s, max(ends) + 2 * GRACE_US / 1e6 - time.monotonic())
        self._watch.begin(frame.batch_id, frame.mask, limit_s)
        call_ids = tuple(job.call_id for job in frame.jobs)
        units = frame.mask.bit_count()
        context = Context(
            *(units, len(calls), call_ids, self._setup.device, 1, ends_s, None, NO_STATE),
            *(frame.jobs, batch.spans, batch.held.function.name),
        )
        lane.put(Piece(frame.batch_id, batch.held.runner, calls, context))
        batch.is_in_line = True

    def _lane_ended(self, batch_id: int, took_us: int, outputs: list[Any]) -> None:
        if any(isinstance(output, Exception) and self._executor.is_broken(output) for output in outputs):
            raise ExecutorLost("a function broke the device")
        self._ended(self._open[batch_id], took_us, outputs)

    def _collect(self) -> None:
        """Handle every batch that has ended."""
        for done in self._executor.poll():
            if isinstance(done.error, ExecutorLost):
                raise done.error
            self._tickets.pop(done.ticket)(done)

    def _model_outputs(self, batch: _Open, done: Finished) -> list[Any]:
        if done.error is not None or done.outputs is None:
            return [done.error] * len(batch.places)
        if batch.keeps:
            return [self._values.keep(output) for output in done.outputs]
        if done.outputs:
            batch.held.row_bytes = getattr(done.outputs[0], "nbytes", 0)
        assert batch.held.model is not None
        return batch.held.model.answers(done.outputs)

    def _ended(self, batch: _Open, device_us: int, outputs: list[Any]) -> None:
        frame, held = batch.frame, batch.held
        self._watch.end(frame.batch_id, frame.mask)
        for place, output in zip(batch.places, outputs, strict=True):
            batch.outputs[place] = output
        del self._open[frame.batch_id]
        held.batches.discard(frame.batch_id)
        results = packed(self._pool, batch.outputs)
        batch.outputs = []
        kept = [ref for ref in batch.reads if self._reader.is_viewed(ref)]
        self._channel.send(Done(frame.batch_id, device_us, results, kept, None, batch.spans))
        for then in batch.followers:
            then()
        if self._crowded:
            self._try_crowded()

    # --------------------------------------------------------------------- usage

    def _tell_usage(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_usage_s < USAGE_EVERY_S:
            return
        self._said_usage_s = now_s
        used_mib = 0
        if self._is_gpu:
            free, total = self._slicer.driver.memory_bytes()
            used_mib = (total - free) >> 20
        functions = self._executor.functions
        bandwidth = self._traffic.share if self._traffic is not None else -1.0
        said = (functions.weights_mib, used_mib, functions.graphs, functions.evictions, bandwidth)
        self._channel.send(Usage(*said, self._loading.making.missing, self._loading.making.eager_batches))
        for batch in self._open.values():
            if batch.is_waiting and not _is_late(batch.frame, STUCK_US):  # and alive, however long that takes
                self._channel.send(Beat(batch.frame.batch_id))
        self._try_crowded()


def _is_late(frame: RunOn, by_us: int = 2 * GRACE_US) -> bool:
    """Are all its jobs past their deadlines?"""
    late_us = time.monotonic_ns() // 1000 - by_us
    return all(0 < job.deadline_us < late_us for job in frame.jobs)


def _in_line(before: _Open, frame: RunOn, held: Held | None) -> bool:
    """Does the slice itself keep the order of the two? Batches of modules share its stream, callables its thread."""
    same_kind = held is not None and (held.model is None) == (before.held.model is None)
    return same_kind and before.is_in_line and before.frame.mask == frame.mask
