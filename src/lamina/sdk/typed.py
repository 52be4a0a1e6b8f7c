"""Conversion of inputs to their annotations: a dict that came over the wire becomes the dataclass, a list the tuple.

Only annotations that JSON has no word for do this: dataclasses, structs, enums, dates, tuples, sets, and models that validate
themselves (pydantic's). Of a plain `x: float` only the JSON type is checked (`json_types.py`).
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import datetime
import decimal
import enum
import types
import typing
import uuid
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from lamina.errors import BadValue
from lamina.sdk.binding import Param, defaults_of
from lamina.sdk.kinds import checker, schema_type
from lamina.sdk.tensors import Tensor

Make = Callable[[Any], Any]

_MADE = (
    msgspec.Struct,
    enum.Enum,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    decimal.Decimal,
    tuple,
    set,
    frozenset,
)
_HOLDERS = (
    list,
    dict,
    typing.Union,
    types.UnionType,
    collections.abc.Sequence,
    collections.abc.Mapping,
    collections.abc.Iterable,
)


def hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # a name only a type checker can see: then nothing is known of any
        return get_type_hints(target, include_extras=True)
    return {}


def returned_by(target: Callable[..., Any], *, batched: bool, streams: bool) -> Any:
    """Annotation of the result of one request; None if there is none."""
    hint = hints_of(target).get("return")
    if not batched and not streams:
        return hint
    inner = get_args(hint)[0] if get_args(hint) else None
    return types.GenericAlias(list, (inner,)) if streams and inner is not None else inner


def part_of(hint: Any, key: str | int) -> Any:
    """Annotation of a field or an entry of something so annotated; None if there is none."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return next((found for choice in get_args(hint) if (found := part_of(choice, key)) is not None), None)
    arguments = get_args(hint)
    if isinstance(key, int):
        return arguments[0] if get_origin(hint) in (list, collections.abc.Sequence) and arguments else None
    if get_origin(hint) is dict:
        return arguments[1]
    return hints_of(hint).get(key) if isinstance(hint, type) else None


def has_field(hint: Any, name: str) -> bool:
    """Whether `value.name` in Python is what `value["name"]` is on the wire."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return any(has_field(choice, name) for choice in get_args(hint))
    own = isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct) or hasattr(hint, "model_validate")
    )
    return own and name in hints_of(hint)


def makers_of(target: Callable[..., Any], *, batched: bool) -> dict[str, Make]:
    """Converters by parameter, for those that need one. In a batched function each entry of the list is a request's."""
    made: dict[str, Make] = {}
    defaults = defaults_of(target)
    for name, hint in hints_of(target).items():
        one = of_one(hint, batched=batched)
        if name == "return":
            continue
        if not _needs(one):
            if (check := checker(name, one, defaults[name])) is not None:
                made[name] = check
            continue
        with contextlib.suppress(TypeError):  # msgspec knows no way to make it: it stays as it comes
            msgspec.json.Decoder(one, dec_hook=_hook)
            made[name] = _maker(name, one)
    return made


def with_types(params: tuple[Param, ...], target: Callable[..., Any], *, batched: bool = False) -> tuple[Param, ...]:
    """The parameters with their JSON Schema types."""
    hints, defaults = hints_of(target), defaults_of(target)

    def kind(name: str) -> str:
        return schema_type(of_one(hints.get(name), batched=batched), defaults[name])

    return tuple(Param(param.name, param.required, kind(param.name)) for param in params)


def of_one(hint: Any, *, batched: bool) -> Any:
    """Annotation of one request's value."""
    if not batched or get_origin(hint) is Annotated:
        return hint
    return get_args(hint)[0] if get_args(hint) else None


def _maker(name: str, hint: Any) -> Make:
    def make(value: Any) -> Any:
        try:
            return msgspec.convert(value, hint, dec_hook=_hook, str_keys=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise BadValue(f"{name}: {error}") from None

    return make


def _needs(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *notes = get_args(hint)
        return not any(isinstance(note, Tensor) for note in notes) and _needs(inner)
    kind = origin or hint
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, _MADE) or hasattr(kind, "model_validate")):
        return True
    return origin in _HOLDERS and any(_needs(inner) for inner in get_args(hint))


def _hook(kind: type, value: Any) -> Any:
    """Convert to classes that msgspec does not know."""
    if isinstance(value, kind):
        return value
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    if kind.__module__.partition(".")[0] == "numpy" and kind.__name__ == "ndarray":
        import numpy

        return numpy.asarray(value)
    raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
