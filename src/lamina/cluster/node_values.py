"""Values on a node: what its batches read and have made. The agent's counterpart of the leader's run values.

An agent knows jobs, not runs: inputs are there from the frame until the batch ends, results until the leader has no more use for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from lamina.cluster.messages import ReadState
from lamina.core.actions import JobRef
from lamina.drivers.engine import Origin
from lamina.expr import Expr, Leaf
from lamina.sdk.app_state import UNKNOWN, StateCell, StateChanges, Verdict
from lamina.state.kv_state import Step
from lamina.values.references import ErrorInfo, Stored
from lamina.worker.protocol import BatchDone


class NodeJob(Struct, frozen=True):
    """A job as its engine sees it."""

    args: dict[str, Expr] | None
    leaves: list[tuple[Leaf, Stored]]
    origin: Origin


class NodeValues:
    """Inputs and results of the jobs on a node, by the number that the agent gave each job."""

    def __init__(self) -> None:
        self.pieces: dict[str, Callable[[bytes], None]] = {}  #: by call: receiver of what its function yields
        self._jobs: dict[int, NodeJob] = {}
        self._results: dict[int, Stored | ErrorInfo] = {}

    def give(self, job: JobRef, args: dict[str, Expr] | None, leaves: list[tuple[Leaf, Stored]], origin: Origin) -> None:
        self._jobs[job.id] = NodeJob(args, leaves, origin)

    def inputs(self, job: JobRef) -> NodeJob:
        return self._jobs[job.id]

    def origin(self, job: JobRef) -> Origin:
        found = self._jobs.get(job.id)
        return found.origin if found is not None else ("", "")

    def consumers(self, job: JobRef) -> frozenset[str]:
        """Results are for the leader to place: none stays inside an executor."""
        return frozenset()

    def may_stay(self, job: JobRef) -> bool:
        return False

    def put(self, job: JobRef, value: Stored) -> None:
        self._results[job.id] = value

    def put_error(self, job: JobRef, error: ErrorInfo) -> None:
        self._results[job.id] = error

    def take(self, job_id: int) -> Stored | ErrorInfo | None:
        """The result of a job that has ended, which is forgotten here."""
        self._jobs.pop(job_id, None)
        return self._results.pop(job_id, None)


Commit = Callable[[int, BatchDone, Sequence[StateChanges]], bool]
"""Sends the changes and the results of a batch to the leader, under the number of a question; False: it is not there any more."""


class LeaderState:
    """State of functions, which the leader keeps: questions go there, and answers come back in any order."""

    def __init__(self) -> None:
        self._send: Callable[[ReadState], None] | None = None
        self._commit: Commit | None = None
        self._waiting: dict[int, tuple[Callable[[Any], None], Any]] = {}  #: with the answer if the leader goes before it has one
        self._questions = 0

    def connect(self, send: Callable[[ReadState], None], commit: Commit) -> None:
        """Send questions this way from now on."""
        self._send, self._commit = send, commit

    def disconnect(self) -> None:
        """The leader is gone. What it was asked is answered here: steps that wait are void, and their workers are not."""
        self._send = self._commit = None
        waiting, self._waiting = self._waiting, {}
        for then, unanswered in waiting.values():
            then(unanswered)

    def ask(self, function: str, call_id: str, scope: str, key: str, answer: Callable[[StateCell], None]) -> None:
        if self._send is not None:
            self._send(ReadState(self._note(answer, UNKNOWN), function, call_id, scope, key))
        else:
            answer(UNKNOWN)

    def submit(
        self,
        function: str,
        steps: Sequence[Step],
        done: BatchDone,
        changes: Sequence[StateChanges],
        decided: Callable[[dict[int, Verdict]], None],
    ) -> None:
        """The leader knows the steps, and takes the results with the changes: there is nothing left to decide here."""
        question = self._note(decided, {})
        if self._commit is None or not self._commit(question, done, changes):
            del self._waiting[question]
            decided({})  # to no effect: the leader that has asked for it is gone

    def on_answer(self, question: int, answer: Any) -> None:
        waiting = self._waiting.pop(question, None)
        if waiting is not None:
            waiting[0](answer)

    def _note(self, then: Callable[[Any], None], unanswered: Any) -> int:
        self._questions += 1
        self._waiting[self._questions] = then, unanswered
        return self._questions
