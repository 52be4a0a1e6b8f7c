"""In-process engine: functions in threads of this process, one for each instance.

For code that lies in no file a worker could import (a notebook, an interpreter), and for tests over HTTP that want mocks, a
debugger and coverage to see the functions. Batches, queues and deadlines are the server's own. What a process gives is missing:
a function that hangs keeps its thread, one that ends the process ends the server, and threads share the interpreter.

An instance whose function serves several calls at once (`concurrency=`) has an event loop in its thread, and a task for each.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lamina import encoding
from lamina.core.actions import Action, DropJob, JobRef, Kill, Load, StartBatch, Unload
from lamina.core.events import BatchFinished, Event, InstanceLost, InstanceReady
from lamina.drivers.engine import EngineShared, JobValues, MessageStream
from lamina.engines.inflight import commit_errors, deliver_results
from lamina.errors import BadValue, LaminaError
from lamina.sdk.app import App
from lamina.sdk.app_state import WHICH_REQUEST, BatchState
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.function import Function
from lamina.sdk.runner import Runner
from lamina.types import DeviceSpec
from lamina.values.references import ErrorInfo, Stored
from lamina.values.slot_refs import SlotReferences
from lamina.worker.job_codec import changes_of, decode_arguments, error_info
from lamina.worker.protocol import JobFrame

Mock = Callable[..., Any]
Run = Callable[..., list[Any]]


@dataclass(slots=True, eq=False)
class _Batch:
    action: StartBatch
    jobs: list[JobFrame]
    followers: list[_Batch] = field(default_factory=list)  #: of other instances; they start when this one ends
    messages: _Messages | None = None  #: of its client, while it runs
    cancel: Callable[[], None] | None = None  #: ends the task that it is, in an instance with a loop


@dataclass(slots=True)
class _Prepared:
    """A batch with its inputs decoded, ready to be called."""

    outputs: list[Any]  #: per job; an error where its inputs had one
    calls: dict[int, dict[str, Any]]  #: by job
    state: BatchState
    context: BatchContext
    emit: Callable[[Any], bool] | None


class _Messages:
    """Messages of a client for a call, from the loop's thread to the loop of its instance, which may be later."""

    def __init__(self, on_taken: Callable[[int], None]) -> None:
        self._lock = threading.Lock()
        self._early: list[bytes | None] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._on_taken = on_taken

    def put(self, message: bytes | None) -> None:
        with self._lock, suppress(RuntimeError):  # the loop of the instance has ended
            if self._loop is None:
                self._early.append(message)
            else:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    async def items(self) -> AsyncIterator[Any]:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            for message in self._early:
                self._queue.put_nowait(message)
        while (message := await self._queue.get()) is not None:
            self._on_taken(1)
            yield encoding.decode(message)


@dataclass(slots=True, eq=False)
class _Instance:
    load: Load
    inbox: queue.SimpleQueue[_Batch | None] = field(default_factory=queue.SimpleQueue)
    is_gone: bool = False


