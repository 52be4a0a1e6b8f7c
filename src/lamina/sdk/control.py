"""`each` and `when`: loops and decisions that a workflow can be traced through. Outside of a trace they just happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.errors import BadFlow
from lamina.sdk.symbols import Symbol
from lamina.sdk.tracing import Tracer, mode
from lamina.sdk.user_errors import user_place


def each(body: Callable[[Any], Any], items: Any, *, expect: float | None = None) -> Any:
    """`body` for every item, all at once; a list of the results in their order.

    `expect` is the usual number of items, which helps planning; it is known if `items` is a list of known length.
    """
    if not callable(body):
        raise BadFlow(f"{user_place()}: each needs something to call for every item", hint="write each(function, items)")
    where = mode.get()
    if not isinstance(where, Tracer):
        return [body(item) for item in items]
    if expect is None:
        expect = float(len(items)) if isinstance(items, list | tuple) else 4.0
    return where.each(body, items, expect)


def when(condition: Any, then: Any, otherwise: Any = None) -> Any:
    """The value of `then` or `otherwise`. Give lambdas: only the branch that is taken runs."""
    where = mode.get()
    if not isinstance(where, Tracer) or not isinstance(condition, Symbol):
        return _value(then if _holds(condition) else otherwise)
    return where.when(condition, {"then": lambda: _value(then), "otherwise": lambda: _value(otherwise)})


def _value(branch: Any) -> Any:
    return branch() if callable(branch) else branch


def _holds(condition: Any) -> bool:
    """Truth as the traced workflow sees it: `~True` is -2 in Python, which is true, and was meant to be false."""
    if type(condition) is int and condition == ~True:
        return False
    return bool(condition)
