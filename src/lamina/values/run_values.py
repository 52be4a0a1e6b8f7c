"""Run values: the inputs, step results and errors of all runs in flight, which the core knows by reference only.

A value stays encoded from the moment it arrives to the moment it leaves; only a choice, or a value picked out of
another, makes the gateway look inside. Large values are references to shared memory and are not copied here at all. What a
run holds is released in one go when it ends. How values are made of others differs between the two kinds of workflows:
`python_values.py` and `asl_values.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from lamina import encoding
from lamina.asl.evaluation import DATA_LIMIT_BYTES
from lamina.core.actions import FailCall, JobRef, ResolveData
from lamina.core.events import DataResolved
from lamina.core.workflow.flow import Flow, Node, Task
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.core.workflow.runs import ROOT
from lamina.expr import Leaf
from lamina.ipc.sliced_copies import Parts, SlicedCopies, size_of
from lamina.values.asl_values import AslValues, Encoded
from lamina.values.flow_analysis import FlowAnalysis
from lamina.values.python_values import JobArguments, PythonValues, failure_of
from lamina.values.references import ErrorInfo, ShmRef, Stored, ValuesExhausted
from lamina.values.shm import INLINE_BYTES, ShmPool, ShmReader
from lamina.values.storage import HeldValues, RunScopes, ValueScope, ValueStorage
from lamina.values.task_tokens import TaskTokens


class RunValues:
    """Values of all runs in flight. `release` is called for references to memory that another process owns."""

    def __init__(
        self,
        pool: ShmPool | None,
        reader: ShmReader | None,
        release: Callable[[ShmRef], None] | None = None,
        wall_us: Callable[[], int] | None = None,
        rng: random.Random | None = None,
        state_data_bytes: int = DATA_LIMIT_BYTES,
        limit_bytes: int = 2**62,
        tokens: TaskTokens | None = None,
    ) -> None:
        self.tokens = tokens or TaskTokens()  #: of steps that wait for a report
        self._limit_bytes = limit_bytes
        self.held_bytes = 0  #: of all runs: inline values, and those in slots of other processes; our own pool counts its slots
        self._held: dict[str, int] = {}  #: and of each
        self._own = pool.owner if pool is not None else ""
        self.copies = SlicedCopies()
        self._runs: dict[str, HeldValues] = {}
        self._kept: dict[str, bool] = {}  #: runs whose values are being read, and whether they have ended
        self._analyses: dict[str, FlowAnalysis] = {}  #: by name of a flow: of the one that was opened last
        self._provided: dict[str, bytes] = {}  #: results of calls that did not run
        self.pieces: dict[str, Callable[[bytes], None]] = {}  #: by call: receiver of what its function yields, as it comes
        self._fetched_elsewhere: set[str] = set()  #: calls whose results are fetched by the client's front door
        self._storage = ValueStorage(pool, reader, release)
        self._python_values = PythonValues(self._storage)
        self._asl_values = AslValues(self._storage.decode, wall_us, rng, state_data_bytes, self.tokens.make)

    # ------------------------------------------------------------ by the gateway

    def open(self, call_id: str, flow: Flow, inputs: Mapping[str, Stored], began_us: int = 0) -> None:
        """Add a run. `began_us`, since 1970, is given for durable runs, which must come out the same when replayed."""
        analysis = self._analyses.get(flow.name)
        if analysis is None or analysis.flow is not flow:  # deployed since
            analysis = self._analyses[flow.name] = FlowAnalysis(flow)
        slots: list[ShmRef] = []
        stored: dict[str, Stored] = {}
        for name, blob in inputs.items():
            is_small = type(blob) is bytes and len(blob) <= INLINE_BYTES
            stored[name] = blob if is_small else self._storage.store(slots, blob)
        asl_run = self._asl_values.open(call_id, flow, stored, began_us) if analysis.is_asl else None
        errors = asl_run.errors if asl_run is not None else {}
        held = 0
        for value in stored.values():
            if type(value) is bytes:
                held += len(value)
            elif type(value) is ShmRef and value.owner != self._own:  # what is on another machine takes no memory here
                held += value.size
        self.held_bytes += held
        self._runs[call_id] = HeldValues(
            stored, RunScopes({ROOT: ValueScope(flow, analysis)}), errors, asl_run, slots, began_us > 0
        )
        self._held[call_id] = held

    def store_inputs(self, calls: Sequence[Mapping[str, Parts]], then: Callable[[list[dict[str, Stored]]], None]) -> None:
        """Store large inputs of calls that are to be opened, a slice in a turn of the loop. They are the caller's until then."""
        stored: list[dict[str, Stored]] = [{} for _ in calls]

        def steps() -> Iterator[int]:
            for call, made in zip(calls, stored, strict=True):
                for name, parts in call.items():
                    yield from self._storage.store_in_steps(parts, partial(made.__setitem__, name))

        size = sum([size_of(parts) for call in calls for parts in call.values()])
        self.copies.run(steps(), size, lambda: then(stored))

    def free_inputs(self, inputs: Mapping[str, Stored]) -> None:
        """Free stored inputs of a call that is not opened."""
        for stored in inputs.values():
            if isinstance(stored, ShmRef):
                self._storage.free(stored)

    def keep(self, call_id: str) -> Callable[[], None]:
        """Keep the values of a run, also when it has ended, until the returned function is called: a large result is read in
        several turns of the loop."""
        self._kept[call_id] = False

        def release() -> None:
            if self._kept.pop(call_id, False):
                self.close(call_id)

        return release

    def leave_result(self, call_id: str) -> None:
        """Leave the result of a call where it is made, if it can be: the client's front door fetches it there."""
        self._fetched_elsewhere.add(call_id)

    def copied(self, inputs: dict[str, Any]) -> dict[str, bytes]:
        """Inputs as bytes of this process, for more than one run."""
        found = {}
        for name, stored in inputs.items():
            found[name] = stored if isinstance(stored, bytes) else bytes(self._storage.read(stored))
            if isinstance(stored, ShmRef):
                self._storage.free(stored)
        return found

    def provide(self, call_id: str, blob: bytes) -> None:
        """Give the result of a call that does not run."""
        self._provided[call_id] = blob

    def result(self, call_id: str) -> encoding.Blob:
        """The encoded answer of a run that has ended well."""
        return self._storage.read(self.stored_result(call_id))

    def stored_result(self, call_id: str) -> Stored:
        """The result of a run as it is stored: it may be in shared memory, until `close`."""
        if call_id in self._provided:
            return self._provided[call_id]
        run = self._runs[call_id]
        if run.asl_run is not None:
            return self._stored(run, self._asl_values.result(run.asl_run))
        return self._python_values.result(run, run.scopes[ROOT])

    def error(self, call_id: str, failure: FailCall | None = None) -> ErrorInfo | None:
        """Error details of a failed run; of a flow written as states, of the failure that was not caught."""
        run = self._runs.get(call_id)
        if run is None:
            return None
        return run.asl_run.failure_of(failure) if run.asl_run is not None else failure_of(run, failure)

    def close(self, call_id: str) -> None:
        if call_id in self._kept:
            self._kept[call_id] = True
            return
        self.pieces.pop(call_id, None)
        self._provided.pop(call_id, None)
        self._fetched_elsewhere.discard(call_id)
        run = self._runs.pop(call_id, None)
        if run is not None:
            self.held_bytes -= self._held.pop(call_id)
            for ref in run.slots:
                self._storage.free(ref)

    # ------------------------------------------------------------- by the engine

    def inputs(self, job: JobRef) -> JobArguments:
        """Arguments of a job. A run that has ended meanwhile has nothing left: its job gets no arguments."""
        run = self._runs.get(job.call_id)
        if run is None:
            return JobArguments({}, [])
        scope = run.scopes[job.scope]
        node = scope.flow.nodes[job.node]
        assert isinstance(node, Task), f"{job.node} is no task"
        if run.asl_run is not None:
            arguments = self._asl_values.arguments(run.asl_run, job.scope, node)
            ready: list[tuple[Leaf, Stored]] = [(("input", name), self._stored(run, value)) for name, value in arguments.items()]
            return JobArguments({name: ["input", name] for name in arguments}, ready)
        given = self._python_values.arguments(run, scope, node)
        if node.waits_for_report:
            token = self.tokens.make(job.call_id, job.execution_id)
            return JobArguments({**given.args, node.data["token"]: ["value", token]}, given.leaves)
        return given

    def consumers(self, job: JobRef) -> frozenset[str]:
        """Functions that are the only consumers of this job's result; empty if the gateway or a client may read it too."""
        run = self._runs.get(job.call_id)
        if run is None or run.asl_run is not None or run.durable:  # what must be kept must be seen
            return frozenset()
        return run.scopes[job.scope].analysis.consumers_of(job.node)

    def may_stay(self, job: JobRef) -> bool:
        """Whether the result of a job is that of its call, and stays where it is until the client's front door fetches it."""
        run = self._runs.get(job.call_id)
        if run is None or job.call_id not in self._fetched_elsewhere or run.asl_run is not None or run.durable:
            return False
        return job.scope == ROOT and run.scopes[ROOT].analysis.is_result_alone(job.node)

    def put(self, job: JobRef, value: Stored) -> None:
        """Store a result. Raises `ValuesExhausted` if the values of all runs would take more than their memory; what was accepted
        for good is stored all the same."""
        run = self._runs.get(job.call_id)
        if run is None:  # its run has ended
            if isinstance(value, ShmRef):
                self._storage.free(value)
            return
        if not isinstance(value, ShmRef):
            size = len(value)
        else:
            size = value.size if type(value) is ShmRef else 0  # what is on a device takes no memory here
        if self.held_bytes + size > self._limit_bytes and not run.durable:
            raise ValuesExhausted(f"no room for {size} bytes: the values of runs in flight have {self.held_bytes}")
        if isinstance(value, ShmRef):
            run.slots.append(value)
        self._held[job.call_id] += size
        self.held_bytes += size
        self._put(run, job.scope, job.node, value)

    def _put(self, run: HeldValues, scope: int, node: str, value: Stored) -> None:
        if run.asl_run is not None:
            self._asl_values.put(run.asl_run, scope, node, value)
        else:
            run.scopes[scope].results[node] = value

    def put_error(self, job: JobRef, error: ErrorInfo) -> None:
        run = self._runs.get(job.call_id)
        if run is not None:
            run.errors[job.scope, job.node] = error

    # ------------------------------------------------------- by durable runs

    def journal_value(self, call_id: str, entry: JournalEntry) -> bytes | None:
        """Value to journal with an entry: the result of a step, or the details of its failure."""
        run = self._runs.get(call_id)
        if run is None or entry.kind in ("due", "waits"):
            return None
        if entry.kind == "failed":
            error = run.errors.get((entry.scope, entry.node))
            return None if error is None else msgspec.msgpack.encode(error)
        if run.asl_run is None:
            stored = run.scopes[entry.scope].results.get(entry.node)
        else:
            stored = self._asl_values.journal_value(run.asl_run, entry.scope)
        return None if stored is None else bytes(self._storage.read(stored))

    def set_replay_time(self, call_id: str, at_us: int) -> None:
        """Set the clock of a durable run to the time of the entry being applied; since 1970."""
        run = self._runs.get(call_id)
        if run is not None and run.asl_run is not None:
            run.asl_run.set_time(at_us)

    def replay_outcome(self, call_id: str, entry: JournalEntry, value: bytes | None) -> None:
        """Apply a journaled outcome, as if the step had just ended."""
        run = self._runs[call_id]
        if value is None:
            return
        if entry.kind == "failed":
            run.errors[entry.scope, entry.node] = msgspec.msgpack.decode(value, type=ErrorInfo)
        elif run.scopes.find(entry.scope) is not None:
            self._put(run, entry.scope, entry.node, self._storage.store(run.slots, value))

    # --------------------------------------------------------------- by the loop

    def resolve(self, question: ResolveData, first_scope: int) -> DataResolved:
        """Answer a question of the core about values; items of a map become the scopes numbered from `first_scope`."""
        run = self._runs[question.call_id]
        if run.asl_run is None:
            return self._python_values.resolve(run, question, first_scope)
        scope = run.scopes[question.scope]
        node = scope.flow.nodes[question.node]
        answer, made = self._asl_values.resolve(run.asl_run, question, node, first_scope)
        run.make_scopes(scope, node, first_scope, [None] * made)
        return answer

    def node(self, question: ResolveData) -> Node:
        return self._runs[question.call_id].scopes[question.scope].flow.nodes[question.node]

    def make_item_scopes(self, question: ResolveData, blobs: Sequence[Stored], first_scope: int) -> int:
        """Create the scopes of a map, for subclasses that answer `resolve` in another way."""
        return self._python_values.make_item_scopes(self._runs[question.call_id], question, blobs, first_scope)

    def _stored(self, run: HeldValues, value: Any) -> Stored:
        return value.stored if isinstance(value, Encoded) else self._storage.store(run.slots, encoding.encode(value))
