"""Binding of inputs to parameters: from a JSON body, a dict of names, or Python arguments.

A call always ends up as a dict from parameter to value. What has a default may be left out: the function fills it in when
it runs, since a default need not be a value that can travel.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, get_type_hints

from msgspec import Struct

from lamina.errors import BadValue, did_you_mean
from lamina.sdk.json_schema import json_types


class _Nothing:
    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Final = _Nothing()
"""No body at all, which is not the same as a body of null; and no default, which is not a default of None."""


class Param(Struct, frozen=True):
    name: str
    required: bool = True
    type: str = ""  #: as JSON Schema names it, where an annotation says
    schema: dict[str, Any] = {}  #: JSON Schema of a value, with its own `$defs`; {}: any
    is_whole: bool = False  #: the body of a call is its value, also an object that has its name
    is_incoming: bool = False  #: it gets the messages of a WebSocket, one by one; elsewhere a list of them
    at_entry: bool = False  #: its JSON type is checked where the call arrives: no function of the target does it


Params = Sequence[Param]
_NAME = attrgetter("name")


def params_of(target: Callable[..., Any], place: str) -> tuple[Param, ...]:
    """The parameters of a callable, `self` already gone. Names are the interface, so each must have one."""
    found = []
    for param in inspect.signature(target).parameters.values():
        if param.kind not in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY):
            raise BadValue(
                f"{place}: parameter {str(param)!r} cannot be given by name", hint="name every parameter: no *args, **kwargs or /"
            )
        found.append(Param(param.name, param.default is param.empty))
    return tuple(found)


def hints_of(target: Any) -> dict[str, Any]:
    """Annotations by name, resolved; one that only a type checker can see (`if TYPE_CHECKING:`) is left out, and no other."""
    with contextlib.suppress(Exception):
        return get_type_hints(target, include_extras=True)
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        space = vars(sys.modules[target.__module__]) if isinstance(target, type) else inspect.unwrap(target).__globals__
        for name, annotation in target.__annotations__.items():
            with contextlib.suppress(Exception):
                alone = SimpleNamespace(__annotations__={name: annotation})
                found |= get_type_hints(alone, space, space, include_extras=True)
    return found


def defaults_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Default of each parameter, NOTHING where there is none."""
    parameters = inspect.signature(target).parameters.values()
    return {param.name: NOTHING if param.default is param.empty else param.default for param in parameters}


def bind(params: Params, body: Any = NOTHING) -> dict[str, Any]:
    """Bind a JSON body: an object with the parameters' names, whatever their number; or just the value, where one is enough.

    Names go first: an object of them is never taken for a value. Anything else is the value of the one parameter that is
    required, or of the first if none is; so a client that sends a value is understood when an optional parameter is added."""
    if len(params) == 1 and body is not NOTHING and (type(body) is not dict or params[0].is_whole):
        return {params[0].name: body}
    if not params:
        if body is NOTHING or body is None or (isinstance(body, Mapping) and not body):
            return {}
        raise BadValue(f"body: {type(body).__name__} given; this target takes no input", hint="send an empty body, null or {}")
    if body is NOTHING:
        return bind_named(params, {})
    sole = sole_param(params)
    if isinstance(body, Mapping):
        names = set(map(_NAME, params))
        is_named = body.keys() == names if len(params) == 1 else not names.isdisjoint(body)
        is_named = is_named or not (body or (sole and sole.required))
        if sole is None or is_named or not _takes_objects(sole, len(params) == 1):
            return bind_named(params, body)
    elif sole is None:
        raise BadValue(
            f"body: {type(body).__name__} given where an object is needed", hint=f"send an object with {_names(params)}"
        )
    return {sole.name: body}


def sole_param(params: Params) -> Param | None:
    """The parameter that a bare value is for; None if several are required."""
    sole = None
    for param in params:
        if param.required:
            if sole is not None:
                return None
            sole = param
    return sole or (params[0] if params else None)


def _takes_objects(param: Param, alone: bool) -> bool:
    """Whether an object may be the value of a parameter: its annotation says so, or there is none and no other parameter either.
    Beside others, names that are not known are more likely misspelt."""
    kinds = json_types(param.schema)
    return "object" in kinds or (alone and not kinds)


def bind_named(params: Params, inputs: Mapping[Any, Any]) -> dict[str, Any]:
    """Bind named inputs: all must be known, and none that is required may be missing."""
    bound, missing = {}, None
    for param in params:
        if param.name in inputs:
            bound[param.name] = inputs[param.name]
        elif param.required:
            missing = missing or param
    if len(bound) < len(inputs):
        name = next(name for name in inputs if name not in bound)
        hint = did_you_mean(str(name), map(_NAME, params), f"there is {_names(params)}" if params else "it takes no input")
        raise BadValue(f"unknown parameter {name!r}", hint=hint)
    if missing is not None:
        raise BadValue(f"missing parameter {missing.name!r}", hint=f"give {_names(params)}")
    return bound


def bind_arguments(params: Params, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind arguments as Python passes them."""
    if len(args) > len(params):
        raise BadValue(f"{len(args)} arguments given where {len(params)} fit", hint=f"there is {_names(params)}")
    inputs = {param.name: value for param, value in zip(params, args, strict=False)}
    if twice := sorted(inputs.keys() & kwargs.keys()):
        raise BadValue(f"parameter {twice[0]!r} is given twice")
    return bind_named(params, {**inputs, **kwargs})


def _names(params: Params) -> str:
    return ", ".join(param.name if param.required else f"{param.name} (optional)" for param in params) or "no parameter"
