"""Frame protocol between the gateway and its worker processes: a 4-byte little-endian length, then msgpack of one of these types.

Both sides are ours, and still neither trusts the other: a length is checked before anything is allocated for it, and every
field has a type and a bound. A peer that sends anything else is disconnected; for a worker that means it is lost.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from lamina.errors import LaminaError
from lamina.expr import Expr, Leaf
from lamina.sdk.app_state import StateCell, StateChange
from lamina.sdk.spans import InnerSpan

MAX_FRAME_BYTES = 64 * 2**20
MAX_SLOT = 2**31
_HEADER_BYTES = 4
_READ_BYTES = 256 * 1024

Natural = Annotated[int, Meta(ge=0)]
Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOT)]
Owner = Annotated[str, Meta(pattern=r"^[a-z0-9]{1,32}\Z")]
"""Names a process inside the folder of shared memory. It becomes part of a file name, hence the pattern."""


class FrameError(LaminaError):
    """Bytes that are no frame of ours; the connection cannot be used any more."""

    code = "bad-frame"


class FrameTooBig(FrameError):
    """A frame over the size limit, rejected by the sender so that the receiver never has to."""

    code = "frame-too-big"


class ShmRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0, tag_field="kind"):
    """Reference to `size` bytes of a slot of shared memory."""

    owner: Owner
    slot: Slot
    size: Natural
    start: Natural = 0


class ErrorInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1, tag_field="kind"):
    """An exception as data: the class that was raised, its message, and the user's own frames of its trace."""

    type: str
    message: str
    trace: str = ""
    hint: str = ""  #: what to do about it, where the error says so


class DeviceRef(ShmRef, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2, tag_field="kind"):
    """Reference to a value that is still on the device that made it. Only the executor there can use it as it is."""


Stored = bytes | ShmRef | DeviceRef
"""An encoded value, here or in shared memory, or one on a device."""


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
    traceparent: str = ""  #: of its step, in W3C's form; empty if nobody traces it


