"""What an ingress and its controller say to each other; framed like what workers say (`live.frames`)."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from lamina.live.frames import FrameReader, Natural, Release, ShmRef, Stop
from lamina.sdk.binding import Param

Payload = bytes | ShmRef
"""Here, or in shared memory."""


class Head(Struct, frozen=True, array_like=True, tag=1):
    """Everything of a request but its body. Clients repeat themselves: a head is told once and then called by its number."""

    number: Natural
    method: str
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    keep_alive: bool


class Ask(Struct, frozen=True, array_like=True, tag=2):
    """A request under head number `head`: its body, or the inputs that were made of it."""

    number: Natural
    head: Natural
    at_us: Natural  #: when it was read, on the machine's clock
    size: Natural  #: of the body
    body: Payload
    inputs: dict[str, Payload] | None = None


class Gone(Struct, frozen=True, array_like=True, tag=3):
    """The client has left."""

    number: Natural


class Read(Struct, frozen=True, array_like=True, tag=4):
    """The value of this answer has been read, and its slot may be used again."""

    number: Natural


class Up(Struct, frozen=True, array_like=True, tag=5):
    """Listening."""

    port: Natural


class Routes(Struct, frozen=True, array_like=True, tag=10):
    """Paths whose bodies are inputs, and of which parameters."""

    params: dict[bytes, list[Param]]


class Value(Struct, frozen=True, array_like=True, tag=11):
    """A result, still encoded: text is made of it where it leaves."""

    number: Natural
    value: Payload
    headers: bytes


class Respond(Struct, frozen=True, array_like=True, tag=12):
    number: Natural
    status: Natural
    body: bytes
    content_type: bytes
    extra: bytes


class Begin(Struct, frozen=True, array_like=True, tag=13):
    number: Natural
    status: Natural
    content_type: bytes
    extra: bytes


class Push(Struct, frozen=True, array_like=True, tag=14):
    number: Natural
    piece: bytes


class End(Struct, frozen=True, array_like=True, tag=15):
    number: Natural


class Closing(Struct, frozen=True, array_like=True, tag=16):
    """Take nothing new; what is open is still answered."""


FromIngress = Head | Ask | Gone | Read | Up
ToIngress = Routes | Value | Respond | Begin | Push | End | Release | Closing | Stop


def ingress_reader() -> FrameReader[FromIngress]:
    return FrameReader(msgspec.msgpack.Decoder(FromIngress))


def controller_reader() -> FrameReader[ToIngress]:
    return FrameReader(msgspec.msgpack.Decoder(ToIngress))
