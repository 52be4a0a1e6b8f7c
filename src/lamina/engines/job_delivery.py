"""Jobs between engine and run values, in the gateway: arguments of a batch on the way in, results on the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lamina.core.actions import JobRef, StartBatch
from lamina.core.events import JobOutcome
from lamina.errors import BadValue, LaminaError
from lamina.expr import Expr, Leaf
from lamina.ipc.protocol import ErrorInfo, JobFrame, ShmRef, Stored
from lamina.values.slot_refs import SlotReferences

_OK = JobOutcome()
_BAD_INPUT = JobOutcome(ok=False, error="bad-value")


Origin = tuple[str, str]
"""Of a job: its tenant, and the `traceparent` of its step."""

OriginOf = Callable[[JobRef, int], Origin]
"""Of a job in a batch."""

NO_ORIGIN: Origin = ("", "")


class JobInput(Protocol):
    """Arguments of a job: the expressions that make them, and the values these read."""

    @property
    def args(self) -> dict[str, Expr] | None: ...

    @property
    def leaves(self) -> list[tuple[Leaf, Stored]]: ...


class JobValues(Protocol):
    """Store of the values of all runs, as an engine sees it."""

    @property
    def pieces(self) -> Mapping[str, Callable[[bytes], None]]: ...

    def inputs(self, job: JobRef, /) -> JobInput: ...

    def put(self, job: JobRef, value: Stored, /) -> None: ...

    def put_error(self, job: JobRef, error: ErrorInfo, /) -> None: ...


def job_frames(
    data: JobValues,
    ledger: SlotReferences,
    action: StartBatch,
    deadline_us: Callable[[str], int],
    origin: OriginOf | None,
    device: str = "",
) -> tuple[list[JobFrame], list[ShmRef]]:
    """Encode the jobs of a batch; returns the frames and the slots the batch reads. Values of `device` need not leave it."""
    reads: list[ShmRef] = []
    frames = []
    for job in action.jobs:
        try:
            given = data.inputs(job)
            leaves = [(leaf, ledger.pin(stored, reads, device)) for leaf, stored in given.leaves]
        except LaminaError as error:
            frames.append(JobFrame(job.id, job.call_id, None, [], error=ErrorInfo(type(error).__name__, error.message)))
            continue
        whose = origin(job, action.batch_id) if origin is not None else NO_ORIGIN
        frames.append(
            JobFrame(job.id, job.call_id, given.args, leaves, deadline_us(job.call_id), None, job.call_id in data.pieces, *whose)
        )
    return frames, reads


def deliver_results(
    data: JobValues,
    jobs: Sequence[JobRef],
    wanted: Sequence[bool],
    results: Sequence[bytes | ShmRef | ErrorInfo],
    free: Callable[[ShmRef], None],
) -> tuple[JobOutcome, ...]:
    """Store the results that are wanted and `free` the rest; returns the outcomes for the controller, none if all went well."""
    outcomes = []
    for job, is_wanted, result in zip(jobs, wanted, results, strict=True):
        if isinstance(result, ErrorInfo):
            outcomes.append(_BAD_INPUT if result.type == BadValue.__name__ else JobOutcome(False, "function-failed", result.type))
            if is_wanted:
                data.put_error(job, result)
            continue
        outcomes.append(_OK)
        if is_wanted:
            data.put(job, result)
        elif isinstance(result, ShmRef):
            free(result)
    return () if all(outcome.ok for outcome in outcomes) else tuple(outcomes)
