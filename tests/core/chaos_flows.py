"""Flows with everything that can wait, fail, be tried again, be caught or be cancelled."""

from __future__ import annotations

from lamina.core.workflow.error_policy import Catcher, ErrorPolicy, Retrier
from lamina.core.workflow.flow import Choice, Each, Fail, Flow, Node, Parallel, Pass, Succeed, Task, Wait

ALL = ("States.ALL",)
AGAIN = Retrier(("Boom", "States.Timeout"), 3_000, 2, 2.0, 0, True)
PATIENT = ErrorPolicy(retry=(AGAIN, Retrier(ALL, 500, 1)), timeout_us=40_000)


def flow(name: str, *nodes: Node, start: tuple[str, ...] = (), timeout_us: int = 0) -> Flow:
    return Flow(name, {node.name: node for node in nodes}, start or (nodes[0].name,), timeout_us=timeout_us)


def one(name: str, function: str, **more: object) -> Flow:
    return flow(name, Task("x", function, **more))  # type: ignore[arg-type]


GUARDED_FLOWS = (
    flow(
        "guarded",
        Task(
            "a",
            "f0",
            ("b",),
            error_policy=ErrorPolicy((AGAIN,), (Catcher(("Boom",), ("z",)), Catcher(ALL, ("w",))), 30_000, 10_000),
        ),
        Task("b", "f1", error_policy=PATIENT),
        Wait("w", ("z",), duration_us=20_000),
        Task("z", "f2"),
    ),
    flow(
        "race",
        Parallel("p", (one("l", "f0"), one("r", "f1", error_policy=PATIENT), one("s", "f2")), ("z",), wait_for=1),
        Task("z", "f3"),
    ),
    flow(
        "quorum",
        Parallel(
            "p",
            (one("l", "f0"), flow("m", Wait("w", ("x",), duration_us=5_000), Task("x", "f1")), one("s", "f2")),
            ("z",),
            wait_for=2,
            error_policy=ErrorPolicy((Retrier(ALL, 1_000, 1),), (Catcher(ALL, ("z",)),), timeout_us=100_000),
        ),
        Pass("z"),
    ),
    flow(
        "tolerant",
        Each("e", one("body", "f1", error_policy=ErrorPolicy((AGAIN,))), ("z",), max_concurrency=2, tolerated_failures=1),
        Task("z", "f2"),
    ),
    flow(
        "tolerant-part",
        Each(
            "e",
            flow("body", Each("i", one("inner", "f3"), ("y",), tolerated_failure_share=0.5), Pass("y")),
            max_concurrency=1,
            tolerated_failures=0,
        ),
    ),
    flow(
        "caught-map",
        Each(
            "e",
            one("body", "f2"),
            ("z",),
            max_concurrency=3,
            error_policy=ErrorPolicy((Retrier(("Boom",), 2_000, 1),), (Catcher(ALL, ("z",)),)),
        ),
        Pass("z"),
    ),
    flow(
        "ends",
        Parallel(
            "p",
            (
                flow("well", Task("x", "f0", ("s",)), Task("y", "f1"), Succeed("s"), start=("x", "y")),
                flow("badly", Choice("c", (("d",), ("x",))), Fail("d", "Bad"), Task("x", "f2")),
            ),
            error_policy=ErrorPolicy(catch=(Catcher(("Bad",), ("z",)),)),
            next=("z",),
        ),
        Task("z", "f3"),
    ),
    flow(
        "asking",
        Pass("p", ("t",), resolves_data=True),
        Task("t", "f0", ("q",), error_policy=PATIENT, resolves_data=True, potential_next=("w",)),
        Parallel(
            "q",
            (
                flow("l", Task("x", "f1", ("s",), resolves_data=True), Succeed("s", resolves_data=True)),
                flow("r", Choice("c", (("d",), ("y",))), Fail("d", resolves_data=True), Pass("y", resolves_data=True)),
            ),
            ("again",),
            error_policy=ErrorPolicy((Retrier(("Bad",), 1_000, 1),), (Catcher(ALL, ("w",)),)),
            resolves_data=True,
        ),
        Wait("w", ("again",), resolves_data=True),
        Choice("again", (("t",), ("e",))),
        Each(
            "e",
            flow("body", Wait("w", ("x",), resolves_data=True), Task("x", "f3", resolves_data=True)),
            (),
            resolves_data=True,
            max_concurrency=2,
            tolerated_failures=2,
        ),
    ),
    flow("short", Task("a", "f0", ("b",)), Task("b", "f1"), timeout_us=25_000),
    flow(
        "twice-guarded",
        Task("a", "f0", ("e",)),
        Task("b", "f1", ("e",)),
        Parallel("e", (one("l", "f2"), one("r", "f3")), ("w",), wait_for=1, error_policy=ErrorPolicy((AGAIN,))),
        Wait("w", ("z",), duration_us=3_000),
        Task("z", "f2", error_policy=PATIENT),
        start=("a", "b"),
    ),
)
