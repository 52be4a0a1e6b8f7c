"""Local run of a States Language machine in this process: the real controller and value store around plain callables.

In virtual time nothing is waited for: the clock leaps from one event to the next, and a task takes what it says it takes
(an attribute `takes_s`), or what it really took if that is long enough to matter. In real time tasks run in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lamina import encoding, policies
from lamina.asl.errors import StateError
from lamina.core.actions import Action, JobRef, Kill, Load, Reject, Reply, StartBatch
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, Deployed, DeviceJoined, Event, Heartbeat, InstanceLost, InstanceReady, JobOutcome
from lamina.core.workflow.flow import Flow
from lamina.drivers.driver import Ending
from lamina.drivers.engine import JobValues
from lamina.drivers.realtime import RealtimeDriver
from lamina.drivers.virtual import DeviceChange, Scheduled, VirtualDriver
from lamina.errors import FunctionFailed, LaminaError
from lamina.policies import new_controller
from lamina.predict.profile_table import ProfileTable
from lamina.types import NEVER_US, Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits
from lamina.values.asl_values import INPUT
from lamina.values.references import ErrorInfo
from lamina.values.run_values import RunValues

MIN_COUNTED_S = 0.05
"""A task that really took less took no time at all, in virtual time: runs of one document agree to the microsecond."""

MAX_CONCURRENT, MAX_CONCURRENT_VIRTUAL = 64, 1_024
"""Tasks that run side by side, in real and in virtual time; others wait."""

Task = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ExecutionOutcome:
    ok: bool
    output: Any = None
    error: str = ""
    cause: str = ""
    took_us: int = 0


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Context of a task, for those that take a second argument."""

    run: str
    state: str
    job_id: int
    heartbeat: Callable[[], None]


class _UnknownLatency(ProfileTable):
    """Predictor for work that was never measured: one microsecond, so that nothing is ever taken to hang."""

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        return 1


class LocalStateMachine:
    """A state machine that runs in this process.

    `tasks` are the functions the flow calls, by name. `began_us` is the time of day at the start, since 1970.
    """

    def __init__(
        self, flow: Flow, tasks: Mapping[str, Task], *, virtual: bool = True, began_us: int | None = None, seed: int | None = None
    ) -> None:
        self._flow = flow
        self._tasks = tasks
        self._virtual = virtual
        self._began_us = time.time_ns() // 1000 if began_us is None else began_us
        self._rng = random.Random(seed)
        self.history: list[tuple[int, Event, list[Action]]] = []

    def run(self, given: Any, name: str = "run") -> ExecutionOutcome:
        inputs = {INPUT: encoding.encode(given)}
        return self._run_virtual(inputs, name) if self._virtual else asyncio.run(self.run_realtime(given, name))

    def _run_virtual(self, inputs: dict[str, bytes], name: str) -> ExecutionOutcome:
        controller = local_controller()
        data = RunValues(None, None, wall_us=lambda: self._began_us + driver.now_us(), rng=self._rng)
        executor = VirtualTasks(self._tasks, controller, data)
        driver = VirtualDriver(controller, executor, data, observers=[self._observe], skips_idle_ticks=True)
        for event in local_setup(self._flow):
            driver.post(event)
        outcomes: list[ExecutionOutcome] = []
        call = Call(name, self._flow.name, driver.now_us())
        driver.submit(call, inputs, lambda ending: outcomes.append(outcome_of(ending, data, driver.now_us())))
        driver.run(until=lambda: bool(outcomes))
        return outcomes[0]

    async def run_realtime(self, given: Any, name: str = "run") -> ExecutionOutcome:
        """Run on the clock of the running event loop."""
        inputs = {INPUT: encoding.encode(given)}
        controller = local_controller()
        data = RunValues(None, None, wall_us=lambda: self._began_us + driver.now_us(), rng=self._rng)
        driver = RealtimeDriver(controller, _ThreadEngine(self._tasks, controller), data, observers=[self._observe])
        outcome: asyncio.Future[ExecutionOutcome] = asyncio.get_running_loop().create_future()
        await driver.start(local_deployment(self._flow))
        try:
            call = Call(name, self._flow.name, driver.now_us())
            driver.submit(
                call,
                inputs,
                lambda ending: outcome.set_result(outcome_of(ending, data, driver.now_us() - call.arrived_us)),
            )
            return await outcome
        finally:
            await driver.stop()

    def _observe(self, now_us: int, event: Event, actions: list[Action]) -> None:
        self.history.append((now_us, event, actions))


