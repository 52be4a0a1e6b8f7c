"""States and transitions: Pass, Wait, Succeed, Fail, Parallel, Map."""

from __future__ import annotations

from typing import Any

from tests.asl.conformance_case import Case, catch, machine, one, retry, task

E = {"Type": "Succeed"}


def parallel(*branches: dict[str, Any], **more: Any) -> dict[str, Any]:
    return machine("P", P={"Type": "Parallel", "Branches": list(branches), "End": True, **more})


def each(body: dict[str, Any], key: str = "ItemProcessor", **more: Any) -> dict[str, Any]:
    end = {} if "Next" in more else {"End": True}
    return machine("M", M={"Type": "Map", key: body, **end, **more})


def only(resource: str, name: str = "T", **more: Any) -> dict[str, Any]:
    return machine(name, **{name: task(resource, **more)})


BASICS = [
    Case("Pass State: passes its input on", one(Type="Pass"), {"a": 1}, {"a": 1}),
    Case("Pass State: Result", one(Type="Pass", Result={"x": [1]}), {"a": 1}, {"x": [1]}),
    Case("Pass State: Result with ResultPath", one(Type="Pass", Result=5, ResultPath="$.x"), {"a": 1}, {"a": 1, "x": 5}),
    Case(
        "Pass State: Parameters with ResultPath",
        one(Type="Pass", Parameters={"b.$": "$.a"}, ResultPath="$.x"),
        {"a": 1},
        {"a": 1, "x": {"b": 1}},
    ),
    Case("Pass State: a Result is no template", one(Type="Pass", Result={"x.$": "$.a"}), {"a": 1}, {"x.$": "$.a"}),
    Case("Succeed State: passes its input on", one(Type="Succeed"), {"a": 1}, {"a": 1}),
    Case("Succeed State: InputPath and OutputPath", one(Type="Succeed", InputPath="$.a", OutputPath="$.b"), {"a": {"b": 2}}, 2),
    Case("Fail State: is a failure", one(Type="Fail", Error="Custom", Cause="so it is"), {}, error="Custom", cause="so it is"),
    Case("Fail State: without Error and Cause", one(Type="Fail"), {}, error="", cause=""),
    Case(
        "Fail State: ErrorPath and CausePath",
        one(Type="Fail", ErrorPath="$.e", CausePath="$.c"),
        {"e": "E1", "c": "C1"},
        error="E1",
        cause="C1",
    ),
    Case(
        "Fail State: CausePath with an intrinsic function",
        one(Type="Fail", Error="E", CausePath="States.Format('{}!', $.c)"),
        {"c": "no"},
        error="E",
        cause="no!",
    ),
    Case("Fail State: ErrorPath to what is no text", one(Type="Fail", ErrorPath="$.e"), {"e": 5}, error="States.Runtime"),
    Case("Wait State: Seconds", one(Type="Wait", Seconds=10), {"a": 1}, {"a": 1}, took_s=10),
    Case("Wait State: zero seconds", one(Type="Wait", Seconds=0), {"a": 1}, {"a": 1}, took_s=0),
    Case("Wait State: SecondsPath", one(Type="Wait", SecondsPath="$.s"), {"s": 7}, {"s": 7}, took_s=7),
    Case("Wait State: SecondsPath to what is no number", one(Type="Wait", SecondsPath="$.s"), {"s": "7"}, error="States.Runtime"),
    Case("Wait State: SecondsPath below zero", one(Type="Wait", SecondsPath="$.s"), {"s": -1}, error="States.Runtime"),
    Case("Wait State: Timestamp", one(Type="Wait", Timestamp="2026-03-14T02:00:00Z"), {}, {}, took_s=60),
    Case("Wait State: Timestamp in the past", one(Type="Wait", Timestamp="2020-03-14T02:00:00Z"), {}, {}, took_s=0),
    Case("Wait State: Timestamp with an offset", one(Type="Wait", Timestamp="2026-03-14T03:00:30+01:00"), {}, {}, took_s=90),
    Case(
        "Wait State: TimestampPath",
        one(Type="Wait", TimestampPath="$.t"),
        {"t": "2026-03-14T01:59:05Z"},
        {"t": "2026-03-14T01:59:05Z"},
        took_s=5,
    ),
    Case(
        "Wait State: TimestampPath to what is no time",
        one(Type="Wait", TimestampPath="$.t"),
        {"t": "soon"},
        error="States.Runtime",
    ),
    Case("Wait State: a wait of a year holds nothing up", one(Type="Wait", Seconds=31_536_000), {}, {}, took_s=31_536_000),
    Case(
        "Wait State: InputPath and OutputPath", one(Type="Wait", Seconds=1, InputPath="$.a", OutputPath="$.b"), {"a": {"b": 2}}, 2
    ),
    Case("Task State: calls its Resource with the input", only("echo"), {"a": 1}, {"a": 1}),
    Case("Task State: an ARN is bound by its last part", only("arn:aws:lambda:eu-west-1:123456789012:function:double:3"), 4, 8),
    Case("Task State: a result of null", only("nothing"), {"a": 1}, None),
    Case("Task State: an uncaught error fails the execution by name", only("boom"), {}, error="Boom", cause="it went off"),
    Case(
        "Transitions: states follow each other",
        machine("A", A=task("double", Next="B"), B=task("double", Next="C"), C=task("double")),
        1,
        8,
    ),
    Case(
        "Transitions: several may lead to one state",
        machine(
            "A",
            A={"Type": "Choice", "Choices": [{"Variable": "$", "NumericEquals": 1, "Next": "B"}], "Default": "C"},
            B={"Type": "Pass", "Result": "b", "Next": "D"},
            C={"Type": "Pass", "Result": "c", "Next": "D"},
            D=E,
        ),
        1,
        "b",
    ),
    Case(
        "Top-level fields: TimeoutSeconds ends the execution",
        {"TimeoutSeconds": 3, **only("slow")},
        {},
        error="States.Timeout",
        took_s=3,
    ),
    Case(
        "Top-level fields: TimeoutSeconds counts waiting too",
        {"TimeoutSeconds": 3, **one(Type="Wait", Seconds=4)},
        {},
        error="States.Timeout",
        took_s=3,
    ),
    Case(
        "Top-level fields: TimeoutSeconds that is not reached",
        {"TimeoutSeconds": 6, "Comment": "patient", "Version": "1.0", **only("slow")},
        {},
        "slow",
        took_s=5,
    ),
    Case(
        "Top-level fields: TimeoutSeconds cannot be caught inside",
        {"TimeoutSeconds": 3, **machine("T", T=task("slow", Next="E", Catch=[catch("States.ALL", to="E")]), E=E)},
        {},
        error="States.Timeout",
    ),
]

