"""Frame protocol between a leader and its agents: typed msgpack, as between all processes of ours.

A connection belongs to one agent's incarnation under one leader's epoch, which its handshake has fixed. So frames do not repeat
them: what comes over a connection that is not the open one any more is not read. Times are durations, for clocks differ. Values
up to 64 KiB travel inside; larger ones are references, which the receiver fetches from the machine that has them
(`data_port.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lamina.core.actions import JobRef
from lamina.expr import Expr, Leaf
from lamina.gpu.protocol import ExecutorReport
from lamina.ipc.framing import FrameReader, Natural, WireMask
from lamina.sdk.app_state import StateCell, StateChanges
from lamina.sdk.spans import InnerSpan
from lamina.types import DeviceSpec, FunctionSpec
from lamina.values.references import ErrorInfo, NodeRef, Owner

PROTOCOL = 8
"""Version of these frames; both sides must speak the same one."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?\Z")]
"""Of a node: a host name. It becomes part of the ids of its devices."""

Text = Annotated[str, Meta(max_length=4_096)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


# ------------------------------------------------------------------------ handshake


class Challenge(_Message, frozen=True, tag=1):
    """First words of a leader: a number that the agent's proof must be made for."""

    protocol: Natural
    nonce: Digest
    epoch: Natural
    cell: Text


class BusyInstance(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an instance still runs for the leader before: all of it, as one batch."""

    mask: WireMask
    predicted_us: Natural
    ran_us: Natural
    cores: Natural = 0


class LoadedInstance(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An instance that an agent has loaded, and that its next leader may adopt."""

    name: Text
    function: Text
    device: Text
    version: Text
    sha256: Text  #: of the package it was loaded from
    mask: WireMask
    quota: float
    busy: BusyInstance | None = None
    segment_us: Natural = 0  #: as in `SegmentedOnNode`


class Hello(_Message, frozen=True, tag=2):
    """An agent asks to join. `proof` shows that it knows the join token, without telling it."""

    node: Name
    boot_us: Natural
    nonce: Digest
    proof: Digest
    data_address: Text
    devices: Annotated[list[DeviceSpec], Meta(max_length=256)]
    loaded: Annotated[list[LoadedInstance], Meta(max_length=10_000)]
    packages: Annotated[list[Sha256], Meta(max_length=10_000)]


class BeatHello(_Message, frozen=True, tag=3):
    """First words on the second connection of an agent, which beats alone use."""

    node: Name
    incarnation: Natural
    nonce: Digest
    proof: Digest


class Welcome(_Message, frozen=True, tag=4):
    """The agent is taken. `proof` shows that the leader knows the token too."""

    proof: Digest
    epoch: Natural
    cell: Text
    incarnation: Natural
    beat_us: Natural
    fence_us: Natural
    data_address: Text


class JoinRefused(_Message, frozen=True, tag=5):
    """Refusal of a hello: why, what to do, and the leader's address if this server does not lead."""

    code: Text
    message: Text
    hint: Text = ""
    leader: Text = ""


class IngressHello(_Message, frozen=True, tag=6):
    """A front door asks to send calls here: `data_address` and `owner` say where the large ones lie."""

    name: Name
    nonce: Digest
    proof: Digest
    data_address: Text
    owner: Owner
    speaks_grpc: bool = False


class IngressTraffic(_Message, frozen=True, tag=60):
    """Bytes between a front door and the gateway of the server that leads, either way; what they say is theirs."""

    data: bytes


# ------------------------------------------------------------------- leader to agent


class AppOnNode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Code of an app: its package, the file in it that is the app, and whose it is. `name`: of the function there, if that is
    another one (`TargetSource`)."""

    sha256: Text
    entry: Text
    package: NodeRef | None
    app: Text = ""
    tenant: Text = ""
    user: Natural = 0
    name: Text = ""


class LoadOnNode(_Message, frozen=True, tag=10):
    instance: Text
    device: Text
    mask: WireMask
    quota: float
    spec: FunctionSpec
    source: AppOnNode
    environment: dict[str, str]
    probe: bool = False


class AdoptOnNode(_Message, frozen=True, tag=11):
    """An instance that was found loaded has this name from now on."""

    instance: Text
    loaded: Text


class UnloadOnNode(_Message, frozen=True, tag=12):
    instance: Text


class KillOnNode(_Message, frozen=True, tag=13):
    instance: Text
    reason: Text


class ResizeOnNode(_Message, frozen=True, tag=14):
    instance: Text
    mask: WireMask
    quota: float


class JobOnNode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One job of a batch. `left_us`: until when it is worth running, from now; 0: without a limit."""

    ref: JobRef
    args: dict[str, Expr] | None
    leaves: list[tuple[Leaf, bytes | NodeRef]]
    left_us: Natural = 0
    is_streaming: bool = False
    tenant: str = ""
    traceparent: str = ""
    takes_input: bool = False  #: its client sends messages while it runs


class RunOnNode(_Message, frozen=True, tag=15):
    batch_id: Natural
    function: Text
    instance: Text
    device: Text
    mask: WireMask
    behind: Natural
    predicted_us: Natural
    cores: Natural
    jobs: list[JobOnNode]
    part: float = 1.0
    gives_way: bool = False
    overlaps: list[Natural] = []


class WatchOnNode(_Message, frozen=True, tag=24):
    """What an instance runs for the leader before has this number from now on; `FailedOnNode` says that it has ended."""

    batch_id: Natural
    instance: Text


class DropOnNode(_Message, frozen=True, tag=16):
    job_id: int


class InputOnNode(_Message, frozen=True, tag=21):
    """A message of the client for a call that runs; None: it sends no more."""

    call_id: str
    value: bytes | None


class ReleaseValues(_Message, frozen=True, tag=17):
    """Results that no step needs any more, by owner and slot."""

    slots: list[tuple[str, Natural]]


class StateAnswer(_Message, frozen=True, tag=18):
    """Answer to `ReadState`."""

    question: Natural
    cell: StateCell


class CommitAnswer(_Message, frozen=True, tag=19):
    """Answer to `CommitState`: the leader has what it needs of the batch."""

    question: Natural


class DrainNode(_Message, frozen=True, tag=20):
    """Nothing more will come: end when all is done."""


class DrainBegun(_Message, frozen=True, tag=23):
    """The node is being drained: it says so to every leader that it joins from now on."""


class MachineLost(_Message, frozen=True, tag=22):
    """The machine with this data port is lost: no value comes from there any more. To front doors too."""

    address: Text


# ------------------------------------------------------------------- agent to leader


class ReadyOnNode(_Message, frozen=True, tag=30):
    instance: Text
    load_us: Natural
    probes: list[tuple[Natural, Natural, Natural]] = []


class LostOnNode(_Message, frozen=True, tag=31):
    instance: Text
    reason: Text
    error: ErrorInfo | None = None


class SegmentedOnNode(_Message, frozen=True, tag=45):
    """Batches of an instance run in segments from now on, the longest of which takes so long."""

    instance: Text
    segment_us: Natural


class PausedOnNode(_Message, frozen=True, tag=46):
    """A batch has come to the end of a segment, and others have its slice: so much of it is left."""

    batch_id: Natural
    remaining_segments: Natural
    left_us: Natural


class DoneOnNode(_Message, frozen=True, tag=32):
    """Results of a batch, one per job, in order."""

    batch_id: Natural
    device_us: Natural
    results: list[bytes | NodeRef | ErrorInfo]
    spans: list[InnerSpan] = []
    is_warmup: bool = False


class FailedOnNode(_Message, frozen=True, tag=33):
    batch_id: Natural
    reason: Text


class HeartbeatOnNode(_Message, frozen=True, tag=34):
    call_id: str
    job_id: int
    alive_only: bool = False


class TakenOnNode(_Message, frozen=True, tag=43):
    """The function has taken so many more messages of the client of this call."""

    call_id: str
    count: Natural


class ChunkOnNode(_Message, frozen=True, tag=35):
    """One chunk of a streamed answer."""

    call_id: str
    job_id: int
    value: bytes


class OutputOnNode(_Message, frozen=True, tag=36):
    """A line that a function has printed."""

    function: Text
    instance: Text
    calls: tuple[str, ...]
    line: str


class ReportOnNode(_Message, frozen=True, tag=44):
    """State of the process that owns a GPU of this node: memory, clocks, power, temperature. Told once a second."""

    device: Text
    report: ExecutorReport


class PackageStored(_Message, frozen=True, tag=37):
    sha256: Sha256


class ReadState(_Message, frozen=True, tag=38):
    """Read request for a key of the state, on behalf of a function."""

    question: Natural
    function: Text
    call_id: str
    scope: str
    key: str


class CommitState(_Message, frozen=True, tag=39):
    """Changes of the state with the results of their batch: of each job either both count or neither, whatever becomes of this
    node. Large results are fetched before; they are named again in `DoneOnNode`."""

    question: Natural
    batch_id: Natural
    device_us: Natural
    results: list[bytes | NodeRef | ErrorInfo]
    changes: list[StateChanges]
    is_warmup: bool = False


class WantsToLeave(_Message, frozen=True, tag=40):
    """The agent was asked to end: it is to be drained."""


class Goodbye(_Message, frozen=True, tag=41):
    """Nothing is left to do here; the agent ends."""


# --------------------------------------------------------------------------- beats


class Beat(_Message, frozen=True, tag=50):
    """Sign of life of an agent, sent by a thread of its own. `is_fenced`: it has not heard from its leader for too long.
    `unheard_us`: for how long by now, which is no sign of a way that works in both directions."""

    seq: Natural
    rtt_us: Natural
    lag_us: Natural
    is_fenced: bool = False
    unheard_us: Natural = 0


class LeaseRenewed(_Message, frozen=True, tag=51):
    """Answer to a beat: the leader lives, and leads."""

    seq: Natural


ToAgent = (
    Challenge
    | Welcome
    | JoinRefused
    | LoadOnNode
    | AdoptOnNode
    | UnloadOnNode
    | KillOnNode
    | ResizeOnNode
    | RunOnNode
    | WatchOnNode
    | DropOnNode
    | InputOnNode
    | ReleaseValues
    | StateAnswer
    | CommitAnswer
    | DrainNode
    | DrainBegun
    | MachineLost
    | LeaseRenewed
    | IngressTraffic
)
FromAgent = (
    Hello
    | BeatHello
    | ReadyOnNode
    | LostOnNode
    | SegmentedOnNode
    | PausedOnNode
    | DoneOnNode
    | FailedOnNode
    | HeartbeatOnNode
    | TakenOnNode
    | ChunkOnNode
    | OutputOnNode
    | PackageStored
    | ReportOnNode
    | ReadState
    | CommitState
    | WantsToLeave
    | Goodbye
    | Beat
    | IngressHello
    | IngressTraffic
)


def to_agent_reader() -> FrameReader[ToAgent]:
    """Decoder of frames to an agent, for the agent."""
    return FrameReader(msgspec.msgpack.Decoder(ToAgent))


def from_agent_reader() -> FrameReader[FromAgent]:
    """Decoder of frames from an agent, for its leader."""
    return FrameReader(msgspec.msgpack.Decoder(FromAgent))
