"""Run values of workflows in the Amazon States Language: one value per scope, read and written by each state in turn.

The rules are in `lamina.asl`; here is only where the values lie. Answers the questions the core asks about them. A value
that no state looks into stays encoded, as it came from its worker: a large result goes from task to task by reference.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lamina.asl import state_semantics, timestamps
from lamina.asl.document import waits_for_token
from lamina.asl.errors import PARAMETER_PATH, StateError, runtime_error
from lamina.asl.evaluation import DATA_LIMIT_BYTES, MAX_WORK, Evaluation, EvaluationBudget, MeasuredSizes, with_item
from lamina.core.actions import FailCall, ResolveData
from lamina.core.events import DataResolved
from lamina.core.workflow.error_policy import TASK_FAILED, Fault
from lamina.core.workflow.flow import Each, Flow, Node, Parallel
from lamina.values.references import ErrorInfo, Stored, stored_size

INPUT = "input"
"""What the only parameter of such a workflow is called."""

DEFAULT_CAUSES = {
    "States.Timeout": "it took longer than TimeoutSeconds",
    "States.HeartbeatTimeout": "it was silent for longer than HeartbeatSeconds",
    "States.ExceedToleratedFailureThreshold": "more items failed than are tolerated",
    "States.Runtime": "it goes round and round: too many steps",
}


_READS_INPUT = {"InputPath", "Parameters", "TimeoutSecondsPath", "HeartbeatSecondsPath"}
_READS_RESULT = {"ResultSelector", "ResultPath", "OutputPath", "PotentialNext"}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as it is stored, not decoded yet."""

    stored: Stored


@dataclass(slots=True)
class ScopeValue:
    """Current value of one scope. `task_input` and `result` belong to the state it is at."""

    value: Any  #: perhaps encoded, like the two below
    task_input: Any = None
    result: Any = None
    node: str = ""
    entered_us: int = 0
    item: tuple[int, Any] | None = None
    children: list[int] = field(default_factory=list)  #: numbers of the scopes its state has made
    sizes: MeasuredSizes = field(default_factory=dict)  #: of parts of its value, as they were measured last


@dataclass(slots=True)
class AslRun:
    """One run of a state machine: its input, start time, the value of each scope, and errors."""

    call_id: str
    name: str
    input: Any
    started_us: int
    scopes: dict[int, ScopeValue]
    errors: dict[tuple[int, str], ErrorInfo] = field(default_factory=dict)  #: the last of each state
    work: int = 0  #: steps of all its evaluations
    budget: EvaluationBudget | None = None  #: of the question under way, if it looks into data
    now_us: int = 0  #: of a durable run: the time of the journal entry applied last, so that a replay gives the same

    def count_work(self, scope_value: ScopeValue) -> None:
        """Count the steps of the question that was answered; the sizes it found are known to the next one of its scope."""
        if self.budget is None:
            return
        scope_value.sizes = self.budget.sizes
        self.work += self.budget.work
        self.budget = None
        if self.work > MAX_WORK:
            raise runtime_error("its states take too many steps in all; use less data, or tasks for what takes long")

    def set_time(self, at_us: int) -> None:
        """Set the clock of a durable run to the time of the journal entry being applied."""
        self.now_us = at_us

    def failure_of(self, failure: FailCall | None) -> ErrorInfo | None:
        """Error details of the failure that ended the run."""
        if failure is None:
            return None
        if failure.error.islower():  # one of our own codes: it says what kind of failure it is; the details are those of the step
            return self.errors.get((failure.scope, failure.step))
        return self.error_of(Fault(failure.error, failure.error, failure.scope, failure.step))

    def error_of(self, fault: Fault) -> ErrorInfo:
        """Error details of a failure; its name alone, if there are none."""
        error = self.errors.get((fault.scope, fault.node))
        if error is not None and (error.type == fault.name or fault.name == TASK_FAILED):
            return error
        return ErrorInfo(fault.name, DEFAULT_CAUSES.get(fault.name, "" if fault.error == fault.name else fault.error))


