"""The only writer of state: `handle(now_us, event) -> [action]`.

Rules it keeps, whatever the policy says:
- A call is in one place until it ends, and it ends once. What comes back for a batch it no longer knows is ignored, so
  a result delivered twice, or after a crash was reported, does nothing.
- A lease starts with its batch and ends with it. A booked batch inherits the slice of the one it is behind, at the
  instant that one ends, however it ends.
- When an instance is lost, its jobs run again if that is safe and can still be in time: a batch is halved each time it
  kills its worker, so that a poisonous job ends up alone; alone it may try once more, then its call fails.
- Time never runs backwards: a late clock is read as "no time has passed".
"""

from __future__ import annotations

from collections.abc import Callable, Container
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

from lamina.core import events as ev
from lamina.core.actions import (
    Action,
    AddDevice,
    DropJob,
    Fail,
    JobRef,
    Kill,
    Load,
    Refuse,
    ReleaseDevice,
    Reply,
    Resize,
    Resolve,
    StartBatch,
    Unload,
    WakeAt,
)
from lamina.core.defaults import AdmitAll, ScaleToLoad
from lamina.core.flow import Choice, Each, Flow, Task, function_flow
from lamina.core.lease import Device, mask_label
from lamina.core.lifecycle import Phase, move
from lamina.core.policy import (
    Admit,
    Decision,
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
from lamina.core.queue import Job, Queue
from lamina.core.quota import Bucket
from lamina.core.run import Ready, Run
from lamina.core.state import Batch, FunctionState, Instance, State
from lamina.errors import BadFlow, PolicyError
from lamina.types import NEVER_US, Quota

T = TypeVar("T")

GRACE_US = 100_000
"""A running job may overshoot by this much before its caller is told; the answer may be a moment away."""

BACKOFF_US = (0, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000, 6_400_000, 12_800_000, 30_000_000)
HOUSEKEEPING_US = 1_000_000
"""Hung batches and loads are looked for this often, whatever period the policy has."""

LOAD_LIMIT_US = 600_000_000
"""A load that takes longer hangs, and would hold its function's calls for ever."""

MAX_CRASHES = 5
"""Loads that die in a row before the calls waiting for the function are failed rather than kept."""

MAX_ITEMS = 100_000
"""Items of one run at a time: a count that comes from data is bounded before anything is made of it."""


class Controller:
    def __init__(self, policy: Dispatch, predictor: Predictor, *, hang_floor_us: int = 5_000_000) -> None:
        self.state = State()
        self.policy = policy
        self.predictor = predictor
        self.now_us = 0
        self._admit: Admit = policy if isinstance(policy, Admit) else AdmitAll()
        self._scale: ScaleRole = policy if isinstance(policy, ScaleRole) else ScaleToLoad()
        self._view = View(self.state, predictor)
        self._hang_floor_us = hang_floor_us
        self._out: list[Action] = []
        self._expiry: list[tuple[int, str]] = []  #: (when, call); entries of ended calls are skipped
        self._ticks: list[int] = []  #: ticks on their way, a heap; more than one when a later one was asked for first
        self._wish_us = NEVER_US  #: the earliest tick anybody asked for while this event is handled
        self._wakes: list[int] = []  #: times the policy wants to be asked at, a heap
        self._woken = False
        self._look_at_us = HOUSEKEEPING_US  #: when to look for what hangs
        self._scale_at_us = 0
        self._cold = False  #: work came for a function with no instance: do not wait for the next period
        self._tails: dict[int, dict[str, int]] = {}  #: by identity of the flow; dropped when predictions move
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CallArrived: self._call_arrived,
            ev.BatchFinished: self._batch_finished,
            ev.Tick: self._tick,
            ev.Resolved: self._resolved,
            ev.CallCancelled: self._call_cancelled,
            ev.BatchFailed: self._batch_failed,
            ev.InstanceReady: self._instance_ready,
            ev.InstanceLost: self._instance_lost,
            ev.DeviceJoined: self._device_joined,
            ev.DeviceLost: self._device_lost,
            ev.Deployed: self._deployed,
        }

    def handle(self, now_us: int, event: ev.Event) -> list[Action]:
        if now_us > self.now_us:
            self.now_us = now_us
        self._view.now_us = self.now_us
        out: list[Action] = []
        self._out = out
        self._wish_us = NEVER_US
        self._handlers[type(event)](event)
        self._decide()
        self._arm()
        return out

    def salvage(self) -> list[Action]:
        """After `handle` raised a PolicyError: what had been decided until then, which stands."""
        self._arm()
        return self._out

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
        refusal = self._admit.admit(self._view, call)
        if refusal is not None:
            self._out.append(refusal)
            return
        run = Run(call, flow)
        state.runs[call.id] = run
        heappush(self._expiry, (call.expires_us + GRACE_US, call.id))
        if flow.single is not None:
            self._enqueue(run, 0, flow.single)
        else:
            self._go(run, run.begin())

    def _go(self, run: Run, ready: Ready) -> None:
        """Make jobs and questions of what may start, and end the run if nothing is left."""
        for scope, node in ready:
            if isinstance(node, Task):
                self._enqueue(run, scope.id, node)
            else:
                asked = (scope.id, node.name)
                run.questions[asked] = run.questions.get(asked, 0) + 1
                self._out.append(Resolve(run.call.id, scope.id, node.name))
        if run.ended:
            call = run.call
            del self.state.runs[call.id]
            self._out.append(
                Reply(
                    call.id,
                    max(0, self.now_us - call.arrived_us),
                    self.now_us > call.deadline_us,
                    run.queue_us,
                    run.batch,
                    run.slice,
                    run.cost,
                    run.cold_us,
                    run.retries,
                )
            )

    def _enqueue(self, run: Run, scope_id: int, node: Task) -> None:
        state = self.state
        function = state.functions[node.function]
        state.last_job += 1
        call = run.call
        tail_us = 0 if run.flow.single is not None else self._tail_us(run, scope_id, node.name)
        job = Job(
            state.last_job,
            run,
            scope_id,
            node.name,
            node.function,
            self.now_us,
            call.deadline_us - tail_us,
            call.expires_us - tail_us,
        )
        run.jobs[job.id] = job
        function.meter.mark(self.now_us)
        self._wait(function, job)

    def _wait(self, function: FunctionState, job: Job) -> None:
        queue = function.queue
        queue.add(job)
        held = self.state.held.get(function.spec.name)
        if held is None:
            self.state.waiting[function.spec.name] = function
        elif len(queue) >= held.count or queue.head() is job:
            self._unhold(function)
        if not function.instances:
            self._cold = True

    def _unwait(self, function: FunctionState, jobs: list[Job]) -> None:
        function.queue.remove_first(jobs)
        if not len(function.queue):
            self.state.waiting.pop(function.spec.name, None)
            self.state.held.pop(function.spec.name, None)
            if self.state.held:  # a home its owner has no use for any more may be lent
                for instance in function.instances.values():
                    device = self.state.devices[instance.device]
                    if instance.id in device.lent:
                        self._stir(device)

    def _unhold(self, function: FunctionState) -> None:
        if self.state.held.pop(function.spec.name, None) is not None:
            self.state.waiting[function.spec.name] = function

    def _stir(self, device: Device) -> None:
        """Something changed on this device: whoever could use it is asked again."""
        if self.state.held:
            for instance_id in device.instances:
                self._unhold(self.state.functions[self.state.instances[instance_id].function])

    def _tail_us(self, run: Run, scope_id: int, node: str) -> int:
        """Least time from the end of this node to the end of the run."""
        scope = run.scopes[scope_id]
        total = self._tails_of(scope.flow)[node]
        while scope.parent is not None:
            total += self._tails_of(scope.parent.flow)[scope.each]
            scope = scope.parent
        return total

    def _tails_of(self, flow: Flow) -> dict[str, int]:
        tails = self._tails.get(id(flow))
        if tails is None:
            tails = self._tails[id(flow)] = flow.tails(self._fastest_us)
        return tails

    def _fastest_us(self, function: str) -> int:
        """A job alone on the device that suits it best."""
        spec = self.state.functions[function].spec
        times = [
            self.predictor.latency_us(function, device.spec.kind, 1, spec.units_on(device.spec))
            for device in self.state.devices.values()
            if spec.fits_family(device.spec.family)
        ]
        return min(times, default=0)

    def _call_cancelled(self, event: ev.CallCancelled) -> None:
        run = self.state.runs.get(event.call_id)
        if run is not None:
            self._end(run, Fail(event.call_id, "cancelled"))

    def _end(self, run: Run, word: Fail | Refuse) -> None:
        """The run ends here without a result; whatever still runs for it is not waited for."""
        del self.state.runs[run.call.id]
        for job in run.jobs.values():
            if not job.batch_id:
                self._unwait(self.state.functions[job.function], [job])
            self._out.append(DropJob(job.id))
        run.jobs.clear()
        self._out.append(word)

    def _resolved(self, event: ev.Resolved) -> None:
        run = self.state.runs.get(event.call_id)
        asked = (event.scope, event.node)
        if run is None or asked not in run.questions:
            return
        run.questions[asked] -= 1
        if not run.questions[asked]:
            del run.questions[asked]
        node = run.scopes[event.scope].flow.nodes[event.node]
        if isinstance(node, Each):
            possible = 0 <= event.value <= MAX_ITEMS - len(run.scopes)
        else:
            assert isinstance(node, Choice)
            possible = 0 <= event.value < len(node.branches)
        if event.error or not possible:
            self._end(run, Fail(event.call_id, event.error or "bad-value", event.node))
        elif isinstance(node, Each):
            self._go(run, run.spread(event.scope, event.node, event.value))
        else:
            self._go(run, run.finish(event.scope, event.node, node.branches[event.value]))

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
        function.crashes = 0
        self.predictor.observe(function.spec.name, device.spec.kind, count, units, device_us)
        if function.bucket:
            function.bucket.charge(self.now_us, device_us)
        label = mask_label(device.spec.id, batch.mask)
        cost = device_us * units * device.spec.unit_price() / count
        self._release(batch)
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
            if outcomes and not outcomes[index].ok:
                self._end(run, Fail(run.call.id, outcomes[index].error, job.node, job.id))
            elif run.flow.single is not None:
                run.ended = True
                self._go(run, [])
            else:
                self._go(run, run.finish(job.scope, job.node))

    def _release(self, batch: Batch) -> None:
        """End the lease; the booked batch behind it takes the slice over at once."""
        instance = batch.instance
        del self.state.batches[batch.id]
        del instance.batches[batch.id]
        self._stir(batch.device)
        if batch.started_us >= 0:
            batch.device.give_back(batch.id)
            instance.running -= 1
            instance.used_us = self.now_us
        elif batch.after is not None:
            batch.after.follower = None
        follower = batch.follower
        if follower is not None:
            batch.follower = None
            follower.after = None
            self._begin(follower)
        if instance.phase is Phase.DRAINING and not instance.batches:
            self._part(instance)

    def _begin(self, batch: Batch) -> None:
        batch.started_us = self.now_us
        batch.device.take(batch.id, batch.mask)
        batch.instance.running += 1

    def _batch_failed(self, event: ev.BatchFailed) -> None:
        batch = self.state.batches.get(event.batch_id)
        if batch is None:
            return
        self._release(batch)
        self._retry(batch, event.reason)

    def _retry(self, batch: Batch, reason: str) -> None:
        """Jobs of a batch that came to nothing: again, in half the company; alone, once more; then no more."""
        function = self.state.functions[batch.instance.function]
        company = len(batch.jobs)
        fastest_us = self._fastest_us(function.spec.name)
        for job in batch.jobs:
            run = job.run
            if job.id not in run.jobs:
                continue
            job.batch_id = 0
            if company > 1:
                job.batch_limit = max(1, company // 2)
            else:
                job.strikes += 1
            run.retries += 1
            if not function.spec.idempotent or job.strikes > 1:
                del run.jobs[job.id]
                self._end(run, Fail(run.call.id, reason, job.node, job.id))
            elif self.now_us + fastest_us > job.expires_us:
                del run.jobs[job.id]
                self._end(run, Fail(run.call.id, "deadline", job.node, job.id))
            else:
                self._wait(function, job)

    def _unbook(self, batch: Batch) -> None:
        """Jobs of a batch that never began go back as if nothing had been: no harm came to them, or from them."""
        for job in batch.jobs:
            if job.id in job.run.jobs:
                job.batch_id = 0
                self._wait(self.state.functions[job.function], job)

    # ------------------------------------------------- instances and devices

    def _instance_ready(self, event: ev.InstanceReady) -> None:
        instance = self.state.instances.get(event.instance)
        if instance is None or instance.phase is not Phase.LOADING:
            return
        instance.phase = move(instance.phase, "ready")
        device = self.state.devices[instance.device]
        self._stir(device)
        if event.load_us:
            self.predictor.observe_load(instance.function, device.spec.kind, event.load_us)
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
                    self._end(job.run, Fail(job.run.call.id, "load-failed", job.node, job.id))
        elif len(function.queue) or function.spec.scale.min:
            self._cold = True

    def _lose(self, instances: list[Instance], reason: str) -> None:
        for instance in instances:
            instance.phase = move(instance.phase, "lost")
        batches = [batch for instance in instances for batch in instance.batches.values()]
        booked = [batch for batch in batches if batch.started_us < 0]
        begun = [batch for batch in batches if batch.started_us >= 0]
        for batch in (*booked, *begun):  # booked first: they must not be begun
            self._release(batch)
        for instance in instances:
            self._remove(instance)
        for batch in begun:
            self._retry(batch, reason)
        for batch in booked:
            self._unbook(batch)

    def _part(self, instance: Instance) -> None:
        """Its work is done: it goes of our own will."""
        instance.phase = move(instance.phase, "unload")
        self._remove(instance)
        self._out.append(Unload(instance.id))

    def _remove(self, instance: Instance) -> None:
        device = self.state.devices[instance.device]
        function = self.state.functions[instance.function]
        self._stir(device)  # its memory and its home are free for others
        device.memory_used_mib -= instance.memory_mib
        device.forget(instance.id)
        del function.instances[instance.id]
        del self.state.instances[instance.id]
        if len(function.queue) and not function.instances:
            self._cold = True

    def _device_joined(self, event: ev.DeviceJoined) -> None:
        if event.device.id not in self.state.devices:
            self.state.devices[event.device.id] = Device(event.device)
            self._tails.clear()
            self._cold = True

    def _device_lost(self, event: ev.DeviceLost) -> None:
        device = self.state.devices.get(event.device)
        if device is None:
            return
        self._lose([self.state.instances[instance_id] for instance_id in device.instances], "device-lost")
        del self.state.devices[event.device]
        self._tails.clear()
        self._cold = True

    def _deployed(self, event: ev.Deployed) -> None:
        self._check_deployed(event)
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
                        device.keep(instance.id, device.homes[instance.id], spec.lend)
                    else:
                        instance.units = spec.units_on(device.spec)
                    self._stir(device)
                self._unhold(known)
            function = self.state.functions[spec.name]
            function.bucket = self._bucket(spec.quota, function.bucket)
            self.state.flows[spec.name] = function_flow(spec.name, spec.slo)
            self._cold = self._cold or spec.scale.min > 0
        for flow in event.flows:
            self.state.flows[flow.name] = flow
        self._tails.clear()

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

    def _bucket(self, quota: Quota, before: Bucket | None) -> Bucket | None:
        """Full at first; a new quota neither forgives a debt nor takes savings that fit."""
        if quota.limit >= 1.0:
            return None
        burst_us = max(1.0, quota.limit * quota.window_us)
        level_us = min(burst_us, before.level(self.now_us)) if before else burst_us
        return Bucket(quota.limit, burst_us, level_us, self.now_us)

    # ------------------------------------------------------------------- time

    def _tick(self, event: ev.Tick) -> None:
        now_us = self.now_us
        if self._ticks and self._ticks[0] <= now_us:
            heappop(self._ticks)
        expiry, runs = self._expiry, self.state.runs
        while expiry and expiry[0][0] <= now_us:
            _, call_id = heappop(expiry)
            run = runs.get(call_id)
            if run is not None and run.call.expires_us + GRACE_US <= now_us:
                self._end(run, Fail(call_id, "deadline", next((job.node for job in run.jobs.values()), "")))
        for name, held in list(self.state.held.items()):
            if held.until_us <= now_us:
                self._unhold(self.state.functions[name])
            elif held.until_us < self._wish_us:
                self._wish_us = held.until_us  # this tick was not theirs; theirs must still come
        while self._wakes and self._wakes[0] <= now_us:
            heappop(self._wakes)
            self._woken = True
        if now_us >= self._look_at_us:
            self._look_at_us = now_us + HOUSEKEEPING_US
            self._end_what_hangs()
            if len(expiry) > 2 * len(runs) + 1024:  # one patient call must not keep the times of all that came after it
                self._expiry = [entry for entry in expiry if entry[1] in runs]
                heapify(self._expiry)

    def _end_what_hangs(self) -> None:
        for batch in self.state.batches.values():
            if batch.started_us >= 0 and self.now_us - batch.started_us >= self._hang_us(batch):
                self._kill(batch.instance, "hung")
        for instance in self.state.instances.values():
            if instance.phase is Phase.LOADING and self.now_us - instance.since_us >= LOAD_LIMIT_US:
                self._kill(instance, "load-hung")

    def _kill(self, instance: Instance, reason: str) -> None:
        """Once; until its loss is reported it gets nothing more to do."""
        if not instance.killed:
            instance.killed = True
            if instance.phase is Phase.WARM:
                instance.phase = move(instance.phase, "drain")
            self._cold = True
            self._out.append(Kill(instance.id, reason))

    def _hang_us(self, batch: Batch) -> int:
        return max(5 * batch.predicted_us, self._hang_floor_us) if batch.predicted_us else 60_000_000

    def _arm(self) -> None:
        """Ask for the earliest tick anybody needs, unless one that early is on its way."""
        expiry, runs = self._expiry, self.state.runs
        while expiry and expiry[0][1] not in runs:
            heappop(expiry)
        at_us = min(self._wish_us, self._scale_at_us, self._look_at_us)
        if expiry and expiry[0][0] < at_us:
            at_us = expiry[0][0]
        if self._wakes and self._wakes[0] < at_us:
            at_us = self._wakes[0]
        if not self._ticks or at_us < self._ticks[0]:
            at_us = max(at_us, self.now_us + 1)
            heappush(self._ticks, at_us)
            self._out.append(WakeAt(at_us))

    # -------------------------------------------------------------- decisions

    def _decide(self) -> None:
        if self._cold or self.now_us >= self._scale_at_us:
            self._cold = False
            self._scale_at_us = self.now_us + self._scale.period_us
            if self.now_us and self._tails:
                self._tails.clear()  # predictions have moved on; so have the tails made of them
            for decision in self._scale.scale(self._view):
                self._apply(decision)
            for name in (*self.state.waiting, *self.state.held):
                function = self.state.functions[name]
                if not function.instances:  # no room, or backing off: look again soon
                    self._scale_at_us = min(self._scale_at_us, max(function.not_before_us, self.now_us + 10_000))
        if self.state.waiting or self._woken:
            self._woken = False
            for decision in self.policy.dispatch(self._view):
                self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                self._start(decision)
            case Hold():
                self._wish_us = min(self._wish_us, decision.until_us)
                function = self.state.waiting.pop(decision.function, None)
                if function is not None:
                    self.state.held[decision.function] = decision
            case Wake():
                heappush(self._wakes, decision.at_us)
            case Drop():
                job = decision.job
                if job.id not in job.run.jobs or job.batch_id:
                    raise PolicyError(f"job {job.id} does not wait and cannot be dropped")
                self._end(job.run, Fail(job.run.call.id, decision.reason, job.node, job.id))
            case LoadOn():
                self._load(decision)
            case UnloadOf():
                self._unload(decision)
            case ResizeTo():
                self._resize(decision)
            case WantDevice():
                self._out.append(AddDevice(decision.kind))
            case GiveDevice():
                self._give(decision)

    def _start(self, decision: Start) -> None:
        self._check_start(decision)
        jobs, opening = decision.jobs, decision.opening
        instance, device = opening.instance, opening.device
        function = self.state.functions[instance.function]
        predicted_us = self._view.latency_us(function.spec.name, device, len(jobs), opening.units)
        if predicted_us and opening.at_us + predicted_us > max(job.expires_us for job in jobs):
            raise PolicyError(f"every job of this batch of {function.spec.name} would be too late")
        state = self.state
        state.last_batch += 1
        batch = Batch(state.last_batch, instance, device, opening.mask, jobs, predicted_us, planned_us=opening.at_us)
        if opening.after is not None:
            batch.after = opening.after
            opening.after.follower = batch
        else:
            self._begin(batch)
        state.batches[batch.id] = batch
        instance.batches[batch.id] = batch
        self._unwait(function, jobs)
        for job in jobs:
            job.batch_id = batch.id
        self._out.append(
            StartBatch(
                batch.id,
                function.spec.name,
                instance.id,
                device.spec.id,
                opening.mask,
                tuple([JobRef(job.id, job.run.call.id, job.scope, job.node) for job in jobs]),
                predicted_us,
                batch.after.id if batch.after is not None else 0,
                decision.why,
            )
        )

    def _check_start(self, decision: Start) -> None:
        """Before anything changes: a policy in error must leave the state sound."""
        jobs, opening = decision.jobs, decision.opening
        instance, device, mask, after = opening.instance, opening.device, opening.mask, opening.after
        name = instance.function
        if not jobs:
            raise PolicyError("a batch needs at least one job")
        if len(jobs) > self.state.functions[name].spec.max_batch:
            raise PolicyError(f"{name} takes {self.state.functions[name].spec.max_batch} jobs at once, not {len(jobs)}")
        ids = {job.id for job in jobs if not job.batch_id and job.function == name and job.id in job.run.jobs}
        if len(ids) != len(jobs):
            raise PolicyError(f"a batch is made of waiting jobs of one function, each once; this one is for {name}")
        if instance.phase is not Phase.WARM or instance.device != device.spec.id:
            raise PolicyError(f"{instance.id} is {instance.phase.value} on {instance.device}")
        if not device.allows(mask) or not (device.spec.limits.per_batch or mask == device.homes.get(instance.id)):
            raise PolicyError(f"{device.spec.id} has no slice {mask:b} for {instance.id}")
        own = after is not None and after.instance is instance
        if not own and not instance.has_room(device.spec.limits.batches_per_instance):
            raise PolicyError(f"{instance.id} has all the batches it may run at once")
        if after is None:
            if mask & (device.busy | device.kept_from(instance.id)):
                raise PolicyError(f"{mask_label(device.spec.id, mask)} is busy, or kept for somebody else")
        elif after.follower is not None or after.started_us < 0 or after.id not in self.state.batches:
            raise PolicyError(f"nothing can be booked behind batch {after.id}")
        elif after.device is not device or mask & ~after.mask:
            raise PolicyError(f"{mask_label(device.spec.id, mask)} is not what batch {after.id} leaves behind")

    def _load(self, decision: LoadOn) -> None:
        function = self._known(self.state.functions, decision.function)
        device = self._known(self.state.devices, decision.device)
        memory_mib = function.spec.memory_mib
        if not function.spec.fits_family(device.spec.family):
            raise PolicyError(f"{decision.function} cannot run on {decision.device}: that is a {device.spec.family}")
        if device.memory_used_mib + memory_mib > device.spec.memory_mib:
            raise PolicyError(f"{decision.function} needs {memory_mib} MiB; {decision.device} has no room for it")
        mask = self._standing(device, decision.home_units, ())
        function.loads += 1
        instance = Instance(
            f"{decision.function}-{function.loads}",
            decision.function,
            decision.device,
            Phase.LOADING,
            self.now_us,
            memory_mib,
            units=mask.bit_count() or function.spec.units_on(device.spec),
        )
        device.memory_used_mib += memory_mib
        device.instances[instance.id] = None
        if mask:
            device.keep(instance.id, mask, function.spec.lend)
        function.instances[instance.id] = instance
        self.state.instances[instance.id] = instance
        self._out.append(Load(instance.id, decision.function, decision.device, mask))

    def _known(self, those: dict[str, T], name: str) -> T:
        if name not in those:
            raise PolicyError(f"there is no {name!r}")
        return those[name]

    def _standing(self, device: Device, units: int, instance: Container[str]) -> int:
        """A place for a standing slice, 0 if none is wanted."""
        if not units:
            return 0
        mask = device.spare(units, instance) if units > 0 else 0
        if not device.allows(mask):
            raise PolicyError(f"{device.spec.id} has no {units} units left for a standing slice")
        return mask

    def _unload(self, decision: UnloadOf) -> None:
        instance = self._known(self.state.instances, decision.instance)
        if not instance.batches:
            self._part(instance)
        elif instance.phase is Phase.WARM:
            instance.phase = move(instance.phase, "drain")

    def _resize(self, decision: ResizeTo) -> None:
        instance = self._known(self.state.instances, decision.instance)
        device = self.state.devices[instance.device]
        spec = self.state.functions[instance.function].spec
        before = device.homes.get(instance.id, 0)
        if before.bit_count() == decision.home_units:
            return
        mask = self._standing(device, decision.home_units, (instance.id,))
        if mask:
            device.keep(instance.id, mask, spec.lend)
        else:
            device.leave(instance.id)
        instance.units = mask.bit_count() or spec.units_on(device.spec)
        self._stir(device)
        self._out.append(Resize(instance.id, mask))

    def _give(self, decision: GiveDevice) -> None:
        device = self._known(self.state.devices, decision.device)
        if device.instances:
            raise PolicyError(f"{decision.device} is not empty")
        del self.state.devices[decision.device]
        self._tails.clear()
        self._out.append(ReleaseDevice(decision.device))
