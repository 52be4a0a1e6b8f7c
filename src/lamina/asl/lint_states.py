"""Linter of single states: their fields by type, Choice rules, Retry and Catch.

Transitions and inner machines are checked in `lint.py`, where the other states are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl import fields, timestamps
from lamina.asl.choice_rules import COMBINED, COMPARATORS, TESTS, WITH_PATH, compared_type, has_compared_type
from lamina.asl.document import is_lambda_invoke, waits_for_token
from lamina.asl.intrinsics import IntrinsicError, is_call, parse_call
from lamina.asl.paths import PathError, json_type_of, member_path, parse_path, parse_reference
from lamina.asl.state_semantics import template_problems

Finding = tuple[str, str, str]
"""Where, by which clause, and what is wrong."""


def is_int_between(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def text_problems(part: dict[str, Any], key: str, path: str, clause: str) -> Iterator[Finding]:
    if key in part and not isinstance(part[key], str):
        yield f"{path}.{key}", clause, f"{key} must be a string, not a {json_type_of(part[key])}"


def seconds_problems(part: dict[str, Any], key: str, path: str, clause: str) -> Iterator[Finding]:
    if key in part and not is_int_between(part[key], 1, fields.MAX_SECONDS):
        yield f"{path}.{key}", clause, f"must be a positive integer, not {part[key]!r}"


def path_problems(text: Any, at: str, clause: str) -> Iterator[Finding]:
    try:
        parse_path(text if isinstance(text, str) else "")
    except PathError as error:
        yield at, f"Paths; {clause}", str(error) if isinstance(text, str) else f"{text!r} is no path"


def reference_problems(text: Any, at: str, clause: str, *, writes: bool = False) -> Iterator[Finding]:
    clause = f"Reference Paths; {clause}"
    try:
        path = parse_reference(text if isinstance(text, str) else "")
    except PathError as error:
        yield at, clause, str(error) if isinstance(text, str) else f"{text!r} is no path"
    else:
        if writes and path.context:
            yield at, clause, "the context object cannot be written to"


def expression_problems(text: Any, at: str, clause: str) -> Iterator[Finding]:
    """Problems of a reference path, or an intrinsic function."""
    if isinstance(text, str) and is_call(text):
        try:
            parse_call(text)
        except IntrinsicError as error:
            yield at, f"Intrinsic Functions; {clause}", str(error)
    else:
        yield from path_problems(text, at, clause)


# ------------------------------------------------------------------------------------------------------- types of states


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
            for at, message in template_problems(state[key], f"{path}.{key}"):
                yield at, "Payload Template", message
    if "ResultSelector" in state and not isinstance(state["ResultSelector"], dict):
        yield f"{path}.ResultSelector", "Payload Template", "a ResultSelector is an object"


def task_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    clause = "Task State: timeouts"
    if not isinstance(state.get("Resource"), str) or not state["Resource"]:
        yield f"{path}.Resource", "Task State", "Resource must be a text that names what to call"
    elif waits_for_token(state) != _mentions_token(state.get("Parameters")):
        wrong = "waits for a task token, and its Parameters do not hand out $$.Task.Token"
        if not waits_for_token(state):
            wrong = "hands out $$.Task.Token, and does not wait for it; end the Resource in .waitForTaskToken"
        yield f"{path}.Parameters", "Task State", wrong
    elif is_lambda_invoke(state):
        parameters = state.get("Parameters")
        if not isinstance(parameters, dict) or not isinstance(parameters.get("FunctionName"), str):
            yield f"{path}.Parameters", "Task State", "lambda:invoke needs a FunctionName that is written in the document"
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


def _mentions_token(template: Any) -> bool:
    if isinstance(template, dict):
        return any(_mentions_token(value) for value in template.values())
    if isinstance(template, list):
        return any(map(_mentions_token, template))
    return isinstance(template, str) and "$$.Task.Token" in template


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


# ------------------------------------------- Choice rules: each tests one thing, and only the outermost says where to go


def choice_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    rules = state.get("Choices")
    if not isinstance(rules, list) or not rules:
        yield f"{path}.Choices", "Choice State", "Choices must be an array of at least one rule"
        return
    for index, rule in enumerate(rules):
        yield from _rule(rule, f"{path}.Choices[{index}]", outermost=True)


def _rule(rule: Any, path: str, *, outermost: bool) -> Iterator[Finding]:
    clause = "Choice State: rules"
    if not isinstance(rule, dict):
        yield path, clause, f"a rule is an object, not a {json_type_of(rule)}"
        return
    if not outermost and "Next" in rule:
        yield f"{path}.Next", clause, "a rule inside another must not say where to go"
    if "Condition" in rule:
        yield f"{path}.Condition", "Query language", "JSONata is not supported, and Condition belongs to it"
        return
    heads = [key for key in rule if key in COMBINED or key in COMPARATORS]
    if len(heads) != 1:
        yield path, clause, f"a rule has exactly one comparison, And, Or or Not, and this has {heads or 'none'}"
        return
    head = heads[0]
    known = {head, "Comment", *(("Next",) if outermost else ()), *(() if head in COMBINED else ("Variable",))}
    for key in rule.keys() - known - {"Next"}:
        yield f"{path}.{key}", clause, f"a rule has no field {key!r}"
    if head == "Not":
        yield from _rule(rule["Not"], f"{path}.Not", outermost=False)
    elif head in COMBINED:
        inner = rule[head]
        if not isinstance(inner, list) or not inner:
            yield f"{path}.{head}", clause, f"{head} must be an array of at least one rule"
            return
        for index, part in enumerate(inner):
            yield from _rule(part, f"{path}.{head}[{index}]", outermost=False)
    else:
        yield from _comparison(rule, head, path)


def _comparison(rule: dict[str, Any], head: str, path: str) -> Iterator[Finding]:
    clause = f"Choice State: {head}"
    if "Variable" not in rule:
        yield path, clause, "a comparison needs a Variable"
    else:
        yield from path_problems(rule["Variable"], f"{path}.Variable", clause)
    value = rule[head]
    if head in TESTS:
        if not isinstance(value, bool):
            yield f"{path}.{head}", clause, f"must be true or false, not {value!r}"
    elif head in WITH_PATH:
        yield from path_problems(value, f"{path}.{head}", clause)
    elif not (isinstance(value, str) if head == "StringMatches" else has_compared_type(compared_type(head), value)):
        kind = "String" if head == "StringMatches" else compared_type(head)
        yield f"{path}.{head}", clause, f"must be a {kind.lower()} to compare with, not {value!r}"


# ------------------------------------------------------------------------------------------------------- Retry and Catch


_RETRIER = {"ErrorEquals", "IntervalSeconds", "MaxAttempts", "BackoffRate", "MaxDelaySeconds", "JitterStrategy", "Comment"}
_CATCHER = {"ErrorEquals", "Next", "ResultPath", "Comment"}


def retry_problems(state: dict[str, Any], key: str, path: str) -> Iterator[Finding]:
    """Problems of `Retry` or `Catch`, except where catchers lead: that needs the other states."""
    clause = f"Errors: {key}"
    entries = state[key]
    if not isinstance(entries, list):
        yield f"{path}.{key}", clause, f"{key} is an array"
        return
    for index, entry in enumerate(entries):
        at = f"{path}.{key}[{index}]"
        if not isinstance(entry, dict):
            yield at, clause, "must be an object"
            continue
        yield from _errors(entry, at, clause, last=index == len(entries) - 1)
        yield from _retrier(entry, at, clause) if key == "Retry" else _catcher(entry, at, clause)


def _errors(entry: dict[str, Any], at: str, clause: str, *, last: bool) -> Iterator[Finding]:
    at = f"{at}.ErrorEquals"
    names = entry.get("ErrorEquals")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        yield at, clause, "ErrorEquals must be an array of at least one error name"
        return
    for name in names:
        if name.startswith("States.") and name not in fields.RESERVED_ERRORS:
            yield at, clause, f"names that begin with States. are reserved, and {name} is none of them"
    if "States.ALL" in names and len(names) > 1:
        yield at, clause, "States.ALL must stand alone"
    if "States.ALL" in names and not last:
        yield at, clause, "States.ALL must be in the last entry"


def _retrier(entry: dict[str, Any], at: str, clause: str) -> Iterator[Finding]:
    for key in sorted(entry.keys() - _RETRIER):
        yield member_path(at, key), clause, f"a retrier has no field {key!r}"
    interval = entry.get("IntervalSeconds", 1)
    if not is_int_between(interval, 1, fields.MAX_SECONDS):
        yield f"{at}.IntervalSeconds", clause, f"must be a positive integer, not {interval!r}"
    if not is_int_between(entry.get("MaxAttempts", 3), 0, fields.MAX_SECONDS):
        yield f"{at}.MaxAttempts", clause, f"must be an integer from 0 on, not {entry['MaxAttempts']!r}"
    rate = entry.get("BackoffRate", 2.0)
    if json_type_of(rate) != "number" or rate < 1:
        yield f"{at}.BackoffRate", clause, f"must be a number of at least 1.0, not {rate!r}"
    if "MaxDelaySeconds" in entry:
        delay = entry["MaxDelaySeconds"]
        if not is_int_between(delay, 1, fields.MAX_DELAY_SECONDS - 1):
            yield f"{at}.MaxDelaySeconds", clause, f"must be a positive integer below {fields.MAX_DELAY_SECONDS}, not {delay!r}"
        elif is_int_between(interval, 1, fields.MAX_SECONDS) and delay <= interval:
            yield f"{at}.MaxDelaySeconds", clause, "must be greater than IntervalSeconds"
    if entry.get("JitterStrategy", "NONE") not in ("FULL", "NONE"):
        yield f"{at}.JitterStrategy", clause, f"must be FULL or NONE, not {entry['JitterStrategy']!r}"


def _catcher(entry: dict[str, Any], at: str, clause: str) -> Iterator[Finding]:
    for key in sorted(entry.keys() - _CATCHER):
        if key in fields.JSONATA:
            yield member_path(at, key), "Query language", f"JSONata and variables are not supported, and {key} belongs to them"
        else:
            yield member_path(at, key), clause, f"a catcher has no field {key!r}"
