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

from lamina.core import events as ev
from lamina.core.actions import Action, AddDevice, FailCall, WakeAt
from lamina.core.policy import (
    AdmitRole,
    Decision,
    Defer,
    DeployRole,
    DispatchRole,
    Drop,
    LoadInstance,
    Predictor,
    RecheckAt,
    RequestDevice,
    ResizeInstance,
    ReturnDevice,
    ScaleRole,
    Start,
    UnloadInstance,
    View,
    WarmUpRole,
)
from lamina.core.scheduling import deployment
from lamina.core.scheduling.admission import Admission
from lamina.core.scheduling.admission_margin import AdmissionMargin
from lamina.core.scheduling.call_registry import CallRegistry
from lamina.core.scheduling.cluster import Cluster
from lamina.core.scheduling.completions import Completions
from lamina.core.scheduling.dispatch_queue import DispatchQueue
from lamina.core.scheduling.failures import Failures
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.rolling_update import RollingUpdate
from lamina.core.scheduling.state import ControllerState
from lamina.core.scheduling.wakeups import Wakeups
from lamina.core.tenancy.fair_share import FairShare
from lamina.core.tenancy.usage import TenantUsage
from lamina.core.workflow.critical_path import CriticalPath
from lamina.core.workflow.engine import WorkflowEngine
from lamina.errors import PolicyError
from lamina.policies.defaults import AdmitAll, ReactiveAutoscaler

SCALE_RETRY_US = 10_000
"""Autoscaling is retried this soon while work waits for a function that could not be loaded."""

HOUSEKEEPING_US = 1_000_000
"""Hung batches and loads are looked for this often, whatever period the policy has."""