class AslValues:
    """Values of all state-machine runs. `decode_stored` decodes a stored value; `wall_us` is the time of day, since 1970.

    A state may look into `data_bytes` of data, and make as much. What it passes on as it is, by reference, may be larger.
    """

    def __init__(
        self,
        decode_stored: Callable[[Stored], Any],
        wall_us: Callable[[], int] | None = None,
        rng: random.Random | None = None,
        data_bytes: int = DATA_LIMIT_BYTES,
        token_of: Callable[[str, int], str] = lambda call_id, execution_id: "",
    ) -> None:
        self._token_of = token_of  #: of a task that waits for a report
        self._data_bytes = data_bytes
        self._decode_stored = decode_stored
        self._wall_us = wall_us or (lambda: time.time_ns() // 1000)
        self._rng = self._shared_rng = rng or random.Random()

    def open(self, call_id: str, flow: Flow, inputs: dict[str, Stored], began_us: int = 0) -> AslRun:
        given: Any = Encoded(next(iter(inputs.values()))) if inputs else {}
        return AslRun(call_id, flow.name, given, began_us or self._wall_us(), {0: ScopeValue(given)}, now_us=began_us)

    def result(self, run: AslRun) -> Any:
        """Result of a run, perhaps encoded."""
        return run.scopes[0].value

    def arguments(self, run: AslRun, scope: int, node: Node) -> dict[str, Any]:
        """Arguments of a task, each perhaps encoded."""
        scope_value = run.scopes.get(scope)  # cancelled meanwhile: the result is not needed
        return _arguments(node, scope_value.task_input) if scope_value is not None else {}

    def put(self, run: AslRun, scope: int, node: str, value: Stored) -> None:
        scope_value = run.scopes.get(scope)
        if scope_value is not None and scope_value.node == node:
            scope_value.result = Encoded(value)

    def journal_value(self, run: AslRun, scope: int) -> Stored | None:
        """Value to journal: the result of the step this scope is at, as it was put."""
        scope_value = run.scopes.get(scope)
        return scope_value.result.stored if scope_value is not None and isinstance(scope_value.result, Encoded) else None

    # ---------------------------------------------------------------------- questions

    def resolve(self, run: AslRun, question: ResolveData, node: Node, first_scope: int) -> tuple[DataResolved, int]:
        """Answer a question of the core; also how many scopes a map or parallel has made, numbered from `first_scope`."""
        place = (question.call_id, question.scope, question.node)
        scope_value = run.scopes.get(question.scope)
        if scope_value is None:  # cancelled since it was asked; the answer is ignored
            return DataResolved(*place, execution_id=question.execution_id), 0
        self._rng = seeded_random(question) if run.now_us else self._shared_rng
        if question.stage == "begin" and not question.attempt:
            scope_value.node, scope_value.entered_us = node.name, run.now_us or self._wall_us()
        try:
            if question.stage == "begin":
                value, limits = self._enter_state(run, scope_value, question, node, first_scope)
            else:
                value, limits = self._exit_state(run, scope_value, question, node), ()
            run.count_work(scope_value)
        except StateError as error:
            name = error.name or TASK_FAILED
            run.errors[question.scope, question.node] = ErrorInfo(error.name, error.cause)
            return DataResolved(*place, error=name, execution_id=question.execution_id), 0
        made = len(scope_value.children) if question.stage == "begin" and isinstance(node, Each | Parallel) else 0
        return DataResolved(*place, value, execution_id=question.execution_id, limits=limits), made

    def _enter_state(
        self, run: AslRun, scope_value: ScopeValue, question: ResolveData, node: Node, first_scope: int
    ) -> tuple[int, tuple[int, ...]]:
        state: dict[str, Any] = node.data["asl"]
        if state["Type"] == "Task" and not _READS_INPUT & state.keys() and len(node.data.get("params") or (INPUT,)) == 1:
            scope_value.task_input = scope_value.value
            return 0, ()
        token = self._token_of(run.call_id, question.execution_id) if waits_for_token(state) else ""
        at = self._evaluation(run, scope_value, question.attempt, token)
        budget = run.budget = at.budget
        value_in = scope_value.value = self._decode(scope_value.value, budget)
        match state["Type"]:
            case "Task":
                scope_value.task_input = state_semantics.effective_input(state, value_in, at)
                budget.check(scope_value.task_input)
                _arguments(node, scope_value.task_input)
                return 0, state_semantics.task_limits(state, value_in, at)
            case "Map":
                found, inputs, limits = state_semantics.map_items(state, value_in, at)
                for given in inputs:
                    budget.check(given)
                self._make_children(run, scope_value, inputs, found, first_scope)
                return len(inputs), limits
            case "Parallel":
                assert isinstance(node, Parallel)
                given = state_semantics.effective_input(state, value_in, at)
                budget.check(given)
                self._make_children(run, scope_value, [given] * len(node.branches), None, first_scope)
                return len(node.branches), ()
            case "Choice":
                way = state_semantics.choose_rule(state, value_in, at)
                scope_value.value = state_semantics.unchanged_output(state, value_in, at)
                return way, ()
            case "Wait":
                wait_us = state_semantics.wait_us(state, value_in, at, run.now_us or self._wall_us())
                scope_value.value = state_semantics.unchanged_output(state, value_in, at)
                return wait_us, ()
            case "Succeed":
                scope_value.value = state_semantics.unchanged_output(state, value_in, at)
            case "Fail":
                raise StateError(*state_semantics.fail_error(state, value_in, at))
            case _:
                scope_value.value = state_semantics.pass_output(state, value_in, at)
        if scope_value.value is not value_in:
            budget.check(scope_value.value)
        return 0, ()

    def _exit_state(self, run: AslRun, scope_value: ScopeValue, question: ResolveData, node: Node) -> int:
        """Leave a state: its results are there, or a failure is caught."""
        state: dict[str, Any] = node.data["asl"]
        if question.stage == "end" and state["Type"] == "Task" and not _READS_RESULT & state.keys():
            scope_value.value, scope_value.result, scope_value.task_input = scope_value.result, None, None
            return 0
        at = self._evaluation(run, scope_value, question.attempt)
        budget = run.budget = at.budget
        scope_value.value = self._decode(scope_value.value, budget)
        if question.stage == "catch":
            assert question.fault is not None
            error = run.error_of(question.fault)
            self._drop_children(run, scope_value)
            scope_value.value = state_semantics.caught_value(
                state["Catch"][question.catcher], scope_value.value, error.type, error.message
            )
            budget.check(scope_value.value)
            return 0
        way, result = 0, scope_value.result
        if isinstance(node, Each | Parallel):
            done = [run.scopes.pop(number) for number in scope_value.children]
            absent = set(question.missing)
            kept = [inner.value for index, inner in enumerate(done) if index not in absent]
            budget.check_encoded(sum(_encoded_bytes(value) for value in kept))
            result = [self._decode(value, budget) for value in kept]
            scope_value.children = []
        else:
            way, result = state_semantics.dynamic_next(state, self._decode(result, budget))
        scope_value.value = state_semantics.effective_output(state, scope_value.value, result, at)
        budget.check(scope_value.value)
        scope_value.result = scope_value.task_input = None
        return way

    def _make_children(
        self, run: AslRun, scope_value: ScopeValue, inputs: list[Any], found: list[Any] | None, first_scope: int
    ) -> None:
        self._drop_children(run, scope_value)  # of a try that failed
        scope_value.children = list(range(first_scope, first_scope + len(inputs)))
        for index, (number, given) in enumerate(zip(scope_value.children, inputs, strict=True)):
            item = (index, found[index]) if found is not None else scope_value.item
            run.scopes[number] = ScopeValue(given, item=item)

    def _decode(self, value: Any, budget: EvaluationBudget) -> Any:
        if not isinstance(value, Encoded):
            return value
        budget.check_encoded(_encoded_bytes(value))
        return self._decode_stored(value.stored)

    def _drop_children(self, run: AslRun, scope_value: ScopeValue) -> None:
        for number in scope_value.children:
            run.scopes.pop(number, None)
        scope_value.children = []

    def _evaluation(self, run: AslRun, scope_value: ScopeValue, attempt: int, token: str = "") -> Evaluation:
        """Surroundings of one evaluation. An input larger than a state may have is not in the context object."""
        budget = EvaluationBudget(self._data_bytes, scope_value.sizes)
        if _encoded_bytes(run.input) <= self._data_bytes:
            run.input = self._decode(run.input, budget)
        started, entered = timestamps.format_timestamp(run.started_us), timestamps.format_timestamp(scope_value.entered_us)
        execution = {"Id": run.call_id, "Name": run.call_id, "StartTime": started}
        if not isinstance(run.input, Encoded):
            execution["Input"] = run.input
        context: dict[str, Any] = {
            "Execution": execution,
            "State": {"EnteredTime": entered, "Name": scope_value.node, "RetryCount": attempt},
            "StateMachine": {"Id": run.name, "Name": run.name},
        }
        if token:
            context["Task"] = {"Token": token}
        return Evaluation(context if scope_value.item is None else with_item(context, *scope_value.item), self._rng, budget)


def _encoded_bytes(value: Any) -> int:
    """Size of a value that is still encoded; what was decoded has been checked."""
    return stored_size(value.stored) if isinstance(value, Encoded) else 0


def seeded_random(question: ResolveData) -> random.Random:
    """Random numbers of one question, the same in every replay."""
    asked = (question.call_id, question.scope, question.node, question.execution_id, question.stage, question.attempt)
    return random.Random("/".join(map(str, asked)))


def _arguments(node: Node, given: Any) -> dict[str, Any]:
    """Bind the input of a task to its function: the whole of it for one parameter, by name for several."""
    params: list[str] | None = node.data.get("params")
    if params is None:
        return {INPUT: given}
    if len(params) == 1:
        return {params[0]: given}
    if not params:
        return {}
    if not isinstance(given, dict) or not given.keys() <= set(params):
        raise StateError(PARAMETER_PATH, f"{node.name} takes {', '.join(params)}; make its input an object with these")
    return dict(given)
