"""CPU worker: a process that holds one function and runs its batches, one at a time: `python -m lamina.worker.main SETUP`.

It does as little as it can: take a frame, decode the arguments, run, encode the results. Everything it could get wrong
stays inside it: a job that cannot be decoded, run or encoded fails alone, and when the process dies the gateway sees the
socket close. It leaves when that socket ends, when it is told to, or with its parent; SIGTERM lets the batch that is
running end first.

Imports are late and few on purpose: they are part of every cold start.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from lamina import encoding
from lamina.errors import BadValue, LaminaError, UnknownTarget
from lamina.ipc.confinement import Confinement, enter
from lamina.ipc.framing import FrameChannel, StopProcess, read_mask
from lamina.sdk.app_state import WHICH_REQUEST, BatchState, StateCell, StateKey
from lamina.sdk.context import BatchContext, active_context, requests_again
from lamina.sdk.spans import InnerSpan
from lamina.values.references import DeviceRef, ErrorInfo, ReleaseSlots, ShmRef, Stored
from lamina.values.shm import ShmPool, ShmReader
from lamina.worker.cpu_affinity import WorkerAffinity
from lamina.worker.job_codec import decode_arguments, encode_results, error_info, packed_changes, packed_spans
from lamina.worker.otel_context import attach_trace
from lamina.worker.output_tags import finish_tagged_output, show_logging, tag_output
from lamina.worker.protocol import (
    BatchDone,
    BatchHeartbeat,
    BufferAnswer,
    BufferRead,
    BufferWrite,
    CancelStream,
    ResultChunk,
    RunBatch,
    StateRead,
    StateValue,
    StreamInput,
    WorkerLoadFailed,
    WorkerReady,
    to_worker_reader,
)

if TYPE_CHECKING:
    from lamina.kernels.buffer_store import MappedBuffers
    from lamina.sdk.function import Function
    from lamina.sdk.runner import Runner
    from lamina.worker.concurrent import ConcurrentWorker

_PR_SET_PDEATHSIG = 1

HEARTBEAT_EVERY_S = 0.05
"""Minimum distance of heartbeats, however often code reports."""

BUFFER_LOOKS = 8
"""How often a buffer is looked for that others replace meanwhile."""

MAPPED_BYTES = 4 * 2**30
"""Of buffers that stay mapped in a worker. The system drops what it needs the memory of, and reads it again."""


class WorkerSetup(Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a worker, as JSON on its command line."""

    app: str
    function: str
    device: str
    mask: int  #: cores to load on; 0: all
    folder: str
    owner: str
    pool_bytes: int
    requested_us: int  #: when the load was asked for, on the monotonic clock
    fd: int = -1
    spill_bytes: int = 0  #: on disk, for results that find no room in memory
    probe: bool = False  #: it has no profile: time it before it takes calls
    tags_output: bool = False  #: what it prints is collected, tagged with its calls
    confinement: Confinement = Confinement()
    log_level: str = "INFO"


class BatchChannel:
    """The channel of one batch. It may be used by threads of the batch's own."""

    def __init__(self, channel: FrameChannel, batch: RunBatch) -> None:
        self._channel = channel
        self._batch_id = batch.batch_id
        self._wanted = {job.job_id for job in batch.jobs}
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._last_heartbeat_s = time.monotonic()
        self.state = BatchState(self._read_state)

    def heartbeat(self) -> bool:
        """Say that the batch is alive; false when all of its jobs are cancelled."""
        now_s = time.monotonic()
        if now_s - self._last_heartbeat_s >= HEARTBEAT_EVERY_S:
            self._last_heartbeat_s = now_s
            self._channel.send(BatchHeartbeat(self._batch_id))
            if threading.get_ident() == self._thread:  # one left by an ended batch would read what follows
                self._wanted -= {frame.job_id for frame in self._channel.lookahead() if isinstance(frame, CancelStream)}
        return bool(self._wanted)

    def _read_state(self, place: int, key: StateKey) -> StateCell:
        with self._lock:
            self._channel.send(StateRead(self._batch_id, place, 0, *key))
            answer: StateValue = self._channel.wait_for(StateValue)
            return answer.cell

    def read_buffer(self, job_id: int, key: str) -> tuple[str, str]:
        """File and digest of a buffer under a key of the tenant of that job."""
        with self._lock:
            self._channel.send(BufferRead(self._batch_id, job_id, key))
            return _checked_answer(self._channel.wait_for(BufferAnswer))

    def write_buffer(self, job_id: int, key: str, value: bytes | ShmRef) -> None:
        with self._lock:
            self._channel.send(BufferWrite(self._batch_id, job_id, key, value))
            _checked_answer(self._channel.wait_for(BufferAnswer))


def _checked_answer(answer: BufferAnswer) -> tuple[str, str]:
    if answer.error is not None:
        raise BadValue(answer.error.message, hint=answer.error.hint)  # the request's, which names the key
    return answer.path, answer.digest


