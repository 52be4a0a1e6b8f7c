"""Run values of workflows written in Python: every step has one, and expressions say how the next is made of them.

The counterpart of `asl_values.py`. An expression that is a bare reference is never decoded, and the result list of a map
goes on item by item where some are in shared memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamina import encoding
from lamina.core.actions import FailCall, ResolveData
from lamina.core.events import DataResolved
from lamina.core.workflow.engine import MAX_ITEMS
from lamina.core.workflow.flow import Choice, Each, FallibleNode, Node, Parallel, Pass, Task
from lamina.core.workflow.flow import Fail as FailNode
from lamina.errors import BadValue, LaminaError
from lamina.expr import Absent, Expr, Leaf, evaluate, leaf_of, leaves
from lamina.values.asl_values import DEFAULT_CAUSES
from lamina.values.references import ErrorInfo, Stored
from lamina.values.storage import HeldValues, ValueScope, ValueStorage


@dataclass(slots=True)
class JobArguments:
    """Arguments of a job as expressions, and the values their leaves stand for."""

    args: dict[str, Expr]
    leaves: list[tuple[Leaf, Stored]]


class PythonValues:
    """Arguments, choices and results of Python workflows, from the values their runs hold."""

    def __init__(self, storage: ValueStorage) -> None:
        self._storage = storage

    def result(self, run: HeldValues, scope: ValueScope) -> Stored:
        if scope.flow.data is None:
            nodes = scope.flow.nodes  # of a competing function the one that has a result
            ended = next(iter(nodes)) if len(nodes) == 1 else next(name for name in nodes if name in scope.results)
            return self._look_up(run, scope, ("node", ended))
        return self._value(run, scope, scope.flow.data["result"])

    # ----------------------------------------------------------------- arguments

    def arguments(self, run: HeldValues, scope: ValueScope, node: Task) -> JobArguments:
        if node.data is None:  # of a call of one function
            found: list[tuple[Leaf, Stored]] = [(("input", name), blob) for name, blob in run.inputs.items()]
            return JobArguments({name: ["input", name] for name in run.inputs}, found)
        return self._simple_arguments(run, scope, node) or self._built_arguments(run, scope, node.data["args"])

    def _simple_arguments(self, run: HeldValues, scope: ValueScope, node: Task) -> JobArguments | None:
        """Fast path: all arguments are inputs of the run or results in the same scope, and all of them are there."""
        given: list[tuple[Leaf, Stored]] = []
        for leaf in scope.analysis.leaves_of(node):
            value = (run.inputs if leaf[0] == "input" else scope.results).get(leaf[1])
            if value is None:
                return None
            given.append((leaf, value))
        return JobArguments(node.data["args"], given)

    def _built_arguments(self, run: HeldValues, scope: ValueScope, exprs: dict[str, Expr]) -> JobArguments:
        given: list[tuple[Leaf, Stored]] = []
        args: dict[str, Expr] = {name: self._item_by_item(run, scope, expr, given) for name, expr in exprs.items()}
        known = dict(given)
        for leaf in dict.fromkeys(leaf for expr in args.values() for leaf in leaves(expr) if leaf not in known):
            with contextlib.suppress(Absent):  # whether it is needed only shows where the expression is worked out
                given.append((leaf, self._look_up(run, scope, leaf)))
        return JobArguments(args, given)

    def _item_by_item(self, run: HeldValues, scope: ValueScope, expr: Expr, given: list[tuple[Leaf, Stored]]) -> Expr:
        """The result list of a map, item by item where some are in shared memory: then it need not be joined here."""
        leaf = leaf_of(expr)
        if leaf is None or leaf[0] != "node" or len(expr) != 2:
            return expr
        at, name = scope.scope_with(leaf[1]), leaf[1]
        if at is None or name in at.results or name not in at.children or (at.flow.nodes[name].data or {}).get("block"):
            return expr
        items = self._results(run, at, name)
        if set(map(type, items)) <= {bytes}:
            at.results[name] = self._joined(run, items)
            return expr
        given += [(("node", f"{name}/{index}"), item) for index, item in enumerate(items)]
        return ["list", *(["node", f"{name}/{index}"] for index in range(len(items)))]

    # ----------------------------------------------------------------- questions

    def resolve(self, run: HeldValues, question: ResolveData, first_scope: int) -> DataResolved:
        scope = run.scopes[question.scope]
        node = scope.flow.nodes[question.node]
        try:
            if question.stage == "end":
                value = self._drop_missing(scope, node, question)
            elif question.stage == "catch":
                value = self._catch(run, scope, node, question)
            elif isinstance(node, Parallel):
                scope.children[node.name] = run.make_scopes(scope, node, first_scope, [None] * len(node.branches))
                value = len(node.branches)
            elif isinstance(node, Each):
                items = self._storage.list_items(self._value(run, scope, node.data["items"]), MAX_ITEMS, run.slots)
                value = self.make_item_scopes(run, question, items, first_scope)
            else:
                assert isinstance(node, Choice)
                value = self._choose(run, scope, node)
        except LaminaError as error:
            run.errors[question.scope, question.node] = ErrorInfo(type(error).__name__, error.message, "")
            return DataResolved(
                question.call_id, question.scope, question.node, error=error.code, execution_id=question.execution_id
            )
        return DataResolved(question.call_id, question.scope, question.node, value, execution_id=question.execution_id)

    def make_item_scopes(self, run: HeldValues, question: ResolveData, blobs: Sequence[Stored], first_scope: int) -> int:
        """Number the scopes of a map's items. Items in shared memory belong to the list they are parts of."""
        if len(blobs) > MAX_ITEMS:
            raise BadValue(f"each over {len(blobs)} items", hint=f"at most {MAX_ITEMS} at a time")
        scope = run.scopes[question.scope]
        node = scope.flow.nodes[question.node]
        scope.children[node.name] = run.make_scopes(scope, node, first_scope, blobs)
        return len(blobs)

    def _drop_missing(self, scope: ValueScope, node: Node, question: ResolveData) -> int:
        """Drop items or branches that brought no result."""
        absent = set(question.missing)
        inner = scope.children[node.name]
        scope.children[node.name] = [inner[index] for index in range(len(inner)) if index not in absent]
        return 0

    def _catch(self, run: HeldValues, scope: ValueScope, node: Node, question: ResolveData) -> int:
        """Store the caught error where the handler begins: it is there only if that way was taken."""
        assert question.fault is not None and isinstance(node, FallibleNode) and node.error_policy is not None
        fault = question.fault
        error = run.errors.get((fault.scope, fault.node)) or _default_error(run, fault.scope, fault.node, fault.name)
        (caught,) = node.error_policy.catch[question.catcher].next
        scope.results[caught] = encoding.encode({"Error": error.type, "Cause": error.message})
        return 0

    def _choose(self, run: HeldValues, scope: ValueScope, node: Choice) -> int:
        for index, rule in enumerate(node.data["rules"]):
            if self._evaluate(run, scope, rule):
                return index
        return len(node.branches) - 1

    # --------------------------------------------------------------- expressions

    def _value(self, run: HeldValues, scope: ValueScope, expr: Expr) -> Stored:
        """Value of an expression; a bare reference, or one of several, is not decoded at all."""
        leaf = leaf_of(expr)
        if leaf is not None and len(expr) == (1 if leaf[0] == "item" else 2):
            return self._look_up(run, scope, leaf)
        if expr[0] == "when":
            if not self._evaluate(run, scope, expr[1]):
                raise Absent("a branch not taken has no value")
            return self._value(run, scope, expr[2])
        if expr[0] == "first":
            for inner in expr[1:]:
                with contextlib.suppress(Absent):
                    return self._value(run, scope, inner)
            raise Absent("none of several values is there")
        return encoding.encode(self._evaluate(run, scope, expr))

    def _evaluate(self, run: HeldValues, scope: ValueScope, expr: Expr) -> Any:
        opened: dict[Leaf, Any] = {}
        left = encoding.MAX_LOOKED_INTO

        def look_up(leaf: Leaf) -> Any:
            nonlocal left
            if leaf not in opened:
                blob = self._storage.read(self._look_up(run, scope, leaf))
                left = encoding.looked_into(blob, left)
                opened[leaf] = encoding.decode(blob)
            return opened[leaf]

        return evaluate(expr, look_up)

    def _look_up(self, run: HeldValues, scope: ValueScope, leaf: Leaf) -> Stored:
        kind, name = leaf
        if kind == "input":
            if name not in run.inputs:
                raise Absent(f"no input {name!r}")
            return run.inputs[name]
        if kind == "item":
            if scope.item is None:
                raise Absent("no item outside an each")
            return scope.item
        at = scope.scope_with(name)
        if at is None:
            raise Absent(f"no step {name!r}")
        if name not in at.results:
            at.results[name] = self._derive(run, at, name)
        return at.results[name]

    def _derive(self, run: HeldValues, scope: ValueScope, name: str) -> Stored:
        """Value that no worker made: the result list of a map, or what a pass is made of."""
        node = scope.flow.nodes[name]
        if isinstance(node, Each | Parallel) and name in scope.children:
            return self._joined(run, self._results(run, scope, name))
        if isinstance(node, Pass) and node.data:
            return self._value(run, scope, node.data["value"])
        raise Absent(f"{name!r} has no value")

    def _results(self, run: HeldValues, scope: ValueScope, name: str) -> list[Stored]:
        """Results of a map's items or of branches. There may be 100,000, most of them that of one step, as it is."""
        found: list[Stored] = []
        step, flow = "", None
        for inner in scope.children[name]:
            if inner.flow is not flow:
                flow = inner.flow
                leaf = leaf_of(expr := flow.data["result"]) if flow.data is not None else None
                step = leaf[1] if leaf is not None and leaf[0] == "node" and len(expr) == 2 else ""
            value = inner.results.get(step)
            found.append(value if value is not None else self.result(run, inner))
        return found

    def _joined(self, run: HeldValues, items: list[Stored]) -> Stored:
        blobs = [item if type(item) is bytes else self._storage.read(item) for item in items]
        return self._storage.store(run.slots, encoding.join_list(blobs))


def failure_of(run: HeldValues, failure: FailCall | None) -> ErrorInfo | None:
    """Error details of the failure that ended a run."""
    if failure is None or not failure.step:
        return None
    found = run.errors.get((failure.scope, failure.step))
    if found is not None or failure.error.islower():
        return found
    return _default_error(run, failure.scope, failure.step, failure.error)


def _default_error(run: HeldValues, scope: int, step: str, error: str) -> ErrorInfo:
    at = run.scopes.find(scope)
    node = at.flow.nodes.get(step) if at is not None else None
    return ErrorInfo(error, node.cause if isinstance(node, FailNode) else DEFAULT_CAUSES.get(error, ""))
