"""Conversion of inputs to their annotations: a dict that came over the wire becomes the dataclass, a list the tuple.

Annotations that say more than a JSON type do this: dataclasses, structs, typed dicts, enums, literals, dates, tuples, sets,
bytes inside of others, paths and addresses, constraints (`Annotated[int, Meta(ge=0)]`), unions of such, and arrays of numpy. What
has to do with pydantic is left to pydantic. Of a plain `x: float` or `x: list[float]` only the JSON types are checked. A value of
another type is the caller's mistake, and is said to be: `x.upper()` of a number would look like the function's.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import datetime
import decimal
import enum
import inspect
import ipaddress
import operator
import pathlib
import reprlib
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import msgspec

from lamina.errors import BadValue
from lamina.sdk.binding import NOTHING, Param, defaults_of, hints_of
from lamina.sdk.json_schema import pydantic_adapter, schema_of
from lamina.sdk.plain_values import (
    NUMBERS,
    WIRE_TYPES,
    aliased,
    container_class,
    is_known,
    items_check,
    json_type_check,
    may_be_none,
    schema_type,
    wrong_type,
)
from lamina.sdk.tensors import Tensor
from lamina.sdk.validation_errors import WORDS, field_of, invalid_value

MAX_INVALID_FIELDS = 20
"""Fields that an error names."""


Converter = Callable[[Any], Any]

_MADE_OF_TEXT = (
    pathlib.PurePath,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
)
"""Classes of the standard library that a text is made into by calling them."""
_MADE_OF_JSON: Mapping[type, Any] = {collections.deque: list, collections.OrderedDict: dict}
"""Containers of the standard library that are made by calling them with what JSON has."""
_CONVERTED_TYPES = (
    *_MADE_OF_TEXT,
    *_MADE_OF_JSON,
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
    bytearray,
    memoryview,
)
_CONTAINERS = (
    list,
    dict,
    typing.Union,
    types.UnionType,
    collections.abc.Sequence,
    collections.abc.Mapping,
    collections.abc.Iterable,
)


def result_hint(target: Callable[..., Any], *, batched: bool, streams: bool) -> Any:
    """Annotation of the result of one request; None if there is none."""
    hint = hints_of(target).get("return")
    if not batched and not streams:
        return hint
    inner = get_args(hint)[0] if get_args(hint) else None
    return types.GenericAlias(list, (inner,)) if streams and inner is not None else inner


def is_async(target: Callable[..., Any]) -> bool:
    """Whether it awaits, or yields and awaits."""
    return inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target)


def incoming_param(target: Callable[..., Any]) -> str:
    """The parameter for messages that come while the function runs, annotated as an `AsyncIterator` of them; "": none."""
    streams = (collections.abc.AsyncIterator, collections.abc.AsyncIterable)
    return next((name for name, hint in hints_of(target).items() if name != "return" and get_origin(hint) in streams), "")


def field_hint(hint: Any, key: str | int) -> Any:
    """Annotation of a field or an entry of something so annotated; None if there is none."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return next((found for choice in get_args(hint) if (found := field_hint(choice, key)) is not None), None)
    arguments = get_args(hint)
    if isinstance(key, int):
        return arguments[0] if get_origin(hint) in (list, collections.abc.Sequence) and arguments else None
    if get_origin(hint) is dict:
        return arguments[1]
    return hints_of(hint).get(key) if isinstance(hint, type) else None


def wire_name(hint: Any, name: str) -> str:
    """What the field `name` of something so annotated is called on the wire: models of pydantic may have an alias for it."""
    for choice in get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        field = getattr(choice, "model_fields", {}).get(name) if isinstance(choice, type) else None
        if field is not None and getattr(field, "serialization_alias", None):
            return str(field.serialization_alias)
    return name


