"""Run values: the inputs, step results and errors of all runs in flight, which the core knows by reference only.

A value stays encoded from the moment it arrives to the moment it leaves; only a choice, or a value picked out of
another, makes the gateway look inside. Large values are references to shared memory and are not copied here at all. What a
run holds is released in one go when it ends. How values are made of others differs between the two kinds of workflows:
`python_values.py` and `asl_values.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lamina import values
from lamina.asl.export import is_states
from lamina.core.actions import Fail, JobRef, Resolve
from lamina.core.events import Resolved
from lamina.core.flow import Flow, Node, Task
from lamina.core.notes import Note
from lamina.core.run import ROOT
from lamina.expr import Leaf
from lamina.live.frames import ErrorInfo, ShmRef, Stored
from lamina.live.readers import functions_reading
from lamina.live.scopes import RunValues, Scope
from lamina.live.shelf import Shelf
from lamina.live.shm import Pool, Reader
from lamina.live.states import Sealed, States
from lamina.live.traced import JobInput, Traced, said


class Data:
    """Values of all runs in flight. `release` is called for references to memory that another process owns."""

    def __init__(
        self,
        pool: Pool | None,
        reader: Reader | None,
        release: Callable[[ShmRef], None] | None = None,
        wall_us: Callable[[], int] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._runs: dict[str, RunValues] = {}
        self.pieces: dict[str, Callable[[bytes], None]] = {}  #: by call: receiver of what its function yields, as it comes
        self._shelf = Shelf(pool, reader, release)
        self._traced = Traced(self._shelf)
        self._states = States(self._shelf.opened, wall_us, rng)

    # ------------------------------------------------------------ by the gateway

    def open(self, call_id: str, flow: Flow, inputs: dict[str, bytes], began_us: int = 0) -> None:
        """Add a run. `began_us`, since 1970, is given for durable runs, which must come out the same when replayed."""
        run = RunValues({}, {ROOT: Scope(flow)}, durable=began_us > 0)
        for name, blob in inputs.items():
            run.inputs[name] = self._shelf.keep(run.held, blob)
        if is_states(flow):
            run.story = self._states.open(call_id, flow, run.inputs, began_us)
            run.errors = run.story.errors
        self._runs[call_id] = run

    def result(self, call_id: str) -> values.Blob:
        """The encoded answer of a run that has ended well."""
        return self._shelf.blob(self.stored_result(call_id))

    def stored_result(self, call_id: str) -> Stored:
        """The result of a run as it is stored: it may be in shared memory, until `close`."""
        run = self._runs[call_id]
        if run.story is not None:
            return self._stored(run, self._states.result(run.story))
        return self._traced.result(run, run.scopes[ROOT])

    def error(self, call_id: str, failure: Fail | None = None) -> ErrorInfo | None:
        """Error details of a failed run; of a flow written as states, of the failure that was not caught."""
        run = self._runs.get(call_id)
        if run is None:
            return None
        return run.story.ending(failure) if run.story is not None else said(run, failure)

    def close(self, call_id: str) -> None:
        self.pieces.pop(call_id, None)
        run = self._runs.pop(call_id, None)
        if run is not None:
            for ref in run.held:
                self._shelf.free(ref)

    # ------------------------------------------------------------- by the engine

    def inputs(self, job: JobRef) -> JobInput:
        """Arguments of a job. A run that has ended meanwhile has nothing left: its job gets no arguments."""
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
        return self._traced.arguments(run, scope, node)

    def readers(self, job: JobRef) -> frozenset[str]:
        """Functions that are the only consumers of this job's result; empty if the gateway or a client may read it too."""
        run = self._runs.get(job.call_id)
        if run is None or run.story is not None or run.durable:  # what must be kept must be seen
            return frozenset()
        return functions_reading(run.scopes[job.scope].flow, job.node)

    def put(self, job: JobRef, value: Stored) -> None:
        run = self._runs.get(job.call_id)
        if run is None:  # its run has ended
            if isinstance(value, ShmRef):
                self._shelf.free(value)
            return
        if isinstance(value, ShmRef):
            run.held.append(value)
        self._put(run, job.scope, job.node, value)

    def _put(self, run: RunValues, scope: int, node: str, value: Stored) -> None:
        if run.story is not None:
            self._states.put(run.story, scope, node, value)
        else:
            run.scopes[scope].results[node] = value

    def put_error(self, job: JobRef, error: ErrorInfo) -> None:
        run = self._runs.get(job.call_id)
        if run is not None:
            run.errors[job.scope, job.node] = error

    # ------------------------------------------------------- by durable runs

    def outcome(self, call_id: str, note: Note) -> bytes | None:
        """Value to journal with an entry: the result of a step, or the details of its failure."""
        run = self._runs.get(call_id)
        if run is None or note.kind == "due":
            return None
        if note.kind == "failed":
            error = run.errors.get((note.scope, note.node))
            return None if error is None else msgspec.msgpack.encode(error)
        if run.story is None:
            stored = run.scopes[note.scope].results.get(note.node)
        else:
            stored = self._states.outcome(run.story, note.scope)
        return None if stored is None else bytes(self._shelf.blob(stored))

    def told(self, call_id: str, at_us: int) -> None:
        """Set the clock of a durable run to the time of the entry being applied; since 1970."""
        run = self._runs.get(call_id)
        if run is not None and run.story is not None:
            run.story.now_us = at_us

    def recall(self, call_id: str, note: Note, value: bytes | None) -> None:
        """Apply a journaled outcome, as if the step had just ended."""
        run = self._runs[call_id]
        if value is None:
            return
        if note.kind == "failed":
            run.errors[note.scope, note.node] = msgspec.msgpack.decode(value, type=ErrorInfo)
        elif note.scope in run.scopes:
            self._put(run, note.scope, note.node, self._shelf.keep(run.held, value))

    # --------------------------------------------------------------- by the loop

    def resolve(self, question: Resolve, first_scope: int) -> Resolved:
        """Answer a question of the core about values; items of a map become the scopes numbered from `first_scope`."""
        run = self._runs[question.call_id]
        if run.story is None:
            return self._traced.answer(run, question, first_scope)
        scope = run.scopes[question.scope]
        node = scope.flow.nodes[question.node]
        answer, made = self._states.answer(run.story, question, node, first_scope)
        run.spread(scope, node, first_scope, [None] * made)
        return answer

    def node(self, question: Resolve) -> Node:
        return self._runs[question.call_id].scopes[question.scope].flow.nodes[question.node]

    def make_items(self, question: Resolve, blobs: Sequence[Stored], first_scope: int) -> int:
        """Create the scopes of a map, for subclasses that answer `resolve` in another way."""
        return self._traced.make_items(self._runs[question.call_id], question, blobs, first_scope)

    def _stored(self, run: RunValues, value: Any) -> Stored:
        return value.stored if isinstance(value, Sealed) else self._shelf.keep(run.held, values.encode(value))