def outcome_of(ending: Ending, data: RunValues, took_us: int) -> ExecutionOutcome:
    if isinstance(ending, Reply):
        return ExecutionOutcome(True, encoding.decode(data.result(ending.call_id)), took_us=took_us)
    if isinstance(ending, Reject):
        return ExecutionOutcome(False, None, "States.Runtime", f"refused: {ending.reason}", took_us)
    said = data.error(ending.call_id, ending)
    error, cause = (said.type, said.message) if said is not None else (ending.error, "")
    return ExecutionOutcome(False, None, error, cause, took_us)


# ------------------------------------------------------------- what there is to run on


def local_controller() -> Controller:
    return new_controller(policies.build("fifo"), _UnknownLatency([]), hang_floor_us=NEVER_US)


def local_setup(flow: Flow) -> list[Event]:
    """One device with a unit for every task that runs at a time, and the tasks of the flow as functions."""
    return [DeviceJoined(_device(MAX_CONCURRENT_VIRTUAL)), local_deployment(flow)]


def local_deployment(flow: Flow) -> Deployed:
    specs = [FunctionSpec(name=task, idempotent=False, max_queue=10**9, scale=ScaleSpec(max=1)) for task in flow.functions]
    return Deployed(tuple(specs), (flow,))


def _device(units: int) -> DeviceSpec:
    limits = SliceLimits(batches_per_instance=0)
    return DeviceSpec(id="here", kind="here", family="cpu", units=units, memory_mib=10**6, limits=limits)


# --------------------------------------------------------------------------------- tasks


class VirtualTasks:
    """Executor of tasks in virtual time. A task is called when its batch starts; its result is there when that has ended."""

    def __init__(self, tasks: Mapping[str, Task], controller: Controller, data: RunValues) -> None:
        self._tasks = tasks
        self._controller = controller
        self._data = data
        self._booked: dict[int, StartBatch] = {}  #: by the batch they are behind

    def perform(self, now_us: int, action: Action) -> Scheduled:
        match action:
            case StartBatch() if action.behind:  # it has the slice of that one, and so begins when that one ends
                self._booked[action.behind] = action
                return ()
            case StartBatch():
                return self._start(now_us, action)
            case Load():
                return [(now_us, InstanceReady(action.instance))]
            case Kill():
                return [(now_us, InstanceLost(action.instance, action.reason))]
            case _:
                return ()

    def before_event(self, now_us: int, event: Event | DeviceChange) -> Scheduled:
        if isinstance(event, BatchFinished) and event.batch_id in self._booked:
            return self._start(now_us, self._booked.pop(event.batch_id))
        return ()

    def _start(self, now_us: int, action: StartBatch) -> Scheduled:
        [job] = action.jobs
        task, beat = self._tasks[action.function], Heartbeat(job.call_id, job.id)
        begin_s = time.perf_counter()
        result = call_task(task, _arguments(self._data, job), TaskContext(job.call_id, job.node, job.id, lambda: None))
        really_s = time.perf_counter() - begin_s
        took_s = getattr(task, "takes_s", really_s if really_s >= MIN_COUNTED_S else 0.0)
        took_us = round(took_s * 1_000_000)
        every_us = round(getattr(task, "beats_s", 0.0) * 1_000_000)
        beats = [(now_us + at_us, beat) for at_us in range(every_us, took_us, every_us)] if every_us else []
        return [*beats, (now_us + took_us, partial(_finish, self._controller, self._data, action, result, took_us))]


