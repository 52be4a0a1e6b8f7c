"""JSON types of plain annotations: text, a number, a list, an object.

A value of another kind is the caller's mistake, and is said to be: `x.upper()` of a number would look like the function's.
Nothing is converted, and what JSON has no word for (arrays, bytes) is let through: there an annotation is a note to the reader.
"""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from lamina.errors import BadValue
from lamina.sdk.tensors import Tensor

_NUMBER = (bool, int, float)
_KINDS: dict[type, tuple[type, ...]] = {
    str: (str,),
    int: _NUMBER,
    float: _NUMBER,
    bool: _NUMBER,
    list: (list,),
    dict: (dict,),
    bytes: (),
}
_WORDS: dict[type, str] = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "a number",
    list: "a list",
    dict: "an object",
    bytes: "bytes",
    type(None): "nothing",
}
_SCHEMAS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_JSON = frozenset((str, *_NUMBER, list, dict, type(None)))


def schema_type(hint: Any, default: Any) -> str:
    """JSON Schema type of an annotation; "" if it names none, or more than one."""
    kinds = _plain_types(hint)
    return _SCHEMAS.get(kinds[0], "") if len(kinds) == 1 and not _may_be_none(hint, default) else ""


def json_type_check(name: str, hint: Any, default: Any) -> Callable[[Any], Any] | None:
    """A check that returns the value or raises; None if there is nothing to check."""
    kinds = _plain_types(hint)
    if not kinds:
        return None
    wrong = _JSON.difference(*(_KINDS[kind] for kind in kinds), [type(None)] if _may_be_none(hint, default) else [])
    needed = " or ".join(dict.fromkeys(_WORDS[kind] for kind in kinds))

    def check(value: Any) -> Any:
        if type(value) in wrong:
            raise _wrong_type(name, value, needed)
        return value

    return check


def _wrong_type(name: str, value: Any, needed: str) -> BadValue:
    if type(value) is dict and value.keys() == {name}:
        hint = f"a target with one parameter takes the body as its value: send only what is under {name!r}"
    elif needed == "bytes":
        hint = "send them as the body, with a content type such as image/png, or as a file of a form"
    else:
        hint = f"send {needed}"
    verb = "are" if needed == "bytes" else "is"
    return BadValue(f"{name}: {reprlib.repr(value)} is {_WORDS[type(value)]} where {needed} {verb} needed", hint=hint)


def _may_be_none(hint: Any, default: Any) -> bool:
    """Whether None is allowed: `x: str = None` means it too, whatever a type checker says."""
    return default is None or type(None) in get_args(hint)


def _plain_types(hint: Any) -> tuple[type, ...]:
    """Plain types an annotation allows besides None; none if it names any other."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        return () if any(isinstance(note, Tensor) for note in notes) else _plain_types(inner)  # a tensor says it better
    if get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_plain_types(choice) for choice in get_args(hint) if choice is not type(None)]
        return tuple(kind for part in parts for kind in part) if all(parts) else ()
    kind = get_origin(hint) or hint
    return (kind,) if isinstance(kind, type) and kind in _KINDS else ()
