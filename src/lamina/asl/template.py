"""Payload templates: JSON in which a field named `x.$` is replaced by `x` with what its path or call gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl.errors import PARAMETER_PATH, StateError
from lamina.asl.intrinsics import ExpressionScope, IntrinsicError, evaluate, is_call, parse_call
from lamina.asl.paths import NoMatch, PathError, parse_path

SUFFIX = ".$"


def fill_template(template: Any, scene: ExpressionScope) -> Any:
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
        return parse_path(text).find(scene.value, scene.context)
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
