"""Optimistic commit of the state that a step on a worker reads and changes.

What it changes comes with its result. If what it has read is unchanged, the changes are made (if the result is wanted at all);
if not, the step runs again, while its inputs are still there.
"""

from __future__ import annotations

from msgspec import structs

from lamina.errors import Conflict, LaminaError
from lamina.live.frames import Changes, Done, ErrorInfo, Release, Settled, ShmRef, StateIs, StateRead
from lamina.live.local_worker import LocalBatch, LocalWorker
from lamina.live.statebook import Book


def tell(book: Book, worker: LocalWorker, asked: StateRead) -> None:
    batch = worker.batches.get(asked.batch_id)
    call_id = batch.action.jobs[0].call_id if batch is not None else ""
    worker.send(StateIs(book.read(book.place(worker.load.function, call_id, asked.scope, asked.key))))


def settle(book: Book, batch: LocalBatch, done: Done, changes: Changes, is_wanted: bool) -> Done | None:
    """Commit the changes of a step. None: what it has read is out of date, and it runs again."""
    job = batch.action.jobs[0]
    verdict: LaminaError | bool = True
    if is_wanted:
        step = (job.call_id, job.scope, job.node)
        verdict = book.commit(batch.action.function, step, changes.reads, changes.ops)
    again = verdict is False and changes.may
    if changes.reads:
        batch.worker.send(Settled(again))
    if again:
        return None
    if verdict is True:
        return done
    error = verdict or Conflict("state: what was read was changed meanwhile, again and again")
    batch.worker.send(Release([result.slot for result in done.results if isinstance(result, ShmRef)]))
    return structs.replace(done, results=[ErrorInfo(type(error).__name__, error.message)] * len(done.results))
