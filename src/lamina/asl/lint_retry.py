"""Linter of Retry and Catch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl import fields
from lamina.asl.lint_fields import Finding, is_int_between
from lamina.asl.paths import json_type_of, member_path

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
