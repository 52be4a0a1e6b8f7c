"""Data semantics of states: payload templates, and the way from the raw input of a state to its output.

In a template a field named `x.$` is replaced by `x` with what its path or call gives.

Every function is pure: state, value and context in, value out, `StateError` where it fails. The server's data layer and
`lamina asl run` call the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl import timestamps
from lamina.asl.choice_rules import rule_holds
from lamina.asl.document import is_lambda_invoke
from lamina.asl.errors import INTRINSIC, NO_CHOICE, PARAMETER_PATH, RESULT_PATH, StateError, runtime_error
from lamina.asl.evaluation import Evaluation
from lamina.asl.intrinsics import ExpressionScope, IntrinsicError, evaluate, is_call, parse_call
from lamina.asl.paths import NoMatch, PathError, json_type_of, parse_path, put_at

SUFFIX = ".$"

MAX_MAP_ITEMS = 5_000
"""Of one Map state: its items begin in one go."""


def fill_template(template: Any, scene: ExpressionScope) -> Any:
    scene.at.budget.spend()
    if isinstance(template, list):
        return [fill_template(inner, scene) for inner in template]
    if not isinstance(template, dict):
        return template
    filled: dict[str, Any] = {}
    for key, value in template.items():
        if key.endswith(SUFFIX):
            filled[key.removesuffix(SUFFIX)] = evaluate_expression(value, scene)
        else:
            filled[key] = fill_template(value, scene)
    return filled


def evaluate_expression(text: str, scene: ExpressionScope) -> Any:
    """A path, or a call of an intrinsic function."""
    if is_call(text):
        return evaluate(parse_call(text), scene)
    try:
        return parse_path(text).find(scene.value, scene.at.context, scene.at.budget)
    except NoMatch as error:
        raise StateError(PARAMETER_PATH, str(error)) from None


def template_problems(template: Any, where: str) -> Iterator[tuple[str, str]]:
    """Problems of a template, whatever the data: where, and why."""
    if isinstance(template, list):
        for index, inner in enumerate(template):
            yield from template_problems(inner, f"{where}[{index}]")
    elif isinstance(template, dict):
        for key, value in template.items():
            at = f"{where}.{key}"
            if not key.endswith(SUFFIX):
                yield from template_problems(value, at)
            elif not isinstance(value, str):
                yield at, f"a field whose name ends in .$ must be a path or an intrinsic function, not {value!r}"
            elif key.removesuffix(SUFFIX) in template:
                yield at, f"stands beside {key.removesuffix(SUFFIX)!r}, which would be the same field"
            else:
                try:
                    parse_call(value) if is_call(value) else parse_path(value)
                except (PathError, IntrinsicError) as error:
                    yield at, str(error)


State = dict[str, Any]
NEXT_KEY = "lamina:next"
"""A task with PotentialNext says where to go with {"lamina:next": "State", "value": ...}."""


def effective_input(state: State, raw: Any, at: Evaluation) -> Any:
    """Effective input: InputPath, then Parameters."""
    value = _path(state, "InputPath", raw, at)
    if "Parameters" in state and state["Type"] != "Map":
        value = fill_template(state["Parameters"], ExpressionScope(value, at))
        return value.get("Payload", {}) if is_lambda_invoke(state) else value
    return value


def effective_output(state: State, raw: Any, result: Any, at: Evaluation) -> Any:
    """Output of a state: ResultSelector, then ResultPath into the raw input, then OutputPath."""
    if is_lambda_invoke(state):
        result = {"ExecutedVersion": "$LATEST", "Payload": result, "StatusCode": 200}
    if "ResultSelector" in state:
        result = fill_template(state["ResultSelector"], ExpressionScope(result, at))
    return _path(state, "OutputPath", _combine(state.get("ResultPath", "$"), raw, result), at)


def pass_output(state: State, raw: Any, at: Evaluation) -> Any:
    value = effective_input(state, raw, at)
    return effective_output(state, raw, state.get("Result", value), at)


def unchanged_output(state: State, raw: Any, at: Evaluation) -> Any:
    """Output of a state that changes nothing: InputPath and OutputPath."""
    return _path(state, "OutputPath", _path(state, "InputPath", raw, at), at)


def choose_rule(state: State, raw: Any, at: Evaluation) -> int:
    """Index of the first rule that holds; that of the Default, which comes after them, if none does."""
    value = _path(state, "InputPath", raw, at)
    for index, rule in enumerate(state["Choices"]):
        if rule_holds(rule, value, at):
            return index
    if "Default" not in state:
        raise StateError(NO_CHOICE, "no rule holds and there is no Default")
    return len(state["Choices"])


def wait_us(state: State, raw: Any, at: Evaluation, now_us: int) -> int:
    """Duration of a Wait state. `now_us` is the time of day, since 1970."""
    value = _path(state, "InputPath", raw, at)
    if "Seconds" in state:
        return int(state["Seconds"] * 1_000_000)
    if "SecondsPath" in state:
        return _seconds_at(state, "SecondsPath", value, at, least=0)
    text = state["Timestamp"] if "Timestamp" in state else _at(state["TimestampPath"], value, at, "TimestampPath")
    until_us = timestamps.parse_timestamp_us(text)
    if until_us is None:
        raise runtime_error(f"TimestampPath: {text!r} is no timestamp")
    return max(0, until_us - now_us)


def task_limits(state: State, raw: Any, at: Evaluation) -> tuple[int, ...]:
    """Timeout and heartbeat of a task in microseconds, where the data says them."""
    if "TimeoutSecondsPath" not in state and "HeartbeatSecondsPath" not in state:
        return ()
    value = _path(state, "InputPath", raw, at)
    found = [
        _seconds_at(state, field, value, at, least=1) if field in state else 0
        for field in ("TimeoutSecondsPath", "HeartbeatSecondsPath")
    ]
    return tuple(found)


def map_items(state: State, raw: Any, at: Evaluation) -> tuple[list[Any], list[Any], tuple[int, ...]]:
    """Items of a map, the input of each iteration, and (how many at once, how many may fail) where the data says so."""
    value = _path(state, "InputPath", raw, at)
    found = _at(state.get("ItemsPath", "$"), value, at, "ItemsPath")
    if not isinstance(found, list):
        raise runtime_error(f"ItemsPath: {state.get('ItemsPath', '$')} is a {json_type_of(found)}, and a Map needs an array")
    if len(found) > MAX_MAP_ITEMS:
        raise runtime_error(f"ItemsPath: {len(found)} items, and a Map takes {MAX_MAP_ITEMS} at a time")
    shape = state.get("ItemSelector", state.get("Parameters"))
    inputs = found
    if shape is not None:
        inputs = [fill_template(shape, ExpressionScope(value, at.of_item(index, item))) for index, item in enumerate(found)]
    return found, inputs, _map_limits(state, value, at, len(found))


def fail_error(state: State, raw: Any, at: Evaluation) -> tuple[str, str]:
    """Error and cause of a Fail state."""
    scene = ExpressionScope(raw, at)
    return _word(state, "Error", scene), _word(state, "Cause", scene)


def caught_value(catcher: dict[str, Any], raw: Any, error: str, cause: str) -> Any:
    """The value a catcher goes on with."""
    return _combine(catcher.get("ResultPath", "$"), raw, {"Error": error, "Cause": cause})


def dynamic_next(state: State, result: Any) -> tuple[int, Any]:
    """Where a task with PotentialNext sends its token (0: to Next), and with what."""
    potential = state.get("PotentialNext", [])
    if potential and isinstance(result, dict) and NEXT_KEY in result:
        to = result[NEXT_KEY]
        if to not in potential:
            raise runtime_error(f"PotentialNext: {to!r} is none of {', '.join(potential)}")
        return 1 + potential.index(to), result.get("value")
    return 0, result


# -------------------------------------------------------------------------------------------------------------------- parts


def _path(state: State, field: str, value: Any, at: Evaluation) -> Any:
    text = state.get(field, "$")
    return {} if text is None else _at(text, value, at, field)


def _at(text: str, value: Any, at: Evaluation, field: str) -> Any:
    try:
        return parse_path(text).find(value, at.context, at.budget)
    except NoMatch as error:
        raise runtime_error(f"{field}: {error}") from None


def _combine(path: str | None, raw: Any, result: Any) -> Any:
    if path is None:
        return raw
    try:
        return put_at(parse_path(path), raw, result)
    except NoMatch as error:
        raise StateError(RESULT_PATH, f"ResultPath: {error}") from None


def _seconds_at(state: State, field: str, value: Any, at: Evaluation, least: int) -> int:
    return _number_at(state[field], value, at, field, least, integer=False, unit=1_000_000)


def _number_at(text: str, value: Any, at: Evaluation, field: str, least: float, *, integer: bool = True, unit: int = 1) -> int:
    found = _at(text, value, at, field)
    if json_type_of(found) != "number" or (integer and found != int(found)) or not least <= found <= 1e9:
        raise runtime_error(f"{field}: {text} is {found!r}, which is no number from {least} on")
    return int(found * unit)


def _map_limits(state: State, value: Any, at: Evaluation, count: int) -> tuple[int, ...]:
    fields = ("MaxConcurrencyPath", "ToleratedFailureCountPath", "ToleratedFailurePercentagePath")
    if not any(field in state for field in fields):
        return ()
    at_once = state.get("MaxConcurrency", 0)
    if "MaxConcurrencyPath" in state:
        at_once = _number_at(state["MaxConcurrencyPath"], value, at, "MaxConcurrencyPath", 0)
    spare: list[int] = []
    if "ToleratedFailureCountPath" in state:
        field = "ToleratedFailureCountPath"
        spare.append(_number_at(state[field], value, at, field, 0))
    elif "ToleratedFailureCount" in state:
        spare.append(state["ToleratedFailureCount"])
    percent = state.get("ToleratedFailurePercentage")
    if "ToleratedFailurePercentagePath" in state:
        field = "ToleratedFailurePercentagePath"
        percent = _at(state[field], value, at, field)
        if json_type_of(percent) != "number" or not 0 <= percent <= 100:
            raise runtime_error(f"{field}: {percent!r} is no percentage")
    if percent is not None:
        spare.append(int(count * percent / 100 + 1e-9))
    return (at_once, min(spare, default=-1))


def _word(state: State, field: str, scene: ExpressionScope) -> str:
    if f"{field}Path" not in state:
        return str(state.get(field, ""))
    try:
        found = evaluate_expression(state[f"{field}Path"], scene)
    except StateError as error:
        if error.name in (PARAMETER_PATH, INTRINSIC):
            raise runtime_error(f"{field}Path: {error.cause}") from None
        raise
    if not isinstance(found, str):
        raise runtime_error(f"{field}Path: {state[f'{field}Path']} is a {json_type_of(found)}, and must be a string")
    return found
