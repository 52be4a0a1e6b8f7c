"""In-flight batches of an engine: arguments on the way in, which jobs are still wanted, results on the way out.

A value that a batch reads stays where it is until `close`; a job dropped in between runs on, and its result is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from lamina.core.actions import JobRef, StartBatch
from lamina.core.events import JobOutcome
from lamina.drivers.engine import JobValues, MessageStream, OriginOf
from lamina.errors import BadValue, Conflict, LaminaError
from lamina.expr import Leaf
from lamina.ipc.framing import FrameError
from lamina.sdk.app_state import MAX_PARTS, StateChanges, Verdict
from lamina.sdk.spans import InnerSpan
from lamina.values.references import DeviceRef, ErrorInfo, ShmRef, Stored, ValuesExhausted
from lamina.values.slot_refs import SlotReferences, ValueLost
from lamina.worker.protocol import MAX_SPAN_BYTES, JobFrame, PackedChanges

_OK = JobOutcome()
_NO_ROOM = JobOutcome(ok=False, error=ValuesExhausted.code, name=ValuesExhausted.__name__)
_BAD_INPUT = JobOutcome(ok=False, error="bad-value")
_NO_ORIGIN = ("", "")
NONE_LOST: Mapping[int, tuple[str, ...]] = MappingProxyType({})
NONE_FAILED: Mapping[int, str] = MappingProxyType({})

STALE_READ = ErrorInfo(Conflict.__name__, "state: what was read was changed meanwhile, again and again", hint="try again later")
"""Result of a job that has read state which was changed before its end: it may run again."""

_STALE_STREAM = ErrorInfo(Conflict.__name__, "state: what was read was changed meanwhile", hint="call it again")
"""Of what has sent parts of its answer already, and cannot run again."""

MAX_BATCH_PARTS = 5 * MAX_PARTS
"""Reads and changes of all requests of a batch."""

_TOO_MANY_CHANGES = ErrorInfo(
    BadValue.__name__, f"state: more than {MAX_PARTS} reads or changes in one step", hint="make them in several"
)
_spans_decoder = msgspec.msgpack.Decoder(list[InnerSpan])
_changes_decoder = msgspec.msgpack.Decoder(StateChanges)

_STALE = JobOutcome(False, "function-failed", Conflict.__name__, is_stale=True)
_FINAL = JobOutcome(is_final=True)


def read_changes(packed: Sequence[PackedChanges]) -> tuple[list[StateChanges], dict[int, ErrorInfo]]:
    """Changes of the state that came from a process with code of a tenant, and errors of those that are none or too many, by
    place. No more are decoded than one turn of the loop has time for."""
    found: list[StateChanges] = []
    errors: dict[int, ErrorInfo] = {}
    parts = 0
    for place, blob in packed:
        try:
            one = _changes_decoder.decode(blob) if parts <= MAX_BATCH_PARTS else None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            one = None
        if one is None or one.place != place:
            errors[place] = _TOO_MANY_CHANGES
        else:
            parts += len(one.reads) + len(one.ops) + len(one.after)
            found.append(one)
    return found, errors


def read_spans(packed: bytes) -> list[InnerSpan]:
    """Spans that came from such a process; none, if they are none or too many."""
    try:
        return _spans_decoder.decode(packed) if len(packed) <= MAX_SPAN_BYTES else []
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


def checked_changes(batch_id: int, changes: list[StateChanges], jobs: int) -> list[StateChanges]:
    """What the jobs of a batch change of the state. Raises FrameError unless each is there once at most, in order."""
    last = -1
    for one in changes:
        if not last < one.place < jobs or any(before >= one.place for before in one.after):
            raise FrameError(f"changes of job {one.place} in batch {batch_id}, which it does not have")
        last = one.place
    return changes


def commit_errors(
    jobs: Sequence[JobRef], verdicts: Mapping[int, Verdict], can_rerun: Callable[[JobRef], bool]
) -> dict[int, ErrorInfo]:
    """Errors, by place, in place of the results of jobs whose changes of the state were not committed."""
    errors = {}
    for place, verdict in verdicts.items():
        if isinstance(verdict, LaminaError):
            errors[place] = ErrorInfo(type(verdict).__name__, verdict.message, hint=verdict.hint)
        elif not verdict:
            errors[place] = STALE_READ if can_rerun(jobs[place]) else _STALE_STREAM
    return errors


@dataclass(slots=True, eq=False)
class InFlightBatch:
    action: StartBatch
    reads: list[ShmRef]
    lost: dict[int, tuple[str, ...]] = field(default_factory=dict, kw_only=True)  #: by place: steps whose results are gone


BatchT = TypeVar("BatchT", bound=InFlightBatch)
PinnedT = TypeVar("PinnedT")


class InFlightBatches(Generic[BatchT]):
    def __init__(self, references: SlotReferences) -> None:
        self.open: dict[int, BatchT] = {}
        self._references = references
        self._wanted: dict[int, str] = {}  #: jobs in these batches, less the dropped ones, with their calls
        self._drained: asyncio.Event | None = None

    def add(self, batch: BatchT) -> None:
        self.open[batch.action.batch_id] = batch
        self._wanted.update([(job.id, job.call_id) for job in batch.action.jobs])

    def note_lost(self, batch_id: int, lost: dict[int, tuple[str, ...]]) -> None:
        """Some jobs of a batch have no inputs any more."""
        self.open[batch_id].lost = lost

    def drop_job(self, job_id: int) -> bool:
        """The result of a job is not wanted any more; returns whether it was, in a batch that is open."""
        return self._wanted.pop(job_id, None) is not None

    def is_wanted(self, job_id: int) -> bool:
        return job_id in self._wanted

    def call_of(self, job_id: int) -> str:
        """The call that a job is of; "": it is in none of these batches, or is not wanted any more."""
        return self._wanted.get(job_id, "")

    def close(self, batch: BatchT) -> list[bool]:
        """Remove a batch that has ended, however it did; returns which of its results are still wanted."""
        jobs = [job.id for job in batch.action.jobs]
        wanted = [job in self._wanted for job in jobs]
        del self.open[batch.action.batch_id]
        for job in jobs:
            self._wanted.pop(job, None)
        self._references.unpin(batch.reads)
        if self._drained is not None and not self.open:
            self._drained.set()
        return wanted

    async def wait_drained(self, grace_s: float) -> None:
        """Wait until all batches have ended, or `grace_s` have passed."""
        if self.open:
            self._drained = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_s)


def pin_leaves(leaves: Sequence[tuple[Leaf, Stored]], pin: Callable[[Stored], PinnedT]) -> list[tuple[Leaf, PinnedT]]:
    """Pin what the arguments of a job are made of. Raises `ValueLost` with all steps whose results are gone, not the first
    alone: they can be made again at once."""
    pinned: list[tuple[Leaf, PinnedT]] = []
    lost: list[str] = []
    said = ""
    for leaf, stored in leaves:
        try:
            pinned.append((leaf, pin(stored)))
        except ValueLost as error:
            said = error.message
            lost += [leaf[1]] if leaf[0] == "node" else []
    if said:
        raise ValueLost(said, steps=lost)
    return pinned


def encode_jobs(
    values: JobValues,
    references: SlotReferences,
    action: StartBatch,
    deadline_us: Callable[[str], int],
    origin: OriginOf | None,
    device: str = "",
    user: int = 0,
) -> tuple[list[JobFrame], list[ShmRef], dict[int, tuple[str, ...]]]:
    """Encode the jobs of a batch; returns the frames, the slots the batch reads, and by place the steps whose results are gone.
    Values of `device` need not leave it. `user`: it runs as this one; 0: as the server's."""
    reads: list[ShmRef] = []
    frames = []
    lost: dict[int, tuple[str, ...]] = {}
    for place, job in enumerate(action.jobs):
        try:
            given = values.inputs(job)
            leaves = pin_leaves(given.leaves, lambda stored: references.pin(stored, reads, device, user))
        except LaminaError as error:
            if isinstance(error, ValueLost):
                lost[place] = error.steps
            frames.append(JobFrame(job.id, job.call_id, None, [], error=ErrorInfo(type(error).__name__, error.message)))
            continue
        tenant, trace = origin(job, action.batch_id) if origin is not None else _NO_ORIGIN
        sink = values.pieces.get(job.call_id) if values.pieces else None
        takes_input = isinstance(sink, MessageStream)
        options = (deadline_us(job.call_id), None, sink is not None, tenant, trace, takes_input)
        frames.append(JobFrame(job.id, job.call_id, given.args, leaves, *options))
    return frames, reads, lost


