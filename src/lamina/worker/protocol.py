"""Frame protocol between the gateway and its workers: one function, one batch at a time."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lamina.expr import Expr, Leaf
from lamina.ipc.framing import FrameReader, Natural, StopProcess, WireMask
from lamina.sdk.app_state import StateCell
from lamina.values.references import DeviceRef, ErrorInfo, ReleaseSlots, ShmRef, Stored


class JobFrame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One job: `args` says how its arguments are made of `leaves`; without it each input is the argument of its name."""

    job_id: int
    call_id: str
    args: dict[str, Expr] | None
    leaves: list[tuple[Leaf, Stored]]
    deadline_us: int = 0  #: on the machine's monotonic clock, which a frame waiting in a socket does not stop; 0: none
    error: ErrorInfo | None = None  #: its inputs could not be made: it takes its place in the batch and fails with this
    is_streaming: bool = False  #: what it yields is wanted as it comes
    tenant: str = ""
    traceparent: str = ""  #: of its step, in W3C's form; empty if it is not traced
    takes_input: bool = False  #: its client sends messages while it runs


class RunBatch(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    batch_id: Natural
    mask: WireMask
    jobs: list[JobFrame]


class CancelStream(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """The client of this job has left, or stopped reading its stream."""

    job_id: int


class StreamInput(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=9):
    """A message of the client for a job that runs; None: it sends no more."""

    job_id: int
    value: bytes | None


class InputTaken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    """The function of this job has taken so many more messages: as many may follow."""

    batch_id: Natural
    job_id: int
    count: Natural


MAX_LISTED = 2**16
"""Of anything in a frame of a process that runs code of a tenant. Lists are never within lists there: what has more in it is
encoded, and looked at with limits of its own. A frame of 62 MiB of empty lists took 24 s and 4 GiB to decode."""

MAX_SPAN_BYTES = 256 * 2**10

PackedChanges = tuple[Natural, bytes]
"""Place of a request in its batch, and its `StateChanges`, encoded."""


class WorkerReady(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    load_us: Natural  #: from the request to load until now
    pid: Natural
    #: batch, units, microseconds: see `live.probe`
    probes: Annotated[list[tuple[Natural, Natural, Natural]], Meta(max_length=MAX_LISTED)] = []


class WorkerLoadFailed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    error: ErrorInfo


class BatchDone(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """Results of a batch, one per job, in order. `still_viewed` are slots the user's code still reads after the batch. `state`:
    what its jobs have read and changed of the state, in their order; of a job that failed, nothing. `is_warmup`: it ran while
    what the next ones need was being made."""

    batch_id: Natural
    device_us: Natural
    results: Annotated[list[bytes | ShmRef | DeviceRef | ErrorInfo], Meta(max_length=MAX_LISTED)]
    still_viewed: Annotated[list[ShmRef], Meta(max_length=MAX_LISTED)] = []
    state: Annotated[list[PackedChanges], Meta(max_length=MAX_LISTED)] = []
    spans: bytes = b""  #: parts of it that the function wants to be seen, encoded
    is_warmup: bool = False


class ResultChunk(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """One chunk of a streamed answer, in the order of the function's yields."""

    batch_id: Natural
    job_id: int
    value: bytes


class BatchHeartbeat(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=30):
    """Heartbeat of a batch. `alive_only`: of the loop that its call waits on, not of the function."""

    batch_id: Natural
    alive_only: bool = False


class StateRead(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=31):
    """Read request for a key of the state, for the job at a place of its batch. Answered by `StateValue`, under the number of the
    question; what asks waits for it."""

    batch_id: Natural
    place: Natural
    question: Natural
    scope: str
    key: str


class StateValue(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=32):
    question: Natural
    cell: StateCell


class BufferRead(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=34):
    """Request for a buffer under a key of the tenant of this job. Answered by `BufferAnswer`; the worker waits for it."""

    batch_id: Natural
    job_id: int
    key: str


class BufferWrite(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=35):
    """Request to keep an encoded array under a key of the tenant of this job; answered likewise."""

    batch_id: Natural
    job_id: int
    key: str
    value: bytes | ShmRef


class BufferAnswer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=36):
    """Where a buffer is, or why there is none."""

    path: str = ""
    digest: str = ""
    error: ErrorInfo | None = None


ToWorker = BufferAnswer | RunBatch | ReleaseSlots | StopProcess | CancelStream | StreamInput | StateValue
FromWorker = (
    WorkerReady | WorkerLoadFailed | BatchDone | ResultChunk | BatchHeartbeat | InputTaken | StateRead | BufferRead | BufferWrite
)


def from_worker_reader() -> FrameReader[FromWorker]:
    """Decoder of frames from a worker, for the gateway."""
    return FrameReader(msgspec.msgpack.Decoder(FromWorker))


def to_worker_reader() -> FrameReader[ToWorker]:
    """Decoder of frames to a worker, for the worker."""
    return FrameReader(msgspec.msgpack.Decoder(ToWorker))
