"""The process that owns one GPU and runs the batches of many functions on slices of it: `python -m lamina.live.gpu_worker SETUP`.

One thread takes frames, starts batches and asks for what has ended; it waits for nothing but news. Each function is loaded,
and its graphs are made, in a thread of its own; callables of users run in one thread per slice. An error of the device ends
the process at once, because nothing it says after that can be believed: the gateway starts another, and retries what may be
retried.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lamina import values
from lamina.errors import LaminaError, LoadFailed, UnknownTarget
from lamina.gpu.executor import Executor, ExecutorLost, Finished
from lamina.gpu.opened import open_executor, open_slicer
from lamina.live.frames import Channel, DeviceRef, Done, ErrorInfo, Release, ShmRef, Stop, Stored
from lamina.live.gpu_frames import (
    Fetch,
    Fetched,
    Forget,
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
    executor_reader,
)
from lamina.live.gpu_functions import Held, Lane, Piece, host_work, likely_masks, usual_mask
from lamina.live.ledger import ValueLost
from lamina.live.results import arguments, describe, packed
from lamina.live.shm import INLINE_BYTES, Pool, Reader
from lamina.live.worker import die_with_parent
from lamina.sdk.context import Context
from lamina.sdk.spans import Inner
from lamina.sdk.state import Refusal
from lamina.sdk.torch_model import to_numpy

BROKEN = 70
"""Exit status after an error of the device."""

USAGE_EVERY_S = 1.0
_SWITCH_S = 0.0005
"""How long a callable's thread may keep the interpreter to itself: batches of others wait that long."""

NO_STATE = Refusal("state: functions on a GPU have none", "keep it in a step on the CPU")


@dataclass(slots=True, eq=False)
class _Open:
    """A batch under way."""

    frame: RunOn
    held: Held
    outputs: list[Any]
    places: list[int]  #: of the jobs that run, in the order of the executor's items
    reads: list[ShmRef]
    keeps: bool = False
    followers: list[RunOn] = field(default_factory=list)
    spans: list[Inner] = field(default_factory=list)  #: parts of it that the function wants to be seen


