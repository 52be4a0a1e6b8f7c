"""Conformance cases: a case names its clause, a document, an input and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lamina.asl.compile import compile_flow
from lamina.asl.document import resolve_resource, resources_of
from lamina.asl_local_run import ExecutionOutcome, LocalStateMachine

BEGAN = "2026-03-14T01:59:00.000Z"
BEGAN_US = 1_773_453_540_000_000


@dataclass(frozen=True)
class Case:
    clause: str  #: of the specification, and what of it
    document: dict[str, Any]
    given: Any = field(default_factory=dict)
    want: Any = None
    error: str = ""  #: the execution must fail with this name
    cause: str | None = None
    took_s: float | None = None  #: of virtual time
    dialect: str = "strict"

    def __str__(self) -> str:
        return self.clause


def machine(start: str, **states: dict[str, Any]) -> dict[str, Any]:
    return {"StartAt": start, "States": states}


def one(**state: Any) -> dict[str, Any]:
    """A machine of one state."""
    end = {} if state["Type"] in ("Succeed", "Fail", "Choice") else {"End": True}
    return machine("S", S={**state, **end})


def task(resource: str, **more: Any) -> dict[str, Any]:
    state = {"Type": "Task", "Resource": resource, **more}
    return state if "Next" in state else {**state, "End": True}


def retry(*errors: str, **more: Any) -> dict[str, Any]:
    return {"ErrorEquals": list(errors), **more}


def catch(*errors: str, to: str, **more: Any) -> dict[str, Any]:
    return {"ErrorEquals": list(errors), "Next": to, **more}


class Boom(Exception):
    pass


class Other(Exception):
    pass


def tasks() -> dict[str, Callable[..., Any]]:
    """The functions documents may call; those that count begin anew for each run."""
    calls: dict[str, int] = {}

    def count(name: str) -> int:
        calls[name] = calls.get(name, 0) + 1
        return calls[name]

    def boom(_: Any) -> Any:
        raise Boom("it went off")

    def other(_: Any) -> Any:
        raise Other("another one")

    def flaky(given: Any) -> Any:
        """Fails twice, then works."""
        if count("flaky") <= 2:
            raise Boom(f"try {calls['flaky']}")
        return "worked"

    def in_turn(_: Any) -> Any:
        """Boom, Other, Boom, Other, ..."""
        if count("in_turn") % 2:
            raise Boom("odd")
        raise Other("even")

    def slow(given: Any) -> Any:
        return "slow"

    def slow_once(given: Any) -> Any:
        slow_once.takes_s = 5.0 if count("slow_once") == 1 else 0.0  # type: ignore[attr-defined]
        return calls["slow_once"]

    def beating(given: Any) -> Any:
        return "alive"

    def for_seconds(given: Any) -> Any:
        for_seconds.takes_s = float(given)  # type: ignore[attr-defined]
        return given

    def odd_fails(given: Any) -> Any:
        if given % 2:
            raise Boom(f"{given} is odd")
        return given

    slow.takes_s = 5.0  # type: ignore[attr-defined]
    beating.takes_s, beating.beats_s = 5.0, 1.0  # type: ignore[attr-defined]
    found = [boom, other, flaky, in_turn, slow, slow_once, beating, for_seconds, odd_fails]
    return timeless(
        {
            **{function.__name__: function for function in found},
            "echo": lambda given: given,
            "double": lambda given: given * 2,
            "calls": lambda _: count("calls"),
            "nothing": lambda _: None,
            "shape": lambda _: {"a": 1, "b": {"c": [10, 20]}},
        }
    )


def timeless(tasks: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Time of a task that states none: zero, however busy the machine is."""
    for task in tasks.values():
        if not hasattr(task, "takes_s"):
            task.takes_s = 0.0  # type: ignore[attr-defined]
    return tasks


def run(case: Case) -> ExecutionOutcome:
    functions = tasks()
    bound = {resource: resolve_resource(resource, functions) for resource in resources_of(case.document)}
    flow = compile_flow(case.document, "machine", lambda resource: (resource, None), dialect=case.dialect)  # type: ignore[arg-type]
    return LocalStateMachine(flow, bound, began_us=BEGAN_US, seed=7).run(case.given, "execution-1")
