"""Paths as steps, and their parser: recursive descent, one method per form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class PathError(ValueError):
    """Invalid path; the message says where."""


@dataclass(frozen=True, slots=True)
class NameStep:
    key: str


@dataclass(frozen=True, slots=True)
class IndexStep:
    at: int


@dataclass(frozen=True, slots=True)
class WildcardStep:
    """Wildcard `*`: all members or elements."""


@dataclass(frozen=True, slots=True)
class DescentStep:
    """Recursive descent `..`: this value and everything below it."""


@dataclass(frozen=True, slots=True)
class SliceStep:
    start: int | None
    stop: int | None
    step: int | None


@dataclass(frozen=True, slots=True)
class UnionStep:
    """Union of names or indices: `[0,2]` or `['a','b']`."""

    parts: tuple[NameStep | IndexStep, ...]


@dataclass(frozen=True, slots=True)
class FilterStep:
    """Filter `[?(...)]`: elements for which a comparison holds. `test` is made of tuples: (op, left, right)."""

    test: Any


PathStep = NameStep | IndexStep | WildcardStep | DescentStep | SliceStep | UnionStep | FilterStep


MAX_INDEX = 10_000_000
"""No list is that long: such an index is a typing mistake."""

_NAME = re.compile(r"(?:\\u[0-9a-fA-F]{4}|\\.|[^\\\s.\[\](){}'\",:;=<>!|?*@$&]|&(?!&))+", re.DOTALL)
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\(.)", re.DOTALL)
_INT = re.compile(r"-?\d+")
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")


class PathParser:
    """Parser of one path."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def error(self, what: str) -> PathError:
        return PathError(f"{self.text!r} is no path: {what} at character {self.at + 1}")

    def steps(self, inside: bool) -> Iterator[PathStep]:
        """Steps to the end of the text, or, inside a filter, to whatever is no step."""
        while self.at < len(self.text):
            if self.text.startswith("..", self.at):
                self.at += 2
                yield DescentStep()
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
                raise self.error(f"unexpected {self.text[self.at]!r}")

    def _member(self) -> PathStep:
        if self._take("*"):
            return WildcardStep()
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self.error("a name is missing")
        self.at = match.end()
        return NameStep(_unescaped(match.group()))

    def _bracket(self) -> PathStep:
        self._skip()
        if self._take("*"):
            self._close()
            return WildcardStep()
        if self._take("?"):
            return self._filter()
        if self._peek() in ("'", '"'):
            parts: list[NameStep | IndexStep] = [NameStep(self._string())]
            while self._comma():
                parts.append(NameStep(self._string()))
            self._close()
            return parts[0] if len(parts) == 1 else UnionStep(tuple(parts))
        return self._numbers()

    def _numbers(self) -> PathStep:
        first = self._int()
        if self._take(":"):
            stop = self._int()
            step = self._int() if self._take(":") else None
            if step is not None and step < 1:
                raise self.error("a step must be at least 1")
            self._close()
            return SliceStep(first, stop, step)
        if first is None:
            raise self.error("an index or a name in quotes is missing")
        parts: list[NameStep | IndexStep] = [IndexStep(first)]
        while self._comma():
            number = self._int()
            if number is None:
                raise self.error("an index is missing")
            parts.append(IndexStep(number))
        self._close()
        return parts[0] if len(parts) == 1 else UnionStep(tuple(parts))

    def _filter(self) -> FilterStep:
        self._skip()
        if not self._take("("):
            raise self.error("( is missing")
        test = self._or()
        self._skip()
        if not self._take(")"):
            raise self.error(") is missing")
        self._close()
        return FilterStep(test)

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
                raise self.error(") is missing")
            return test
        left = self._term()
        for sign in ("==", "!=", "<=", ">=", "<", ">"):
            if self._word(sign):
                return (sign, left, self._term())
        if left[0] == "constant":
            raise self.error("a comparison is missing")
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
            raise self.error("@, a string or a number is missing")
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
            raise self.error("] is missing")

    def _int(self) -> int | None:
        self._skip()
        match = _INT.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self._skip()
        number = int(match.group())
        if abs(number) > MAX_INDEX:
            raise self.error(f"{number} is no index")
        return number

    def _string(self) -> str:
        quote = self._peek()
        if quote not in ("'", '"'):
            raise self.error("a name in quotes is missing")
        self.at += 1
        read: list[str] = []
        while True:
            sign = self._peek()
            if not sign:
                raise self.error(f"{quote} is missing")
            self.at += 1
            if sign == quote:
                return "".join(read)
            if sign == "\\":
                sign = self._peek()
                self.at += 1
                if sign not in ("\\", "'", '"'):
                    raise self.error(f"\\{sign} stands for nothing")
            read.append(sign)


def _unescaped(name: str) -> str:
    """Unescape a name: a backslash takes the meaning from what follows it; \\u and four digits are a character, two of them
    perhaps one."""
    if "\\" not in name:
        return name
    read = _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2], name)
    return read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
