"""Expressions that make a step's arguments from other values: a handful of forms as plain lists, which never run code.

    ["input", name, *path]    an argument of the workflow      ["value", x]        a constant
    ["node", name, *path]     the result of a step             ["list", e, ...]    a list of such
    ["item", *path]           the item of the innermost each   ["dict", {k: e}]    a dict of such
    ["<", e, e] and <=, >, >=, ==, !=      ["and", e, ...]  ["or", e, ...]  ["not", e]
    ["when", c, e]            e, if c is true; else absent      ["first", e, ...]   the first that is not absent

A path is keys and indices. Leaves (input, node, item) are looked up by the caller of `evaluate`, which raises `Absent` for
those that have no value: the steps of a branch not taken, an input left out. `when` guards the end of a branch, so that it is
absent also where its value is made of others on demand and the branch taken is not recorded.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

from lamina.errors import BadValue

Expr = list[Any]
Leaf = tuple[str, str]
"""("input", name), ("node", name) or ("item", "")."""


class Absent(BadValue):
    """Missing value of a leaf. Expressions that can do without it use `first`."""


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def leaf_of(expr: Expr) -> Leaf | None:
    """Reference of a leaf; None for a form that is made of others."""
    if expr[0] in ("input", "node"):
        return (expr[0], expr[1])
    return ("item", "") if expr[0] == "item" else None


def leaves(expr: Expr) -> Iterator[Leaf]:
    """Everything an expression refers to."""
    leaf = leaf_of(expr)
    if leaf is not None:
        yield leaf
    elif expr[0] == "dict":
        for inner in expr[1].values():
            yield from leaves(inner)
    elif expr[0] != "value":
        for inner in expr[1:]:
            yield from leaves(inner)


def evaluate(expr: Expr, look_up: Callable[[Leaf], Any]) -> Any:
    head = expr[0]
    leaf = leaf_of(expr)
    if leaf is not None:
        return _walk(look_up(leaf), expr[1 if head == "item" else 2 :])
    if head == "value":
        return expr[1]
    if head == "list":
        return [evaluate(inner, look_up) for inner in expr[1:]]
    if head == "dict":
        return {key: evaluate(inner, look_up) for key, inner in expr[1].items()}
    if head == "and":
        return all(evaluate(inner, look_up) for inner in expr[1:])
    if head == "or":
        return any(evaluate(inner, look_up) for inner in expr[1:])
    if head == "when":
        if not evaluate(expr[1], look_up):
            raise Absent("a branch not taken has no value")
        return evaluate(expr[2], look_up)
    if head == "first":
        return _first(expr, look_up)
    if head == "not":
        return not evaluate(expr[1], look_up)
    if head in _COMPARE:
        left, right = evaluate(expr[1], look_up), evaluate(expr[2], look_up)
        try:
            return _COMPARE[head](left, right)
        except TypeError:
            raise BadValue(f"cannot compare {type(left).__name__} {head} {type(right).__name__}") from None
    raise BadValue(f"no such form: {head!r}")


def _first(expr: Expr, look_up: Callable[[Leaf], Any]) -> Any:
    for inner in expr[1:]:
        with contextlib.suppress(Absent):
            return evaluate(inner, look_up)
    raise Absent("none of several values is there")


def _walk(value: Any, path: list[Any]) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise BadValue(f"no {key!r} in a value of type {type(value).__name__}") from None
    return value
