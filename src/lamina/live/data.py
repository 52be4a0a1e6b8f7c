"""The values of all runs in flight: what the core's job references stand for.

A value stays encoded from the moment it arrives to the moment it leaves; only a choice, or a value picked out of
another, makes this side look inside. Large values are references to shared memory and are not copied here at all. What a
run holds is released in one go when it ends.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lamina import values
from lamina.asl.export import is_states
from lamina.core.actions import Fail, JobRef, Resolve
from lamina.core.controller import MAX_ITEMS
from lamina.core.events import Resolved
from lamina.core.flow import Choice, Each, Flow, Node, Pass, Task, inner_flows
from lamina.core.run import ROOT
from lamina.errors import BadValue, LaminaError
from lamina.expr import Absent, Expr, Leaf, evaluate, leaf_of, leaves
from lamina.live.frames import ErrorInfo, ShmRef, Stored
from lamina.live.shm import INLINE_BYTES, Pool, Reader
from lamina.live.states import Sealed, States, Story


@dataclass(slots=True)
class JobInput:
    args: dict[str, Expr]
    leaves: list[tuple[Leaf, Stored]]


@dataclass(slots=True)
class _Scope:
    flow: Flow
    outer: _Scope | None = None
    item: Stored | None = None
    results: dict[str, Stored] = field(default_factory=dict)
    spread: dict[str, list[_Scope]] = field(default_factory=dict)  #: items of each Each, in order


@dataclass(slots=True)
class _RunData:
    inputs: dict[str, Stored]
    scopes: dict[int, _Scope]
    error: ErrorInfo | None = None
    story: Story | None = None  #: of a flow written as states: then its values are there
    held: list[ShmRef] = field(default_factory=list)


class Data:
    """`release` is called for references whose memory somebody else owns."""

    def __init__(
        self,
        pool: Pool | None,
        reader: Reader | None,
        release: Callable[[ShmRef], None] | None = None,
        wall_us: Callable[[], int] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._runs: dict[str, _RunData] = {}
        self._states = States(lambda stored: values.decode(self._blob(stored)), wall_us, rng)
        self._pool = pool
        self._reader = reader
        self._release = release

    # ------------------------------------------------------------ by the gateway

    def open(self, call_id: str, flow: Flow, inputs: dict[str, bytes]) -> None:
        run = _RunData({}, {ROOT: _Scope(flow)})
        for name, blob in inputs.items():
            run.inputs[name] = self._stow(run, blob)
        if is_states(flow):
            run.story = self._states.open(call_id, flow, run.inputs)
        self._runs[call_id] = run

    def result(self, call_id: str) -> values.Blob:
        """The encoded answer of a run that has ended well."""
        run = self._runs[call_id]
        if run.story is not None:
            return self._blob(self._stored(run, self._states.result(run.story)))
        return self._blob(self._result(run, run.scopes[ROOT]))

    def error(self, call_id: str, failure: Fail | None = None) -> ErrorInfo | None:
        """What was said about an ending; of a flow written as states, about the failure that nobody caught."""
        run = self._runs.get(call_id)
        if run is None:
            return None
        return run.error if run.story is None else run.story.ending(failure)

    def close(self, call_id: str) -> None:
        run = self._runs.pop(call_id, None)
        if run is not None:
            for ref in run.held:
                self._free(ref)

    # ------------------------------------------------------------- by the engine

    def inputs(self, job: JobRef) -> JobInput:
        """What this job is called with. A run that has ended meanwhile has nothing left: its job gets no arguments."""
        run = self._runs.get(job.call_id)
        if run is None:
            return JobInput({}, [])
        scope = run.scopes[job.scope]
        node = scope.flow.nodes[job.node]
        assert isinstance(node, Task), f"{job.node} is no task"
        if run.story is not None:
            arguments = self._states.arguments(run.story, job.scope, node)
            ready: list[tuple[Leaf, Stored]] = [(("input", name), self._stored(run, value)) for name, value in arguments.items()]
            return JobInput({name: ["input", name] for name in arguments}, ready)
        if node.data is None:
            found: list[tuple[Leaf, Stored]] = [(("input", name), blob) for name, blob in run.inputs.items()]
            return JobInput({name: ["input", name] for name in run.inputs}, found)
        args: dict[str, Expr] = node.data["args"]
        given: list[tuple[Leaf, Stored]] = []
        for leaf in dict.fromkeys(leaf for expr in args.values() for leaf in leaves(expr)):
            with contextlib.suppress(Absent):  # whether it is needed only shows where the expression is worked out
                given.append((leaf, self._look_up(run, scope, leaf)))
        return JobInput(args, given)

    def put(self, job: JobRef, value: Stored) -> None:
        run = self._runs.get(job.call_id)
        if run is None:  # nobody waits for it any more
            if isinstance(value, ShmRef):
                self._free(value)
            return
        if isinstance(value, ShmRef):
            run.held.append(value)
        if run.story is not None:
            self._states.put(run.story, job.scope, job.node, value)
        else:
            run.scopes[job.scope].results[job.node] = value

    def put_error(self, job: JobRef, error: ErrorInfo) -> None:
        run = self._runs.get(job.call_id)
        if run is None:
            return
        if run.story is not None:
            run.story.errors[job.scope, job.node] = error
        elif run.error is None:
            run.error = error

    # --------------------------------------------------------------- by the loop

    def resolve(self, question: Resolve, first_scope: int) -> Resolved:
        """Answer for the core; the items of an each become the scopes numbered from `first_scope`."""
        run = self._runs[question.call_id]
        scope = run.scopes[question.scope]
        node = scope.flow.nodes[question.node]
        if run.story is not None:
            answer, made = self._states.answer(run.story, question, node, first_scope)
            self._make(run, scope, node, first_scope, [None] * made)
            return answer
        try:
            if isinstance(node, Each):
                blobs = values.items(self._encoded(run, scope, node.data["items"]))
                value = self.make_items(question, blobs, first_scope)
            else:
                assert isinstance(node, Choice)
                value = self._choose(run, scope, node)
        except LaminaError as error:
            run.error = run.error or ErrorInfo(type(error).__name__, error.message, "")
            return Resolved(question.call_id, question.scope, question.node, error=error.code)
        return Resolved(question.call_id, question.scope, question.node, value)

    def node(self, question: Resolve) -> Node:
        return self._runs[question.call_id].scopes[question.scope].flow.nodes[question.node]

    def make_items(self, question: Resolve, blobs: list[bytes], first_scope: int) -> int:
        if len(blobs) > MAX_ITEMS:
            raise BadValue(f"each over {len(blobs)} items", hint=f"at most {MAX_ITEMS} at a time")
        run = self._runs[question.call_id]
        scope = run.scopes[question.scope]
        node = scope.flow.nodes[question.node]
        scope.spread[node.name] = self._make(run, scope, node, first_scope, [self._stow(run, blob) for blob in blobs])
        return len(blobs)

    def _make(self, run: _RunData, scope: _Scope, node: Node, first_scope: int, items: list[Any]) -> list[_Scope]:
        """Scopes for the items of an each or the branches of a parallel."""
        flows = inner_flows(node)
        made = [_Scope(flows[i if len(flows) > 1 else 0], scope, item) for i, item in enumerate(items)]
        run.scopes.update(enumerate(made, first_scope))
        return made

    def _choose(self, run: _RunData, scope: _Scope, node: Choice) -> int:
        for index, rule in enumerate(node.data["rules"]):
            if self._evaluated(run, scope, rule):
                return index
        return len(node.branches) - 1

    # -------------------------------------------------------------------- values

    def _stow(self, run: _RunData, blob: bytes) -> Stored:
        if len(blob) > INLINE_BYTES and self._pool is not None:
            ref = self._pool.put(blob)
            if ref is not None:
                run.held.append(ref)
                return ref
        return blob

    def _stored(self, run: _RunData, value: Any) -> Stored:
        return value.stored if isinstance(value, Sealed) else self._stow(run, values.encode(value))

    def _free(self, ref: ShmRef) -> None:
        if self._pool is not None and ref.owner == self._pool.owner:
            self._pool.free(ref.slot)
        elif self._release is not None:
            self._release(ref)

    def _blob(self, stored: Stored) -> values.Blob:
        if isinstance(stored, ShmRef):
            assert self._reader is not None, "a reference, and nothing to read it with"
            return self._reader.view(stored)
        return stored

    def _encoded(self, run: _RunData, scope: _Scope, expr: Expr) -> values.Blob:
        """The value of an expression, still encoded; a bare reference is not opened at all."""
        leaf = leaf_of(expr)
        if leaf is not None and len(expr) == (1 if leaf[0] == "item" else 2):
            return self._blob(self._look_up(run, scope, leaf))
        return values.encode(self._evaluated(run, scope, expr))

    def _evaluated(self, run: _RunData, scope: _Scope, expr: Expr) -> Any:
        opened: dict[Leaf, Any] = {}

        def look_up(leaf: Leaf) -> Any:
            if leaf not in opened:
                opened[leaf] = values.decode(self._blob(self._look_up(run, scope, leaf)))
            return opened[leaf]

        return evaluate(expr, look_up)

    def _look_up(self, run: _RunData, scope: _Scope, leaf: Leaf) -> Stored:
        kind, name = leaf
        if kind == "input":
            if name not in run.inputs:
                raise Absent(f"no input {name!r}")
            return run.inputs[name]
        if kind == "item":
            if scope.item is None:
                raise Absent("no item outside an each")
            return scope.item
        at: _Scope | None = scope
        while at is not None and name not in at.flow.nodes:
            at = at.outer
        if at is None:
            raise Absent(f"no step {name!r}")
        if name not in at.results:
            at.results[name] = self._derive(run, at, name)
        return at.results[name]

    def _derive(self, run: _RunData, scope: _Scope, name: str) -> Stored:
        """Values no worker made: the list an each collected, and what a pass is made of."""
        node = scope.flow.nodes[name]
        if isinstance(node, Each) and name in scope.spread:
            blobs = [self._blob(self._result(run, inner)) for inner in scope.spread[name]]
            return self._stow(run, values.join(blobs))
        if isinstance(node, Pass) and node.data is not None:
            encoded = self._encoded(run, scope, node.data["value"])
            return encoded if isinstance(encoded, bytes) else bytes(encoded)
        raise Absent(f"{name!r} has no value")

    def _result(self, run: _RunData, scope: _Scope) -> Stored:
        if scope.flow.data is None:
            return self._look_up(run, scope, ("node", next(iter(scope.flow.nodes))))
        expr = scope.flow.data["result"]
        leaf = leaf_of(expr)
        if leaf is not None and len(expr) == (1 if leaf[0] == "item" else 2):
            return self._look_up(run, scope, leaf)
        return values.encode(self._evaluated(run, scope, expr))
