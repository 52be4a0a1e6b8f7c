"""Paths, payload templates, the context object and intrinsic functions."""

from __future__ import annotations

from typing import Any

from tests.asl.conformance_case import BEGAN, Case, machine, one, task

DOC = {"a": 1, "b": {"c": [10, 20, 30], "d": "x"}, "list": [{"n": 1}, {"n": 2}, {"n": 3}]}


def with_parameters(**fields: Any) -> dict[str, Any]:
    return one(Type="Pass", Parameters=fields)


def shows(clause: str, expression: str, want: Any, given: Any = None) -> Case:
    return Case(clause, with_parameters(**{"v.$": expression}), DOC if given is None else given, {"v": want})


def breaks(clause: str, expression: str, error: str, given: Any = None) -> Case:
    return Case(clause, with_parameters(**{"v.$": expression}), DOC if given is None else given, error=error)


PATHS = [
    shows("Paths: $ is the whole input", "$", DOC),
    shows("Paths: dot notation", "$.b.d", "x"),
    shows("Paths: bracket notation", "$['b']['d']", "x"),
    shows("Paths: bracket notation for names that are not plain", "$['a b.c']", 7, {"a b.c": 7}),
    shows("Paths: array index", "$.b.c[1]", 20),
    shows("Paths: array slice", "$.b.c[0:2]", [10, 20]),
    shows("Paths: wildcard gives a list", "$.list[*].n", [1, 2, 3]),
    shows("Paths: descent gives a list", "$..n", [1, 2, 3]),
    shows("Paths: union of indices", "$.b.c[0,2]", [10, 30]),
    shows("Paths: filter", "$.list[?(@.n > 1)].n", [2, 3]),
    shows("Paths: filter with equality and text", "$.list[?(@.k == 'y')].n", [2], {"list": [{"k": "x"}, {"k": "y", "n": 2}]}),
    shows("Paths: a filter that matches nothing gives an empty list", "$.list[?(@.n > 9)]", []),
    shows("Paths: values of any type are selected", "$.b", DOC["b"]),
    shows("Paths: null is a value", "$.a", None, {"a": None}),
    breaks("Paths: a path to nothing in Parameters", "$.nowhere", "States.ParameterPathFailure"),
    breaks("Paths: an index beyond the end in Parameters", "$.b.c[9]", "States.ParameterPathFailure"),
]

PROCESSING = [
    Case("InputPath: selects part of the input", one(Type="Pass", InputPath="$.b.d"), DOC, "x"),
    Case("InputPath: null gives an empty object", one(Type="Pass", InputPath=None), DOC, {}),
    Case("InputPath: a path to nothing", one(Type="Pass", InputPath="$.nope"), DOC, error="States.Runtime"),
    Case("InputPath: from the context object", one(Type="Pass", InputPath="$$.Execution.Input.a"), DOC, 1),
    Case("OutputPath: selects part of the output", one(Type="Pass", OutputPath="$.b.c"), DOC, [10, 20, 30]),
    Case("OutputPath: null gives an empty object", one(Type="Pass", OutputPath=None), DOC, {}),
    Case("OutputPath: a path to nothing", one(Type="Pass", OutputPath="$.nope"), DOC, error="States.Runtime"),
    Case("ResultPath: default replaces the input", machine("S", S=task("double", InputPath="$.a")), DOC, 2),
    Case(
        "ResultPath: puts the result beside the raw input",
        machine("S", S=task("double", InputPath="$.a", ResultPath="$.twice")),
        {"a": 4},
        {"a": 4, "twice": 8},
    ),
    Case(
        "ResultPath: makes the objects on its way",
        machine("S", S=task("double", InputPath="$.a", ResultPath="$.x.y.z")),
        {"a": 4},
        {"a": 4, "x": {"y": {"z": 8}}},
    ),
    Case(
        "ResultPath: replaces what is there",
        machine("S", S=task("double", InputPath="$.a", ResultPath="$.a")),
        {"a": 4, "b": 1},
        {"a": 8, "b": 1},
    ),
    Case(
        "ResultPath: an element of an array",
        machine("S", S=task("double", InputPath="$.l[1]", ResultPath="$.l[1]")),
        {"l": [1, 2, 3]},
        {"l": [1, 4, 3]},
    ),
    Case(
        "ResultPath: null discards the result",
        machine("S", S=task("double", InputPath="$.a", ResultPath=None)),
        {"a": 4},
        {"a": 4},
    ),
    Case(
        "ResultPath: cannot be put into a text",
        machine("S", S=task("echo", ResultPath="$.a.b")),
        {"a": "text"},
        error="States.ResultPathMatchFailure",
    ),
    Case(
        "ResultPath: cannot be put beyond the end of an array",
        machine("S", S=task("echo", ResultPath="$.a[3]")),
        {"a": [1]},
        error="States.ResultPathMatchFailure",
    ),
    Case(
        "ResultPath: an input that is no object",
        machine("S", S=task("echo", ResultPath="$.r")),
        5,
        error="States.ResultPathMatchFailure",
    ),
    Case(
        "ResultSelector: picks from the raw result",
        machine("S", S=task("shape", ResultSelector={"last.$": "$.b.c[1]"})),
        {},
        {"last": 20},
    ),
    Case(
        "ResultSelector: before ResultPath",
        machine("S", S=task("shape", ResultSelector={"a.$": "$.a"}, ResultPath="$.r")),
        {"k": 1},
        {"k": 1, "r": {"a": 1}},
    ),
    Case(
        "ResultSelector: sees the context object",
        machine("S", S=task("shape", ResultSelector={"s.$": "$$.State.Name"})),
        {},
        {"s": "S"},
    ),
    Case(
        "ResultSelector: a path to nothing",
        machine("S", S=task("shape", ResultSelector={"a.$": "$.zz"})),
        {},
        error="States.ParameterPathFailure",
    ),
    Case(
        "OutputPath: after ResultPath",
        machine("S", S=task("double", InputPath="$.a", ResultPath="$.r", OutputPath="$.r")),
        {"a": 3},
        6,
    ),
    Case(
        "Processing order: InputPath, Parameters, task, ResultSelector, ResultPath, OutputPath",
        machine(
            "S",
            S=task(
                "echo",
                InputPath="$.in",
                Parameters={"x.$": "$.x", "k": 9},
                ResultSelector={"sum.$": "States.MathAdd($.x, $.k)"},
                ResultPath="$.out",
                OutputPath="$.out.sum",
            ),
        ),
        {"in": {"x": 1}},
        10,
    ),
    Case(
        "Parameters: constants of every type",
        with_parameters(t="s", n=1, f=1.5, b=True, z=None, l=[1, {"k": []}]),
        {},
        {"t": "s", "n": 1, "f": 1.5, "b": True, "z": None, "l": [1, {"k": []}]},
    ),
    Case(
        "Parameters: nested objects and arrays are filled",
        with_parameters(o={"x.$": "$.a"}, l=[{"y.$": "$.b.d"}]),
        DOC,
        {"o": {"x": 1}, "l": [{"y": "x"}]},
    ),
    Case("Parameters: a text that looks like a path stays a text", with_parameters(x="$.a"), DOC, {"x": "$.a"}),
    Case("Parameters: any JSON value", one(Type="Pass", Parameters=[1, {"x.$": "$.a"}]), DOC, [1, {"x": 1}]),
]

