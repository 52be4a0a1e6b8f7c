"""Data flow of a deployed workflow: what each task reads, and which functions alone consume a step's result.

All of it follows from the workflow alone, so it is worked out once for each of its steps and not once per run. A result that
functions alone read, each as a whole, may stay on the device where it was made; a choice, an item of a map, a part picked out
of a value, and the client all need it in the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl.export import is_asl_flow
from lamina.core.workflow.flow import Choice, Each, Flow, Node, Pass, Task, inner_flows
from lamina.expr import Expr, Leaf, leaf_of, leaves


class FlowAnalysis:
    """Facts about one flow, found when first asked for. `is_asl`: it was written in the Amazon States Language."""

    __slots__ = ("_consumers", "_inner", "_leaves", "_results", "flow", "is_asl")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.is_asl = is_asl_flow(flow)
        self._leaves: dict[str, list[Leaf]] = {}
        self._consumers: dict[str, frozenset[str]] = {}
        self._inner: dict[str, list[FlowAnalysis]] = {}
        self._results: dict[str, bool] = {}

    def inner(self, node: Node) -> list[FlowAnalysis]:
        """Of the body of a map, or of the branches of a parallel."""
        found = self._inner.get(node.name)
        if found is None:
            found = self._inner[node.name] = [FlowAnalysis(flow) for flow in inner_flows(node)]
        return found

    def leaves_of(self, task: Task) -> list[Leaf]:
        """Everything the arguments of a task refer to, once each."""
        found = self._leaves.get(task.name)
        if found is None:
            exprs: dict[str, Expr] = task.data["args"]
            found = self._leaves[task.name] = list(dict.fromkeys(leaf for expr in exprs.values() for leaf in leaves(expr)))
        return found

    def consumers_of(self, step: str) -> frozenset[str]:
        """Functions that are the only consumers of a step's result; empty if the gateway or a client looks at it too."""
        if self.flow.data is None:  # a plain function: the client gets it
            return frozenset()
        found = self._consumers.get(step)
        if found is None:
            found = self._consumers[step] = _sole_consumers(self.flow, step)
        return found

    def is_result_alone(self, step: str) -> bool:
        """Whether a step's result, as a whole, is that of the flow, and nothing else in it looks at it."""
        if self.flow.data is None:
            return True
        found = self._results.get(step)
        if found is None:
            wanted: Leaf = ("node", step)
            reads = [expr for expr, _ in _expressions(self.flow) if any(leaf == wanted for leaf in leaves(expr))]
            is_whole = bool(reads) and leaf_of(reads[0]) == wanted and len(reads[0]) == 2
            found = self._results[step] = len(reads) == 1 and is_whole and (self.flow.data or {}).get("result") is reads[0]
        return found


def _sole_consumers(flow: Flow, step: str) -> frozenset[str]:
    functions: set[str] = set()
    for expr, function in _expressions(flow):
        if not any(leaf == ("node", step) for leaf in leaves(expr)):
            continue
        if not function or leaf_of(expr) != ("node", step) or len(expr) != 2:
            return frozenset()
        functions.add(function)
    return frozenset(functions)


def _expressions(flow: Flow) -> Iterator[tuple[Expr, str]]:
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
            yield from _expressions(body)