def has_field(hint: Any, name: str) -> bool:
    """Whether `value.name` in Python is what `value["name"]` is on the wire."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return any(has_field(choice, name) for choice in get_args(hint))
    own = isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct) or hasattr(hint, "model_validate")
    )
    return own and name in hints_of(hint)


def converters_of(target: Callable[..., Any], *, batched: bool) -> dict[str, Converter]:
    """Converters by parameter, for those that need one. In a batched function each entry of the list is a request's."""
    made: dict[str, Converter] = {}
    defaults = defaults_of(target)
    for name, hint in hints_of(target).items():
        one = request_hint(hint, batched=batched)
        if name != "return" and (convert := converter_to(name, one, defaults[name])) is not None:
            made[name] = convert
    return made


def message_converter(target: Callable[..., Any], incoming: str) -> Converter | None:
    """Converter of one message of the parameter `incoming`; None where there is nothing to convert."""
    inner = get_args(hints_of(target).get(incoming))
    return converter_to(incoming, inner[0], NOTHING) if inner else None


def result_converter(hint: Any) -> Converter:
    """Makes of a server's answer what the annotation says it is. Where that cannot be, the answer stays as it came: the call has
    succeeded, and a wrong annotation is no error of the caller's."""
    is_made = (_is_array(hint) or _needs_conversion(hint)) and not _has_typed_dict(
        hint
    )  # that is a dict as it came, and may have more
    convert = converter_to("result", hint, NOTHING) if is_made else None

    def make(value: Any) -> Any:
        with contextlib.suppress(BadValue):
            return convert(value) if convert is not None else value
        return value

    return make


def _has_typed_dict(hint: Any) -> bool:
    return typing.is_typeddict(hint) or any(map(_has_typed_dict, get_args(hint)))


def converter_to(name: str, hint: Any, default: Any) -> Converter | None:
    """Converter of the values of a parameter; None where every value is taken as it comes."""
    if _is_array(hint):
        return _array_converter(name, hint, optional=may_be_none(hint, default))
    if (adapter := pydantic_adapter(hint)) is not None:
        return _pydantic_converter(name, adapter, optional=default is None)
    if _needs_conversion(hint):
        if is_known(hint, _decode_hook):
            return _converter(name, hint, optional=default is None)
        if (composed := _composed(name, hint, optional=default is None)) is not None:
            return composed  # otherwise it stays as it comes
    return items_check(name, hint, default) or json_type_check(name, hint, default)


def _composed(name: str, hint: Any, *, optional: bool) -> Converter | None:
    """Converter to what msgspec makes in parts alone: one of several dataclasses, and lists and objects of such."""
    inner = get_args(aliased(hint))
    if get_origin(hint) in (typing.Union, types.UnionType):
        return _choice(name, [one for one in inner if one is not type(None)], optional=optional or type(None) in inner)
    kind = container_class(hint)
    if kind not in (list, dict) or (convert := converter_to(name, inner[-1], NOTHING)) is None:
        return None

    def make(value: Any) -> Any:
        if (value is None and optional) or type(value) not in WIRE_TYPES:
            return value
        if type(value) is not kind:
            raise wrong_type(name, value, WORDS[kind])
        try:
            return [convert(one) for one in value] if kind is list else {key: convert(one) for key, one in value.items()}
        except BadValue:  # again, for the name of the entry that is wrong
            for key, one in enumerate(value) if kind is list else value.items():
                again = converter_to(f"{name}.{key}", inner[-1], NOTHING)
                assert again is not None, "it is the same annotation"
                again(one)
            raise

    return make


def _choice(name: str, choices: Sequence[Any], *, optional: bool) -> Converter:
    """Converter to the one of several types that fits; of those the one that has most of the fields given."""
    arms = [(one, _known_names(one), converter_to(name, one, NOTHING)) for one in choices]

    def make(value: Any) -> Any:
        if value is None and optional:
            return value
        found, wrong = [], []
        for arm, names, convert in arms:
            try:
                made = value if convert is None else convert(value)
            except BadValue as error:
                wrong.append(f"as {_type_name(arm)}: {error.message}")
            else:
                found.append((len(names & value.keys()) if isinstance(value, dict) else 0, made))
        if not found:
            needed = " or ".join(_type_name(arm) for arm, _, _ in arms)
            raise BadValue(f"{name}: {reprlib.repr(value)} is no {needed}", hint="; ".join(wrong))
        return max(found, key=operator.itemgetter(0))[1]

    return make


