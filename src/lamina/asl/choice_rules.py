"""Choice rules: comparisons of one variable with a constant or with another place, and And, Or, Not of such.

Values of another type than the comparison is for are simply not equal, not less and not more; a variable that is not
there is an error, except to IsPresent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lamina.asl import timestamps
from lamina.asl.errors import runtime_error
from lamina.asl.evaluation import Evaluation
from lamina.asl.paths import JsonPath, NoMatch, json_type_of, parse_path

_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "Equals": operator.eq,
    "LessThan": operator.lt,
    "GreaterThan": operator.gt,
    "LessThanEquals": operator.le,
    "GreaterThanEquals": operator.ge,
}
_COMPARE = {
    **{f"{kind}{order}": (kind, order) for kind in ("String", "Numeric", "Timestamp") for order in _ORDERS},
    "BooleanEquals": ("Boolean", "Equals"),
}
WITH_CONSTANT = (*_COMPARE, "StringMatches")
WITH_PATH = tuple(f"{name}Path" for name in _COMPARE)
TESTS = ("IsNull", "IsPresent", "IsNumeric", "IsString", "IsBoolean", "IsTimestamp")
COMPARATORS = (*WITH_CONSTANT, *WITH_PATH, *TESTS)
COMBINED = ("And", "Or", "Not")


def rule_holds(rule: dict[str, Any], value: Any, at: Evaluation) -> bool:
    at.budget.spend()
    if "And" in rule:
        return all(rule_holds(inner, value, at) for inner in rule["And"])
    if "Or" in rule:
        return any(rule_holds(inner, value, at) for inner in rule["Or"])
    if "Not" in rule:
        return not rule_holds(rule["Not"], value, at)
    name = next(key for key in rule if key in COMPARATORS)
    wanted = rule[name]
    variable = parse_path(rule["Variable"])
    if name == "IsPresent":
        return _is_present(variable, value, at) is bool(wanted)
    try:
        found = variable.find(value, at.context, at.budget)
    except NoMatch as error:
        raise runtime_error(f"Choice: the variable {error}") from None
    if name in TESTS:
        return _test(name, found) is bool(wanted)
    if name == "StringMatches":
        return isinstance(found, str) and matches(wanted, found)
    if name in WITH_PATH:
        try:
            wanted = parse_path(wanted).find(value, at.context, at.budget)
        except NoMatch as error:
            raise runtime_error(f"Choice: {name}: {error}") from None
    kind, order = _COMPARE[name.removesuffix("Path")]
    return _compare(kind, order, found, wanted)


def has_compared_type(kind: str, value: Any) -> bool:
    """Whether a value has the type of a comparison."""
    if kind == "Timestamp":
        return timestamps.parse_timestamp_us(value) is not None
    return json_type_of(value) == {"String": "string", "Numeric": "number", "Boolean": "boolean"}[kind]


def compared_type(name: str) -> str:
    """Type of a comparator: String, Numeric, Timestamp or Boolean."""
    return _COMPARE[name.removesuffix("Path")][0]


def _compare(kind: str, order: str, left: Any, right: Any) -> bool:
    if not (has_compared_type(kind, left) and has_compared_type(kind, right)):
        return False
    if kind == "Timestamp":
        left, right = timestamps.parse_timestamp_us(left), timestamps.parse_timestamp_us(right)
    return bool(_ORDERS[order](left, right))


def _is_present(path: JsonPath, value: Any, at: Evaluation) -> bool:
    try:
        found = path.find(value, at.context, at.budget)
    except NoMatch:
        return False
    return path.is_reference or bool(found)


def _test(name: str, value: Any) -> bool:
    if name == "IsTimestamp":
        return timestamps.parse_timestamp_us(value) is not None
    kinds = {"IsNull": "null", "IsNumeric": "number", "IsString": "string", "IsBoolean": "boolean"}
    return json_type_of(value) == kinds[name]


def matches(pattern: str, text: str) -> bool:
    r"""StringMatches: `*` is any characters, `\*` a star and `\\` a backslash. Without backtracking: no pattern can take long."""
    first, *others = _literal_parts(pattern)
    if not others:
        return text == first
    *middle, last = others
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


@lru_cache(maxsize=1024)
def _literal_parts(pattern: str) -> tuple[str, ...]:
    """Literal parts between the stars."""
    parts, at = [""], 0
    while at < len(pattern):
        if pattern[at] == "*":
            parts.append("")
        else:
            at += pattern[at] == "\\" and pattern[at + 1 : at + 2] in ("*", "\\")
            parts[-1] += pattern[at]
        at += 1
    return tuple(parts)