class _ThreadEngine:
    """Engine that calls tasks in threads, in real time."""

    shared: Any = None  #: no processes, and so nothing that they share
    references: Any = None

    def __init__(self, tasks: Mapping[str, Task], controller: Controller) -> None:
        self.devices = [_device(MAX_CONCURRENT)]
        self.load_errors: dict[str, ErrorInfo] = {}
        self._tasks = tasks
        self._controller = controller
        self._booked: dict[int, StartBatch] = {}  #: by the batch they are behind

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        self._post = post
        self._data = values
        self._loop = asyncio.get_running_loop()

    async def stop(self, grace_s: float) -> None:
        """A task that was given up may go on in its thread."""

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch() if action.behind:
                self._booked[action.behind] = action
            case StartBatch():
                self._start(action)
            case Load():
                self._post(InstanceReady(action.instance))
            case Kill():
                self._post(InstanceLost(action.instance, action.reason))
            case _:
                pass

    def _start(self, action: StartBatch) -> None:
        [job] = action.jobs
        arguments = _arguments(self._data, job)
        beat = partial(self._from_thread, self._post, Heartbeat(job.call_id, job.id))
        context = TaskContext(job.call_id, job.node, job.id, beat)

        def work() -> None:
            begin_ns = time.monotonic_ns()
            result = call_task(self._tasks[action.function], arguments, context)
            self._from_thread(self._finish, action, result, (time.monotonic_ns() - begin_ns) // 1000)

        threading.Thread(target=work, name=f"task {job.node}", daemon=True).start()

    def _from_thread(self, callback: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the run has ended, and its loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _finish(self, action: StartBatch, result: bytes | ErrorInfo, took_us: int) -> None:
        self._post(_finish(self._controller, self._data, action, result, took_us))
        follower = self._booked.pop(action.batch_id, None)
        if follower is not None:
            self._start(follower)


def _arguments(data: JobValues, job: JobRef) -> dict[str, Any]:
    return {name: encoding.decode(stored) for (_, name), stored in data.inputs(job).leaves if isinstance(stored, bytes)}


def _finish(
    controller: Controller, data: JobValues, action: StartBatch, result: bytes | ErrorInfo, took_us: int
) -> BatchFinished:
    [job] = action.jobs  # functions of a state machine do not batch
    run = controller.state.runs.get(job.call_id)
    is_wanted = run is not None and job.id in run.jobs
    if isinstance(result, ErrorInfo):
        if is_wanted:
            data.put_error(job, result)
        return BatchFinished(action.batch_id, took_us, (JobOutcome(False, "function-failed", result.type),))
    if is_wanted:
        data.put(job, result)
    return BatchFinished(action.batch_id, took_us, (JobOutcome(),))


def call_task(task: Task, arguments: dict[str, Any], context: TaskContext) -> bytes | ErrorInfo:
    """What a task gives, encoded, or what went wrong. An error goes by the name of its class, unless it says another."""
    try:
        if set(arguments) == {INPUT}:
            result = task(*(arguments[INPUT], context)[: _positional_count(task)])
        else:
            result = task(**arguments)
        return encoding.encode(result)
    except StateError as error:
        return ErrorInfo(error.name, error.cause)
    except FunctionFailed as error:
        return ErrorInfo(error.error or type(error).__name__, error.message)
    except LaminaError as error:
        return ErrorInfo(type(error).__name__, error.message)
    except Exception as error:
        return ErrorInfo(type(error).__name__, str(error))


def _positional_count(task: Task) -> int:
    """How many of (input, context) a callable takes: two only if it insists on both."""
    try:
        params = inspect.signature(task).parameters.values()
    except (TypeError, ValueError):
        return 1
    places = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not places and not any(p.kind is p.VAR_POSITIONAL for p in params):
        return 0
    return 2 if len([p for p in places if p.default is p.empty]) >= 2 else 1
