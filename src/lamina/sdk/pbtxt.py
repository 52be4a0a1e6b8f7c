"""Protobuf text format, as far as a config.pbtxt uses it: `key: value`, `key { ... }`, `key [ ... ]`, text, numbers, words."""

from __future__ import annotations

import re
from typing import Any

from lamina.errors import BadValue

_TOKEN = re.compile(r"""\s*(?:\#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[-+\w.]+|[{}\[\]<>:,;]|\S)""")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
MAX_DEPTH = 20

Message = dict[str, list[Any]]
"""Every field is a list: what may be repeated cannot be told from the text."""


def parse_pbtxt(text: str, name: str) -> Message:
    tokens = _TOKEN.findall(text)
    message, at = _message(tokens, 0, name, "", 0)
    if at != len(tokens):
        raise BadValue(f"{name}: {tokens[at]!r} where a field should begin")
    return message


def last_value(message: Message, key: str, default: Any) -> Any:
    """The last value of a field; it must be of the kind of the default."""
    value = message.get(key, [default])[-1]
    if isinstance(default, float) and isinstance(value, int):
        value = float(value)
    if type(value) is not type(default):
        raise BadValue(f"{key}: {value!r} is no {type(default).__name__}")
    return value


def _message(tokens: list[str], at: int, name: str, end: str, depth: int) -> tuple[Message, int]:
    if depth > MAX_DEPTH:
        raise BadValue(f"{name}: nested deeper than {MAX_DEPTH}")
    found: Message = {}
    while at < len(tokens) and tokens[at] != end:
        key = tokens[at]
        if not re.fullmatch(r"\w+", key):
            raise BadValue(f"{name}: {key!r} where a field should begin")
        at += 1
        if at < len(tokens) and tokens[at] == ":":
            at += 1
        values, at = _value(tokens, at, name, depth)
        found.setdefault(key, []).extend(values)
        if at < len(tokens) and tokens[at] in ",;":
            at += 1
    if end and at >= len(tokens):
        raise BadValue(f"{name}: {end!r} is missing at its end")
    return found, at


def _value(tokens: list[str], at: int, name: str, depth: int) -> tuple[list[Any], int]:
    if at >= len(tokens):
        raise BadValue(f"{name}: it ends where a value should be")
    token = tokens[at]
    if token in "{<":
        end = "}" if token == "{" else ">"
        inner, at = _message(tokens, at + 1, name, end, depth + 1)
        return [inner], at + 1
    if token == "[":
        return _list(tokens, at + 1, name, depth)
    if token[0] in "\"'":
        text = ""
        while at < len(tokens) and tokens[at][0] in "\"'":  # neighbours are one
            text += re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), tokens[at][1:-1])
            at += 1
        return [text], at
    return [_scalar(token, name)], at + 1


def _list(tokens: list[str], at: int, name: str, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while at < len(tokens) and tokens[at] != "]":
        values, at = _value(tokens, at, name, depth)
        found += values
        if at < len(tokens) and tokens[at] == ",":
            at += 1
    if at >= len(tokens):
        raise BadValue(f"{name}: ']' is missing at its end")
    return found, at + 1


def _scalar(token: str, name: str) -> Any:
    if token in ("true", "false"):
        return token == "true"
    for kind in (int, float):
        try:
            return kind(token)
        except ValueError:
            continue
    if not re.fullmatch(r"\w+", token):
        raise BadValue(f"{name}: {token!r} is no value")
    return token