class BatchBuffers:
    """Buffers by key for the requests of one batch: the gateway knows whose they are, and where they lie."""

    def __init__(
        self, link: BatchChannel, batch: RunBatch, places: Sequence[int], mapped: Callable[[], MappedBuffers], pool: ShmPool
    ) -> None:
        self._link, self._mapped, self._pool = link, mapped, pool
        self._jobs = [batch.jobs[place].job_id for place in places]

    def read(self, request: int, key: str) -> Any:
        """The array under a key. It may be deleted, or replaced by one that is not shown to this process yet, between the answer
        and the look: then it is asked for again."""
        for _ in range(BUFFER_LOOKS):
            found = self._link.read_buffer(self._jobs[request], key)
            with contextlib.suppress(FileNotFoundError, PermissionError):
                return self._mapped().open(*found)
        raise BadValue(f"buffer {key[:80]!r} is replaced again and again", hint="read it when those that write it are done")

    def write(self, request: int, key: str, array: Any) -> None:
        (value,) = encode_results(self._pool, [array])
        assert isinstance(value, bytes | ShmRef) and not isinstance(value, DeviceRef)
        try:
            self._link.write_buffer(self._jobs[request], key, value)
        finally:
            if isinstance(value, ShmRef):
                self._pool.free(value.slot)


class FunctionWorker:
    def __init__(
        self, setup: WorkerSetup, channel: FrameChannel, function: Function[..., Any], runner: Runner, cores: WorkerAffinity
    ) -> None:
        self.leaving = False
        self._channel = channel
        self._runner = runner
        self._can_rerun = function.spec.idempotent
        self._is_batched = function.spec.max_batch > 1
        self._device = setup.device
        self._cores = cores
        self._pool = ShmPool(setup.folder, setup.owner, setup.pool_bytes, setup.spill_bytes)
        self._reader = ShmReader(setup.folder)
        self._function = setup.function
        self._spans: list[InnerSpan] = []  #: of the batch that runs
        self._mapped_buffers: MappedBuffers | None = None  #: once there are any

    def serve(self, wake: int) -> None:
        """Serve until the socket ends, StopProcess comes, or a signal makes `wake` readable and sets `leaving`."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        while not self.leaving:
            frame = self._channel.next_buffered()
            match frame:
                case None:
                    ready = dict(poller.poll())
                    if ready.pop(wake, 0):
                        os.read(wake, 4096)  # whatever signal it was, its handler has run
                    if ready and not self._channel.read():
                        return
                case RunBatch():
                    self._channel.send(self.run(frame))
                case ReleaseSlots():
                    self.release(frame)
                case CancelStream() | StreamInput():
                    pass  # what it was for has ended
                case StopProcess():
                    return

    def release(self, frame: ReleaseSlots) -> None:
        self._pool.release(frame)

    def run(self, batch: RunBatch) -> BatchDone:
        """Run a batch. All the time it takes is time on the slice: values are decoded and encoded there too."""
        started_ns = time.perf_counter_ns()
        units = self._cores.apply(read_mask(batch.mask))
        shared = [stored for job in batch.jobs for _, stored in job.leaves if isinstance(stored, ShmRef)]
        link = BatchChannel(self._channel, batch)
        results = self._results(batch, units, link)
        still_viewed = [ref for ref in shared if self._reader.is_viewed(ref)]
        device_us = (time.perf_counter_ns() - started_ns) // 1000
        spans = self._spans
        if spans:
            self._spans = []
        packed = (packed_changes(link.state, results), packed_spans(spans))
        return BatchDone(batch.batch_id, device_us, results, still_viewed, *packed)

    def _results(self, batch: RunBatch, units: int, link: BatchChannel) -> list[bytes | ShmRef | ErrorInfo]:
        """Results of a batch. In a frame of its own: when it returns, nothing of ours refers to the inputs any more."""
        outputs: list[Any] = [None] * len(batch.jobs)
        calls: dict[int, dict[str, Any]] = {}
        for index, job in enumerate(batch.jobs):
            try:
                if job.error is None:
                    calls[index] = decode_arguments(job, self._open)
                else:
                    outputs[index] = job.error
            except Exception as error:
                outputs[index] = error
        ends_s = min((job.deadline_us for job in batch.jobs if job.deadline_us), default=math.inf) / 1e6
        jobs = [batch.jobs[index] for index in calls]
        call_ids = tuple([job.call_id for job in jobs])
        transaction = WHICH_REQUEST if self._is_batched else link.state.transaction(0)
        emit = self._emit_for(batch) if batch.jobs[0].is_streaming else None
        context = BatchContext(
            *(units, len(calls), call_ids, self._device, 0, ends_s, link.heartbeat, transaction, jobs, self._spans),
            *(self._function, BatchBuffers(link, batch, list(calls), self._mapped, self._pool), link.state, tuple(calls)),
        )
        with active_context(context), attach_trace(context):
            for index, output in zip(calls, self._outputs(list(calls.values()), emit), strict=True):
                outputs[index] = output
        return encode_results(self._pool, outputs)

    def _mapped(self) -> MappedBuffers:
        if self._mapped_buffers is None:
            from lamina.kernels.buffer_store import MappedBuffers

            self._mapped_buffers = MappedBuffers(MAPPED_BYTES)
        return self._mapped_buffers

    def _emit_for(self, batch: RunBatch) -> Callable[[Any], bool]:
        """Sender of stream chunks; it returns false when the client is gone. Functions that yield have one call in a batch."""
        job_id = batch.jobs[0].job_id

        def emit(piece: Any) -> bool:
            self._channel.send(ResultChunk(batch.batch_id, job_id, encoding.encode(piece)))
            return not any(isinstance(frame, CancelStream) and frame.job_id == job_id for frame in self._channel.lookahead())

        return emit

    def _open(self, stored: Stored) -> Any:
        return encoding.decode(self._reader.view(stored) if isinstance(stored, ShmRef) else stored)

    def _outputs(self, calls: list[dict[str, Any]], emit: Callable[[Any], bool] | None) -> list[Any]:
        """Run the calls. The runner finds the failing call when the user's code raises; what gets past it ends a batch of one."""
        try:
            outputs = self._runner.run(calls, emit) if calls else []
            if len(outputs) != len(calls):
                raise LaminaError(f"{len(outputs)} results came back for {len(calls)} calls")
            return outputs
        except BaseException as error:  # KeyboardInterrupt too: a function may end its call, not its worker
            if len(calls) == 1 or not self._can_rerun:
                return [error] * len(calls)
        outputs = []
        for index, call in enumerate(calls):
            with requests_again([index]):
                outputs += self._outputs([call], emit)
        return outputs


