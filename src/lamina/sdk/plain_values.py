"""Values annotated with the types that JSON has: checks that convert next to nothing.

A `float` takes any number, `bytes` takes base64, and a list is checked entry by entry. A value of another type is the caller's
mistake, and is said to be. Arrays, which JSON has no word for, are let through.
"""

from __future__ import annotations

import base64
import collections.abc
import contextlib
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

import msgspec

from lamina.errors import BadValue, WrongInput
from lamina.sdk.binding import NOTHING, Params
from lamina.sdk.json_schema import json_types
from lamina.sdk.tensors import Tensor
from lamina.sdk.validation_errors import WORDS

NUMBERS = (bool, int, float)
_KINDS: dict[type, tuple[type, ...]] = {
    str: (str,),
    int: NUMBERS,
    float: NUMBERS,
    bool: NUMBERS,
    list: (list,),
    dict: (dict,),
    bytes: (bytes,),
}
_JSON_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "string": ("text", (str,)),
    "integer": ("a whole number", NUMBERS),
    "number": ("a number", NUMBERS),
    "boolean": ("true or false", NUMBERS),
    "array": ("a list", (list,)),
    "object": ("an object", (dict,)),
    "null": ("null", (type(None),)),
}
"""What JSON Schema's types are called, and what has them."""
_PLAIN_CONTAINERS = {
    list: list,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    dict: dict,
    collections.abc.Mapping: dict,
}
"""Containers whose entries are checked, and what JSON has for them."""
_SCHEMAS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
WIRE_TYPES = frozenset((str, *NUMBERS, list, dict, bytes, type(None)))
"""What a value can be that came from a client, but for arrays."""


def schema_type(hint: Any, default: Any) -> str:
    """JSON Schema type of an annotation; "" if it names none, or more than one."""
    kinds = _plain_types(hint)
    return _SCHEMAS.get(kinds[0], "") if len(kinds) == 1 and not may_be_none(hint, default) else ""


def json_type_check(name: str, hint: Any, default: Any) -> Callable[[Any], Any] | None:
    """A check that returns the value or raises; None if there is nothing to check."""
    kinds = _plain_types(hint)
    if not kinds:
        return None
    wrong = WIRE_TYPES.difference(*(_KINDS[kind] for kind in kinds), [type(None)] if may_be_none(hint, default) else [])
    needed = " or ".join(dict.fromkeys(WORDS[kind] for kind in kinds))
    takes_base64, takes_text = kinds == (bytes,), str in kinds and bytes not in kinds
    takes_whole = int in kinds and float not in kinds

    def check(value: Any) -> Any:
        if takes_whole and type(value) is float:
            return _whole_number(name, value)
        if takes_text and type(value) is bytes:
            return _from_utf8(name, value)
        if takes_base64 and type(value) is str:  # all that JSON has for bytes
            return _from_base64(name, value)
        if type(value) in wrong:
            raise wrong_type(name, value, needed)
        return value

    return check