def _failed_outcome(error: ErrorInfo) -> JobOutcome:
    """What the controller is told of an error: a mistake of the client's, or the function's failure."""
    if error.type == BadValue.__name__:
        return _BAD_INPUT
    return JobOutcome(False, "bad-value" if 0 < error.status < 500 else "function-failed", error.type)


def deliver_results(
    values: JobValues,
    jobs: Sequence[JobRef],
    wanted: Sequence[bool],
    results: Sequence[bytes | ShmRef | ErrorInfo],
    free: Callable[[ShmRef], None],
    lost: Mapping[int, tuple[str, ...]] = NONE_LOST,
    changed: Collection[int] = (),
    reasons: Mapping[int, str] = NONE_FAILED,
) -> tuple[JobOutcome, ...]:
    """Store the results that are wanted and `free` the rest; returns the outcomes for the controller, none if all went well. By
    place: jobs whose inputs are `lost`, those that have `changed` state, and `reasons` of errors that are not the function's."""
    outcomes = []
    for place, (job, is_wanted, result) in enumerate(zip(jobs, wanted, results, strict=True)):
        if isinstance(result, ErrorInfo):
            outcome = _STALE if result is STALE_READ else _failed_outcome(result)
            if place in lost or place in reasons:
                outcome = JobOutcome(False, reasons.get(place, ValueLost.code), result.type, lost=lost.get(place, ()))
            outcomes.append(outcome)
            if is_wanted:
                values.put_error(job, result)
            continue
        outcome, is_kept = _FINAL if place in changed and isinstance(result, DeviceRef) else _OK, is_wanted
        if is_wanted:
            try:
                values.put(job, result)
            except ValuesExhausted as error:
                outcome, is_kept = _NO_ROOM, False
                values.put_error(job, ErrorInfo(type(error).__name__, error.message))
        if not is_kept and isinstance(result, ShmRef):
            free(result)
        outcomes.append(outcome)
    return () if all(outcome is _OK for outcome in outcomes) else tuple(outcomes)
