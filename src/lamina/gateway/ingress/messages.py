"""Messages between an ingress process and its controller; framed like those of workers.

All messages of one side in a turn of its loop travel as one frame: one write, one wake-up, one decoding.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from lamina.core.actions import Reply
from lamina.gateway.observability.logs import LogFormat
from lamina.gateway.routes.problems import HttpProblem
from lamina.ipc.framing import FrameReader, FrameTooBig, Natural, SocketClose, SocketMessage, SocketTaken, StopProcess, pack
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature
from lamina.server.http1 import HttpLimits
from lamina.server.origins import OriginSettings
from lamina.values.references import NodeRef, ReleaseSlots, ShmRef

MAX_HEADS = 1_024
"""So many heads are numbered; then all are sent anew."""

Payload = bytes | ShmRef | NodeRef
"""Inline, in shared memory, or in that of another machine."""


class SlotPayload(Struct, frozen=True, array_like=True, gc=False):
    """A payload in a slot of the ingress that sends it: the owner need not be named, or checked, for every call."""

    number: Natural
    size: Natural
    serial: Natural = 0  #: of the value in it, for other machines


IngressPayload = bytes | SlotPayload
"""A payload as an ingress sends it."""


class IngressSetup(Struct, frozen=True, kw_only=True):
    """Settings of an ingress process, as JSON on its command line."""

    host: str
    port: int
    grpc_port: int = -1  #: -1: none
    folder: str  #: of shared memory; "": there is none, everything travels in frames
    owner: str
    pool_bytes: int
    memory_bytes: int  #: its memory budget
    limits: HttpLimits
    tls: tuple[str, str] | None = None  #: certificate and key
    origins: OriginSettings = OriginSettings()
    fd: int = -1
    log_format: LogFormat = ""


# ------------------------------------------------------------------ from an ingress


class RequestHead(Struct, frozen=True, array_like=True, tag=1):
    """A request without its body. Clients repeat themselves: a head is sent once and then called by its number.
    Of a call whose body has been decoded, only the headers that still matter."""

    number: Natural
    method: str
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    keep_alive: bool


class CallRequest(Struct, frozen=True, array_like=True, tag=2):
    """A call: the path of head number `head`, and the decoded inputs."""

    number: Natural
    head: Natural
    at_us: Natural  #: when it came, on the machine's clock; how long ago, between machines
    size: Natural  #: of the body
    inputs: dict[str, IngressPayload]


class ClientGone(Struct, frozen=True, array_like=True, tag=3):
    """The client has disconnected."""

    number: Natural


class ReplyConsumed(Struct, frozen=True, array_like=True, tag=4):
    """The values of this reply have been read, and their slots may be reused."""

    number: Natural


class IngressReady(Struct, frozen=True, array_like=True, tag=5):
    """The process is listening."""

    port: Natural
    grpc_port: Natural = 0


class ForwardedRequest(Struct, frozen=True, array_like=True, tag=6):
    """A request forwarded as it is."""

    number: Natural
    head: Natural
    body: IngressPayload


class InferRequest(Struct, frozen=True, array_like=True, tag=7):
    """An inference request of the Open Inference Protocol, over HTTP or gRPC: one call per row."""

    number: Natural
    head: Natural
    at_us: Natural
    size: Natural  #: of all its tensors
    model: str
    version: str
    rows: list[dict[str, IngressPayload]]
    timeout_us: Natural = 0
    priority: int = 0
    is_streamed: bool = False  #: what it yields is wanted as it comes


class RpcRequest(Struct, frozen=True, array_like=True, tag=8):
    """A gRPC message forwarded as it is; `timeout_us` is the client's time limit."""

    number: Natural
    head: Natural
    method: str
    message: IngressPayload
    timeout_us: Natural = 0


class CommitAllowed(Struct, frozen=True, array_like=True, tag=22):
    """Answer to `CommitIntent`: this request is not asked again, whatever happens."""

    number: Natural


class HeadCheckRequest(Struct, frozen=True, array_like=True, tag=9):
    """Head of a request whose body is still to come: may it send it?"""

    number: Natural
    authorization: bytes | None


class HeldBack(Struct, frozen=True, array_like=True, tag=24):
    """To keep to the level, calls of this target had to wait, and so many were refused since the last time; the last of them was
    `call_id`. `target` is its path, or its name if it was called as a model."""

    target: bytes
    refused: Natural
    call_id: str


class TenantLookup(Struct, frozen=True, array_like=True, tag=26):
    """Whose calls are those with this header? Asked when calls are held back."""

    authorization: bytes | None


class SocketLeft(Struct, frozen=True, array_like=True, tag=32):
    """The client has closed its WebSocket."""

    number: Natural
    code: Natural
    reason: str


# ------------------------------------------------------------------- to an ingress


class ModelInfo(Struct, frozen=True, array_like=True):
    """What it takes to decode requests for a model, and to encode responses."""

    name: str
    version: str
    target: str
    is_batched: bool
    signature: Signature
    may_repeat: bool = False
    goal_us: Natural = 0  #: 0: none


class RouteTable(Struct, frozen=True, array_like=True, tag=10):
    """Paths whose bodies are inputs, with their parameters; and all models. `requires_token`: a token is required.
    `repeatable`: paths of calls that may be asked again if it is not known what became of them. `goals_us`: latency goals of
    targets that have one, by path."""

    params: dict[bytes, list[Param]]
    models: list[ModelInfo]
    requires_token: bool
    repeatable: list[bytes] = []
    goals_us: dict[bytes, Natural] = {}


