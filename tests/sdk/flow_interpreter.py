"""A flow, run by the core's own token machine, one ready node at a time in a random order.

The values are kept as the server keeps them: a pass is computed when it is read, and an untaken branch has
no values. A step that starts before what it uses is there ends in `Absent`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.core.workflow.runs import ROOT, WorkflowRun
from lamina.expr import Absent, Expr, Leaf, evaluate
from lamina.types import Call

Functions = Mapping[str, Callable[..., Any]]


@dataclass
class Values:
    flow: Flow
    inputs: dict[str, Any]
    outer: Values | None = None
    item: list[Any] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    def value(self, expr: Expr) -> Any:
        return evaluate(expr, self.look_up)

    def look_up(self, leaf: Leaf) -> Any:
        kind, name = leaf
        if kind == "item":
            if not self.item:
                raise Absent("no item here")
            return self.item[0]
        if kind == "input":
            if name not in self.inputs:
                raise Absent(f"no input {name}")
            return self.inputs[name]
        if name not in self.flow.nodes:
            if self.outer is None:
                raise Absent(f"no step {name}")
            return self.outer.look_up(leaf)
        node = self.flow.nodes[name]
        if isinstance(node, Pass):
            return self.value(node.data["value"])
        if name not in self.results:
            raise Absent(f"{name} has no value")
        found = self.results[name]
        return [inner.result() for inner in found] if isinstance(node, Each) else found

    def result(self) -> Any:
        return self.value(self.flow.data["result"])


def interpret(flow: Flow, functions: Functions, inputs: dict[str, Any], seed: int = 0) -> Any:
    rng = random.Random(seed)
    run = WorkflowRun(Call("c", flow.name, 0), flow, None)
    scopes = {ROOT: Values(flow, inputs)}
    ready = run.begin()
    while ready:
        scope, node = ready.pop(rng.randrange(len(ready)))
        values = scopes[scope.id]
        if isinstance(node, Task):
            args = {name: values.value(expr) for name, expr in node.data["args"].items()}
            assert node.name not in values.results, f"{node.name} ran twice"
            values.results[node.name] = functions[node.function](**args)
            ready += run.finish(scope.id, node.name)
        elif isinstance(node, Each):
            items = values.value(node.data["items"])
            made = [Values(node.body, inputs, values, [item]) for item in items]
            scopes.update(enumerate(made, run.next_scope))
            values.results[node.name] = made
            ready += run.fan_out(scope.id, node.name, len(items))
        else:
            assert isinstance(node, Choice)
            rules = node.data["rules"]
            index = next((i for i, rule in enumerate(rules) if values.value(rule)), len(rules))
            ready += run.finish(scope.id, node.name, node.branches[index])
    assert run.is_complete, f"{flow.name} stands still"
    return scopes[ROOT].result()
