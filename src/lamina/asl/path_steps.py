"""Steps of a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class PathError(ValueError):
    """Invalid path; the message says where."""


@dataclass(frozen=True, slots=True)
class Name:
    key: str


@dataclass(frozen=True, slots=True)
class Index:
    at: int


@dataclass(frozen=True, slots=True)
class Wildcard:
    """Wildcard `*`: all members or elements."""


@dataclass(frozen=True, slots=True)
class Descent:
    """Recursive descent `..`: this value and everything below it."""


@dataclass(frozen=True, slots=True)
class Slice:
    start: int | None
    stop: int | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Several:
    """Union of names or indices: `[0,2]` or `['a','b']`."""

    parts: tuple[Name | Index, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter `[?(...)]`: elements for which a comparison holds. `test` is made of tuples: (op, left, right)."""

    test: Any


Step = Name | Index | Wildcard | Descent | Slice | Several | Filter