class CallLevel(Struct, frozen=True, array_like=True, tag=25):
    """The most calls a second of each tenant, times its weight, that are to be handed in from now on; 0: as many as there are."""

    per_s: float


class TenantFound(Struct, frozen=True, array_like=True, tag=27):
    """Answer to `TenantLookup`, if there is such a tenant."""

    authorization: bytes | None
    tenant: str
    weight: float


class ResultValue(Struct, frozen=True, array_like=True, tag=11):
    """A result, still encoded: text is made of it where it leaves. `row` counts the calls of one request."""

    number: Natural
    row: Natural
    value: Payload
    reply: Reply


class HttpResponse(Struct, frozen=True, array_like=True, tag=12):
    """A whole HTTP response."""

    number: Natural
    status: Natural
    body: bytes
    content_type: bytes
    extra: bytes


class ResponseStart(Struct, frozen=True, array_like=True, tag=13):
    """Start of a streamed HTTP response."""

    number: Natural
    status: Natural
    content_type: bytes
    extra: bytes


class ResponseChunk(Struct, frozen=True, array_like=True, tag=14):
    """Chunk of a streamed HTTP response."""

    number: Natural
    chunk: bytes


class ResponseEnd(Struct, frozen=True, array_like=True, tag=15):
    """End of a stream; with `failed`, the request that it answers came to nothing."""

    number: Natural
    failed: bool = False


class StopAccepting(Struct, frozen=True, array_like=True, tag=16):
    """Stop accepting; what is open is still answered."""


class InferError(Struct, frozen=True, array_like=True, tag=17):
    """Error of an inference request."""

    number: Natural
    problem: HttpProblem


class InferChunk(Struct, frozen=True, array_like=True, tag=18):
    """Chunk of the response to an inference request, still encoded."""

    number: Natural
    value: bytes


class RpcReply(Struct, frozen=True, array_like=True, tag=19):
    """Reply to `RpcRequest`: a message, or with a `code` an error."""

    number: Natural
    message: bytes
    code: Natural = 0
    text: str = ""


class CommitIntent(Struct, frozen=True, array_like=True, tag=21):
    """The call of this request is about to change state: it must not be asked again from now on."""

    number: Natural


class ResponseAborted(Struct, frozen=True, array_like=True, tag=23):
    """End of a stream that is not whole; a front door says it to itself as well."""

    number: Natural


class ResponseTaken(Struct, frozen=True, array_like=True, tag=40):
    """The client has taken so much of a stream, or there is room for it here: as `piece_cost` counts."""

    number: Natural
    size: Natural


class HeadCheckReply(Struct, frozen=True, array_like=True, tag=20):
    """Reply to `HeadCheckRequest`: the tenant, or why its body is not read."""

    number: Natural
    tenant: str
    error: str = ""
    hint: str = ""
    status: Natural = 401


class SocketAccepted(Struct, frozen=True, array_like=True, tag=33):
    """The handshake of a WebSocket is to be completed."""

    number: Natural
    protocol: str
    tenant: str
    headers: bytes


FromIngress = (
    CallRequest
    | RequestHead
    | InferRequest
    | ReplyConsumed
    | ClientGone
    | ForwardedRequest
    | RpcRequest
    | IngressReady
    | HeadCheckRequest
    | CommitAllowed
    | HeldBack
    | TenantLookup
    | SocketMessage
    | SocketLeft
    | ResponseTaken
)
ReplyMessage = (
    ResultValue
    | HttpResponse
    | ResponseStart
    | ResponseChunk
    | ResponseEnd
    | ResponseAborted
    | InferError
    | InferChunk
    | RpcReply
    | HeadCheckReply
    | SocketAccepted
    | SocketMessage
    | SocketTaken
    | SocketClose
)
"""Of the reply to a request."""

ToIngress = ReplyMessage | ReleaseSlots | RouteTable | CallLevel | TenantFound | StopAccepting | CommitIntent


class IngressMessages(Struct, frozen=True, array_like=True, tag=1):
    """All messages of an ingress in one turn of its loop. `sent_us` is when, on the machine's clock; 0: another machine's."""

    messages: list[FromIngress]
    sent_us: Natural = 0


class ControllerMessages(Struct, frozen=True, array_like=True, tag=1):
    """All messages to an ingress in one turn of the controller's loop."""

    messages: list[ToIngress]


def ingress_reader() -> FrameReader[IngressMessages]:
    return FrameReader(msgspec.msgpack.Decoder(IngressMessages))


def controller_reader() -> FrameReader[ControllerMessages | StopProcess]:
    return FrameReader(msgspec.msgpack.Decoder(ControllerMessages | StopProcess))


def pack_messages(messages: list[Struct], *, to_ingress: bool, sent_us: int = 0) -> bytearray:
    """Encode messages into as few frames as possible."""
    try:
        return pack(ControllerMessages(messages) if to_ingress else IngressMessages(messages, sent_us))  # type: ignore[arg-type]
    except FrameTooBig:
        if len(messages) < 2:
            raise
        half = len(messages) // 2
        first = pack_messages(messages[:half], to_ingress=to_ingress, sent_us=sent_us)
        return first + pack_messages(messages[half:], to_ingress=to_ingress, sent_us=sent_us)