class GpuWorker:
    def __init__(self, setup: GpuSetup, channel: Channel, slicer: Any, executor: Executor, app: Any = None) -> None:
        self.leaving = False
        self.wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._setup, self._channel = setup, channel
        self._slicer, self._executor = slicer, executor
        self._is_gpu = hasattr(slicer, "driver")
        self._pool = Pool(setup.folder, setup.owner, setup.pool_bytes)
        self._reader = Reader(setup.folder)
        self._apps: dict[str, Any] = {setup.app: app} if app is not None else {}  #: by path: new versions come beside old ones
        self._held: dict[str, Held] = {}
        self._open: dict[int, _Open] = {}
        self._tickets: dict[int, int] = {}
        self._lanes: dict[int, Lane] = {}
        self._values: dict[int, Any] = {}  #: what stays on the device, by slot
        self._next_value = 0
        self._loading = threading.Lock()
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()  #: from other threads, to be called here
        self._said_usage_s = 0.0

    # ---------------------------------------------------------------- the loop

    def serve(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while not self.leaving or self._open:
            frame = self._channel.waiting()
            if frame is not None:
                self._take(frame)
                continue
            is_busy = self._executor.has_work
            ready = dict(poller.poll(0 if is_busy else 1000))
            if ready.pop(self.wake, 0):
                os.read(self.wake, 4096)
            if ready and not self._channel.read():
                return
            while not self._news.empty():
                self._news.get()()
            if is_busy or self._executor.has_work:
                self._collect()
            self._tell_usage()

    def _take(self, frame: Any) -> None:
        match frame:
            case RunOn():
                self._run(frame)
            case LoadOne():
                self._begin_load(frame)
            case UnloadOne():
                self._unload(frame.instance)
            case Fetch():
                self._fetch(frame.slot)
            case Forget():
                for slot in frame.slots:
                    self._values.pop(slot, None)
            case Release():
                for slot in frame.retired:
                    self._pool.retire(slot)
                for slot in (*frame.slots, *frame.retired):
                    self._pool.free(slot)
            case Stop():
                self.leaving = True

    def call_soon(self, work: Any) -> None:
        """From any thread: to be called in the loop's."""
        self._news.put(work)
        with contextlib.suppress(BlockingIOError):  # so many wake-ups are on their way that one more tells nothing
            os.write(self._woken, b"!")

    # ------------------------------------------------------------------- loading

    def _begin_load(self, frame: LoadOne) -> None:
        maker = ThreadPoolExecutor(1, f"make-{frame.instance}")
        maker.submit(self._open_function, frame, maker)

    def _open_function(self, frame: LoadOne, maker: ThreadPoolExecutor) -> None:
        """In its maker's thread: everything slow that touches nothing of ours."""
        try:
            with self._loading:  # users' code: seeds and imports are the whole process's
                function = self._function(frame.function, frame.app or self._setup.app)
                runner = function.open()
            staged = self._executor.stage(runner.model.module) if runner.model is not None and self._is_gpu else None
        except BaseException as error:
            said = describe(error.__cause__ or error)  # the user's own, where there is one
            self.call_soon(lambda: self._channel.send(NotLoaded(frame.instance, said)))
            return
        held = Held(frame.instance, function, runner, usual_mask(function, self._slicer, frame.mask), maker)
        self.call_soon(lambda: self._adopt(frame, held, staged))

    def _function(self, name: str, app: str) -> Any:
        if app not in self._apps:
            from lamina.sdk.load import load_app

            self._apps[app] = load_app(app)
        function = self._apps[app].functions.get(name)
        if function is None:
            raise UnknownTarget(f"no function {name!r} in {app}")
        return function

    def _adopt(self, frame: LoadOne, held: Held, staged: Any) -> None:
        """Its weights go to the device; then back to its maker, for what takes long."""
        model, executor = held.model, self._executor
        if model is None:
            self._loaded(frame, held, [])
            return
        try:
            work = model.module if self._is_gpu else host_work(model)
            executor.load(frame.instance, work, model.example, buckets=held.buckets, staged=staged, made_elsewhere=True)
            executor.hold(frame.instance)
            self._slicer.slice(held.mask)
        except Exception as error:
            self._channel.send(NotLoaded(frame.instance, describe(error)))
            return
        held.maker.submit(self._make_first, frame, held)

    def _make_first(self, frame: LoadOne, held: Held) -> None:
        """In its maker's thread: graphs of the smallest and the largest batch on its usual slice. That is enough to serve."""
        made: dict[int, Any] = {}
        took_mib, failure = 0, None
        try:
            for bucket in dict.fromkeys((held.buckets[-1], 1)):
                took_mib = max(took_mib, self._executor.warm(frame.instance, bucket, held.mask))
                made[bucket] = self._executor.make(frame.instance, bucket, held.mask)
                held.warm.add(bucket)
        except BaseException as error:
            failure = error
        self.call_soon(lambda: self._made_first(frame, held, made, took_mib, failure))

    def _made_first(self, frame: LoadOne, held: Held, made: dict[int, Any], took_mib: int, failure: BaseException | None) -> None:
        executor, declared_mib = self._executor, held.function.spec.memory_mib
        executor.let_go(frame.instance)
        if failure is not None and executor.is_broken(failure):
            raise ExecutorLost(f"{frame.function} broke the device: {failure}")
        need_mib = took_mib + executor.weights_of_mib(frame.instance)
        if failure is None and self._is_gpu and 0 < declared_mib < need_mib:
            failure = LoadFailed(
                f"{frame.function!r} needs {need_mib} MiB at its largest batch, and declared {declared_mib}",
                hint="declare more memory, or a smaller batch",
            )
        probes: list[tuple[int, int, int]] = []
        try:
            if failure is not None:
                raise failure
            for bucket, plan in made.items():
                executor.adopt(frame.instance, bucket, held.mask, plan)
            units = held.mask.bit_count()
            probes += [(bucket, units, max(1, self._timed(held, bucket))) for bucket in sorted(made)]
        except ExecutorLost:
            raise
        except BaseException as error:
            executor.unload(frame.instance)
            self._channel.send(NotLoaded(frame.instance, describe(error)))
            return
        masks = likely_masks(self._slicer, held.mask, frame.mask)
        held.to_make = [(bucket, mask) for bucket in held.first_buckets for mask in masks if mask != held.mask]
        held.to_make += [(bucket, mask) for bucket in held.buckets for mask in masks if bucket not in held.first_buckets]
        self._loaded(frame, held, probes)
        self._make_more(held)

    def _loaded(self, frame: LoadOne, held: Held, probes: list[tuple[int, int, int]]) -> None:
        self._held[frame.instance] = held
        gc.freeze()  # what is loaded stays; the collector need not look at it again
        took_us = time.monotonic_ns() // 1000 - frame.asked_us
        self._channel.send(Loaded(frame.instance, took_us, probes if frame.probe else []))

    def _timed(self, held: Held, count: int) -> int:
        """A batch for nobody. Others' batches may end meanwhile, and are told as ever."""
        assert held.model is not None
        item = tuple(to_numpy(part[0]) for part in held.model.example)
        took_us = 0
        for _ in range(2):  # the first one makes buffers
            ticket = self._executor.submit(held.instance, [item] * count, held.mask)
            while (done := self._collect(wanted=ticket)) is None:
                pass
            if done.error is not None:
                raise done.error
            took_us = done.device_us
            held.row_bytes = getattr(done.outputs[0], "nbytes", 0) if done.outputs else 0
        return took_us

    def _make_more(self, held: Held, *, at_once: tuple[int, int] | None = None) -> None:
        """The next graph that is missing, or the one somebody waits for."""
        if held.is_leaving or (at_once is None and (held.making or not held.to_make)):
            return
        bucket, mask = at_once or held.to_make.pop(0)
        if (bucket, mask) in held.making:
            return
        held.making.add((bucket, mask))
        self._executor.hold(held.instance)
        self._slicer.slice(mask)
        held.maker.submit(self._make_one, held, bucket, mask)

    def _make_one(self, held: Held, bucket: int, mask: int) -> None:
        """In its maker's thread."""
        plan, failure = None, None
        try:
            if bucket not in held.warm:
                self._executor.warm(held.instance, bucket, mask)
                held.warm.add(bucket)
            plan = self._executor.make(held.instance, bucket, mask)
        except Exception as error:
            failure = error
        self.call_soon(lambda: self._made(held, bucket, mask, plan, failure))

    def _made(self, held: Held, bucket: int, mask: int, plan: Any, failure: Exception | None) -> None:
        held.making.discard((bucket, mask))
        self._executor.let_go(held.instance)
        if failure is not None and self._executor.is_broken(failure):
            raise ExecutorLost(f"{held.function.name} broke the device: {failure}")
        self._executor.adopt(held.instance, bucket, mask, plan if failure is None else failure)
        for batch, items in held.parked.pop((bucket, mask), []):
            self._submit(batch, items)
        if held.is_leaving:
            self._unload(held.instance)
        self._make_more(held)

    def _unload(self, instance: str) -> None:
        held = self._held.get(instance)
        if held is None:
            return
        held.is_leaving = True
        if held.batches or held.making:  # once more, when the last of them has ended
            return
        if held.model is not None:
            while self._executor.is_warming(instance):
                self._collect()
            self._executor.unload(instance)
        del self._held[instance]
        held.runner.close()
        held.maker.shutdown(wait=False)
        self._channel.send(Unloaded(instance))

    # ------------------------------------------------------------------- batches

    def _run(self, frame: RunOn) -> None:
        before = self._open.get(frame.after)
        if before is not None and before.frame.mask != frame.mask:
            before.followers.append(frame)  # on one and the same slice the stream itself keeps the order
            return
        held = self._held.get(frame.instance)
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
        open_value = self._open_value if held.takes_device_values else self._open_on_host
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
        instance, mask = batch.frame.instance, batch.frame.mask
        if self._executor.is_ready(instance, len(items), mask):
            self._submit(batch, items)
            return
        missing = (self._executor.bucket_for(instance, len(items)), mask)
        batch.held.parked.setdefault(missing, []).append((batch, items))
        self._make_more(batch.held, at_once=missing)

    def _submit(self, batch: _Open, items: list[Any]) -> None:
        ticket = self._executor.submit(batch.frame.instance, items, batch.frame.mask, keep=batch.keeps)
        self._tickets[ticket] = batch.frame.batch_id

    def _run_callable(self, batch: _Open, calls: list[dict[str, Any]]) -> None:
        frame = batch.frame
        lane = self._lanes.get(frame.mask)
        if lane is None:
            slice_ = self._slicer.slice(frame.mask)
            lane = self._lanes[frame.mask] = Lane(slice_, lambda *end: self.call_soon(lambda: self._lane_ended(*end)))
        ends_s = min((job.deadline_us for job in frame.jobs if job.deadline_us), default=math.inf) / 1e6
        call_ids = tuple(job.call_id for job in frame.jobs)
        units = frame.mask.bit_count()
        context = Context(
            *(units, len(calls), call_ids, self._setup.device, 1, ends_s, None, NO_STATE),
            *(frame.jobs, batch.spans, batch.held.function.name),
        )
        lane.put(Piece(frame.batch_id, batch.held.runner, calls, context))

    def _lane_ended(self, batch_id: int, took_us: int, outputs: list[Any]) -> None:
        if any(isinstance(output, Exception) and self._executor.is_broken(output) for output in outputs):
            raise ExecutorLost("a function broke the device")
        self._ended(self._open[batch_id], took_us, outputs)

    def _collect(self, wanted: int = 0) -> Finished | None:
        """Everything that has ended; returns the batch `wanted`, which nobody else waits for."""
        found = None
        for done in self._executor.poll():
            if isinstance(done.error, ExecutorLost):
                raise done.error
            if done.ticket == wanted:
                found = done
                continue
            batch = self._open[self._tickets.pop(done.ticket)]
            self._ended(batch, done.device_us, self._model_outputs(batch, done))
        return found

    def _model_outputs(self, batch: _Open, done: Finished) -> list[Any]:
        if done.error is not None or done.outputs is None:
            return [done.error] * len(batch.places)
        if batch.keeps:
            return [self._keep(output) for output in done.outputs]
        if done.outputs:
            batch.held.row_bytes = getattr(done.outputs[0], "nbytes", 0)
        assert batch.held.model is not None
        return batch.held.model.answers(done.outputs)

    def _ended(self, batch: _Open, device_us: int, outputs: list[Any]) -> None:
        frame, held = batch.frame, batch.held
        for place, output in zip(batch.places, outputs, strict=True):
            batch.outputs[place] = output
        del self._open[frame.batch_id]
        held.batches.discard(frame.batch_id)
        results = packed(self._pool, batch.outputs)
        batch.outputs = []
        kept = [ref for ref in batch.reads if self._reader.is_viewed(ref)]
        self._channel.send(Done(frame.batch_id, device_us, results, kept, None, batch.spans))
        for follower in batch.followers:
            self._run(follower)
        if held.is_leaving and not held.batches:
            self._unload(held.instance)

    # -------------------------------------------------------------------- values

    def _keep(self, output: Any) -> DeviceRef:
        self._next_value += 1
        self._values[self._next_value] = output
        size = getattr(getattr(output, "tensor", output), "nbytes", 0)
        return DeviceRef(self._setup.values_owner, self._next_value, size)

    def _open_value(self, stored: Stored) -> Any:
        """What is on the device stays there: its users wait for the event it came with, on their own streams."""
        if isinstance(stored, DeviceRef):
            if stored.owner != self._setup.values_owner or stored.slot not in self._values:
                raise ValueLost("a value that was on the device is not there any more")
            return self._values[stored.slot]
        return values.decode(self._reader.view(stored) if isinstance(stored, ShmRef) else stored)

    def _open_on_host(self, stored: Stored) -> Any:
        value = self._open_value(stored)
        return _on_host(value) if isinstance(stored, DeviceRef) else value

    def _fetch(self, slot: int) -> None:
        try:
            value = _on_host(self._values[slot])
            (result,) = packed(self._pool, [value])
        except (KeyError, LaminaError) as error:
            result = ErrorInfo("ValueLost", f"value {slot} is not on the device: {error}")
        assert not isinstance(result, DeviceRef)
        self._channel.send(Fetched(slot, result))

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
        executor = self._executor
        self._channel.send(Usage(executor.weights_mib, used_mib, executor.graphs, executor.evictions))


def _on_host(value: Any) -> Any:
    if hasattr(value, "ready"):
        value.ready.synchronize()
        return to_numpy(value.tensor)
    return value


def _wait_as_spare(setup: GpuSetup, channel: Channel) -> Any:
    """Everything that can be done without the device, and then nothing until it is free: imports take most of a restart."""
    from lamina.sdk.load import load_app

    app = None
    with contextlib.suppress(Exception):  # whoever loads a function of it says what is wrong
        import torch  # noqa: F401

        app = load_app(setup.app)
    while (frame := channel.waiting()) is None:
        if not channel.read():
            raise BrokenPipeError
    if not isinstance(frame, Go):
        raise BrokenPipeError
    return app


def main(argument: str) -> int:
    setup = msgspec.json.decode(argument, type=GpuSetup)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then tells us
    os.set_inheritable(setup.fd, False)
    channel = Channel(socket.socket(fileno=setup.fd), executor_reader())
    sys.argv = [setup.app]
    sys.setswitchinterval(_SWITCH_S)
    faulthandler.register(signal.SIGUSR1)  # what is it doing? every thread says so on stderr
    try:
        app = _wait_as_spare(setup, channel) if setup.is_spare else None
        slicer = open_slicer(setup.slicer, setup.ordinal)
        worker = GpuWorker(setup, channel, slicer, open_executor(slicer, setup.weights_mib), app)
        signal.set_wakeup_fd(worker._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "leaving", True))
        channel.send(Up(os.getpid(), slicer.device.memory_mib))
        worker.serve()
    except (BrokenPipeError, ConnectionResetError):  # nobody is left to work for
        return 0
    except ExecutorLost as error:
        os.write(2, f"lamina: {setup.device}: {error}\n".encode())  # its last words
        os._exit(BROKEN)  # without the exit handlers of a library whose device is broken
    finally:
        channel.leave_open()
    os._exit(0)  # threads of users may hang, and no result of theirs is wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
