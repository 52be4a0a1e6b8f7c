"""Resource names: which function a Resource is. One rule for the command line and the SDK.

A binding names a Resource as it is written, or its short name: the last part of an ARN, without a version
(`arn:aws:lambda:eu-west-1:123456789012:function:resize:7` is `resize`), and what follows the last `/` or `:` of anything
else. As it is written comes first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from lamina.errors import BadValue

T = TypeVar("T")

_LAMBDA = re.compile(r"arn:[^:]*:lambda:[^:]*:[^:]*:function:([^:]+)(?::[^:]+)?")


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
