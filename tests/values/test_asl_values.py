"""Run values of workflows in the Amazon States Language."""

from __future__ import annotations

from typing import Any

import pytest

from lamina import encoding
from lamina.asl.compile import compile_flow
from lamina.core.actions import FailCall, JobRef, ResolveData
from lamina.core.workflow.error_policy import Fault
from lamina.ipc.protocol import ErrorInfo
from lamina.values.run_values import RunValues


def opened(document: dict[str, Any], given: Any, params: tuple[str, ...] | None = ("x",)) -> RunValues:
    data = RunValues(None, None, wall_us=lambda: 0)
    flow = compile_flow(document, "m", lambda resource: (resource, params))
    data.open("c", flow, {"input": encoding.encode(given)})
    return data


def task(**more: Any) -> dict[str, Any]:
    state = {"Type": "Task", "Resource": "f", **more}
    return state if "Next" in state else {**state, "End": True}


TWO = {"StartAt": "A", "States": {"A": task(Next="B"), "B": task()}}


def ask(data: RunValues, node: str, stage: str = "begin", scope: int = 0, **more: Any) -> Any:
    return data.resolve(ResolveData("c", scope, node, 1, stage, **more), 1)


def test_a_result_goes_to_the_next_task_as_it_came():
    data = opened(TWO, 1)
    ask(data, "A")
    blob = b"not even a value"  # nobody looks
    data.put(JobRef(1, "c", 0, "A"), blob)
    ask(data, "A", "end")
    ask(data, "B")
    assert data.inputs(JobRef(2, "c", 0, "B")).leaves == [(("input", "x"), blob)]


def test_the_last_result_is_the_answer_as_it_came():
    data = opened(TWO, 1)
    for node in ("A", "B"):
        ask(data, node)
        data.put(JobRef(1, "c", 0, node), b"blob")
        ask(data, node, "end")
    assert data.result("c") == b"blob"


def test_a_result_that_comes_when_its_state_is_left_is_not_wanted():
    data = opened(TWO, 1)
    ask(data, "A")
    ask(data, "B")
    data.put(JobRef(1, "c", 0, "A"), b"late")
    data.put(JobRef(2, "c", 0, "B"), b"right")
    ask(data, "B", "end")
    assert data.result("c") == b"right"


def test_what_cannot_be_worked_out_is_an_error_by_name():
    data = opened({"StartAt": "A", "States": {"A": task(Parameters={"y.$": "$.nope"})}}, {})
    assert ask(data, "A").error == "States.ParameterPathFailure"


def test_an_input_that_does_not_fit_the_function_is_said_before_it_is_called():
    data = opened(TWO, {"x": 1, "z": 2}, ("x", "y"))
    assert ask(data, "A").error == "States.ParameterPathFailure"


def test_a_caught_error_brings_what_was_said_where_it_began():
    branch = {"StartAt": "B", "States": {"B": task()}}
    catch = [{"ErrorEquals": ["States.ALL"], "Next": "E"}]
    parallel = {"Type": "Parallel", "Branches": [branch], "Catch": catch, "Next": "E"}
    data = opened({"StartAt": "P", "States": {"P": parallel, "E": {"Type": "Succeed"}}}, 1)
    ask(data, "P")
    ask(data, "B", scope=1)
    data.put_error(JobRef(1, "c", 1, "B"), ErrorInfo("Boom", "it went off"))
    ask(data, "P", "catch", fault=Fault("function-failed", "Boom", 1, "B", 1))
    ask(data, "E")
    assert encoding.decode(data.result("c")) == {"Error": "Boom", "Cause": "it went off"}


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (FailCall("c", "function-failed", "A", 1), ErrorInfo("Boom", "first")),
        (FailCall("c", "States.Timeout", "A", 1), ErrorInfo("States.Timeout", "it took longer than TimeoutSeconds")),
        (FailCall("c", "worker-lost", "B", 1), None),
    ],
)
def test_an_ending_is_told_in_the_words_of_the_failure_that_made_it(failure: FailCall, said: ErrorInfo | None):
    data = opened(TWO, 1)
    data.put_error(JobRef(1, "c", 0, "A"), ErrorInfo("Boom", "first"))
    assert data.error("c", failure) == said


def test_items_and_branches_that_brought_nothing_are_left_out():
    body = {"StartAt": "B", "States": {"B": {"Type": "Pass", "End": True}}}
    data = opened({"StartAt": "M", "States": {"M": {"Type": "Map", "ItemProcessor": body, "End": True}}}, [1, 2, 3])
    assert ask(data, "M").value == 3
    ask(data, "M", "end", missing=(1,))
    assert encoding.decode(data.result("c")) == [1, 3]