PARALLEL = [
    Case(
        "Parallel State: an array of the outputs, in order of the branches",
        parallel(only("for_seconds", InputPath="$.a"), only("for_seconds", "U", InputPath="$.b")),
        {"a": 3, "b": 1},
        [3, 1],
        took_s=3,
    ),
    Case(
        "Parallel State: branches run at the same time",
        parallel(only("slow"), only("slow", "U"), only("slow", "V")),
        {},
        ["slow"] * 3,
        took_s=5,
    ),
    Case(
        "Parallel State: each branch gets its own copy of the input",
        parallel(
            machine("A", A={"Type": "Pass", "Result": 1, "ResultPath": "$.x", "End": True}),
            machine("B", B={"Type": "Pass", "End": True}),
        ),
        {"x": 0},
        [{"x": 1}, {"x": 0}],
    ),
    Case(
        "Parallel State: Parameters make the input of the branches",
        parallel(only("echo"), Parameters={"k.$": "$.a"}),
        {"a": 1},
        [{"k": 1}],
    ),
    Case(
        "Parallel State: ResultSelector and ResultPath",
        parallel(only("double", InputPath="$.a"), ResultSelector={"r.$": "$[0]"}, ResultPath="$.out"),
        {"a": 2},
        {"a": 2, "out": {"r": 4}},
    ),
    Case(
        "Parallel State: a failing branch fails it and stops the others",
        parallel(only("boom"), only("slow", "U")),
        {},
        error="Boom",
        took_s=0,
    ),
    Case(
        "Parallel State: a Fail state in a branch fails it",
        parallel(one(Type="Fail", Error="Inside"), only("slow")),
        {},
        error="Inside",
    ),
    Case("Parallel State: Succeed ends its branch only", parallel(one(Type="Succeed"), only("slow")), 1, [1, "slow"]),
    Case(
        "Parallel State: branches nest",
        parallel(
            machine("Q", Q={"Type": "Parallel", "Branches": [only("double"), only("double", "U")], "End": True}),
            only("double", "V"),
        ),
        1,
        [[2, 2], 2],
    ),
    Case(
        "Parallel State: Catch by States.BranchFailed",
        machine(
            "P",
            P={
                "Type": "Parallel",
                "Branches": [only("boom")],
                "Next": "E",
                "Catch": [catch("States.BranchFailed", to="E", ResultPath="$.err")],
            },
            E=E,
        ),
        {"a": 1},
        {"a": 1, "err": {"Error": "Boom", "Cause": "it went off"}},
    ),
    Case(
        "Parallel State: Catch by the name of the error",
        machine(
            "P",
            P={
                "Type": "Parallel",
                "Branches": [only("boom")],
                "Next": "E",
                "Catch": [catch("Other", to="E"), catch("Boom", to="E", ResultPath="$.err.deep")],
            },
            E=E,
        ),
        {},
        {"err": {"deep": {"Error": "Boom", "Cause": "it went off"}}},
    ),
    Case(
        "Parallel State: Retry runs all branches again",
        parallel(only("flaky"), only("slow", "U"), Retry=[retry("Boom", IntervalSeconds=10, BackoffRate=1)]),
        {},
        ["worked", "slow"],
        took_s=25,
    ),
    Case(
        "Parallel State: an error caught inside does not fail it",
        parallel(
            machine("T", T=task("boom", Next="X", Catch=[catch("Boom", to="X", ResultPath=None)]), X=E), only("double", "U")
        ),
        3,
        [3, 6],
    ),
    Case(
        "Parallel State: WaitForNumBranches goes on with the first that are done",
        parallel(
            only("for_seconds", InputPath="$[0]"),
            only("for_seconds", "U", InputPath="$[1]"),
            only("for_seconds", "V", InputPath="$[2]"),
            WaitForNumBranches=2,
        ),
        [9, 1, 3],
        [1, 3],
        took_s=3,
        dialect="extended",
    ),
    Case(
        "Parallel State: WaitForNumBranches as KNIX writes it",
        parallel(only("slow"), only("double", "U"), WaitForNumBranches=[1]),
        4,
        [8],
        took_s=0,
        dialect="extended",
    ),
    Case(
        "Parallel State: WaitForNumBranches can do without a branch that fails",
        parallel(only("boom"), only("double", "U"), only("slow", "V"), WaitForNumBranches=2),
        4,
        [8, "slow"],
        dialect="extended",
    ),
    Case(
        "Parallel State: WaitForNumBranches that can no longer be reached fails",
        parallel(only("boom"), only("slow", "U"), WaitForNumBranches=2),
        4,
        error="Boom",
        took_s=0,
        dialect="extended",
    ),
]

