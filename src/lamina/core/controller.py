"""The only writer of state: `handle(now_us, event) -> [action]`.

Rules it keeps, whatever the policy says:
- A call is in one place until it ends, and it ends once. What comes back for a batch it no longer knows is ignored, so
  a result delivered twice, or after a crash was reported, does nothing.
- Time never runs backwards: a late clock is read as "no time has passed".

Here are calls and their ends. What else there is to own has one owner each: how runs go on (`course.py`), who waits
(`lines.py`), devices, instances and leases (`fleet.py`), what goes wrong (`mishaps.py`), when to look again (`alarm.py`),
time to leave for later steps (`slack.py`), jobs yet to come (`outlook.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.core import deployment
from lamina.core import events as ev
from lamina.core.accounts import Books
from lamina.core.actions import Action, AddDevice, DropJob, Fail, Refuse, Reply, WakeAt
from lamina.core.alarm import Alarm
from lamina.core.course import MAX_ITEMS as MAX_ITEMS
from lamina.core.course import Course
from lamina.core.defaults import AdmitAll, ScaleToLoad
from lamina.core.fair import Fair
from lamina.core.fleet import Fleet
from lamina.core.flow import Flow, Task
from lamina.core.lease import Device, mask_label
from lamina.core.lifecycle import Phase, move
from lamina.core.lines import Lines
from lamina.core.mishaps import Mishaps
from lamina.core.outlook import Outlook
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
    Promise,
    ResizeTo,
    ScaleRole,
    Start,
    UnloadOf,
    View,
    Wake,
    WantDevice,
)
from lamina.core.promises import Promises
from lamina.core.queue import ASIDE, Job
from lamina.core.renewal import Renewal
from lamina.core.run import Run
from lamina.core.slack import Slack
from lamina.core.state import State
from lamina.errors import PolicyError
from lamina.types import Call

LOOK_AGAIN_US = 10_000
"""Work waits for a function that could not be loaded: there may be room for it soon."""

HOUSEKEEPING_US = 1_000_000
"""Hung batches and loads are looked for this often, whatever period the policy has."""


class Controller:
    def __init__(self, policy: Dispatch, predictor: Predictor, *, hang_floor_us: int = 5_000_000, explain: bool = False) -> None:
        self.state = State()
        self.policy = policy
        self.predictor = predictor
        self.now_us = 0
        self._admit: Admit = policy if isinstance(policy, Admit) else AdmitAll()
        self._scale: ScaleRole = policy if isinstance(policy, ScaleRole) else ScaleToLoad()
        self._promises = Promises()
        self._view = View(self.state, predictor, self._promises)
        self._view.explaining = explain
        self._out: list[Action] = []
        self._lines = Lines(self.state)
        self._fleet = Fleet(self.state, self._view, self._lines, self._out)
        self._alarm = Alarm(self.state.runs)
        self._slack = Slack(self.state, predictor, any_size=getattr(policy, "any_size", False))
        self._outlook = Outlook(self.state)
        self._fair = Fair(self.state, self._view, self._promises, policy.order)
        self._course = Course(self.state, self._out, self._enqueue, self._drop, self._end, self._reply)
        self.renewal = Renewal(self.state, self._fleet)
        self._mishaps = Mishaps(
            self.state, self._lines, self._fleet, self._slack, self._course, self._drop, self._end, hang_floor_us
        )
        self._woken = False  #: a time has come that the policy asked for
        self._look_at_us = HOUSEKEEPING_US  #: when to look for what hangs
        self._scale_at_us = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CallArrived: self._call_arrived,
            ev.AllHere: self._all_here,
            ev.BatchFinished: self._batch_finished,
            ev.Tick: self._tick,
            ev.Resolved: self._resolved,
            ev.Heartbeat: self._heartbeat,
            ev.Kept: self._kept,
            ev.CallResumed: self._call_resumed,
            ev.Awake: self._awake,
            ev.CallCancelled: self._call_cancelled,
            ev.BatchFailed: self._batch_failed,
            ev.InstanceReady: self._instance_ready,
            ev.InstanceLost: self._instance_lost,
            ev.DeviceJoined: self._device_joined,
            ev.DeviceLost: self._device_lost,
            ev.Deployed: self._deployed,
            ev.TenantSet: self._tenant_set,
        }

    @property
    def explain(self) -> bool:
        """Should the policy say what it weighed?"""
        return self._view.explaining

    @explain.setter
    def explain(self, wanted: bool) -> None:
        self._view.explaining = wanted

    def handle(self, now_us: int, event: ev.Event) -> list[Action]:
        if now_us > self.now_us:
            self.now_us = now_us
        self._view.now_us = self._course.now_us = self.now_us
        self._handlers[type(event)](event)
        if self._lines.cold or self.now_us >= self._scale_at_us:
            self._settle()
        if (self.state.waiting or self._woken) and not (type(event) is ev.CallArrived and event.more):
            self._dispatch()
        return self.salvage()

    def salvage(self) -> list[Action]:
        """After `handle` raised a PolicyError: what had been decided until then, which stands."""
        out = self._out
        tick_us = self._alarm.next_tick(self.now_us, self._course.timers.next_us)
        if tick_us:
            out.append(WakeAt(tick_us))
        said = out[:]
        out.clear()
        return said

    @property
    def books(self) -> Books:
        """What tenants have had."""
        return self._fair.books

    @property
    def resume_us(self) -> int:
        """When the first of all waits, pauses and limits of time is due. A simulator with nothing else to do may leap there."""
        return self._course.timers.next_us

    # ------------------------------------------------------------------ calls

    def _call_arrived(self, event: ev.CallArrived) -> None:
        call = event.call
        state = self.state
        flow = state.flows.get(call.target)
        if flow is None:
            self._out.append(Refuse(call.id, "unknown"))
            return
        if call.id in state.runs:
            self._out.append(Refuse(call.id, "duplicate"))
            return
        fair = self._fair
        watched = fair.on or call.tenant != fair.only or call.priority != 0
        verdict = (fair.arrived(self.now_us, call) if watched else None) or self._verdict(call, flow)
        if watched:
            fair.answered(self.now_us, not isinstance(verdict, Refuse))
        if isinstance(verdict, Refuse):
            self._out.append(verdict)
            return
        run = Run(call, flow)
        if verdict is not None:
            run.promised_us = verdict.finish_us
        state.runs[call.id] = run
        self._alarm.watch(call)
        if flow.single is not None:
            self._enqueue(run, 0, flow.single)
        else:
            self._outlook.begin(run)
            self._course.begin(run)

    def _all_here(self, event: ev.AllHere) -> None:
        """What is to be done about those who came is decided after every event, and so after this one."""

    def _call_resumed(self, event: ev.CallResumed) -> None:
        """It was accepted once, and that holds: nobody is asked again."""
        call, state = event.call, self.state
        flow = event.flow or state.flows.get(call.target)
        if flow is None or call.id in state.runs or any(name not in state.functions for name in flow.functions):
            self._out.append(Refuse(call.id, "duplicate" if call.id in state.runs else "unknown"))
            return
        if self._fair.on or call.tenant != self._fair.only or call.priority != 0:
            self._fair.arrived(self.now_us, call)
            self._fair.answered(self.now_us, True)
        run = Run(call, flow)
        run.asleep = {}
        state.runs[call.id] = run
        self._alarm.watch(call)
        self._outlook.begin(run)
        self._course.now_us = call.arrived_us
        self._course.begin(run, event.again_us)

    def _kept(self, event: ev.Kept) -> None:
        run = self.state.runs.get(event.call_id)
        if run is not None:
            self._course.keeper.kept(run, event.note)

    def _awake(self, event: ev.Awake) -> None:
        run = self.state.runs.get(event.call_id)
        if run is not None and run.asleep is not None:
            self._course.keeper.awake(run, event.again_us, self._join)

    def _join(self, job: Job) -> None:
        function = self.state.functions[job.function]
        function.meter.mark(self.now_us)
        self._lines.join(function, job)

    def _verdict(self, call: Call, flow: Flow) -> Promise | Refuse | None:
        state = self.state
        for name in flow.functions:
            function = state.functions[name]
            if len(function.queue) >= function.spec.max_queue:
                return Refuse(call.id, "queue-full", retry_after_us=1_000_000)
        if call.cost_limit and self._view.least_cost(flow) > call.cost_limit:
            return Refuse(call.id, "cost")
        verdict = self._admit.admit(self._view, call)
        if isinstance(verdict, Refuse):
            self._turned_away(flow)
        return verdict

    def _turned_away(self, flow: Flow) -> None:
        """A refusal is demand too: what it lacked is worth loading, and the prediction behind it worth doubting."""
        for name in flow.functions:
            function = self.state.functions[name]
            function.refused += 1
            if not function.instances:
                function.meter.mark(self.now_us)
                self._lines.cold[name] = None

    def _reply(self, run: Run) -> None:
        call, now_us = run.call, self.now_us
        del self.state.runs[call.id]
        run.closed = True
        if self._fair.on:
            self._fair.ended(call)
        if run.expected:
            self._outlook.end(run)
        if run.promised_us:
            self._promises.ended(run, now_us <= call.expires_us)
        self._out.append(
            Reply(
                call.id,
                now_us - call.arrived_us if now_us > call.arrived_us else 0,
                now_us > call.deadline_us,
                run.queue_us,
                run.batch,
                run.slice,
                run.cost,
                run.cold_us,
                run.retries,
            )
        )

    def _enqueue(self, run: Run, scope_id: int, node: Task, visit: int = 0) -> int:
        state = self.state
        function = state.functions[node.function]
        state.last_job += 1
        call = run.call
        tail_us = 0 if run.flow.single is not None else self._slack.tail_us(run, scope_id, node.name)
        job = Job(
            state.last_job,
            run,
            scope_id,
            node.name,
            node.function,
            self.now_us,
            call.deadline_us - tail_us,
            call.expires_us - tail_us,
            at=run.at,
            visit=visit,
        )
        run.jobs[job.id] = job
        if run.expected:
            self._outlook.queued(run, node.function)
        if run.asleep is not None:
            job.batch_id = ASIDE
            run.asleep.setdefault((scope_id, node.name, visit), []).append(job)
            return job.id
        function.meter.mark(self.now_us)
        self._lines.join(function, job)
        return job.id

    def _drop(self, run: Run, job: Job) -> None:
        """Its result is not wanted any more."""
        del run.jobs[job.id]
        if not job.batch_id:
            self._lines.leave(self.state.functions[job.function], [job])
        self._out.append(DropJob(job.id))

    def _call_cancelled(self, event: ev.CallCancelled) -> None:
        run = self.state.runs.get(event.call_id)
        if run is not None:
            self._end(run, Fail(event.call_id, "cancelled"))

    def _end(self, run: Run, word: Fail | Refuse) -> None:
        """The run ends here without a result; whatever still runs for it is not waited for."""
        del self.state.runs[run.call.id]
        run.closed = True
        if self._fair.on:
            self._fair.ended(run.call)
        if run.promised_us and isinstance(word, Fail) and word.error == "deadline":
            self._promises.ended(run, in_time=False)
        if run.expected:
            self._outlook.end(run)
        for job in list(run.jobs.values()):
            self._drop(run, job)
        self._out.append(word)

    def _resolved(self, event: ev.Resolved) -> None:
        run = self.state.runs.get(event.call_id)
        if run is not None:
            self._course.answered(run, event)

    def _heartbeat(self, event: ev.Heartbeat) -> None:
        run = self.state.runs.get(event.call_id)
        if run is not None:
            self._course.beat(run, event)
            job = run.jobs.get(event.job_id)
            batch = self.state.batches.get(job.batch_id) if job is not None else None
            if batch is not None:
                batch.heard_us = self.now_us

    # ---------------------------------------------------------------- batches

    def _batch_finished(self, event: ev.BatchFinished) -> None:
        batch = self.state.batches.get(event.batch_id)
        if batch is None or batch.started_us < 0:
            return
        device = batch.device
        units = batch.mask.bit_count()
        count = len(batch.jobs)
        device_us = max(0, event.device_us)
        function = self.state.functions[batch.instance.function]
        function.crashes = function.refused = 0
        function.suspects = max(0, function.suspects - count)
        function.meter.batch_ended(self.now_us, count, device_us, batch.jobs[0].run.flow.single is not None)
        self.predictor.observe(function.spec.name, device.spec.kind, count, units, device_us, batch.cores)
        for bucket in (function.bucket, batch.instance.bucket):
            if bucket:
                bucket.charge(self.now_us, device_us)
        if self._fair.on:
            self._fair.finished(self.now_us, batch, device_us)
        label = mask_label(device.spec.id, batch.mask)
        cost = device_us * device.spec.lease_price(units, batch.cores) / count
        self._fleet.release(batch)
        outcomes = event.outcomes
        if outcomes and len(outcomes) != count:  # whose is whose? Nobody gets an answer that may be another's
            outcomes = (ev.JobOutcome(False, "bad-result"),) * count
        for index, job in enumerate(batch.jobs):
            run = job.run
            if run.jobs.pop(job.id, None) is None:
                continue  # its run has ended meanwhile
            run.queue_us += batch.started_us - job.enqueued_us
            if count > run.batch:
                run.batch = count
            run.slice = label
            run.cost += cost
            run.at = device.spec.id
            if outcomes and not outcomes[index].ok:
                self._course.job_failed(run, job, outcomes[index].error, outcomes[index].name, batch)
            elif run.flow.single is not None:
                run.ended = True
                self._reply(run)
            else:
                self._course.job_done(run, job, batch)

    def _batch_failed(self, event: ev.BatchFailed) -> None:
        batch = self.state.batches.get(event.batch_id)
        if batch is not None:
            self._mishaps.batch_failed(self.now_us, batch, event.reason)

    # ------------------------------------------------- instances and devices

    def _instance_ready(self, event: ev.InstanceReady) -> None:
        instance = self.state.instances.get(event.instance)
        if instance is None or instance.phase is not Phase.LOADING:
            return
        instance.phase = move(instance.phase, "ready")
        device = self.state.devices[instance.device]
        self._lines.stir(device)
        if event.load_us:
            self.predictor.observe_load(instance.function, device.spec.kind, event.load_us)
        for batch, units, device_us in event.probes:
            self.predictor.observe(instance.function, device.spec.kind, batch, units, device_us)
        for job in self.state.functions[instance.function].queue.jobs():  # they have been waiting for this load
            job.run.cold_us = max(job.run.cold_us, self.now_us - max(instance.since_us, job.enqueued_us))
        self.renewal.ready(instance)

    def _instance_lost(self, event: ev.InstanceLost) -> None:
        instance = self.state.instances.get(event.instance)
        if instance is not None:
            self.renewal.lost(instance, event.reason)
            self._mishaps.instance_lost(self.now_us, instance, event.reason)

    def _device_joined(self, event: ev.DeviceJoined) -> None:
        if event.device.id not in self.state.devices:
            self.state.devices[event.device.id] = Device(event.device)
            self._slack.forget()
            self._lines.cold.update(dict.fromkeys(self.state.functions))

    def _device_lost(self, event: ev.DeviceLost) -> None:
        device = self.state.devices.get(event.device)
        if device is None:
            return
        instances = [self.state.instances[instance_id] for instance_id in device.instances]
        for instance in instances:
            self.renewal.lost(instance, "device-lost")
        self._mishaps.lose(self.now_us, instances, "device-lost")
        del self.state.devices[event.device]
        self._slack.forget()
        self._lines.cold.update(dict.fromkeys(self.state.functions))

    def _deployed(self, event: ev.Deployed) -> None:
        deployment.check(self.state, event)
        if isinstance(self.policy, DeployRole):
            self.policy.deploy(self._view, event.functions, event.flows)
        self.renewal.remember(event.functions)
        deployment.deploy(self.now_us, self.state, self._lines, self.policy.order, event)
        if self._fair.on:
            self._fair.adopt()
        self.renewal.begin(event.functions)
        self._slack.forget()

    def _tenant_set(self, event: ev.TenantSet) -> None:
        self._fair.set(self.now_us, event.tenant, event.spent_unit_us)

    # ------------------------------------------------------------------- time

    def _tick(self, event: ev.Tick) -> None:
        now_us = self.now_us
        self._alarm.ticked(now_us)
        if self._course.timers.next_us <= now_us:
            self._course.tick()
        for run in self._alarm.overdue(now_us):
            self._end(run, Fail(run.call.id, "deadline", next((job.node for job in run.jobs.values()), "")))
        self._alarm.wish(self._lines.recall_due(now_us))
        self._woken = self._alarm.woken(now_us) or self._woken
        if now_us >= self._look_at_us:
            self._look_at_us = now_us + HOUSEKEEPING_US
            self._mishaps.end_what_hangs(now_us)
            self._promises.doubt(now_us, self.state, self.predictor)
            self._alarm.tidy()
            if self._fair.on:
                self._fair.tidy(now_us)
        self._alarm.wish_on()  # this tick was not for the others; theirs must still come
        self._alarm.wish(self._look_at_us)
        if self._scale_at_us > now_us:
            self._alarm.wish(self._scale_at_us)

    # -------------------------------------------------------------- decisions

    def _settle(self) -> None:
        """What stands where: asked of the scale role."""
        self._view.cold, self._lines.cold = self._lines.cold, {}
        self._scale_at_us = self.now_us + self._scale.period_us
        self._slack.forget()  # predictions have moved on, and so has what was made of them
        for decision in self._scale.scale(self._view):
            self._apply(decision)
        for name in (*self.state.waiting, *self.state.held):
            function = self.state.functions[name]
            if not function.instances:  # no room, or backing off: look again soon
                self._scale_at_us = min(self._scale_at_us, max(function.not_before_us, self.now_us + LOOK_AGAIN_US))
        self._alarm.wish(self._scale_at_us)

    def _dispatch(self) -> None:
        self._woken = False
        if self._fair.on:
            self._dispatch_in_turns()
        else:
            for decision in self.policy.dispatch(self._view):
                self._apply(decision)

    def _dispatch_in_turns(self) -> None:
        """Ask about those whose turn it is while the others are out of sight, then about these as well."""
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
                self._end(job.run, Fail(job.run.call.id, decision.reason, job.node, job.id))
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
