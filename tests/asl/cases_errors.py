"""Errors: Retry, Catch and timeouts, on virtual time. Among them is every defect we know of in other engines."""

from __future__ import annotations

from typing import Any

from tests.asl.conformance_case import Case, catch, machine, retry, task

E = {"Type": "Succeed"}
KEEP = {"ResultPath": None}


def retried(resource: str, *retriers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return machine("T", T=task(resource, Retry=list(retriers), **more))


def caught(resource: str, *catchers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """`E` is where errors go; `N` is where success does."""
    return machine(
        "T", T=task(resource, Next="N", Catch=list(catchers), **more), N={"Type": "Pass", "Result": "fine", "End": True}, E=E
    )


RETRY = [
    Case(
        "Retry: the default is three tries, after 1, 2 and 4 seconds", retried("boom", retry("Boom")), {}, error="Boom", took_s=7
    ),
    Case(
        "Retry: really waits between tries",
        retried("flaky", retry("Boom", IntervalSeconds=5, BackoffRate=1)),
        {},
        "worked",
        took_s=10,
    ),
    Case(
        "Retry: BackoffRate multiplies the interval",
        retried("flaky", retry("Boom", IntervalSeconds=3, BackoffRate=4)),
        {},
        "worked",
        took_s=15,
    ),
    Case(
        "Retry: a BackoffRate of one half more",
        retried("boom", retry("Boom", IntervalSeconds=2, BackoffRate=1.5, MaxAttempts=3)),
        {},
        error="Boom",
        took_s=9.5,
    ),
    Case(
        "Retry: MaxDelaySeconds caps the pause",
        retried("boom", retry("Boom", IntervalSeconds=2, BackoffRate=10, MaxDelaySeconds=5, MaxAttempts=3)),
        {},
        error="Boom",
        took_s=12,
    ),
    Case(
        "Retry: JitterStrategy NONE is no jitter",
        retried("flaky", retry("Boom", IntervalSeconds=2, JitterStrategy="NONE")),
        {},
        want="worked",
        took_s=6,
    ),
    Case(
        "Retry: MaxAttempts of zero never tries again", retried("flaky", retry("Boom", MaxAttempts=0)), {}, error="Boom", took_s=0
    ),
    Case(
        "Retry: exhausted tries are a failure, not a result",
        retried("boom", retry("Boom", MaxAttempts=1)),
        {},
        error="Boom",
        cause="it went off",
        took_s=1,
    ),
    Case("Retry: an error that is not named is not retried", retried("boom", retry("Other")), {}, error="Boom", took_s=0),
    Case("Retry: States.ALL is a wildcard", retried("flaky", retry("States.ALL")), {}, "worked", took_s=3),
    Case(
        "Retry: States.TaskFailed stands for any error of a task",
        retried("flaky", retry("States.TaskFailed")),
        {},
        "worked",
        took_s=3,
    ),
    Case(
        "Retry: States.TaskFailed does not stand for a timeout",
        retried("slow", retry("States.TaskFailed"), TimeoutSeconds=2),
        {},
        error="States.Timeout",
        took_s=2,
    ),
    Case(
        "Retry: the first retrier that knows the error counts",
        retried(
            "flaky",
            retry("Other", IntervalSeconds=100),
            retry("Boom", IntervalSeconds=1),
            retry("States.ALL", IntervalSeconds=50),
        ),
        {},
        "worked",
        took_s=3,
    ),
    Case(
        "Retry: tries are counted per retrier",
        retried(
            "in_turn",
            retry("Boom", MaxAttempts=2, IntervalSeconds=1, BackoffRate=1),
            retry("Other", MaxAttempts=1, IntervalSeconds=10),
        ),
        {},
        error="Other",
        took_s=12,
    ),
    Case(
        "Retry: back-off is counted per retrier",
        retried(
            "in_turn",
            retry("Boom", MaxAttempts=3, IntervalSeconds=1, BackoffRate=2),
            retry("Other", MaxAttempts=2, IntervalSeconds=10, BackoffRate=2),
        ),
        {},
        error="Other",
        took_s=1 + 10 + 2 + 20 + 4,
    ),
    Case(
        "Retry: an exhausted retrier does not hand over to the next",
        retried("boom", retry("Boom", MaxAttempts=1), retry("States.ALL", MaxAttempts=5)),
        {},
        error="Boom",
        took_s=1,
    ),
    Case(
        "Retry: several names in one retrier share its tries",
        retried("in_turn", retry("Boom", "Other", MaxAttempts=3, IntervalSeconds=1, BackoffRate=1)),
        {},
        error="Other",
        took_s=3,
    ),
    Case(
        "Retry: RetryCount in the context object",
        retried("flaky", retry("Boom"), ResultSelector={"n.$": "$$.State.RetryCount"}),
        {},
        {"n": 2},
    ),
    Case(
        "Retry: Parameters are worked out again",
        retried("flaky", retry("Boom"), Parameters={"n.$": "$$.State.RetryCount"}),
        {},
        "worked",
    ),
    Case(
        "Retry: counters begin anew when a state is entered again",
        machine(
            "T",
            T=task("in_turn", Next="E", Retry=[retry("Boom", MaxAttempts=1)], Catch=[catch("Other", to="T2")]),
            T2=task(
                "in_turn", Next="E", Retry=[retry("Boom", MaxAttempts=1)], Catch=[catch("Other", to="E", ResultPath="$.second")]
            ),
            E=E,
        ),
        {},
        {"Error": "Other", "Cause": "even", "second": {"Error": "Other", "Cause": "even"}},
        took_s=2,
    ),
    Case("Retry: a text for a class name is compared exactly", retried("boom", retry("boom")), {}, error="Boom", took_s=0),
    Case("Retry: the text of an error does not count", retried("boom", retry("it went off")), {}, error="Boom", took_s=0),
    Case(
        "Retry: a timeout is retried like any error",
        retried("slow_once", retry("States.Timeout"), TimeoutSeconds=2),
        {},
        2,
        took_s=3,
    ),
]

CATCH = [
    Case(
        "Catch: goes to its Next with the error",
        caught("boom", catch("Boom", to="E")),
        {},
        {"Error": "Boom", "Cause": "it went off"},
    ),
    Case(
        "Catch: ResultPath keeps the input",
        caught("boom", catch("Boom", to="E", ResultPath="$.err")),
        {"a": 1},
        {"a": 1, "err": {"Error": "Boom", "Cause": "it went off"}},
    ),
    Case("Catch: ResultPath of null discards the error", caught("boom", catch("Boom", to="E", **KEEP)), {"a": 1}, {"a": 1}),
    Case(
        "Catch: gets the raw input of the state",
        caught("boom", catch("Boom", to="E", ResultPath="$.err"), InputPath="$.a", OutputPath="$.nowhere"),
        {"a": 1},
        {"a": 1, "err": {"Error": "Boom", "Cause": "it went off"}},
    ),
    Case(
        "Catch: the first catcher that knows the error counts",
        caught("boom", catch("Other", to="N"), catch("Boom", to="E", **KEEP), catch("States.ALL", to="N")),
        1,
        1,
    ),
    Case("Catch: States.ALL is a wildcard", caught("boom", catch("States.ALL", to="E", **KEEP)), 1, 1),
    Case(
        "Catch: States.TaskFailed stands for any error of a task",
        caught("other", catch("States.TaskFailed", to="E", **KEEP)),
        1,
        1,
    ),
    Case("Catch: an error nobody names fails the execution", caught("boom", catch("Other", to="E")), {}, error="Boom"),
    Case("Catch: no error, no catch", caught("echo", catch("States.ALL", to="E")), {}, "fine"),
    Case(
        "Catch: works beside Retry, after it",
        caught("boom", catch("Boom", to="E", **KEEP), Retry=[retry("Boom", MaxAttempts=2)]),
        1,
        1,
        took_s=3,
    ),
    Case(
        "Catch: works beside a Retry that does not know the error",
        caught("boom", catch("Boom", to="E", **KEEP), Retry=[retry("Other")]),
        1,
        1,
        took_s=0,
    ),
    Case(
        "Catch: a success after retries is not caught", caught("flaky", catch("Boom", to="E"), Retry=[retry("Boom")]), {}, "fine"
    ),
    Case(
        "Catch: States.ParameterPathFailure",
        caught("echo", catch("States.ParameterPathFailure", to="E", **KEEP), Parameters={"x.$": "$.nowhere"}),
        {"a": 1},
        {"a": 1},
    ),
    Case(
        "Catch: States.IntrinsicFailure",
        caught("echo", catch("States.IntrinsicFailure", to="E", **KEEP), Parameters={"x.$": "States.MathAdd('1', 2)"}),
        {"a": 1},
        {"a": 1},
    ),
    Case(
        "Catch: States.ResultPathMatchFailure",
        caught("echo", catch("States.ResultPathMatchFailure", to="E", **KEEP), ResultPath="$.a.b"),
        {"a": 1},
        {"a": 1},
    ),
    Case(
        "Catch: a document that does not fit its data cannot be caught",
        caught("echo", catch("States.ALL", to="E"), InputPath="$.nowhere"),
        {},
        error="States.Runtime",
    ),
    Case(
        "Catch: may lead back to the state itself",
        machine("T", T=task("flaky", Next="E", Catch=[catch("Boom", to="T", **KEEP)]), E=E),
        1,
        "worked",
    ),
    Case(
        "Catch: a Fail state after it",
        machine(
            "T",
            T=task("boom", Next="E", Catch=[catch("Boom", to="F")]),
            F={"Type": "Fail", "ErrorPath": "$.Error", "CausePath": "States.Format('was: {}', $.Cause)"},
            E=E,
        ),
        {},
        error="Boom",
        cause="was: it went off",
    ),
    Case(
        "Catch: in a branch, before that of the Parallel",
        machine(
            "P",
            P={
                "Type": "Parallel",
                "Next": "E",
                "Catch": [catch("Boom", to="E", ResultPath="$.outer")],
                "Branches": [machine("T", T=task("boom", Next="X", Catch=[catch("Boom", to="X", ResultPath="$.inner")]), X=E)],
            },
            E=E,
        ),
        {},
        [{"inner": {"Error": "Boom", "Cause": "it went off"}}],
    ),
    Case(
        "Catch: of a Parallel, for what a branch does not catch",
        machine(
            "P",
            P={
                "Type": "Parallel",
                "Next": "E",
                "Catch": [catch("Boom", to="E", ResultPath="$.outer")],
                "Branches": [machine("T", T=task("boom", Next="X", Catch=[catch("Other", to="X")]), X=E)],
            },
            E=E,
        ),
        {},
        {"outer": {"Error": "Boom", "Cause": "it went off"}},
    ),
    Case(
        "Catch: of a Map, and the items that still run are stopped",
        machine(
            "M",
            M={
                "Type": "Map",
                "Next": "E",
                "Catch": [catch("States.ALL", to="E", **KEEP)],
                "ItemProcessor": machine(
                    "C",
                    C={"Type": "Choice", "Choices": [{"Variable": "$", "NumericEquals": 1, "Next": "B"}], "Default": "S"},
                    B=task("boom"),
                    S=task("slow"),
                ),
            },
            E=E,
        ),
        [0, 1],
        [0, 1],
        took_s=0,
    ),
    Case(
        "Catch: NoChoiceMatched of a branch, by the Parallel",
        machine(
            "P",
            P={
                "Type": "Parallel",
                "Next": "E",
                "Catch": [catch("States.NoChoiceMatched", to="E", **KEEP)],
                "Branches": [
                    machine("C", C={"Type": "Choice", "Choices": [{"Variable": "$", "IsNull": True, "Next": "X"}]}, X=E)
                ],
            },
            E=E,
        ),
        1,
        1,
    ),
]

TIME = [
    Case("TimeoutSeconds: fires", machine("T", T=task("slow", TimeoutSeconds=2)), {}, error="States.Timeout", took_s=2),
    Case("TimeoutSeconds: a task in time is not disturbed", machine("T", T=task("slow", TimeoutSeconds=6)), {}, "slow", took_s=5),
    Case(
        "TimeoutSeconds: is caught as States.Timeout",
        caught("slow", catch("States.Timeout", to="E", **KEEP), TimeoutSeconds=1),
        1,
        1,
        took_s=1,
    ),
    Case(
        "TimeoutSeconds: is not caught as States.TaskFailed",
        caught("slow", catch("States.TaskFailed", to="E"), TimeoutSeconds=1),
        1,
        error="States.Timeout",
    ),
    Case(
        "TimeoutSeconds: each try has its own",
        machine("T", T=task("slow", TimeoutSeconds=2, Retry=[retry("States.Timeout", MaxAttempts=1, IntervalSeconds=3)])),
        {},
        error="States.Timeout",
        took_s=7,
    ),
    Case(
        "TimeoutSeconds: a late result does not disturb what came after",
        machine(
            "T",
            T=task("slow", TimeoutSeconds=1, Next="W", Catch=[catch("States.Timeout", to="W", ResultPath="$.err")]),
            W={"Type": "Wait", "Seconds": 10, "Next": "X"},
            X=task("double", InputPath="$.n", ResultPath="$.n"),
        ),
        {"n": 1},
        {"n": 2, "err": {"Error": "States.Timeout", "Cause": "it took longer than TimeoutSeconds"}},
        took_s=11,
    ),
    Case(
        "TimeoutSecondsPath: fires",
        machine("T", T=task("slow", TimeoutSecondsPath="$.t")),
        {"t": 3},
        error="States.Timeout",
        took_s=3,
    ),
    Case(
        "TimeoutSecondsPath: to what is no number",
        machine("T", T=task("slow", TimeoutSecondsPath="$.t")),
        {"t": "x"},
        error="States.Runtime",
    ),
    Case(
        "HeartbeatSeconds: a silent task fails",
        machine("T", T=task("slow", HeartbeatSeconds=2, TimeoutSeconds=60)),
        {},
        error="States.HeartbeatTimeout",
        took_s=2,
    ),
    Case(
        "HeartbeatSeconds: a task that beats goes on", machine("T", T=task("beating", HeartbeatSeconds=2)), {}, "alive", took_s=5
    ),
    Case(
        "HeartbeatSecondsPath: a silent task fails",
        machine("T", T=task("slow", HeartbeatSecondsPath="$.h")),
        {"h": 1},
        error="States.HeartbeatTimeout",
        took_s=1,
    ),
    Case(
        "HeartbeatSeconds: is caught as States.HeartbeatTimeout",
        caught("slow", catch("States.HeartbeatTimeout", to="E", **KEEP), HeartbeatSeconds=2),
        1,
        1,
    ),
    Case(
        "HeartbeatSeconds: is caught as States.Timeout",
        caught("slow", catch("States.Timeout", to="E", **KEEP), HeartbeatSeconds=2),
        1,
        1,
    ),
]

EXTENDED = [
    Case(
        "Extended: PotentialNext, and the task does not choose",
        machine(
            "T",
            T=task("echo", Next="A", PotentialNext=["B"]),
            A={"Type": "Pass", "Result": "a", "End": True},
            B={"Type": "Pass", "End": True},
        ),
        {},
        "a",
        dialect="extended",
    ),
    Case(
        "Extended: PotentialNext, and the task chooses",
        machine(
            "T",
            T=task("echo", Next="A", PotentialNext=["B"]),
            A={"Type": "Pass", "Result": "a", "End": True},
            B={"Type": "Pass", "End": True},
        ),
        {"lamina:next": "B", "value": 5},
        5,
        dialect="extended",
    ),
    Case(
        "Extended: PotentialNext, and the task chooses something else",
        machine(
            "T", T=task("echo", Next="A", PotentialNext=["B"]), A={"Type": "Pass", "End": True}, B={"Type": "Pass", "End": True}
        ),
        {"lamina:next": "A"},
        error="States.Runtime",
        dialect="extended",
    ),
    Case(
        "Extended: fields of KNIX that change nothing here",
        {"EnableCheckpoints": True, "AllowImmediateMessages": False, **machine("T", T=task("double", SessionFunction=False))},
        2,
        4,
        dialect="extended",
    ),
]

CASES = [*RETRY, *CATCH, *TIME, *EXTENDED]
