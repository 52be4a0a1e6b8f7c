"""The workflow engine: moves runs from step to step through data requests, waits, retries and catches.

Owner of the node executions of all runs. What an execution waits for is in exactly one place: data (`pending_data`), a job, a
fan-out of scopes, or a timer. A failure climbs: the step it happened in may try again or be caught; else the scope it is in has
failed, which the each or parallel around it may tolerate, try again or catch; and so on until the run itself fails.
"""

from __future__ import annotations

from collections import deque

from lamina.core import flow as nodes
from lamina.core.actions import Action, Fail, Resolve
from lamina.core.calls import Calls
from lamina.core.events import Heartbeat, Resolved
from lamina.core.flow import Choice, Each, Guarded, Node, Parallel, Succeed, Task, Wait
from lamina.core.keeper import Keeper
from lamina.core.queue import Job
from lamina.core.retry import (
    BRANCH_FAILED,
    HEARTBEAT_TIMEOUT,
    RUNTIME,
    TASK_FAILED,
    TIMEOUT,
    TOO_MANY_FAILED,
    Fault,
    Guard,
    matches,
)
from lamina.core.run import Ready, Run
from lamina.core.scope import Scope, Visit
from lamina.core.state import Batch, State
from lamina.core.timers import Timers

MAX_ITEMS = 100_000
"""Items of one run at a time: a count that comes from data is bounded before anything is made of it."""

MAX_TURNS = 25_000
"""Data requests of one walk through a flow that makes them at every step: a loop that data never ends must end all the same."""

MAX_WAIT_US = 100_000_000 * 1_000_000
"""Some three years: a time that comes from data is bounded too."""

_NO_GUARD = Guard()