def load(setup: WorkerSetup) -> tuple[Function[..., Any], Runner]:
    from lamina.sdk.app_loader import load_app

    function = load_app(setup.app).functions.get(setup.function)
    if function is None:
        raise UnknownTarget(f"no function {setup.function!r} in {setup.app}")
    runner = function.open()
    runner.warm_up()
    return function, runner


def main(argument: str) -> int:
    setup = msgspec.json.decode(argument, type=WorkerSetup)
    enter(setup.confinement)  # before any code but ours is loaded
    die_with_parent()  # which a change of user would undo
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then tells us
    os.set_inheritable(setup.fd, False)
    channel = FrameChannel(socket.socket(fileno=setup.fd), to_worker_reader())
    sys.argv = [setup.app]
    with contextlib.suppress(AttributeError):  # there may be no stdout, or one without lines
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if setup.tags_output:
        tag_output()
    show_logging(setup.log_level)
    try:
        return _work(setup, channel)
    except (BrokenPipeError, ConnectionResetError):  # the gateway is gone
        return 0
    finally:
        finish_tagged_output()
        channel.leave_open()


def _work(setup: WorkerSetup, channel: FrameChannel) -> int:
    cores = WorkerAffinity()
    cores.apply(setup.mask)
    try:
        function, runner = load(setup)
    except BaseException as error:
        channel.send(WorkerLoadFailed(error_info(error.__cause__ or error)))  # the user's own, where there is one
        return 1
    worker: FunctionWorker | ConcurrentWorker
    if function.spec.concurrency > 1:
        from lamina.worker.concurrent import ConcurrentWorker

        worker = ConcurrentWorker(setup, channel, function, runner, cores)
    else:
        worker = FunctionWorker(setup, channel, function, runner, cores)
    wake = _on_sigterm(worker)
    probes: list[tuple[int, int, int]] = []
    if setup.probe and isinstance(worker, FunctionWorker):
        from lamina.worker.warmup_probe import probe

        probes = probe(worker, function, setup)
    gc.freeze()  # what is loaded stays; the collector need not look at it again
    channel.send(WorkerReady(time.monotonic_ns() // 1000 - setup.requested_us, os.getpid(), probes))
    worker.serve(wake)
    runner.close()
    return 0


def _on_sigterm(worker: FunctionWorker | ConcurrentWorker) -> int:
    """Handle SIGTERM. A signal may come an instant before the process blocks, so it also wakes it: through a pipe."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)

    def leave(*_: object) -> None:
        worker.leaving = True

    signal.signal(signal.SIGTERM, leave)
    return wake


def die_with_parent() -> None:
    """Exit with the parent process.

    A worker busy with a batch would not notice the end of its socket for as long as that lasts. The kernel goes by the
    thread that started it; that is the gateway's event loop, and they end together."""
    import ctypes

    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:  # Linux has it
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
