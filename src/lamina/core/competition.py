"""Competition: one function with several bodies, for a CPU and for a GPU say, of which one serves each call.

**Choice.** Bodies are ranked for each call by what is known when it comes: those that can be in time first, and of these the
cheapest (with the objective "latency" the soonest). The first one that the policy admits gets the call; the policy is asked about
the next one only if it rejects. A body that is not loaded counts its load. If without it it would have been first, the call
counts as demand for it, so that it is loaded for those to come.

**Backup.** A second body is started for the same call, and the first result wins, when that pays: the first body has not
ended at the last moment at which the other can still be in time, and the other has nothing else to do. So a backup takes idle
capacity only, and none at all while predictions hold. Calls with a cost limit and bodies that are not idempotent have none.

**Loss.** When the last device of a body is lost, or its worker keeps dying, its calls go on with another body. An error that the
function itself raises ends the call, unless another body is under way for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from msgspec.structs import replace

from lamina.core.actions import FailCall, Reject
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, BodyChoice, View
from lamina.core.scheduling.jobs import ActiveCall, CallRegistry, Job, SoleTask, Target
from lamina.core.scheduling.state import Batch, ControllerState, FunctionState
from lamina.types import NEVER_US, Call, Slo

BACKUP_SPARE = 0.25
"""Of the time of a backup, added to it: predictions err."""

OVERDUE = 3
"""A call without a latency goal has a backup once it takes so many times its estimate."""

RISKY = 0.8
"""A body that needs more than this part of the time allowed is raced from the start where the other takes as long."""

LOSSES = frozenset(("worker-lost", "device-lost", "hung", "load-failed", "load-hung", "internal"))
"""Failures of a body's worker or device, which say nothing about the input."""


OnDemand = Callable[[Target], None]
"""Counts a call as demand for a function that it did not get."""


