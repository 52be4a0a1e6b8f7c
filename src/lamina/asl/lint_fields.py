"""Linter of single fields: texts, numbers and paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl import fields
from lamina.asl.intrinsics import IntrinsicError, is_call, parse_call
from lamina.asl.paths import PathError, json_type_of, parse_path, parse_reference

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
