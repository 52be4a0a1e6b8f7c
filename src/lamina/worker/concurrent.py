"""Concurrent worker: a process whose function serves several calls at once, each a task of one event loop.

For `async def` functions with `concurrency=`, for those that yield with it (plain generators run in threads), and for functions
that take messages while they run. Calls come and go by themselves: each is a batch of one, and a call whose client has left is
cancelled where it waits. The loop is the one that `load` ran on, so what was opened there can be used.

Each call has a transaction of its own on the state. A read waits for the gateway's answer, and with it the loop: for as long as
that is on its way no other call goes on, and none needs to know that a read is a message.

Apart from `main.py`, so that asyncio is imported for such functions alone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lamina import encoding
from lamina.errors import LaminaError
from lamina.ipc.framing import FrameChannel, StopProcess, read_mask
from lamina.sdk.app_state import UNKNOWN, BatchState, StateCell, StateKey
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.spans import InnerSpan
from lamina.values.references import ReleaseSlots, ShmRef, Stored
from lamina.values.shm import ShmPool, ShmReader
from lamina.worker.cpu_affinity import WorkerAffinity
from lamina.worker.job_codec import decode_arguments, encode_results, packed_changes, packed_spans
from lamina.worker.otel_context import attach_trace
from lamina.worker.protocol import (
    BatchDone,
    BatchHeartbeat,
    CancelStream,
    InputTaken,
    JobFrame,
    ResultChunk,
    RunBatch,
    StateRead,
    StateValue,
    StreamInput,
)

if TYPE_CHECKING:
    from lamina.sdk.function import Function
    from lamina.sdk.runner import Runner
    from lamina.worker.main import WorkerSetup

HEARTBEAT_EVERY_S = 0.05
ALIVE_EVERY_S = 1.0
"""How often the loop says that it is alive, for all calls that wait on it: one that waits for its client or for another service
does not hang, however long that takes."""

MAX_UNREAD = 1_024
"""Messages that a call has been sent and has not taken; with more it is cancelled. The gateway lets far fewer come."""

TAKEN_BATCH = 8
"""So many taken messages are told together while more of them wait."""

_END: Final = object()


class RunningCall:
    """A call under way: its task, and the messages for it."""

    def __init__(self, batch: RunBatch, on_taken: Callable[[int], None]) -> None:
        self.batch = batch
        self._on_taken = on_taken
        self.is_cancelled = False
        self.task: asyncio.Task[None] | None = None
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._heartbeat_s = 0.0

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()

    def put(self, message: Any) -> None:
        if self._messages.qsize() >= MAX_UNREAD:
            self.cancel()
        else:
            self._messages.put_nowait(message)

    async def messages(self) -> AsyncIterator[Any]:
        """What the client sends while the call runs."""
        taken = 0
        while (message := await self._messages.get()) is not _END:
            taken += 1
            if taken >= TAKEN_BATCH or self._messages.empty():
                self._on_taken(taken)
                taken = 0
            yield message

    def may_beat(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._heartbeat_s < HEARTBEAT_EVERY_S:
            return False
        self._heartbeat_s = now_s
        return True


class ConcurrentWorker:
    def __init__(
        self, setup: WorkerSetup, channel: FrameChannel, function: Function[..., Any], runner: Runner, cores: WorkerAffinity
    ) -> None:
        self.leaving = False
        self._channel = channel
        self._runner = runner
        self._device = setup.device
        self._cores = cores
        self._pool = ShmPool(setup.folder, setup.owner, setup.pool_bytes, setup.spill_bytes)
        self._reader = ShmReader(setup.folder)
        self._function = setup.function
        self._incoming = function.incoming
        self._calls: dict[int, RunningCall] = {}  #: by job
        self._threads = ThreadPoolExecutor(function.spec.concurrency) if function.streams and not function.is_async else None
        self._stopped: asyncio.Event | None = None
        self._loop_thread = 0
        self._questions = itertools.count(1)
        self._answers: dict[int, Future[StateCell]] = {}  #: by question, of threads that wait for them

    def serve(self, wake: int) -> None:
        """Serve until the socket ends, StopProcess comes, or a signal makes `wake` readable and sets `leaving`; calls that run
        then end first, unless the gateway is gone."""
        self._runner.run_coroutine(self._serve(wake))

    async def _serve(self, wake: int) -> None:
        loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._loop_thread = threading.get_ident()
        loop.add_reader(self._channel.fileno(), self._on_readable)
        loop.add_reader(wake, self._on_signal, wake)
        self._say_alive()
        await self._stopped.wait()
        running = [call.task for call in self._calls.values() if call.task is not None]
        if running:
            await asyncio.wait(running)
        loop.remove_reader(self._channel.fileno())
        loop.remove_reader(wake)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _on_signal(self, wake: int) -> None:
        os.read(wake, 4096)  # whatever signal it was, its handler has run
        if self.leaving:
            self._stop()

    def _stop(self) -> None:
        if self._stopped is not None:
            self._stopped.set()

    def _on_readable(self) -> None:
        """There was something to read. A call that waited for an answer may have read it since: it is not waited for."""
        if self._channel.is_readable and not self._channel.read():
            self._on_gateway_gone()
        else:
            self._take_frames()

    def _on_gateway_gone(self) -> None:
        for call in list(self._calls.values()):
            call.cancel()
        while self._answers:
            self._answers.popitem()[1].set_result(UNKNOWN)
        self._stop()

    def _take_frames(self) -> None:
        while (frame := self._channel.next_buffered()) is not None:
            match frame:
                case RunBatch():
                    self._start(frame)
                case CancelStream():
                    if frame.job_id in self._calls:
                        self._calls[frame.job_id].cancel()
                case StreamInput():
                    if frame.job_id in self._calls:
                        self._calls[frame.job_id].put(_END if frame.value is None else encoding.decode(frame.value))
                case StateValue():
                    self._on_answer(frame)
                case ReleaseSlots():
                    self._pool.release(frame)
                case StopProcess():
                    self._stop()

    def _say_alive(self) -> None:
        beats = [BatchHeartbeat(call.batch.batch_id, True) for call in self._calls.values()]
        if beats:
            self._channel.send(*beats)
        asyncio.get_running_loop().call_later(ALIVE_EVERY_S, self._say_alive)

    def _tell_taken(self, batch_id: int, job_id: int, count: int) -> None:
        self._channel.send(InputTaken(batch_id, job_id, count))

    def _start(self, batch: RunBatch) -> None:
        job_id = batch.jobs[0].job_id
        call = self._calls[job_id] = RunningCall(batch, partial(self._tell_taken, batch.batch_id, job_id))
        call.task = asyncio.get_running_loop().create_task(self._run(call))

    async def _run(self, call: RunningCall) -> None:
        batch, job = call.batch, call.batch.jobs[0]
        started_ns = time.perf_counter_ns()
        mask = 0
        for other in self._calls.values():
            mask |= read_mask(other.batch.mask)
        units = self._cores.apply(mask)
        shared = [stored for _, stored in job.leaves if isinstance(stored, ShmRef)]
        spans: list[InnerSpan] = []
        state = BatchState(partial(self._read_state, batch.batch_id))
        try:
            output = await self._output(call, job, units, spans, state)
        except asyncio.CancelledError:
            output = LaminaError("cancelled: its client has left")
        except BaseException as error:  # a function may end its call, not its worker
            output = error
        finally:
            del self._calls[job.job_id]
        results = encode_results(self._pool, [output])
        del output
        still_viewed = [ref for ref in shared if self._reader.is_viewed(ref)]
        device_us = (time.perf_counter_ns() - started_ns) // 1000
        packed = (packed_changes(state, results), packed_spans(spans))
        self._channel.send(BatchDone(batch.batch_id, device_us, results, still_viewed, *packed))

    def _read_state(self, batch_id: int, place: int, key: StateKey) -> StateCell:
        """Ask the gateway for a key, and wait for the answer; from the loop, or from a thread of a call."""
        number = next(self._questions)
        question = StateRead(batch_id, place, number, *key)
        if threading.get_ident() != self._loop_thread:
            answer = self._answers[number] = Future()
            self._channel.send(question)
            return answer.result()
        self._channel.send(question)
        while (found := self._channel.wait_for(StateValue)).question != number:  # one of a thread's
            self._on_answer(found)
        asyncio.get_running_loop().call_soon(self._take_frames)  # that came before it
        cell: StateCell = found.cell
        return cell

    def _on_answer(self, frame: StateValue) -> None:
        waiting = self._answers.pop(frame.question, None)
        if waiting is not None:
            waiting.set_result(frame.cell)

    async def _output(self, call: RunningCall, job: JobFrame, units: int, spans: list[InnerSpan], state: BatchState) -> Any:
        """The result of a call, or the exception that it ended with. In a frame of its own: when it returns, nothing of ours
        refers to the inputs any more."""
        if job.error is not None:
            return job.error
        inputs = decode_arguments(job, self._open)
        if self._incoming and job.takes_input:
            inputs[self._incoming] = call.messages()
        batch_id, channel = call.batch.batch_id, self._channel

        def emit(piece: Any) -> bool:
            channel.send(ResultChunk(batch_id, job.job_id, encoding.encode(piece)))
            return not call.is_cancelled

        def beat() -> bool:
            if call.may_beat():
                channel.send(BatchHeartbeat(batch_id))
            return not call.is_cancelled

        ends_s = job.deadline_us / 1e6 if job.deadline_us else math.inf
        context = BatchContext(
            *(units, 1, (job.call_id,), self._device, 0, ends_s, beat, state.transaction(0), (job,), spans, self._function),
            batch_state=state,
        )
        with active_context(context), attach_trace(context):
            return await self._runner.run_concurrently(inputs, emit if job.is_streaming else None, self._threads)

    def _open(self, stored: Stored) -> Any:
        return encoding.decode(self._reader.view(stored) if isinstance(stored, ShmRef) else stored)