CONTEXT = [
    shows("Context object: Execution.Id", "$$.Execution.Id", "execution-1"),
    shows("Context object: Execution.Input", "$$.Execution.Input.a", 1),
    shows("Context object: Execution.StartTime", "$$.Execution.StartTime", BEGAN),
    shows("Context object: State.Name", "$$.State.Name", "S"),
    shows("Context object: State.EnteredTime", "$$.State.EnteredTime", BEGAN),
    shows("Context object: State.RetryCount", "$$.State.RetryCount", 0),
    shows("Context object: StateMachine.Name", "$$.StateMachine.Name", "machine"),
    Case(
        "Context object: EnteredTime is that of the state",
        machine(
            "W",
            W={"Type": "Wait", "Seconds": 90, "Next": "S"},
            S={"Type": "Pass", "Parameters": {"v.$": "$$.State.EnteredTime"}, "End": True},
        ),
        {},
        {"v": "2026-03-14T02:00:30.000Z"},
    ),
]

CALLS = [
    shows("Intrinsic: States.Format", "States.Format('Hello, {} {}', $.b.d, $.a)", "Hello, x 1"),
    shows("Intrinsic: States.Format without holes", "States.Format('plain')", "plain"),
    shows("Intrinsic: States.Format with escaped braces", r"States.Format('\{{}\}', $.a)", "{1}"),
    shows("Intrinsic: States.Format with an escaped quote", r"States.Format('it\'s {}', $.a)", "it's 1"),
    shows("Intrinsic: States.Format with a backslash", r"States.Format('a\\b')", "a\\b"),
    shows("Intrinsic: States.Format of null and true", "States.Format('{} {}', null, true)", "null true"),
    breaks("Intrinsic: States.Format with too few values", "States.Format('{} {}', $.a)", "States.IntrinsicFailure"),
    breaks("Intrinsic: States.Format with too many values", "States.Format('{}', $.a, $.a)", "States.IntrinsicFailure"),
    shows("Intrinsic: States.StringToJson", "States.StringToJson($.t)", {"x": [1]}, {"t": '{"x": [1]}'}),
    breaks("Intrinsic: States.StringToJson of what is no JSON", "States.StringToJson('{')", "States.IntrinsicFailure"),
    shows("Intrinsic: States.JsonToString", "States.JsonToString($.b)", '{"c":[10,20,30],"d":"x"}'),
    shows("Intrinsic: States.Array", "States.Array('a', 1, null, $.a)", ["a", 1, None, 1]),
    shows("Intrinsic: States.Array of nothing", "States.Array()", []),
    shows("Intrinsic: States.ArrayPartition", "States.ArrayPartition($.b.c, 2)", [[10, 20], [30]]),
    breaks("Intrinsic: States.ArrayPartition by nothing", "States.ArrayPartition($.b.c, 0)", "States.IntrinsicFailure"),
    shows("Intrinsic: States.ArrayContains", "States.ArrayContains($.b.c, 20)", True),
    shows("Intrinsic: States.ArrayContains not", "States.ArrayContains($.b.c, 21)", False),
    shows("Intrinsic: States.ArrayContains an object", "States.ArrayContains($.list, $.list[1])", True),
    shows("Intrinsic: States.ArrayRange includes its end", "States.ArrayRange(1, 9, 2)", [1, 3, 5, 7, 9]),
    shows("Intrinsic: States.ArrayRange downwards", "States.ArrayRange(3, 1, -1)", [3, 2, 1]),
    breaks("Intrinsic: States.ArrayRange without a step", "States.ArrayRange(1, 9, 0)", "States.IntrinsicFailure"),
    breaks("Intrinsic: States.ArrayRange of more than 1000", "States.ArrayRange(1, 1001, 1)", "States.IntrinsicFailure"),
    shows("Intrinsic: States.ArrayGetItem", "States.ArrayGetItem($.b.c, 2)", 30),
    breaks("Intrinsic: States.ArrayGetItem beyond the end", "States.ArrayGetItem($.b.c, 3)", "States.IntrinsicFailure"),
    shows("Intrinsic: States.ArrayLength", "States.ArrayLength($.b.c)", 3),
    breaks("Intrinsic: States.ArrayLength of a text", "States.ArrayLength($.b.d)", "States.IntrinsicFailure"),
    shows("Intrinsic: States.ArrayUnique", "States.ArrayUnique($.l)", [1, "1", True, None], {"l": [1, "1", 1, True, None, None]}),
    shows("Intrinsic: States.Base64Encode", "States.Base64Encode('Data to encode')", "RGF0YSB0byBlbmNvZGU="),
    shows("Intrinsic: States.Base64Decode", "States.Base64Decode('RGVjb2RlZCBkYXRh')", "Decoded data"),
    breaks("Intrinsic: States.Base64Decode of what is none", "States.Base64Decode('%%%')", "States.IntrinsicFailure"),
    shows("Intrinsic: States.Hash MD5", "States.Hash('abc', 'MD5')", "900150983cd24fb0d6963f7d28e17f72"),
    shows("Intrinsic: States.Hash SHA-1", "States.Hash('abc', 'SHA-1')", "a9993e364706816aba3e25717850c26c9cd0d89d"),
    shows(
        "Intrinsic: States.Hash SHA-256",
        "States.Hash('abc', 'SHA-256')",
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    ),
    breaks("Intrinsic: States.Hash by an unknown algorithm", "States.Hash('abc', 'CRC')", "States.IntrinsicFailure"),
    shows(
        "Intrinsic: States.JsonMerge, shallow",
        "States.JsonMerge($.x, $.y, false)",
        {"a": {"q": 2}, "b": 1},
        {"x": {"a": {"p": 1}, "b": 1}, "y": {"a": {"q": 2}}},
    ),
    breaks("Intrinsic: States.JsonMerge, deep", "States.JsonMerge($, $, true)", "States.IntrinsicFailure"),
    shows("Intrinsic: States.MathAdd", "States.MathAdd($.a, -3)", -2),
    shows("Intrinsic: States.StringSplit", "States.StringSplit('1,2,3', ',')", ["1", "2", "3"]),
    shows(
        "Intrinsic: States.StringSplit by several characters",
        "States.StringSplit('This.is+a,test', '.+,')",
        ["This", "is", "a", "test"],
    ),
    shows(
        "Intrinsic: States.MathRandom with a seed repeats",
        "States.ArrayUnique(States.Array(States.MathRandom(1, 1000, 42), States.MathRandom(1, 1000, 42)))",
        [655],
    ),
    shows("Intrinsic: States.MathRandom excludes its end", "States.MathRandom(5, 6)", 5),
    shows("Intrinsic: nested calls", "States.Format('{}', States.ArrayLength(States.Array(1, 2, States.Array())))", "3"),
    shows(
        "Intrinsic: paths with commas and brackets as arguments",
        "States.Array($['a,b)'], $.l[0,1])",
        [1, [2, 3]],
        {"a,b)": 1, "l": [2, 3]},
    ),
    breaks("Intrinsic: a path to nothing as an argument", "States.Array($.nowhere)", "States.IntrinsicFailure"),
    shows("Intrinsic: the context object as an argument", "States.Format('{}', $$.State.Name)", "S"),
]

CASES = [*PATHS, *PROCESSING, *CONTEXT, *CALLS]