class Competition:
    """Calls of competing functions, and the owner of their jobs."""

    def __init__(
        self,
        state: ControllerState,
        flows: Mapping[str, Target],
        view: View,
        calls: CallRegistry,
        on_devices_changed: Callable[[], None],
    ) -> None:
        self._state = state
        self._flows = flows
        self._view = view
        self._calls = calls
        self._on_devices_changed = on_devices_changed  #: called first
        self._rivals: dict[str, list[SoleTask]] = {}  #: by call in flight: bodies that were not tried yet, best first
        self.backups: list[tuple[int, str]] = []  #: when, and which call; a heap

    # ------------------------------------------------------------------ choice

    def choose(
        self,
        call: Call,
        flow: Target,
        decide: Callable[[Call, Target], Admitted | Reject | None],
        on_demand: OnDemand,
    ) -> BodyChoice | Reject:
        """The best body that is admitted, or the rejection with the best offer. `on_demand` counts demand for what was not."""
        ranked = self.ranked(call, flow)
        rejections: list[Reject] = []
        for task in ranked:
            verdict = decide(replace(call, target=task.function), self._flows[task.function])
            if not isinstance(verdict, Reject):
                self._want_better(call, flow, task, on_demand)
                return BodyChoice(task, verdict.estimate_us if verdict is not None else 0)
            rejections.append(verdict)
        for task in ranked:
            on_demand(self._flows[task.function])
        return min(rejections, key=lambda one: one.offer_us or NEVER_US, default=Reject(call.id, "no-capacity"))

    def ranked(self, call: Call, flow: Target) -> list[SoleTask]:
        """Bodies that some device can host, best first."""
        hosted = [task for task in flow.bodies if self._view.can_host(self._state.functions[task.function])]
        return sorted(hosted, key=lambda task: self._rank(call, flow.slo, task.function, cold=True))

    def _rank(self, call: Call, slo: Slo, name: str, *, cold: bool) -> tuple[bool, float, float]:
        """Order of a body: whether it is late, what it costs, how long it takes; with its load if that counts."""
        view, function = self._view, self._state.functions[name]
        needed_us = self._needed_us(function) + (self._load_us(function) if cold else 0)
        objective = call.objective or function.spec.objective or ("deadline" if slo.latency_us else "latency")
        is_late = needed_us > call.expires_us - view.now_us
        cost = 0.0 if objective == "latency" else view.least_cost(self._flows[name])
        return is_late, cost, needed_us

    def _needed_us(self, function: FunctionState) -> int:
        """Time of one more call behind what it has: a rough estimate; the policy's own follows. 0: not known."""
        ready = sum(one.phase is InstancePhase.WARM for one in function.instances.values())
        ahead = len(function.queue) + sum(
            len(one.jobs) for instance in function.instances.values() for one in instance.batches.values()
        )
        return int(self._view.fastest_us(function.spec.name) * (1 + ahead / (max(1, ready) * function.spec.max_batch)))

    def _load_us(self, function: FunctionState) -> int:
        """Time until an instance is ready, if none is."""
        if any(one.phase is InstancePhase.WARM for one in function.instances.values()):
            return 0
        spec, load_us = function.spec, self._view.predictor.load_us
        kinds = {device.spec.kind for device in self._state.devices.values() if spec.fits_family(device.spec.family)}
        return min((load_us(spec.name, kind) for kind in kinds), default=0)

    def _want_better(self, call: Call, flow: Target, chosen: SoleTask, on_demand: OnDemand) -> None:
        """Count demand for bodies that would have been first, were they loaded."""
        best = self._rank(call, flow.slo, chosen.function, cold=False)
        for task in flow.bodies:
            function = self._state.functions[task.function]
            is_missing = not function.instances and self._view.can_host(function)
            if is_missing and self._rank(call, flow.slo, task.function, cold=False) < best:
                on_demand(self._flows[task.function])

    # --------------------------------------------------------------------- run

    def start_call(self, call: Call, flow: Target, choice: BodyChoice) -> None:
        """Start a call with the body that was chosen; of the others, note when a backup would be due."""
        run = ActiveCall(call, self._flows[choice.task.function], self, choice.estimate_us)
        self._calls.open_call(run)
        self._rivals[call.id] = [task for task in self.ranked(call, flow) if task.function != choice.task.function]
        self._calls.queue_job(run, choice.task)
        at_us = self._backup_at_us(call, flow.slo, choice)
        if at_us < NEVER_US:
            heappush(self.backups, (at_us, call.id))

    @property
    def next_us(self) -> int:
        """When the next backup is due."""
        while self.backups and self.backups[0][1] not in self._rivals:
            heappop(self.backups)
        return self.backups[0][0] if self.backups else NEVER_US

    def _backup_at_us(self, call: Call, slo: Slo, choice: BodyChoice) -> int:
        rivals, now_us = self._rivals[call.id], self._view.now_us
        names = (choice.task.function, *(task.function for task in rivals))
        if not rivals or call.cost_limit or not all(self._state.functions[name].spec.idempotent for name in names):
            return NEVER_US
        own_us = choice.estimate_us or self._view.fastest_us(choice.task.function)
        other_us = self._view.fastest_us(rivals[0].function)
        if not own_us or not other_us:
            return NEVER_US
        if not slo.latency_us and call.deadline_us >= call.expires_us:
            return now_us + OVERDUE * own_us
        allowed_us = call.deadline_us - now_us
        latest_us = call.deadline_us - int(other_us * (1 + BACKUP_SPARE))
        if latest_us > now_us:
            return latest_us
        return now_us if own_us > RISKY * allowed_us and other_us <= allowed_us else NEVER_US

    def start_backups(self) -> None:
        """Start the backups that are due, where they take nothing from others."""
        now_us = self._view.now_us
        while self.backups and self.backups[0][0] <= now_us:
            _, call_id = heappop(self.backups)
            run = self._state.runs.get(call_id)
            rivals = self._rivals.get(call_id)
            if run is not None and rivals and self._is_idle(self._state.functions[rivals[0].function]):
                self._calls.queue_job(run, rivals.pop(0))

    def _is_idle(self, function: FunctionState) -> bool:
        """Nothing of it waits, and a batch could start at once."""
        slot = next(self._view.slots(function), None) if not len(function.queue) else None
        return slot is not None and slot.behind is None

    # -------------------------------------------------------------------- ends

    def on_job_succeeded(self, run: ActiveCall, job: Job, batch: Batch) -> None:
        """The first result is the answer; what else runs for it is not waited for."""
        for other in list(run.jobs.values()):
            self._calls.drop_job(run, other)
        self._rivals.pop(run.call.id, None)
        self._calls.reply(run)

    def on_job_failed(self, run: ActiveCall, job: Job, error: str, name: str = "", batch: Batch | None = None) -> None:
        run.remove_job(job)
        if run.jobs or (error in LOSSES and self._go_on(run)):
            return
        self.on_call_ended(run)
        self._calls.fail(run, FailCall(run.call.id, error, job.node, job.id, job.scope))

    def on_inputs_lost(self, run: ActiveCall, job: Job, steps: Sequence[str]) -> bool:
        return False  # those of a call are its client's

    def on_call_ended(self, run: ActiveCall) -> None:
        self._rivals.pop(run.call.id, None)

    def give_up_job(self, run: ActiveCall, job: Job, reason: str) -> None:
        """A job that cannot be in time any more ends its call, unless another body is under way for it."""
        if run.owner is self and len(run.jobs) > 1:
            self._calls.drop_job(run, job)
        else:
            self._calls.fail(run, FailCall(run.call.id, reason, job.node, job.id))

    def on_devices_changed(self) -> None:
        """Move calls on whose body no device can host any more."""
        self._on_devices_changed()
        for call_id in list(self._rivals):
            run = self._state.runs.get(call_id)
            if run is None:
                del self._rivals[call_id]
                continue
            for job in [one for one in run.jobs.values() if one.is_queued]:
                if not self._view.can_host(self._state.functions[job.function]) and self._go_on(run):
                    self._calls.drop_job(run, job)

    def _go_on(self, run: ActiveCall) -> bool:
        """Whether another body could be started that may still be in time."""
        rivals = self._rivals.get(run.call.id, [])
        while rivals:
            task = rivals.pop(0)
            function = self._state.functions[task.function]
            in_time = self._view.now_us + self._view.fastest_us(task.function) <= run.call.expires_us
            if self._view.can_host(function) and in_time:
                self._calls.queue_job(run, task)
                return True
        return False