class Controller:
    def __init__(
        self, policy: DispatchRole, predictor: Predictor, *, hang_floor_us: int = 5_000_000, explain: bool = False
    ) -> None:
        self.policy = policy
        self.predictor = predictor
        self._scale: ScaleRole = policy if isinstance(policy, ScaleRole) else ReactiveAutoscaler()
        self._recheck_due = False  #: a recheck that the policy asked for is due
        self._housekeeping_at_us = HOUSEKEEPING_US  #: when to look for hung batches again
        self._scale_at_us = 0
        self._out = out = list[Action]()
        self.state = state = ControllerState()
        self._margin = promises = AdmissionMargin()
        self.view = view = View(state, predictor, promises)
        view.explain = explain
        view.picks_slice_size = getattr(policy, "picks_slice_size", False)
        self._dispatch_queue = lines = DispatchQueue(state)
        self._wakeups = alarm = Wakeups(state.runs)
        self._fair_share = fair = FairShare(state, view, promises, policy.order)
        self._critical_path = slack = CriticalPath(state, predictor, any_size=getattr(policy, "picks_slice_size", False))
        self._cluster = fleet = Cluster(state, view, lines, out)
        self._call_registry = calls = CallRegistry(state, view, lines, alarm, fair, promises, slack, out)
        self._engine = course = WorkflowEngine(state, calls, out)
        self._admission = Admission(
            policy if isinstance(policy, AdmitRole) else AdmitAll(), state, view, lines, fair, calls, course, out
        )
        self.rolling_update = renewal = RollingUpdate(state, fleet)
        self._failures = Failures(state, view, lines, fleet, renewal, slack, calls, course, hang_floor_us)
        successes = Completions(state, view, lines, fleet, fair, renewal, calls, course)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CallArrived: self._admission.on_call_arrived,
            ev.CallRecovered: self._admission.on_call_recovered,
            ev.CallCancelled: calls.on_call_cancelled,
            ev.ArrivalsDrained: self._on_arrivals_drained,
            ev.DataResolved: course.on_data_resolved,
            ev.Heartbeat: course.on_heartbeat,
            ev.Journaled: course.journal.on_journaled,
            ev.ReplayDone: course.journal.on_replay_done,
            ev.BatchFinished: successes.on_batch_finished,
            ev.BatchFailed: self._failures.on_batch_failed,
            ev.InstanceReady: successes.on_instance_ready,
            ev.InstanceLost: self._failures.on_instance_lost,
            ev.DeviceJoined: self._on_device_joined,
            ev.DeviceLost: self._failures.on_device_lost,
            ev.Deployed: self._on_deployed,
            ev.TenantUpdated: self._on_tenant_updated,
            ev.Tick: self._on_tick,
        }

    def handle(self, now_us: int, event: ev.Event) -> list[Action]:
        view = self.view
        if now_us < view.now_us:
            now_us = view.now_us
        view.now_us = self._engine.now_us = now_us
        self._handlers[type(event)](event)
        if self._dispatch_queue.needs_instance or now_us >= self._scale_at_us:
            self._autoscale()
        if (self.state.waiting or self._recheck_due) and not (type(event) is ev.CallArrived and event.more_coming):
            self._dispatch()
        return self.take_actions()

    def take_actions(self) -> list[Action]:
        """Actions decided so far; after `handle` raised a PolicyError, what was decided before it stands."""
        out = self._out
        tick_us = self._wakeups.next_tick_us(self.view.now_us, self._engine.timers.next_us)
        if tick_us:
            out.append(WakeAt(tick_us))
        said = out[:]
        out.clear()
        return said

    @property
    def now_us(self) -> int:
        """Time of the last event."""
        return self.view.now_us

    @property
    def explain(self) -> bool:
        """Whether the policy records what it weighed."""
        return self.view.explain

    @explain.setter
    def explain(self, wanted: bool) -> None:
        self.view.explain = wanted

    @property
    def usage(self) -> TenantUsage:
        """Usage of tenants."""
        return self._fair_share.usage

    @property
    def next_run_timer_us(self) -> int:
        """When the first wait, pause or timeout of a run is due. A simulator with nothing else to do may skip to it."""
        return self._engine.timers.next_us

    # ----------------------------------------------------------------- events

    def _on_arrivals_drained(self, event: ev.ArrivalsDrained) -> None:
        """Nothing of its own: the policy is asked after every event, and so after this one."""

    def _on_device_joined(self, event: ev.DeviceJoined) -> None:
        if event.device.id not in self.state.devices:
            self.state.devices[event.device.id] = Device(event.device)
            self._critical_path.invalidate()
            self._dispatch_queue.needs_instance.update(dict.fromkeys(self.state.functions))

    def _on_deployed(self, event: ev.Deployed) -> None:
        deployment.check_deployment(self.state, event)
        if isinstance(self.policy, DeployRole):
            self.policy.deploy(self.view, event.functions, event.flows)
        if event.flows and isinstance(self.policy, WarmUpRole):
            self.policy.warm_up()
        self.rolling_update.remember_specs(event.functions)
        deployment.apply_deployment(self.view.now_us, self.state, self._dispatch_queue, self.policy.order, event)
        if self._fair_share.enabled:
            self._fair_share.wrap_queues()
        self.rolling_update.begin(event.functions)
        self._critical_path.invalidate()

    def _on_tenant_updated(self, event: ev.TenantUpdated) -> None:
        self._fair_share.update_tenant(self.view.now_us, event.tenant, event.spent_unit_us)

    def _on_tick(self, event: ev.Tick) -> None:
        now_us = self.view.now_us
        self._wakeups.on_tick(now_us)
        if self._engine.timers.next_us <= now_us:
            self._engine.fire_timers()
        for run in self._wakeups.expired(now_us):
            self._call_registry.fail(run, FailCall(run.call.id, "deadline", next((job.node for job in run.jobs.values()), "")))
        self._wakeups.request(self._dispatch_queue.undefer_due(now_us))
        self._recheck_due = self._wakeups.pop_rechecks_due(now_us) or self._recheck_due
        if now_us >= self._housekeeping_at_us:
            self._housekeeping_at_us = now_us + HOUSEKEEPING_US
            self._failures.kill_hung()
            self._margin.decay(now_us, self.state, self.predictor)
            self._wakeups.compact()
            if self._fair_share.enabled:
                self._fair_share.expire(now_us)
        self._wakeups.rearm()  # a tick serves the earliest request; the others' must still come
        self._wakeups.request(self._housekeeping_at_us)
        if self._scale_at_us > now_us:
            self._wakeups.request(self._scale_at_us)

    # -------------------------------------------------------------- decisions

    def _autoscale(self) -> None:
        """Ask the scale role which instances to load, unload and resize."""
        view = self.view
        view.needs_instance, self._dispatch_queue.needs_instance = self._dispatch_queue.needs_instance, {}
        self._scale_at_us = view.now_us + self._scale.period_us
        self._critical_path.invalidate()  # predictions have moved on, and so has what was made of them
        for decision in self._scale.scale(view):
            self._apply(decision)
        for name in (*self.state.waiting, *self.state.deferred):
            function = self.state.functions[name]
            if not function.instances:  # no room, or backing off: look again soon
                self._scale_at_us = min(self._scale_at_us, max(function.load_not_before_us, view.now_us + SCALE_RETRY_US))
        self._wakeups.request(self._scale_at_us)

    def _dispatch(self) -> None:
        self._recheck_due = False
        if self._fair_share.enabled:
            self._dispatch_by_service_order()
        else:
            for decision in self.policy.dispatch(self.view):
                self._apply(decision)

    def _dispatch_by_service_order(self) -> None:
        """Ask about functions in groups: tenants with the least usage first, the rest hidden until their group comes."""
        waiting = self.state.waiting
        turns = self._fair_share.service_order()
        for number in range(len(turns)):
            unseen = {name: waiting.pop(name) for turn in turns[number + 1 :] for name in turn if name in waiting}
            try:
                for decision in self.policy.dispatch(self.view):
                    self._apply(decision)
            finally:
                waiting.update({name: one for name, one in unseen.items() if len(one.queue) and name not in self.state.deferred})

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                batch = self._cluster.start_batch(decision)
                if self._fair_share.enabled:
                    self._fair_share.on_batch_started(batch)
            case Defer():
                self._wakeups.request(decision.until_us)
                self._dispatch_queue.defer(decision)
            case RecheckAt():
                self._wakeups.request_recheck(decision.at_us)
            case Drop():
                job = decision.job
                if job.id not in job.run.jobs or job.batch_id:
                    raise PolicyError(f"job {job.id} does not wait and cannot be dropped")
                self._call_registry.fail(job.run, FailCall(job.run.call.id, decision.reason, job.node, job.id))
            case LoadInstance():
                self._cluster.load_instance(decision)
            case UnloadInstance():
                if not self.rolling_update.is_successor(decision.instance):
                    self._cluster.unload_instance(decision)
            case ResizeInstance():
                self._cluster.resize_instance(decision)
            case RequestDevice():
                self._out.append(AddDevice(decision.kind))
            case ReturnDevice():
                self._cluster.release_device(decision)
                self._critical_path.invalidate()
