"""Optimistic commit of the state that a step on a worker reads and changes.

What it changes comes with its result. If what it has read is unchanged, the changes are made (if the result is wanted at all);
if not, the step runs again, while its inputs are still there.
"""

from __future__ import annotations

from msgspec import structs

from lamina.engines.worker_handle import WorkerBatch, WorkerHandle
from lamina.errors import Conflict, LaminaError
from lamina.ipc.protocol import BatchDone, CommitResult, ErrorInfo, ReleaseSlots, ShmRef, StateChanges, StateRead, StateValue
from lamina.state.kv_state import StateTable


def answer_read(book: StateTable, worker: WorkerHandle, asked: StateRead) -> None:
    batch = worker.batches.get(asked.batch_id)
    call_id = batch.action.jobs[0].call_id if batch is not None else ""
    worker.send(StateValue(book.read(book.resolve_key(worker.load.function, call_id, asked.scope, asked.key))))


def commit_changes(
    book: StateTable, batch: WorkerBatch, done: BatchDone, changes: StateChanges, is_wanted: bool
) -> BatchDone | None:
    """Commit the changes of a step. None: what it has read is out of date, and it runs again."""
    job = batch.action.jobs[0]
    verdict: LaminaError | bool = True
    if is_wanted:
        step = (job.call_id, job.scope, job.node)
        verdict = book.commit(batch.action.function, step, changes.reads, changes.ops)
    again = verdict is False and changes.can_rerun
    if changes.reads:
        batch.worker.send(CommitResult(again))
    if again:
        return None
    if verdict is True:
        return done
    error = verdict or Conflict("state: what was read was changed meanwhile, again and again")
    batch.worker.send(ReleaseSlots([result.slot for result in done.results if isinstance(result, ShmRef)]))
    return structs.replace(done, results=[ErrorInfo(type(error).__name__, error.message)] * len(done.results))
