"""Policies by file name: the file is the registration. `build` makes one from its name and its options."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from lamina import plugins, units
from lamina.core.controller import Controller
from lamina.core.policy import DispatchRole, Predictor, ScaleRole
from lamina.errors import BadValue, LaminaError, did_you_mean
from lamina.policies.defaults import ReactiveAutoscaler

OptionError = Callable[[str, str, str], LaminaError]
"""(option, what is wrong, hint) -> the error to raise."""


def _bad_option(option: str, what: str, hint: str) -> LaminaError:
    return BadValue(f"policy option {option}: {what}", hint=hint)


def options_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a policy that may be set: all but its own memory, which begins with an underscore or has init=False."""
    return {field.name: field for field in dataclasses.fields(kind) if field.init and not field.name.startswith("_")}


def build(name: str, options: dict[str, Any] | None = None, complain: OptionError = _bad_option) -> DispatchRole:
    """`lamina.policies.<name>.Policy(**options)`, each option checked against its field. Times may be "5ms"."""
    kind = getattr(plugins.load("policies", name), "Policy", None)
    if kind is None:
        raise BadValue(f"no policy in {name}", hint="it is a class called Policy; docs/how-to/write-a-policy.md has a small one")
    known = options_of(kind)
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a name it imports for type checkers only
        hints = {}
    values: dict[str, Any] = {}
    for option, value in (options or {}).items():
        if option not in known:
            raise complain(
                option,
                f"{name} has no such option",
                did_you_mean(option, known, f"it has {', '.join(known) or 'none'}"),
            )
        try:
            values[option] = msgspec.convert(_in_unit(option, value), hints.get(option, Any), strict=False)
        except msgspec.ValidationError as error:
            raise complain(option, str(error), f"its default is {known[option].default!r}") from None
        except BadValue as error:
            raise complain(option, error.message.partition(": ")[2], error.hint) from None
    policy: DispatchRole = kind(**values)
    return policy


def _in_unit(option: str, value: Any) -> Any:
    if isinstance(value, str) and not value.isdecimal():
        if option.endswith("_us"):
            return units.parse_us(value)
        if option.endswith("_mib"):
            return units.parse_mib(value)
    return value


def new_controller(policy: DispatchRole, predictor: Predictor, **options: Any) -> Controller:
    """A controller with this policy. A policy without a scale role gets the reactive autoscaler."""
    scale = policy if isinstance(policy, ScaleRole) else ReactiveAutoscaler()
    return Controller(policy, predictor, scale, **options)
