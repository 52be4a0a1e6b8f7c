"""JSONPath: the part of it that the States Language needs, a small parser and a small walker.

A *reference path* names exactly one place (`$.a['b'][0]`) and can be written to. A *path* may also name many
(`$.items[*].price`, `$..id`, `$.rows[0:2]`, `$.rows[?(@.n > 3)]`) and then gives a list. `$$` begins at the context object.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lamina.asl.evaluation import EvaluationBudget
from lamina.asl.path_parser import DescentStep, IndexStep, NameStep, PathParser, PathStep, SliceStep, UnionStep, WildcardStep
from lamina.asl.path_parser import PathError as PathError

_MISSING = object()
LISTED_PER_STEP = 8


class NoMatch(LookupError):
    """Nothing is at that path."""


@dataclass(frozen=True, slots=True)
class JsonPath:
    text: str
    steps: tuple[PathStep, ...]
    context: bool = False  #: begins with `$$`

    @property
    def is_reference(self) -> bool:
        return all(isinstance(step, NameStep | IndexStep) for step in self.steps)

    def find(self, value: Any, context: Any = None, budget: EvaluationBudget | None = None) -> Any:
        """The value there; a list of all, for a path that may name many. `NoMatch` if a single place is not there."""
        budget = budget or EvaluationBudget()
        found = _walk(self.steps, context if self.context else value, budget)
        if not self.is_reference:
            return found
        if not found:
            raise NoMatch(f"nothing is at {self.text}")
        return found[0]


@lru_cache(maxsize=4096)
def parse_path(text: str) -> JsonPath:
    if not isinstance(text, str) or not text.startswith("$"):
        raise PathError(f"{text!r} is no path: it must begin with $")
    context = text.startswith("$$")
    reader = PathParser(text, 2 if context else 1)
    try:
        return JsonPath(text, tuple(reader.steps(inside=False)), context)
    except RecursionError:
        raise PathError(f"{text[:40]!r}... is no path: brackets within brackets without end") from None


def parse_reference(text: str) -> JsonPath:
    """A path that names one place and can be written to."""
    path = parse_path(text)
    if not path.is_reference:
        raise PathError(f"{text!r} is no reference path: it may name more than one place")
    return path


def put_at(path: JsonPath, document: Any, value: Any) -> Any:
    """A copy of `document` with `value` at a reference path; missing objects on the way are made. `NoMatch` if it cannot be."""
    if not path.steps:
        return value
    return _put_at(path, 0, document, value)


def _put_at(path: JsonPath, at: int, document: Any, value: Any) -> Any:
    if at == len(path.steps):
        return value
    step = path.steps[at]
    if isinstance(step, NameStep):
        if document is _MISSING:
            document = {}
        if not isinstance(document, dict):
            raise NoMatch(f"{path.text}: {step.key!r} cannot be put into a {json_type_of(document)}")
        return {**document, step.key: _put_at(path, at + 1, document.get(step.key, _MISSING), value)}
    assert isinstance(step, IndexStep)
    if not isinstance(document, list) or not 0 <= step.at < len(document):
        what = "nothing" if document is _MISSING else f"a {json_type_of(document)}"
        raise NoMatch(f"{path.text}: there is no element {step.at} of {what}")
    changed = list(document)
    changed[step.at] = _put_at(path, at + 1, document[step.at], value)
    return changed


def member_path(path: str, key: str) -> str:
    """The path of a member; names that are not plain go into brackets."""
    return f"{path}.{key}" if key.isidentifier() else f"{path}[{json.dumps(key, ensure_ascii=False)}]"


def json_type_of(value: Any) -> str:
    """JSON type of a value, in JSON's own words."""
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


def _walk(steps: tuple[PathStep, ...], start: Any, budget: EvaluationBudget) -> list[Any]:
    """All places that the steps lead to. Each one visited is a step of the budget, wherever it was led to from; places that are
    only listed cost a part of one."""
    found = [start]
    for step in steps:
        reached: list[Any] = []
        for outer in found:
            before = len(reached)
            reached += _apply(step, outer, budget)
            budget.spend(1 + (len(reached) - before) // LISTED_PER_STEP)
        found = reached
    return found


def _apply(step: PathStep, value: Any, budget: EvaluationBudget) -> Iterable[Any]:
    if isinstance(step, NameStep):
        return (value[step.key],) if isinstance(value, dict) and step.key in value else ()
    if isinstance(step, IndexStep):
        return (value[step.at],) if isinstance(value, list) and -len(value) <= step.at < len(value) else ()
    if isinstance(step, DescentStep):
        return _descend(value, budget)
    if isinstance(step, SliceStep):
        return value[step.start : step.stop : step.step] if isinstance(value, list) else ()
    if isinstance(step, UnionStep):
        return [inner for part in step.parts for inner in _apply(part, value, budget)]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(step, WildcardStep):
        return inner
    return [element for element in inner if _holds(step.test, element, budget)]


def _descend(value: Any, budget: EvaluationBudget) -> Iterator[Any]:
    stack = [value]
    while stack:
        at = stack.pop()
        budget.spend()
        yield at
        inner = list(at.values()) if isinstance(at, dict) else at if isinstance(at, list) else []
        stack += reversed(inner)


_ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _holds(test: Any, element: Any, budget: EvaluationBudget) -> bool:
    budget.spend()
    head = test[0]
    if head == "and":
        return _holds(test[1], element, budget) and _holds(test[2], element, budget)
    if head == "or":
        return _holds(test[1], element, budget) or _holds(test[2], element, budget)
    if head == "not":
        return not _holds(test[1], element, budget)
    if head == "there":
        return _value(test[1], element, budget) is not _MISSING
    left, right = _value(test[1], element, budget), _value(test[2], element, budget)
    if left is _MISSING or right is _MISSING:
        return False
    same_kind = json_type_of(left) == json_type_of(right)
    if head in ("==", "!="):
        return (same_kind and bool(left == right)) is (head == "==")
    return same_kind and json_type_of(left) in ("number", "string") and bool(_ORDER[head](left, right))


def _value(term: Any, element: Any, budget: EvaluationBudget) -> Any:
    kind, content = term
    if kind == "constant":
        return content
    found = _walk(content, element, budget)
    return found[0] if found else _MISSING
