"""Invalid documents: each is refused with its path and its clause."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.asl.document import parse_document
from lamina.asl.errors import BadDocument
from lamina.asl.lint import lint
from tests.asl.cases_choice import decides
from tests.asl.conformance_case import catch, machine, one, retry, task

E = {"Type": "Succeed"}
BODY = machine("T", T=task("f"))


def choice(**rule: Any) -> dict[str, Any]:
    return decides(rule)


BAD: list[tuple[str, str, Any]] = [
    ("$", "Top-level fields", []),
    ("$.States", "Top-level fields", {"StartAt": "A"}),
    ("$.States", "Top-level fields", {"StartAt": "A", "States": {}}),
    ("$.StartAt", "Top-level fields", {"States": {"A": E}}),
    ("$.StartAt", "Top-level fields", {"StartAt": "B", "States": {"A": E}}),
    ("$.Extra", "Top-level fields", {**machine("A", A=E), "Extra": 1}),
    ("$.Comment", "Top-level fields", {**machine("A", A=E), "Comment": 1}),
    ("$.TimeoutSeconds", "Top-level fields", {**machine("A", A=E), "TimeoutSeconds": 0}),
    ("$.EnableCheckpoints", "Top-level fields", {**machine("A", A=E), "EnableCheckpoints": True}),
    ("$.States.A", "States: common fields", machine("A", A=5)),  # type: ignore[arg-type]
    ("$.States.A.Type", "States: common fields", machine("A", A={"End": True})),
    ("$.States.A.Type", "States: common fields", machine("A", A={"Type": "Loop", "End": True})),
    ('$.States["a b"].Type', "States: common fields", {"StartAt": "a b", "States": {"a b": {"Type": "x"}}}),
    (f"$.States.{'n' * 81}", "States: state name", {"StartAt": "n" * 81, "States": {"n" * 81: E}}),
    (
        "$.States.M.ItemProcessor.States.M",
        "States: state name",
        machine("M", M={"Type": "Map", "End": True, "ItemProcessor": machine("M", M=E)}),
    ),
    ("$.States.A", "Transitions", machine("A", A={"Type": "Pass"})),
    ("$.States.A", "Transitions", machine("A", A={"Type": "Pass", "Next": "B", "End": True}, B=E)),
    ("$.States.A.Next", "Transitions", machine("A", A={"Type": "Pass", "Next": "Nowhere"})),
    ("$.States.A.End", "Transitions", machine("A", A={"Type": "Pass", "End": "yes", "Next": "B"}, B=E)),
    ("$.States.B", "Transitions", machine("A", A=E, B=E)),
    ("$.States", "Transitions", machine("A", A=task("f", Next="A"))),
    ("$.States.S.Result", "Task State", one(Type="Task", Resource="f", Result=1)),
    ("$.States.S.Resource", "Task State", one(Type="Task")),
    ("$.States.S.Resource", "Task State", one(Type="Task", Resource=5)),
    ("$.States.S.TimeoutSeconds", "Task State: timeouts", one(Type="Task", Resource="f", TimeoutSeconds=0)),
    ("$.States.S.TimeoutSeconds", "Task State: timeouts", one(Type="Task", Resource="f", TimeoutSeconds="5")),
    (
        "$.States.S.TimeoutSecondsPath",
        "Task State: timeouts",
        one(Type="Task", Resource="f", TimeoutSeconds=1, TimeoutSecondsPath="$.t"),
    ),
    ("$.States.S.HeartbeatSeconds", "Task State: timeouts", one(Type="Task", Resource="f", TimeoutSeconds=5, HeartbeatSeconds=5)),
    ("$.States.S.PotentialNext", "Task State", one(Type="Task", Resource="f", PotentialNext=[])),
    ("$.States.S.InputPath", "Paths; Input and Output Processing", one(Type="Pass", InputPath="a.b")),
    ("$.States.S.InputPath", "Paths; Input and Output Processing", one(Type="Pass", InputPath=5)),
    ("$.States.S.OutputPath", "Paths; Input and Output Processing", one(Type="Pass", OutputPath="$.a[")),
    ("$.States.S.ResultPath", "Reference Paths; ResultPath", one(Type="Pass", ResultPath="$.a[*]")),
    ("$.States.S.ResultPath", "Reference Paths; ResultPath", one(Type="Pass", ResultPath="$$.Execution")),
    ("$.States.S.ResultSelector", "Pass State", one(Type="Pass", ResultSelector={})),
    ("$.States.S.Parameters.x.$", "Payload Template", one(Type="Pass", Parameters={"x.$": 5})),
    ("$.States.S.Parameters.x.$", "Payload Template", one(Type="Pass", Parameters={"x.$": "plain"})),
    ("$.States.S.Parameters.x.$", "Payload Template", one(Type="Pass", Parameters={"x.$": "States.Nope()"})),
    ("$.States.S.Parameters.x.$", "Payload Template", one(Type="Pass", Parameters={"x.$": "States.Array(1"})),
    ("$.States.S.Parameters.x.$", "Payload Template", one(Type="Pass", Parameters={"x.$": "States.MathAdd(1)"})),
    ("$.States.S.Parameters.x.$", "Payload Template", one(Type="Pass", Parameters={"x.$": "$.a", "x": 1})),
    ("$.States.S.Parameters.l[0].y.$", "Payload Template", one(Type="Pass", Parameters={"l": [{"y.$": "$["}]})),
    ("$.States.S.Retry", "Errors: Retry", one(Type="Task", Resource="f", Retry={})),
    ("$.States.S.Retry[0].ErrorEquals", "Errors: Retry", one(Type="Task", Resource="f", Retry=[{}])),
    ("$.States.S.Retry[0].ErrorEquals", "Errors: Retry", one(Type="Task", Resource="f", Retry=[retry()])),
    ("$.States.S.Retry[0].ErrorEquals", "Errors: Retry", one(Type="Task", Resource="f", Retry=[retry("States.All")])),
    ("$.States.S.Retry[0].ErrorEquals", "Errors: Retry", one(Type="Task", Resource="f", Retry=[retry("States.ALL", "X")])),
    ("$.States.S.Retry[0].ErrorEquals", "Errors: Retry", one(Type="Task", Resource="f", Retry=[retry("States.ALL"), retry("X")])),
    (
        "$.States.S.Retry[0].IntervalSeconds",
        "Errors: Retry",
        one(Type="Task", Resource="f", Retry=[retry("X", IntervalSeconds=0)]),
    ),
    ("$.States.S.Retry[0].MaxAttempts", "Errors: Retry", one(Type="Task", Resource="f", Retry=[retry("X", MaxAttempts=-1)])),
    ("$.States.S.Retry[0].BackoffRate", "Errors: Retry", one(Type="Task", Resource="f", Retry=[retry("X", BackoffRate=0.5)])),
    (
        "$.States.S.Retry[0].MaxDelaySeconds",
        "Errors: Retry",
        one(Type="Task", Resource="f", Retry=[retry("X", IntervalSeconds=5, MaxDelaySeconds=5)]),
    ),
    (
        "$.States.S.Retry[0].JitterStrategy",
        "Errors: Retry",
        one(Type="Task", Resource="f", Retry=[retry("X", JitterStrategy="SOME")]),
    ),
    ("$.States.S.Retry[0].Next", "Errors: Retry", one(Type="Task", Resource="f", Retry=[retry("X", Next="S")])),
    ("$.States.S.Retry", "Pass State", one(Type="Pass", Retry=[])),
    ("$.States.S.Catch[0].Next", "Transitions", one(Type="Task", Resource="f", Catch=[catch("X", to="Nowhere")])),
    (
        "$.States.S.Catch[0].ErrorEquals",
        "Errors: Catch",
        one(Type="Task", Resource="f", Catch=[catch("States.ALL", to="S"), catch("X", to="S")]),
    ),
    (
        "$.States.S.Catch[0].ResultPath",
        "Reference Paths; Errors: Catch",
        one(Type="Task", Resource="f", Catch=[catch("X", to="S", ResultPath="$[?(@.a)]")]),
    ),
    (
        "$.States.S.Catch",
        "Choice State",
        machine("S", S={"Type": "Choice", "Choices": [{"Variable": "$", "IsNull": True, "Next": "E"}], "Catch": []}, E=E),
    ),
    ("$.States.C.Choices", "Choice State", machine("C", C={"Type": "Choice", "Choices": [], "Default": "E"}, E=E)),
    (
        "$.States.C.Choices[0].Next",
        "Transitions",
        machine("C", C={"Type": "Choice", "Choices": [{"Variable": "$", "IsNull": True}], "Default": "E"}, E=E),
    ),
    (
        "$.States.C.Default",
        "Transitions",
        machine("C", C={"Type": "Choice", "Choices": [{"Variable": "$", "IsNull": True, "Next": "E"}], "Default": "X"}, E=E),
    ),
    (
        "$.States.C.Next",
        "Choice State",
        machine("C", C={"Type": "Choice", "Choices": [{"Variable": "$", "IsNull": True, "Next": "E"}], "Next": "E"}, E=E),
    ),
    ("$.States.C.Choices[0]", "Choice State: rules", choice(Variable="$.a")),
    ("$.States.C.Choices[0]", "Choice State: rules", choice(Variable="$.a", NumericEquals=1, StringEquals="x")),
    ("$.States.C.Choices[0]", "Choice State: NumericEquals", choice(NumericEquals=1)),
    ("$.States.C.Choices[0].NumericEquals", "Choice State: NumericEquals", choice(Variable="$.a", NumericEquals="1")),
    ("$.States.C.Choices[0].NumericEquals", "Choice State: NumericEquals", choice(Variable="$.a", NumericEquals=True)),
    ("$.States.C.Choices[0].StringEquals", "Choice State: StringEquals", choice(Variable="$.a", StringEquals=1)),
    ("$.States.C.Choices[0].BooleanEquals", "Choice State: BooleanEquals", choice(Variable="$.a", BooleanEquals="true")),
    (
        "$.States.C.Choices[0].TimestampEquals",
        "Choice State: TimestampEquals",
        choice(Variable="$.a", TimestampEquals="2026-03-14t01:59:00z"),
    ),
    ("$.States.C.Choices[0].IsNull", "Choice State: IsNull", choice(Variable="$.a", IsNull="yes")),
    (
        "$.States.C.Choices[0].NumericEqualsPath",
        "Paths; Choice State: NumericEqualsPath",
        choice(Variable="$.a", NumericEqualsPath="b"),
    ),
    ("$.States.C.Choices[0].Variable", "Paths; Choice State: IsNull", choice(Variable="a", IsNull=True)),
    ("$.States.C.Choices[0].And", "Choice State: rules", choice(And=[])),
    (
        "$.States.C.Choices[0].And[0].Next",
        "Choice State: rules",
        choice(And=[{"Variable": "$.a", "IsNull": True, "Next": "Yes"}]),
    ),
    ("$.States.C.Choices[0].Not", "Choice State: rules", choice(Not=[])),
    ("$.States.C.Choices[0].Colour", "Choice State: rules", choice(Variable="$.a", IsNull=True, Colour=1)),
    ("$.States.S", "Wait State", one(Type="Wait")),
    ("$.States.S", "Wait State", one(Type="Wait", Seconds=1, Timestamp="2026-03-14T01:59:00Z")),
    ("$.States.S.Seconds", "Wait State", one(Type="Wait", Seconds=-1)),
    ("$.States.S.Seconds", "Wait State", one(Type="Wait", Seconds=1.5)),
    ("$.States.S.Timestamp", "Wait State", one(Type="Wait", Timestamp="tomorrow")),
    ("$.States.S.SecondsPath", "Reference Paths; Wait State", one(Type="Wait", SecondsPath="s")),
    ("$.States.A.Next", "Succeed State", machine("A", A={"Type": "Succeed", "Next": "A"})),
    ("$.States.A.End", "Fail State", machine("A", A={"Type": "Fail", "End": True})),
    ("$.States.A.Error", "Fail State", machine("A", A={"Type": "Fail", "Error": 5})),
    ("$.States.A.CausePath", "Fail State", machine("A", A={"Type": "Fail", "Cause": "x", "CausePath": "$.c"})),
    ("$.States.A.ErrorPath", "Intrinsic Functions; Fail State", machine("A", A={"Type": "Fail", "ErrorPath": "States.Oops()"})),
    ("$.States.S.Branches", "Parallel State", one(Type="Parallel", Branches=[])),
    ("$.States.S.Branches[0].StartAt", "Top-level fields", one(Type="Parallel", Branches=[{"StartAt": "X", "States": {"A": E}}])),
    (
        "$.States.S.Branches[0].States.A.Next",
        "Transitions",
        one(Type="Parallel", Branches=[machine("A", A={"Type": "Pass", "Next": "S"})]),
    ),
    ("$.States.S.WaitForNumBranches", "Parallel State", one(Type="Parallel", Branches=[BODY], WaitForNumBranches=1)),
    ("$.States.S", "Map State", one(Type="Map")),
    ("$.States.S", "Map State", one(Type="Map", Iterator=BODY, ItemProcessor=machine("U", U=E))),
    ("$.States.S.Parameters", "Map State", one(Type="Map", Iterator=BODY, ItemSelector={}, Parameters={})),
    ("$.States.S.MaxConcurrency", "Map State", one(Type="Map", Iterator=BODY, MaxConcurrency=-1)),
    ("$.States.S.ToleratedFailurePercentage", "Map State", one(Type="Map", Iterator=BODY, ToleratedFailurePercentage=101)),
    (
        "$.States.S.ToleratedFailureCountPath",
        "Map State",
        one(Type="Map", Iterator=BODY, ToleratedFailureCount=1, ToleratedFailureCountPath="$.t"),
    ),
    ("$.States.S.ItemReader", "Map State", one(Type="Map", Iterator=BODY, ItemReader={})),
    ("$.QueryLanguage", "Query language", {**machine("A", A=E), "QueryLanguage": "JSONata"}),
    ("$.States.A.QueryLanguage", "Query language", machine("A", A={"Type": "Succeed", "QueryLanguage": "JSONata"})),
    ("$.States.A.Output", "Query language", machine("A", A={"Type": "Pass", "Output": "{% $x %}", "End": True})),
    ("$.States.A.Assign", "Query language", machine("A", A={"Type": "Pass", "Assign": {"x": 1}, "End": True})),
    ("$.States.C.Choices[0].Condition", "Query language", choice(Condition="{% $x > 1 %}")),
]


@pytest.mark.parametrize(
    ("path", "clause", "document"), BAD, ids=[f"{clause} at {path} {i}" for i, (path, clause, _) in enumerate(BAD)]
)
def test_a_wrong_document_is_refused_with_place_and_clause(path: str, clause: str, document: Any):
    assert (path, clause) in [(problem.path, problem.clause) for problem in lint(document)]


def test_all_that_is_wrong_is_said_at_once():
    document = machine("A", A={"Type": "Pass", "InputPath": "x", "ResultPath": "y"})
    assert len(lint(document)) == 4


def test_the_extended_dialect_knows_the_fields_of_knix():
    branches = [BODY, machine("U", U=task("g"))]
    document = {**one(Type="Parallel", Branches=branches, WaitForNumBranches=1), "EnableCheckpoints": False}
    assert lint(document, "extended") == []


@pytest.mark.parametrize("count", [0, 3, [1, 2], "1", True])
def test_the_extended_dialect_refuses_counts_that_cannot_be(count: Any):
    document = one(Type="Parallel", Branches=[BODY, machine("U", U=task("g"))], WaitForNumBranches=count)
    assert [problem.path for problem in lint(document, "extended")] == ["$.States.S.WaitForNumBranches"]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000])
def test_what_is_no_json_is_refused_too(text: str):
    with pytest.raises(BadDocument, match=r"machine\.json: \$: \[JSON\]"):
        parse_document(text, "machine.json")
