"""Compiler from a document to the internal flow. Structure becomes nodes; what concerns data travels along in `data`.

A scope of such a flow has one token and one value, so every node asks before it starts, and those with results again
when they have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.asl.document import task_resource, waits_for_token
from lamina.asl.fields import Dialect
from lamina.asl.lint import check
from lamina.core.workflow.error_policy import Catcher, ErrorPolicy, Retrier
from lamina.core.workflow.flow import Choice, Each, Fail, Flow, Node, Parallel, Pass, Succeed, Task, Wait
from lamina.types import Slo

INNER = ("Branches", "Iterator", "ItemProcessor")
DEFAULT_SLO = Slo(timeout_us=100_000_000 * 1_000_000)
"""A state machine may wait for years; a shorter time limit has to be asked for."""

Function = tuple[str, tuple[str, ...] | None]
"""What a Resource stands for: the name of the function, and its parameters (None: it takes the input as one value)."""


def compile_flow(
    document: dict[str, Any],
    name: str,
    function: Callable[[str], Function],
    *,
    dialect: Dialect = "strict",
    slo: Slo = DEFAULT_SLO,
    source: str = "",
) -> Flow:
    """Compile a document; `function` resolves a Resource. An invalid document raises `BadDocument` with all problems."""
    check(document, dialect, source)
    flow = _Compiler(function).machine(document, name, slo)
    flow.check()
    return flow


class _Compiler:
    def __init__(self, function: Callable[[str], Function]) -> None:
        self._function = function

    def machine(self, document: dict[str, Any], name: str, slo: Slo = DEFAULT_SLO) -> Flow:
        nodes = {key: self._node(key, state) for key, state in document["States"].items()}
        fields = {key: value for key, value in document.items() if key not in ("States", "StartAt")}
        timeout_us = fields.get("TimeoutSeconds", 0) * 1_000_000
        return Flow(name, nodes, (document["StartAt"],), slo, {"asl": fields}, timeout_us)

    def _node(self, name: str, state: dict[str, Any]) -> Node:
        fields = {key: value for key, value in state.items() if key not in INNER}
        data = {"asl": fields}
        on = (state["Next"],) if "Next" in state else ()
        match state["Type"]:
            case "Task":
                target, params = self._function(task_resource(state))
                more = data if params is None else {**data, "params": list(params)}
                may = tuple(state.get("PotentialNext", ()))
                return Task(
                    *(name, target, on),
                    data=more,
                    error_policy=_guard(state),
                    resolves_data=True,
                    potential_next=may,
                    waits_for_report=waits_for_token(state),
                )
            case "Map":
                return self._map(name, state, on, data)
            case "Parallel":
                branches = tuple(self.machine(branch, f"{name}/{i}") for i, branch in enumerate(state["Branches"]))
                count = state.get("WaitForNumBranches", 0)
                wait_for = count[0] if isinstance(count, list) else count
                return Parallel(name, branches, on, wait_for=wait_for, data=data, error_policy=_guard(state), resolves_data=True)
            case "Choice":
                targets = [(rule["Next"],) for rule in state["Choices"]]
                if "Default" in state:
                    targets.append((state["Default"],))
                return Choice(name, tuple(targets), data=data)
            case "Wait":
                return Wait(name, on, duration_us=state.get("Seconds", 0) * 1_000_000, data=data, resolves_data=True)
            case "Succeed":
                return Succeed(name, data=data, resolves_data=True)
            case "Fail":
                return Fail(name, state.get("Error", ""), state.get("Cause", ""), data=data, resolves_data=True)
            case _:
                return Pass(name, on, data=data, resolves_data=True)

    def _map(self, name: str, state: dict[str, Any], on: tuple[str, ...], data: dict[str, Any]) -> Each:
        key = "ItemProcessor" if "ItemProcessor" in state else "Iterator"
        percentage = state.get("ToleratedFailurePercentage")
        return Each(
            name,
            self.machine(state[key], name),
            on,
            data={**data, "body": key},
            error_policy=_guard(state),
            resolves_data=True,
            max_concurrency=state.get("MaxConcurrency", 0),
            tolerated_failures=state.get("ToleratedFailureCount"),
            tolerated_failure_share=None if percentage is None else percentage / 100,
        )


def _guard(state: dict[str, Any]) -> ErrorPolicy:
    return ErrorPolicy(
        tuple(_retrier(entry) for entry in state.get("Retry", ())),
        tuple(Catcher(tuple(entry["ErrorEquals"]), (entry["Next"],)) for entry in state.get("Catch", ())),
        state.get("TimeoutSeconds", 0) * 1_000_000,
        state.get("HeartbeatSeconds", 0) * 1_000_000,
    )


def _retrier(entry: dict[str, Any]) -> Retrier:
    return Retrier(
        tuple(entry["ErrorEquals"]),
        entry.get("IntervalSeconds", 1) * 1_000_000,
        entry.get("MaxAttempts", 3),
        float(entry.get("BackoffRate", 2.0)),
        entry.get("MaxDelaySeconds", 0) * 1_000_000,
        entry.get("JitterStrategy", "NONE") == "FULL",
    )
