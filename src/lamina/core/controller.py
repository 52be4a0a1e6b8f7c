"""The controller: `handle(now_us, event) -> [action]`. A pure function of its state; the heart of the platform.

**One event.** `handle` does four things, always in this order:

1. *Clock.* The view's clock moves to the time of the event; a clock that is behind reads as "no time has passed".
2. *Event.* The table at the end of `__init__` names one `on_<event>` method per event. It changes the state: a call is admitted
   or rejected, a batch ends, a worker is lost, a step of a workflow moves on. No decision of dispatching is made here.
3. *Autoscale*, if a function lacks an instance or the period of the scale role is over: the policy loads and unloads.
4. *Dispatch*, if functions wait: the policy starts batches, defers functions, drops jobs. Its decisions are checked and applied
   one by one, so a generator sees what its last `yield` did. Those in line for a device that has changed are asked about a few at
   a time, while units are left. An arrival that says `more_coming` is dispatched with the next ones.

Then the next tick is requested, unless one that early is on its way, and the actions of all phases are returned. If a policy
raises a `PolicyError`, nothing of the decision at fault has changed; what was decided before it stands (`take_actions`).

**Two clocks.** `view.now_us` is event time: queues, leases, deadlines and policies live by it, and it never runs backwards.
`view.run_us` is run time, and only the workflow engine and its journal read it. They are equal, but while a durable run is
recovered: it begins at the time it began before the restart, each journal entry takes effect at the time written on it, and so
the run sets the same timers and makes the same entries as in its first life.

**Parts, and what each may write.** A field is assigned by the module of its class alone (`tests/test_ownership.py`); a register
of the state by one module:

    scheduling/queues.py          waiting, deferred, backlogged, the queues    workflow/engine.py    when runs move on
    scheduling/jobs.py            runs: begin, jobs, end of calls; wakeups     workflow/runs.py      scopes and executions
    scheduling/admission.py       admits or rejects; writes nothing            workflow/journal.py   outcomes before they count
    scheduling/cluster.py         devices, instances, batches, leases          workflow/timers.py    waits, pauses, timeouts
    scheduling/completions.py     outcomes of batches, what they teach         tenancy/fair_share.py usage of tenants, fair queues
    scheduling/failures.py        retries, quarantine, back-off, hangs         policy.py             what policies see and decide
    rolling_update.py             functions, new versions of instances         lifecycle.py          states, as tables
    competition.py                bodies of one function, backups              membership.py         devices that come and go

**How they fit.** `scheduling/` is whole without the other two: a call is jobs, and their `JobOwner` is told how they end. The
owner of a plain function's job is the call registry, which replies; that of a workflow's jobs is the engine, which moves tokens
and queues the next ones through the same registry. Fair sharing is a `Tenancy` that is asked at admission and told of starts and
ends; while there is one tenant without limits it is off, and costs one comparison a call.

Two guarantees hold whatever happens: a call is in one place until it ends, and it ends once; what comes back for an unknown batch
is ignored. `state.check()` verifies the first after every event of every test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.core import events as ev
from lamina.core.actions import Action, AddDevice, FailCall, WakeAt
from lamina.core.competition import Competition
from lamina.core.membership import Membership
from lamina.core.policy import (
    AdmitRole,
    Decision,
    Defer,
    DeployRole,
    DispatchRole,
    Drop,
    LoadInstance,
    Predictor,
    PrepareRole,
    RecheckAt,
    RequestDevice,
    RescaleAt,
    ResizeInstance,
    ReturnDevice,
    ScaleRole,
    Start,
    UnloadInstance,
    View,
    WarmUpRole,
)
from lamina.core.rolling_update import RollingUpdate
from lamina.core.scheduling.admission import Admission, AdmissionMargin
from lamina.core.scheduling.cluster import Cluster
from lamina.core.scheduling.completions import Completions
from lamina.core.scheduling.failures import Failures
from lamina.core.scheduling.jobs import CallRegistry, Wakeups
from lamina.core.scheduling.queues import DispatchQueue
from lamina.core.scheduling.state import ControllerState
from lamina.core.tenancy.fair_share import FairShare
from lamina.core.tenancy.usage import TenantUsage
from lamina.core.workflow.engine import WorkflowEngine
from lamina.core.workflow.flow import Flow, function_flow
from lamina.core.workflow.flow_check import check_deployment
from lamina.core.workflow.runs import WorkflowRun
from lamina.errors import PolicyError

SCALE_RETRY_US = 10_000
"""Autoscaling is retried this soon while work waits for a function that could not be loaded."""

HANG_FLOOR_US = 5_000_000
"""No batch of a known length counts as hung before it has run for so long."""

HOUSEKEEPING_US = 1_000_000
"""Hung batches and loads are looked for this often, whatever period the policy has."""


class Controller:
    def __init__(
        self,
        policy: DispatchRole,
        predictor: Predictor,
        scale: ScaleRole,
        *,
        hang_floor_us: int = HANG_FLOOR_US,
        explain: bool = False,
    ) -> None:
        """`scale` may be the policy itself; `lamina.policies.new_controller` finds one where it has no such role."""
        self.policy = policy
        self.predictor = predictor
        self.state = state = ControllerState()
        self.flows: dict[str, Flow] = {}  #: by target: what is deployed; a function is a flow of one step
        self._out = out = list[Action]()
        self._scale = scale
        self._scale_at_us = 0
        self._is_scaling = False  #: the scale role has more of the same to decide
        self._recheck_due = False  #: a recheck that the policy asked for is due
        self._has_requests = False  #: some functions are owed device time
        self.is_deciding = False  #: the event itself has been handled: what is raised now is not of its call
        self._housekeeping_at_us = HOUSEKEEPING_US
        self._margin = margin = AdmissionMargin(self.flows, state.devices)
        self._fair_share = tenancy = FairShare(state, margin, policy.order)
        picks, spares = getattr(policy, "picks_slice_size", False), getattr(policy, "spares_paused", False)
        ways = {"picks_slice_size": picks, "spares_paused": spares, "explain": explain}
        self.view = view = View(state, predictor, self.flows, margin, tenancy.weight_of, **ways)
        self._dispatch_queue = queue = DispatchQueue(state)
        self._wakeups = wakeups = Wakeups(state.runs)
        self._cluster = cluster = Cluster(state, view, queue, out)
        self._calls = calls = CallRegistry(state, view, queue, wakeups, tenancy, margin, out)
        self._engine = engine = WorkflowEngine(state, self.flows, view, calls, tenancy, out)
        self._competition = competition = Competition(state, self.flows, view, calls, engine.critical_path.invalidate)
        role = policy if isinstance(policy, AdmitRole) else None
        self._admission = admission = Admission(role, state, self.flows, view, queue, tenancy, calls, engine, competition, out)
        self.rolling_update = update = RollingUpdate(state, view, queue, cluster, policy.order)
        self._failures = failures = Failures(state, view, queue, cluster, update, calls, hang_floor_us)
        prepares = policy if isinstance(policy, PrepareRole) else None
        completions = Completions(state, view, cluster, tenancy, update, failures, prepares)
        told = completions.on_instance_ready, competition.on_devices_changed
        self._members = members = Membership(state, view, cluster, queue, failures, update, *told, out)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CallArrived: admission.on_call_arrived,
            ev.CallRecovered: engine.on_call_recovered,
            ev.CallCancelled: calls.on_call_cancelled,
            ev.ArrivalsDrained: self._on_arrivals_drained,
            ev.DataResolved: engine.on_data_resolved,
            ev.Heartbeat: engine.on_heartbeat,
            ev.TaskReported: engine.on_task_reported,
            ev.Journaled: engine.journal.on_journaled,
            ev.ReplayDone: engine.journal.on_replay_done,
            ev.BatchFinished: completions.on_batch_finished,
            ev.BatchFailed: failures.on_batch_failed,
            ev.InstanceSegmented: completions.on_instance_segmented,
            ev.BatchPaused: completions.on_batch_paused,
            ev.InstanceLost: failures.on_instance_lost,
            **members.handlers(),
            ev.Deployed: self._on_deployed,
            ev.TenantUpdated: self._on_tenant_updated,
            ev.Tick: self._on_tick,
        }

    def handle(self, now_us: int, event: ev.Event) -> list[Action]:
        view, queue = self.view, self._dispatch_queue
        view.advance(now_us)
        self.is_deciding = False
        self._handlers[type(event)](event)
        self.is_deciding = True
        if queue.starved or view.now_us >= self._scale_at_us:
            self._autoscale()
        if type(event) is not ev.CallArrived or not event.more_coming:
            if queue.changed:
                queue.wake_in_line(self._fair_share.enabled or self._has_requests)
            if self.state.waiting or self._recheck_due:
                self._dispatch()
        return self.take_actions()

    def take_actions(self) -> list[Action]:
        """Actions decided so far; after `handle` raised a PolicyError, what was decided before it stands."""
        out = self._out
        timer_us = self._engine.timers.next_us
        if self._competition.backups:
            timer_us = min(timer_us, self._competition.next_us)
        tick_us = self._wakeups.next_tick_us(self.view.now_us, timer_us)
        if tick_us:
            out.append(WakeAt(tick_us))
        actions = out[:]
        out.clear()
        return actions

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
        self.view.set_explain(wanted)

    @property
    def usage(self) -> TenantUsage:
        """Usage of tenants."""
        return self._fair_share.usage

    def workflow_run(self, call_id: str) -> WorkflowRun | None:
        """The run of a call of a workflow, while it is in flight."""
        run = self.state.runs.get(call_id)
        return run if isinstance(run, WorkflowRun) else None

    @property
    def next_run_timer_us(self) -> int:
        """When the first wait, pause or timeout of a run is due. A simulator with nothing else to do may skip to it."""
        return min(self._engine.timers.next_us, self._competition.next_us)

    def wrap_roles(self, wrap: Callable[[str, Any], Any]) -> None:
        """Put something around each role of the policy, by name: a stopwatch, say."""
        self.policy = wrap("dispatch", self.policy)
        self._scale = wrap("scale", self._scale)
        self._admission.wrap_role(wrap)

    # ----------------------------------------------------------------- events

    def _on_arrivals_drained(self, event: ev.ArrivalsDrained) -> None:
        """Nothing of its own: the policy is asked after every event, and so after this one."""

    def _on_deployed(self, event: ev.Deployed) -> None:
        check_deployment(event, self.state.functions.keys(), self.flows)
        if isinstance(self.policy, DeployRole):
            self.policy.deploy(self.view, event.functions, event.flows)
        if event.flows and isinstance(self.policy, WarmUpRole):
            self.policy.warm_up()
        self.rolling_update.deploy(event.functions)
        self.flows.update({spec.name: function_flow(spec.name, spec.slo) for spec in event.functions})
        self.flows.update({flow.name: flow for flow in event.flows})
        if self._fair_share.enabled:
            self._fair_share.wrap_queues()
        self.rolling_update.replace_outdated(event.functions)
        self._has_requests = any(function.owed for function in self.state.functions.values())
        self._engine.critical_path.invalidate()

    def _on_tenant_updated(self, event: ev.TenantUpdated) -> None:
        self._fair_share.update_tenant(self.view.now_us, event.tenant, event.spent_unit_us)

    def _on_tick(self, event: ev.Tick) -> None:
        now_us, wakeups = self.view.now_us, self._wakeups
        wakeups.on_tick(now_us)
        try:
            if self._engine.timers.next_us <= now_us:
                self._engine.fire_timers()
            if self._competition.backups and self._competition.next_us <= now_us:
                self._competition.start_backups()
            for run in wakeups.expired(now_us):
                self._calls.fail(run, FailCall(run.call.id, "deadline", next((job.node for job in run.jobs.values()), "")))
            wakeups.request(self._dispatch_queue.undefer_due(now_us))
            self._recheck_due = wakeups.pop_rechecks_due(now_us) or self._recheck_due
            if now_us >= self._housekeeping_at_us:
                self._housekeeping_at_us = now_us + HOUSEKEEPING_US
                self._failures.kill_hung()
                self._members.rearrange()
                self._margin.decay(now_us, self.state.functions.values(), self.predictor)
                wakeups.compact()
                if self._fair_share.enabled:
                    self._fair_share.expire(now_us)
        finally:
            wakeups.rearm()  # a tick serves the earliest request; the others' must still come, whatever became of this one
            wakeups.request(self._housekeeping_at_us)
            if self._scale_at_us > now_us:
                wakeups.request(self._scale_at_us)

    # -------------------------------------------------------------- decisions

    def _autoscale(self) -> None:
        """Ask the scale role which instances to load, unload and resize."""
        view = self.view
        view.show_starved(self._dispatch_queue.take_starved())
        self._scale_at_us = view.now_us + self._scale.period_us
        if not self._is_scaling:
            self._engine.critical_path.invalidate()  # predictions have moved on, and so has what was made of them
        self._is_scaling = False
        for decision in self._scale.scale(view):
            self._apply(decision)
        for name in (*self.state.waiting, *self.state.deferred):
            function = self.state.functions[name]
            if not function.instances:  # no room, or backing off: look again soon
                retry_us = max(function.load_not_before_us, view.now_us + SCALE_RETRY_US)
                self._scale_at_us = min(self._scale_at_us, retry_us)
        self._wakeups.request(self._scale_at_us)

    def _dispatch(self) -> None:
        self._recheck_due = False
        queue, by_service = self._dispatch_queue, self._fair_share.enabled
        while True:
            if self._has_requests:
                self._dispatch_owed()
            if by_service:
                self._dispatch_by_service_order()
            else:
                for decision in self.policy.dispatch(self.view):
                    self._apply(decision)
            if not queue.changed or not queue.wake_in_line(by_service or self._has_requests):
                return

    def _dispatch_owed(self) -> None:
        """Ask about functions first that are owed device time (`Quota(request=)`): the rest is hidden until they have been."""
        waiting, now_us = self.state.waiting, self.view.now_us
        owed = {name for name, one in waiting.items() if one.owed and one.owed.level(now_us) > 0}
        if owed and len(owed) < len(waiting):
            self.view.hide([name for name in waiting if name not in owed])
            try:
                for decision in self.policy.dispatch(self.view):
                    self._apply(decision)
            finally:
                self.view.hide(())

    def _dispatch_by_service_order(self) -> None:
        """Ask about functions in groups: tenants with the least usage first, the rest hidden until their group comes."""
        groups = self._fair_share.service_order()
        for number in range(len(groups)):
            later = dict.fromkeys(name for group in groups[number + 1 :] for name in group)
            self.view.hide(later)
            try:
                for decision in self.policy.dispatch(self.view):
                    self._apply(decision)
            finally:
                self.view.hide(())
                self._dispatch_queue.move_to_end(later)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                batch = self._cluster.start_batch(decision)
                if self._fair_share.enabled:
                    self._fair_share.on_batch_started(batch)
            case Defer():
                self._wakeups.request(min(decision.until_us, decision.slot[0]) if decision.slot else decision.until_us)
                self._dispatch_queue.defer(decision)
            case RescaleAt():
                self._scale_at_us = min(self._scale_at_us, decision.at_us)
                self._is_scaling = True
            case RecheckAt():
                self._wakeups.request_recheck(decision.at_us)
            case Drop():
                job = decision.job
                if job.id not in job.run.jobs or not job.is_queued:
                    raise PolicyError(f"job {job.id} does not wait and cannot be dropped")
                self._competition.give_up_job(job.run, job, decision.reason)
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
                self._engine.critical_path.invalidate()
