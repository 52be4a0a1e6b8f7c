"""Paths: the part of JSONPath that the States Language needs, read by a small parser and walked by a small walker.

A *reference path* names exactly one place (`$.a['b'][0]`) and can be written to. A *path* may also name many
(`$.items[*].price`, `$..id`, `$.rows[0:2]`, `$.rows[?(@.n > 3)]`) and then gives a list. `$$` begins at the context object.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_INDEX = 10_000
"""Writing to `[n]` beyond the end of a list is an error anyway; an index longer than any list is a typing mistake."""

_NAME = re.compile(r"[^\s.\[\](){}'\",:;=<>!&|?*@$]+")
_INT = re.compile(r"-?\d+")
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_MISSING = object()


class PathError(ValueError):
    """A text that is no path; the message says where."""


class NoMatch(LookupError):
    """Nothing is at that path."""


@dataclass(frozen=True, slots=True)
class Name:
    key: str


@dataclass(frozen=True, slots=True)
class Index:
    at: int


@dataclass(frozen=True, slots=True)
class Wildcard:
    """`*`: all members or elements."""


@dataclass(frozen=True, slots=True)
class Descent:
    """`..`: this value and everything below it."""


@dataclass(frozen=True, slots=True)
class Slice:
    start: int | None
    stop: int | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Several:
    """`[0,2]` or `['a','b']`."""

    parts: tuple[Name | Index, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """`[?(...)]`: elements for which a comparison holds. `test` is made of tuples: (op, left, right)."""

    test: Any


Step = Name | Index | Wildcard | Descent | Slice | Several | Filter


@dataclass(frozen=True, slots=True)
class Path:
    text: str
    steps: tuple[Step, ...]
    context: bool = False  #: begins with `$$`

    @property
    def is_reference(self) -> bool:
        return all(isinstance(step, Name | Index) for step in self.steps)

    def find(self, value: Any, context: Any = None) -> Any:
        """The value there; a list of all, for a path that may name many. `NoMatch` if a single place is not there."""
        found = [context if self.context else value]
        for step in self.steps:
            found = [inner for outer in found for inner in _apply(step, outer)]
        if not self.is_reference:
            return found
        if not found:
            raise NoMatch(f"nothing is at {self.text}")
        return found[0]


@lru_cache(maxsize=4096)
def parse(text: str) -> Path:
    if not isinstance(text, str) or not text.startswith("$"):
        raise PathError(f"{text!r} is no path: it must begin with $")
    context = text.startswith("$$")
    reader = _Reader(text, 2 if context else 1)
    try:
        return Path(text, tuple(reader.steps(inside=False)), context)
    except RecursionError:
        raise PathError(f"{text[:40]!r}... is no path: brackets within brackets without end") from None


def parse_reference(text: str) -> Path:
    """A path that names one place and can be written to."""
    path = parse(text)
    if not path.is_reference:
        raise PathError(f"{text!r} is no reference path: it may name more than one place")
    return path


def place(path: Path, document: Any, value: Any) -> Any:
    """A copy of `document` with `value` at a reference path; missing objects on the way are made. `NoMatch` if it cannot be."""
    if not path.steps:
        return value
    return _place(path, 0, document, value)


def _place(path: Path, at: int, document: Any, value: Any) -> Any:
    if at == len(path.steps):
        return value
    step = path.steps[at]
    if isinstance(step, Name):
        if document is _MISSING:
            document = {}
        if not isinstance(document, dict):
            raise NoMatch(f"{path.text}: {step.key!r} cannot be put into a {kind_of(document)}")
        return {**document, step.key: _place(path, at + 1, document.get(step.key, _MISSING), value)}
    assert isinstance(step, Index)
    if not isinstance(document, list) or not 0 <= step.at < len(document):
        what = "nothing" if document is _MISSING else f"a {kind_of(document)}"
        raise NoMatch(f"{path.text}: there is no element {step.at} of {what}")
    changed = list(document)
    changed[step.at] = _place(path, at + 1, document[step.at], value)
    return changed


def kind_of(value: Any) -> str:
    """Of a JSON value, in JSON's own words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list | tuple) else "object" if isinstance(value, dict) else type(value).__name__


# ----------------------------------------------------------------------------------------------------------------- walking


def _apply(step: Step, value: Any) -> Iterator[Any]:
    if isinstance(step, Name):
        if isinstance(value, dict) and step.key in value:
            yield value[step.key]
    elif isinstance(step, Index):
        if isinstance(value, list) and -len(value) <= step.at < len(value):
            yield value[step.at]
    elif isinstance(step, Wildcard):
        yield from value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    elif isinstance(step, Descent):
        yield from _descend(value)
    elif isinstance(step, Slice):
        if isinstance(value, list):
            yield from value[step.start : step.stop : step.step]
    elif isinstance(step, Several):
        for part in step.parts:
            yield from _apply(part, value)
    else:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        yield from (element for element in inner if _holds(step.test, element))


def _descend(value: Any) -> Iterator[Any]:
    stack = [value]
    while stack:
        at = stack.pop()
        yield at
        inner = list(at.values()) if isinstance(at, dict) else at if isinstance(at, list) else []
        stack += reversed(inner)


_ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _holds(test: Any, element: Any) -> bool:
    head = test[0]
    if head == "and":
        return _holds(test[1], element) and _holds(test[2], element)
    if head == "or":
        return _holds(test[1], element) or _holds(test[2], element)
    if head == "not":
        return not _holds(test[1], element)
    if head == "there":
        return _value(test[1], element) is not _MISSING
    left, right = _value(test[1], element), _value(test[2], element)
    if left is _MISSING or right is _MISSING:
        return False
    same_kind = kind_of(left) == kind_of(right)
    if head in ("==", "!="):
        return (same_kind and bool(left == right)) is (head == "==")
    return same_kind and kind_of(left) in ("number", "string") and bool(_ORDER[head](left, right))


def _value(term: Any, element: Any) -> Any:
    kind, content = term
    if kind == "constant":
        return content
    found = [element]
    for step in content:
        found = [inner for outer in found for inner in _apply(step, outer)]
    return found[0] if found else _MISSING


# ----------------------------------------------------------------------------------------------------------------- reading


class _Reader:
    """Recursive descent over one text."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def wrong(self, what: str) -> PathError:
        return PathError(f"{self.text!r} is no path: {what} at character {self.at + 1}")

    def steps(self, inside: bool) -> Iterator[Step]:
        """To the end of the text, or, inside a filter, to whatever is no step."""
        while self.at < len(self.text):
            if self.text.startswith("..", self.at):
                self.at += 2
                yield Descent()
                if self.at < len(self.text) and self.text[self.at] == "[":
                    continue
                yield self._member()
            elif self.text[self.at] == ".":
                self.at += 1
                yield self._member()
            elif self.text[self.at] == "[":
                self.at += 1
                yield self._bracket()
            elif inside:
                return
            else:
                raise self.wrong(f"unexpected {self.text[self.at]!r}")

    def _member(self) -> Step:
        if self._take("*"):
            return Wildcard()
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self.wrong("a name is missing")
        self.at = match.end()
        return Name(match.group())

    def _bracket(self) -> Step:
        self._skip()
        if self._take("*"):
            self._close()
            return Wildcard()
        if self._take("?"):
            return self._filter()
        if self._peek() in ("'", '"'):
            parts: list[Name | Index] = [Name(self._string())]
            while self._comma():
                parts.append(Name(self._string()))
            self._close()
            return parts[0] if len(parts) == 1 else Several(tuple(parts))
        return self._numbers()

    def _numbers(self) -> Step:
        first = self._int()
        if self._take(":"):
            stop = self._int()
            step = self._int() if self._take(":") else None
            if step is not None and step < 1:
                raise self.wrong("a step must be at least 1")
            self._close()
            return Slice(first, stop, step)
        if first is None:
            raise self.wrong("an index or a name in quotes is missing")
        parts: list[Name | Index] = [Index(first)]
        while self._comma():
            number = self._int()
            if number is None:
                raise self.wrong("an index is missing")
            parts.append(Index(number))
        self._close()
        return parts[0] if len(parts) == 1 else Several(tuple(parts))

    def _filter(self) -> Filter:
        self._skip()
        if not self._take("("):
            raise self.wrong("( is missing")
        test = self._or()
        self._skip()
        if not self._take(")"):
            raise self.wrong(") is missing")
        self._close()
        return Filter(test)

    def _or(self) -> Any:
        left = self._and()
        while self._word("||"):
            left = ("or", left, self._and())
        return left

    def _and(self) -> Any:
        left = self._unary()
        while self._word("&&"):
            left = ("and", left, self._unary())
        return left

    def _unary(self) -> Any:
        self._skip()
        if self._peek() == "!" and not self.text.startswith("!=", self.at):
            self.at += 1
            return ("not", self._unary())
        if self._take("("):
            test = self._or()
            self._skip()
            if not self._take(")"):
                raise self.wrong(") is missing")
            return test
        left = self._term()
        for sign in ("==", "!=", "<=", ">=", "<", ">"):
            if self._word(sign):
                return (sign, left, self._term())
        if left[0] == "constant":
            raise self.wrong("a comparison is missing")
        return ("there", left)

    def _term(self) -> Any:
        self._skip()
        if self._take("@"):
            return ("path", tuple(self.steps(inside=True)))
        if self._peek() in ("'", '"'):
            return ("constant", self._string())
        for word, value in (("true", True), ("false", False), ("null", None)):
            if self._word(word):
                return ("constant", value)
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            raise self.wrong("@, a string or a number is missing")
        self.at = match.end()
        text = match.group()
        return ("constant", float(text) if any(c in text for c in ".eE") else int(text))

    # ------------------------------------------------------------- characters

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self, sign: str) -> bool:
        if self.text.startswith(sign, self.at):
            self.at += len(sign)
            return True
        return False

    def _word(self, sign: str) -> bool:
        self._skip()
        return self._take(sign)

    def _comma(self) -> bool:
        taken = self._word(",")
        self._skip()
        return taken

    def _skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _close(self) -> None:
        if not self._word("]"):
            raise self.wrong("] is missing")

    def _int(self) -> int | None:
        self._skip()
        match = _INT.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self._skip()
        number = int(match.group())
        if abs(number) > MAX_INDEX * 1000:
            raise self.wrong(f"{number} is no index")
        return number

    def _string(self) -> str:
        quote = self._peek()
        if quote not in ("'", '"'):
            raise self.wrong("a name in quotes is missing")
        self.at += 1
        read: list[str] = []
        while True:
            sign = self._peek()
            if not sign:
                raise self.wrong(f"{quote} is missing")
            self.at += 1
            if sign == quote:
                return "".join(read)
            if sign == "\\":
                sign = self._peek()
                self.at += 1
                if sign not in ("\\", "'", '"'):
                    raise self.wrong(f"\\{sign} stands for nothing")
            read.append(sign)
