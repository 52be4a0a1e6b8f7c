"""Linter of the fields of each state type; transitions and inner machines are checked where the other states are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl import fields, template, timestamps
from lamina.asl.lint_fields import (
    Finding,
    expression_problems,
    is_int_between,
    path_problems,
    reference_problems,
    seconds_problems,
    text_problems,
)
from lamina.asl.paths import json_type_of

_WAYS_TO_WAIT = ("Seconds", "SecondsPath", "Timestamp", "TimestampPath")


def data_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    """Problems of input and output processing, alike for all state types."""
    for key in ("InputPath", "OutputPath"):
        if state.get(key) is not None:
            yield from path_problems(state[key], f"{path}.{key}", "Input and Output Processing")
    if state.get("ResultPath") is not None:
        yield from reference_problems(state["ResultPath"], f"{path}.ResultPath", "ResultPath", writes=True)
    for key in ("Parameters", "ResultSelector", "ItemSelector"):
        if key in state:
            for at, message in template.template_problems(state[key], f"{path}.{key}"):
                yield at, "Payload Template", message
    if "ResultSelector" in state and not isinstance(state["ResultSelector"], dict):
        yield f"{path}.ResultSelector", "Payload Template", "a ResultSelector is an object"


def task_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    clause = "Task State: timeouts"
    if not isinstance(state.get("Resource"), str) or not state["Resource"]:
        yield f"{path}.Resource", "Task State", "Resource must be a text that names what to call"
    for name in ("Timeout", "Heartbeat"):
        key, other = f"{name}Seconds", f"{name}SecondsPath"
        yield from seconds_problems(state, key, path, clause)
        if other in state:
            yield from reference_problems(state[other], f"{path}.{other}", clause)
        if key in state and other in state:
            yield f"{path}.{other}", clause, f"{key} and {other} exclude each other"
    timeout, heartbeat = state.get("TimeoutSeconds"), state.get("HeartbeatSeconds")
    if isinstance(timeout, int) and isinstance(heartbeat, int) and heartbeat >= timeout:
        yield f"{path}.HeartbeatSeconds", clause, "must be smaller than TimeoutSeconds"
    if not isinstance(state.get("PotentialNext", []), list):
        yield f"{path}.PotentialNext", "Task State: PotentialNext", "must be an array of state names"


def fail_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    for key in ("Error", "Cause"):
        yield from text_problems(state, key, path, "Fail State")
        other = f"{key}Path"
        if other in state:
            if key in state:
                yield f"{path}.{other}", "Fail State", f"{key} and {other} exclude each other"
            yield from expression_problems(state[other], f"{path}.{other}", "Fail State")


def wait_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    clause = "Wait State"
    given = [key for key in _WAYS_TO_WAIT if key in state]
    if len(given) != 1:
        yield path, clause, f"needs exactly one of {', '.join(_WAYS_TO_WAIT)}, and has {given or 'none'}"
    if "Seconds" in state and not is_int_between(state["Seconds"], 0, fields.MAX_SECONDS):
        yield f"{path}.Seconds", clause, f"must be an integer from 0 on, not {state['Seconds']!r}"
    if "Timestamp" in state and timestamps.parse_timestamp_us(state["Timestamp"]) is None:
        yield f"{path}.Timestamp", clause, f"{state['Timestamp']!r} is no timestamp such as 2026-03-14T01:59:00Z"
    for key in ("SecondsPath", "TimestampPath"):
        if key in state:
            yield from reference_problems(state[key], f"{path}.{key}", clause)


def quorum_problems(state: dict[str, Any], path: str, branches: int) -> Iterator[Finding]:
    """Problems of WaitForNumBranches: how many branches of a parallel are waited for."""
    count = said = state.get("WaitForNumBranches", branches)
    if isinstance(count, list) and len(count) == 1:
        count = count[0]
    if not is_int_between(count, 1, branches):
        message = f"must be one number from 1 to {branches}, not {said!r}"
        yield f"{path}.WaitForNumBranches", "Parallel State: WaitForNumBranches", message


def map_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    clause = "Map State"
    if "ItemSelector" in state and "Parameters" in state:
        yield f"{path}.Parameters", clause, "ItemSelector and Parameters exclude each other"
    if "ItemsPath" in state:
        yield from path_problems(state["ItemsPath"], f"{path}.ItemsPath", clause)
    for key, most in (("MaxConcurrency", 10**9), ("ToleratedFailureCount", 10**9), ("ToleratedFailurePercentage", 100)):
        if key in state and f"{key}Path" in state:
            yield f"{path}.{key}Path", clause, f"{key} and {key}Path exclude each other"
        if key in state:
            value = state[key]
            whole = key != "ToleratedFailurePercentage"
            if json_type_of(value) != "number" or not 0 <= value <= most or (whole and not isinstance(value, int)):
                yield f"{path}.{key}", clause, f"must be a number from 0 to {most}, not {value!r}"
        if f"{key}Path" in state:
            yield from reference_problems(state[f"{key}Path"], f"{path}.{key}Path", clause)
