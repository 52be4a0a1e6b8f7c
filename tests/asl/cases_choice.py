"""Choice rules: every comparator true and false, on values of other types, and combined."""

from __future__ import annotations

from typing import Any

from tests.asl.conformance_case import Case, machine

DOC = {
    "s": "m",
    "n": 5,
    "f": 5.0,
    "b": True,
    "t": "2026-03-14T01:59:00Z",
    "z": None,
    "o": {},
    "l": [1],
    "s2": "m",
    "n2": 5,
    "b2": True,
    "t2": "2026-03-14T02:59:00+01:00",
}


def decides(rule: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return machine(
        "C",
        C={"Type": "Choice", "Choices": [{**rule, "Next": "Yes"}], "Default": "No", **choice},
        Yes={"Type": "Pass", "Result": "yes", "End": True},
        No={"Type": "Pass", "Result": "no", "End": True},
    )


def says(want: str, comparator: str, variable: str, value: Any, note: str = "") -> Case:
    clause = f"Choice State: {comparator}{' ' + note if note else ''}, {variable} and {value!r} is {want}"
    return Case(clause, decides({"Variable": variable, comparator: value}), DOC, want)


def rows(comparator: str, variable: str, yes: list[Any], no: list[Any]) -> list[Case]:
    return [says("yes", comparator, variable, value) for value in yes] + [says("no", comparator, variable, value) for value in no]


COMPARISONS = [
    *rows("StringEquals", "$.s", ["m"], ["M", "mm"]),
    *rows("StringLessThan", "$.s", ["n"], ["m", "a"]),
    *rows("StringGreaterThan", "$.s", ["a"], ["m", "z"]),
    *rows("StringLessThanEquals", "$.s", ["m", "z"], ["a"]),
    *rows("StringGreaterThanEquals", "$.s", ["m", "a"], ["z"]),
    *rows("NumericEquals", "$.n", [5, 5.0], [6]),
    *rows("NumericLessThan", "$.n", [5.5], [5, -1]),
    *rows("NumericGreaterThan", "$.n", [4], [5]),
    *rows("NumericLessThanEquals", "$.n", [5, 9], [4]),
    *rows("NumericGreaterThanEquals", "$.n", [5, 1], [6]),
    *rows("BooleanEquals", "$.b", [True], [False]),
    *rows("TimestampEquals", "$.t", ["2026-03-14T01:59:00Z", "2026-03-14T02:59:00+01:00"], ["2026-03-14T01:59:01Z"]),
    *rows("TimestampLessThan", "$.t", ["2026-03-14T02:00:00Z"], ["2026-03-14T01:59:00Z"]),
    *rows("TimestampGreaterThan", "$.t", ["2026-03-14T01:58:59.999Z"], ["2026-03-14T01:59:00Z"]),
    *rows("TimestampLessThanEquals", "$.t", ["2026-03-14T01:59:00Z"], ["2025-01-01T00:00:00Z"]),
    *rows("TimestampGreaterThanEquals", "$.t", ["2026-03-14T01:59:00Z"], ["2027-01-01T00:00:00Z"]),
    *rows("StringEqualsPath", "$.s", ["$.s2"], ["$.t"]),
    *rows("StringLessThanPath", "$.t", ["$.s"], ["$.t"]),
    *rows("StringGreaterThanPath", "$.s", ["$.t"], ["$.s2"]),
    *rows("StringLessThanEqualsPath", "$.s", ["$.s2"], ["$.t"]),
    *rows("StringGreaterThanEqualsPath", "$.s", ["$.s2"], ["$.n"]),
    *rows("NumericEqualsPath", "$.n", ["$.n2", "$.f"], ["$.l[0]"]),
    *rows("NumericLessThanPath", "$.l[0]", ["$.n"], ["$.l[0]"]),
    *rows("NumericGreaterThanPath", "$.n", ["$.l[0]"], ["$.n2"]),
    *rows("NumericLessThanEqualsPath", "$.n", ["$.n2"], ["$.l[0]"]),
    *rows("NumericGreaterThanEqualsPath", "$.n", ["$.n2"], ["$.s"]),
    *rows("BooleanEqualsPath", "$.b", ["$.b2"], ["$.n"]),
    *rows("TimestampEqualsPath", "$.t", ["$.t2"], ["$.s"]),
    *rows("TimestampLessThanPath", "$.t", [], ["$.t2"]),
    *rows("TimestampGreaterThanPath", "$.t", [], ["$.t2"]),
    *rows("TimestampLessThanEqualsPath", "$.t", ["$.t2"], ["$.s"]),
    *rows("TimestampGreaterThanEqualsPath", "$.t", ["$.t2"], ["$.s"]),
    *rows("IsNull", "$.z", [True], [False]),
    *rows("IsNull", "$.s", [False], [True]),
    *rows("IsPresent", "$.z", [True], [False]),
    *rows("IsPresent", "$.nowhere", [False], [True]),
    *rows("IsPresent", "$.o.deep.down", [False], [True]),
    *rows("IsNumeric", "$.n", [True], [False]),
    *rows("IsNumeric", "$.b", [False], [True]),
    *rows("IsString", "$.s", [True], [False]),
    *rows("IsString", "$.l", [False], [True]),
    *rows("IsBoolean", "$.b", [True], [False]),
    *rows("IsBoolean", "$.n", [False], [True]),
    *rows("IsTimestamp", "$.t", [True], [False]),
    *rows("IsTimestamp", "$.s", [False], [True]),
    says("no", "StringEquals", "$.n", "5", "of a number"),
    says("no", "NumericEquals", "$.b", 1, "of a boolean"),
    says("no", "BooleanEquals", "$.s", True, "of a text"),
    says("no", "TimestampEquals", "$.n", "2026-03-14T01:59:00Z", "of a number"),
    says("no", "StringEquals", "$.z", "", "of null"),
]


def matches(text: str, pattern: str, want: str) -> Case:
    document = decides({"Variable": "$.v", "StringMatches": pattern})
    return Case(f"Choice State: StringMatches wildcard, {text!r} and {pattern!r}", document, {"v": text}, want)


PATTERNS = [
    matches("foo.log", "foo*.log", "yes"),
    matches("foo23.log", "foo*.log", "yes"),
    matches("foobar.txt", "foo*.log", "no"),
    matches("zebra.log", "*.log", "yes"),
    matches("foobar.zebra", "foo*.*", "yes"),
    matches("a*b", "a\\*b", "yes"),
    matches("axb", "a\\*b", "no"),
    matches("a\\b", "a\\\\b", "yes"),
    matches("a.b", "a?b", "no"),
    matches("two\nlines", "two*", "yes"),
]

IS_N = {"Variable": "$.n", "NumericEquals": 5}
IS_S = {"Variable": "$.s", "StringEquals": "m"}
NOT_N = {"Variable": "$.n", "NumericEquals": 6}
MISSING = {"Variable": "$.nowhere", "NumericEquals": 1}

COMBINED = [
    Case("Choice State: And of true and true", decides({"And": [IS_N, IS_S]}), DOC, "yes"),
    Case("Choice State: And of true and false", decides({"And": [IS_N, NOT_N]}), DOC, "no"),
    Case(
        "Choice State: And stops at the first that is false",
        decides({"And": [{"Variable": "$.x", "IsPresent": True}, MISSING]}),
        DOC,
        "no",
    ),
    Case("Choice State: Or of false and true", decides({"Or": [NOT_N, IS_S]}), DOC, "yes"),
    Case("Choice State: Or of false and false", decides({"Or": [NOT_N, NOT_N]}), DOC, "no"),
    Case("Choice State: Not", decides({"Not": NOT_N}), DOC, "yes"),
    Case(
        "Choice State: nested combinations",
        decides({"And": [{"Not": NOT_N}, {"Or": [NOT_N, {"And": [IS_N, IS_S]}]}]}),
        DOC,
        "yes",
    ),
    Case("Choice State: a variable that is not there", decides(MISSING), DOC, error="States.Runtime"),
    Case(
        "Choice State: a path that is not there",
        decides({"Variable": "$.n", "NumericEqualsPath": "$.q"}),
        DOC,
        error="States.Runtime",
    ),
    Case(
        "Choice State: a variable of the context object", decides({"Variable": "$$.State.Name", "StringEquals": "C"}), DOC, "yes"
    ),
    Case(
        "Choice State: InputPath comes before the rules",
        decides({"Variable": "$", "NumericEquals": 5}, InputPath="$.n"),
        DOC,
        "yes",
    ),
    Case(
        "Choice State: OutputPath chooses what goes on",
        machine(
            "C",
            C={"Type": "Choice", "Choices": [{**IS_N, "Next": "E"}], "Default": "E", "OutputPath": "$.s"},
            E={"Type": "Succeed"},
        ),
        DOC,
        "m",
    ),
    Case(
        "Choice State: the first rule that holds counts",
        machine(
            "C",
            C={"Type": "Choice", "Choices": [{**IS_N, "Next": "A"}, {**IS_S, "Next": "B"}]},
            A={"Type": "Pass", "Result": "first", "End": True},
            B={"Type": "Pass", "Result": "second", "End": True},
        ),
        DOC,
        "first",
    ),
    Case(
        "Choice State: no rule holds and there is no Default",
        machine("C", C={"Type": "Choice", "Choices": [{**NOT_N, "Next": "E"}]}, E={"Type": "Succeed"}),
        DOC,
        error="States.NoChoiceMatched",
    ),
    Case(
        "Choice State: a loop counts to three without a task",
        machine(
            "Add",
            Add={"Type": "Pass", "Parameters": {"i.$": "States.MathAdd($.i, 1)"}, "Next": "C"},
            C={"Type": "Choice", "Choices": [{"Variable": "$.i", "NumericLessThan": 3, "Next": "Add"}], "Default": "E"},
            E={"Type": "Succeed"},
        ),
        {"i": 0},
        {"i": 3},
    ),
    Case(
        "Choice State: a loop that never ends is ended",
        machine(
            "P",
            P={"Type": "Pass", "Next": "C"},
            C={"Type": "Choice", "Choices": [{"Variable": "$.n", "IsPresent": True, "Next": "P"}], "Default": "E"},
            E={"Type": "Succeed"},
        ),
        DOC,
        error="States.Runtime",
    ),
    Case(
        "Choice State: data is data, never code",
        decides({"Variable": "$.v", "StringEquals": "__import__('os').getcwd()"}),
        {"v": "__import__('os').getcwd()"},
        "yes",
    ),
]

CASES = [*COMPARISONS, *PATTERNS, *COMBINED]