class Course:
    def __init__(self, state: State, calls: Calls, out: list[Action]) -> None:
        self._state = state
        self._calls = calls
        self._out = out
        self._agenda: deque[tuple[Run, Scope, Node] | tuple[Run, int, None]] = deque()
        self._busy = False
        self.timers = Timers(state.runs)
        self.keeper = Keeper(self, state, calls, out)
        self.now_us = 0  #: set by the controller before anything else is

    # ----------------------------------------------------------------- what happens

    def begin(self, run: Run, again_us: int = 0) -> None:
        if run.flow.timeout_us:
            self.timers.set_flow(max(self.now_us, again_us) + run.flow.timeout_us, run)
        self._go(run, run.begin())

    def job_done(self, run: Run, job: Job, batch: Batch | None = None) -> None:
        if run.durable:
            self.keeper.outcome(run, job, batch)
        else:
            self.moved(run, job)

    def job_failed(self, run: Run, job: Job, error: str, name: str = "", batch: Batch | None = None) -> None:
        """Handle a failed job, which has left its queue or batch already."""
        if run.durable:
            self.keeper.outcome(run, job, batch, error, name)
        else:
            run.jobs.pop(job.id, None)
            self.broke(run, job, error, name)

    def moved(self, run: Run, job: Job) -> None:
        visit = run.visits.get(job.visit)
        if visit is not None:
            self._landed(run, visit)
            return
        after = run.scopes[job.scope].flow.straight.get(job.node)
        if after is None or self._busy or run.uprooted or run.landed:
            self._go(run, run.finish(job.scope, job.node))
        else:  # the token moves from one to the other, and nothing else changes
            self._calls.enqueue(run, job.scope, after, 0)

    def broke(self, run: Run, job: Job, error: str, name: str) -> None:
        fault = Fault(error, name or TASK_FAILED, job.scope, job.node, job.id)
        self._fail(run, run.scopes.get(job.scope), run.visits.get(job.visit), fault)

    def answered(self, event: Resolved) -> None:
        run = self._state.runs.get(event.call_id)
        asked = (event.scope, event.node, event.turn)
        if run is None or asked not in run.questions:
            return
        run.questions[asked] -= 1
        if not run.questions[asked]:
            del run.questions[asked]
        scope = run.scopes[event.scope]
        node = scope.flow.nodes[event.node]
        visit = run.visits.get(event.turn)
        stage = "begin" if visit is None else visit.stage
        if event.error or not _possible(run, node, stage, event.value):
            word = event.error or "bad-value"
            name = event.error if event.error and event.error != "bad-value" else RUNTIME
            self._fail(run, scope, visit, Fault(word, name, scope.id, node.name))
        elif visit is not None and stage != "begin":
            self._leave(run, visit, event.value)
        elif isinstance(node, Choice):
            self._go(run, run.finish(scope.id, node.name, node.branches[event.value]))
        elif isinstance(node, Each | Parallel):
            if visit is not None:
                visit.stage = "run"
                self._watch(run, visit, ())
            count = len(node.branches) if isinstance(node, Parallel) else event.value
            self._go(run, run.spread(scope.id, node.name, count, event.limits, event.turn))
        else:
            assert visit is not None, f"{node.name} asks and has no visit"
            self._start(run, visit, event.value, event.limits)

    def beat(self, event: Heartbeat) -> None:
        run = self._state.runs.get(event.call_id)
        job = run.jobs.get(event.job_id) if run is not None else None
        if run is None or job is None:
            return
        batch = self._state.batches.get(job.batch_id)
        if batch is not None:
            batch.heard_us = self.now_us
        visit = run.visits.get(job.visit)
        if visit is not None and visit.heartbeat_us:
            self.timers.set(self.now_us + visit.heartbeat_us, run, visit, "heartbeat")

    def tick(self) -> None:
        for run, visit, purpose in self.timers.due(self.now_us):
            if visit is None:
                self._calls.end(run, Fail(run.call.id, TIMEOUT))
            elif run.durable:
                self.keeper.due(run, visit, purpose)
            elif purpose == "resume":
                self.resume(run, visit)
            elif purpose == "heartbeat" and not self.has_begun(run, visit):  # it has nothing to say yet
                self.timers.set(self.now_us + visit.heartbeat_us, run, visit, "heartbeat")
            else:
                self.too_late(run, visit, purpose)

    # ---------------------------------------------------------------------- forward

    def _go(self, run: Run, ready: Ready) -> None:
        """Start the nodes that are ready and move completed fan-outs on; one after the other, however deep the call came from."""
        if run.uprooted:
            self._sweep(run)
        if run.ended and not run.closed:
            self._calls.reply(run)
            return
        agenda = self._agenda
        agenda.extend([(run, scope, node) for scope, node in ready])
        agenda.extend([(run, visit_id, None) for visit_id in run.landed])
        run.landed.clear()
        if self._busy:
            return
        self._busy = True
        try:
            while agenda:
                run, place, what = agenda.popleft()
                if run.closed:
                    continue
                if isinstance(place, int):
                    visit = run.visits.get(place)
                    if visit is not None:
                        self._landed(run, visit)
                elif what is not None and run.scopes.get(place.id) is place:
                    self._meet(run, place, what)
        finally:
            self._busy = False

    def _meet(self, run: Run, scope: Scope, node: Node) -> None:
        """Begin a node that has its tokens."""
        if isinstance(node, Task):
            if node.guard is None and not node.asks:
                self._calls.enqueue(run, scope.id, node, 0)
                return
        elif isinstance(node, Choice) or (isinstance(node, Each | Parallel) and node.guard is None and not node.asks):
            asked = (scope.id, node.name, 0)
            run.questions[asked] = run.questions.get(asked, 0) + 1
            self._out.append(Resolve(run.call.id, scope.id, node.name))
            return
        visit = run.new_visit(scope, node)
        if isinstance(node, Guarded) and node.guard is not None:
            visit.tries = [0] * len(node.guard.retry)
        self._try(run, visit)

    def _try(self, run: Run, visit: Visit) -> None:
        node = visit.node
        visit.stage = "begin"
        if isinstance(node, Each | Parallel) or (not isinstance(node, Choice) and node.asks):
            self._ask(run, visit)
        else:
            self._start(run, visit, node.duration_us if isinstance(node, Wait) else 0, ())

    def _ask(self, run: Run, visit: Visit) -> None:
        scope, node = visit.scope, visit.node
        scope.turns += 1
        if scope.turns > MAX_TURNS:
            self._fail(run, scope, visit, Fault(RUNTIME, RUNTIME, scope.id, node.name))
            return
        run.questions[scope.id, node.name, visit.id] = 1
        fault = visit.fault if visit.stage == "catch" else None
        missing = visit.missing if visit.stage == "end" else ()
        self._out.append(
            Resolve(run.call.id, scope.id, node.name, visit.id, visit.stage, visit.attempt, visit.catcher, fault, missing)
        )

    def _start(self, run: Run, visit: Visit, value: int, limits: tuple[int, ...]) -> None:
        """Run the node: the data it needs is known."""
        node = visit.node
        if isinstance(node, Task):
            visit.stage = "run"
            visit.job_id = self._calls.enqueue(run, visit.scope.id, node, visit.id)
            self._watch(run, visit, limits)
        elif isinstance(node, Wait):
            visit.stage, visit.since_us = "pause", self.now_us
            if value > 0:
                self.timers.set(self.now_us + min(value, MAX_WAIT_US), run, visit, "resume")
            else:
                self._leave(run, visit, 0)
        elif isinstance(node, nodes.Fail):
            self._fail(run, visit.scope, visit, Fault(node.error, node.error, visit.scope.id, node.name))
        else:
            self._leave(run, visit, 0)

    def _landed(self, run: Run, visit: Visit) -> None:
        """Handle the success of its job or fan-out."""
        self._still(run, visit)
        node = visit.node
        if isinstance(node, Guarded) and node.asks:
            visit.stage = "end"
            self._ask(run, visit)
        else:
            self._leave(run, visit, 0)

    def _leave(self, run: Run, visit: Visit, value: int) -> None:
        """Leave a node that is done. Of a task, `value` may say which of its other ways the token takes."""
        del run.visits[visit.id]
        scope, node = visit.scope, visit.node
        if isinstance(node, Succeed):
            self._go(run, run.succeed(scope.id))
            return
        to: tuple[str, ...] | None = None
        if visit.stage == "catch":
            assert isinstance(node, Guarded) and node.guard is not None
            to = node.guard.catch[visit.catcher].next
        elif value and isinstance(node, Task):
            to = (node.may[value - 1],)
        self._go(run, run.finish(scope.id, node.name, to))

    # ------------------------------------------------------------------------- time

    def _watch(self, run: Run, visit: Visit, limits: tuple[int, ...]) -> None:
        """Set the timeouts of this attempt: those its data gave, else those of the flow."""
        node = visit.node
        guard = (node.guard if isinstance(node, Guarded) else None) or _NO_GUARD
        timeout_us, heartbeat_us = limits or (0, 0)
        visit.timeout_us = min(timeout_us or guard.timeout_us, MAX_WAIT_US)
        visit.heartbeat_us = min(heartbeat_us or guard.heartbeat_us, MAX_WAIT_US)
        visit.since_us = self.now_us
        if visit.timeout_us:
            self.timers.set(self.now_us + visit.timeout_us, run, visit, "timeout")
        if visit.heartbeat_us:
            self.timers.set(self.now_us + visit.heartbeat_us, run, visit, "heartbeat")

    def resume(self, run: Run, visit: Visit) -> None:
        if isinstance(visit.node, Wait):
            self._leave(run, visit, 0)
        else:
            self._try(run, visit)

    def has_begun(self, run: Run, visit: Visit) -> bool:
        job = run.jobs.get(visit.job_id)
        batch = self._state.batches.get(job.batch_id) if job is not None else None
        return batch is not None and batch.started_us >= 0

    def too_late(self, run: Run, visit: Visit, purpose: str) -> None:
        name = HEARTBEAT_TIMEOUT if purpose == "heartbeat" else TIMEOUT
        self._fail(run, visit.scope, visit, Fault(name, name, visit.scope.id, visit.node.name, visit.job_id))

    # --------------------------------------------------------------------- failures

    def _fail(self, run: Run, scope: Scope | None, visit: Visit | None, fault: Fault) -> None:
        """Pass a failure up until a retrier, a catcher or a tolerant fan-out handles it."""
        alias = ""
        while True:
            if visit is not None:
                self._still(run, visit)
                if self._recover(run, visit, fault, alias):
                    return
                del run.visits[visit.id]
            family = run.family_of(scope) if scope is not None else None
            if scope is None or family is None:
                self._calls.end(run, Fail(run.call.id, fault.error, fault.node, fault.job_id, fault.scope))
                return
            if family.failed < family.spare:
                self._go(run, run.give_up(scope.id))
                return
            scope, visit, node = family.parent, run.visits.get(family.visit), family.node
            alias = BRANCH_FAILED if isinstance(node, Parallel) else TOO_MANY_FAILED
            if isinstance(node, Each) and not family.strict and fault.name != RUNTIME:
                fault = Fault(TOO_MANY_FAILED, TOO_MANY_FAILED, scope.id, node.name)

    def _recover(self, run: Run, visit: Visit, fault: Fault, alias: str) -> bool:
        node = visit.node
        if not isinstance(node, Guarded) or node.guard is None or visit.stage == "catch":
            return False
        guard = node.guard
        for index, retrier in enumerate(guard.retry):
            if matches(retrier.errors, fault.name, alias):
                used = visit.tries[index]
                if used >= retrier.attempts:
                    break
                visit.tries[index] += 1
                visit.attempt += 1
                visit.stage, visit.since_us = "pause", self.now_us
                run.retries += 1
                key = f"{run.call.id}/{visit.scope.id}/{node.name}/{visit.id}/{visit.attempt}"
                self.timers.set(self.now_us + retrier.delay_us(used, key), run, visit, "resume")
                return True
        for index, catcher in enumerate(guard.catch):
            if matches(catcher.errors, fault.name, alias):
                visit.stage, visit.catcher, visit.fault = "catch", index, fault
                if node.asks:
                    self._ask(run, visit)
                else:
                    self._leave(run, visit, 0)
                return True
        return False

    def _still(self, run: Run, visit: Visit) -> None:
        """Cancel all that is pending for this execution."""
        visit.timers.clear()
        run.questions.pop((visit.scope.id, visit.node.name, visit.id), None)
        job = run.jobs.get(visit.job_id)
        if job is not None:
            self._calls.drop(run, job)
        visit.job_id = 0
        if visit.family:
            run.prune(visit)
            if run.uprooted:
                self._sweep(run)

    def _sweep(self, run: Run) -> None:
        """Drop jobs, data requests and executions of cancelled scopes."""
        run.uprooted = False
        scopes = run.scopes
        for job in [job for job in run.jobs.values() if job.scope not in scopes]:
            self._calls.drop(run, job)
        for asked in [asked for asked in run.questions if asked[0] not in scopes]:
            del run.questions[asked]
        for visit_id in [visit.id for visit in run.visits.values() if visit.scope.id not in scopes]:
            del run.visits[visit_id]


def _possible(run: Run, node: Node, stage: str, value: int) -> bool:
    """Whether this value can answer the data request."""
    if stage == "begin":
        if isinstance(node, Each):
            return 0 <= value <= MAX_ITEMS - len(run.scopes)
        if isinstance(node, Choice):
            return 0 <= value < len(node.branches)
    if stage == "end" and isinstance(node, Task):
        return 0 <= value <= len(node.may)
    return value >= 0
