"""The workflow builder: documents it makes, and that they run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.errors import BadFlow, BadValue, FunctionFailed
from lamina.sdk.builder import DISCARD, Condition, build, choice, each, fail, parallel, pass_, step, succeed, var, wait, workflow
from lamina.sdk.workflow import Workflow
from lamina.testing import Runtime


@pytest.fixture
def app() -> lamina.App:
    app = lamina.App("shop")

    @app.function()
    def score(x: float) -> dict[str, float]:
        return {"score": x}

    @app.function()
    def blur(value: Any) -> str:
        return "blurred"

    @app.function()
    def add(a: float, b: float) -> float:
        return a + b

    @app.function()
    def picky(n: int) -> int:
        if n < 0:
            raise ValueError("below zero")
        return n

    return app


def states(first: Any) -> dict[str, Any]:
    return build(first)["States"]


def test_what_follows_what():
    document = build(step("a") >> step("b") >> succeed())
    assert document == {
        "StartAt": "a",
        "States": {
            "a": {"Type": "Task", "Resource": "a", "Next": "b"},
            "b": {"Type": "Task", "Resource": "b", "Next": "succeed"},
            "succeed": {"Type": "Succeed"},
        },
    }


def test_a_name_that_is_taken_gets_a_number():
    assert list(states(step("a") >> step("a") >> step("a"))) == ["a", "a-2", "a-3"]


def test_what_follows_a_choice_follows_every_way_out():
    document = states(choice().when(var("$.n") > 1, step("many")).otherwise(step("few")) >> step("end"))
    assert document["many"]["Next"] == document["few"]["Next"] == "end"


def test_a_choice_without_otherwise_goes_on():
    document = states(choice().when(var("$.n") > 1, step("many")) >> step("end"))
    assert document["choice"]["Default"] == "end"


def test_a_loop_is_a_step_named_twice():
    poll = step("poll")
    document = states(poll >> choice().when(var("$.done") == False, wait(5) >> poll).otherwise(succeed()))  # noqa: E712
    assert document["wait"]["Next"] == "poll"


IS_PRESENT = {"Variable": "$.x", "IsPresent": True}
ABOVE_1 = {"Variable": "$.x", "NumericGreaterThan": 1}


@pytest.mark.parametrize(
    ("condition", "rule"),
    [
        (var("$.x") == "a", {"Variable": "$.x", "StringEquals": "a"}),
        (var("$.x") < 5, {"Variable": "$.x", "NumericLessThan": 5}),
        (var("$.x") >= 0.5, {"Variable": "$.x", "NumericGreaterThanEquals": 0.5}),
        (var("$.x") == True, {"Variable": "$.x", "BooleanEquals": True}),  # noqa: E712
        (var("$.x") == None, {"Variable": "$.x", "IsNull": True}),  # noqa: E711
        (var("$.x") != 1, {"Not": {"Variable": "$.x", "NumericEquals": 1}}),
        (var("$.x") > datetime(2026, 3, 14, tzinfo=UTC), {"Variable": "$.x", "TimestampGreaterThan": "2026-03-14T00:00:00Z"}),
        (var("$.x").matches("a*"), {"Variable": "$.x", "StringMatches": "a*"}),
        (var("$.x").is_present() & (var("$.x") > 1), {"And": [IS_PRESENT, ABOVE_1]}),
        ((var("$.x") > 1) | var("$.x").is_present() | (var("$.x") > 1), {"Or": [ABOVE_1, IS_PRESENT, ABOVE_1]}),
        (~var("$.x").is_string(), {"Not": {"Variable": "$.x", "IsString": True}}),
        (
            var("$.x") < var("$.y"),
            {"Or": [{"Variable": "$.x", "NumericLessThanPath": "$.y"}, {"Variable": "$.x", "StringLessThanPath": "$.y"}]},
        ),
    ],
)
def test_conditions_become_rules(condition: Condition, rule: dict[str, Any]):
    assert condition.rule == rule


def test_a_condition_is_not_decided_while_it_is_written():
    with pytest.raises(BadFlow, match="decided when the workflow runs"):
        bool(var("$.x") > 1)


def test_retry_catch_and_timeouts():
    handler = fail("Gone", "$.why")
    risky = step("f").retry([TimeoutError, "Busy"], attempts=2, interval_s=5, backoff=1.5, max_delay_s=60, jitter=True)
    risky = risky.catch(["States.ALL"], then=handler, result="$.why").timeout(30).heartbeat(10)
    assert states(risky)["f"] == {
        "Type": "Task",
        "Resource": "f",
        "Retry": [
            {
                "ErrorEquals": ["TimeoutError", "Busy"],
                "IntervalSeconds": 5,
                "MaxAttempts": 1,
                "BackoffRate": 1.5,
                "MaxDelaySeconds": 60,
                "JitterStrategy": "FULL",
            }
        ],
        "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.why", "Next": "fail"}],
        "TimeoutSeconds": 30,
        "HeartbeatSeconds": 10,
        "End": True,
    }


def test_parallel_and_each():
    document = states(
        parallel(step("a"), step("b") >> step("c"), wait_for=1, result="$.p")
        >> each(step("d"), items="$.xs", item={"v.$": "$$.Map.Item.Value"}, max_concurrency=8, tolerate=0.1)
    )
    assert document["parallel"]["WaitForNumBranches"] == 1
    assert [list(branch["States"]) for branch in document["parallel"]["Branches"]] == [["a"], ["b", "c"]]
    body = {"StartAt": "d", "States": {"d": {"Type": "Task", "Resource": "d", "End": True}}}
    assert document["each"] == {
        "Type": "Map",
        "ItemsPath": "$.xs",
        "ItemSelector": {"v.$": "$$.Map.Item.Value"},
        "MaxConcurrency": 8,
        "ToleratedFailurePercentage": 10.0,
        "ItemProcessor": body,
        "End": True,
    }


def test_a_timeout_belongs_to_a_step():
    with pytest.raises(BadFlow, match="belongs to a step"):
        parallel(step("a")).timeout(5)


def test_a_step_has_one_successor():
    first = step("a")
    first >> step("b")
    with pytest.raises(BadFlow, match="followed by 'b' already"):
        first >> step("c")


# --------------------------------------------------------------------------------------------------------------- they run


def test_a_workflow_that_was_built_runs(app: lamina.App):
    tag = step(app.functions["score"], input="$.x", result="$.tag")
    rest = choice().when(var("$.tag.score") > 0.8, step(app.functions["blur"])).otherwise(pass_("fine"))
    workflow("moderate", tag >> rest, app=app, slo="5s")
    runtime = Runtime(app, default_takes="10ms")
    assert runtime.call("moderate", {"x": 0.9}) == "blurred"
    assert runtime.call("moderate", {"x": 0.1}) == "fine"


def test_several_parameters_are_filled_by_name(app: lamina.App):
    workflow("sum", step(app.functions["add"], input={"a.$": "$.n", "b": 2}), app=app)
    assert Runtime(app).call("sum", {"n": 1}) == 3


def test_retries_wait_on_the_clock_of_the_runtime(app: lamina.App):
    workflow("again", step(app.functions["picky"]).retry(["ValueError"], attempts=3, interval_s=3), app=app)
    runtime = Runtime(app, default_takes="1ms")
    with pytest.raises(FunctionFailed, match="below zero"):
        runtime.call("again", -1)
    assert runtime.now_ms == 3_000 + 6_000 + 3


def test_an_error_of_python_is_caught_by_the_name_of_its_class(app: lamina.App):
    risky = step(app.functions["picky"], input="$.n").catch([ValueError], then=pass_("saved"), result=DISCARD)
    workflow("safe", risky, app=app)
    assert Runtime(app).call("safe", {"n": -1}) == "saved"


def test_a_workflow_that_fails_says_so(app: lamina.App):
    workflow("sad", fail("Custom", "for a reason"), app=app)
    with pytest.raises(FunctionFailed, match="for a reason") as caught:
        Runtime(app).call("sad", {})
    assert caught.value.error == "Custom"


def test_items_of_a_window_are_worked_off_one_window_at_a_time(app: lamina.App):
    workflow("all", each(step(app.functions["picky"]), items="$.xs", max_concurrency=2), app=app)
    runtime = Runtime(app, default_takes="10ms")
    assert runtime.call("all", {"xs": [1, 2, 3, 4, 5]}) == [1, 2, 3, 4, 5]
    assert runtime.now_ms == 50  # one worker, which does not batch


def test_the_first_branch_is_enough(app: lamina.App):
    racing = parallel(app.functions["picky"], step(app.functions["blur"]), wait_for=1)
    workflow("race", racing, app=app)
    assert Runtime(app, takes={"blur": "5ms", "picky": "50ms"}).call("race", 3) == ["blurred"]


def test_it_is_not_called_like_a_function(app: lamina.App):
    made = workflow("w", step(app.functions["blur"]), app=app)
    with pytest.raises(BadFlow, match="does not run as a Python function"):
        made({})


def test_a_function_of_another_app_is_refused(app: lamina.App):
    other = lamina.App("other")
    with pytest.raises(BadFlow, match="another app"):
        workflow("w", step(app.functions["blur"]), app=other)


# ------------------------------------------------------------------------------------------------------------ in and out

DOCUMENT = {
    "Comment": "Blur what must be blurred",
    "StartAt": "Score",
    "States": {
        "Score": {"Type": "Task", "Resource": "arn:aws:lambda:eu:1:function:score", "InputPath": "$.x", "Next": "Blur"},
        "Blur": {"Type": "Task", "Resource": "blur", "End": True},
    },
}


def test_a_document_becomes_a_workflow_of_the_app(app: lamina.App):
    made = Workflow.from_asl(DOCUMENT, app=app, name="imported")
    assert Runtime(app).call("imported", {"x": 1}) == "blurred"
    assert (made.doc, made.to_asl()) == ("Blur what must be blurred", DOCUMENT)


def test_a_document_is_read_from_a_file_and_named_after_it(app: lamina.App, tmp_path: Path):
    file = tmp_path / "moderate.json"
    file.write_text(json.dumps(DOCUMENT))
    assert Workflow.from_asl(file, app=app).name == "moderate"


def test_a_resource_may_be_bound_to_any_function(app: lamina.App):
    document = {"StartAt": "S", "States": {"S": {"Type": "Task", "Resource": "some:thing", "End": True}}}
    Workflow.from_asl(document, app=app, name="w", bind={"some:thing": app.functions["blur"]})
    assert Runtime(app).call("w", 1) == "blurred"


def test_a_resource_that_is_bound_to_nothing_is_said(app: lamina.App):
    document = {"StartAt": "S", "States": {"S": {"Type": "Task", "Resource": "some:thing", "End": True}}}
    with pytest.raises(BadValue, match="'some:thing' is bound to nothing") as caught:
        Workflow.from_asl(document, app=app, name="w")
    assert "'thing'" in caught.value.hint


def test_strict_exports_refuse_what_only_we_can_say(app: lamina.App):
    made = workflow("race", parallel(app.functions["blur"], wait_for=1), app=app)
    with pytest.raises(BadFlow, match="WaitForNumBranches"):
        made.to_asl()
    assert made.to_asl("extended")["States"]["parallel"]["WaitForNumBranches"] == 1


def test_a_workflow_in_python_is_exported_and_says_what_is_different(app: lamina.App):
    @app.workflow()
    def traced(x: float) -> Any:
        return app.functions["blur"](app.functions["score"](x))

    assert [state["Type"] for state in traced.to_asl()["States"].values()] == ["Pass", "Task", "Task", "Pass"]
    assert "written in Python" in traced.portability()[0]


def test_what_steps_need_travels_in_a_side_file(app: lamina.App):
    @app.function(gpu=lamina.GPU("1/4", memory="2GiB"), batch=8)
    def tag(x: Any) -> Any:
        return x

    made = workflow("w", step(tag), app=app)
    side = json.loads(made.side_file())
    assert side == {"states": {"tag": {"max_batch": 8, "share": 0.25, "gpu": "may", "memory_mib": 2048}}}
    again = lamina.App("again")

    @again.function(name="tag")
    def plain(x: Any) -> Any:
        return x

    Workflow.from_asl(made.to_asl(), app=again, name="w", side=side)
    assert (plain.spec.max_batch, plain.spec.share) == (8, 0.25)


def test_a_side_file_for_another_document_is_refused(app: lamina.App):
    with pytest.raises(BadFlow, match="no Task state 'Nobody'"):
        Workflow.from_asl(DOCUMENT, app=app, name="w", side={"states": {"Nobody": {}}})


def test_portability_names_line_path_and_reason(app: lamina.App):
    made = workflow("race", parallel(app.functions["blur"], wait_for=1), app=app)
    remarks = made.portability()
    assert remarks[0].startswith("6: $.States.parallel: WaitForNumBranches: only this and KNIX")
    assert any("Resource: 'blur' is a name of ours" in remark for remark in remarks)
