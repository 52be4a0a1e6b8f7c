"""The values of all runs in flight: what the core's job references stand for.

A value stays encoded from the moment it arrives to the moment it leaves; only a choice, or a value picked out of
another, makes this side look inside. Large values are references to shared memory and are not copied here at all. What a
run holds is released in one go when it ends.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lamina import values
from lamina.asl.export import is_states
from lamina.core.actions import Fail, JobRef, Resolve
from lamina.core.course import MAX_ITEMS
from lamina.core.events import Resolved
from lamina.core.flow import Choice, Each, Flow, Guarded, Node, Parallel, Pass, Task, inner_flows
from lamina.core.flow import Fail as FailNode
from lamina.core.notes import Note
from lamina.core.run import ROOT
from lamina.errors import BadValue, LaminaError
from lamina.expr import Absent, Expr, Leaf, evaluate, leaf_of, leaves
from lamina.live.frames import ErrorInfo, ShmRef, Stored
from lamina.live.readers import functions_reading
from lamina.live.shm import INLINE_BYTES, Pool, Reader
from lamina.live.states import UNSAID, Sealed, States, Story


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
    spread: dict[str, list[_Scope]] = field(default_factory=dict)  #: items of each Each, branches of each Parallel, in order


@dataclass(slots=True)
class _RunData:
    inputs: dict[str, Stored]
    scopes: dict[int, _Scope]
    errors: dict[tuple[int, str], ErrorInfo] = field(default_factory=dict)  #: the last of each step
    story: Story | None = None  #: of a flow written as states: then its values are there
    held: list[ShmRef] = field(default_factory=list)
    durable: bool = False


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
        self.pieces: dict[str, Callable[[bytes], None]] = {}  #: by call: who wants what its function yields as it comes
        self._states = States(lambda stored: values.decode(self._blob(stored)), wall_us, rng)
        self._pool = pool
        self._reader = reader
        self._release = release

    # ------------------------------------------------------------ by the gateway

    def open(self, call_id: str, flow: Flow, inputs: dict[str, bytes], began_us: int = 0) -> None:
        """`began_us`, since 1970, is given for runs that must come out the same when they are told again what happened."""
        run = _RunData({}, {ROOT: _Scope(flow)}, durable=began_us > 0)
        for name, blob in inputs.items():
            run.inputs[name] = self._stow(run, blob)
        if is_states(flow):
            run.story = self._states.open(call_id, flow, run.inputs, began_us)
        self._runs[call_id] = run

    def result(self, call_id: str) -> values.Blob:
        """The encoded answer of a run that has ended well."""
        return self._blob(self.stored_result(call_id))

    def stored_result(self, call_id: str) -> Stored:
        """The same without looking inside: it may be in shared memory, until `close`."""
        run = self._runs[call_id]
        if run.story is not None:
            return self._stored(run, self._states.result(run.story))
        return self._result(run, run.scopes[ROOT])

    def error(self, call_id: str, failure: Fail | None = None) -> ErrorInfo | None:
        """What was said about an ending; of a flow written as states, about the failure that nobody caught."""
        run = self._runs.get(call_id)
        if run is None:
            return None
        return run.story.ending(failure) if run.story is not None else _said(run, failure)

    def close(self, call_id: str) -> None:
        self.pieces.pop(call_id, None)
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
        return self._plain(run, scope, node) or self._made(run, scope, node.data["args"])

    def _plain(self, run: _RunData, scope: _Scope, node: Task) -> JobInput | None:
        """All it needs are inputs of the run and results beside it, and all of them are here: nearly always so."""
        known: dict[str, list[Leaf]] = scope.flow.__dict__.setdefault("needs", {})  # as its own cached properties are kept
        args: dict[str, Expr] = node.data["args"]
        if node.name not in known:
            known[node.name] = list(dict.fromkeys(leaf for expr in args.values() for leaf in leaves(expr)))
        given: list[tuple[Leaf, Stored]] = []
        for leaf in known[node.name]:
            value = (run.inputs if leaf[0] == "input" else scope.results).get(leaf[1])
            if value is None:
                return None
            given.append((leaf, value))
        return JobInput(args, given)

    def _made(self, run: _RunData, scope: _Scope, exprs: dict[str, Expr]) -> JobInput:
        given: list[tuple[Leaf, Stored]] = []
        args: dict[str, Expr] = {name: self._apart(run, scope, expr, given) for name, expr in exprs.items()}
        known = dict(given)
        for leaf in dict.fromkeys(leaf for expr in args.values() for leaf in leaves(expr) if leaf not in known):
            with contextlib.suppress(Absent):  # whether it is needed only shows where the expression is worked out
                given.append((leaf, self._look_up(run, scope, leaf)))
        return JobInput(args, given)

    def _apart(self, run: _RunData, scope: _Scope, expr: Expr, given: list[tuple[Leaf, Stored]]) -> Expr:
        """A list an each has collected, item by item where some are in shared memory: then it need not be put together here."""
        leaf = leaf_of(expr)
        if leaf is None or leaf[0] != "node" or len(expr) != 2:
            return expr
        at, name = _home_of(scope, leaf[1]), leaf[1]
        if at is None or name in at.results or name not in at.spread or (at.flow.nodes[name].data or {}).get("block"):
            return expr
        items = [self._result(run, inner) for inner in at.spread[name]]
        if not any(isinstance(item, ShmRef) for item in items):
            return expr
        given += [(("node", f"{name}/{index}"), item) for index, item in enumerate(items)]
        return ["list", *(["node", f"{name}/{index}"] for index in range(len(items)))]

    def readers(self, job: JobRef) -> frozenset[str]:
        """Functions that alone will read this job's result; empty if anybody else may."""
        run = self._runs.get(job.call_id)
        if run is None or run.story is not None or run.durable:  # what must be kept must be seen
            return frozenset()
        return functions_reading(run.scopes[job.scope].flow, job.node)

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
        else:
            run.errors[job.scope, job.node] = error

    # ------------------------------------------------------- by who keeps the run

    def outcome(self, call_id: str, note: Note) -> bytes | None:
        """What came with it: the result of a step, or what was said about its failure."""
        run = self._runs.get(call_id)
        if run is None or note.kind == "due":
            return None
        if note.kind == "failed":
            error = (run.errors if run.story is None else run.story.errors).get((note.scope, note.node))
            return None if error is None else msgspec.msgpack.encode(error)
        if run.story is None:
            stored = run.scopes[note.scope].results.get(note.node)
        else:
            stored = self._states.outcome(run.story, note.scope)
        return None if stored is None else bytes(self._blob(stored))

    def told(self, call_id: str, at_us: int) -> None:
        """It is now then, for this run; since 1970."""
        run = self._runs.get(call_id)
        if run is not None and run.story is not None:
            run.story.now_us = at_us

    def recall(self, call_id: str, note: Note, value: bytes | None) -> None:
        """As if the step had just ended."""
        run = self._runs[call_id]
        if value is None:
            return
        job = JobRef(0, call_id, note.scope, note.node)
        if note.kind == "failed":
            self.put_error(job, msgspec.msgpack.decode(value, type=ErrorInfo))
        elif note.scope in run.scopes:
            stored = self._stow(run, value)
            if run.story is not None:
                self._states.put(run.story, note.scope, note.node, stored)
            else:
                run.scopes[note.scope].results[note.node] = stored

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
            if question.stage != "begin":
                value = self._later(run, scope, node, question)
            elif isinstance(node, Parallel):
                scope.spread[node.name] = self._make(run, scope, node, first_scope, [None] * len(node.branches))
                value = len(node.branches)
            elif isinstance(node, Each):
                value = self.make_items(question, self._items(self._value(run, scope, node.data["items"])), first_scope)
            else:
                assert isinstance(node, Choice)
                value = self._choose(run, scope, node)
        except LaminaError as error:
            run.errors[question.scope, question.node] = ErrorInfo(type(error).__name__, error.message, "")
            return Resolved(question.call_id, question.scope, question.node, error=error.code, turn=question.turn)
        return Resolved(question.call_id, question.scope, question.node, value, turn=question.turn)

    def _later(self, run: _RunData, scope: _Scope, node: Node, question: Resolve) -> int:
        """Some of its items or branches brought no result, or a failure of it is caught: what was said goes where the way on
        begins, and is there only if that way was taken."""
        if question.stage == "end":
            absent = set(question.missing)
            scope.spread[node.name] = [inner for index, inner in enumerate(scope.spread[node.name]) if index not in absent]
            return 0
        assert question.fault is not None and isinstance(node, Guarded) and node.guard is not None
        fault = question.fault
        error = run.errors.get((fault.scope, fault.node)) or _unsaid(run, fault.scope, fault.node, fault.name)
        (caught,) = node.guard.catch[question.catcher].next
        scope.results[caught] = values.encode({"Error": error.type, "Cause": error.message})
        return 0

    def node(self, question: Resolve) -> Node:
        return self._runs[question.call_id].scopes[question.scope].flow.nodes[question.node]

    def _items(self, stored: Stored) -> Sequence[Stored]:
        """Of a list. Large ones in shared memory stay where they are: a part of a slot is as good as a slot."""
        blob = self._blob(stored)
        if not isinstance(stored, ShmRef):
            return values.items(blob)
        found: list[Stored] = []
        for start, size in values.spans(blob):
            if size > INLINE_BYTES:
                found.append(ShmRef(stored.owner, stored.slot, size, stored.start + start))
            else:
                found.append(bytes(blob[start : start + size]))
        return found

    def make_items(self, question: Resolve, blobs: Sequence[Stored], first_scope: int) -> int:
        """Those in shared memory belong to the list they are parts of."""
        if len(blobs) > MAX_ITEMS:
            raise BadValue(f"each over {len(blobs)} items", hint=f"at most {MAX_ITEMS} at a time")
        run = self._runs[question.call_id]
        scope = run.scopes[question.scope]
        node = scope.flow.nodes[question.node]
        items = [blob if isinstance(blob, ShmRef) else self._stow(run, blob) for blob in blobs]
        scope.spread[node.name] = self._make(run, scope, node, first_scope, items)
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

    def _stow(self, run: _RunData, blob: Stored) -> Stored:
        if isinstance(blob, ShmRef):  # from another process, and this run's from now on
            run.held.append(blob)
            return blob
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
        return self._blob(self._value(run, scope, expr))

    def _value(self, run: _RunData, scope: _Scope, expr: Expr) -> Stored:
        """Of an expression; a bare reference, or one of several, is not opened at all."""
        leaf = leaf_of(expr)
        if leaf is not None and len(expr) == (1 if leaf[0] == "item" else 2):
            return self._look_up(run, scope, leaf)
        if expr[0] == "when":
            if not self._evaluated(run, scope, expr[1]):
                raise Absent("a branch not taken has no value")
            return self._value(run, scope, expr[2])
        if expr[0] == "first":
            for inner in expr[1:]:
                with contextlib.suppress(Absent):
                    return self._value(run, scope, inner)
            raise Absent("none of several values is there")
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
        at = _home_of(scope, name)
        if at is None:
            raise Absent(f"no step {name!r}")
        if name not in at.results:
            at.results[name] = self._derive(run, at, name)
        return at.results[name]

    def _derive(self, run: _RunData, scope: _Scope, name: str) -> Stored:
        """Values no worker made: the list an each collected, and what a pass is made of."""
        node = scope.flow.nodes[name]
        if isinstance(node, Each | Parallel) and name in scope.spread:
            blobs = [self._blob(self._result(run, inner)) for inner in scope.spread[name]]
            return self._stow(run, values.join(blobs))
        if isinstance(node, Pass) and node.data:
            return self._value(run, scope, node.data["value"])
        raise Absent(f"{name!r} has no value")

    def _result(self, run: _RunData, scope: _Scope) -> Stored:
        if scope.flow.data is None:
            return self._look_up(run, scope, ("node", next(iter(scope.flow.nodes))))
        return self._value(run, scope, scope.flow.data["result"])


def _home_of(scope: _Scope, name: str) -> _Scope | None:
    """Whose step this is, seen from `scope`."""
    at: _Scope | None = scope
    while at is not None and name not in at.flow.nodes:
        at = _block_with(at, name) or at.outer
    return at


def _block_with(scope: _Scope, name: str) -> _Scope | None:
    """The block of this scope that shows this step: what is tried or has a limit of time is a scope of its own."""
    for block, inner in scope.spread.items():
        if name in ((scope.flow.nodes[block].data or {}).get("block") or ()):
            return inner[-1]
    return None


def _said(run: _RunData, failure: Fail | None) -> ErrorInfo | None:
    """Of a traced flow: about the failure that ended it."""
    if failure is None or not failure.step:
        return None
    found = run.errors.get((failure.scope, failure.step))
    if found is not None or failure.error.islower():
        return found
    return _unsaid(run, failure.scope, failure.step, failure.error)


def _unsaid(run: _RunData, scope: int, step: str, error: str) -> ErrorInfo:
    at = run.scopes.get(scope)
    node = at.flow.nodes.get(step) if at is not None else None
    return ErrorInfo(error, node.cause if isinstance(node, FailNode) else UNSAID.get(error, ""))