def _from_base64(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        hint = "send base64 in JSON, the bytes themselves as the body, or a file in a form"
        raise BadValue(f"{name}: {reprlib.repr(text)} is text where bytes are needed, and not base64", hint=hint) from None


def _whole_number(name: str, value: float) -> int:
    """A float that JSON, which has one kind of number, means as an integer."""
    if value.is_integer():
        return int(value)
    raise BadValue(f"{name}: {value!r} is no whole number", hint="send a whole number")


def _from_utf8(name: str, data: bytes) -> str:
    """Text that came as a body of its own."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadValue(f"{name}: bytes that are not UTF-8 where text is needed", hint="send text, in UTF-8 or as JSON") from None


def check_json_types(params: Params, inputs: Mapping[str, Any]) -> None:
    """Check what JSON has given for parameters against the types at the top of their schemas."""
    for param in params:
        value = inputs.get(param.name, NOTHING)
        if type(value) not in WORDS or type(value) is bytes or (value is None and not param.required):
            continue
        allowed = [_JSON_TYPES[kind] for kind in sorted(json_types(param.schema)) if kind in _JSON_TYPES]
        try:
            if allowed and not any(type(value) in kinds for _, kinds in allowed):
                raise wrong_type(param.name, value, " or ".join(words for words, _ in allowed))
            if type(value) is float and [words for words, _ in allowed] == ["a whole number"]:
                _whole_number(param.name, value)
        except BadValue as error:
            raise WrongInput(error.message, hint=error.hint) from None


def wrong_type(name: str, value: Any, needed: str) -> BadValue:
    if needed == "bytes":
        hint = "send base64 in JSON, the bytes themselves as the body, or a file in a form"
    elif type(value) is bytes:
        hint = f"send {needed} as JSON, with content-type: application/json"
    else:
        hint = f"send {needed}"
    verb = "are" if needed == "bytes" else "is"
    return BadValue(f"{name}: {reprlib.repr(value)} is {WORDS[type(value)]} where {needed} {verb} needed", hint=hint)


def may_be_none(hint: Any, default: Any) -> bool:
    """Whether None is allowed: `x: str = None` means it too, whatever a type checker says."""
    return default is None or type(None) in get_args(hint)


def _plain_types(hint: Any) -> tuple[type, ...]:
    """Plain types an annotation allows besides None; none if it names any other."""
    hint = aliased(hint)
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        return () if any(isinstance(note, Tensor) for note in notes) else _plain_types(inner)  # a tensor says it better
    if get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_plain_types(choice) for choice in get_args(hint) if choice is not type(None)]
        return tuple(kind for part in parts for kind in part) if all(parts) else ()
    kind = container_class(hint)
    kind = get_origin(kind) or kind
    return (kind,) if isinstance(kind, type) and kind in _KINDS else ()


def is_known(hint: Any, dec_hook: Callable[[type, Any], Any] | None = None) -> bool:
    """Whether msgspec knows a way to make it."""
    with contextlib.suppress(TypeError, NameError):
        msgspec.json.Decoder(hint, dec_hook=dec_hook)
        return True
    return False


def items_check(name: str, hint: Any, default: Any) -> Callable[[Any], Any] | None:
    """A check of the entries too, where they are annotated with plain types: `list[float]`, `dict[str, list[int]]`."""
    if not _has_plain_items(hint) or not is_known(hint):
        return None
    optional = may_be_none(hint, default)

    def check(value: Any) -> Any:
        if type(value) not in WIRE_TYPES or (value is None and optional):
            return value
        with contextlib.suppress(msgspec.ValidationError):  # mostly all is well, and this is fast
            msgspec.convert(value, hint, str_keys=True)
            return value
        return _checked_items(name, hint, value)

    return check


def _has_plain_items(hint: Any) -> bool:
    hint = _unnoted(hint)
    arguments = get_args(hint)
    if get_origin(hint) in (typing.Union, types.UnionType):
        return bool(_plain_types(hint)) and any(map(_has_plain_items, arguments))
    return get_origin(hint) in _PLAIN_CONTAINERS and bool(_plain_types(arguments[-1]))


def _checked_items(name: str, hint: Any, value: Any) -> Any:
    """The value with each entry checked, and converted, as a parameter of its type would be."""
    hint = _unnoted(hint)
    if (check := json_type_check(name, container_class(hint), NOTHING)) is not None:
        value = check(value)
    choices = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    fitting = [one for one in choices if container_class(one) is type(value) and get_args(one)]
    if len(fitting) != 1:  # no container, or one of several: which was meant is not known
        return value
    inner = get_args(fitting[0])[-1]
    if isinstance(value, list):
        return [_checked_items(f"{name}.{at}", inner, one) for at, one in enumerate(value)]
    return {key: _checked_items(f"{name}.{key}", inner, one) for key, one in value.items()}


def container_class(hint: Any) -> Any:
    """`list` for a `Sequence[...]`, `dict` for a `Mapping[...]`; any other annotation as it is."""
    return _PLAIN_CONTAINERS.get(get_origin(hint) or hint, hint)


def _unnoted(hint: Any) -> Any:
    """An annotation without notes that are for readers alone."""
    if get_origin(hint) is not Annotated or any(isinstance(note, Tensor | msgspec.Meta) for note in hint.__metadata__):
        return aliased(hint)
    return _unnoted(get_args(hint)[0])


def aliased(hint: Any) -> Any:
    """What a `NewType` or a `type` statement gives another name to."""
    while type(hint).__module__ == "typing" and type(hint).__name__ in ("NewType", "TypeAliasType"):
        hint = hint.__supertype__ if hasattr(hint, "__supertype__") else hint.__value__
    return hint
