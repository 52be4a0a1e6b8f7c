"""Real-time driver: one asyncio thread around the controller, events in, actions out, nothing in between.

`post` runs the controller there and then, on the caller's stack: no queue, no task, no await. Events that actions lead to at
once are handled in turn before it returns. Only what to run is decided once for all calls that were read in one go: sixteen
clients that call again together are one batch, and one decision instead of sixteen.

Questions about data are the one thing that a client can make take long: a loop of states asks thousands. They get a slice of each
turn of the event loop; what is left over waits for the next one, in its order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from time import monotonic_ns
from typing import Any, Protocol

from lamina.core.actions import Action, AppendJournal, FailCall, JobRef, Load, Reject, Reply, ResolveData, StartBatch, WakeAt
from lamina.core.controller import Controller
from lamina.core.events import (
    ArrivalsDrained,
    BatchFailed,
    CallArrived,
    CallCancelled,
    CallRecovered,
    DataResolved,
    Deployed,
    DeviceJoined,
    Event,
    InstanceLost,
    Journaled,
    ReplayDone,
    Tick,
)
from lamina.core.flight_recorder import BLOCK, FlightRecorder
from lamina.core.scheduling.jobs import RunDefects
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.runs import ROOT
from lamina.drivers.driver import INTERNAL, Driver, Ending, EventObserver, OnEnd
from lamina.drivers.engine import Engine
from lamina.errors import LaminaError, PolicyError
from lamina.ipc.event_loop import Timer, clock_us
from lamina.types import NEVER_US, Call
from lamina.values.references import ErrorInfo, Stored
from lamina.values.run_values import RunValues

log = logging.getLogger("lamina")

SLICE_US = 5_000
"""Of a turn of the event loop, for questions about data; one that takes longer ends its slice."""

COUNTED_US = 1_000
"""Less than this in several turns is as good as nothing."""


class Interceptor(Protocol):
    """Stands between a driver and its engine, and keeps some events to itself (shadow batches)."""

    def intercept(self, post: Callable[[Event], None], data: Any) -> tuple[Callable[[Event], None], Any]:
        """What the engine is to be started with."""
        ...

    def close(self) -> None: ...


class RealtimeDriver(Driver):
    """Driver on the machine's monotonic clock."""

    def __init__(
        self,
        controller: Controller,
        engine: Engine,
        data: RunValues,
        *,
        interceptor: Interceptor | None = None,
        observers: Iterable[EventObserver] = (),
        recorder: FlightRecorder | None = None,
    ) -> None:
        super().__init__(controller, *observers)
        self.recorder = recorder or FlightRecorder()  #: of the last decisions, for `lamina explain`
        self.engine = engine
        self.data = data
        self.decision_us = 0  #: how long the last decision took
        self.capacity_generation = 0  #: of events that may let more be admitted: no arrivals, nor events that led to nothing
        self._interceptor = interceptor
        self._append_journal: Callable[[AppendJournal], None] = _no_journal
        self._unconfirmed: Container[str] = ()
        self._confirm: Callable[[str, Callable[[LaminaError | None], None]], None] = _no_confirm
        self._inbox: deque[Event | ResolveData] = deque()
        self._is_handling = False
        self._origin_us = clock_us()
        self._timer: Timer | None = None
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        self._drain_is_scheduled = False  #: `ArrivalsDrained` is on its way
        self._is_stopped = False
        self._evaluated_us = 0  #: in this slice
        self._slice_is_scheduled = False
        self._due: ResolveData | None = None  #: the question whose turn has come
        self._deferred: deque[tuple[str, ResolveData | Callable[[], None]]] = deque()
        self._deferred_calls: dict[str, int] = {}  #: how many of each call wait there

    async def start(self, deployed: Deployed) -> None:
        self._call_soon = asyncio.get_running_loop().call_soon
        self._timer = Timer(asyncio.get_running_loop())
        post: Callable[[Event], None] = self.post
        data = self.data
        if self._interceptor is not None:
            post, data = self._interceptor.intercept(post, data)
        await self.engine.start(post, data, self.deadline_us)
        for device in self.engine.devices:
            self.post(DeviceJoined(device))
        self.post(deployed)

    def set_journal(self, append: Callable[[AppendJournal], None]) -> None:
        """Journal durable runs with this function, which posts `Journaled` when an entry is on disk."""
        self._append_journal = append

    def set_barrier(
        self, unconfirmed: Container[str], confirm: Callable[[str, Callable[[LaminaError | None], None]], None]
    ) -> None:
        """Let the answers of these calls wait until `confirm` calls back. With an error, the call has failed with that."""
        self._unconfirmed, self._confirm = unconfirmed, confirm

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000 - self._origin_us  # `clock_us`, without a call: asked seven times a request

    def from_clock_us(self, clock_us: int) -> int:
        """A time on the machine's clock, as `now_us` counts."""
        return clock_us - self._origin_us

    def deadline_us(self, call_id: str) -> int:
        """Until when this call is worth running, on the machine's clock; 0 if there is no limit."""
        run = self.controller.state.runs.get(call_id)
        return 0 if run is None or run.call.expires_us >= NEVER_US else self._origin_us + run.call.expires_us

    def error_info(self, failure: FailCall) -> ErrorInfo | None:
        """Error details of a failed call: the user's own exception where there was one."""
        run_error = self.data.error(failure.call_id, failure)
        return run_error or self.engine.load_errors.get(failure.step)

    def submit(self, call: Call, inputs: Mapping[str, Stored], on_end: OnEnd, began_us: int = 0) -> None:
        """Hand in a call; `on_end` is called once, with `data` still holding its result. `began_us`: see `RunValues.open`."""
        self.data.open(call.id, self.controller.flows[call.target], inputs, began_us)  # it raises before anything is kept
        self._pending[call.id] = on_end
        call_soon = self._call_soon
        self.post(CallArrived(call, call_soon is not None))
        if call_soon is not None and not self._drain_is_scheduled and self.controller.state.waiting:
            self._drain_is_scheduled = True
            call_soon(self._arrivals_drained)

    def answer(self, reply: Reply, blob: bytes, on_end: OnEnd) -> None:
        """End a call that never was handed in with a result that is known: for `on_end` it is as if it had run."""
        self.data.provide(reply.call_id, blob)
        self._pending[reply.call_id] = on_end
        self._end(self.data, reply)

    def _arrivals_drained(self) -> None:
        """Everything that could be read by now has been."""
        self._drain_is_scheduled = False
        self.post(ArrivalsDrained())

    def recover(self, recovered: CallRecovered, flow: Flow, inputs: dict[str, bytes], on_end: OnEnd, began_us: int) -> None:
        """Restart a durable call, to replay its journal."""
        assert not self._is_handling, "the journal must not overtake the questions of the run"
        self.data.open(recovered.call.id, flow, inputs, began_us)
        self._pending[recovered.call.id] = on_end
        self.post(recovered)

    def forget(self, call_id: str) -> None:
        """Take a call out of all books without an ending: it could not be handed in."""
        self._pending.pop(call_id, None)
        self.data.close(call_id)
        if call_id in self.controller.state.runs:
            self.post(CallCancelled(call_id))

    def post(self, event: Event) -> None:
        """Handle an event, and what follows from it at once. A defect of one call ends that call; it is raised for deployments
        alone, which are checked before anything changes."""
        self._inbox.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        recent = self.recorder.recent
        try:
            while self._inbox:
                next_event = self._inbox.popleft()
                now_us = monotonic_ns() // 1000 - self._origin_us
                is_question = isinstance(next_event, ResolveData)
                try:
                    if isinstance(next_event, ResolveData):
                        if (self._evaluated_us > SLICE_US or self._deferred_calls) and self._defer(next_event):
                            continue
                        answer = self._resolve_data(self.data, next_event)
                        if answer is None:
                            continue
                        next_event = answer
                    actions = self.controller.handle(now_us, next_event)
                except Exception as error:
                    is_checked = next_event is event and isinstance(event, Deployed) and not self.controller.is_deciding
                    if is_checked and not isinstance(error, PolicyError):
                        raise  # it is checked before anything changes, and its deployer is told
                    actions = self._contain(next_event, error)
                self.decision_us = monotonic_ns() // 1000 - self._origin_us - now_us
                if is_question:
                    self._count_evaluation()
                kind = type(next_event)
                if actions and kind is not CallArrived and kind is not ArrivalsDrained:
                    self.capacity_generation += 1
                for action in actions:
                    try:
                        self._perform(action)
                    except Exception as error:
                        self._on_unperformed(action, error)
                if not isinstance(next_event, ResolveData):
                    for observer in self._observers:
                        try:
                            observer(now_us, next_event, actions)
                        except Exception:
                            log.exception("an observer of events failed")
                    recent.append((now_us, next_event, actions))
                    if len(recent) >= BLOCK:
                        self.recorder.pack()
        finally:
            self._is_handling = False

    # ------------------------------------------------------------------- slices

    def _count_evaluation(self) -> None:
        self._evaluated_us += self.decision_us
        if self._evaluated_us > COUNTED_US and not self._slice_is_scheduled and self._call_soon is not None:
            self._slice_is_scheduled = True
            self._call_soon(self._next_slice)

    def _defer(self, question: ResolveData) -> bool:
        """Defer a question to the next slice, if this one is over or others of its run wait there. A replay is never deferred:
        its journal follows at once."""
        call_id, run = question.call_id, self.controller.workflow_run(question.call_id)
        if question is self._due or run is None or run.is_replaying or not self._slice_is_scheduled:
            return False
        if self._evaluated_us <= SLICE_US and call_id not in self._deferred_calls:
            return False
        self._push_deferred(call_id, question)
        return True

    def _push_deferred(self, call_id: str, waiting: ResolveData | Callable[[], None]) -> None:
        self._deferred.append((call_id, waiting))
        self._deferred_calls[call_id] = self._deferred_calls.get(call_id, 0) + 1

    def when_settled(self, call_id: str, act: Callable[[], None]) -> None:
        """Act when no question of this call waits for its slice: what moves a durable run comes in the order of its replay."""
        if call_id in self._deferred_calls:
            self._push_deferred(call_id, act)
        else:
            act()

    def _next_slice(self) -> None:
        self._evaluated_us = 0
        while self._deferred and self._evaluated_us <= SLICE_US:  # at least one of them
            call_id, waiting = self._deferred.popleft()
            left = self._deferred_calls.pop(call_id) - 1
            if left:
                self._deferred_calls[call_id] = left
            try:
                if isinstance(waiting, ResolveData):
                    self._due = waiting
                    self.post(waiting)  # type: ignore[arg-type]
                else:
                    waiting()
            except Exception:
                log.exception("what was left of a slice failed")
        self._slice_is_scheduled = bool(self._deferred)
        if self._deferred and self._call_soon is not None:
            self._call_soon(self._next_slice)

    def _contain(self, event: Event | ResolveData, error: Exception) -> list[Action]:
        """Contain a defect: it ends the call that the event is of, and no other. What was decided before stands."""
        if isinstance(error, RunDefects):
            defects = error.by_call
        else:
            defects = {"" if self.controller.is_deciding else _call_of(event): error}
        actions = self.controller.take_actions()
        for call_id, defect in defects.items():
            what = f"{type(event).__name__} of {call_id or 'no single call'} could not be handled"
            if isinstance(error, PolicyError):  # decisions are checked before they are applied: the state is sound
                what = "the policy decided something impossible; its decision was left out"
            log.error("%s", what, exc_info=defect)
            if call_id:
                self._abandon(call_id, defect)
        return actions

    def _on_unperformed(self, action: Action, error: Exception) -> None:
        """An action that fails is answered as its engine would: a batch has failed, an instance is lost, a run cannot go on."""
        log.error("%s could not be performed", type(action).__name__, exc_info=error)
        if isinstance(action, StartBatch):
            self._inbox.append(BatchFailed(action.batch_id, INTERNAL))
        elif isinstance(action, Load):
            self._inbox.append(InstanceLost(action.instance))
        elif isinstance(action, AppendJournal):
            self._abandon(action.call_id, error)

    def _abandon(self, call_id: str, error: Exception) -> None:
        """End a call that a defect has stopped, here and in the controller's books."""
        on_end = self._pending.get(call_id)
        if on_end is not None:
            self.data.put_error(JobRef(0, call_id, ROOT, INTERNAL), ErrorInfo(type(error).__name__, str(error)[:1_000]))
            self._end(self.data, FailCall(call_id, INTERNAL, INTERNAL))
        if call_id in self.controller.state.runs:
            self._inbox.append(CallCancelled(call_id))

    def _perform(self, action: Action) -> None:
        kind = type(action)
        if kind is Reply or kind is FailCall or kind is Reject:
            if action.call_id in self._unconfirmed:  # type: ignore[union-attr]
                self._end_confirmed(action)  # type: ignore[arg-type]
            else:
                self._end(self.data, action)  # type: ignore[arg-type]
        elif kind is StartBatch:
            self.engine.perform(action)
        elif kind is WakeAt:
            assert self._timer is not None
            self._timer.call_at(self._origin_us + action.at_us, self._tick)  # type: ignore[union-attr]
        elif kind is ResolveData:
            self._inbox.append(action)  # type: ignore[arg-type]
        elif kind is AppendJournal:
            self._append_journal(action)  # type: ignore[arg-type]
        else:
            self.engine.perform(action)

    def _end_confirmed(self, ending: Ending) -> None:
        """End a call that has read or changed state, when that is confirmed. Its values are there until then."""

        def confirmed(error: LaminaError | None) -> None:
            failed = error is not None and isinstance(ending, Reply)
            self._end(self.data, FailCall(ending.call_id, error.code) if failed and error is not None else ending)

        self._confirm(ending.call_id, confirmed)

    def _tick(self) -> None:
        self.post(Tick())

    def cancel_waiting(self) -> int:
        """Cancel calls of which nothing runs now: on a server that starts nothing more they would wait in vain. How many."""
        runs = self.controller.state.runs
        waiting = [one for one in self._pending if (run := runs.get(one)) and not any(job.batch_id for job in run.jobs.values())]
        for call_id in waiting:
            self.cancel(call_id)
        return len(waiting)

    async def drain(self, grace_s: float) -> int:
        """Wait for calls in flight; returns how many had to be given up."""
        if self._pending:
            idle = asyncio.Event()
            self._on_idle = idle.set
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), grace_s)
        left = list(self._pending)
        for call_id in left:
            self.cancel(call_id)
        return len(left)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Called again, it does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._interceptor is not None:
            self._interceptor.close()
        await self.engine.stop(grace_s)
        if self._timer is not None:
            self._timer.close()
            self._timer = None


def _call_of(event: Event | ResolveData) -> str:
    """The call an event is of; empty if it is of none, or of several. A cancellation is not: it is what a defect leads to."""
    if isinstance(event, CallArrived | CallRecovered):
        return event.call.id
    return event.call_id if isinstance(event, DataResolved | ResolveData | Journaled | ReplayDone) else ""


def _no_confirm(call_id: str, done: Callable[[LaminaError | None], None]) -> None:
    raise AssertionError(f"{call_id} is to be confirmed, and there is nothing to confirm it")


def _no_journal(action: AppendJournal) -> None:
    raise AssertionError(f"{action.call_id} is durable, and there is no journal")