class RunBatch(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    batch_id: Natural
    mask: Natural
    jobs: list[JobFrame]


class ReleaseSlots(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Slots of the worker without readers. `retired` ones are still mapped somewhere, and must not be written again."""

    slots: list[Slot]
    retired: list[Slot] = []


class StopProcess(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Exit, after everything that was sent before."""


class CancelStream(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """The client has stopped reading the stream of this job."""

    job_id: int


class WorkerReady(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    load_us: Natural  #: from the request to load until now
    pid: Natural
    probes: list[tuple[Natural, Natural, Natural]] = []  #: batch, units, microseconds: see `live.probe`


class WorkerLoadFailed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    error: ErrorInfo


class StateChanges(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State transaction of a step: what it has read (scope, key, version), and what it changes.

    If a read is out of date by now, the worker is sent `CommitResult(must_rerun=True)` and runs the step again, if it
    `can_rerun`; without reads nothing can be out of date, and nothing is sent."""

    reads: list[tuple[str, str, Natural]]
    ops: list[StateChange]
    can_rerun: bool = True


class BatchDone(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """Results of a batch, one per job, in order. `still_viewed` are slots the user's code still reads after the batch."""

    batch_id: Natural
    device_us: Natural
    results: list[bytes | ShmRef | DeviceRef | ErrorInfo]
    still_viewed: list[ShmRef] = []
    state: StateChanges | None = None
    spans: list[InnerSpan] = []  #: parts of it that the function wants to be seen


class ResultChunk(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """One chunk of a streamed answer, in the order of the function's yields."""

    batch_id: Natural
    job_id: int
    value: bytes


class BatchHeartbeat(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=30):
    """Heartbeat of a batch."""

    batch_id: Natural


class StateRead(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=31):
    """Read request for a key of the state. Answered by `StateValue`; the worker waits for it."""

    batch_id: Natural
    scope: str
    key: str


class StateValue(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=32):
    cell: StateCell


class CommitResult(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=33):
    must_rerun: bool


ToWorker = RunBatch | ReleaseSlots | StopProcess | CancelStream | StateValue | CommitResult
FromWorker = WorkerReady | WorkerLoadFailed | BatchDone | ResultChunk | BatchHeartbeat | StateRead
Frame = TypeVar("Frame")

_encoder = msgspec.msgpack.Encoder()


def pack(*frames: Struct) -> bytearray:
    """Encode frames one behind the other: one write, one wake-up."""
    out = bytearray()
    for frame in frames:
        start = len(out)
        try:
            _encoder.encode_into(frame, out, start + _HEADER_BYTES)
        except (TypeError, ValueError, OverflowError) as error:  # a constant of a workflow that msgpack has no form for
            raise FrameError(f"cannot be sent: {error}") from None
        size = len(out) - start - _HEADER_BYTES
        if size > MAX_FRAME_BYTES:
            raise FrameTooBig(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} can be sent")
        out[start : start + _HEADER_BYTES] = size.to_bytes(_HEADER_BYTES, "little")
    return out


class FrameReader(Generic[Frame]):
    """Incremental decoder: bytes in whatever pieces they come, frames out."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Frame]) -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that `data` completes, to be iterated to the last before more is fed.

        Raises FrameError at the first that is none; nothing after it can be read.
        """
        rest = self._rest
        whole: bytes | bytearray = data
        if rest:
            rest += data
            whole = rest
        at = 0
        with memoryview(whole) as view:
            while len(view) - at >= _HEADER_BYTES:
                size = int.from_bytes(view[at : at + _HEADER_BYTES], "little")
                if size > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {size} bytes was announced; at most {MAX_FRAME_BYTES} are taken")
                end = at + _HEADER_BYTES + size
                if end > len(view):
                    break
                try:
                    frame = self._decoder.decode(view[at + _HEADER_BYTES : end])
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise FrameError(f"not a frame: {error}") from None
                at = end
                yield frame
        if whole is rest:
            del rest[:at]  # cheap: the front of a bytearray moves, its contents do not
        else:
            rest += data[at:]

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._rest)


def from_worker_reader() -> FrameReader[FromWorker]:
    """Decoder of frames from a worker, for the gateway."""
    return FrameReader(msgspec.msgpack.Decoder(FromWorker))


def to_worker_reader() -> FrameReader[ToWorker]:
    """Decoder of frames to a worker, for the worker."""
    return FrameReader(msgspec.msgpack.Decoder(ToWorker))


class FrameChannel:
    """A worker's end of the socket, blocking: it has nothing else to do while it waits."""

    def __init__(self, sock: socket.socket, reader: FrameReader[Any] | None = None) -> None:
        self._sock = sock
        self._reader = reader or to_worker_reader()
        self._frames: Iterator[Any] = iter(())
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def next_buffered(self) -> Any:
        """The next frame that has been read already, or None."""
        return next(self._frames, None)

    def read(self) -> bool:
        """Read what there is, waiting for the first byte; False at the end."""
        data = self._sock.recv(_READ_BYTES)
        self._frames = self._reader.feed(data)
        return bool(data)

    def is_cancelled(self, job_id: int) -> bool:
        """Has `CancelStream` arrived for this job? Reads what there is without waiting; frames keep their order."""
        ahead = list(self._frames)
        while select.select([self._sock], [], [], 0)[0] and (data := self._sock.recv(_READ_BYTES)):
            ahead += self._reader.feed(data)
        self._frames = iter(ahead)
        return any(isinstance(frame, CancelStream) and frame.job_id == job_id for frame in ahead)

    def wait_for(self, kind: type[Any]) -> Any:
        """Wait for the next frame of this type; what comes before and after it keeps its order."""
        ahead: list[Any] = []
        while True:
            ahead += self._frames
            found = next((frame for frame in ahead if isinstance(frame, kind)), None)
            if found is not None:
                ahead.remove(found)
                self._frames = iter(ahead)
                return found
            if not self.read():
                raise ConnectionResetError("the gateway is gone")

    def send(self, *frames: Struct) -> None:
        with self._sending:  # heartbeats come from threads, too
            self._sock.sendall(pack(*frames))

    def leave_open(self) -> None:
        """Leave the socket to the end of the process, so that the last frames come before its end."""
        self._sock.detach()
