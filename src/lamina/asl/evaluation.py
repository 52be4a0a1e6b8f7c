"""Evaluation budget of one state: how much data it may have, and how many steps its paths, templates and calls may take.

The language has a limit of 256 KiB on the data of a state, and an error for it. A few bytes of a document can ask for far more
work than that: a path with several `..` visits every pair of places, a template names the same value a thousand times. So work
is counted too. Both are checked as evaluation goes on, not at its end: what is too much must not be done before it is noticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from lamina.asl.errors import DATA_LIMIT, StateError, runtime_error

DATA_LIMIT_BYTES = 256 * 2**10
"""Of the language, as JSON."""

MIN_STEPS = 20_000
BYTES_PER_STEP = 4
"""65,536 steps for the language's limit: about 20 ms of a core. One look at each object of the largest value is within it."""

TEXT_PER_STEP = 64
REMEMBERED_BYTES = 512  #: sizes of larger parts are remembered: they may be there a thousand times
MAX_DEPTH = 100
"""Objects within objects; what is deeper could not be encoded."""


MAX_WORK = 10_000_000
"""Steps of a whole run: some seconds of a core, in slices. A loop of 25,000 small states takes a tenth of it."""

MeasuredSizes = dict[int, tuple[int, int, Any]]
"""Of containers by identity: size, depth, and the container itself, which keeps its identity from being used again."""


class EvaluationBudget:
    """Budget of one evaluation."""

    __slots__ = ("_known", "_measured", "_steps", "_steps_left", "data_bytes", "sizes")

    def __init__(self, data_bytes: int = DATA_LIMIT_BYTES, known: MeasuredSizes | None = None) -> None:
        """`known` are sizes from the evaluation before: what is still there need not be measured again."""
        self.data_bytes = data_bytes
        self._steps = self._steps_left = max(MIN_STEPS, data_bytes // BYTES_PER_STEP)
        self._measured = 0
        self._known = known or {}
        self.sizes: MeasuredSizes = {}

    @property
    def work(self) -> int:
        """Steps so far, those of measuring included."""
        return self._steps - self._steps_left + self._measured

    def spend(self, steps: int = 1) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise runtime_error("it takes too many steps to work this out; use a path that visits less, or less data")

    def make_text(self, size: int) -> None:
        """Count text that is about to be made."""
        if size > self.data_bytes:
            raise self._too_large(size)
        self.spend(1 + size // TEXT_PER_STEP)

    def check_encoded(self, size: int) -> None:
        """Check a value that is still encoded, before it is decoded."""
        if size > self.data_bytes:
            raise self._too_large(size)

    def check(self, value: Any) -> None:
        """Check the size of a value that was made; what it is made of and was checked before is not looked through again."""
        if self._measure(value, 1)[0] > self.data_bytes:
            raise self._too_large(0)

    def _measure(self, value: Any, depth: int) -> tuple[int, int]:
        """Size as JSON, near enough, and depth. Stops where either is too much."""
        if isinstance(value, str):
            return (len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))) + 2, 0
        if not isinstance(value, dict | list | tuple):
            return (len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 1)), 0
        if not value:
            return 2, 1
        self._measured += 1
        known = self.sizes.get(id(value)) or self._known.get(id(value))
        if known is not None:
            self.sizes[id(value)] = known
            if depth + known[1] > MAX_DEPTH:
                raise self._too_deep()
            return known[0], known[1]
        if depth > MAX_DEPTH:
            raise self._too_deep()
        size, deepest, most = 2 + len(value), 0, self.data_bytes
        self._measured += len(value) // 8
        if isinstance(value, dict):
            size += sum(map(len, value)) + 3 * len(value)
            value_items: Iterable[Any] = value.values()
        else:
            value_items = value
        for inner in value_items:
            kind = type(inner)
            if kind is int or kind is float or inner is None or kind is bool:
                size += 1
            else:
                inner_size, inner_depth = self._measure(inner, depth + 1)
                size += inner_size
                if inner_depth > deepest:
                    deepest = inner_depth
            if size > most:
                raise self._too_large(0)
        if size > REMEMBERED_BYTES:
            self.sizes[id(value)] = (size, deepest + 1, value)
        return size, deepest + 1

    def _too_large(self, size: int) -> StateError:
        has = f"{size} bytes" if size else "more"
        return StateError(DATA_LIMIT, f"a state may have {self.data_bytes} bytes of data, and this would be {has}")

    def _too_deep(self) -> StateError:
        return StateError(DATA_LIMIT, f"data may be nested {MAX_DEPTH} deep")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Surroundings of one evaluation: the context object, random numbers, and the budget."""

    context: dict[str, Any]
    rng: random.Random
    budget: EvaluationBudget = field(default_factory=EvaluationBudget)

    def of_item(self, index: int, item: Any) -> Evaluation:
        """Inside an item of a map."""
        return replace(self, context=with_item(self.context, index, item))


def with_item(context: dict[str, Any], index: int, item: Any) -> dict[str, Any]:
    return {**context, "Map": {"Item": {"Index": index, "Value": item}}}
