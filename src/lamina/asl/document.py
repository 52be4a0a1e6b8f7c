"""State machine documents: parsing from JSON, their inner machines, and the functions their Resources stand for.

A binding names a Resource as it is written, or its short name: the last part of an ARN, without a version
(`arn:aws:lambda:eu-west-1:123456789012:function:resize:7` is `resize`), and what follows the last `/` or `:` of anything
else. As it is written comes first. A task of the integration `arn:aws:states:::lambda:invoke` calls the function that its
FunctionName names, with its Payload; its result is an object with that of the function as `Payload`, as elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from lamina.asl.errors import BadDocument, LintProblem
from lamina.errors import BadValue

T = TypeVar("T")

_INVOKE = re.compile(r"arn:[^:]*:states:[^:]*:[^:]*:lambda:invoke")
_LAMBDA = re.compile(r"arn:[^:]*:lambda:[^:]*:[^:]*:function:([^:]+)(?::[^:]+)?")


def parse_document(text: str | bytes, source: str = "") -> Any:
    """Parse a document from JSON; a duplicate name in one object is refused, since one of the two would be lost."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _DuplicateError as error:
        raise BadDocument([LintProblem("$", "JSON", str(error))], source) from None
    except (ValueError, RecursionError) as error:
        hint = "a state machine is one JSON object, with StartAt and States"
        raise BadDocument([LintProblem("$", "JSON", f"not JSON: {error}")], source, hint=hint) from None


class _DuplicateError(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1)
        raise _DuplicateError(f"{twice!r} stands twice in one object")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def resources_of(document: dict[str, Any]) -> list[str]:
    """Resources of all tasks of a valid document, once each, in order."""
    found: dict[str, None] = {}

    def walk(machine: dict[str, Any]) -> None:
        for state in machine["States"].values():
            if state["Type"] == "Task":
                found[task_resource(state)] = None
            for inner in inner_machines(state):
                walk(inner)

    walk(document)
    return list(found)


def inner_machines(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["Type"] == "Map":
        return [state["ItemProcessor"] if "ItemProcessor" in state else state["Iterator"]]
    return list(state["Branches"]) if state["Type"] == "Parallel" else []


TOKEN_SUFFIX = ".waitForTaskToken"


def waits_for_token(state: dict[str, Any]) -> bool:
    """Whether a task ends when its outcome is reported by its token (`$$.Task.Token`)."""
    return str(state.get("Resource", "")).endswith(TOKEN_SUFFIX)


def is_lambda_invoke(state: dict[str, Any]) -> bool:
    """Whether a task calls a function as AWS' own editor writes it: by the service integration, with FunctionName and Payload."""
    return bool(_INVOKE.fullmatch(str(state.get("Resource", "")).removesuffix(TOKEN_SUFFIX)))


def task_resource(state: dict[str, Any]) -> str:
    """What a task calls: its Resource, or the function that its Parameters name."""
    if not is_lambda_invoke(state):
        return str(state["Resource"]).removesuffix(TOKEN_SUFFIX)
    name = str(state.get("Parameters", {}).get("FunctionName", ""))
    return name if name.startswith("arn:") else name.partition(":")[0]  # without a version


def short_name(resource: str) -> str:
    found = _LAMBDA.fullmatch(resource)
    return found.group(1) if found else re.split(r"[/:]", resource)[-1] or resource


def resolve_resource(resource: str, bound: Mapping[str, T]) -> T:
    for name in (resource, short_name(resource)):
        if name in bound:
            return bound[name]
    known = ", ".join(bound) or "nothing"
    raise BadValue(
        f"Resource {resource!r} is bound to nothing; bound is {known}",
        hint=f"bind it by that name, or as {short_name(resource)!r}",
    )
