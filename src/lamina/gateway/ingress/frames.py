"""What an ingress and its controller say to each other; framed like what workers say (`live.frames`).

All that one side has to say in a turn of its loop travels as one frame: one write, one wake-up, one decoding.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from lamina.core.actions import Reply
from lamina.gateway.http import Limits
from lamina.gateway.logs import LogForm
from lamina.gateway.wire import Problem
from lamina.live.frames import FrameReader, FrameTooBig, Natural, Release, ShmRef, Stop, pack
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature

HEADS = 1_024
"""So many heads are remembered; then all are told anew."""

Payload = bytes | ShmRef
"""Here, or in shared memory."""


class Slot(Struct, frozen=True, array_like=True, gc=False):
    """So many bytes of a slot of the ingress that says so: whose it is need not be said, or checked, for every call."""

    number: Natural
    size: Natural


Given = bytes | Slot
"""A payload as an ingress gives it."""


class Setup(Struct, frozen=True, kw_only=True):
    """What an ingress is started with, as JSON on its command line."""

    host: str
    port: int
    grpc_port: int = -1  #: -1: none
    folder: str  #: of shared memory; "": there is none, everything travels in frames
    owner: str
    pool_bytes: int
    limits: Limits
    tls: tuple[str, str] | None = None  #: certificate and key
    fd: int = -1
    log_form: LogForm = ""


# ------------------------------------------------------------------ from an ingress


class Head(Struct, frozen=True, array_like=True, tag=1):
    """Everything of a request but its body. Clients repeat themselves: a head is told once and then called by its number.
    Of a call whose body has been read, only the headers that still matter."""

    number: Natural
    method: str
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    keep_alive: bool


class Ask(Struct, frozen=True, array_like=True, tag=2):
    """A call: the path of head number `head`, and the inputs that were made of its body."""

    number: Natural
    head: Natural
    at_us: Natural  #: when it came, on the machine's clock
    size: Natural  #: of the body
    inputs: dict[str, Given]


class Gone(Struct, frozen=True, array_like=True, tag=3):
    """The client has left."""

    number: Natural


class Read(Struct, frozen=True, array_like=True, tag=4):
    """The values of this answer have been read, and their slots may be used again."""

    number: Natural


class Up(Struct, frozen=True, array_like=True, tag=5):
    """Listening."""

    port: Natural
    grpc_port: Natural = 0


class Raw(Struct, frozen=True, array_like=True, tag=6):
    """A request as it is."""

    number: Natural
    head: Natural
    body: Given


class Infer(Struct, frozen=True, array_like=True, tag=7):
    """An inference request of the Open Inference Protocol, over HTTP or gRPC: one call per row."""

    number: Natural
    head: Natural
    at_us: Natural
    size: Natural  #: of all its tensors
    model: str
    version: str
    rows: list[dict[str, Given]]
    timeout_us: Natural = 0
    priority: int = 0
    in_pieces: bool = False  #: what it yields is wanted as it comes


class Rpc(Struct, frozen=True, array_like=True, tag=8):
    """A message of gRPC as it is; `timeout_us` is what its caller gives it."""

    number: Natural
    head: Natural
    method: str
    message: Given
    timeout_us: Natural = 0


# ------------------------------------------------------------------- to an ingress


class ModelIs(Struct, frozen=True, array_like=True):
    """As much of a model as it takes to read requests for it, and to write answers."""

    name: str
    version: str
    target: str
    batched: bool
    signature: Signature


class Routes(Struct, frozen=True, array_like=True, tag=10):
    """Paths whose bodies are inputs, and of which parameters; and all models. `guarded`: who shows no token gets nothing."""

    params: dict[bytes, list[Param]]
    models: list[ModelIs]
    guarded: bool


class Value(Struct, frozen=True, array_like=True, tag=11):
    """A result, still encoded: text is made of it where it leaves. `row` counts the calls of one request."""

    number: Natural
    row: Natural
    value: Payload
    reply: Reply


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


class Trouble(Struct, frozen=True, array_like=True, tag=17):
    """Why an inference request has no answer."""

    number: Natural
    problem: Problem


class Piece(Struct, frozen=True, array_like=True, tag=18):
    """Part of the answer to an inference request, still encoded."""

    number: Natural
    value: bytes


class Said(Struct, frozen=True, array_like=True, tag=19):
    """An answer to `Rpc`: a message, or with a `code` why there is none."""

    number: Natural
    message: bytes
    code: Natural = 0
    text: str = ""


FromIngress = Ask | Head | Infer | Read | Gone | Raw | Rpc | Up
ToIngress = Value | Release | Respond | Routes | Begin | Push | End | Trouble | Piece | Said | Closing


class FromOne(Struct, frozen=True, array_like=True, tag=1):
    """A turn's worth."""

    said: list[FromIngress]


class ToOne(Struct, frozen=True, array_like=True, tag=1):
    said: list[ToIngress]


def ingress_reader() -> FrameReader[FromOne]:
    return FrameReader(msgspec.msgpack.Decoder(FromOne))


def controller_reader() -> FrameReader[ToOne | Stop]:
    return FrameReader(msgspec.msgpack.Decoder(ToOne | Stop))


def packed(said: list[Struct], *, to_ingress: bool) -> bytearray:
    """As few frames as can be."""
    try:
        return pack(ToOne(said) if to_ingress else FromOne(said))  # type: ignore[arg-type]
    except FrameTooBig:
        if len(said) < 2:
            raise
        half = len(said) // 2
        return packed(said[:half], to_ingress=to_ingress) + packed(said[half:], to_ingress=to_ingress)