def _known_names(hint: Any) -> set[str]:
    """Fields of a class as they are on the wire."""
    return set(getattr(hint, "__struct_encode_fields__", ())) or set(hints_of(hint) if isinstance(hint, type) else ())


def _type_name(hint: Any) -> str:
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def typed_params(
    params: tuple[Param, ...], target: Callable[..., Any], *, batched: bool = False, at_entry: bool = False
) -> tuple[Param, ...]:
    """The parameters with their JSON Schema types. `at_entry`: see `Param`."""
    hints, defaults = hints_of(target), defaults_of(target)
    incoming = incoming_param(target) if is_async(target) else ""

    def typed(param: Param) -> Param:
        hint = request_hint(hints.get(param.name), batched=batched)
        kind, schema = schema_type(hint, defaults[param.name]), schema_of(hint)
        return Param(param.name, param.required, kind, schema, is_incoming=param.name == incoming, at_entry=at_entry)

    return tuple(typed(param) for param in params)


def request_hint(hint: Any, *, batched: bool) -> Any:
    """Annotation of one request's value."""
    if not batched or get_origin(hint) is Annotated:
        return hint
    return get_args(hint)[0] if get_args(hint) else None


def _is_array(hint: Any) -> bool:
    """Whether it is numpy's array, or one of a dtype, or None; numpy need not be imported for that."""
    return _is_array_class(get_origin(_without_none(hint)) or _without_none(hint))


def _is_array_class(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def _without_none(hint: Any) -> Any:
    """The other choice of an annotation that allows one type or None."""
    if get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    return choices[0] if len(choices) == 1 else hint


def _array_converter(name: str, hint: Any, *, optional: bool) -> Converter:
    """Lists of numbers become arrays, of the dtype that an `NDArray[...]` names; arrays pass as they are."""

    def make(value: Any) -> Any:
        if value is None and optional:
            return value
        try:
            return _to_array(hint, value)
        except TypeError as error:
            raise BadValue(f"{name}: {error}", hint="send nested lists of equal lengths") from None

    return make


def _to_array(hint: Any, value: Any) -> Any:
    if type(value) not in WIRE_TYPES:
        return value
    if type(value) in (list, *NUMBERS):
        import numpy

        named = get_args(_without_none(hint))
        dtypes = get_args(named[1]) if len(named) == 2 else ()
        dtype = dtypes[0] if dtypes and isinstance(dtypes[0], type) else None
        with contextlib.suppress(ValueError, TypeError, OverflowError):  # lists of different lengths, or of other things
            array = numpy.asarray(value, dtype)
            if array.dtype.kind in "biufc":
                return array
    raise TypeError(f"{reprlib.repr(value)} is no array of numbers")


def _has_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_has_dataclass(inner) for inner in get_args(hint))


def _fill_defaults(value: Any) -> None:
    """Set the fields of dataclasses that were left to their defaults. msgspec leaves them to the class, and when it encodes the
    object it does not see them."""
    if isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            _fill_defaults(inner)
    elif isinstance(value, dict):
        _fill_defaults(list(value.values()))
    elif dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
        for field in dataclasses.fields(value):
            if field.name not in value.__dict__:
                object.__setattr__(value, field.name, getattr(value, field.name))
            _fill_defaults(value.__dict__[field.name])


def _converter(name: str, hint: Any, *, optional: bool) -> Converter:
    has_dataclass = _has_dataclass(hint)

    def make(value: Any) -> Any:
        if value is None and optional:  # `x: Point = None` means it too
            return value
        try:
            made = msgspec.convert(value, hint, dec_hook=_decode_hook, str_keys=True)
            if has_dataclass:
                _fill_defaults(made)
            return made
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidFields):  # of a model inside of it
                raise error.__cause__.renamed(field_of(name, error)) from None
            raise invalid_value(name, value, error, hint_of_choices) from None
        except RecursionError as error:
            raise BadValue(f"{name}: {error}") from None

    hint_of_choices = _choices_said(hint)
    return make


