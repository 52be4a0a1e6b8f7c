"""The controller, the only writer of state: `handle(now_us, event) -> [action]`.

An event goes to the part it concerns; then the policy is asked, and what it decides is checked and applied. Whatever it says:
- A call is in one place until it ends, and it ends once. What comes back for an unknown batch is ignored.
- Time never runs backwards: a late clock is read as "no time has passed".

Each part owns its state: admission, the call registry, the workflow engine, the dispatch queue, the cluster (devices, instances,
leases), completions, failures, wakeups, the critical path of workflows and the forecast of jobs to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.core import deployment
from lamina.core import events as ev
from lamina.core.accounts import Books
from lamina.core.actions import Action, AddDevice, Fail, WakeAt
from lamina.core.alarm import Alarm
from lamina.core.calls import Calls
from lamina.core.course import Course
from lamina.core.defaults import AdmitAll, ScaleToLoad
from lamina.core.fair import Fair
from lamina.core.fleet import Fleet
from lamina.core.intake import Intake
from lamina.core.lease import Device
from lamina.core.lines import Lines
from lamina.core.mishaps import Mishaps
from lamina.core.policy import (
    Admit,
    Decision,
    DeployRole,
    Dispatch,
    Drop,
    GiveDevice,
    Hold,
    LoadOn,
    Predictor,
    ResizeTo,
    ScaleRole,
    Start,
    UnloadOf,
    View,
    Wake,
    WantDevice,
)
from lamina.core.promises import Promises
from lamina.core.renewal import Renewal
from lamina.core.slack import Slack
from lamina.core.state import State
from lamina.core.successes import Successes
from lamina.errors import PolicyError

LOOK_AGAIN_US = 10_000
"""Autoscaling is retried this soon while work waits for a function that could not be loaded."""

HOUSEKEEPING_US = 1_000_000
"""Hung batches and loads are looked for this often, whatever period the policy has."""


class Controller:
    def __init__(self, policy: Dispatch, predictor: Predictor, *, hang_floor_us: int = 5_000_000) -> None:
        self.policy = policy
        self.predictor = predictor
        self._scale: ScaleRole = policy if isinstance(policy, ScaleRole) else ScaleToLoad()
        self._woken = False  #: a recheck that the policy asked for is due
        self._look_at_us = HOUSEKEEPING_US  #: when to look for hung batches again
        self._scale_at_us = 0
        self._out = out = list[Action]()
        self.state = state = State()
        self._promises = promises = Promises()
        self._view = view = View(state, predictor, promises)
        view.any_size = getattr(policy, "any_size", False)
        self._lines = lines = Lines(state)
        self._alarm = alarm = Alarm(state.runs)
        self._fair = fair = Fair(state, view, promises, policy.order)
        self._slack = slack = Slack(state, predictor, any_size=getattr(policy, "any_size", False))
        self._fleet = fleet = Fleet(state, view, lines, out)
        self._calls = calls = Calls(state, view, lines, alarm, fair, promises, slack, out)
        self._course = course = Course(state, calls, out)
        self._intake = Intake(policy if isinstance(policy, Admit) else AdmitAll(), state, view, lines, fair, calls, course, out)
        self.renewal = renewal = Renewal(state, fleet)
        self._mishaps = Mishaps(state, view, lines, fleet, renewal, slack, calls, course, hang_floor_us)
        successes = Successes(state, view, lines, fleet, fair, renewal, calls, course)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CallArrived: self._intake.arrived,
            ev.CallResumed: self._intake.resumed,
            ev.CallCancelled: calls.cancelled,
            ev.AllHere: self._all_here,
            ev.Resolved: course.answered,
            ev.Heartbeat: course.beat,
            ev.Kept: course.keeper.kept,
            ev.Awake: course.keeper.awake,
            ev.BatchFinished: successes.batch_finished,
            ev.BatchFailed: self._mishaps.batch_failed,
            ev.InstanceReady: successes.instance_ready,
            ev.InstanceLost: self._mishaps.instance_lost,
            ev.DeviceJoined: self._device_joined,
            ev.DeviceLost: self._mishaps.device_lost,
            ev.Deployed: self._deployed,
            ev.TenantSet: self._tenant_set,
            ev.Tick: self._tick,
        }

    def handle(self, now_us: int, event: ev.Event) -> list[Action]:
        view = self._view
        if now_us < view.now_us:
            now_us = view.now_us
        view.now_us = self._course.now_us = now_us
        self._handlers[type(event)](event)
        if self._lines.cold or now_us >= self._scale_at_us:
            self._settle()
        if (self.state.waiting or self._woken) and not (type(event) is ev.CallArrived and event.more):
            self._dispatch()
        return self.salvage()

    def salvage(self) -> list[Action]:
        """Actions decided so far; after `handle` raised a PolicyError, what was decided before it stands."""
        out = self._out
        tick_us = self._alarm.next_tick(self._view.now_us, self._course.timers.next_us)
        if tick_us:
            out.append(WakeAt(tick_us))
        said = out[:]
        out.clear()
        return said

    @property
    def now_us(self) -> int:
        """Time of the last event."""
        return self._view.now_us

    @property
    def explain(self) -> bool:
        """Whether the policy records what it weighed."""
        return self._view.explaining

    @explain.setter
    def explain(self, wanted: bool) -> None:
        self._view.explaining = wanted

    @property
    def books(self) -> Books:
        """Usage of tenants."""
        return self._fair.books

    @property
    def resume_us(self) -> int:
        """When the first wait, pause or timeout of a run is due. A simulator with nothing else to do may skip to it."""
        return self._course.timers.next_us

    # ----------------------------------------------------------------- events

    def _all_here(self, event: ev.AllHere) -> None:
        """Nothing of its own: the policy is asked after every event, and so after this one."""

    def _device_joined(self, event: ev.DeviceJoined) -> None:
        if event.device.id not in self.state.devices:
            self.state.devices[event.device.id] = Device(event.device)
            self._slack.forget()
            self._lines.cold.update(dict.fromkeys(self.state.functions))

    def _deployed(self, event: ev.Deployed) -> None:
        deployment.check(self.state, event)
        if isinstance(self.policy, DeployRole):
            self.policy.deploy(self._view, event.functions, event.flows)
        self.renewal.remember(event.functions)
        deployment.deploy(self._view.now_us, self.state, self._lines, self.policy.order, event)
        if self._fair.on:
            self._fair.adopt()
        self.renewal.begin(event.functions)
        self._slack.forget()

    def _tenant_set(self, event: ev.TenantSet) -> None:
        self._fair.set(self._view.now_us, event.tenant, event.spent_unit_us)

    def _tick(self, event: ev.Tick) -> None:
        now_us = self._view.now_us
        self._alarm.ticked(now_us)
        if self._course.timers.next_us <= now_us:
            self._course.tick()
        for run in self._alarm.overdue(now_us):
            self._calls.end(run, Fail(run.call.id, "deadline", next((job.node for job in run.jobs.values()), "")))
        self._alarm.wish(self._lines.recall_due(now_us))
        self._woken = self._alarm.woken(now_us) or self._woken
        if now_us >= self._look_at_us:
            self._look_at_us = now_us + HOUSEKEEPING_US
            self._mishaps.end_what_hangs()
            self._promises.doubt(now_us, self.state, self.predictor)
            self._alarm.tidy()
            if self._fair.on:
                self._fair.tidy(now_us)
        self._alarm.wish_on()  # a tick serves the earliest request; the others' must still come
        self._alarm.wish(self._look_at_us)
        if self._scale_at_us > now_us:
            self._alarm.wish(self._scale_at_us)

    # -------------------------------------------------------------- decisions

    def _settle(self) -> None:
        """Ask the scale role which instances to load, unload and resize."""
        view = self._view
        view.cold, self._lines.cold = self._lines.cold, {}
        self._scale_at_us = view.now_us + self._scale.period_us
        self._slack.forget()  # predictions have moved on, and so has what was made of them
        for decision in self._scale.scale(view):
            self._apply(decision)
        for name in (*self.state.waiting, *self.state.held):
            function = self.state.functions[name]
            if not function.instances:  # no room, or backing off: look again soon
                self._scale_at_us = min(self._scale_at_us, max(function.not_before_us, view.now_us + LOOK_AGAIN_US))
        self._alarm.wish(self._scale_at_us)

    def _dispatch(self) -> None:
        self._woken = False
        if self._fair.on:
            self._dispatch_in_turns()
        else:
            for decision in self.policy.dispatch(self._view):
                self._apply(decision)

    def _dispatch_in_turns(self) -> None:
        """Ask about functions in groups: tenants with the least usage first, the rest hidden until their group comes."""
        waiting = self.state.waiting
        turns = self._fair.turns()
        for number in range(len(turns)):
            unseen = {name: waiting.pop(name) for turn in turns[number + 1 :] for name in turn if name in waiting}
            try:
                for decision in self.policy.dispatch(self._view):
                    self._apply(decision)
            finally:
                waiting.update({name: one for name, one in unseen.items() if len(one.queue) and name not in self.state.held})

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                batch = self._fleet.start(decision)
                if self._fair.on:
                    self._fair.started(batch)
            case Hold():
                self._alarm.wish(decision.until_us)
                self._lines.put_off(decision)
            case Wake():
                self._alarm.wake(decision.at_us)
            case Drop():
                job = decision.job
                if job.id not in job.run.jobs or job.batch_id:
                    raise PolicyError(f"job {job.id} does not wait and cannot be dropped")
                self._calls.end(job.run, Fail(job.run.call.id, decision.reason, job.node, job.id))
            case LoadOn():
                self._fleet.load(decision)
            case UnloadOf():
                if not self.renewal.protects(decision.instance):
                    self._fleet.unload(decision)
            case ResizeTo():
                self._fleet.resize(decision)
            case WantDevice():
                self._out.append(AddDevice(decision.kind))
            case GiveDevice():
                self._fleet.give(decision)
                self._slack.forget()
