"""Table of intrinsic functions. What a call may do is exactly this table."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import random
import re
import uuid
from collections.abc import Callable
from typing import Any

from lamina.asl.paths import json_type_of

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


def _format(_rng: random.Random, template: Any, *args: Any) -> str:
    _check_type(template, "string", "the template")
    parts, left, at = [], list(args), 0
    while at < len(template):
        if template[at] == "\\" and at + 1 < len(template):
            parts.append(template[at + 1])
            at += 2
        elif template.startswith("{}", at):
            if not left:
                raise BadArgument("more {} than values for them")
            value = left.pop(0)
            if isinstance(value, list | dict):
                raise BadArgument(f"an {json_type_of(value)} has no place in a text; use States.JsonToString")
            parts.append(value if isinstance(value, str) else compact_json(value))
            at += 2
        elif template[at] in "{}":
            raise BadArgument(f"a lone {template[at]}; write \\{template[at]} to mean it")
        else:
            parts.append(template[at])
            at += 1
    if left:
        raise BadArgument("more values than {}")
    return "".join(parts)


def _string_to_json(_rng: random.Random, text: Any) -> Any:
    _check_type(text, "string", "its argument")
    try:
        return json.loads(text, parse_constant=_no_constant) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadArgument(f"no JSON: {error}") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def _partition(_rng: random.Random, array: Any, size: Any) -> list[Any]:
    _check_type(array, "array", "its first argument")
    step = _to_int(size, "the size")
    if step < 1:
        raise BadArgument("the size must be at least 1")
    return [array[i : i + step] for i in range(0, len(array), step)]


def _contains(_rng: random.Random, array: Any, value: Any) -> bool:
    return any(json_equal(element, value) for element in _check_type(array, "array", "its first argument"))


def _range(_rng: random.Random, first: Any, last: Any, step: Any) -> list[int]:
    start, stop, by = _to_int(first, "the first"), _to_int(last, "the last"), _to_int(step, "the step")
    if by == 0:
        raise BadArgument("the step must not be 0")
    found = range(start, stop + (1 if by > 0 else -1), by)
    if len(found) > MAX_RANGE:
        raise BadArgument(f"{len(found)} elements, and {MAX_RANGE} is the most")
    return list(found)


def _item(_rng: random.Random, array: Any, index: Any) -> Any:
    at = _to_int(index, "the index")
    if not 0 <= at < len(_check_type(array, "array", "its first argument")):
        raise BadArgument(f"no element {at} in an array of {len(array)}")
    return array[at]


def _unique(_rng: random.Random, array: Any) -> list[Any]:
    found: list[Any] = []
    seen: set[str] = set()
    for element in _check_type(array, "array", "its argument"):
        key = json.dumps(_plain(element), sort_keys=True)
        if key not in seen:
            seen.add(key)
            found.append(element)
    return found


def _plain(value: Any) -> Any:
    """Value with whole floats as integers: 1 and 1.0 are one number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def json_equal(left: Any, right: Any) -> bool:
    """Equality as JSON has it: 1 and 1.0 are one number, true is none."""
    return json.dumps(_plain(left), sort_keys=True) == json.dumps(_plain(right), sort_keys=True)


def _short(text: Any) -> bytes:
    if len(_check_type(text, "string", "its argument")) > MAX_TEXT:
        raise BadArgument(f"more than {MAX_TEXT} characters")
    return str(text).encode()


def _decode(_rng: random.Random, text: Any) -> str:
    try:
        return base64.b64decode(_short(text), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise BadArgument("no text in base64") from None


def _hash(_rng: random.Random, data: Any, algorithm: Any) -> str:
    names = {"MD5": "md5", "SHA-1": "sha1", "SHA-256": "sha256", "SHA-384": "sha384", "SHA-512": "sha512"}
    if algorithm not in names:
        raise BadArgument(f"{algorithm!r} is none of {', '.join(names)}")
    text = data if isinstance(data, str) else compact_json(data)
    return hashlib.new(names[algorithm], _short(text), usedforsecurity=False).hexdigest()


def _merge(_rng: random.Random, left: Any, right: Any, deep: Any) -> dict[str, Any]:
    if _check_type(deep, "boolean", "its third argument"):
        raise BadArgument("merging in depth is not offered; its third argument must be false")
    return {**_check_type(left, "object", "its first argument"), **_check_type(right, "object", "its second argument")}


def _random(rng: random.Random, start: Any, end: Any, seed: Any = None) -> int:
    low, high = _to_int(start, "the start"), _to_int(end, "the end")
    if low >= high:
        raise BadArgument("the start must be below the end")
    dice = rng if seed is None else random.Random(_to_int(seed, "the seed"))
    return dice.randrange(low, high)


def _split(_rng: random.Random, text: Any, delimiters: Any) -> list[str]:
    _check_type(text, "string", "its first argument")
    if not _check_type(delimiters, "string", "its second argument"):
        raise BadArgument("no delimiter")
    return [part for part in re.split(f"[{re.escape(delimiters)}]", text) if part]


ANY = 1000
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "States.Format": (_format, 1, ANY),
    "States.StringToJson": (_string_to_json, 1, 1),
    "States.JsonToString": (lambda _rng, value: compact_json(value), 1, 1),
    "States.Array": (lambda _rng, *values: list(values), 0, ANY),
    "States.ArrayPartition": (_partition, 2, 2),
    "States.ArrayContains": (_contains, 2, 2),
    "States.ArrayRange": (_range, 3, 3),
    "States.ArrayGetItem": (_item, 2, 2),
    "States.ArrayLength": (lambda _rng, array: len(_check_type(array, "array", "its argument")), 1, 1),
    "States.ArrayUnique": (_unique, 1, 1),
    "States.Base64Encode": (lambda _rng, text: base64.b64encode(_short(text)).decode(), 1, 1),
    "States.Base64Decode": (_decode, 1, 1),
    "States.Hash": (_hash, 2, 2),
    "States.JsonMerge": (_merge, 3, 3),
    "States.MathRandom": (_random, 2, 3),
    "States.MathAdd": (lambda _rng, a, b: _to_int(a, "a number") + _to_int(b, "a number"), 2, 2),
    "States.StringSplit": (_split, 2, 2),
    "States.UUID": (lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)), 0, 0),
}
"""By name: the function, and how few and how many arguments it takes."""
