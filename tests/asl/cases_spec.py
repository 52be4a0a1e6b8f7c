"""Situations the specification works through itself, with values of our own."""

from __future__ import annotations

from typing import Any

from tests.asl.conformance_case import Case, catch, machine, one, retry, task


def passed(path: str, given: Any, want: Any, what: str) -> Case:
    return Case(f"Reference Paths: {what}", one(Type="Pass", InputPath=path), given, want)


SHIPMENT = {"day": "2026-03-14", "detail": {"by": "UQS", "parcels": [{"n": 3}, {"n": 4}]}}
EACH_PARCEL = machine("Double", Double=task("double", InputPath="$.n"))

CASES = [
    passed("$.store\\.book", {"store.book": 1}, 1, "an escaped dot is part of a name"),
    passed("$.\\stor\\e.boo\\k", {"store": {"book": 2}}, 2, "an escape that is not needed changes nothing"),
    passed("$.foo.\\.bar", {"foo": {".bar": 3}}, 3, "a name may begin with an escaped dot"),
    passed("$.foo\\@bar.baz\\[\\[.\\?pretty", {"foo@bar": {"baz[[": {"?pretty": 4}}}, 4, "signs of the syntax, escaped"),
    passed("$.&Ж中.\\uD800\\uDF46", {"&Ж中": {"\U00010346": 5}}, 5, "letters of any language, and a pair of surrogates"),
    passed("$.ledgers[0][1].foo", {"ledgers": [[0, {"foo": 6}]]}, 6, "indices one after the other"),
    passed("$['store'][0]['book']", {"store": [{"book": 7}]}, 7, "brackets only"),
    Case(
        "Payload Template: paths, slices, the context object and a function in one",
        one(
            Type="Pass",
            Parameters={
                "flag": True,
                "parts": {"first.$": "$.vals[0]", "rest.$": "$.vals[2:]"},
                "state.$": "$$.State.Name",
                "said.$": "States.Format('in {} of {}', $$.State.Name, $.name)",
            },
        ),
        {"flag": 7, "vals": [1, 2, 3, 4], "name": "m"},
        {"flag": True, "parts": {"first": 1, "rest": [3, 4]}, "state": "S", "said": "in S of m"},
    ),
    Case(
        "Input and Output Processing: part of the input, and the result beside the rest",
        one(Type="Task", Resource="shape", InputPath="$.numbers", ResultPath="$.found.here", ResultSelector={"a.$": "$.a"}),
        {"title": "t", "numbers": {"x": 3}},
        {"title": "t", "numbers": {"x": 3}, "found": {"here": {"a": 1}}},
    ),
    Case(
        "Complex retry scenarios: an exhausted retrier is not helped by another one",
        machine(
            "X",
            X=task(
                "in_turn",  # Boom, Other, Boom, Other
                Retry=[retry("Boom", IntervalSeconds=1, BackoffRate=2, MaxAttempts=1), retry("Other", IntervalSeconds=5)],
                Catch=[catch("States.ALL", to="Z")],
                Next="Z",
            ),
            Z={"Type": "Pass", "InputPath": "$.Error", "End": True},
        ),
        {},
        "Boom",
        took_s=6,
    ),
    Case(
        "Retrying after error: any error but one",
        machine("X", X=task("other", Retry=[retry("Other", MaxAttempts=0), retry("States.ALL")])),
        {},
        error="Other",
        took_s=0,
    ),
    Case(
        "Error output: beside the input, under a name with a dash",
        machine(
            "X",
            X=task("boom", Catch=[catch("Boom", to="R", ResultPath="$.error-info")], Next="R"),
            R={"Type": "Succeed"},
        ),
        {"k": 1},
        {"k": 1, "error-info": {"Error": "Boom", "Cause": "it went off"}},
    ),
    Case(
        "Map State input/output processing: part of the input, its items, and the array in their place",
        one(Type="Map", InputPath="$.detail", ItemsPath="$.parcels", Iterator=EACH_PARCEL, ResultPath="$.detail.parcels"),
        SHIPMENT,
        {"day": "2026-03-14", "detail": {"by": "UQS", "parcels": [6, 8]}},
    ),
    Case(
        "Map State input/output processing: Parameters see the item and the effective input",
        one(
            Type="Map",
            InputPath="$.detail",
            ItemsPath="$.parcels",
            Parameters={"parcel.$": "$$.Map.Item.Value", "number.$": "$$.Map.Item.Index", "by.$": "$.by"},
            Iterator=machine("P", P={"Type": "Pass", "End": True}),
        ),
        SHIPMENT,
        [{"parcel": {"n": 3}, "number": 0, "by": "UQS"}, {"parcel": {"n": 4}, "number": 1, "by": "UQS"}],
    ),
    Case(
        "Choice State: numbers as text are no numbers",
        machine(
            "C",
            C={"Type": "Choice", "Choices": [{"Variable": "$.n", "NumericEquals": 5, "Next": "Y"}], "Default": "N"},
            Y={"Type": "Pass", "Result": "yes", "End": True},
            N={"Type": "Pass", "Result": "no", "End": True},
        ),
        {"n": "5"},
        "no",
    ),
    Case(
        "Intrinsic: States.Format of an array",
        one(Type="Pass", Parameters={"x.$": "States.Format('{}', $.list)"}),
        {"list": [1]},
        error="States.IntrinsicFailure",
    ),
    Case(
        "Intrinsic: the format itself may be a path",
        one(Type="Pass", Parameters={"x.$": "States.Format($.how, $.what)"}),
        {"how": "<{}>", "what": 5},
        {"x": "<5>"},
    ),
]
