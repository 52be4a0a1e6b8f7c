"""Intrinsic functions: a table of them, and a small parser of calls, `States.Format('{} of {}', $.n, States.ArrayLength($.all))`.

What a call may do is exactly this table; nothing here looks a name up anywhere else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lamina.asl.errors import INTRINSIC, StateError
from lamina.asl.evaluation import Evaluation, EvaluationBudget
from lamina.asl.paths import JsonPath, NoMatch, PathError, json_type_of, parse_path

MAX_TEXT = 10_000  #: characters of what is hashed or coded
MAX_RANGE = 1_000  #: elements an ArrayRange may have


class BadArgument(ValueError):
    """An argument the function cannot use."""


def _check_type(value: Any, kind: str, what: str) -> Any:
    if json_type_of(value) != kind:
        raise BadArgument(f"{what} must be a {kind}, not {json_type_of(value)}")
    return value


def _to_int(value: Any, what: str) -> int:
    _check_type(value, "number", what)
    if value != value or value in (float("inf"), float("-inf")):
        raise BadArgument(f"{what} must be a finite number")
    return int(value + 0.5) if value >= 0 else -int(0.5 - value)


def compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


_MARKS = re.compile(r"\\(.)|(\{\})|[{}]", re.DOTALL)


def _format(at: Evaluation, template: Any, *args: Any) -> str:
    _check_type(template, "string", "the template")
    parts, left, start, size = [], list(reversed(args)), 0, len(template)
    at.budget.make_text(size)
    for mark in _MARKS.finditer(template):
        at.budget.spend()
        parts.append(template[start : mark.start()])
        start = mark.end()
        if mark[1]:
            parts.append(mark[1])
        elif not mark[2]:
            raise BadArgument(f"a lone {mark[0]}; write \\{mark[0]} to mean it")
        elif not left:
            raise BadArgument("more {} than values for them")
        else:
            value = left.pop()
            if isinstance(value, list | dict):
                raise BadArgument(f"an {json_type_of(value)} has no place in a text; use States.JsonToString")
            parts.append(value if isinstance(value, str) else compact_json(value))
            size += len(parts[-1])
            at.budget.make_text(size)
    if left:
        raise BadArgument("more values than {}")
    return "".join([*parts, template[start:]])


def _json_to_string(at: Evaluation, value: Any) -> str:
    at.budget.check(value)  # what it is made of may be there several times
    return compact_json(value)


def _string_to_json(_at: Evaluation, text: Any) -> Any:
    _check_type(text, "string", "its argument")
    try:
        return json.loads(text, parse_constant=_no_constant) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadArgument(f"no JSON: {error}") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def _partition(at: Evaluation, array: Any, size: Any) -> list[Any]:
    _check_type(array, "array", "its first argument")
    step = _to_int(size, "the size")
    if step < 1:
        raise BadArgument("the size must be at least 1")
    at.budget.spend(len(array))
    return [array[i : i + step] for i in range(0, len(array), step)]


def _contains(at: Evaluation, array: Any, value: Any) -> bool:
    wanted = _key(at, value)
    return any(_key(at, element) == wanted for element in _check_type(array, "array", "its first argument"))


def _range(_at: Evaluation, first: Any, last: Any, step: Any) -> list[int]:
    start, stop, by = _to_int(first, "the first"), _to_int(last, "the last"), _to_int(step, "the step")
    if by == 0:
        raise BadArgument("the step must not be 0")
    found = range(start, stop + (1 if by > 0 else -1), by)
    if len(found) > MAX_RANGE:
        raise BadArgument(f"{len(found)} elements, and {MAX_RANGE} is the most")
    return list(found)


def _item(_at: Evaluation, array: Any, index: Any) -> Any:
    at = _to_int(index, "the index")
    if not 0 <= at < len(_check_type(array, "array", "its first argument")):
        raise BadArgument(f"no element {at} in an array of {len(array)}")
    return array[at]


def _unique(at: Evaluation, array: Any) -> list[Any]:
    found: list[Any] = []
    seen: set[Any] = set()
    for element in _check_type(array, "array", "its argument"):
        key = _key(at, element)
        if key not in seen:
            seen.add(key)
            found.append(element)
    return found


def _key(at: Evaluation, value: Any) -> Any:
    """Key that is the same for equal values: 1 and 1.0 are one number, true is none."""
    if isinstance(value, bool):
        return ("boolean", value)
    if value is None or isinstance(value, int | float):
        at.budget.spend()
        return ("number", value)
    return json.dumps(_plain(value, at.budget), sort_keys=True)


def _plain(value: Any, budget: EvaluationBudget) -> Any:
    """Value with whole floats as integers: 1 and 1.0 are one number."""
    budget.spend(2)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(inner, budget) for inner in value]
    return {key: _plain(inner, budget) for key, inner in value.items()} if isinstance(value, dict) else value


def _short(text: Any) -> bytes:
    if len(_check_type(text, "string", "its argument")) > MAX_TEXT:
        raise BadArgument(f"more than {MAX_TEXT} characters")
    return str(text).encode()


def _decode(_at: Evaluation, text: Any) -> str:
    try:
        return base64.b64decode(_short(text), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise BadArgument("no text in base64") from None


def _hash(at: Evaluation, data: Any, algorithm: Any) -> str:
    names = {"MD5": "md5", "SHA-1": "sha1", "SHA-256": "sha256", "SHA-384": "sha384", "SHA-512": "sha512"}
    if algorithm not in names:
        raise BadArgument(f"{algorithm!r} is none of {', '.join(names)}")
    text = data if isinstance(data, str) else _json_to_string(at, data)
    return hashlib.new(names[algorithm], _short(text), usedforsecurity=False).hexdigest()


def _merge(_at: Evaluation, left: Any, right: Any, deep: Any) -> dict[str, Any]:
    if _check_type(deep, "boolean", "its third argument"):
        raise BadArgument("merging in depth is not offered; its third argument must be false")
    return {**_check_type(left, "object", "its first argument"), **_check_type(right, "object", "its second argument")}


def _random(at: Evaluation, start: Any, end: Any, seed: Any = None) -> int:
    low, high = _to_int(start, "the start"), _to_int(end, "the end")
    if low >= high:
        raise BadArgument("the start must be below the end")
    dice = at.rng if seed is None else random.Random(_to_int(seed, "the seed"))
    return dice.randrange(low, high)


def _split(at: Evaluation, text: Any, delimiters: Any) -> list[str]:
    _check_type(text, "string", "its first argument")
    if not _check_type(delimiters, "string", "its second argument"):
        raise BadArgument("no delimiter")
    at.budget.make_text(len(text))
    return [part for part in re.split(f"[{re.escape(delimiters)}]", text) if part]


ANY = 1000
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "States.Format": (_format, 1, ANY),
    "States.StringToJson": (_string_to_json, 1, 1),
    "States.JsonToString": (_json_to_string, 1, 1),
    "States.Array": (lambda _at, *values: list(values), 0, ANY),
    "States.ArrayPartition": (_partition, 2, 2),
    "States.ArrayContains": (_contains, 2, 2),
    "States.ArrayRange": (_range, 3, 3),
    "States.ArrayGetItem": (_item, 2, 2),
    "States.ArrayLength": (lambda _at, array: len(_check_type(array, "array", "its argument")), 1, 1),
    "States.ArrayUnique": (_unique, 1, 1),
    "States.Base64Encode": (lambda _at, text: base64.b64encode(_short(text)).decode(), 1, 1),
    "States.Base64Decode": (_decode, 1, 1),
    "States.Hash": (_hash, 2, 2),
    "States.JsonMerge": (_merge, 3, 3),
    "States.MathRandom": (_random, 2, 3),
    "States.MathAdd": (lambda _at, a, b: _to_int(a, "a number") + _to_int(b, "a number"), 2, 2),
    "States.StringSplit": (_split, 2, 2),
    "States.UUID": (lambda at: str(uuid.UUID(int=at.rng.getrandbits(128), version=4)), 0, 0),
}
"""By name: the function, and how few and how many arguments it takes."""


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
    """Scope of an expression: the value, and the surroundings of its evaluation."""

    value: Any
    at: Evaluation


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
                values.append(argument.find(scene.value, scene.at.context, scene.at.budget))
            except NoMatch as error:
                raise StateError(INTRINSIC, f"{call.name}: {error}") from None
        else:
            values.append(evaluate(argument, scene))
    function = FUNCTIONS[call.name][0]
    scene.at.budget.spend(1 + len(values))
    try:
        return function(scene.at, *values)
    except (BadArgument, OverflowError) as error:
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
