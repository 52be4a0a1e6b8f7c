"""Consumers of a step's result. If functions alone read it, each as a whole, it may stay on the device where it was made.

A choice, an item of a map, a part picked out of a value, and the client all need it in the gateway. The answer follows from
the workflow alone, so it is worked out once for each of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task, inner_flows
from lamina.expr import Expr, leaf_of, leaves


def consuming_functions(flow: Flow, step: str) -> frozenset[str]:
    """Functions that are the only consumers of a step's result; empty if the gateway or a client looks at it too."""
    if flow.data is None:  # a plain function: the client gets it
        return frozenset()
    known: dict[str, frozenset[str]] = flow.__dict__.setdefault("readers", {})  # as its own cached properties are kept
    if step not in known:
        known[step] = _consumers_of(flow, step)
    return known[step]


def _consumers_of(flow: Flow, step: str) -> frozenset[str]:
    functions: set[str] = set()
    for expr, function in _uses(flow):
        if not any(leaf == ("node", step) for leaf in leaves(expr)):
            continue
        if not function or leaf_of(expr) != ("node", step) or len(expr) != 2:
            return frozenset()
        functions.add(function)
    return frozenset(functions)


def _uses(flow: Flow) -> Iterator[tuple[Expr, str]]:
    """Every expression of a flow, inner ones included, with the function it is an argument of; "": the gateway evaluates it."""
    data: dict[str, Any] = flow.data or {}
    if "result" in data:
        yield data["result"], ""
    for node in flow.nodes.values():
        inner: dict[str, Any] = node.data or {}
        if isinstance(node, Task):
            for expr in (inner.get("args") or {}).values():
                yield expr, node.function
        elif isinstance(node, Choice):
            for rule in inner.get("rules", ()):
                yield rule, ""
        elif isinstance(node, Each):
            yield inner["items"], ""
        elif isinstance(node, Pass) and "value" in inner:
            yield inner["value"], ""
        for body in inner_flows(node):
            yield from _uses(body)
