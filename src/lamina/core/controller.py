"""The only writer of state: `handle(now_us, event) -> [action]`.

Rules it keeps, whatever the policy says:
- A call is in one place until it ends, and it ends once. What comes back for a batch it no longer knows is ignored, so
  a result delivered twice, or after a crash was reported, does nothing.
- When an instance is lost, its jobs run again if that is safe and can still be in time: a batch is halved each time it
  kills its worker, so that a poisonous job ends up alone; alone it may try once more, then its call fails. What had not
  begun, or ran beside others, is not blamed.
- Time never runs backwards: a late clock is read as "no time has passed".

Here are calls and their ends. What else there is to own has one owner each: how runs go on (`course.py`), who waits
(`lines.py`), devices, instances and leases (`fleet.py`), when to look again (`alarm.py`), time to leave for later steps
(`slack.py`), jobs yet to come (`outlook.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.core import events as ev
from lamina.core.actions import Action, AddDevice, DropJob, Fail, Refuse, Reply, WakeAt
from lamina.core.alarm import Alarm
from lamina.core.course import MAX_ITEMS as MAX_ITEMS
from lamina.core.course import Course
from lamina.core.defaults import AdmitAll, ScaleToLoad
from lamina.core.fleet import Fleet
from lamina.core.flow import Flow, Task, function_flow
from lamina.core.lease import Device, mask_label
from lamina.core.lifecycle import Phase, move
from lamina.core.lines import Lines
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
    ResizeTo,
    ScaleRole,
    Start,
    UnloadOf,
    View,
    Wake,
    WantDevice,
)
from lamina.core.promises import Promises
from lamina.core.queue import Job, Queue
from lamina.core.quota import bucket_for
from lamina.core.run import Run
from lamina.core.slack import Slack
from lamina.core.state import Batch, FunctionState, Instance, State
from lamina.errors import BadFlow, PolicyError

BACKOFF_US = (0, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000, 6_400_000, 12_800_000, 30_000_000)
LOOK_AGAIN_US = 10_000
"""Work waits for a function that could not be loaded: there may be room for it soon."""

HOUSEKEEPING_US = 1_000_000
"""Hung batches and loads are looked for this often, whatever period the policy has."""

LOAD_LIMIT_US = 600_000_000
"""A load that takes longer hangs, and would hold its function's calls for ever."""

