"""Steps of a path."""

from __future__ import annotations

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
