"""Local run of a States Language machine in this process: the real controller and value store around plain callables.

In virtual time nothing is waited for: the clock leaps from one event to the next, and a task takes what it says it takes
(an attribute `takes_s`), or what it really took if that is long enough to matter. In real time tasks run in threads.
"""

from __future__ import annotations

import inspect
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from lamina import encoding, policies
from lamina.asl.errors import StateError
from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.controller import Controller
from lamina.core.workflow.flow import Flow
from lamina.errors import FunctionFailed, LaminaError
from lamina.ipc.protocol import ErrorInfo
from lamina.types import NEVER_US, Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits
from lamina.values.asl_values import INPUT
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


class _UnknownLatency:
    """Predictor for work that was never measured: one microsecond, so that nothing is ever taken to hang."""

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        return 1

    def load_us(self, function: str, kind: str) -> int:
        return 0

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        pass

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        pass

    def relax(self, function: str) -> None:
        pass


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
        self.history: list[tuple[int, ev.Event, list[do.Action]]] = []

    def run(self, given: Any, name: str = "run") -> ExecutionOutcome:
        execution = _Execution(self._flow, self._tasks, self._virtual, self._began_us, self._rng, self.history)
        return execution.run(name, given)


class _Execution:
    def __init__(
        self,
        flow: Flow,
        tasks: Mapping[str, Task],
        virtual: bool,
        began_us: int,
        rng: random.Random,
        history: list[tuple[int, ev.Event, list[do.Action]]],
    ) -> None:
        self._flow = flow
        self._tasks = tasks
        self._virtual = virtual
        self._history = history
        self.now_us = 0
        self._origin_ns = time.monotonic_ns()
        self._data = RunValues(None, None, wall_us=lambda: began_us + self.now_us, rng=rng)
        self._controller = Controller(policies.build("fifo"), _UnknownLatency(), hang_floor_us=NEVER_US)
        self._heap: list[tuple[int, int, Callable[[], ev.Event | None]]] = []
        self._ticks: list[int] = []
        self._order = 0
        self._inbox: queue.SimpleQueue[Callable[[], ev.Event | None]] = queue.SimpleQueue()
        self._outcome: ExecutionOutcome | None = None
        self._booked: dict[int, do.StartBatch] = {}  #: by the batch they are behind

    def run(self, name: str, given: Any) -> ExecutionOutcome:
        units = MAX_CONCURRENT_VIRTUAL if self._virtual else MAX_CONCURRENT
        limits = SliceLimits(batches_per_instance=0)
        device = DeviceSpec(id="here", kind="here", family="cpu", units=units, memory_mib=10**6, limits=limits)
        specs = tuple(
            FunctionSpec(name=task, idempotent=False, max_queue=10**9, scale=ScaleSpec(max=1)) for task in self._flow.functions
        )
        self._tell(ev.DeviceJoined(device))
        self._tell(ev.Deployed(specs, (self._flow,)))
        self._data.open(name, self._flow, {INPUT: encoding.encode(given)})
        self._tell(ev.CallArrived(Call(name, self._flow.name, self.now_us)))
        while self._outcome is None:
            self._next()
        return self._outcome

    # ------------------------------------------------------------------------ the world

    def _next(self) -> None:
        """Handle the next event."""
        due_us = self._heap[0][0] if self._heap else NEVER_US
        tick_us = self._ticks[0] if self._ticks else NEVER_US
        if not self._virtual and due_us > self._clock_us():
            wait_s = (min(due_us, tick_us) - self._clock_us()) / 1e6
            try:
                event = self._inbox.get(timeout=max(0.0, min(wait_s, 3600.0)))()
            except queue.Empty:
                event = None
            self.now_us = self._clock_us()
            if event is not None:
                self._tell(event)
            elif tick_us <= self.now_us:
                heappop(self._ticks)
                self._tell(ev.Tick())
        elif due_us <= tick_us:
            self.now_us, _, happens = heappop(self._heap)
            event = happens()
            if event is not None:
                self._tell(event)
        else:
            self._tick(tick_us)

    def _tick(self, tick_us: int) -> None:
        """Handle due ticks. While no job waits for a slot, ticks that would only look around are skipped."""
        state = self._controller.state
        if self._virtual and not state.waiting and not state.deferred:
            next_us = self._heap[0][0] if self._heap else NEVER_US
            tick_us = max(tick_us, min(next_us, self._controller.next_run_timer_us))
        self.now_us = max(self.now_us, tick_us)
        while self._ticks and self._ticks[0] <= self.now_us:
            heappop(self._ticks)
            self._tell(ev.Tick())

    def _clock_us(self) -> int:
        return (time.monotonic_ns() - self._origin_ns) // 1000

    def _tell(self, event: ev.Event) -> None:
        if self._outcome is not None:
            return
        actions = self._controller.handle(self.now_us, event)
        self._history.append((self.now_us, event, actions))
        for action in actions:
            self._perform(action)
        if isinstance(event, ev.BatchFinished) and event.batch_id in self._booked:
            self._start(self._booked.pop(event.batch_id))

    def _later(self, at_us: int, happens: Callable[[], ev.Event | None]) -> None:
        self._order += 1
        heappush(self._heap, (at_us, self._order, happens))

    def _perform(self, action: do.Action) -> None:
        match action:
            case do.StartBatch():
                if action.behind:  # it has the place of that one, and so begins when that one ends
                    self._booked[action.behind] = action
                else:
                    self._start(action)
            case do.Load():
                self._later(self.now_us, lambda: ev.InstanceReady(action.instance))
            case do.WakeAt():
                heappush(self._ticks, action.at_us)
            case do.ResolveData():
                self._later(self.now_us, lambda: self._answer(action))
            case do.Kill():
                self._later(self.now_us, lambda: ev.InstanceLost(action.instance, action.reason))
            case do.Reply():
                self._outcome = ExecutionOutcome(True, encoding.decode(self._data.result(action.call_id)), took_us=self.now_us)
            case do.FailCall():
                said = self._data.error(action.call_id, action)
                error, cause = (said.type, said.message) if said is not None else (action.error, "")
                self._outcome = ExecutionOutcome(False, None, error, cause, self.now_us)
            case do.Reject():
                self._outcome = ExecutionOutcome(False, None, "States.Runtime", f"refused: {action.reason}", self.now_us)
            case _:
                pass

    def _answer(self, question: do.ResolveData) -> ev.Event | None:
        run = self._controller.state.runs.get(question.call_id)
        return None if run is None else self._data.resolve(question, run.next_scope)

    # ---------------------------------------------------------------------------- tasks

    def _start(self, action: do.StartBatch) -> None:
        [job] = action.jobs  # functions of a machine do not batch
        task = self._tasks[action.function]
        given = self._data.inputs(job)
        arguments = {name: encoding.decode(stored) for (_, name), stored in given.leaves if isinstance(stored, bytes)}
        context = TaskContext(job.call_id, job.node, job.id, lambda: self._inbox.put(lambda: ev.Heartbeat(job.call_id, job.id)))
        if not self._virtual:

            def work() -> None:
                begin_ns = time.monotonic_ns()
                result = call_task(task, arguments, context)
                took_us = (time.monotonic_ns() - begin_ns) // 1000
                self._inbox.put(lambda: self._finish(action, job, result, took_us))

            threading.Thread(target=work, name=f"task {job.node}", daemon=True).start()  # one that is given up may go on
            return
        begin_s = time.perf_counter()
        result = call_task(task, arguments, context)
        really_s = time.perf_counter() - begin_s
        took_s = getattr(task, "takes_s", really_s if really_s >= MIN_COUNTED_S else 0.0)
        took_us = round(took_s * 1_000_000)
        beats_us = round(getattr(task, "beats_s", 0.0) * 1_000_000)
        for beat_us in range(beats_us, took_us, beats_us) if beats_us else ():
            self._later(self.now_us + beat_us, lambda: ev.Heartbeat(job.call_id, job.id))
        self._later(self.now_us + took_us, lambda: self._finish(action, job, result, took_us))

    def _finish(self, action: do.StartBatch, job: do.JobRef, result: bytes | ErrorInfo, took_us: int) -> ev.Event | None:
        run = self._controller.state.runs.get(job.call_id)
        wanted = run is not None and job.id in run.jobs
        if isinstance(result, ErrorInfo):
            if wanted:
                self._data.put_error(job, result)
            outcome = ev.JobOutcome(False, "function-failed", result.type)
        else:
            if wanted:
                self._data.put(job, result)
            outcome = ev.JobOutcome()
        return ev.BatchFinished(action.batch_id, took_us, (outcome,))


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
