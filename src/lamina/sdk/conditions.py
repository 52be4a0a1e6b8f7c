"""Conditions of the builder: `var("$.score") > 0.8`, combined with `&`, `|` and `~`. Each becomes a choice rule."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lamina.errors import BadFlow

_NAMES = {"==": "Equals", "<": "LessThan", ">": "GreaterThan", "<=": "LessThanEquals", ">=": "GreaterThanEquals"}


class Condition:
    """A condition; `rule` is its choice rule in a document."""

    __slots__ = ("rule",)

    def __init__(self, rule: dict[str, Any]) -> None:
        self.rule = rule

    def __and__(self, other: Condition) -> Condition:
        return Condition({"And": [*self._parts("And"), *other._parts("And")]})

    def __or__(self, other: Condition) -> Condition:
        return Condition({"Or": [*self._parts("Or"), *other._parts("Or")]})

    def __invert__(self) -> Condition:
        return Condition({"Not": self.rule})

    def __bool__(self) -> bool:
        raise BadFlow("a condition is decided when the workflow runs", hint="combine conditions with & | ~, not and, or, not")

    def _parts(self, head: str) -> list[Any]:
        return list(self.rule[head]) if head in self.rule else [self.rule]


class Var:
    """Left side of a comparison: a path into the value of the workflow."""

    __slots__ = ("path",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, path: str) -> None:
        self.path = path

    def __lt__(self, other: Any) -> Condition:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Condition:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Condition:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Condition:
        return self._compare(">=", other)

    def __eq__(self, other: Any) -> Condition:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: Any) -> Condition:  # type: ignore[override]
        return ~self._compare("==", other)

    def matches(self, pattern: str) -> Condition:
        """String match; `*` matches anything."""
        return self._test("StringMatches", pattern)

    def is_present(self) -> Condition:
        return self._test("IsPresent", True)

    def is_null(self) -> Condition:
        return self._test("IsNull", True)

    def is_numeric(self) -> Condition:
        return self._test("IsNumeric", True)

    def is_string(self) -> Condition:
        return self._test("IsString", True)

    def is_boolean(self) -> Condition:
        return self._test("IsBoolean", True)

    def is_timestamp(self) -> Condition:
        return self._test("IsTimestamp", True)

    def _test(self, name: str, value: Any) -> Condition:
        return Condition({"Variable": self.path, name: value})

    def _compare(self, sign: str, other: Any) -> Condition:
        """A comparison; its type follows from the type of the right side."""
        if isinstance(other, Var):
            kinds = ["Numeric", "String"] + (["Boolean"] if sign == "==" else [])
            return Condition({"Or": [{"Variable": self.path, f"{kind}{_NAMES[sign]}Path": other.path} for kind in kinds]})
        if other is None and sign == "==":
            return self.is_null()
        if isinstance(other, bool):
            if sign != "==":
                raise BadFlow(f"{self.path} {sign} {other}: truth is not ordered", hint="compare with ==")
            return self._test("BooleanEquals", other)
        if isinstance(other, int | float):
            return self._test(f"Numeric{_NAMES[sign]}", other)
        if isinstance(other, str):
            return self._test(f"String{_NAMES[sign]}", other)
        if isinstance(other, datetime):
            moment = other.astimezone(UTC).isoformat().replace("+00:00", "Z")
            return self._test(f"Timestamp{_NAMES[sign]}", moment)
        raise BadFlow(
            f"{self.path} cannot be compared with a {type(other).__name__}", hint="use a text, a number, a bool or a datetime"
        )


def var(path: str) -> Var:
    """A path to compare: `var("$.score")`."""
    return Var(path)