MAP = [
    Case("Map State: an array of the results, in order of the items", each(only("double")), [3, 1, 2], [6, 2, 4]),
    Case("Map State: Iterator is the old name of ItemProcessor", each(only("double"), "Iterator"), [3, 1], [6, 2]),
    Case("Map State: ProcessorConfig", each({"ProcessorConfig": {"Mode": "INLINE"}, **only("double")}), [1], [2]),
    Case("Map State: no items", each(only("double")), [], []),
    Case("Map State: ItemsPath", each(only("double"), ItemsPath="$.xs"), {"xs": [1, 2]}, [2, 4]),
    Case(
        "Map State: ItemsPath with a wildcard",
        each(only("double"), ItemsPath="$.rows[*].n"),
        {"rows": [{"n": 1}, {"n": 5}]},
        [2, 10],
    ),
    Case(
        "Map State: ItemsPath to what is no array",
        each(only("double"), ItemsPath="$.xs"),
        {"xs": {"a": 1}},
        error="States.Runtime",
    ),
    Case("Map State: ItemsPath to nothing", each(only("double"), ItemsPath="$.xs"), {}, error="States.Runtime"),
    Case(
        "Map State: InputPath comes before ItemsPath",
        each(only("double"), InputPath="$.in", ItemsPath="$.xs"),
        {"in": {"xs": [4]}},
        [8],
    ),
    Case(
        "Map State: ItemSelector with item and input",
        each(only("echo"), ItemsPath="$.xs", ItemSelector={"i.$": "$$.Map.Item.Index", "v.$": "$$.Map.Item.Value", "k.$": "$.k"}),
        {"xs": ["a", "b"], "k": 7},
        [{"i": 0, "v": "a", "k": 7}, {"i": 1, "v": "b", "k": 7}],
    ),
    Case(
        "Map State: Parameters is the old name of ItemSelector",
        each(only("echo"), ItemsPath="$.xs", Parameters={"v.$": "$$.Map.Item.Value"}),
        {"xs": ["a"]},
        [{"v": "a"}],
    ),
    Case(
        "Map State: the item is in the context of its states",
        each(machine("P", P={"Type": "Pass", "Parameters": {"i.$": "$$.Map.Item.Index"}, "End": True})),
        [5, 6],
        [{"i": 0}, {"i": 1}],
    ),
    Case(
        "Map State: ResultSelector, ResultPath, OutputPath",
        each(
            only("double"),
            ItemsPath="$.xs",
            ResultSelector={"n.$": "States.ArrayLength($)"},
            ResultPath="$.r",
            OutputPath="$.r.n",
        ),
        {"xs": [1, 2, 3]},
        3,
    ),
    Case("Map State: items run at the same time", each(only("slow")), [1, 2, 3], ["slow"] * 3, took_s=5),
    Case(
        "Map State: MaxConcurrency of one is one after the other",
        each(only("slow"), MaxConcurrency=1),
        [1, 2, 3],
        ["slow"] * 3,
        took_s=15,
    ),
    Case(
        "Map State: MaxConcurrency is a sliding window",
        each(only("for_seconds"), MaxConcurrency=2),
        [4, 1, 1, 1, 1],
        [4, 1, 1, 1, 1],
        took_s=4,
    ),
    Case(
        "Map State: MaxConcurrency of zero is no limit", each(only("slow"), MaxConcurrency=0), [1, 2, 3], ["slow"] * 3, took_s=5
    ),
    Case(
        "Map State: MaxConcurrencyPath",
        each(only("slow"), ItemsPath="$.xs", MaxConcurrencyPath="$.n"),
        {"xs": [1, 2, 3, 4], "n": 2},
        ["slow"] * 4,
        took_s=10,
    ),
    Case(
        "Map State: MaxConcurrency with items that take no time",
        each(machine("P", P={"Type": "Pass", "End": True}), MaxConcurrency=3),
        list(range(500)),
        list(range(500)),
    ),
    Case(
        "Map State: a failing item fails it, by the name of its error",
        each(only("odd_fails")),
        [2, 3, 4],
        error="Boom",
        cause="3 is odd",
    ),
    Case(
        "Map State: a failing item stops the others",
        each(
            machine(
                "C",
                C={"Type": "Choice", "Choices": [{"Variable": "$", "NumericEquals": 1, "Next": "B"}], "Default": "S"},
                B=task("boom"),
                S=task("slow"),
            )
        ),
        [0, 1, 0],
        error="Boom",
        took_s=0,
    ),
    Case(
        "Map State: Catch by States.ExceedToleratedFailureThreshold",
        machine(
            "M",
            M={
                "Type": "Map",
                "ItemProcessor": only("boom"),
                "Next": "E",
                "Catch": [catch("States.ExceedToleratedFailureThreshold", to="E", ResultPath=None)],
            },
            E=E,
        ),
        [1],
        [1],
    ),
    Case(
        "Map State: ToleratedFailureCount, not exceeded", each(only("odd_fails"), ToleratedFailureCount=2), [1, 2, 3, 4], [2, 4]
    ),
    Case(
        "Map State: ToleratedFailureCount, exceeded",
        each(only("odd_fails"), ToleratedFailureCount=1),
        [1, 2, 3, 4],
        error="States.ExceedToleratedFailureThreshold",
    ),
    Case(
        "Map State: ToleratedFailurePercentage, not exceeded",
        each(only("odd_fails"), ToleratedFailurePercentage=50),
        [1, 2, 3, 4],
        [2, 4],
    ),
    Case(
        "Map State: ToleratedFailurePercentage, exceeded",
        each(only("odd_fails"), ToleratedFailurePercentage=49),
        [1, 2, 3, 4],
        error="States.ExceedToleratedFailureThreshold",
    ),
    Case("Map State: all may fail", each(only("boom"), ToleratedFailurePercentage=100), [1, 2], []),
    Case(
        "Map State: ToleratedFailureCountPath",
        each(only("odd_fails"), ItemsPath="$.xs", ToleratedFailureCountPath="$.t"),
        {"xs": [1, 2], "t": 1},
        [2],
    ),
    Case(
        "Map State: ToleratedFailurePercentagePath, exceeded",
        each(only("odd_fails"), ItemsPath="$.xs", ToleratedFailurePercentagePath="$.t"),
        {"xs": [1, 2], "t": 10},
        error="States.ExceedToleratedFailureThreshold",
    ),
    Case(
        "Map State: it closes as soon as too many have failed",
        each(
            machine(
                "C",
                C={"Type": "Choice", "Choices": [{"Variable": "$", "NumericEquals": 1, "Next": "B"}], "Default": "S"},
                B=task("boom"),
                S=task("slow"),
            ),
            ToleratedFailureCount=1,
        ),
        [1, 0, 1, 0],
        error="States.ExceedToleratedFailureThreshold",
        took_s=0,
    ),
    Case(
        "Map State: Retry runs all items again",
        each(only("flaky"), Retry=[retry("States.ALL", IntervalSeconds=3, BackoffRate=1)], MaxConcurrency=1),
        [1, 2],
        ["worked", "worked"],
        took_s=6,
    ),
    Case(
        "Map State: Retry inside an item runs that item again",
        each(only("flaky", Retry=[retry("Boom", IntervalSeconds=1, BackoffRate=1)]), MaxConcurrency=1),
        [1, 2],
        ["worked", "worked"],
        took_s=2,
    ),
    Case(
        "Map State: maps nest",
        each(machine("N", N={"Type": "Map", "ItemProcessor": only("double"), "End": True})),
        [[1, 2], [], [3]],
        [[2, 4], [], [6]],
    ),
    Case(
        "Map State: a map of parallels",
        each(machine("P", P={"Type": "Parallel", "Branches": [only("double"), only("echo", "U")], "End": True})),
        [1, 2],
        [[2, 1], [4, 2]],
    ),
]

CASES = [*BASICS, *PARALLEL, *MAP]
