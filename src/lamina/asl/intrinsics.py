"""Intrinsic functions: `States.Format('{} of {}', $.n, States.ArrayLength($.all))`, read by a small parser.

What a call may do is exactly this table; nothing here looks a name up anywhere else.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lamina.asl.errors import INTRINSIC, StateError
from lamina.asl.intrinsic_functions import FUNCTIONS, BadArgument
from lamina.asl.intrinsic_functions import json_equal as json_equal
from lamina.asl.paths import JsonPath, NoMatch, PathError, parse_path

_CALL = re.compile(r"\s*(States\.[A-Za-z0-9]+)\s*\(")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_PATH_END = re.compile(r"[,)]")


class IntrinsicError(ValueError):
    """A text that is no call of an intrinsic function."""


@dataclass(frozen=True, slots=True)
class TextLiteral:
    """Text literal as it was written: which braces are escaped matters to Format."""

    raw: str

    @property
    def value(self) -> str:
        return re.sub(r"\\(.)", r"\1", self.raw)


@dataclass(frozen=True, slots=True)
class ConstantLiteral:
    value: Any


@dataclass(frozen=True, slots=True)
class Invocation:
    name: str
    args: tuple[Argument, ...]


Argument = TextLiteral | ConstantLiteral | JsonPath | Invocation


@dataclass(slots=True)
class ExpressionScope:
    """Scope of an expression: the value, the context object, and a random generator."""

    value: Any
    context: Any
    rng: random.Random


def is_call(text: str) -> bool:
    return not text.startswith("$")


@lru_cache(maxsize=4096)
def parse_call(text: str) -> Invocation:
    try:
        call, at = _read_call(text, 0)
    except RecursionError:
        raise IntrinsicError(f"{text[:40]!r}...: calls within calls without end") from None
    if text[at:].strip():
        raise IntrinsicError(f"{text!r}: unexpected {text[at:].strip()[:20]!r} after the call")
    return call


def evaluate(call: Invocation, scene: ExpressionScope) -> Any:
    values: list[Any] = []
    for index, argument in enumerate(call.args):
        if isinstance(argument, TextLiteral):
            values.append(argument.raw if call.name == "States.Format" and index == 0 else argument.value)
        elif isinstance(argument, ConstantLiteral):
            values.append(argument.value)
        elif isinstance(argument, JsonPath):
            try:
                values.append(argument.find(scene.value, scene.context))
            except NoMatch as error:
                raise StateError(INTRINSIC, f"{call.name}: {error}") from None
        else:
            values.append(evaluate(argument, scene))
    function = FUNCTIONS[call.name][0]
    try:
        return function(scene.rng, *values)
    except BadArgument as error:
        raise StateError(INTRINSIC, f"{call.name}: {error}") from None


# ------------------------------------------------------------------------------------------------------------------ reading


def _read_call(text: str, at: int) -> tuple[Invocation, int]:
    match = _CALL.match(text, at)
    if match is None:
        raise IntrinsicError(f"{text!r} is neither a path nor a call such as States.Array(1, 2)")
    name, at = match.group(1), match.end()
    if name not in FUNCTIONS:
        raise IntrinsicError(f"{text!r}: there is no intrinsic function {name}")
    args: list[Argument] = []
    at = _skip(text, at)
    while not text.startswith(")", at):
        argument, at = _read_argument(text, at)
        args.append(argument)
        at = _skip(text, at)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
            if text.startswith(")", at):
                raise IntrinsicError(f"{text!r}: an argument is missing before )")
        elif not text.startswith(")", at):
            raise IntrinsicError(f"{text!r}: , or ) is missing at character {at + 1}")
    _, least, most = FUNCTIONS[name]
    if not least <= len(args) <= most:
        wanted = str(least) if least == most else f"{least} to {most}" if most < 1000 else f"at least {least}"
        raise IntrinsicError(f"{text!r}: {name} takes {wanted} arguments, not {len(args)}")
    return Invocation(name, tuple(args)), at + 1


def _read_argument(text: str, at: int) -> tuple[Argument, int]:
    if text.startswith("'", at):
        return _read_text(text, at + 1)
    if text.startswith("$", at):
        return _read_path(text, at)
    for word, value in (("true", True), ("false", False), ("null", None)):
        if text.startswith(word, at):
            return ConstantLiteral(value), at + len(word)
    match = _NUMBER.match(text, at)
    if match is not None:
        number = match.group()
        return ConstantLiteral(float(number) if any(c in number for c in ".eE") else int(number)), match.end()
    return _read_call(text, at)


def _read_text(text: str, at: int) -> tuple[TextLiteral, int]:
    begin = at
    while at < len(text):
        if text[at] == "\\":
            if text[at + 1 : at + 2] not in ("'", "{", "}", "\\"):
                raise IntrinsicError(f"{text!r}: \\{text[at + 1 : at + 2]} stands for nothing; only ' {{ }} \\ are escaped")
            at += 2
        elif text[at] == "'":
            return TextLiteral(text[begin:at]), at + 1
        else:
            at += 1
    raise IntrinsicError(f"{text!r}: ' is missing")


def _read_path(text: str, at: int) -> tuple[JsonPath, int]:
    """Read a path, to the comma or bracket that is not part of it; it may hold both in brackets and quotes."""
    for match in _PATH_END.finditer(text, at):
        end = match.start()
        try:
            return parse_path(text[at:end].rstrip()), end
        except PathError:
            continue
    raise IntrinsicError(f"{text!r}: no path at character {at + 1}")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