def _choices_said(hint: Any) -> str:
    """What a literal or an enum takes, in words."""
    one = _without_none(hint)
    if get_origin(one) is typing.Literal:
        values: Sequence[Any] = get_args(one)
    else:
        values = [member.value for member in one] if isinstance(one, type) and issubclass(one, enum.Enum) else []
    return f"send {' or '.join(map(repr, values[:MAX_INVALID_FIELDS]))}" if values else ""


def _pydantic_converter(name: str, adapter: Any, *, optional: bool) -> Converter:
    def make(value: Any) -> Any:
        if value is None and optional:
            return value
        try:
            return adapter.validate_python(value)
        except ValueError as error:
            if hasattr(error, "errors"):
                raise InvalidFields(error.errors()).renamed(name) from None
            raise BadValue(f"{name}: {error}") from None
        except RecursionError as error:
            raise BadValue(f"{name}: {error}") from None

    return make


class InvalidFields(ValueError):
    """Fields of a pydantic model that were not as it wants them."""

    def __init__(self, found: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._found = found

    def renamed(self, name: str) -> BadValue:
        """The error of the parameter: one line for all fields, each by its own name and without links."""
        fields = [(".".join([name, *map(str, one["loc"])]), str(one["msg"])) for one in self._found[:MAX_INVALID_FIELDS]]
        more = len(self._found) - len(fields)
        said = "; ".join(f"{field}: {message}" for field, message in fields) + (f"; and {more} more" if more else "")
        return BadValue(said, fields=fields)


def _needs_conversion(hint: Any) -> bool:
    hint = aliased(hint)
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *notes = get_args(hint)
        if any(isinstance(note, Tensor) for note in notes):
            return False
        return _needs_conversion(inner) or any(isinstance(note, msgspec.Meta) for note in notes)
    if origin is typing.Literal or typing.is_typeddict(hint):
        return True
    kind = origin or hint
    if isinstance(kind, type) and (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, _CONVERTED_TYPES)
        or hasattr(kind, "model_validate")
        or hasattr(kind, "__attrs_attrs__")
    ):
        return True
    arguments = get_args(hint)
    if origin not in _CONTAINERS or not arguments:
        return False
    if origin in (typing.Union, types.UnionType):
        return any(map(_needs_conversion, arguments))
    has_names = origin not in (dict, collections.abc.Mapping) or arguments[0] in (str, Any)
    return not has_names or any(_is_array(one) or one is bytes or _needs_conversion(one) for one in arguments)


def _converted_entries(hint: Any, value: Any) -> Any:
    """Convert what is inside of another value. msgspec adds the way there to errors that are not its own."""
    try:
        return msgspec.convert(value, hint, dec_hook=_decode_hook, str_keys=True)
    except msgspec.ValidationError as error:
        inner = error.__cause__
        wrong = inner.renamed(field_of("", error)) if isinstance(inner, InvalidFields) else invalid_value("", value, error)
        raise InvalidFields([{"loc": list(filter(None, at.split("."))), "msg": why} for at, why in wrong.fields]) from None


def _decode_hook(kind: type, value: Any) -> Any:
    """Convert to classes that msgspec does not know."""
    origin = get_origin(kind) or kind
    if isinstance(value, origin):
        return value
    if hasattr(kind, "model_validate"):
        try:
            return kind.model_validate(value)
        except ValueError as error:
            if hasattr(error, "errors"):
                raise InvalidFields(error.errors()) from None
            raise
    if _is_array_class(origin):
        return _to_array(kind, value)
    if (plain := _MADE_OF_JSON.get(origin)) is not None:
        return origin(_converted_entries(plain[get_args(kind)] if get_args(kind) else plain, value))
    is_made_of_text = issubclass(kind, _MADE_OF_TEXT)
    if is_made_of_text and isinstance(value, str):
        return kind(value)
    raise TypeError(f"Expected `{'str' if is_made_of_text else kind.__name__}`, got `{type(value).__name__}`")