MAX_CRASHES = 5
"""Loads that die in a row before the calls waiting for the function are failed rather than kept."""


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
        self._hang_floor_us = hang_floor_us
        self._out: list[Action] = []
        self._lines = Lines(self.state)
        self._fleet = Fleet(self.state, self._view, self._lines, self._out)
        self._alarm = Alarm(self.state.runs)
        self._slack = Slack(self.state, predictor, any_size=getattr(policy, "any_size", False))
        self._outlook = Outlook(self.state)
        self._course = Course(self.state, self._out, self._enqueue, self._drop, self._end, self._reply)
        self._woken = False  #: a time has come that the policy asked for
        self._look_at_us = HOUSEKEEPING_US  #: when to look for what hangs
        self._scale_at_us = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CallArrived: self._call_arrived,
            ev.BatchFinished: self._batch_finished,
            ev.Tick: self._tick,
            ev.Resolved: self._resolved,
            ev.Heartbeat: self._heartbeat,
            ev.CallCancelled: self._call_cancelled,
            ev.BatchFailed: self._batch_failed,
            ev.InstanceReady: self._instance_ready,
            ev.InstanceLost: self._instance_lost,
            ev.DeviceJoined: self._device_joined,
            ev.DeviceLost: self._device_lost,
            ev.Deployed: self._deployed,
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
        self._decide()
        return self.salvage()

    def salvage(self) -> list[Action]:
        """After `handle` raised a PolicyError: what had been decided until then, which stands."""
        out = self._out
        need_us = self._scale_at_us if self._scale_at_us < self._look_at_us else self._look_at_us
        resume_us = self._course.timers.next_us
        tick_us = self._alarm.next_tick(self.now_us, need_us if need_us < resume_us else resume_us)
        if tick_us:
            out.append(WakeAt(tick_us))
        said = out[:]
        out.clear()
        return said

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
        for name in flow.functions:
            function = state.functions[name]
            if len(function.queue) >= function.spec.max_queue:
                self._out.append(Refuse(call.id, "queue-full", retry_after_us=1_000_000))
                return
        if call.cost_limit and self._view.least_cost(flow) > call.cost_limit:
            self._out.append(Refuse(call.id, "cost"))
            return
        verdict = self._admit.admit(self._view, call)
        if isinstance(verdict, Refuse):
            self._refuse(flow, verdict)
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

    def _refuse(self, flow: Flow, refusal: Refuse) -> None:
        """A refusal is demand too: what it lacked is worth loading, and the prediction behind it worth doubting."""
        self._out.append(refusal)
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
        if run.expected:
            self._outlook.end(run)
        if run.promised_us:
            self._promises.ended(run, now_us <= call.expires_us)
        self._out.append(
            Reply(
                call.id,
                max(0, now_us - call.arrived_us),
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
            run.batch = max(run.batch, count)
            run.slice = label
            run.cost += cost
            run.at = device.spec.id
            if outcomes and not outcomes[index].ok:
                self._course.job_failed(run, job, outcomes[index].error, outcomes[index].name)
            elif run.flow.single is not None:
                run.ended = True
                self._reply(run)
            else:
                self._course.job_done(run, job)

    def _batch_failed(self, event: ev.BatchFailed) -> None:
        batch = self.state.batches.get(event.batch_id)
        if batch is None:
            return
        self._fleet.release(batch)
        self._retry(batch, event.reason, blamed=True)

    def _retry(self, batch: Batch, reason: str, *, blamed: bool) -> None:
        """Jobs of a batch that came to nothing: again, in half the company; alone, once more; then no more."""
        function = self.state.functions[batch.instance.function]
        company = len(batch.jobs)
        fastest_us = self._slack.fastest_us(function.spec.name)
        for job in batch.jobs:
            run = job.run
            if job.id not in run.jobs:
                continue
            job.batch_id = 0
            if company > 1:
                job.batch_limit = max(1, company // 2)
            elif blamed:
                job.strikes += 1
            run.retries += 1
            if not function.spec.idempotent or job.strikes > 1:
                function.suspects = max(0, function.suspects - 1)
                self._course.job_failed(run, job, reason)
            elif self.now_us + fastest_us > job.expires_us:
                del run.jobs[job.id]
                self._end(run, Fail(run.call.id, "deadline", job.node, job.id))
            else:
                self._lines.join(function, job)

    def _unbook(self, batch: Batch) -> None:
        """Jobs of a batch that never began go back as if nothing had been: no harm came to them, or from them."""
        for job in batch.jobs:
            if job.id in job.run.jobs:
                job.batch_id = 0
                self._lines.join(self.state.functions[job.function], job)

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

    def _instance_lost(self, event: ev.InstanceLost) -> None:
        instance = self.state.instances.get(event.instance)
        if instance is None:
            return
        function = self.state.functions[instance.function]
        function.crashes += 1
        function.not_before_us = self.now_us + BACKOFF_US[min(function.crashes, len(BACKOFF_US)) - 1]
        lost_loading = instance.phase is Phase.LOADING
        self._lose([instance], event.reason)
        if lost_loading and function.crashes >= MAX_CRASHES and not function.instances:
            for job in function.queue.jobs():
                if job.id in job.run.jobs:
                    self._drop(job.run, job)
                    self._course.job_failed(job.run, job, "load-failed")
        elif len(function.queue) or function.spec.scale.min:
            self._lines.cold[function.spec.name] = None

    def _lose(self, instances: list[Instance], reason: str) -> None:
        crowd = {instance.id: instance.running for instance in instances}
        begun, booked = self._fleet.lose(instances)
        for batch in begun:
            alone = crowd[batch.instance.id] == 1
            if not alone:  # who of them was it? One at a time now, until all have been tried
                self.state.functions[batch.instance.function].suspects += len(batch.jobs)
            self._retry(batch, reason, blamed=alone)
        for batch in booked:
            self._unbook(batch)

    def _device_joined(self, event: ev.DeviceJoined) -> None:
        if event.device.id not in self.state.devices:
            self.state.devices[event.device.id] = Device(event.device)
            self._slack.forget()
            self._lines.cold.update(dict.fromkeys(self.state.functions))

    def _device_lost(self, event: ev.DeviceLost) -> None:
        device = self.state.devices.get(event.device)
        if device is None:
            return
        self._lose([self.state.instances[instance_id] for instance_id in device.instances], "device-lost")
        del self.state.devices[event.device]
        self._slack.forget()
        self._lines.cold.update(dict.fromkeys(self.state.functions))

    def _deployed(self, event: ev.Deployed) -> None:
        self._check_deployed(event)
        if isinstance(self.policy, DeployRole):
            self.policy.deploy(self._view, event.functions, event.flows)
        for spec in event.functions:
            known = self.state.functions.get(spec.name)
            if known is None:
                self.state.functions[spec.name] = FunctionState(spec, Queue(spec.name, self.policy.order))
            else:
                known.spec = spec
                known.crashes = known.not_before_us = 0
                for instance in known.instances.values():
                    device = self.state.devices[instance.device]
                    if instance.id in device.homes:
                        device.keep(instance.id, device.homes[instance.id], spec.lend, instance.quota)
                    else:
                        instance.units = spec.units_on(device.spec)
                    self._lines.stir(device)
            function = self.state.functions[spec.name]
            function.bucket = bucket_for(spec.quota, function.bucket, self.now_us)
            self.state.flows[spec.name] = function_flow(spec.name, spec.slo)
            if spec.scale.min:
                self._lines.cold[spec.name] = None
        for flow in event.flows:
            self.state.flows[flow.name] = flow
        self._slack.forget()

    def _check_deployed(self, event: ev.Deployed) -> None:
        """All of it or nothing: what is wrong is said before anything is changed."""
        functions = self.state.functions.keys() | {spec.name for spec in event.functions}
        for flow in event.flows:
            flow.check()
            if flow.name in functions:
                raise BadFlow(f"{flow.name!r} is a function and a workflow", hint="give one of them another name")
            for name in flow.functions:
                if name not in functions:
                    raise BadFlow(f"workflow {flow.name!r} calls {name!r}, which is not deployed")
        for spec in event.functions:
            if spec.name in self.state.flows and spec.name not in self.state.functions:
                raise BadFlow(f"{spec.name!r} is a workflow already", hint="give the function another name")

    # ------------------------------------------------------------------- time

    def _tick(self, event: ev.Tick) -> None:
        now_us = self.now_us
        self._alarm.ticked(now_us)
        if self._course.timers.next_us <= now_us:
            self._course.tick()
        for run in self._alarm.overdue(now_us):
            self._end(run, Fail(run.call.id, "deadline", next((job.node for job in run.jobs.values()), "")))
        self._alarm.wish(self._lines.recall_due(now_us))  # this tick was not for the others; theirs must still come
        self._woken = self._alarm.woken(now_us) or self._woken
        if now_us >= self._look_at_us:
            self._look_at_us = now_us + HOUSEKEEPING_US
            self._end_what_hangs()
            self._doubt_predictions()
            self._alarm.tidy()

    def _end_what_hangs(self) -> None:
        for batch in self.state.batches.values():
            if batch.started_us >= 0 and self.now_us - batch.started_us >= self._hang_us(batch):
                self._fleet.kill(batch.instance, "hung")
        for instance in self.state.instances.values():
            if instance.phase is Phase.LOADING and self.now_us - instance.since_us >= LOAD_LIMIT_US:
                self._fleet.kill(instance, "load-hung")

    def _doubt_predictions(self) -> None:
        """A door that closes by itself must open by itself: if calls are turned away and nothing runs that could prove
        the prediction wrong, it is believed a little less every second."""
        for name, function in self.state.functions.items():
            quiet = all(not i.batches and self.now_us - i.used_us >= HOUSEKEEPING_US for i in function.instances.values())
            if function.refused and quiet:
                self.predictor.relax(name)
                for target, flow in self.state.flows.items():
                    if name in flow.functions:
                        self._promises.relax(target)
                function.refused = 0

    def _hang_us(self, batch: Batch) -> int:
        return max(5 * batch.predicted_us, self._hang_floor_us) if batch.predicted_us else 60_000_000

    # -------------------------------------------------------------- decisions

    def _decide(self) -> None:
        if self._lines.cold or self.now_us >= self._scale_at_us:
            self._view.cold, self._lines.cold = self._lines.cold, {}
            self._scale_at_us = self.now_us + self._scale.period_us
            self._slack.forget()  # predictions have moved on, and so has what was made of them
            for decision in self._scale.scale(self._view):
                self._apply(decision)
            for name in (*self.state.waiting, *self.state.held):
                function = self.state.functions[name]
                if not function.instances:  # no room, or backing off: look again soon
                    self._scale_at_us = min(self._scale_at_us, max(function.not_before_us, self.now_us + LOOK_AGAIN_US))
        if self.state.waiting or self._woken:
            self._woken = False
            for decision in self.policy.dispatch(self._view):
                self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                self._fleet.start(decision)
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
                self._fleet.unload(decision)
            case ResizeTo():
                self._fleet.resize(decision)
            case WantDevice():
                self._out.append(AddDevice(decision.kind))
            case GiveDevice():
                self._fleet.give(decision)
                self._slack.forget()