class InProcessEngine:
    """Engine whose batches run in threads of this process. `mocks` stand in for functions, call by call."""

    def __init__(
        self,
        app: App,
        devices: Sequence[DeviceSpec],
        mocks: Mapping[str, Mock] | None = None,
        on_stateful: Callable[[str], None] = lambda function: None,
    ) -> None:
        self._on_stateful = on_stateful  #: told of functions that read or change state
        self.devices: Sequence[DeviceSpec] = devices
        self.shared = EngineShared()
        self.references: SlotReferences | None = None  #: all values are in this process
        self._app = app
        self._mocks = dict(mocks or {})
        self._instances: dict[str, _Instance] = {}
        self._open: dict[int, _Batch] = {}
        self._wanted: set[int] = set()

    @property
    def load_errors(self) -> dict[str, ErrorInfo]:
        return self.shared.load_errors

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        self._post, self._values, self._deadline_us = post, values, deadline_us
        self._loop = asyncio.get_running_loop()

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case Load():
                instance = self._instances[action.instance] = _Instance(action)
                threading.Thread(target=self._serve, args=(instance,), name=action.instance, daemon=True).start()
            case Unload():
                self._forget(action.instance)
            case Kill():
                self._forget(action.instance)
                self._post(InstanceLost(action.instance, action.reason))
            case DropJob():
                self._wanted.discard(action.job_id)
                for batch in self._open.values():
                    if batch.action.jobs[0].id == action.job_id:
                        if batch.messages is not None:
                            batch.messages.put(None)
                        if batch.cancel is not None:
                            batch.cancel()
            case _:
                pass

    async def stop(self, grace_s: float) -> None:
        ends_s = self._loop.time() + grace_s
        while self._open and self._loop.time() < ends_s:
            await asyncio.sleep(0.005)
        for name in list(self._instances):
            self._forget(name)

    # ------------------------------------------------------------- on the loop's thread

    def _start(self, action: StartBatch) -> None:
        jobs = []
        for job in action.jobs:
            try:
                given = self._values.inputs(job)
                jobs.append(JobFrame(job.id, job.call_id, given.args, list(given.leaves), self._deadline_us(job.call_id)))
            except LaminaError as error:
                jobs.append(JobFrame(job.id, job.call_id, None, [], error=ErrorInfo(type(error).__name__, error.message)))
        batch = _Batch(action, jobs)
        sink = self._values.pieces.get(action.jobs[0].call_id)
        if isinstance(sink, MessageStream):
            batch.messages = _Messages(partial(self._tell, sink.on_taken))
            sink.attach(batch.messages.put)
        before = self._open.get(action.behind)
        self._open[action.batch_id] = batch
        self._wanted.update(job.id for job in action.jobs)
        if before is None or before.action.instance == action.instance:  # a thread keeps the order of what it is given
            self._instances[action.instance].inbox.put(batch)
        else:
            before.followers.append(batch)

    def _forget(self, name: str) -> None:
        instance = self._instances.pop(name, None)
        if instance is not None:
            instance.is_gone = True
            instance.inbox.put(None)
            for batch in [one for one in self._open.values() if one.action.instance == name]:
                self._close(batch)

    def _close(self, batch: _Batch) -> list[bool]:
        wanted = [job.id in self._wanted for job in batch.action.jobs]
        self._wanted.difference_update(job.id for job in batch.action.jobs)
        del self._open[batch.action.batch_id]
        for follower in batch.followers:
            if follower.action.batch_id in self._open:
                self._instances[follower.action.instance].inbox.put(follower)
        return wanted

    def _on_loaded(self, instance: _Instance, load_us: int, error: ErrorInfo | None) -> None:
        if instance.is_gone:
            return
        if error is None:
            self.load_errors.pop(instance.load.function, None)
            self._post(InstanceReady(instance.load.instance, load_us))
            return
        self.load_errors[instance.load.function] = error
        self._instances.pop(instance.load.instance)
        self._post(InstanceLost(instance.load.instance, "load-failed"))

    def _on_done(self, batch: _Batch, device_us: int, results: list[Any]) -> None:
        if self._open.get(batch.action.batch_id) is not batch:
            return  # its instance was ended meanwhile
        wanted = self._close(batch)
        outcomes = deliver_results(self._values, batch.action.jobs, wanted, results, lambda ref: None)
        self._post(BatchFinished(batch.action.batch_id, device_us, outcomes))

    def _on_chunk(self, job: JobRef, chunk: bytes) -> None:
        deliver = self._values.pieces.get(job.call_id)
        if deliver is not None and job.id in self._wanted:
            deliver(chunk)

    # ------------------------------------------------------------- on the instance's thread

    def _serve(self, instance: _Instance) -> None:
        """Load the function, then run its batches in the order they come."""
        began_ns = time.monotonic_ns()
        function = self._app.functions[instance.load.function]
        mock = self._mocks.get(function.name)
        error, runner = None, None
        try:
            runner = function.open() if mock is None else None
        except BaseException as failure:
            error = error_info(failure.__cause__ or failure)
        self._tell(self._on_loaded, instance, (time.monotonic_ns() - began_ns) // 1000, error)
        if error is not None:
            return
        if runner is not None and function.spec.concurrency > 1:
            runner.run_coroutine(self._serve_at_once(instance, function, runner))
        else:
            run = runner.run if runner is not None else _mocked(mock)
            while (batch := instance.inbox.get()) is not None:
                started_ns = time.perf_counter_ns()
                prepared = self._prepare(function, batch)
                with active_context(prepared.context):
                    found = self._outputs(run, list(prepared.calls.values()), prepared.emit)
                self._finish(function, batch, prepared, found, started_ns)
        if runner is not None:
            runner.close()

    async def _serve_at_once(self, instance: _Instance, function: Function[..., Any], runner: Runner) -> None:
        """Run batches side by side on the loop that `load` ran on, each a call; plain generators in threads of their own."""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        plain = function.streams and not function.is_async
        threads = ThreadPoolExecutor(function.spec.concurrency) if plain else None
        while (batch := await asyncio.to_thread(instance.inbox.get)) is not None:
            task = loop.create_task(self._run_at_once(function, runner, batch, threads))
            batch.cancel = partial(_cancel_in, loop, task)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if threads is not None:
            threads.shutdown(wait=False)

    async def _run_at_once(
        self, function: Function[..., Any], runner: Runner, batch: _Batch, threads: ThreadPoolExecutor | None
    ) -> None:
        started_ns = time.perf_counter_ns()
        prepared = self._prepare(function, batch)
        found: list[Any] = []
        with active_context(prepared.context):
            for inputs in prepared.calls.values():
                try:
                    if batch.action.jobs[0].id not in self._wanted:  # it had left before there was a task to cancel
                        raise asyncio.CancelledError
                    found.append(await runner.run_concurrently(inputs, prepared.emit, threads))
                except asyncio.CancelledError:
                    found.append(LaminaError("cancelled: its client has left"))
                except BaseException as error:  # as in a worker: a function ends its call, not its thread
                    found.append(error)
        self._finish(function, batch, prepared, found, started_ns)

    def _prepare(self, function: Function[..., Any], batch: _Batch) -> _Prepared:
        outputs: list[Any] = [job.error for job in batch.jobs]
        calls: dict[int, dict[str, Any]] = {}
        for index, job in enumerate(batch.jobs):
            if job.error is None:
                try:
                    calls[index] = decode_arguments(job, _decoded)
                except Exception as error:
                    outputs[index] = error
        if batch.messages is not None and function.incoming and 0 in calls:
            calls[0][function.incoming] = batch.messages.items()
        due_us = min((job.deadline_us for job in batch.jobs if job.deadline_us), default=0)
        state = BatchState(lambda place, key: self._app.local_state.read(key))
        emit = self._emit_for(batch) if function.streams else None
        context = BatchContext(
            batch.action.mask.bit_count(),
            len(calls),
            tuple(batch.jobs[index].call_id for index in calls),
            batch.action.device,
            ends_s=due_us / 1e6 if due_us else math.inf,
            beat=lambda: any(job.id in self._wanted for job in batch.action.jobs),
            transaction=WHICH_REQUEST if function.spec.max_batch > 1 else state.transaction(0),
            function=function.name,
            batch_state=state,
            places=tuple(calls),
        )
        return _Prepared(outputs, calls, state, context, emit)

    def _finish(
        self, function: Function[..., Any], batch: _Batch, prepared: _Prepared, found: list[Any], started_ns: int
    ) -> None:
        outputs, emit = prepared.outputs, prepared.emit
        for index, output in zip(prepared.calls, found, strict=True):
            outputs[index] = output
        results = [_encoded(output) for output in outputs]
        changes = changes_of(prepared.state, results)
        if changes:
            self._tell(self._on_stateful, function.name)
            verdicts = self._app.local_state.commit_batch(changes)
            for place, failed in commit_errors(batch.action.jobs, verdicts, lambda job: emit is None).items():
                results[place] = failed
        self._tell(self._on_done, batch, (time.perf_counter_ns() - started_ns) // 1000, results)

    def _outputs(self, run: Run, calls: list[dict[str, Any]], emit: Callable[[Any], bool] | None) -> list[Any]:
        try:
            return run(calls, emit) if calls else []
        except BaseException as error:  # as in a worker: a function ends its call, not its thread
            return [error] * len(calls)

    def _emit_for(self, batch: _Batch) -> Callable[[Any], bool] | None:
        job = batch.action.jobs[0]
        if job.call_id not in self._values.pieces:
            return None

        def emit(piece: Any) -> bool:
            self._tell(self._on_chunk, job, encoding.encode(piece))
            return job.id in self._wanted

        return emit

    def _tell(self, act: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the server has stopped, and its loop with it
            self._loop.call_soon_threadsafe(act, *args)


def _cancel_in(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(RuntimeError):  # the loop of the instance has ended
        loop.call_soon_threadsafe(task.cancel)


def _decoded(stored: Stored) -> Any:
    assert isinstance(stored, bytes), "a value that is not in this process"
    return encoding.decode(stored)


def _encoded(output: Any) -> bytes | ErrorInfo:
    if isinstance(output, ErrorInfo):
        return output
    if isinstance(output, BaseException):
        return error_info(output)
    try:
        return encoding.encode(output)
    except BadValue as error:  # the function's fault, not the caller's
        return ErrorInfo("TypeError", f"its result: {error.message}; {error.hint}")
    except Exception as error:
        return error_info(error)


def _mocked(mock: Mock | None) -> Run:
    assert mock is not None

    def run(calls: list[dict[str, Any]], emit: Callable[[Any], bool] | None = None) -> list[Any]:
        return run_mock(mock, calls)

    return run


def run_mock(mock: Mock, calls: list[dict[str, Any]]) -> list[Any]:
    """Results of a mock for the calls of a batch; what it raises is the result of that call."""
    results: list[Any] = []
    for call in calls:
        try:
            results.append(mock(**call))
        except Exception as error:
            results.append(error)
    return results
