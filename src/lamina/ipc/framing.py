"""Frames between processes of ours: a 4-byte little-endian length, then msgpack of one message type.

Both sides are ours, and still neither trusts the other: a length is checked before anything is allocated for it, and every
field has a type and a bound. A peer that sends anything else is disconnected; for a worker that means it is lost.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from lamina.errors import LaminaError

MAX_FRAME_BYTES = 64 * 2**20
_HEADER_BYTES = 4
_READ_BYTES = 256 * 1024

Natural = Annotated[int, Meta(ge=0)]
WireMask = Natural | bytes
"""Units of a device as bits; as bytes where they are more than an integer of msgpack has: `wire_mask`, `read_mask`."""

Frame = TypeVar("Frame")

_encoder = msgspec.msgpack.Encoder()


class FrameError(LaminaError):
    """Bytes that are no frame of ours; the connection cannot be used any more."""

    code = "bad-frame"


class FrameTooBig(FrameError):
    """A frame over the size limit, rejected by the sender so that the receiver never has to."""

    code = "frame-too-big"


class StopProcess(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Exit, after everything that was sent before."""


class SocketMessage(Struct, frozen=True, array_like=True, tag=31):
    """A message of a WebSocket whose two ends are in different processes, in either direction."""

    number: Natural
    data: bytes
    is_text: bool

    @classmethod
    def of(cls, number: int, message: str | bytes) -> SocketMessage:
        return cls(number, message.encode(), True) if isinstance(message, str) else cls(number, message, False)

    @property
    def message(self) -> str | bytes:
        return self.data.decode() if self.is_text else self.data


class SocketTaken(Struct, frozen=True, array_like=True, tag=35):
    """So many messages of the client have been taken."""

    number: Natural
    count: Natural


class SocketClose(Struct, frozen=True, array_like=True, tag=36):
    """The WebSocket is to be closed; one that has not been accepted, to be refused."""

    number: Natural
    code: Natural
    reason: str


def wire_mask(mask: int) -> int | bytes:
    """A mask as it is sent."""
    return mask if mask < 2**64 else mask.to_bytes(-(-mask.bit_length() // 8), "little")


def read_mask(sent: int | bytes) -> int:
    """A mask that was sent."""
    return sent if isinstance(sent, int) else int.from_bytes(sent, "little")


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


class FrameChannel:
    """A worker's end of the socket, blocking: it has nothing else to do while it waits."""

    def __init__(self, sock: socket.socket, reader: FrameReader[Any]) -> None:
        self._sock = sock
        self._reader = reader
        self._frames: Iterator[Any] = iter(())
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def next_buffered(self) -> Any:
        """The next frame that has been read already, or None."""
        return next(self._frames, None)

    def read(self) -> bool:
        """Read what there is, waiting for the first byte; False at the end. Frames that were not taken yet stay before it."""
        data = self._sock.recv(_READ_BYTES)
        self._frames = itertools.chain(self._frames, self._reader.feed(data))
        return bool(data)

    @property
    def is_readable(self) -> bool:
        """Whether `read` would not wait."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def lookahead(self) -> list[Any]:
        """Every frame that has arrived, without waiting; they keep their order and are still to be taken."""
        ahead = list(self._frames)
        while select.select([self._sock], [], [], 0)[0] and (data := self._sock.recv(_READ_BYTES)):
            ahead += self._reader.feed(data)
        self._frames = iter(ahead)
        return ahead

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
