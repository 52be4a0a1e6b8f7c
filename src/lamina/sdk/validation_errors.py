"""What msgspec finds wrong with an input, as an error of the caller: the field by its full name, its value, and what to send.

msgspec names types and places in a notation of its own (``Expected `int`, got `str` - at `$.corners[0].x` ``). A client knows
fields: `shape.corners.0.x: 'one' is text where a whole number is needed`.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

from lamina.errors import BadValue

WORDS: dict[type, str] = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    bytes: "bytes",
    type(None): "nothing",
}
"""What a value is, as JSON's users call it."""

_NEEDED = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "bytes": "base64",
    "datetime": "a time such as '2026-01-31T12:00:00Z'",
    "date": "a date such as '2026-01-31'",
    "time": "a time of day such as '12:00:00'",
    "duration": "a duration such as 'PT1H30M'",
    "uuid": "a UUID",
    "decimal": "a decimal number",
}
"""Words for the types that msgspec names."""
_FORMATS = {
    "RFC3339 encoded datetime": "datetime",
    "RFC3339 encoded date": "date",
    "RFC3339 encoded time": "time",
    "ISO8601 duration": "duration",
    "UUID": "uuid",
    "decimal string": "decimal",
    "base64 encoded string": "bytes",
}

_PARTS = re.compile(r"(?P<said>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `[^`]*`")
_INVALID = re.compile(r"Invalid (.*)")
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_UNKNOWN: Any = object()


def invalid_value(name: str, value: Any, error: Exception, choices: str = "") -> BadValue:
    """The error for the value of the parameter `name`. `choices`: what may be sent for it, where that can be listed."""
    parts = _PARTS.fullmatch(str(error))
    assert parts is not None, "any text has a first part"
    field, found = name, value
    for key, index in _STEP.findall(parts["path"] or ""):
        if index == "...":  # some value of an object: msgspec does not say which
            found = _UNKNOWN
            break
        field = f"{field}.{key or index}"
        found = _inner(found, key or int(index))
    if parts["key"]:
        return _error(field, f"its names: {_reason(parts['said'], _UNKNOWN)[0]}")
    if missing := _FIELD.fullmatch(parts["said"]):
        way = "is missing" if missing[1].startswith("missing") else "is no field of it"
        return _error(f"{field}.{missing[2]}", way)
    reason, hint = _reason(parts["said"], found)
    return _error(field, reason, choices or hint)


def field_of(name: str, error: Exception) -> str:
    """The field of the parameter `name` that an error is about."""
    parts = _PARTS.fullmatch(str(error))
    assert parts is not None, "any text has a first part"
    return ".".join([name, *(key or index for key, index in _STEP.findall(parts["path"] or "") if index != "...")])


def _error(field: str, reason: str, hint: str = "") -> BadValue:
    said = f"{field} {reason}" if reason.startswith("is ") else f"{field}: {reason}"
    return BadValue(said, hint=hint, fields=[(field, reason)])


def _reason(said: str, value: Any) -> tuple[str, str]:
    """What is wrong with the value, and what to send."""
    shown = "" if value is _UNKNOWN else reprlib.repr(value)
    if expected := _EXPECTED.fullmatch(said):
        needed = " or ".join(_NEEDED.get(kind, kind) for kind in expected[1].split(" | "))
        told = "a value" if value is _UNKNOWN else f"{shown} is {WORDS[type(value)]}" if type(value) in WORDS else shown
        return f"{told} where {needed} is needed", f"send {needed}"
    invalid = _INVALID.fullmatch(said)
    if invalid and invalid[1] in _FORMATS:
        needed = _NEEDED[_FORMATS[invalid[1]]]
        return f"{shown or 'a value'} is no{needed[1:] if needed.startswith('a ') else f' {needed}'}", f"send {needed}"
    return (f"{said}, not {shown}" if shown and said.startswith("Expected") and shown not in said else said), ""


def _inner(value: Any, key: str | int) -> Any:
    try:
        return value[key]
    except (LookupError, TypeError):  # an object, in process
        return getattr(value, str(key), _UNKNOWN)
